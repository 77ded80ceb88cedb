//! The launches of attention: their kernels, scratch memory and grids.

use std::f32::consts::LOG2_E;
use std::sync::Arc;

use cudarc::driver::sys::CUdevice_attribute;
use cudarc::driver::{CudaFunction, CudaStream, DeviceRepr, LaunchConfig, PushKernelArg};

use super::Cuda;
use super::attention_tiles::{
    AttentionTile, MAX_GENERATION_QUERIES, SPLIT_LEN, TileLists, WARP_QUERIES,
};
use super::gpu::load_error;
use super::kernels::{Kernels, launch};
use super::kv_cache::KvCache;
use super::memory::DeviceMemory;
use super::step::CudaStep;
use crate::base::LoadError;
use crate::device::{AttentionParams, KvDtype, StepCapacity};

/// Bytes of partial results at most. Sequences for which there is no room go to the context kernel, which has none.
pub(super) const MAX_PARTIAL_BYTES: usize = 256 << 20;
/// Blocks of the grid's first dimension at most, in kernels of which a block takes several entries.
const MAX_GRID: usize = 4096;
/// Blocks of the generation kernel that a multiprocessor has at a time, at most.
const BLOCKS_PER_MULTIPROCESSOR: usize = 8;
/// The head sizes that the kernels are compiled for; smaller heads are padded to the next.
const HEAD_DIMS: [usize; 4] = [64, 96, 128, 256];

/// `AttentionCall` of paged_attention.cuh.
#[repr(C)]
#[derive(Clone, Copy)]
struct AttentionCall {
    out: u64,
    partials: u64,
    q: u64,
    keys: u64,
    values: u64,
    key_scales: u64,
    value_scales: u64,
    block_tables: u64,
    tiles: u64,
    counts: u64,
    sink_logits: u64,
    exponent_scale: f32,
    num_kv_heads: i32,
    group: i32,
    head_dim: i32,
    block_size: i32,
    window: i32,
    num_sinks: i32,
    cap_shrink: f32,
    cap_grow: f32,
    /// What the compiler would leave undefined.
    padding: u32,
}

// SAFETY: it has the fields of the kernels' struct, in the same order, and holds only numbers.
unsafe impl DeviceRepr for AttentionCall {}

/// The kernels for a head size, and the memory for partial results.
pub(super) struct AttentionScratch {
    generation: CudaFunction,
    generation_shared_bytes: u32,
    context: CudaFunction,
    /// Without and with running totals, which positions from 256 on need.
    context_shared_bytes: [u32; 2],
    context_warps: usize,
    merge: CudaFunction,
    partials: DeviceMemory,
    /// Blocks of the generation kernel that keep the GPU busy.
    num_busy_blocks: usize,
}

impl AttentionScratch {
    /// Chooses the kernels for the heads of a cache, and reserves memory.
    ///
    /// # Errors
    ///
    /// There is no kernel for the head size, or not enough memory.
    pub fn new(
        stream: &Arc<CudaStream>,
        kernels: &Kernels,
        cache: &KvCache,
        capacity: &StepCapacity,
    ) -> Result<Self, LoadError> {
        let head_dim = cache.layout.head_dim;
        let Some(padded) = HEAD_DIMS.into_iter().find(|&dim| dim >= head_dim) else {
            return Err(LoadError::Resource(format!(
                "head_dim is {head_dim}, and the CUDA kernels compute heads of up to {}: serve the model with KIND_CPU",
                HEAD_DIMS[HEAD_DIMS.len() - 1]
            )));
        };
        let (dtype, scale_bytes) = match cache.layout.dtype {
            KvDtype::Bf16 => ("bf16", 0),
            KvDtype::Int8 => ("int8", 512),
            KvDtype::Fp8 => ("fp8", 512),
        };
        let max_shared_bytes = stream
            .context()
            .attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
            .map_err(|error| load_error("asking for the shared memory of a block", &error))?;
        let shared_bytes = |num_warps: usize, has_totals: bool| {
            let queries = if padded == 256 { num_warps * 8192 } else { 0 };
            let totals = match has_totals {
                true => num_warps * (64 * padded + 512),
                false => 0,
            };
            (256 * padded + scale_bytes + queries + totals) as u32
        };
        let fits = shared_bytes(4, true) <= max_shared_bytes.unsigned_abs();
        let (context_warps, suffix) = if fits { (4, "") } else { (1, "_w1") };
        let context_shared_bytes =
            [false, true].map(|has_totals| shared_bytes(context_warps, has_totals));
        let generation_shared_bytes = shared_bytes(1, false);
        let load = |kernel: &str, suffix: &str, shared_bytes| {
            let file = format!("paged_attention_{kernel}");
            kernels.function(
                &file,
                &format!("{file}_{dtype}_d{padded}{suffix}"),
                shared_bytes,
            )
        };
        let num_multiprocessors = stream
            .context()
            .attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
            .map_err(|error| load_error("asking for the number of multiprocessors", &error))?;
        let most = capacity
            .max_num_sequences
            .saturating_mul(MAX_GENERATION_QUERIES)
            .saturating_mul(capacity.max_seq_len.div_ceil(SPLIT_LEN))
            .saturating_mul(partial_bytes(cache));
        Ok(Self {
            generation: load("generation", "", generation_shared_bytes)?,
            generation_shared_bytes,
            context: load("context", suffix, context_shared_bytes[1])?,
            context_shared_bytes,
            context_warps,
            merge: kernels.function("paged_attention_merge", "paged_attention_merge", 0)?,
            partials: DeviceMemory::new(stream, most.min(MAX_PARTIAL_BYTES))?,
            num_busy_blocks: BLOCKS_PER_MULTIPROCESSOR
                * num_multiprocessors.unsigned_abs() as usize,
        })
    }

