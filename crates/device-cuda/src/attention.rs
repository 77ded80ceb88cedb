//! The launches of attention: their kernels, scratch memory and grids.

use std::f32::consts::LOG2_E;
use std::sync::Arc;

use cudarc::driver::sys::CUdevice_attribute;
use cudarc::driver::{CudaFunction, CudaStream, DeviceRepr, LaunchConfig, PushKernelArg};

use super::Cuda;
use super::attention_tiles::{
    AttentionTile, MAX_GENERATION_QUERIES, SPLIT_LEN, TileLists, WARP_QUERIES,
};
use super::divisor::Divisor;
use super::gpu::load_error;
use super::kernels::{Kernels, launch};
use super::kv_cache::KvCache;
use super::memory::DeviceMemory;
use super::step::CudaStep;
use inflight_base::LoadError;
use inflight_device::{AttentionParams, KvDtype, KvLayout, KvValues, StepCapacity};

/// Bytes of partial results at most. Sequences for which there is no room go to the context kernel, which has none.
pub(super) const MAX_PARTIAL_BYTES: usize = 256 << 20;
/// Blocks of the grid's first dimension at most, in kernels of which a block takes several entries.
const MAX_GRID: usize = 4096;
/// The head sizes that the kernels are compiled for; smaller heads are padded to the next.
const HEAD_DIMS: [usize; 4] = [64, 96, 128, 256];
/// Head sizes of the ALiBi kernels. Larger heads would spill registers.
const BIASED_HEAD_DIMS: [usize; 2] = [64, 128];
/// Elements of a key, and of a latent in it, that the kernels of latent attention compute at most.
const MAX_LATENT_DIMS: [usize; 2] = [576, 512];

/// `AttentionCall` of paged_attention.cuh.
#[repr(C)]
#[derive(Clone, Copy)]
struct AttentionCall {
    out: u64,
    partials: u64,
    q: u64,
    sink_q: u64,
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
    block_divisor: Divisor,
    window: i32,
    num_sinks: i32,
    cap_shrink: f32,
    cap_grow: f32,
    key_dim: i32,
    slopes: u64,
}

// SAFETY: it has the fields of the kernels' struct, in the same order, and holds only numbers.
unsafe impl DeviceRepr for AttentionCall {}

/// Groups of query heads, each of which reads the same keys: as many as a launch has.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeadGroups {
    pub num_groups: usize,
    /// Query heads of a group.
    pub group: usize,
    /// Elements of a query and of a key.
    pub key_dim: usize,
    /// Elements of a value and of a result.
    pub value_dim: usize,
}

impl HeadGroups {
    /// The groups of key/value heads, which have keys and values of their own.
    pub fn of_heads(layout: &KvLayout, num_q_heads: usize) -> Self {
        Self {
            num_groups: layout.num_kv_heads,
            group: num_q_heads / layout.num_kv_heads,
            key_dim: layout.head_dim,
            value_dim: layout.head_dim,
        }
    }

    /// Bytes of a query's partial result over all groups: `out`, its maximum and its sum, padded to 8 floats.
    fn partial_bytes(&self) -> usize {
        4 * self.num_groups * (self.value_dim + 2).next_multiple_of(8)
    }
}

/// The operands of attention but for the cache: addresses.
#[derive(Clone, Copy)]
pub(super) struct Attended {
    /// Groups of the launch.
    pub groups: HeadGroups,
    /// The attention-sink logit of each head; 0: there are none.
    pub sink_logits: u64,
    /// Of each head, what a score loses for each position between key and query; 0: nothing.
    pub slopes: u64,
    pub q: u64,
    /// The queries for the sinks; 0: they are the same.
    pub sink_q: u64,
    pub out: u64,
}

/// The kernels for a head size, and the memory for partial results.
pub(super) struct AttentionScratch {
    generation: CudaFunction,
    generation_shape: BlockShape,
    context: CudaFunction,
    /// Without and with running totals, which positions from 256 on need.
    context_shapes: [BlockShape; 2],
    merge: CudaFunction,
    /// Whether these kernels add linear biases to scores.
    has_slopes: bool,
    partials: DeviceMemory,
    /// Blocks of the generation kernel that the GPU holds at a time.
    num_busy_blocks: usize,
    /// The most groups of a launch.
    groups: HeadGroups,
}

/// What a block of a kernel takes.
#[derive(Clone, Copy)]
struct BlockShape {
    num_queries: usize,
    num_threads: u32,
    shared_bytes: u32,
}

