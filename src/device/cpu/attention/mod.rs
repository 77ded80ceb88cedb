//! Attention of a step's queries over the paged cache.
//!
//! A task is one sequence, one key/value head and a tile of its queries: all query heads that share the
//! key/value head, for a few tokens. It walks over the cache in tiles of 64 positions, counted from
//! position 0, with a running maximum and sum (online softmax; Dao et al., arXiv:2205.14135):
//!
//! ```text
//! positions   0        64        128       192      kv_len
//!             |  tile   |  tile   |  tile   |  tile . |
//! row         scores = q K; p = exp(scores - max); sum, acc rescaled; acc += p V
//! ```
//!
//! A row sees the same tiles in the same order with the same lanes whether its token came alone, in a
//! chunk, or with others, and however large a block is. What a row does not see has probability zero and
//! adds nothing; groups that no row of a task sees are not read, tiles are skipped. Every 1024 positions the
//! sums start anew, so that threads can share a long sequence (`parts`).
//!
//! With AVX2, keys and values in int8 are multiplied with queries and probabilities in 16 bits; the other kernels
//! take them as bf16.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod call;
mod copies;
mod groups;
mod int8;
mod parts;
mod portable;
mod queries;
mod softmax;
mod task;

use half::bf16;
use half::slice::HalfFloatSliceExt;

use self::call::{AttentionCall, MAX_TOTALS_LEN};
use self::softmax::RowState;
use super::kv_cache::GROUP;
use super::{Cpu, KvCache, Simd};
use crate::device::disjoint_slice::DisjointSlice;
use crate::device::{AttentionParams, KvBatch, KvDtype, KvLayout};

pub(super) use self::call::AttentionScratch;

/// Groups of a tile.
const TILE_GROUPS: usize = 4;
/// Positions of a tile.
const TILE: usize = TILE_GROUPS * GROUP;
/// Rows that a kernel works on at a time, at most.
const MAX_ROWS: usize = 6;

/// One step of some rows over one tile.
struct AttentionTile {
    /// Queries, `[rows, head_dim]`, unless they are wide.
    q: *const u16,
    /// Wide ones.
    wide_q: *const f32,
    /// The scales of queries that are integers, `[rows]`.
    q_scales: *const f32,
    rows: usize,
    layout: KvLayout,
    keys: [*const u16; TILE_GROUPS],
    values: [*const u16; TILE_GROUPS],
    /// The groups of the next tile as far as known, to be brought into the cache; else any others.
    keys_ahead: [*const u16; TILE_GROUPS],
    values_ahead: [*const u16; TILE_GROUPS],
    /// Groups that have positions at all; the pointers of the others are not used.
    num_groups: usize,
    scale: f32,
    /// What the keys and values of each position are multiplied by.
    scales: *const Scales,
    /// The scales of keys and values that are as they are stored.
    stored_scales: [*const u16; TILE_GROUPS],
    /// For each row, the positions of the tile that it sees: a bit for each, at least one of them set.
    seen: *const u64,
    /// Scratch for the rows that a kernel works on at a time, `[MAX_ROWS, 64]`.
    scores: *mut f32,
    /// The same, as the values are weighted with them: in bf16, or as integers of 16 bits.
    probabilities: *mut u16,
    /// The running maximum and sum, `[rows]`.
    state: *mut RowState,
    /// The running weighted sum of values, `[rows, padded_dim]`.
    acc: *mut f32,
}

/// What keys and values of the positions of a tile are multiplied by. The kernels multiply scores and
/// probabilities instead. What belongs to positions that nothing sees need not be a number.
struct Scales {
    keys: [f32; TILE],
    values: [f32; TILE],
}

impl Scales {
    /// Of keys and values that are stored as they are. A multiplication by one changes no bit.
    const ONE: Self = Self {
        keys: [1.0; TILE],
        values: [1.0; TILE],
    };
}

/// What a kernel takes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Operands {
    /// Queries, keys and values in bf16. What is not seen of a group's values is zero.
    Bf16,
    /// Queries as f32, keys and values in bf16.
    WideQueries,
    /// Queries as integers of 16 bits, keys and values as they are stored in 8.
    Integers,
}

/// Takes a tile into the rows' running sums. Unsafe: the pointers and sizes must be right, and the
/// machine must have the kernel's instruction set.
type AttentionKernel = unsafe fn(&AttentionTile);

/// The kernel for a cache of a type, and what it takes.
fn kernel(simd: Simd, dtype: KvDtype) -> (AttentionKernel, Operands) {
    match (simd, dtype) {
        #[cfg(target_arch = "x86_64")]
        (Simd::Avx512Bf16, _) => (avx512::tile, Operands::Bf16),
        #[cfg(target_arch = "x86_64")]
        (Simd::Avx2, KvDtype::Bf16) => (avx2::bf16_tile, Operands::WideQueries),
        #[cfg(target_arch = "x86_64")]
        (Simd::Avx2, KvDtype::Int8) => (avx2::int8_tile, Operands::Integers),
        _ => (portable::tile, Operands::Bf16),
    }
}

impl Cpu {
    /// For each token of the batch, attention of its queries over the positions of its sequence up to
    /// its own. `q` is `[m, q_len]`, rotated; keys and values of the batch are in the cache already;
    /// `out` is `[m, q_len]`.
    ///
    /// # Panics
    ///
    /// Lengths or shapes do not agree.
    pub fn paged_attention(
        &mut self,
        q: &[bf16],
        params: &AttentionParams,
        batch: &KvBatch<'_>,
        cache: &KvCache,
        layer: usize,
        out: &mut [bf16],
    ) {
        let shape = params.shape;
        let layout = cache.layout();
        assert_eq!(
            q.len(),
            batch.num_tokens() * shape.q_len(),
            "q is [m, q_len]"
        );
        assert_eq!(out.len(), q.len(), "out is [m, q_len]");
        assert!(
            layout.head_dim == shape.head_dim && layout.num_kv_heads == shape.num_kv_heads,
            "cache's shape"
        );
        assert!(
            shape.num_q_heads.is_multiple_of(shape.num_kv_heads),
            "{shape:?}: whole groups"
        );
        assert!(cache.fits(batch), "batch of this cache");
        assert!(params.scale > 0.0, "the largest score stays the largest");

        let cache = cache.layer(layer);
        let mut tile_starts = std::mem::take(&mut self.tile_starts);
        let operation = &AttentionCall::new(
            (self.simd, self.num_threads()),
            params,
            batch,
            &cache,
            q.reinterpret_cast(),
            &mut tile_starts,
        );
        let out = &DisjointSlice::new(out.reinterpret_cast_mut());
        let (pool, workers, num_tasks) = (&mut self.pool, &mut self.workers, operation.num_tasks());
        if let Some(num_parts) = operation.num_parts() {
            // All of it at once, so that a step allocates nothing when a sequence grows.
            if self.totals.is_empty() {
                self.totals = vec![0.0; MAX_TOTALS_LEN];
            }
            let totals = &DisjointSlice::new(&mut self.totals);
            pool.for_each(workers, num_parts, |worker, index| {
                operation.attend_part(index, &mut worker.attention, totals);
            });
            pool.for_each(workers, num_tasks, |_, index| {
                operation.join(index, totals, out);
            });
        } else {
            pool.for_each(workers, num_tasks, |worker, index| {
                operation.attend(index, &mut worker.attention, out);
            });
        }
        self.tile_starts = tile_starts;
    }
}
