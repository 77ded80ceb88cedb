//! Latent attention in a model: its weights, found and packed, and its operations in a layer.
//!
//! ```text
//! queries    qkv(normed), or projection(norm(qkv(normed)))       [m, num_heads * (content_dim + rotary_dim)]
//! cache      norm(latent), rotate(shared key) of kv(normed)      [m, latent_dim + rotary_dim]
//! attended   the device's latent attention of both               [m, num_heads * value_dim]
//! ```

use super::indexer::{IndexerBuffers, IndexerSource, IndexerWeights, Selecting};
use super::layer_attention::LatentStep;
use super::linear_weights::{NormSource, ProjectionSource};
use super::model_tensors::ModelTensors;
use super::packer::Packer;
use super::probe::{Operation, Probe, Work};
use super::residual::Probed;
use super::share::ModelShare;
use super::spec::{LatentSpec, ModelSpec, Module, NormKind, NormSpec, Projection};
use inflight_base::LoadError;
use inflight_checkpoint::Matrix;
use inflight_device::{
    AttentionParams, Device, LatentHeads, LatentParams, LatentShape, LayerInputOps, Linear, Norm,
    PackedWeights,
};

/// The weights of a layer, not yet read.
pub(super) struct LatentSource<'a> {
    shape: LatentShape,
    scales_queries: bool,
    norm_eps: f32,
    queries: Option<(NormSource<'a>, ProjectionSource<'a>)>,
    kv: ProjectionSource<'a>,
    kv_norm: NormSource<'a>,
    /// For each head, from queries to latents, and from latents to values.
    heads: Vec<[ProjectionSource<'a>; 2]>,
    /// `None`: queries see all positions up to their own.
    selecting: Option<Selecting<IndexerSource<'a>>>,
}

/// The weights of a layer.
pub(super) struct LatentWeights<D: Device> {
    shape: LatentShape,
    /// Whether queries have factors by their positions.
    scales_queries: bool,
    norm_eps: f32,
    /// The norm of the latents of queries, and what makes queries of them.
    queries: Option<(D::Vector, Linear<D>)>,
    /// `[latent_dim + rotary_dim, hidden_size]`.
    kv: Linear<D>,
    kv_norm: D::Vector,
    heads: LatentHeads<D>,
    selecting: Option<Selecting<IndexerWeights<D>>>,
}

/// Activations, each `[max_num_tokens, width]`.
pub(super) struct LatentBuffers<D: Device> {
    /// The normalised latents of queries, and the queries.
    queries: Option<(D::Inputs, D::Sums)>,
    /// The latents of keys and values, and the shared keys.
    kv: D::Sums,
    /// Only for a model with indexers.
    indexer: Option<IndexerBuffers<D>>,
}

/// The widths of a row: of all sums and all inputs that attention takes, and of the widest inputs.
pub(super) fn latent_widths(latent: &LatentSpec) -> [usize; 3] {
    let shape = &latent.shape;
    let latents = match &latent.queries {
        Some(queries) => queries.projection.num_inputs,
        None => 0,
    };
    [
        latents + shape.q_len() + shape.key_dim(),
        latents + shape.out_len(),
        latents.max(shape.out_len()),
    ]
}

