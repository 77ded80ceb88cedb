//! Latent attention, as [`LatentShape`] says: what is stored of tokens, and the way of queries to the cache and back.
//!
//! ```text
//! store_latents      the normalised latent and the rotated key of each row, to the cache     latent_rows.cu
//! split_queries      queries by heads
//! expert_down        their products with the heads' key matrices                             expert_gemm.cu, quantised_expert_gemm.cu
//! rotate_queries     what attends to the cache
//! latent_attention   the attended latents                                                    latent_attention.cu, by attention.rs
//! split_attended     these by heads
//! expert_down        their products with the heads' value matrices
//! join_values        the results
//! ```
//!
//! The matrix of a head is multiplied with all rows, as that of an expert is with those that have chosen it. Groups of
//! up to 16 heads attend together, and as many groups are computed at a time as memory is reserved for. All rows are
//! computed this way, in a context and in generation, and the products have one order of sums: a token's bits depend on
//! nothing else in the step.

use cudarc::driver::{LaunchConfig, PushKernelArg};
use half::bf16;

use super::Cuda;
use super::attention::{Attended, HeadGroups};
use super::expert_rows::ProductKernels;
use super::experts::{TileProduct, codes};
use super::kernels::VECTOR;
use super::kernels::{launch, row_grid, shared_row_grid};
use super::kv_cache::KvCache;
use super::latent_rows::Latents;
use super::rows::Rows;
use super::step::CudaStep;
use inflight_device::{LatentParams, LatentShape, Linear, PackedWeights};

/// Threads of a block of `store_latents`, and of `tile_heads`.
const THREADS: u32 = 128;

/// Some heads of a layer, with all rows of a step.
struct Chunk {
    num_rows: usize,
    first: usize,
    num_heads: usize,
}

impl Cuda {
    /// Stores the normalised latent and the rotated key of each row.
    pub(super) fn store_latents_of_rows(
        &mut self,
        step: &CudaStep,
        params: &LatentParams<'_, Self>,
        kv: &Rows<f32>,
        cache: &KvCache,
        layer: usize,
    ) {
        let Some(latents) = self.latents.take() else {
            unreachable!("memory is reserved before steps");
        };
        launch!(
            self,
            latents.kernels.store,
            "store_latents",
            row_grid(step.num_rows, THREADS),
            cache.layer(layer).keys,
            kv.address(),
            params.norm.memory.address(),
            params.norm_eps,
            params.angles.memory.address(),
            step.positions,
            step.slots(cache.group(layer)),
            params.shape.latent_dim as i32,
            params.shape.rotary_dim as i32
        );
        self.latents = Some(latents);
    }

    /// Latent attention of all rows.
    pub(super) fn attend_to_latents(
        &mut self,
        step: &CudaStep,
        params: &LatentParams<'_, Self>,
        q: &Rows<f32>,
        cache: &KvCache,
        layer: usize,
        out: &Rows<bf16>,
    ) {
        let Some(latents) = self.latents.take() else {
            unreachable!("memory is reserved before steps");
        };
        assert_eq!(latents.shape, params.shape, "memory for this model");
        let HeadGroups {
            num_groups, group, ..
        } = latents.groups;
        for first in (0..params.shape.num_heads).step_by(num_groups * group) {
            let chunk = Chunk {
                num_rows: step.num_rows,
                first,
                num_heads: (num_groups * group).min(params.shape.num_heads - first),
            };
            self.queries_to_latents(step, params, &latents, &chunk, q.address());
            let attended = Attended {
                groups: HeadGroups {
                    num_groups: chunk.num_heads / group,
                    ..latents.groups
                },
                sink_logits: 0,
                slopes: 0,
                q: latents.keyed.address(),
                sink_q: 0,
                out: latents.attended.address(),
            };
            self.attend(step, &params.attention, attended, cache, layer);
            self.latents_to_values(params, &latents, &chunk, out.address());
        }
        self.latents = Some(latents);
    }

