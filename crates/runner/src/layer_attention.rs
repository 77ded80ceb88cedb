//! The parameters of each layer's attention, and the activations that layers of one shape share.

use super::limits::RunnerLimits;
use super::rope::Rope;
use super::spec::{Block, LayerSpec, ModelSpec, QkNormSpec};
use inflight_base::{BlockSize, LoadError, Tokens};
use inflight_device::{
    AttentionParams, Device, GateFunction, HeadShape, KvDtype, KvLayout, KvLayouts, KvSpan,
    KvValues, LayerGroups, RopeTable,
};

/// The parameters of a layer's attention besides its weights.
#[derive(Clone, Copy)]
pub(super) struct LayerAttention {
    pub(super) params: AttentionParams,
    /// Its index among the layers of the stage that keep keys and values, or among those with a recurrent state. A
    /// layer that reads keys and values of another one has the place of that.
    pub(super) place: usize,
    /// The index of the recurrence beside it among all recurrences of the stage.
    pub(super) recurrence: usize,
    /// The shape of its activations.
    pub(super) shape: LayerShape,
    /// The index of its activations in the decoder's buffers.
    pub(super) buffers: usize,
    /// The index of the activations of its feed-forward block.
    pub(super) inner: usize,
    /// The index of its gates, and their function.
    pub(super) gate: Option<(usize, GateFunction)>,
    pub(super) kv_bytes_per_position: usize,
    /// The index of its table in the decoder's angles.
    pub(super) angles: usize,
    /// How queries and keys are normalised.
    pub(super) qk_norm: Option<QkNormSpec>,
}

/// The sizes of a layer's activations in attention.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct LayerShape {
    pub(super) heads: HeadShape,
    /// Whether it stores keys and values.
    pub(super) stores: bool,
}

/// Activations, each `[max_num_tokens, width]`.
pub(super) struct AttentionBuffers<D: Device> {
    /// Queries, keys and values before rotation; with latent attention, queries or their latents.
    pub(super) qkv: D::Sums,
    /// Rotated queries, unless attention is latent.
    pub(super) q: D::Inputs,
    /// Queries rotated for the sinks, if that rotation differs.
    pub(super) sink_q: Option<D::Inputs>,
    /// The output of attention.
    pub(super) attended: D::Inputs,
}

/// The place of a layer's latent attention in a step.
pub(super) struct LatentStep<'a, 's, D: Device> {
    pub step: &'a D::Step<'s>,
    pub num_rows: usize,
    pub spans: &'a [KvSpan],
    pub layer: usize,
    pub angles: &'a D::Angles,
    pub params: AttentionParams,
    pub kv_bytes_per_position: usize,
}

