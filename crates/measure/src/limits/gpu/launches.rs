//! Registers, threads and shared memory of every kernel.

/// What a kernel takes of a multiprocessor of compute capability 9.0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The kernel.
    pub name: &'static str,
    /// Registers of a thread, as NVRTC 12.4 reports them for sm_90.
    pub registers: usize,
    /// Threads of a block.
    pub threads: usize,
    /// Bytes of static and dynamic shared memory of a block, the latter for Llama 3.1 8B's vocabulary, or for the
    /// kernel's head size and a context of more than 256 positions.
    pub shared_bytes: usize,
}

/// All kernels but those of mixtures of experts, latent attention and recurrent states, which no model of the page has.
pub const LAUNCHES: [Launch; 110] = [
    launch("add_bias", 32, 256, 0),
    launch("add_layer_normed", 40, 256, 256),
    launch("add_positions", 32, 256, 0),
    launch("add_rms_norm", 50, 256, 128),
    launch("add_rms_normed", 32, 256, 128),
    launch("add_rows", 24, 256, 0),
    launch("change_logits", 30, 512, 0),
    launch("copy_positions", 26, 256, 0),
    launch("dequantise_e2m1", 48, 256, 0),
    launch("dequantise_fp8", 32, 256, 0),
    launch("dequantise_int4", 46, 256, 0),
    launch("dequantise_int8", 32, 256, 0),
    launch("embed", 32, 256, 0),
    launch("embed_part", 32, 256, 0),
    launch("gather_columns", 24, 256, 0),
    launch("gather_rows", 32, 256, 0),
    launch("gather_rows_4", 28, 256, 0),
    launch("gelu", 32, 256, 0),
    launch("gelu_mul", 42, 256, 0),
    launch("gelu_tanh", 32, 256, 0),
    launch("gelu_tanh_mul", 44, 256, 0),
    launch("gemm_e2m1_m16", 149, 256, 0),
    launch("gemm_e2m1_m32", 215, 256, 0),
    launch("gemm_e2m1_m64", 234, 256, 0),
    launch("gemm_e2m1_m8", 120, 256, 0),
    launch("gemm_fp8_m16", 156, 256, 0),
    launch("gemm_fp8_m32", 223, 256, 0),
    launch("gemm_fp8_m64", 235, 256, 0),
    launch("gemm_fp8_m8", 122, 256, 0),
    launch("gemm_int4_m16", 149, 256, 0),
    launch("gemm_int4_m32", 215, 256, 0),
    launch("gemm_int4_m64", 236, 256, 0),
    launch("gemm_int4_m8", 121, 256, 0),
    launch("gemm_int8_m16", 157, 256, 0),
    launch("gemm_int8_m32", 225, 256, 0),
    launch("gemm_int8_m64", 238, 256, 0),
    launch("gemm_int8_m8", 123, 256, 0),
    launch("layer_norm", 40, 256, 256),
    launch("low_rank_embed", 32, 256, 0),
    launch("low_rank_expand", 32, 128, 0),
    launch("low_rank_finish", 28, 256, 0),
    launch("low_rank_replace", 32, 128, 0),
    launch("low_rank_shrink", 61, 256, 2048),
    launch("low_rank_take", 20, 256, 0),
    launch("paged_attention_context_bf16_d128", 168, 128, 67584),
    launch("paged_attention_context_bf16_d128_alibi", 212, 128, 67584),
    launch("paged_attention_context_bf16_d256", 255, 128, 165888),
    launch("paged_attention_context_bf16_d256_w1", 253, 32, 90624),
    launch("paged_attention_context_bf16_d64", 128, 128, 34816),
    launch("paged_attention_context_bf16_d64_alibi", 128, 128, 34816),
    launch("paged_attention_context_bf16_d96", 168, 128, 51200),
    launch("paged_attention_context_fp8_d128", 220, 128, 68096),
    launch("paged_attention_context_fp8_d128_alibi", 220, 128, 68096),
    launch("paged_attention_context_fp8_d256", 255, 128, 166400),
    launch("paged_attention_context_fp8_d256_w1", 255, 32, 91136),
    launch("paged_attention_context_fp8_d64", 128, 128, 35328),
    launch("paged_attention_context_fp8_d64_alibi", 128, 128, 35328),
    launch("paged_attention_context_fp8_d96", 167, 128, 51712),
    launch("paged_attention_context_int8_d128", 220, 128, 68096),
    launch("paged_attention_context_int8_d128_alibi", 220, 128, 68096),
    launch("paged_attention_context_int8_d256", 255, 128, 166400),
    launch("paged_attention_context_int8_d256_w1", 255, 32, 91136),
    launch("paged_attention_context_int8_d64", 128, 128, 35328),
    launch("paged_attention_context_int8_d64_alibi", 128, 128, 35328),
    launch("paged_attention_context_int8_d96", 167, 128, 51712),
    launch("paged_attention_generation_bf16_d128", 215, 32, 32768),
    launch("paged_attention_generation_bf16_d128_alibi", 217, 32, 32768),
    launch("paged_attention_generation_bf16_d256", 255, 32, 73728),
    launch("paged_attention_generation_bf16_d64", 181, 32, 16384),
    launch("paged_attention_generation_bf16_d64_alibi", 181, 32, 16384),
    launch("paged_attention_generation_bf16_d96", 204, 32, 24576),
    launch("paged_attention_generation_fp8_d128", 234, 32, 16896),
    launch("paged_attention_generation_fp8_d128_alibi", 240, 32, 16896),
    launch("paged_attention_generation_fp8_d256", 255, 32, 74240),
    launch("paged_attention_generation_fp8_d64", 166, 32, 8704),
    launch("paged_attention_generation_fp8_d64_alibi", 177, 32, 8704),
    launch("paged_attention_generation_fp8_d96", 203, 32, 12800),
    launch("paged_attention_generation_int8_d128", 234, 32, 16896),
    launch("paged_attention_generation_int8_d128_alibi", 234, 32, 16896),
    launch("paged_attention_generation_int8_d256", 255, 32, 74240),
    launch("paged_attention_generation_int8_d64", 166, 32, 8704),
    launch("paged_attention_generation_int8_d64_alibi", 177, 32, 8704),
    launch("paged_attention_generation_int8_d96", 204, 32, 12800),
    launch("paged_attention_merge", 146, 128, 0),
    launch("place_columns", 22, 256, 0),
    launch("qk_layer_norm", 32, 256, 0),
    launch("qk_norm", 15, 256, 128),
    launch("qk_norm_of_squares", 20, 256, 128),
    launch("qk_squares", 30, 256, 0),
    launch("quick_gelu", 32, 256, 0),
    launch("relu", 32, 256, 0),
    launch("relu_mul", 43, 256, 0),
    launch("replace_layer_normed", 40, 256, 256),
    launch("rms_norm", 46, 256, 128),
    launch("rope_and_store_bf16", 86, 256, 0),
    launch("rope_and_store_fp8", 85, 256, 0),
    launch("rope_and_store_int8", 85, 256, 0),
    launch("round_rows", 26, 256, 0),
    launch("round_to_fp8", 32, 256, 128),
    launch("sample", 58, 1024, 40896),
    launch("scale_rows", 22, 256, 0),
    launch("scale_sums", 37, 256, 0),
    launch("silu", 32, 256, 0),
    launch("silu_mul", 44, 256, 0),
    launch("squared_relu", 32, 256, 0),
    launch("squared_relu_mul", 43, 256, 0),
    launch("sum_ranks", 32, 256, 0),
    launch("sum_splits", 32, 256, 0),
    launch("transform_logits", 22, 256, 0),
    launch("xielu", 31, 256, 0),
];

