//! What a step of a model must read and compute on a GPU, kernel by kernel, and how long that takes at least. Arithmetic
//! on paper: nothing here was measured by this project.

use std::fmt::Write;

/// A GPU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gpu {
    /// Its name.
    pub name: &'static str,
    /// Bytes that kernels read in a second at best.
    pub bytes_per_s: f64,
    /// bf16 multiplications and additions in a second, in large products.
    pub flops: f64,
    /// Bytes that come to the host in a second.
    pub host_bytes_per_s: f64,
    /// What a kernel takes besides: its start, until all multiprocessors work, and its end.
    pub seconds_per_kernel: f64,
    /// Multiprocessors.
    pub num_multiprocessors: usize,
}

/// The H200 SXM: 4.8 TB/s, of which kernels reach some 4.3, and 989 TFLOP/s, of which large products reach some 790.
pub const H200: Gpu = Gpu {
    name: "H200",
    bytes_per_s: 4.3e12,
    flops: 790e12,
    host_bytes_per_s: 50e9,
    seconds_per_kernel: 2e-6,
    num_multiprocessors: 132,
};

/// The shape of a Llama model with bf16 weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    /// The residual stream.
    pub hidden: usize,
    /// Layers.
    pub layers: usize,
    /// Query heads, each `head_dim` wide.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// The inner activations.
    pub inter: usize,
    /// Tokens.
    pub vocab: usize,
}

/// Llama 3.1 8B.
pub const LLAMA_8B: Shape = Shape {
    hidden: 4096,
    layers: 32,
    heads: 32,
    kv_heads: 8,
    head_dim: 128,
    inter: 14_336,
    vocab: 128_256,
};

/// A kernel or matrix product in a generation step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Kernel {
    /// As in `kernels/`, or the projection.
    pub name: &'static str,
    /// Launches of a step.
    pub calls: usize,
    /// Bytes that a call reads and writes, each counted once.
    pub bytes: usize,
    /// Multiplications and additions of a call.
    pub operations: usize,
}

impl Kernel {
    /// The least time of a call: of its bytes or its operations, whichever is longer.
    pub fn seconds(&self, gpu: &Gpu) -> f64 {
        (self.bytes as f64 / gpu.bytes_per_s).max(self.operations as f64 / gpu.flops)
    }
}

/// Positions of a split of paged attention.
const SPLIT_LEN: usize = 256;

/// The kernels of a step in which each of `batch` sequences, with `context` positions in the cache, generates a token.
pub fn generation_step(shape: &Shape, batch: usize, context: usize) -> Vec<Kernel> {
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
    let product = |name, calls, n: usize, k: usize, bytes_out: usize| Kernel {
        name,
        calls,
        bytes: 2 * n * k + batch * (2 * k + bytes_out * n),
        operations: 2 * batch * n * k,
    };
    let rows = |name, calls, bytes_of_row: usize| Kernel {
        name,
        calls,
        bytes: batch * bytes_of_row,
        operations: 0,
    };
    let num_splits = context.div_ceil(SPLIT_LEN);
    let mut kernels = vec![
        rows("embed", 1, 6 * hidden),
        rows("rms_norm", 2 * layers + 1, 6 * hidden),
        product("qkv", layers, q + 2 * kv, hidden, 4),
        rows(
            "rope_and_store_bf16",
            layers,
            4 * (q + 2 * kv) + 2 * q + 4 * kv,
        ),
        Kernel {
            name: "paged_attention_generation",
            calls: layers,
            bytes: batch * (4 * context * kv + 4 * q),
            operations: 4 * batch * context * q,
        },
    ];
    if num_splits > 1 {
        // The partial results of each query head are written, and read again.
        let partial = 4 * (head_dim + 8) * heads * num_splits;
        kernels.push(rows("paged_attention_merge", layers, 2 * partial + 2 * q));
    }
    kernels.extend([
        product("o", layers, hidden, q, 8),
        product("gate_up", layers, 2 * inter, hidden, 4),
        rows("silu_mul", layers, 4 * 2 * inter + 2 * inter),
        product("down", layers, hidden, inter, 8),
        product("lm_head", 1, vocab, hidden, 4),
    ]);
    kernels
}

/// A step's time on paper, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepTime {
    /// Weights and keys and values once, or the products, whichever takes longer: the roofline.
    pub least: f64,
    /// The sum of the kernels' least times.
    pub kernels: f64,
    /// The same with what each kernel takes besides.
    pub expected: f64,
    /// Logits that the host reads, if it samples.
    pub logits: f64,
}

