//! The operations of a decoder on NVIDIA GPUs.
//!
//! ```text
//! gpu.rs          opening a GPU through the driver, which may not be there
//! kernels.rs      our kernels: the compiled images, and their launches
//! gemm.rs         matrix products by cuBLASLt, with a cache of plans
//! memory.rs       device memory, and pinned memory that steps are uploaded from
//! quantised.rs quantised_gemm.rs   weights of 4 and 8 bits, and products with them
//! fp8_gemm.rs     products of FP8 weights with FP8 activations
//! rows.rs matrix.rs kv_cache.rs   what operations read and write
//! logits.rs       rows of logits, what is sampled from them, and what of both the host gets
//! host_copies.rs  blocks of the KV cache, and snapshots of states, in pinned memory of the host
//! step.rs         one upload of everything that a step needs from the host
//! graphs.rs       generation steps that are recorded, and launched as a whole
//! adapters.rs adapter_memory.rs lru_arena.rs   adapters, and their copies in the memory of the GPU
//! attention_tiles.rs  which kernel computes which queries
//! attention.rs    its launches
//! products.rs     matrix products with weights of any kind
//! expert_rows.rs experts.rs   mixtures of experts
//! latent_rows.rs latent.rs    latent attention
//! projections.rs  projections, with and without adapters
//! norms.rs        norms of rows
//! output_layer.rs logits
//! moves.rs        rows and positions of the cache that move
//! nccl.rs ranks.rs rank_ops.rs stages.rs  one of several GPUs, each of which has a part of the model
//! stacks.rs       experts as one matrix
//! uploads.rs      what is uploaded besides matrices
//! ops.rs          the operations of a forward pass
//! device.rs       memory and steps, and the device as a whole
//! ```
//!
//! The driver and cuBLASLt are opened at run time, so the library loads on machines without them. Kernels are in
//! `kernels/*.cu`; the build embeds them where a compiler is set up (`cargo xtask kernels`).
//!
//! Work goes to one stream, in order. The host waits for it in [`StepIo::results`](inflight_device::StepIo::results)
//! and [`Ops::context_logits`](inflight_device::Ops::context_logits). After the first error nothing is launched any
//! more, and the step fails there.
//!
//! Attention, norms and rotations of a row do not depend on the rest of the step. A matrix product may: cuBLASLt splits
//! its sums differently for other numbers of rows, unless [`CudaOptions::deterministic`] forbids splits; and products
//! with quantised weights are computed in another way for many rows, unless it forbids that.

mod adapter_memory;
mod adapters;
mod attention;
mod attention_tiles;
mod device;
mod divisor;
mod expert_rows;
mod experts;
mod fp8_gemm;
mod gemm;
mod gpu;
mod graphs;
mod host_copies;
mod kernels;
mod kv_cache;
mod latent;
mod latent_rows;
mod logits;
mod lru_arena;
mod matrix;
mod memory;
mod moves;
mod nccl;
mod norms;
mod ops;
mod output_layer;
mod products;
mod projections;
mod quantised;
mod quantised_gemm;
mod rank_ops;
mod ranks;
mod recurrence;
mod recurrent_spans;
mod rows;
mod stacks;
mod stages;
mod step;
mod summed_products;
mod uploads;

use std::num::NonZeroUsize;
use std::sync::Arc;

use cudarc::driver::{CudaStream, DriverError};

use crate::adapters::Adapters;
use crate::attention::AttentionScratch;
use crate::fp8_gemm::Fp8Products;
use crate::gemm::Gemm;
use crate::graphs::{Graphs, StepMode};
use crate::kernels::Kernels;
use crate::latent_rows::Latents;
use crate::memory::{DeviceMemory, UploadBuffer};
use crate::quantised_gemm::QuantisedProducts;
use crate::ranks::GpuRanks;
use crate::step::StepBuffer;
use inflight_base::{LoadError, StepError};
use inflight_device::FirstStep;
use inflight_threads::Pool;

pub use gpu::{free_memory_bytes, num_gpus, uuid_and_free_bytes};
pub use kernels::has_kernels;
pub use rank_ops::CudaRanks;

/// Which GPU to use, and the host's part of the work.
#[derive(Clone, Debug)]
pub struct CudaOptions {
    /// The GPU, as the driver counts them.
    pub gpu: usize,
    /// The GPUs of all ranks of a model, if there are several, each as the driver of its host counts them.
    pub rank_gpus: Vec<usize>,
    /// Host threads that sample and convert weights. By default as many as the process may use.
    pub num_threads: Option<NonZeroUsize>,
    /// Whether matrix products of a row do not depend on the number of rows either.
    pub deterministic: bool,
    /// Whether activations are rounded to FP8 for products with FP8 weights that have one scale for each output.
    pub fp8_activations: bool,
    /// CUDA graphs of generation steps that are kept, at most; 0: every operation is launched by itself.
    pub max_graphs: usize,
}