/// The names of kernels, and their blocks.
struct Choice {
    /// The file, and the kernel in it.
    generation: [String; 2],
    generation_shape: BlockShape,
    context: [String; 2],
    context_shapes: [BlockShape; 2],
}

impl Choice {
    /// The kernels of paged attention, with or without linear biases of scores.
    fn of_heads(
        layout: &KvLayout,
        has_slopes: bool,
        max_shared_bytes: usize,
    ) -> Result<Self, LoadError> {
        let head_dim = layout.head_dim;
        let (dims, kind, biases) = match has_slopes {
            true => (
                &BIASED_HEAD_DIMS[..],
                " with linear biases (ALiBi)",
                "_alibi",
            ),
            false => (&HEAD_DIMS[..], "", ""),
        };
        let Some(&padded) = dims.iter().find(|&&dim| dim >= head_dim) else {
            return Err(LoadError::Resource(format!(
                "head_dim is {head_dim}, and the CUDA kernels compute heads{kind} of up to {}: serve the model with KIND_CPU",
                dims[dims.len() - 1]
            )));
        };
        let (dtype, has_codes) = match layout.dtype {
            KvDtype::Bf16 => ("bf16", false),
            KvDtype::Int8 => ("int8", true),
            KvDtype::Fp8 => ("fp8", true),
        };
        let shape = |num_warps: usize, has_totals: bool| {
            let queries = if padded == 256 { num_warps * 8192 } else { 0 };
            let totals = match has_totals {
                true => num_warps * (64 * padded + 512),
                false => 0,
            };
            // One warp widens codes of such heads in registers.
            let tiles = match has_codes {
                false => 256 * padded,
                true if num_warps == 1 && padded <= 128 => 128 * padded + 512,
                true => 256 * padded + 512,
            };
            BlockShape {
                num_queries: num_warps * WARP_QUERIES,
                num_threads: 32 * num_warps as u32,
                shared_bytes: (tiles + queries + totals) as u32,
            }
        };
        let fits = shape(4, true).shared_bytes as usize <= max_shared_bytes;
        let (num_warps, suffix) = if fits { (4, "") } else { (1, "_w1") };
        let names = |kernel: &str, suffix: &str| {
            let file = format!("paged_attention_{kernel}");
            let name = format!("{file}_{dtype}_d{padded}{suffix}{biases}");
            [file, name]
        };
        Ok(Self {
            generation: names("generation", ""),
            generation_shape: shape(1, false),
            context: names("context", suffix),
            context_shapes: [false, true].map(|has_totals| shape(num_warps, has_totals)),
        })
    }

    /// The kernels of latent attention.
    fn of_latents(
        layout: &KvLayout,
        latent_dim: usize,
        max_shared_bytes: usize,
    ) -> Result<Self, LoadError> {
        let key_dim = layout.head_dim;
        let [max_key_dim, max_latent_dim] = MAX_LATENT_DIMS;
        if key_dim > max_key_dim || latent_dim > max_latent_dim {
            return Err(LoadError::Resource(format!(
                "the KV cache holds latents of {latent_dim} elements in keys of {key_dim}, and the CUDA kernels compute up to \
                 {max_latent_dim} in {max_key_dim}: serve the model with KIND_CPU"
            )));
        }
        assert_eq!(layout.dtype, KvDtype::Bf16, "latents are stored in bf16");
        // Warps that share 16 queries are a team; see the head of the kernels' file.
        let shape = |num_teams: usize, num_buffers: usize, has_totals: bool| {
            let totals = if has_totals { 34816 } else { 0 };
            BlockShape {
                num_queries: num_teams * WARP_QUERIES,
                num_threads: 128 * num_teams as u32,
                shared_bytes: (num_buffers * 36864 + num_teams * (8192 + totals)) as u32,
            }
        };
        let fits = shape(2, 2, true).shared_bytes as usize <= max_shared_bytes;
        let (num_teams, num_buffers, suffix) = if fits { (2, 2, "") } else { (1, 1, "_t1") };
        let names = |kernel: &str| {
            let file = "latent_attention";
            [file.to_owned(), format!("{file}_{kernel}")]
        };
        Ok(Self {
            generation: names("generation"),
            generation_shape: shape(1, 2, false),
            context: names(&format!("context{suffix}")),
            context_shapes: [false, true]
                .map(|has_totals| shape(num_teams, num_buffers, has_totals)),
        })
    }
}