/// The attention of each layer, and the position embeddings that it refers to.
pub(super) fn layer_attention<'a, D: Device>(
    spec: &'a ModelSpec,
    limits: &RunnerLimits,
) -> (Vec<LayerAttention>, Vec<(&'a Rope, usize)>) {
    let mut ropes: Vec<(&Rope, usize)> = Vec::new();
    let windows: Vec<_> = spec.windows_within(&limits.attention).collect();
    let gate_widths = spec.gate_widths();
    let layers = spec.layers.iter().enumerate().map(|(index, layer)| {
        let attention = &layer.attention;
        let heads = spec.head_shape(index);
        let layout = kv_layout(spec, index, limits.block_size, limits.kv_dtype);
        let own = (&attention.rope, heads.head_dim);
        let known = ropes.iter().position(|&rope| rope == own);
        let angles = known.unwrap_or_else(|| {
            ropes.push(own);
            ropes.len() - 1
        });
        let cached = attention.kv_source.unwrap_or(index);
        LayerAttention {
            params: AttentionParams {
                shape: heads,
                scale: attention.scale,
                soft_cap: attention.soft_cap,
                window: match spec.layers[cached].has_cache() {
                    true => {
                        let of_cache = windows[spec.cached_layers(0..cached).end];
                        let own = [attention.window, limits.attention.window(index)];
                        own.into_iter().chain([of_cache]).flatten().min()
                    }
                    false => None,
                },
                chunk: attention.chunk,
                is_bidirectional: spec.is_bidirectional,
                num_sinks: limits.attention.num_sinks.0,
                shifts_sinks: limits.attention.shifts_sinks,
            },
            place: 0,
            recurrence: 0,
            shape: LayerShape {
                heads,
                stores: attention.kv_source.is_none(),
            },
            buffers: 0,
            inner: 0,
            gate: attention.gate.as_ref().and_then(|gate| {
                let width = gate.projection.num_outputs();
                let index = gate_widths.iter().position(|&it| it == width)?;
                Some((index, gate.function))
            }),
            kv_bytes_per_position: D::kv_bytes_per_block(
                &KvLayouts::alike(layout, 1),
                &LayerGroups::one(1),
            ) / limits.block_size.tokens().index(),
            angles,
            qk_norm: attention.qk_norm,
        }
    });
    (layers.collect(), ropes)
}

/// Gives the layers of a stage their places.
pub(super) fn place(attention: &mut [LayerAttention], layers: &[LayerSpec]) {
    let (mut num_cached, mut num_recurrent) = (0, 0);
    for (index, layer) in layers.iter().enumerate() {
        let own = &layer.attention;
        if !layer.norms.has(Block::Attention) {
            continue;
        }
        if layer.recurrence_block.is_some() {
            attention[index].recurrence = take_next(&mut num_recurrent);
        }
        attention[index].place = match (own.kv_source, own.recurrence) {
            // Such a model has one stage.
            (Some(source), _) => attention[source].place,
            (None, None) => take_next(&mut num_cached),
            (None, Some(_)) => take_next(&mut num_recurrent),
        };
    }
}

/// The activations of the attention of each shape, whose indices the layers are told.
pub(super) fn attention_buffers<D: Device>(
    device: &mut D,
    spec: &ModelSpec,
    attention: &mut [LayerAttention],
    max_rows: usize,
) -> Result<Vec<AttentionBuffers<D>>, LoadError> {
    let has_sink_queries = attention.iter().any(|it| it.params.has_sink_queries());
    let latent = spec.latent();
    let mut shapes: Vec<LayerShape> = Vec::new();
    for layer in attention {
        let known = shapes.iter().position(|shape| *shape == layer.shape);
        layer.buffers = known.unwrap_or_else(|| {
            shapes.push(layer.shape);
            shapes.len() - 1
        });
    }
    let buffers = shapes.iter().map(|shape| {
        let heads = shape.heads;
        let [qkv_len, q_len, attended_len] = match latent {
            Some(latent) => {
                let qkv_len = match &latent.queries {
                    Some(queries) => queries.projection.num_inputs,
                    None => latent.shape.q_len(),
                };
                [qkv_len, 0, latent.shape.out_len()]
            }
            None if shape.stores => [heads.qkv_len(), heads.q_len(), heads.out_len()],
            None => [heads.q_len(), heads.q_len(), heads.out_len()],
        };
        Ok(AttentionBuffers {
            qkv: device.alloc_sums(max_rows, qkv_len)?,
            q: device.alloc_inputs(max_rows, q_len)?,
            sink_q: match has_sink_queries {
                true => Some(device.alloc_inputs(max_rows, q_len)?),
                false => None,
            },
            attended: device.alloc_inputs(max_rows, attended_len)?,
        })
    });
    buffers.collect()
}

/// The activations of feed-forward blocks of each width, whose indices the layers are told. A mixture of experts has
/// its own.
pub(super) fn inner_buffers<D: Device>(
    device: &mut D,
    spec: &ModelSpec,
    attention: &mut [LayerAttention],
    layers: &[LayerSpec],
    max_rows: usize,
) -> Result<Vec<D::Inputs>, LoadError> {
    let widths = spec.intermediate_sizes();
    for (attention, layer) in attention.iter_mut().zip(layers) {
        let own = layer.feed_forward.width();
        attention.inner = widths.iter().position(|&width| width == own).unwrap_or(0);
    }
    let widths = widths.iter();
    widths
        .map(|&width| device.alloc_inputs(max_rows, width))
        .collect()
}

/// The cosines and sines of each position embedding, and of the width of its heads.
pub(super) fn upload_angles<D: Device>(
    device: &mut D,
    spec: &ModelSpec,
    ropes: &[(&Rope, usize)],
    max_seq_len: Tokens,
    num_positions: Tokens,
) -> Result<Vec<D::Angles>, LoadError> {
    let tables = ropes.iter().map(|(rope, head_dim)| {
        let latent = spec.latent_shape();
        let head_dim = latent.map_or(*head_dim, |latent| latent.rotary_dim);
        let frequencies = rope.frequencies(head_dim, max_seq_len.index());
        let factor = rope.attention_factor(max_seq_len.index());
        let table = RopeTable::new(&frequencies, factor, num_positions.index())?;
        let table = match rope.pair_axes(head_dim) {
            Some(axes) => table.with_axes(axes),
            None => table,
        };
        device.upload_angles(match rope.query_factors {
            Some(factors) => table.with_query_factors(|position| factors.at(position))?,
            None => table,
        })
    });
    tables.collect()
}

/// The blocks of all layers that keep keys and values.
pub(super) fn kv_layouts(spec: &ModelSpec, block_size: BlockSize, dtype: KvDtype) -> KvLayouts {
    let layers = spec.layers.iter().enumerate();
    let cached = layers.filter(|(_, layer)| layer.has_cache());
    let layouts = cached.map(|(index, _)| kv_layout(spec, index, block_size, dtype));
    KvLayouts::new(block_size, layouts.collect())
}

/// The blocks of a layer in a model's KV cache.
pub(super) fn kv_layout(
    spec: &ModelSpec,
    layer: usize,
    block_size: BlockSize,
    dtype: KvDtype,
) -> KvLayout {
    let heads = spec.head_shape(layer);
    KvLayout {
        num_kv_heads: heads.num_kv_heads,
        head_dim: heads.head_dim,
        values: spec
            .latent_shape()
            .map_or(KvValues::OfTheirOwn(heads.value_dim), |latent| {
                latent.kv_values()
            }),
        indexer_dim: spec.layers[layer]
            .indexer()
            .map_or(0, |indexer| indexer.shape.head_dim),
        block_size,
        dtype,
    }
}

fn take_next(counter: &mut usize) -> usize {
    *counter += 1;
    *counter - 1
}