impl<'a> LatentSource<'a> {
    /// Finds the weights. `find` finds those of a projection that adapters can change.
    ///
    /// # Errors
    /// A tensor is missing, or has another shape or a type that is not supported.
    pub(super) fn find(
        tensors: &ModelTensors<'a>,
        layer: usize,
        spec: &ModelSpec,
        latent: &'a LatentSpec,
        find: impl Fn(&'a Projection) -> Result<ProjectionSource<'a>, LoadError>,
    ) -> Result<Self, LoadError> {
        let kind = NormSpec {
            kind: NormKind::Rms,
            ..spec.norm
        };
        let norm = |name, len| NormSource::find(tensors, &kind, Module::of_layer(layer, name), len);
        let shape = latent.shape;
        let rope = &spec.layers[layer].attention.rope;
        Ok(Self {
            shape,
            scales_queries: rope.query_factors.is_some(),
            norm_eps: latent.norm_eps,
            queries: match &latent.queries {
                Some(queries) => {
                    let projection = &queries.projection;
                    let norm = norm(queries.norm, projection.num_inputs)?;
                    Some((norm, find(projection)?))
                }
                None => None,
            },
            kv: find(&latent.kv)?,
            kv_norm: NormSource {
                scale: latent.kv_scale,
                ..norm(latent.kv_norm, shape.latent_dim)?
            },
            heads: find_heads(tensors, layer, latent)?,
            selecting: match &latent.selection {
                Some(selection) => Some(Selecting::find(tensors, layer, spec, selection)?),
                None => None,
            },
        })
    }

    /// The weights of one rank: its own heads. Each rank computes all latents, shared keys and selections.
    pub(super) fn share(mut self, share: &ModelShare) -> Self {
        let own = share.heads.queries.clone();
        let query_dim = self.shape.query_dim();
        let rows = own.start * query_dim..own.end * query_dim;
        self.heads.truncate(own.end);
        Self {
            shape: LatentShape {
                num_heads: own.len(),
                ..self.shape
            },
            queries: self.queries.map(|(norm, projection)| {
                let projection = projection.same_outputs(rows);
                (norm, projection.placed(share))
            }),
            kv: self.kv.placed(share),
            heads: self.heads.split_off(own.start),
            ..self
        }
    }

    /// Whether queries are made of latents.
    pub(super) fn has_query_latents(&self) -> bool {
        self.queries.is_some()
    }

    /// The sizes.
    pub(super) fn shape(&self) -> LatentShape {
        self.shape
    }

    /// All of its projections, and whether they belong to a head, which a device may [stack](Device::STACKS).
    pub(super) fn projections(&self) -> impl Iterator<Item = (&ProjectionSource<'a>, bool)> {
        let queries = self.queries.iter().map(|(_, projection)| projection);
        let selecting = self.selecting.iter().filter_map(Selecting::own);
        let of_indexer = selecting.flat_map(IndexerSource::projections);
        let whole = queries.chain([&self.kv]).chain(of_indexer);
        let whole = whole.map(|it| (it, false));
        whole.chain(self.heads.iter().flatten().map(|it| (it, true)))
    }

    /// Packs the weights.
    ///
    /// # Errors
    /// They cannot be read or are not finite, or memory is short.
    pub(super) fn load<D: Device>(
        self,
        packer: &mut Packer<'_, D>,
    ) -> Result<LatentWeights<D>, LoadError> {
        let queries = match &self.queries {
            Some((norm, projection)) => Some((norm.load(packer)?.weight, projection.load(packer)?)),
            None => None,
        };
        let (kv, kv_norm) = (self.kv.load(packer)?, self.kv_norm.load(packer)?.weight);
        let selecting = match &self.selecting {
            Some(selecting) => Some(selecting.load(packer)?),
            None => None,
        };
        let mut heads = LatentHeads {
            keys: Vec::new(),
            values: Vec::new(),
        };
        if let Some(stacks) = D::STACKS {
            let (keys, values) = self.heads.into_iter().map(<(_, _)>::from).unzip();
            heads
                .keys
                .push(ProjectionSource::load_stacked(keys, stacks, packer)?);
            heads
                .values
                .push(ProjectionSource::load_stacked(values, stacks, packer)?);
        } else {
            for [keys, values] in &self.heads {
                heads.keys.push(keys.load(packer)?);
                heads.values.push(values.load(packer)?);
            }
        }
        Ok(LatentWeights {
            shape: self.shape,
            scales_queries: self.scales_queries,
            norm_eps: self.norm_eps,
            queries,
            kv,
            kv_norm,
            heads,
            selecting,
        })
    }
}

/// The weights of each head: the transpose of those that make its keys, and those that make its values.
fn find_heads<'a>(
    tensors: &ModelTensors<'a>,
    layer: usize,
    latent: &LatentSpec,
) -> Result<Vec<[ProjectionSource<'a>; 2]>, LoadError> {
    let LatentShape {
        num_heads,
        content_dim,
        latent_dim,
        value_dim,
        ..
    } = latent.shape;
    let stacked = |name, [outputs, inputs]: [usize; 2]| {
        tensors.stacked_matrices(Module::of_layer(layer, name), [num_heads, outputs, inputs])
    };
    let rows = |all: &Matrix<'a>, first, len| all.part(first..first + len, 0..all.columns());
    let [of_keys, of_values] = latent.parted_heads;
    let keys = stacked(of_keys, [latent_dim, content_dim])?;
    let values = stacked(of_values, [value_dim, latent_dim])?;
    let find: Box<dyn Fn(usize) -> [Matrix<'a>; 2]> = match keys.zip(values) {
        Some((keys, values)) => Box::new(move |head| {
            [
                rows(&keys, head * latent_dim, latent_dim),
                rows(&values, head * value_dim, value_dim),
            ]
        }),
        None => {
            let projection = &latent.heads;
            let module = Module::of_layer(layer, projection.parts[0].module);
            let all = tensors.matrix(module, projection.num_outputs(), projection.num_inputs)?;
            Box::new(move |head| {
                let first = head * (content_dim + value_dim);
                [
                    rows(&all, first, content_dim).turned(),
                    rows(&all, first + content_dim, value_dim),
                ]
            })
        }
    };
    let heads = (0..num_heads).map(|head| {
        let mut index = 2 * head;
        find(head).map(|matrix| {
            let source = ProjectionSource::of_matrix(matrix, Some(index));
            index += 1;
            source
        })
    });
    Ok(heads.collect())
}