impl AttentionScratch {
    /// Chooses the kernels for the heads of a cache, and reserves memory for launches of up to `groups`.
    ///
    /// # Errors
    ///
    /// There is no kernel for the head size, or not enough memory.
    pub fn new(
        stream: &Arc<CudaStream>,
        kernels: &Kernels,
        layout: &KvLayout,
        groups: HeadGroups,
        capacity: &StepCapacity,
    ) -> Result<Self, LoadError> {
        let attribute = |attribute, what: &str| {
            let value = stream.context().attribute(attribute);
            let value = value.map_err(|error| load_error(what, &error))?;
            Ok::<_, LoadError>(value.unsigned_abs() as usize)
        };
        let max_shared_bytes = attribute(
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            "asking for the shared memory of a block",
        )?;
        let num_multiprocessors = attribute(
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
            "asking for the number of multiprocessors",
        )?;
        let choice = match layout.values {
            KvValues::OfTheirOwn(_) => {
                Choice::of_heads(layout, capacity.has_slopes, max_shared_bytes)?
            }
            KvValues::InKeys(latent_dim) => {
                Choice::of_latents(layout, latent_dim, max_shared_bytes)?
            }
        };
        let load = |[file, name]: &[String; 2], shape: BlockShape| {
            kernels.function(file, name, shape.shared_bytes)
        };
        let most = capacity
            .max_num_sequences
            .saturating_mul(MAX_GENERATION_QUERIES)
            .saturating_mul(capacity.max_seq_len.div_ceil(SPLIT_LEN))
            .saturating_mul(groups.partial_bytes());
        let generation_shape = choice.generation_shape;
        let generation = load(&choice.generation, generation_shape)?;
        let blocks_per_multiprocessor = generation
            .occupancy_max_active_blocks_per_multiprocessor(
                generation_shape.num_threads,
                generation_shape.shared_bytes as usize,
                None,
            )
            .map_err(|error| load_error("asking how many blocks a multiprocessor holds", &error))?;
        Ok(Self {
            generation,
            generation_shape,
            context: load(&choice.context, choice.context_shapes[1])?,
            context_shapes: choice.context_shapes,
            merge: kernels.function("paged_attention_merge", "paged_attention_merge", 0)?,
            has_slopes: capacity.has_slopes,
            partials: DeviceMemory::new(stream, most.min(MAX_PARTIAL_BYTES))?,
            num_busy_blocks: blocks_per_multiprocessor as usize * num_multiprocessors,
            groups,
        })
    }

    /// Lists for steps of this capacity.
    pub fn lists(&self, capacity: &StepCapacity) -> TileLists {
        let max_partials = self.partials.num_bytes() / self.groups.partial_bytes();
        let context_queries = self.context_shapes[0].num_queries;
        TileLists::new(self.groups.group, context_queries, max_partials, capacity)
    }

    /// The most groups of a launch.
    pub fn groups(&self) -> HeadGroups {
        self.groups
    }
}