    /// Lists for steps of this capacity.
    pub fn lists(&self, cache: &KvCache, capacity: &StepCapacity) -> TileLists {
        let group = capacity.num_q_heads / cache.layout.num_kv_heads;
        let context_queries = self.context_warps * WARP_QUERIES;
        let max_partials = self.partials.num_bytes() / partial_bytes(cache);
        TileLists::new(group, context_queries, max_partials, capacity)
    }
}

impl Cuda {
    /// Launches the kernels that have queries to compute. `sink_logits`, `q` and `out` are addresses; without logits of no
    /// position, 0.
    #[allow(clippy::too_many_arguments, reason = "each is an operand")]
    pub(super) fn attend(
        &mut self,
        step: &CudaStep,
        params: &AttentionParams,
        sink_logits: u64,
        q: u64,
        cache: &KvCache,
        layer: usize,
        out: u64,
    ) {
        let Some(attention) = self.attention.take() else {
            return;
        };
        let arrays = cache.layer(layer);
        let lists = &step.lists;
        /// Bytes of the counts, before the tiles.
        const COUNTS_BYTES: u64 = size_of::<AttentionTile>() as u64;
        let num_kv_heads = cache.layout.num_kv_heads as u32;
        let call = |list: u64| AttentionCall {
            out,
            partials: attention.partials.address(),
            q,
            keys: arrays.keys,
            values: arrays.values,
            key_scales: arrays.key_scales,
            value_scales: arrays.value_scales,
            block_tables: step.block_tables,
            tiles: list + COUNTS_BYTES,
            counts: list,
            sink_logits,
            // Exponents of 2 instead of e.
            exponent_scale: params.scale * LOG2_E,
            num_kv_heads: num_kv_heads as i32,
            group: (params.shape.num_q_heads / params.shape.num_kv_heads) as i32,
            head_dim: params.shape.head_dim as i32,
            block_size: cache.layout.block_size.tokens().0 as i32,
            window: params
                .window
                .map_or(0, |window| window.get().min(i32::MAX as u32) as i32),
            num_sinks: params.num_sinks.min(i32::MAX as u32) as i32,
            cap_shrink: params
                .soft_cap
                .map_or(0.0, |cap| 2.0 * params.scale / cap * LOG2_E),
            cap_grow: params.soft_cap.map_or(0.0, |cap| cap / params.scale),
            padding: 0,
        };
        // Blocks take as many entries as there are. In a graph their number is that of the shape.
        let max_blocks = match step.shape {
            None => MAX_GRID,
            Some(_) => {
                let busy = attention.num_busy_blocks.div_ceil(num_kv_heads as usize);
                step.max_entries.min(busy)
            }
        };
        let grid = |num_entries: usize, depth: usize| {
            let num_blocks = match step.shape {
                None => num_entries.min(max_blocks),
                Some(_) => max_blocks,
            };
            (num_blocks as u32, num_kv_heads, depth as u32)
        };
        if lists.num_context > 0 {
            let config = LaunchConfig {
                // Each block computes one tile.
                grid_dim: (lists.num_context as u32, num_kv_heads, 1),
                block_dim: (32 * attention.context_warps as u32, 1, 1),
                shared_mem_bytes: attention.context_shared_bytes
                    [usize::from(lists.has_later_positions)],
            };
            launch!(
                self,
                attention.context,
                "paged_attention_context",
                config,
                call(lists.context)
            );
        }
        if lists.num_generation > 0 {
            let config = LaunchConfig {
                grid_dim: grid(lists.num_generation, 1),
                block_dim: (32, 1, 1),
                shared_mem_bytes: attention.generation_shared_bytes,
            };
            launch!(
                self,
                attention.generation,
                "paged_attention_generation",
                config,
                call(lists.generation)
            );
        }
        if lists.has_several_splits {
            let config = LaunchConfig {
                grid_dim: grid(lists.num_first_splits, lists.max_queries),
                block_dim: (128, 1, 1),
                shared_mem_bytes: 0,
            };
            launch!(
                self,
                attention.merge,
                "paged_attention_merge",
                config,
                call(lists.generation)
            );
        }
        self.attention = Some(attention);
    }
}

/// Bytes of a query's partial result over all key/value heads: `out`, its maximum and its sum, padded to 8 floats.
fn partial_bytes(cache: &KvCache) -> usize {
    4 * cache.layout.num_kv_heads * (cache.layout.head_dim + 2).next_multiple_of(8)
}