    /// `keyed`: the queries of a chunk in the space of the latents, and their rotated parts.
    fn queries_to_latents(
        &mut self,
        step: &CudaStep,
        params: &LatentParams<'_, Self>,
        latents: &Latents,
        chunk: &Chunk,
        q: u64,
    ) {
        let LatentShape {
            num_heads,
            content_dim,
            rotary_dim,
            latent_dim,
            ..
        } = params.shape;
        launch!(
            self,
            latents.kernels.split_queries,
            "split_queries",
            chunk.grid(content_dim),
            latents.by_heads.address(),
            q,
            chunk.first as i32,
            chunk.num_heads as i32,
            num_heads as i32,
            content_dim as i32,
            params.shape.query_dim() as i32
        );
        let sizes = [latent_dim, content_dim];
        self.multiply_heads(latents, chunk, &params.heads.keys, sizes);
        launch!(
            self,
            latents.kernels.rotate_queries,
            "rotate_queries",
            chunk.grid(params.shape.key_dim()),
            latents.keyed.address(),
            latents.sums.address(),
            q,
            params.angles.memory.address(),
            step.positions,
            chunk.first as i32,
            chunk.num_heads as i32,
            num_heads as i32,
            content_dim as i32,
            latent_dim as i32,
            rotary_dim as i32
        );
    }

    /// The results of a chunk: the values of its attended latents.
    fn latents_to_values(
        &mut self,
        params: &LatentParams<'_, Self>,
        latents: &Latents,
        chunk: &Chunk,
        out: u64,
    ) {
        let LatentShape {
            num_heads,
            latent_dim,
            value_dim,
            ..
        } = params.shape;
        launch!(
            self,
            latents.kernels.split_attended,
            "split_attended",
            chunk.grid(latent_dim),
            latents.by_heads.address(),
            latents.attended.address(),
            chunk.num_heads as i32,
            latent_dim as i32
        );
        let sizes = [value_dim, latent_dim];
        self.multiply_heads(latents, chunk, &params.heads.values, sizes);
        launch!(
            self,
            latents.kernels.join_values,
            "join_values",
            chunk.grid(value_dim),
            out,
            latents.sums.address(),
            chunk.first as i32,
            chunk.num_heads as i32,
            num_heads as i32,
            value_dim as i32
        );
    }

    /// `sums`: the products of `by_heads` with the heads' matrices `[n, k]`.
    fn multiply_heads(
        &mut self,
        latents: &Latents,
        chunk: &Chunk,
        matrices: &[Linear<Self>],
        [n, k]: [usize; 2],
    ) {
        let [linear] = matrices else {
            panic!("the heads of a layer are packed as one");
        };
        assert_eq!(linear.matrix.n(), latents.shape.num_heads * n);
        assert_eq!(linear.matrix.k(), k);
        let is_quantised = codes(&linear.matrix).is_some();
        let tile_rows = ProductKernels::tile_rows(chunk.num_rows, is_quantised);
        launch!(
            self,
            latents.kernels.tile_heads,
            "tile_heads",
            row_grid(chunk.num_heads, THREADS),
            latents.tiles.address(),
            chunk.first as i32,
            chunk.num_rows as i32,
            tile_rows as i32
        );
        let products = &latents.kernels.products;
        self.multiply_tiles(&TileProduct {
            kernels: products.of_tiles(tile_rows, is_quantised),
            linear,
            n,
            k,
            x: latents.by_heads.address(),
            tiles: latents.tiles.address(),
            num_tiles: chunk.num_heads * chunk.num_rows.div_ceil(tile_rows),
            sums: latents.sums.address(),
        });
    }
}

impl Chunk {
    /// Blocks that share the elements of each row, `width` a head.
    fn grid(&self, width: usize) -> LaunchConfig {
        shared_row_grid(self.num_rows, (self.num_heads * width).div_ceil(VECTOR))
    }
}