impl Cuda {
    /// Launches the kernels that have queries to compute.
    pub(super) fn attend(
        &mut self,
        step: &CudaStep,
        params: &AttentionParams,
        attended: Attended,
        cache: &KvCache,
        layer: usize,
    ) {
        let Some(attention) = self.attention.take() else {
            return;
        };
        let Attended {
            groups,
            sink_logits,
            slopes,
            q,
            sink_q,
            out,
        } = attended;
        assert_eq!(slopes != 0, attention.has_slopes, "kernels for this model");
        let arrays = cache.layer(layer);
        let lists = &step.lists;
        /// Bytes of the counts, before the tiles.
        const COUNTS_BYTES: u64 = size_of::<AttentionTile>() as u64;
        let num_groups = groups.num_groups as u32;
        let block_size = cache.layout.block_size.tokens().0;
        let call = |list: u64| AttentionCall {
            out,
            partials: attention.partials.address(),
            q,
            sink_q,
            keys: arrays.keys,
            values: arrays.values,
            key_scales: arrays.key_scales,
            value_scales: arrays.value_scales,
            block_tables: step.block_tables(cache.group(layer)),
            tiles: list + COUNTS_BYTES,
            counts: list,
            sink_logits,
            // Exponents of 2 instead of e.
            exponent_scale: params.scale * LOG2_E,
            num_kv_heads: num_groups as i32,
            group: groups.group as i32,
            head_dim: groups.value_dim as i32,
            block_size: block_size as i32,
            block_divisor: Divisor::new(block_size),
            window: params
                .window
                .map_or(0, |window| window.get().min(i32::MAX as u32) as i32),
            num_sinks: params.num_sinks.min(i32::MAX as u32) as i32,
            cap_shrink: params
                .soft_cap
                .map_or(0.0, |cap| 2.0 * params.scale / cap * LOG2_E),
            cap_grow: params.soft_cap.map_or(0.0, |cap| cap / params.scale),
            key_dim: groups.key_dim as i32,
            slopes,
        };
        // Blocks take as many entries as there are. In a graph their number is that of the shape.
        let max_blocks = match step.shape {
            None => MAX_GRID,
            Some(_) => {
                // Two rounds of blocks; part of a round more would leave most of the GPU idle.
                let most = 2 * attention.num_busy_blocks / groups.num_groups;
                step.max_entries.min(most.max(1))
            }
        };
        let grid = |num_entries: usize, depth: usize| {
            let num_blocks = match step.shape {
                None => num_entries.min(max_blocks),
                Some(_) => max_blocks,
            };
            (num_blocks as u32, num_groups, depth as u32)
        };
        if lists.num_context > 0 {
            let shape = attention.context_shapes[usize::from(lists.has_later_positions)];
            let config = LaunchConfig {
                // Each block computes one tile.
                grid_dim: (lists.num_context as u32, num_groups, 1),
                block_dim: (shape.num_threads, 1, 1),
                shared_mem_bytes: shape.shared_bytes,
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
                block_dim: (attention.generation_shape.num_threads, 1, 1),
                shared_mem_bytes: attention.generation_shape.shared_bytes,
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

#[cfg(test)]
mod tests {
    use super::*;
    use inflight_base::BlockSize;

    /// What A100 and H100 have, and what others of their generations have.
    const LARGE: usize = 163 << 10;
    const SMALL: usize = 99 << 10;

    fn latents(latent_dim: usize, rotary_dim: usize) -> KvLayout {
        KvLayout {
            num_kv_heads: 1,
            head_dim: latent_dim + rotary_dim,
            values: KvValues::InKeys(latent_dim),
            indexer_dim: 0,
            block_size: BlockSize::new(64).expect("not zero"),
            dtype: KvDtype::Bf16,
        }
    }

    #[test]
    fn blocks_of_latent_attention_fit_the_shared_memory_of_any_gpu() {
        for (max_shared_bytes, name, num_queries) in [
            (LARGE, "latent_attention_context", 32),
            (SMALL, "latent_attention_context_t1", 16),
        ] {
            let choice = Choice::of_latents(&latents(512, 64), 512, max_shared_bytes);
            let choice = choice.expect("there are kernels");
            assert_eq!(choice.context[1], name);
            let shapes = choice.context_shapes;
            assert!(shapes.iter().all(|shape| shape.num_queries == num_queries));
            let all = shapes.into_iter().chain([choice.generation_shape]);
            let most = all.map(|shape| shape.shared_bytes as usize).max();
            assert!(
                most.is_some_and(|most| most <= max_shared_bytes),
                "{most:?}"
            );
        }
    }

    #[test]
    fn heads_with_linear_biases_have_kernels_of_their_own_up_to_128_elements() {
        let layout = |head_dim| KvLayout {
            num_kv_heads: 2,
            head_dim,
            values: KvValues::OfTheirOwn(head_dim),
            indexer_dim: 0,
            ..latents(512, 64)
        };
        for max_shared_bytes in [LARGE, SMALL] {
            let names = |head_dim, has_slopes| {
                let choice = Choice::of_heads(&layout(head_dim), has_slopes, max_shared_bytes);
                let choice = choice.expect("there are kernels");
                [choice.context, choice.generation].map(|[_, name]| name)
            };
            let with_biases = [
                "paged_attention_context_bf16_d128_alibi",
                "paged_attention_generation_bf16_d128_alibi",
            ];
            assert_eq!(names(80, true), with_biases);
            let without = [
                "paged_attention_context_bf16_d128",
                "paged_attention_generation_bf16_d128",
            ];
            assert_eq!(names(128, false), without);
        }
        let error = Choice::of_heads(&layout(130), true, LARGE).err();
        let error = error.expect("refused").to_string();
        for part in ["head_dim is 130", "(ALiBi)", "up to 128", "KIND_CPU"] {
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn latents_that_are_too_large_are_refused() {
        for (latent_dim, rotary_dim, part) in [
            (514, 32, "latents of 514 elements in keys of 546"),
            (512, 66, "latents of 512 elements in keys of 578"),
        ] {
            let layout = latents(latent_dim, rotary_dim);
            let error = Choice::of_latents(&layout, latent_dim, LARGE).err();
            let error = error.expect("refused").to_string();
            assert!(
                error.contains(part) && error.contains("KIND_CPU"),
                "{error}"
            );
        }
    }
}
