//! The operations of a decoder on CPU: GEMM over packed bf16 weights, paged attention, and the small
//! ones between them.
//!
//! The one idea: **batch invariance, bit for bit**. Every output element is reduced in one fixed order,
//! which depends on nothing but the element's own operands: not on the number of rows, a row's place,
//! the number of threads, the block size, nor on how a context was cut into chunks. Threads only ever
//! split the outputs. Different instruction sets may round differently; one process uses one.
//!
//! A [`Cpu`] owns the scratch memory, so after the first steps nothing allocates. The threads are the
//! process's: several share them, in turns.
//! Values that are not finite flow through every operation; none checks for them, none hangs on them.

mod attention;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod device;
mod elementwise;
mod gemm;
mod kv_cache;
mod math;
mod memory;
mod pack;
mod packed_matrix;
mod panel_order;
mod quantised;
mod rope;
mod rows;
mod simd;

use std::num::NonZeroUsize;

use half::bf16;

use crate::base::LoadError;
use crate::device::{Pool, QuantisedRow, Turn};

pub use device::{CpuStep, Embedding};
pub use kv_cache::KvCache;
pub use packed_matrix::PackedMatrix;
pub use quantised::{PANELS_VERSION, Rounded};
pub use rows::Rows;
pub use simd::Simd;

/// How much of the machine to use. The default is all that the process may use.
#[derive(Clone, Debug, Default)]
pub struct CpuOptions {
    /// Threads that compute, the calling one among them. By default as many as the process's CPU
    /// affinity and its control group's quota allow.
    pub num_threads: Option<NonZeroUsize>,
    /// The instruction set. By default the best that the machine has.
    pub simd: Option<Simd>,
}

/// Threads, instruction set and scratch memory: what every operation needs besides its operands.
pub struct Cpu {
    simd: Simd,
    pool: Pool,
    workers: Vec<Worker>,
    /// Activations with rows of even length, for a GEMM over an odd `k`.
    padded_x: Vec<bf16>,
    /// Activations as f32, for a kernel that wants them so.
    wide_x: Vec<f32>,
    /// Activations in 8 bits, for a GEMM over quantised weights.
    rounded_x: quantised::RoundedActivations,
    /// How many query tiles of [`Cpu::paged_attention`] come before each span.
    tile_starts: Vec<usize>,
    /// What the parts of its tasks come to, where they are split.
    totals: Vec<f32>,
}

/// Scratch memory of one thread.
#[derive(Default)]
struct Worker {
    gemm: Vec<f32>,
    attention: attention::AttentionScratch,
    rope: rope::RopeScratch,
    /// A row of activations in the order of the weights' columns.
    ordered_x: Vec<u16>,
    /// A row of weights that is being packed.
    quantised_row: QuantisedRow,
}

impl Cpu {
    /// Starts the threads.
    ///
    /// # Errors
    ///
    /// The machine lacks the instruction set that `options` ask for, or refuses a thread.
    pub fn new(options: &CpuOptions) -> Result<Self, LoadError> {
        let simd = options.simd.unwrap_or_else(Simd::detect);
        if !simd.is_supported() {
            return Err(LoadError::Resource(format!(
                "this machine has no {simd}: choose one that it has, or leave the choice to detection"
            )));
        }
        let num_threads = options
            .num_threads
            .or_else(|| std::thread::available_parallelism().ok())
            .map_or(1, NonZeroUsize::get);
        let pool = Pool::new(num_threads).map_err(|error| {
            LoadError::Resource(format!("cannot start {num_threads} threads: {error}"))
        })?;
        Ok(Self {
            simd,
            workers: (0..num_threads).map(|_| Worker::default()).collect(),
            pool,
            padded_x: Vec::new(),
            wide_x: Vec::new(),
            rounded_x: quantised::RoundedActivations::default(),
            tile_starts: Vec::new(),
            totals: Vec::new(),
        })
    }

    /// The instruction set in use.
    pub fn simd(&self) -> Simd {
        self.simd
    }

    /// The threads of this device.
    pub fn pool(&mut self) -> &mut Pool {
        &mut self.pool
    }

    /// The number of threads that compute.
    pub fn num_threads(&self) -> usize {
        self.workers.len()
    }

    /// Waits until it is this one's turn to use the cores that several share: for the operations of a step.
    /// Each of them waits for itself where nobody has done so.
    ///
    /// # Panics
    ///
    /// It is its turn already.
    pub fn turn(&mut self) -> Turn {
        self.pool.turn()
    }
}