/// The time of a generation step.
pub fn step_time(gpu: &Gpu, shape: &Shape, batch: usize, context: usize) -> StepTime {
    let kernels = generation_step(shape, batch, context);
    let calls: usize = kernels.iter().map(|kernel| kernel.calls).sum();
    let sum: f64 = kernels
        .iter()
        .map(|kernel| kernel.calls as f64 * kernel.seconds(gpu))
        .sum();
    let Shape { hidden, layers, .. } = *shape;
    let (q, kv) = (
        shape.heads * shape.head_dim,
        shape.kv_heads * shape.head_dim,
    );
    let layer = hidden * (2 * q + 2 * kv + 3 * shape.inter);
    let weights = layers * layer + shape.vocab * hidden;
    let kv_bytes = batch * context * layers * 4 * kv;
    let products = 2.0 * (batch * weights) as f64 / gpu.flops;
    let read = 2.0 * weights as f64 / gpu.bytes_per_s;
    StepTime {
        least: read.max(products) + kv_bytes as f64 / gpu.bytes_per_s,
        kernels: sum,
        expected: sum + calls as f64 * gpu.seconds_per_kernel,
        logits: (4 * batch * shape.vocab) as f64 / gpu.host_bytes_per_s,
    }
}

/// What a kernel takes of a multiprocessor of compute capability 9.0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The kernel.
    pub name: &'static str,
    /// Registers of a thread, as NVRTC 12.4 reports them for sm_90.
    pub registers: usize,
    /// Threads of a block.
    pub threads: usize,
    /// Bytes of static and dynamic shared memory of a block.
    pub shared_bytes: usize,
}

/// The launches of a step.
pub const LAUNCHES: [Launch; 7] = [
    launch("embed", 32, 256, 0),
    launch("rms_norm", 46, 256, 128),
    launch("rope_and_store_bf16", 94, 256, 0),
    launch("paged_attention_generation_bf16_d128", 224, 32, 32 << 10),
    launch("paged_attention_merge", 148, 128, 0),
    launch(
        "paged_attention_context_bf16_d128",
        254,
        128,
        (32 << 10) + (34 << 10),
    ),
    launch("silu_mul", 44, 256, 0),
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
        const REGISTERS: usize = 65_536;
        const WARPS: usize = 64;
        const BLOCKS: usize = 32;
        const SHARED_BYTES: usize = 228 << 10;
        /// What the system takes of each block.
        const SYSTEM_BYTES: usize = 1 << 10;
        let warps = self.threads / 32;
        let by_registers = REGISTERS / (32 * self.registers).next_multiple_of(256) / warps;
        let by_shared = SHARED_BYTES / (self.shared_bytes + SYSTEM_BYTES);
        BLOCKS.min(by_registers).min(by_shared).min(WARPS / warps)
    }
}

/// `docs/src/gpu-figures.md`.
pub fn page() -> String {
    let (gpu, shape) = (&H200, &LLAMA_8B);
    let mut page = String::from(INTRODUCTION);
    write_kernels(&mut page, gpu, shape);
    write_steps(&mut page, gpu, shape);
    write_launches(&mut page, gpu);
    page
}

const BATCHES: [usize; 4] = [1, 32, 128, 256];

const INTRODUCTION: &str = "\
# Expected on a GPU

**Nothing on this page was measured on a GPU.** It says what a generation step of Llama 3.1 8B must read and compute in bf16,
kernel by kernel, and how long an H200 needs for that at least. `crates/roofline/src/gpu.rs` computes it, and
`UPDATE_DOCS=1 cargo test -p inflight-roofline` writes this page.

Assumed are 4.3 TB/s, of 4.8 that the data sheet promises; 790 TFLOP/s in bf16, of 989; 50 GB/s to the host; and 2 µs for each
kernel besides its work. The last two are guesses.
";

fn write_kernels(page: &mut String, gpu: &Gpu, shape: &Shape) {
    const CONTEXT: usize = 1024;
    *page += "\n## Kernels of a generation step, 1024 positions in each sequence\n\n";
    *page += "MB and GFLOP of one call, and its least time, by the number of sequences.\n\n";
    *page +=
        "| kernel | calls | 1: MB | GFLOP | µs | 32: MB | GFLOP | µs | 256: MB | GFLOP | µs |\n";
    *page += "|---|---|---|---|---|---|---|---|---|---|---|\n";
    let steps = [1, 32, 256].map(|batch| generation_step(shape, batch, CONTEXT));
    for (index, kernel) in steps[0].iter().enumerate() {
        let _ = write!(page, "| {} | {} |", kernel.name, kernel.calls);
        for step in &steps {
            let kernel = &step[index];
            let _ = write!(
                page,
                " {} | {} | {} |",
                digits(kernel.bytes as f64 / 1e6),
                digits(kernel.operations as f64 / 1e9),
                digits(1e6 * kernel.seconds(gpu))
            );
        }
        *page += "\n";
    }
    *page += "\nProjections compute in f32 and write f32, which is counted: `gate_up` of 256 rows writes 29 MB, and \
              `silu_mul` reads them again.\n";
}

