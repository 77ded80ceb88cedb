//! What a step of a model must read and compute on a GPU, kernel by kernel, and how long that takes at least.
//! Arithmetic on paper: nothing here was measured by this project.
//!
//! ```text
//! steps.rs       kernels of generation steps and of prompts, in bf16 and in FP8
//! kernels.rs     the kernels that these have not, each in one case
//! launches.rs    registers and shared memory of every kernel, and how many blocks run at once
//! ranks.rs       generation steps on several GPUs
//! page.rs        `docs/src/gpu-figures.md`
//! ```

mod kernels;
mod launches;
mod page;
mod ranks;
mod steps;

pub use kernels::{Case, other_kernels};
pub use launches::{LAUNCHES, Launch};
pub use page::page;
pub use ranks::{
    INFINIBAND, Links, NVLINK, Placement, RankPromptTime, RankStepTime, all_reduce_seconds,
    rank_prompt_time, rank_step_time,
};
pub use steps::{Kernel, Numbers, StepTime, Unit, generation_step, prompt_step, step_time};

/// A GPU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gpu {
    /// Its name.
    pub name: &'static str,
    /// Bytes that kernels read in a second at best.
    pub bytes_per_s: f64,
    /// bf16 multiplications and additions in a second, in large products.
    pub flops: f64,
    /// The same in FP8.
    pub fp8_flops: f64,
    /// The same in bf16 in the kernels of attention over a context, which shared memory bounds.
    pub context_flops: f64,
    /// The same in bf16 in the products with quantised weights, which the L1 cache bounds.
    pub fused_flops: f64,
    /// Bytes that come to the host in a second.
    pub host_bytes_per_s: f64,
    /// What a kernel takes besides: its start, until all multiprocessors work, and its end.
    pub seconds_per_kernel: f64,
    /// Multiprocessors.
    pub num_multiprocessors: usize,
}

/// The H200 SXM: 4.8 TB/s, of which kernels reach some 4.3, and 989 TFLOP/s (FP8: 1979), of which large products reach
/// some 790 (1580). The other two are two thirds of 380, and half of 500: the heads of `paged_attention_context.cu`,
/// and docs/src/gpus.md, derive them.
pub const H200: Gpu = Gpu {
    name: "H200",
    bytes_per_s: 4.3e12,
    flops: 790e12,
    fp8_flops: 1580e12,
    context_flops: 250e12,
    fused_flops: 250e12,
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

/// Llama 3.1 70B.
pub const LLAMA_70B: Shape = Shape {
    hidden: 8192,
    layers: 80,
    heads: 64,
    kv_heads: 8,
    head_dim: 128,
    inter: 28_672,
    vocab: 128_256,
};