impl Default for CudaOptions {
    fn default() -> Self {
        Self {
            gpu: 0,
            rank_gpus: Vec::new(),
            num_threads: None,
            deterministic: false,
            fp8_activations: false,
            max_graphs: 64,
        }
    }
}

/// A GPU, its kernels, and the scratch memory of operations.
pub struct Cuda {
    gpu: usize,
    stream: Arc<CudaStream>,
    kernels: Kernels,
    gemm: Gemm,
    pool: Pool,
    /// For rows that are moved, and for products that a kernel reads afterwards.
    scratch: DeviceMemory,
    /// There if a matrix is quantised.
    quantised: Option<QuantisedProducts>,
    /// Whether activations are rounded to FP8 where weights are.
    has_fp8_activations: bool,
    /// There if a matrix is multiplied with such activations.
    fp8: Option<Fp8Products>,
    /// Where tokens are sampled; there with rows of logits.
    sampled_tokens: Option<Arc<DeviceMemory>>,
    /// Steps that have begun.
    num_steps: u64,
    /// How the step is computed that has begun.
    mode: StepMode,
    /// Rows of that step, if they are rounded up for a graph.
    padded_rows: Option<usize>,
    /// The address of the number of rows that it has without these; 0 if there are none to tell apart.
    num_rows_of_step: u64,
    graphs: Graphs,
    /// There if it is one of several. Behind the graphs, which its operations may be in.
    ranks: Option<GpuRanks>,
    /// Steps that record them.
    first_steps: Vec<FirstStep>,
    /// The first error. Nothing is launched after it.
    failure: Option<StepError>,
    /// The upload buffer of a step, from [`Load::reserve`](inflight_device::Load::reserve) on.
    step: Option<StepBuffer>,
    attention: Option<AttentionScratch>,
    /// There if attention is latent.
    latents: Option<Latents>,
    /// There if sequences may have adapters.
    adapters: Option<Adapters>,
    /// Slots of recurrent states; 0 if no layer has any.
    num_state_slots: usize,
    /// What copies of blocks are uploaded through.
    copies: Option<UploadBuffer>,
}

impl Cuda {
    /// Opens a GPU.
    ///
    /// # Errors
    ///
    /// There is no driver, no cuBLASLt, no such GPU, or no kernels for it; or no memory or thread.
    pub fn new(options: &CudaOptions) -> Result<Self, LoadError> {
        let context = gpu::open(options.gpu)?;
        let failed = |error: DriverError| gpu::load_error("opening the GPU", &error);
        let stream = context.new_stream().map_err(failed)?;
        let kernels = Kernels::load(&context)?;
        if options.fp8_activations {
            kernels.check_fp8(options.gpu)?;
        }
        Ok(Self {
            gpu: options.gpu,
            kernels,
            gemm: Gemm::new(&stream, options.deterministic)?,
            pool: Pool::of_device(options.num_threads, None)?,
            sampled_tokens: None,
            num_steps: 0,
            mode: StepMode::Eager,
            padded_rows: None,
            num_rows_of_step: 0,
            graphs: Graphs::new(options.max_graphs),
            ranks: None,
            first_steps: Vec::new(),
            scratch: DeviceMemory::new(&stream, 0)?,
            quantised: None,
            has_fp8_activations: options.fp8_activations,
            fp8: None,
            failure: None,
            step: None,
            attention: None,
            latents: None,
            adapters: None,
            num_state_slots: 0,
            copies: None,
            stream,
        })
    }

    /// Keeps the first error of an operation, for the end of the step.
    fn record<T, E: std::fmt::Display>(
        &mut self,
        operation: &str,
        result: Result<T, E>,
    ) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(error) => {
                let failure = self.failed(operation, &error);
                self.failure.get_or_insert(failure);
                None
            }
        }
    }

    /// Whether operations go to the stream.
    fn is_launching(&self) -> bool {
        self.failure.is_none() && !matches!(self.mode, StepMode::Replaying(_))
    }

    /// # Errors
    ///
    /// An operation has failed.
    fn check(&self) -> Result<(), StepError> {
        self.failure.clone().map_or(Ok(()), Err)
    }

    /// The error of a step whose results could not be fetched.
    fn step_failed(&mut self, error: &DriverError) -> StepError {
        let failure = self.failed("computing a step", error);
        self.failure.get_or_insert(failure).clone()
    }

    fn failed(&self, operation: &str, error: &dyn std::fmt::Display) -> StepError {
        StepError(format!("GPU {}: {operation}: {error}", self.gpu))
    }
}

impl Drop for Cuda {
    /// A step that has failed may have left uploads, which read memory of the host that is freed next.
    fn drop(&mut self) {
        if let Some(ranks) = &mut self.ranks {
            ranks.end(&self.stream);
        }
        if let Err(error) = self.stream.synchronize() {
            log::debug!("GPU {}: ending its work: {error}", self.gpu);
        }
    }
}
