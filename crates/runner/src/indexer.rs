//! Indexers in a model: their weights, found and packed, and their operations in a layer.
//!
//! ```text
//! keys         keys(normed), normalised, rotated and cached       [m, head_dim]
//! queries      queries(latents of queries)                        [m, num_heads * head_dim]
//! weights      head_weights(normed)                               [m, num_heads]
//! selection    the device's choice by these; the layers behind may use it, too
//! ```

use std::num::NonZeroU32;

use super::layer_attention::LatentStep;
use super::linear_weights::{NormSource, ProjectionSource};
use super::model_tensors::ModelTensors;
use super::packer::Packer;
use super::probe::{Operation, Probe, Work};
use super::residual::Probed;
use super::spec::{
    IndexerSpec, LatentSelection, ModelSpec, Module, NormKind, NormSpec, Projection,
};
use inflight_base::LoadError;
use inflight_device::{
    Device, IndexerOps, IndexerParams, IndexerShape, KvSpan, LatentParams, Linear, PackedWeights,
};

/// Where a layer gets the positions that its queries see.
pub(super) enum Selecting<T> {
    /// From its own indexer.
    Own(T),
    /// From the last layer with an indexer.
    Shared,
}

/// The weights of an indexer, not yet read.
pub(super) struct IndexerSource<'a> {
    shape: IndexerShape,
    norm_eps: f32,
    queries: ProjectionSource<'a>,
    keys: ProjectionSource<'a>,
    head_weights: ProjectionSource<'a>,
    key_norm: NormSource<'a>,
}

/// The weights of an indexer.
pub(super) struct IndexerWeights<D: Device> {
    shape: IndexerShape,
    norm_eps: f32,
    /// `[num_heads * head_dim, num_inputs]`, of the latents of queries.
    queries: Linear<D>,
    /// `[head_dim, hidden_size]`.
    keys: Linear<D>,
    /// `[num_heads, hidden_size]`.
    head_weights: Linear<D>,
    /// The weights and biases of the norm of keys.
    key_norm: [D::Vector; 2],
}

/// The operations, activations, each `[max_num_tokens, width]`, and the last selection.
pub(super) struct IndexerBuffers<D: Device> {
    ops: D::Indexer,
    shape: IndexerShape,
    queries: D::Sums,
    keys: D::Sums,
    head_weights: D::Sums,
    selection: <D::Indexer as IndexerOps<D>>::Selection,
}

impl<T> Selecting<T> {
    /// The indexer, if it is the layer's own.
    pub(super) fn own(&self) -> Option<&T> {
        match self {
            Self::Own(own) => Some(own),
            Self::Shared => None,
        }
    }
}

impl<'a> Selecting<IndexerSource<'a>> {
    /// Finds the weights.
    ///
    /// # Errors
    /// A tensor is missing, or has another shape or a type that is not supported.
    pub(super) fn find(
        tensors: &ModelTensors<'a>,
        layer: usize,
        spec: &ModelSpec,
        selection: &LatentSelection,
    ) -> Result<Self, LoadError> {
        Ok(match selection {
            LatentSelection::Own(own) => Self::Own(IndexerSource::find(tensors, layer, spec, own)?),
            LatentSelection::Shared => Self::Shared,
        })
    }

    /// Packs the weights.
    ///
    /// # Errors
    /// Weights cannot be read or are not finite, or memory is short.
    pub(super) fn load<D: Device>(
        &self,
        packer: &mut Packer<'_, D>,
    ) -> Result<Selecting<IndexerWeights<D>>, LoadError> {
        Ok(match self {
            Self::Own(own) => Selecting::Own(own.load(packer)?),
            Self::Shared => Selecting::Shared,
        })
    }
}

impl<'a> IndexerSource<'a> {
    fn find(
        tensors: &ModelTensors<'a>,
        layer: usize,
        spec: &ModelSpec,
        indexer: &IndexerSpec,
    ) -> Result<Self, LoadError> {
        let kind = NormSpec {
            kind: NormKind::Layer { has_bias: true },
            has_weights: true,
            weight_offset: 0.0,
            ..spec.norm
        };
        let module = Module::of_layer(layer, indexer.key_norm);
        // As with routers, rounding would change choices.
        let find = |projection: &Projection| {
            let source = ProjectionSource::find(tensors, Some(layer), projection)?;
            Ok::<_, LoadError>(source.exactly())
        };
        Ok(Self {
            shape: indexer.shape,
            norm_eps: indexer.norm_eps,
            queries: find(&indexer.queries)?,
            keys: find(&indexer.keys)?,
            head_weights: find(&indexer.head_weights)?,
            key_norm: NormSource::find(tensors, &kind, module, indexer.shape.head_dim)?,
        })
    }

