//! Paged attention.
//!
//! A task is a key/value head of one sequence and a tile of its queries: all query heads that share the key/value
//! head, for a few tokens. It iterates over the cache in tiles of 64 positions, counted from position 0, with a
//! running maximum and sum (online softmax; Dao et al., arXiv:2205.14135):
//!
//! ```text
//! positions   0        64        128       192      kv_len
//!             |  tile   |  tile   |  tile   |  tile . |
//! row         scores = q K; p = exp(scores - max); sum, acc rescaled; acc += p V
//! ```
//!
//! A token in a [run](KvBatch::with_mutual) of tokens that see each other sees the positions up to the end of the run,
//! instead of those up to its own. So ends ascend from token to token there, too.
//!
//! A row sees the same tiles in the same order and the same lanes whether its token is computed alone, in a chunk, or
//! with others, and for any block size. Positions that a row does not see have probability zero and add nothing.
//! Groups that no row of a task sees are not read, and tiles without any are skipped. New sums start every 1024
//! positions, so that threads can share a long sequence (see `parts`).
//!
//! Where the sinks shift, other queries meet them: their sums come first, and are then combined with those of the
//! window like parts.
//!
//! A query that sees only selected positions (see `selected`) is a task by itself, over the copies of their keys and
//! values, as if these were all of its sequence.
//!
//! Values that are in the keys are copied from there, once for all rows of a task (see `latent`).
//!
//! With AVX2, int8 keys and values are multiplied with 16-bit queries and probabilities. The other kernels widen them
//! to bf16.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod call;
mod copies;
mod groups;
mod int8;
mod latent;
mod parts;
mod portable;
mod queries;
mod selected;
mod softmax;
mod task;

use half::bf16;
use half::slice::HalfFloatSliceExt;

use self::call::{AttentionCall, MAX_TOTALS_LEN};
use self::softmax::{RowBias, RowState};
use super::kv_cache::GROUP;
use super::{Cpu, KvCache, Simd};
use inflight_device::{AttentionParams, CpuKvDtype, HeadBiases, KvBatch, KvLayout};
use inflight_threads::DisjointSlice;

pub(super) use self::call::AttentionScratch;
pub(super) use self::selected::{Selected, num_dense};

/// Groups per tile.
const TILE_GROUPS: usize = 4;
/// Positions per tile.
const TILE: usize = TILE_GROUPS * GROUP;
/// The most rows that a kernel computes together, but for AMX's kernel.
const MAX_ROWS: usize = 6;
/// The most rows that any kernel computes together: the rows of a tile of AMX.
const MAX_SCORED_ROWS: usize = 16;

/// The work of one call: some rows and one tile.
struct AttentionTile {
    /// Queries in 16 bits, `[rows, head_dim]`.
    q: *const u16,
    /// Queries in f32, `[rows, head_dim]`.
    wide_q: *const f32,
    /// The scales of integer queries, `[rows]`.
    q_scales: *const f32,
    rows: usize,
    layout: KvLayout,
    keys: [*const u16; TILE_GROUPS],
    values: [*const u16; TILE_GROUPS],
    /// Groups to be prefetched: the next tile's, if they are known.
    keys_ahead: [*const u16; TILE_GROUPS],
    values_ahead: [*const u16; TILE_GROUPS],
    /// Groups with positions of the sequence; the pointers of the others are not used.
    num_groups: usize,
    scale: f32,
    /// The bound of scaled scores.
    soft_cap: Option<f32>,
    /// The scales of the keys and values of each position.
    scales: *const Scales,
    /// The scales of groups that are used as stored.
    stored_scales: [*const u16; TILE_GROUPS],
    /// The linear biases of the scores of each row, `[rows]`. Null: there are none.
    biases: *const RowBias,
    /// For each row, a mask of the positions that it sees; at least one.
    seen: *const u64,
    /// Scratch memory for scores, `[MAX_SCORED_ROWS, 64]`.
    scores: *mut f32,
    /// Scratch memory for the weights of values, in bf16 or as 16-bit integers.
    probabilities: *mut u16,
    /// The running maximum and sum, `[rows]`.
    state: *mut RowState,
    /// The running weighted sum of values, `[rows, padded_dim]`.
    acc: *mut f32,
}

impl AttentionTile {
    /// The linear biases of a row's scores, if there are any.
    ///
    /// # Safety
    ///
    /// The tile has that row, and the biases of all of its rows.
    unsafe fn bias(&self, row: usize) -> Option<RowBias> {
        // SAFETY: the caller's promise.
        (!self.biases.is_null()).then(|| unsafe { *self.biases.add(row) })
    }
}

/// The scales of the keys and values of a tile. Kernels apply them to scores and probabilities. Those of positions
/// that no row sees may be NaN.
struct Scales {
    keys: [f32; TILE],
    values: [f32; TILE],
}

impl Scales {
    /// For a bf16 cache. Multiplication by one changes no bit.
    const ONE: Self = Self {
        keys: [1.0; TILE],
        values: [1.0; TILE],
    };
}

