//! The operations of a decoder on CPU: GEMM over packed weights, paged attention, and the small operations
//! between them.
//!
//! The principle is **batch invariance, bit for bit**. Every output element is reduced in a fixed order, which
//! depends only on its own operands: not on the number of rows, the index of the row, the number of threads, the
//! block size, or the chunks of a context. Threads only divide the outputs among them. Different instruction sets
//! may round differently; a model uses one.
//!
//! A [`Cpu`] owns its scratch memory, so nothing is allocated after the first steps. The threads belong to the
//! process, and several models share them in turns. Values that are not finite pass through every operation.

#[cfg(target_arch = "x86_64")]
mod amx;
mod attention;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod device;
mod elementwise;
mod embedding;
mod expand;
mod experts;
mod gemm;
mod indexer;
mod kv_cache;
mod latent;
mod layer_inputs;
mod lines;
mod logits;
mod low_rank;
mod math;
mod norms;
mod ops;
mod pack;
mod packed_matrix;
mod panel_order;
mod prefetch;
mod quantised;
mod rank_ops;
mod recurrence;
mod rope;
mod row_norms;
mod rows;
mod shrink;
mod simd;
mod states;
mod step;
mod tiles;

use std::num::NonZeroUsize;

use half::bf16;

use inflight_base::{CpuSet, LoadError};
use inflight_device::memory::Arena;
use inflight_numbers::QuantisedRow;
use inflight_threads::{Pool, Turn};

pub use embedding::Embedding;
pub use experts::ExpertRows;
pub use indexer::{CpuIndexer, CpuSelection};
pub use kv_cache::KvCache;
pub use layer_inputs::CpuLayerInputs;
pub use logits::CpuLogits;
pub use math::gelu;
pub use packed_matrix::PackedMatrix;
pub use quantised::{PANELS_VERSION, Rounded};
pub use rank_ops::CpuRanks;
pub use recurrence::{CpuHostStates, CpuRecurrentStates};
pub use row_norms::CpuRowNorms;
pub use rows::Rows;
pub use simd::Simd;
pub use states::CpuStates;
pub use step::CpuStep;
pub use tiles::CpuTiles;

/// How much of the machine to use. The default is everything that the process may use.
#[derive(Clone, Debug, Default)]
pub struct CpuOptions {
    /// Threads that compute, including the caller. By default as many as there are CPUs, and as the CPU affinity and
    /// the control group's quota of the process allow.
    pub num_threads: Option<NonZeroUsize>,
    /// The instruction set. By default the [best one](Simd::detect) that the machine supports.
    pub simd: Option<Simd>,
    /// The CPUs of each rank, this one's first. Empty: all that the process may use.
    pub rank_cpus: Vec<CpuSet>,
    /// Whether a rank that has whole layers cuts sums [into tiles](inflight_device::Tiling::Always), too.
    pub deterministic: bool,
}

/// The threads, the instruction set and the scratch memory of operations.
pub struct Cpu {
    simd: Simd,
    pool: Pool,
    workers: Vec<Worker>,
    /// The memory of packed matrices.
    weights: Arena,
    /// Activations padded to an even length, for a GEMM over an odd `k`.
    padded_x: Vec<bf16>,
    /// Some columns of activations, for a tile of inputs.
    part_x: Vec<bf16>,
    /// For [`Cpu::gemm_tiles`].
    tile_scratch: gemm::TileScratch,
    /// Activations in f32, for kernels that need them.
    wide_x: Vec<f32>,
    /// Activations rounded to 8 bits, for a GEMM over quantised weights.
    rounded_x: quantised::RoundedActivations,
    /// For [`Cpu::add_adapters`].
    adapters: low_rank::AdapterScratch,
    /// For products of segments of rows: the number of tasks before each segment.
    segment_starts: Vec<usize>,
    /// For [`Cpu::paged_attention`]: the number of query tiles before each span.
    tile_starts: Vec<usize>,
    /// For [`Cpu::paged_attention`]: the results of the parts of split tasks.
    totals: Vec<f32>,
    /// For [`Cpu::latent_attention`].
    latent: latent::LatentScratch,
    /// For [`Cpu::select_positions`].
    indexer: indexer::IndexerScratch,
    /// Whether it is one of several ranks, which wait for each other within a step and so take no turns.
    is_rank: bool,
}

/// Scratch memory of one thread.
#[derive(Default)]
struct Worker {
    gemm: lines::Lines<f32>,
    attention: attention::AttentionScratch,
    rope: rope::RopeScratch,
    routing: experts::RoutingScratch,
    recurrence: recurrence::RecurrenceScratch,
    /// A key of latent attention.
    key: latent::KeyScratch,
    /// Keys, queries and scores of an indexer.
    indexer: indexer::ScoreScratch,
    /// A row of activations, in the order of the columns of the weights.
    ordered_x: Vec<u16>,
    /// A row of weights to be packed.
    quantised_row: QuantisedRow,
}

impl Cpu {
    /// Starts the threads.
    ///
    /// # Errors
    ///
    /// If the machine does not support the instruction set in `options`, or refuses a thread.
    pub fn new(options: &CpuOptions) -> Result<Self, LoadError> {
        let simd = options.simd.unwrap_or_else(Simd::detect);
        if !simd.is_supported() {
            return Err(LoadError::Resource(format!(
                "this machine does not support {simd}: choose another instruction set, or leave the choice to detection"
            )));
        }
        let pool = Pool::of_device(options.num_threads, options.rank_cpus.first())?;
        Ok(Self {
            simd,
            workers: (0..pool.num_threads()).map(|_| Worker::default()).collect(),
            pool,
            weights: Arena::default(),
            padded_x: Vec::new(),
            part_x: Vec::new(),
            tile_scratch: gemm::TileScratch::default(),
            wide_x: Vec::new(),
            rounded_x: quantised::RoundedActivations::default(),
            adapters: low_rank::AdapterScratch::default(),
            segment_starts: Vec::new(),
            tile_starts: Vec::new(),
            totals: Vec::new(),
            latent: latent::LatentScratch::default(),
            indexer: indexer::IndexerScratch::default(),
            is_rank: false,
        })
    }

    /// The instruction set in use.
    pub fn simd(&self) -> Simd {
        self.simd
    }

    /// The threads.
    pub fn pool(&mut self) -> &mut Pool {
        &mut self.pool
    }

    /// The number of threads that compute.
    pub fn num_threads(&self) -> usize {
        self.workers.len()
    }

    /// Waits for its turn on the cores that it shares with others, for the operations of a step. Without it, each
    /// operation waits by itself.
    ///
    /// # Panics
    ///
    /// If it has its turn already.
    pub fn turn(&mut self) -> Turn {
        self.pool.turn()
    }
}