const fn launch(
    name: &'static str,
    registers: usize,
    threads: usize,
    shared_bytes: usize,
) -> Launch {
    Launch {
        name,
        registers,
        threads,
        shared_bytes,
    }
}

impl Launch {
    /// Blocks that a multiprocessor runs at once. Limits: CUDA C++ Programming Guide, "Technical Specifications per
    /// Compute Capability", 9.0; registers are given to warps in units of 256.
    pub fn blocks(&self) -> usize {
        /// Of each of the four parts of a multiprocessor, which share its warps.
        const REGISTERS: usize = 16_384;
        const PARTS: usize = 4;
        const WARPS: usize = 64;
        const BLOCKS: usize = 32;
        const SHARED_BYTES: usize = 228 << 10;
        /// What the system takes of each block.
        const SYSTEM_BYTES: usize = 1 << 10;
        let warps = self.threads / 32;
        let warps_of_part = REGISTERS / (32 * self.registers).next_multiple_of(256);
        let by_registers = PARTS * warps_of_part / warps;
        let by_shared = SHARED_BYTES / (self.shared_bytes + SYSTEM_BYTES);
        BLOCKS.min(by_registers).min(by_shared).min(WARPS / warps)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    fn blocks(name: &str) -> usize {
        let launch = LAUNCHES.iter().find(|launch| launch.name == name);
        launch.expect("a kernel").blocks()
    }

    #[test]
    fn blocks_are_those_in_the_heads_of_the_kernels() {
        for (name, expected) in [
            ("paged_attention_generation_bf16_d64", 8),
            ("paged_attention_generation_int8_d64", 12),
            ("paged_attention_generation_bf16_d96", 8),
            ("paged_attention_generation_bf16_d128", 6),
            ("paged_attention_generation_int8_d128", 8),
            ("paged_attention_generation_bf16_d256", 3),
            ("paged_attention_merge", 3),
            ("paged_attention_context_bf16_d64", 4),
            ("paged_attention_context_int8_d96", 3),
            ("paged_attention_context_bf16_d128", 3),
            ("paged_attention_context_bf16_d256", 1),
            ("paged_attention_context_int8_d256_w1", 2),
            ("paged_attention_context_bf16_d64_alibi", 4),
            ("paged_attention_context_bf16_d128_alibi", 2),
            ("paged_attention_generation_int8_d64_alibi", 8),
            ("paged_attention_generation_bf16_d128_alibi", 6),
        ] {
            assert_eq!(blocks(name), expected, "{name}");
        }
    }

    /// How the names of kernels for mixtures of experts, latent attention and recurrent states begin.
    const OF_NO_MODEL: [&str; 21] = [
        "add_experts",
        "channel_delta_rule_",
        "convolve_channels",
        "convolve_values",
        "delta_rule_",
        "expert_",
        "gate_",
        "gated_convolution",
        "join_values",
        "latent_attention_",
        "quantised_expert_",
        "rotate_queries",
        "route_",
        "scale_inputs",
        "selective_scan_",
        "sort_experts",
        "split_attended",
        "split_queries",
        "state_space_",
        "store_latents",
        "tile_heads",
    ];

    #[test]
    fn registers_are_those_of_the_compiled_kernels() {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/kernels/registers.json");
        let Ok(compiled) = fs::read_to_string(&path) else {
            eprintln!("skipped: no kernels are compiled (`cargo xtask kernels`)");
            return;
        };
        let mut names = Vec::new();
        let mut kernels = compiled.split(" for sm_90\": {").peekable();
        while let Some(before) = kernels.next() {
            let Some(after) = kernels.peek() else { break };
            let name = before.rsplit('"').next().expect("a name");
            let (_, number) = after.split_once("\"registers\": ").expect("registers");
            let digits = number.find(|c: char| !c.is_ascii_digit()).expect("an end");
            let registers: usize = number[..digits].parse().expect("a number");
            if OF_NO_MODEL.iter().any(|kernels| name.starts_with(kernels)) {
                continue;
            }
            let launch = LAUNCHES.iter().find(|launch| launch.name == name);
            let launch = launch.unwrap_or_else(|| panic!("{name} is not listed"));
            assert_eq!(launch.registers, registers, "{name}");
            names.push(name);
        }
        // The quick tier has binaries of some sources.
        if compiled.contains(" for sm_80\": {") {
            assert_eq!(names.len(), LAUNCHES.len(), "{names:?}");
        }
        assert!(!names.is_empty());
    }
}