/// The operands of a kernel.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Operands {
    /// Queries, keys and values in bf16. Values that are not seen are zero.
    Bf16,
    /// As [`Operands::Bf16`], from stored 8-bit integers.
    Widened,
    /// Queries in f32, keys and values in bf16.
    WideQueries,
    /// Queries as 16-bit integers, keys and values as the stored 8-bit integers.
    Integers,
}

/// Adds a tile to the running sums of its rows. Unsafe: the pointers and sizes must be valid, and the
/// machine must support the kernel's instruction set.
type AttentionKernel = unsafe fn(&AttentionTile);

/// The kernel for an instruction set and a cache type, with its operands.
fn kernel(simd: Simd, dtype: CpuKvDtype) -> (AttentionKernel, Operands) {
    let in_bf16 = match dtype {
        CpuKvDtype::Bf16 => Operands::Bf16,
        CpuKvDtype::Int8 => Operands::Widened,
    };
    match (simd, dtype) {
        #[cfg(target_arch = "x86_64")]
        (Simd::AmxBf16, _) => (amx::tile, in_bf16),
        #[cfg(target_arch = "x86_64")]
        (Simd::Avx512Bf16, _) => (avx512::tile, in_bf16),
        #[cfg(target_arch = "x86_64")]
        (Simd::Avx2, CpuKvDtype::Bf16) => (avx2::bf16_tile, Operands::WideQueries),
        #[cfg(target_arch = "x86_64")]
        (Simd::Avx2, CpuKvDtype::Int8) => (avx2::int8_tile, Operands::Integers),
        _ => (portable::tile, in_bf16),
    }
}

impl Cpu {
    /// Attention of the queries of each token over the positions of its sequence, up to its own. `q` has the rotated
    /// queries, `[m, q_len]`; the keys and values of the batch are already in the cache; `out` is `[m, num_q_heads *
    /// value_dim]`, by the [values](inflight_device::KvLayout::value_dim) of the cache. With sink logits,
    /// the probabilities of a query are those of a softmax with one more score, of no position.
    /// `sink_q` are the queries for the sinks, if they are others.
    ///
    /// # Panics
    ///
    /// If lengths or shapes do not agree.
    pub fn paged_attention(
        &mut self,
        (q, sink_q): (&[bf16], Option<&[bf16]>),
        params: (&AttentionParams, HeadBiases<'_>),
        batch: &KvBatch<'_>,
        cache: &KvCache,
        layer: usize,
        out: &mut [bf16],
    ) {
        self.attention_over((q, sink_q, None), params, batch, cache, layer, out);
    }

    /// As [`Cpu::paged_attention`]. With `selected` positions, queries see no others.
    pub(super) fn attention_over(
        &mut self,
        (q, sink_q, selected): (&[bf16], Option<&[bf16]>, Option<Selected<'_>>),
        (params, biases): (&AttentionParams, HeadBiases<'_>),
        batch: &KvBatch<'_>,
        cache: &KvCache,
        layer: usize,
        out: &mut [bf16],
    ) {
        let shape = params.shape;
        let layout = cache.layout(layer);
        assert_eq!(
            q.len(),
            batch.num_tokens() * shape.q_len(),
            "q is [m, q_len]"
        );
        assert!(
            sink_q.is_none_or(|sink_q| sink_q.len() == q.len()),
            "sink_q is [m, q_len]"
        );
        assert_eq!(
            out.len(),
            batch.num_tokens() * shape.num_q_heads * layout.value_dim(),
            "out is [m, num_q_heads * value_dim]"
        );
        assert!(
            layout.head_dim == shape.head_dim && layout.num_kv_heads == shape.num_kv_heads,
            "cache's shape"
        );
        assert!(
            shape.num_q_heads.is_multiple_of(shape.num_kv_heads),
            "{shape:?}: whole groups"
        );
        assert!(
            [biases.sink_logits, biases.slopes]
                .into_iter()
                .flatten()
                .all(|biases| biases.len() == shape.num_q_heads),
            "one for each query head"
        );
        assert!(cache.fits(batch), "batch of this cache");
        let sees_all = params.window.is_none()
            && !batch.has_mutual()
            && params.chunk.is_none()
            && !params.is_bidirectional
            && biases.slopes.is_none();
        assert!(
            selected.is_none() || sees_all,
            "positions are selected among all up to the query's"
        );
        assert!(params.scale > 0.0, "the largest score stays the largest");

        let cache = cache.layer(layer);
        let mut tile_starts = std::mem::take(&mut self.tile_starts);
        let operation = &AttentionCall::new(
            (self.simd, self.num_threads()),
            (params, biases),
            batch,
            &cache,
            (
                q.reinterpret_cast(),
                sink_q.map(|q| q.reinterpret_cast()),
                selected,
            ),
            &mut tile_starts,
        );
        let out = &DisjointSlice::new(out.reinterpret_cast_mut());
        let (pool, workers, num_tasks) = (&mut self.pool, &mut self.workers, operation.num_tasks());
        if let Some(num_parts) = operation.num_parts() {
            // Reserved in full, so that a step allocates nothing when a sequence grows.
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
