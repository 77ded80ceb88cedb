//! L5: the machines that compute a model: the devices of a build, and several ranks of them. Rank 0 is in this process,
//! each of the others in a process of its own, on this host or on others. The ranks of a stage have shares of the same
//! layers; where there are several stages, `stage.rs` of the runner says what they exchange.
//!
//! ```text
//! gpus.rs         whether there are GPUs
//! cpus.rs         models on CPUs
//! cuda.rs         models on GPUs
//! task.rs         what a rank is told before it loads its share of the model
//! rank_device.rs  the devices that ranks compute with
//! rank_gpu.rs     the GPU of a rank
//! leader.rs       rank 0: has the others compute each call together with it
//! transport.rs    how they reach each other
//! rank_memory.rs  the memory that they can have
//! other_rank.rs   another rank, as rank 0 knows it
//! rank_process.rs its process, if rank 0 has started it, from the start to the end
//! serving.rs      what another rank does
//! rank_main.rs    what its process does
//! ```
//!
//! ```text
//! rank 0   engine -> plan | share of the call ------ logits | sampling -> engine
//!                  \ call      ||  ||  ||  sums     /
//! rank 1            \......| share of the call ----/        | waits for the next call
//! ```
//!
//! Only rank 0 has an engine and samples. It sends the others what their share of each model call depends on: tokens,
//! block tables, moves of blocks, and the rows whose logits are wanted. An engine on every rank, fed with the same
//! requests, would have to be given every sampled token, and whatever else decides a plan: cancellations, stop words,
//! guides, callbacks, beams, drafts. One that was forgotten would let the ranks diverge. A model call is a few
//! kilobytes and has all of it, so pauses, copies of blocks, drafts and beams need nothing here; and a rank needs no
//! tokenizer, no guides and no sampler. Every operation between ranks carries a hash of the plan, so a difference ends
//! the step with an error.
//!
//! Calls go over the connection that tells each side of the other's end, so that a rank waits for the next one without
//! a time limit and without spinning. Sums go through shared memory.
//!
//! In an MPI world both are messages of MPI, and `mpirun` ends all processes when one ends. A process of the world
//! computes one model after the other.

#![forbid(unsafe_code)]

mod cpus;
#[cfg(feature = "cuda")]
mod cuda;
mod gpus;
mod leader;
mod other_rank;
mod rank_device;
mod rank_gpu;
mod rank_main;
mod rank_memory;
mod rank_process;
mod serving;
mod task;
mod transport;

pub use cpus::{lead_on_cpus, load_on_cpus, load_rank_on_cpus};
#[cfg(feature = "cuda")]
pub use cuda::{CudaRunner, lead_on_gpus, load_on_gpu, load_rank_on_gpu, num_step_bytes};
pub use gpus::has_gpus;
pub use leader::{LeadingRunner, RankLimits, RankWatch};
pub use rank_device::RankDevice;
pub use rank_gpu::{GpuChoice, RankGpu};
pub use rank_main::rank_main;
pub use rank_memory::RankMemory;
pub use rank_process::RANK_PROGRAM;
pub use serving::{serve_mpi_rank, serve_next_mpi_model};
pub use transport::{RankConnections, RankTransport, leave_mpi_world};
