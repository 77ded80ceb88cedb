//! Kernels that a plain step in bf16 or FP8 does not launch, each in one case.

use super::Shape;
use super::steps::{Kernel, Unit};

/// A kernel and what it is launched for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Case {
    /// What it computes, of a layer of a model.
    pub what: &'static str,
    /// One launch.
    pub kernel: Kernel,
}

/// Positions of a block of the KV cache.
const BLOCK_LEN: usize = 64;
/// Weights that share a scale.
const GROUP_SIZE: usize = 128;
/// The rank of adapters.
const ADAPTER_RANK: usize = 16;
/// Splits of a product with `gate_up`, and of one with `o`: num_splits of crates/device-cuda/src/quantised_gemm.rs.
const GATE_UP_SPLITS: usize = 2;
const O_SPLITS: usize = 16;

/// All of them, for a layer of a model.
pub fn other_kernels(shape: &Shape) -> Vec<Case> {
    let Shape {
        hidden,
        layers,
        heads,
        kv_heads,
        head_dim,
        inter,
        vocab,
    } = *shape;
    let (q, kv) = (heads * head_dim, kv_heads * head_dim);
    let moved = |name, what, bytes| Case {
        what,
        kernel: Kernel {
            name,
            calls: 1,
            bytes,
            operations: 0,
            unit: Unit::Bf16,
        },
    };
    let computed = |name, what, bytes, operations, unit| {
        let case = moved(name, what, bytes);
        Case {
            kernel: Kernel {
                operations,
                unit,
                ..case.kernel
            },
            ..case
        }
    };
    let gate_up = 2 * inter * hidden;
    // Codes of so many bits, and scales of 16 bits.
    let quantised = |bits: usize| gate_up * bits / 8 + 2 * gate_up / GROUP_SIZE;
    let fused = |name, what, bits, rows: usize| {
        let partials = 4 * GATE_UP_SPLITS * rows * 2 * inter;
        let bytes = quantised(bits) + 2 * rows * hidden + partials;
        computed(name, what, bytes, 2 * rows * gate_up, Unit::Fused)
    };
    let attention = |name, what, len: usize, kv_bytes: usize| {
        computed(
            name,
            what,
            len * (kv_bytes + 4 * q),
            2 * len * (len + 1) * q,
            Unit::Context,
        )
    };
    let codes = 2 * kv + 8 * kv_heads;
    let generation = |name| {
        computed(
            name,
            "256 sequences, 1024 positions",
            256 * (1024 * codes + 4 * q),
            4 * 256 * 1024 * q,
            Unit::Bf16,
        )
    };
    vec![
        moved("add_rms_norm", "256 rows", 256 * 14 * hidden),
        moved("add_bias", "qkv, 256 rows", 256 * 8 * (q + 2 * kv)),
        moved("layer_norm", "256 rows", 256 * 6 * hidden),
        moved(
            "add_layer_normed, add_rms_normed",
            "256 rows",
            256 * 12 * hidden,
        ),
        moved("replace_layer_normed", "256 rows", 256 * 8 * hidden),
        moved("round_rows", "256 rows", 256 * 6 * hidden),
        moved("add_rows", "256 rows", 256 * 12 * hidden),
        moved("scale_rows", "256 rows", 256 * 8 * hidden),
        moved("add_positions", "256 rows", 256 * 10 * hidden),
        moved("qk_norm, qk_layer_norm", "256 rows", 256 * 8 * (q + kv)),
        moved("qk_squares", "256 rows", 256 * 4 * (q + kv)),
        moved("qk_norm_of_squares", "256 rows", 256 * 8 * (q + kv)),
        moved(
            "rope_and_store_int8",
            "256 rows",
            256 * (4 * (q + 2 * kv) + 2 * q + codes),
        ),
        generation("paged_attention_generation_int8"),
        generation("paged_attention_generation_fp8"),
        attention(
            "paged_attention_context_bf16",
            "prompt of 1024",
            1024,
            4 * kv,
        ),
        attention(
            "paged_attention_context_bf16",
            "prompt of 8192",
            8192,
            4 * kv,
        ),
        attention("paged_attention_context_fp8", "prompt of 8192", 8192, codes),
        moved(
            "gelu_mul, gelu_tanh_mul, relu_mul, squared_relu_mul",
            "gate_up, 256 rows",
            256 * 10 * inter,
        ),
        moved(
            "silu, gelu, gelu_tanh, quick_gelu, relu, squared_relu, xielu",
            "up, 256 rows",
            256 * 6 * inter,
        ),
        moved("transform_logits", "256 rows", 256 * 8 * vocab),
        // The rows go to scratch memory, and back.
        moved(
            "gather_rows",
            "32 rows of 8192, and back",
            2 * 32 * 8 * hidden,
        ),
        moved(
            "copy_positions",
            "a block of 64 positions, all layers",
            2 * layers * BLOCK_LEN * 4 * kv,
        ),
        moved(
            "low_rank_shrink",
            "qkv, 32 rows with 32 adapters",
            32 * 3 * (2 * ADAPTER_RANK * hidden + 2 * hidden + 4 * ADAPTER_RANK),
        ),
        moved(
            "low_rank_expand",
            "qkv, 32 rows with 32 adapters",
            32 * (q + 2 * kv) * (2 * ADAPTER_RANK + 8),
        ),
        moved(
            "low_rank_take, low_rank_finish",
            "o, 32 rows with DoRA",
            32 * 12 * hidden,
        ),
        moved(
            "low_rank_embed",
            "32 rows with embeddings of their own",
            32 * 6 * hidden,
        ),
        moved(
            "low_rank_replace",
            "an output layer of its own",
            2 * vocab * hidden,
        ),
        fused("gemm_int4_m8, gemm_e2m1_m8", "gate_up, 1 row", 4, 1),
        fused("gemm_int4_m64, gemm_e2m1_m64", "gate_up, 64 rows", 4, 64),
        fused("gemm_int8_m8", "gate_up, 1 row", 8, 1),
        fused("gemm_int8_m64", "gate_up, 64 rows", 8, 64),
        fused("gemm_fp8_m8", "gate_up, 1 row", 8, 1),
        fused("gemm_fp8_m64", "gate_up, 64 rows", 8, 64),
        moved(
            "sum_splits",
            "gate_up, 64 rows, 2 splits",
            64 * 2 * inter * 4 * (GATE_UP_SPLITS + 1),
        ),
        moved(
            "sum_splits",
            "o, 64 rows, 16 splits",
            64 * hidden * 4 * (O_SPLITS + 2),
        ),
        moved(
            "dequantise_int4, dequantise_e2m1",
            "gate_up",
            quantised(4) + 2 * gate_up,
        ),
        moved(
            "dequantise_int8, dequantise_fp8",
            "gate_up",
            quantised(8) + 2 * gate_up,
        ),
        moved("gather_columns", "256 rows of o's inputs", 256 * 4 * q),
        moved("embed_part", "256 rows", 256 * 6 * hidden),
        moved("place_columns", "256 rows of logits", 256 * 8 * vocab),
        moved("sum_ranks", "256 rows of 8 ranks", 256 * 9 * 4 * hidden),
        moved("sample", "256 rows, without cuts", 256 * 2 * 4 * vocab),
        // A token of a list and its count, which is written twice.
        moved(
            "change_logits",
            "256 rows, 1024 tokens each",
            256 * 1024 * 16,
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::gpu::{LAUNCHES, LLAMA_8B, Numbers, generation_step, prompt_step};

    #[test]
    fn every_kernel_has_figures() {
        let mut names: Vec<_> = other_kernels(&LLAMA_8B)
            .iter()
            .map(|case| case.kernel.name)
            .collect();
        for numbers in [Numbers::Bf16, Numbers::Fp8] {
            let steps = [
                generation_step(&LLAMA_8B, numbers, 1, 1024),
                prompt_step(&LLAMA_8B, numbers, 1024),
            ];
            names.extend(steps.iter().flatten().map(|kernel| kernel.name));
        }
        let known: Vec<_> = names
            .iter()
            .flat_map(|names| names.split(", "))
            .map(plain)
            .collect();
        for launch in LAUNCHES {
            let name = plain(launch.name);
            let stem = ["_bf16", "_int8", "_fp8"]
                .iter()
                .find_map(|numbers| name.strip_suffix(numbers));
            let has_figures =
                known.contains(&name) || stem.is_some_and(|stem| known.contains(&stem));
            assert!(has_figures, "{} has no figures", launch.name);
        }
    }

    /// A kernel's name without its variant for a head size, a unit or a number of rows.
    fn plain(mut name: &str) -> &str {
        let variants = [
            "_4", "_w1", "_alibi", "_d64", "_d96", "_d128", "_d256", "_m8", "_m16", "_m32", "_m64",
        ];
        while let Some(shorter) = variants.iter().find_map(|end| name.strip_suffix(end)) {
            name = shorter;
        }
        name
    }
}