    /// Its projections.
    pub(super) fn projections(&self) -> [&ProjectionSource<'a>; 3] {
        [&self.queries, &self.keys, &self.head_weights]
    }

    fn load<D: Device>(&self, packer: &mut Packer<'_, D>) -> Result<IndexerWeights<D>, LoadError> {
        let [queries, keys, head_weights] = self.projections().map(|it| it.load(packer));
        let key_norm = self.key_norm.load(packer)?;
        let Some(bias) = key_norm.bias else {
            unreachable!("such a norm has biases")
        };
        Ok(IndexerWeights {
            shape: self.shape,
            norm_eps: self.norm_eps,
            queries: queries?,
            keys: keys?,
            head_weights: head_weights?,
            key_norm: [key_norm.weight, bias],
        })
    }
}

impl<D: Device> IndexerWeights<D> {
    /// In the order in which they were packed.
    pub(super) fn linears(&self) -> [&Linear<D>; 3] {
        [&self.queries, &self.keys, &self.head_weights]
    }
}

impl<D: Device> IndexerBuffers<D> {
    /// Reserves `max_rows` rows. `None` if no layer has an indexer.
    ///
    /// # Errors
    /// Memory is short, or the device has no indexers.
    pub(super) fn new(
        device: &mut D,
        spec: &ModelSpec,
        max_rows: usize,
    ) -> Result<Option<Self>, LoadError> {
        let Some(shape) = spec.indexer_shape() else {
            return Ok(None);
        };
        let ops = D::INDEXER.ok_or_else(|| {
            LoadError::Resource(format!(
                "{} has sparse attention by an indexer, which is computed on the CPU only: use an instance_group of \
                 kind KIND_CPU",
                spec.family
            ))
        })?;
        Ok(Some(Self {
            ops,
            shape,
            queries: device.alloc_sums(max_rows, shape.q_len())?,
            keys: device.alloc_sums(max_rows, shape.head_dim)?,
            head_weights: device.alloc_sums(max_rows, shape.num_heads)?,
            selection: ops.alloc_selection(device, max_rows, shape.max_selected)?,
        }))
    }

    /// Stores the keys of an indexer, made of the normalised residual stream `x`, and selects positions by the latents
    /// of queries.
    pub(super) fn select<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        at: &LatentStep<'_, '_, D>,
        weights: &IndexerWeights<D>,
        (x, latents): (&D::Inputs, &D::Inputs),
        cache: &mut D::KvCache,
    ) {
        let (num_rows, shape) = (at.num_rows, weights.shape);
        let [weight, bias] = &weights.key_norm;
        let params = IndexerParams {
            shape,
            key_norm: [weight, bias],
            norm_eps: weights.norm_eps,
            angles: at.angles,
        };
        run.project_qkv(num_rows, x, &weights.keys, &mut self.keys);
        self.ops
            .store_keys(run.device, at.step, params, &self.keys, cache, at.layer);
        run.probe.ended(Operation::Rope, || {
            Work::elements(num_rows, weights.keys.matrix.n(), 6, 8)
        });
        if !self.is_sparse(at.spans) {
            return;
        }
        run.project_qkv(num_rows, latents, &weights.queries, &mut self.queries);
        run.project_qkv(num_rows, x, &weights.head_weights, &mut self.head_weights);
        let Self {
            queries,
            head_weights,
            selection,
            ..
        } = self;
        self.ops.select(
            run.device,
            at.step,
            params,
            queries,
            head_weights,
            cache,
            at.layer,
            selection,
        );
        run.probe
            .ended(Operation::Attention, || Work::selection(at.spans, &shape));
    }

    /// Whether any query of a step sees less than all positions up to its own.
    pub(super) fn is_sparse(&self, spans: &[KvSpan]) -> bool {
        let max_selected = self.shape.max_selected;
        spans.iter().any(|it| it.kv_len as usize > max_selected)
    }

    /// A window of as many positions as a query sees.
    pub(super) fn window(&self) -> Option<NonZeroU32> {
        NonZeroU32::new(self.shape.max_selected as u32)
    }

    /// Latent attention over the last selection.
    pub(super) fn attend<P>(
        &self,
        run: &mut Probed<'_, D, P>,
        at: &LatentStep<'_, '_, D>,
        params: &LatentParams<'_, D>,
        q: &D::Sums,
        cache: &D::KvCache,
        attended: &mut D::Inputs,
    ) {
        let (device, selection) = (&mut *run.device, &self.selection);
        self.ops.attend(
            device, at.step, params, q, selection, cache, at.layer, attended,
        );
    }
}