fn write_steps(page: &mut String, gpu: &Gpu, shape: &Shape) {
    *page += "\n## Steps\n\n";
    *page += "`roofline`: weights, keys and values are read once, or the products are computed, whichever takes longer. \
              `kernels`: the sum of the least times above. `expected`: with 2 µs for each kernel. `logits`: what copying \
              all logits to the host adds, if it samples.\n\n";
    *page += "| sequences | positions | roofline ms | kernels ms | expected ms | tokens/s | share of roofline | logits ms |\n";
    *page += "|---|---|---|---|---|---|---|---|\n";
    for context in [192, 1024, 2048] {
        for batch in BATCHES {
            let time = step_time(gpu, shape, batch, context);
            let _ = writeln!(
                page,
                "| {batch} | {context} | {} | {} | {} | {} | {:.0} % | {} |",
                digits(1e3 * time.least),
                digits(1e3 * time.kernels),
                digits(1e3 * time.expected),
                digits(batch as f64 / time.expected),
                100.0 * time.least / time.expected,
                digits(1e3 * time.logits)
            );
        }
    }
    *page += "\nWith few sequences, the time between kernels decides whether 85 % of the roofline are reached; with many, \
              the f32 results of projections. Copying logits to the host takes a third of the step of 256 sequences \
              with 192 positions.\n";
}

fn write_launches(page: &mut String, gpu: &Gpu) {
    *page += "\n## Occupancy\n\n";
    let _ = writeln!(
        page,
        "Registers as NVRTC 12.4 reports them for sm_90, without spills; blocks and warps that one of the {} \
         multiprocessors runs at once.\n",
        gpu.num_multiprocessors
    );
    *page += "| kernel | registers | threads | shared bytes | blocks | warps of 64 |\n|---|---|---|---|---|---|\n";
    for launch in &LAUNCHES {
        let _ = writeln!(
            page,
            "| {} | {} | {} | {} | {} | {} |",
            launch.name,
            launch.registers,
            launch.threads,
            launch.shared_bytes,
            launch.blocks(),
            launch.blocks() * launch.threads / 32
        );
    }
    *page += "\nNorms have a block for each row: one sequence keeps one multiprocessor busy, and is bound by latency.\n";
}

/// Three significant digits, and at most three decimals.
fn digits(number: f64) -> String {
    if number == 0.0 {
        return "0".to_owned();
    }
    let decimals = (2 - number.abs().log10().floor() as i32).clamp(0, 3) as usize;
    format!("{number:.decimals$}")
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    #[test]
    fn products_read_all_weights_and_no_more() {
        let step = generation_step(&LLAMA_8B, 1, 1);
        let weights: usize = step
            .iter()
            .filter(|kernel| kernel.operations > 0 && kernel.name != "paged_attention_generation")
            .map(|kernel| kernel.calls * kernel.operations / 2)
            .sum();
        // All 8,030,261,248 parameters but the embedding and the norms.
        assert_eq!(weights, 8_030_261_248 - 128_256 * 4096 - 65 * 4096);
    }

    #[test]
    fn a_step_is_not_faster_than_its_roofline() {
        for batch in BATCHES {
            let time = step_time(&H200, &LLAMA_8B, batch, 1024);
            assert!(
                time.least < time.kernels && time.kernels < time.expected,
                "{time:?}"
            );
        }
        // 15.01 GB of weights and 134 MB of keys and values at 4.3 TB/s.
        let one = step_time(&H200, &LLAMA_8B, 1, 1024);
        assert!((one.least - 3.52e-3).abs() < 1e-5, "{one:?}");
    }

    #[test]
    fn blocks_are_those_in_the_heads_of_the_kernels() {
        let blocks = LAUNCHES.map(|launch| launch.blocks());
        assert_eq!(blocks, [8, 5, 2, 6, 3, 2, 5]);
    }

    #[test]
    fn the_page_in_the_book_is_this_one() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/src/gpu-figures.md");
        if std::env::var_os("UPDATE_DOCS").is_some() {
            fs::write(&path, page()).expect("docs/ can be written");
        }
        let written = fs::read_to_string(&path).expect("the page is there");
        assert_eq!(written, page(), "UPDATE_DOCS=1 writes it");
    }
}