impl<D: Device> LatentWeights<D> {
    /// In the order in which they were packed.
    pub(super) fn linears(&self) -> impl Iterator<Item = &Linear<D>> {
        let queries = self.queries.iter().map(|(_, projection)| projection);
        let LatentHeads { keys, values } = &self.heads;
        let heads = keys.iter().zip(values);
        let selecting = self.selecting.iter().filter_map(Selecting::own);
        queries
            .chain([&self.kv])
            .chain(selecting.flat_map(IndexerWeights::linears))
            .chain(heads.flat_map(|(keys, values)| [keys, values]))
    }
}

impl<D: Device> LatentBuffers<D> {
    /// Reserves `max_rows` rows.
    ///
    /// # Errors
    /// Memory is short.
    pub(super) fn new(
        device: &mut D,
        max_rows: usize,
        latent: &LatentSpec,
        indexer: Option<IndexerBuffers<D>>,
    ) -> Result<Self, LoadError> {
        device.reserve_latents(max_rows, &latent.shape)?;
        Ok(Self {
            queries: match &latent.queries {
                Some(queries) => Some((
                    device.alloc_inputs(max_rows, queries.projection.num_inputs)?,
                    device.alloc_sums(max_rows, latent.shape.q_len())?,
                )),
                None => None,
            },
            kv: device.alloc_sums(max_rows, latent.shape.key_dim())?,
            indexer,
        })
    }

    /// Latent attention: `attended` of the normalised residual stream `x`, with `qkv` for what is projected first.
    #[allow(clippy::too_many_arguments, reason = "each is an operand")]
    pub(super) fn attend<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        at: &LatentStep<'_, '_, D>,
        (qkv, weights): (&Linear<D>, &LatentWeights<D>),
        x: &D::Inputs,
        projected: &mut D::Sums,
        cache: &mut D::KvCache,
        attended: &mut D::Inputs,
    ) {
        let (num_rows, step, layer) = (at.num_rows, at.step, at.layer);
        let shape = weights.shape;
        run.project_qkv(num_rows, x, &weights.kv, &mut self.kv);
        run.project_qkv(num_rows, x, qkv, projected);
        let q = match (&mut self.queries, &weights.queries) {
            (Some((latents, q)), Some((weight, projection))) => {
                let eps = weights.norm_eps;
                let norm = Norm::Rms { weight, eps };
                run.device.norm(num_rows, projected, norm, latents);
                run.probe.ended(Operation::Norm, || {
                    Work::elements(num_rows, projection.matrix.k(), 6, 4)
                });
                run.project_qkv(num_rows, latents, projection, q);
                let own = weights.selecting.as_ref().and_then(Selecting::own);
                if let Some((own, indexer)) = own.zip(self.indexer.as_mut()) {
                    indexer.select(run, at, own, (x, latents), cache);
                }
                q
            }
            _ => projected,
        };
        if let (true, Some(ops)) = (weights.scales_queries, D::LAYER_INPUTS) {
            ops.scale_queries(run.device, step, at.angles, q);
        }
        let params = LatentParams {
            shape,
            norm: &weights.kv_norm,
            norm_eps: weights.norm_eps,
            angles: at.angles,
            heads: &weights.heads,
            attention: at.params,
        };
        run.device
            .store_latents(step, &params, &self.kv, cache, layer);
        let kv_bytes = at.kv_bytes_per_position;
        run.probe.ended(Operation::Rope, || {
            let read = Work::elements(num_rows, shape.key_dim(), 4, 4);
            Work {
                num_bytes: read.num_bytes + (num_rows * kv_bytes) as u64,
                ..read
            }
        });
        let indexer = self
            .indexer
            .as_ref()
            .filter(|_| weights.selecting.is_some());
        if let Some(indexer) = indexer.filter(|it| it.is_sparse(at.spans)) {
            indexer.attend(run, at, &params, q, cache, attended);
        } else {
            run.device
                .latent_attention(step, &params, q, cache, layer, attended);
        }
        let seen = AttentionParams {
            window: indexer.map_or(at.params.window, IndexerBuffers::window),
            ..at.params
        };
        run.probe.ended(Operation::Attention, || {
            Work::latent_attention(at.spans, &seen, kv_bytes as u64, &weights.heads)
        });
    }
}
