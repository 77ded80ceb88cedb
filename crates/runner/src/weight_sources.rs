//! All weights of a model in its checkpoint: found, and their shapes checked, before any is packed.
//!
//! So sizes that a config makes up cost no memory, and a bad checkpoint fails at once.

use std::ops::Range;

use super::experts_block::ExpertsBlockSource;
use super::feed_forward_weights::{DenseSource, FeedForwardSource, find_experts};
use super::late_inputs::LateSource;
use super::latent::LatentSource;
use super::layer_inputs::{InputBlockSource, LayerInputsSource};
use super::linear_weights::{NormSource, ProjectionSource};
use super::model_tensors::ModelTensors;
use super::packer::PackedForm;
use super::precision::WeightPrecision;
use super::rank::gcd;
use super::recurrence::{RecurrenceBlockSource, RecurrenceSource, own_inputs};
use super::recurrence_share::RecurrenceShare;
use super::share::{CutUnits, ModelShare};
use super::spec::{
    Block, FeedForward, InnerNorms, LayerSpec, ModelSpec, Module, Multipliers, NormSpec, Norms,
    QkNormSpec,
};
use super::stream_weights::{LayerStreamsSource, StreamsSource};
use inflight_base::{LoadError, TokenId};
use inflight_checkpoint::{Matrix, RowOrder, RowSelection, Tensor};
use inflight_device::{Device, LatentShape, QkNormKind, QuantisedWidths, RecurrenceShape};

/// The weights of a model, not yet read.
pub(super) struct WeightSources<'a> {
    pub(super) embedding: Matrix<'a>,
    /// From embeddings of another width to the residual stream, and back.
    pub(super) embedding_projections: Option<[ProjectionSource<'a>; 2]>,
    /// The rows of learned positions, from position 0 on.
    /// With the token whose row is the first of them, if there is one.
    pub(super) positions: Option<(Matrix<'a>, Option<TokenId>)>,
    /// The rows of the types of tokens.
    pub(super) token_types: Option<Matrix<'a>>,
    pub(super) embedding_norm: Option<NormSource<'a>>,
    /// Inputs of each layer's own.
    pub(super) layer_inputs: Option<LayerInputsSource<'a>>,
    /// Between tokens and other residual streams.
    pub(super) streams: Option<StreamsSource<'a>>,
    pub(super) layers: Vec<LayerSource<'a>>,
    pub(super) final_norm: Option<NormSource<'a>>,
    /// `None` if it is the embedding, or if there is none.
    pub(super) output_layer: Option<Matrix<'a>>,
    /// Whether there is an output layer.
    pub(super) has_output_layer: bool,
    /// The bias of the output layer.
    pub(super) output_bias: Option<Tensor<'a>>,
}

/// The weights of a layer.
pub(super) struct LayerSource<'a> {
    pub(super) norms: Norms<NormSource<'a>>,
    /// `None` without attention, as is `o`.
    pub(super) qkv: Option<ProjectionSource<'a>>,
    pub(super) latent: Option<LatentSource<'a>>,
    pub(super) recurrence: Option<RecurrenceSource<'a>>,
    /// The gates of attention.
    pub(super) gate: Option<ProjectionSource<'a>>,
    /// The largest magnitude of queries, keys and values.
    pub(super) clip: Option<f32>,
    /// The norms of queries and of keys.
    pub(super) qk_norm: Option<[NormSource<'a>; 2]>,
    /// The attention-sink logit of each query head.
    pub(super) sink_logits: Option<Tensor<'a>>,
    pub(super) o: Option<ProjectionSource<'a>>,
    /// A recurrence beside attention.
    pub(super) recurrence_block: Option<RecurrenceBlockSource<'a>>,
    /// `None` for a layer that has attention alone.
    pub(super) feed_forward: Option<FeedForwardSource<'a>>,
    /// Experts beside the feed-forward block.
    pub(super) experts_block: Option<ExpertsBlockSource<'a>>,
    /// The block that reads the layer's own inputs.
    pub(super) input_block: Option<InputBlockSource<'a>>,
    /// The factor of the residual stream, `[1]`.
    pub(super) scale: Option<Tensor<'a>>,
    /// The factors of what its blocks compute.
    pub(super) multipliers: Option<Multipliers>,
    /// The factors of the columns of what attention and the feed-forward block compute.
    pub(super) column_factors: Option<[Tensor<'a>; 2]>,
    /// Of the other residual streams.
    pub(super) streams: Option<LayerStreamsSource<'a>>,
    /// The gates that count, in standard deviations above the mean.
    pub(super) gate_cutoff: Option<f32>,
    /// The norms of what attention gives and of the inside of the feed-forward block.
    pub(super) inner_norms: Option<[NormSource<'a>; 2]>,
}

impl<'a> WeightSources<'a> {
    /// Finds all weights that the description calls for.
    ///
    /// # Errors
    /// A tensor is missing, or has another shape or a type that is not supported.
    pub(super) fn find(tensors: &ModelTensors<'a>, spec: &'a ModelSpec) -> Result<Self, LoadError> {
        let (vocab, hidden) = (spec.vocab_size, spec.hidden_size);
        let width = spec.embedding_width();
        let modules = &spec.modules;
        let embedding = tensors.matrix(Module::of_model(modules.embedding), vocab, width)?;
        let has_output_layer = spec.pooling.is_none();
        let output_layer = match spec.tied_embeddings || !has_output_layer {
            true => None,
            false => {
                let module = Module::of_model(modules.output_layer);
                let rows = tensors.matrix(module, vocab, width)?;
                Some(match spec.has_unit_outputs {
                    true => rows.with_unit_rows(),
                    false => rows,
                })
            }
        };
        let layers = spec.layers.iter().enumerate();
        let norm = |name: Option<&'static str>| {
            let find = |name| NormSource::find(tensors, &spec.norm, Module::of_model(name), hidden);
            name.map(find).transpose()
        };
        Ok(Self {
            embedding,
            embedding_projections: match &spec.embedding_projections {
                Some(projections) => {
                    let find = |it| ProjectionSource::find(tensors, None, it);
                    Some([find(&projections.input)?, find(&projections.output)?])
                }
                None => None,
            },
            positions: positions(tensors, spec)?,
            token_types: match spec.token_types {
                Some(types) => {
                    let module = Module::of_model(types.module);
                    Some(tensors.matrix(module, types.num_types, hidden)?)
                }
                None => None,
            },
            embedding_norm: norm(spec.embedding_norm)?,
            layer_inputs: match &spec.layer_inputs {
                Some(inputs) => Some(LayerInputsSource::find(tensors, spec, inputs)?),
                None => None,
            },
            streams: match &spec.streams {
                Some(streams) => Some(StreamsSource::find(tensors, spec, streams)?),
                None => None,
            },
            layers: layers
                .map(|(index, layer)| LayerSource::find(tensors, spec, index, layer))
                .collect::<Result<_, _>>()?,
            final_norm: norm(modules.final_norm)?,
            output_layer,
            has_output_layer,
            output_bias: match spec.output_bias && has_output_layer {
                true => Some(tensors.bias(Module::of_model(modules.output_layer), vocab)?),
                false => None,
            },
        })
    }

    /// What a rank has of them, whose layers are these.
    pub(super) fn share(self, share: &ModelShare, layers: &[LayerSpec], head_dim: usize) -> Self {
        let rows = |matrix: &Matrix<'a>| {
            let columns = 0..matrix.columns();
            matrix.part(share.vocabulary.clone(), columns)
        };
        let layers = self.layers.into_iter().zip(layers);
        Self {
            embedding: rows(&self.embedding),
            layers: layers
                .map(|(layer, of_layer)| layer.share(share, of_layer, head_dim))
                .collect(),
            output_layer: self.output_layer.as_ref().map(rows),
            output_bias: self
                .output_bias
                .map(|bias| bias.elements(share.vocabulary.clone())),
            ..self
        }
    }

    /// What stays together in every tile of a rank.
    pub(super) fn cut_units(&self, spec: &ModelSpec) -> CutUnits {
        let mut units = CutUnits::SINGLE;
        for layer in &self.layers {
            for (shape, output) in layer.mixed() {
                for matrix in &output.matrices {
                    let group = matrix.columns_of_group();
                    units.join_values(RecurrenceShare::num_values_of(shape, group));
                }
            }
            let attended = layer.o.iter().filter(|_| layer.recurrence.is_none());
            for matrix in attended.flat_map(|o| &o.matrices) {
                // Whole groups of inputs that are whole heads.
                let group = matrix.columns_of_group();
                units.join_heads(group / gcd(group, spec.attended_dim()));
            }
            let blocks = layer
                .feed_forward
                .iter()
                .flat_map(FeedForwardSource::blocks);
            for matrix in blocks.flat_map(|(block, _)| &block.down.matrices) {
                units.join_inner(matrix.columns_of_group());
            }
        }
        units
    }

    /// The matrix of the output layer, if there is one.
    pub(super) fn output_matrix(&self) -> Option<&Matrix<'a>> {
        let own = self.output_layer.as_ref().unwrap_or(&self.embedding);
        self.has_output_layer.then_some(own)
    }

    /// All projections, as those [of a layer](LayerSource::projections).
    fn projections(&self) -> impl Iterator<Item = (&ProjectionSource<'a>, bool)> {
        let outside = self.embedding_projections.iter().flatten();
        let outside = outside.chain(self.layer_inputs.iter().map(|it| &it.projection));
        let of_streams = self.streams.iter();
        let of_streams = of_streams.flat_map(|it| it.inputs.iter().chain(&it.outputs));
        let outside = outside.chain(of_streams);
        let of_layers = self.layers.iter().flat_map(LayerSource::projections);
        of_layers.chain(outside.map(|it| (it, false)))
    }

    /// Bytes of all weights of all stages once they are packed, if float weights are rounded to `precision`: with the
    /// padding of stacked experts, without any other.
    pub(super) fn num_bytes<D: Device>(
        &self,
        precision: Option<WeightPrecision>,
        num_stages: usize,
    ) -> u64 {
        let output = self.output_matrix().map(std::slice::from_ref);
        let output = output.map(|it| {
            let form = PackedForm::of_output_layer(it, precision, D::HAS_FP8);
            (it, form)
        });
        let bytes = |rows: &Matrix<'_>| 2 * (rows.rows() * rows.columns()) as u64;
        let embedding_bytes = match (&output, &self.output_layer) {
            // The first stage has rows of its own, unless it is the last one.
            (Some((_, PackedForm::Float(_))), None) if num_stages == 1 => 0,
            _ => bytes(&self.embedding),
        } + self.positions.as_ref().map_or(0, |(rows, _)| bytes(rows))
            + self
                .layer_inputs
                .as_ref()
                .map_or(0, |it| bytes(&it.embedding));
        let output_bytes = output.map_or(0, |(matrix, form)| form.num_bytes::<D>(matrix));
        let vector_bytes: u64 = self.layers.iter().map(LayerSource::num_vector_bytes).sum();
        let matrix_bytes = num_bytes::<D>(self.projections(), precision);
        embedding_bytes + output_bytes + vector_bytes + matrix_bytes
    }

    /// The widths of the matrices that are quantised once they are packed, but for stacked experts.
    pub(super) fn quantised_widths<D: Device>(
        &self,
        precision: Option<WeightPrecision>,
    ) -> QuantisedWidths {
        let mut widths = QuantisedWidths::default();
        for (projection, is_stacked) in self.projections() {
            if D::STACKS.is_some() && is_stacked {
                continue;
            }
            let form = projection.form(precision, D::HAS_FP8);
            form.add_to(&mut widths, &projection.matrices);
        }
        if let Some(output) = self.output_matrix().map(std::slice::from_ref) {
            PackedForm::of_output_layer(output, precision, D::HAS_FP8).add_to(&mut widths, output);
        }
        widths
    }
}

impl<'a> LayerSource<'a> {
    /// Finds all weights of a layer.
    ///
    /// # Errors
    /// A tensor is missing, or has another shape or a type that is not supported.
    pub(super) fn find(
        tensors: &ModelTensors<'a>,
        spec: &ModelSpec,
        index: usize,
        layer: &'a LayerSpec,
    ) -> Result<Self, LoadError> {
        let hidden = spec.hidden_size;
        let norm = |name, kind: &NormSpec, len| {
            NormSource::find(tensors, kind, Module::of_layer(index, name), len)
        };
        let find = |projection| {
            let source = ProjectionSource::find(tensors, Some(index), projection)?;
            let place = spec.place_of(projection);
            Ok(ProjectionSource { place, ..source })
        };
        let LayerSpec {
            norms,
            attention,
            feed_forward,
            experts_block,
            input_block,
            scale,
            recurrence_block,
            multipliers,
            column_factors,
            gate_cutoff,
            inner_norms,
        } = layer;
        let heads = spec.head_shape(index);
        let (has_attention, has_feed_forward) =
            (norms.has(Block::Attention), norms.has(Block::FeedForward));
        let find_if = |has: bool, projection| has.then(|| find(projection)).transpose();
        Ok(Self {
            norms: norms.try_map(|&name| norm(name, &spec.norm, hidden))?,
            qkv: find_if(has_attention, &attention.qkv)?,
            latent: match &attention.latent {
                Some(latent) => Some(LatentSource::find(tensors, index, spec, latent, find)?),
                None => None,
            },
            recurrence: match layer
                .attention_block()
                .and_then(|it| it.recurrence.as_ref())
            {
                Some(recurrence) => {
                    let mut source = RecurrenceSource::find(tensors, index, recurrence)?;
                    if let Some(late) = &attention.late {
                        source.late = Some(LateSource::find(tensors, index, late, find)?);
                    }
                    Some(source)
                }
                None => None,
            },
            gate: match &attention.gate {
                Some(gate) => Some(find(&gate.projection)?),
                None => None,
            },
            clip: attention.clip,
            qk_norm: match attention.qk_norm {
                Some(QkNormSpec { q, k, kind, .. }) => {
                    let num_heads = [heads.num_q_heads, heads.num_kv_heads];
                    let [num_q, num_k] = kind.num_weighted_heads(num_heads);
                    let order = attention.qkv.parts[0].row_order;
                    let find = |name: &'static str, num_heads| {
                        if name.is_empty() {
                            return Ok(NormSource::of_ones(num_heads * heads.head_dim));
                        }
                        let weight = match kind {
                            QkNormKind::LayerOfHead => {
                                let shape = [num_heads, heads.head_dim];
                                tensors.head_norms(index, name, shape, order)?
                            }
                            QkNormKind::BiasedLayer => {
                                let (module, len) = (Module::of_layer(index, name), heads.head_dim);
                                let parts =
                                    [tensors.norm(module, len)?, tensors.bias(module, len)?];
                                let parts = parts.map(|it| in_order_of_heads(it, len, order));
                                parts.into()
                            }
                            QkNormKind::Head | QkNormKind::Row | QkNormKind::RotatedHead => {
                                let len = num_heads * heads.head_dim;
                                let norm = tensors.norm(Module::of_layer(index, name), len)?;
                                vec![in_order_of_heads(norm, len, order)]
                            }
                        };
                        Ok::<_, LoadError>(NormSource {
                            weight,
                            num_ones: 0,
                            weight_offset: spec.norm.weight_offset,
                            scale: 1.0,
                            bias: None,
                        })
                    };
                    Some([find(q, num_q)?, find(k, num_k)?])
                }
                None => None,
            },
            sink_logits: match attention.sink_logits {
                Some(name) => {
                    let module = Module::of_layer(index, name);
                    Some(tensors.parameter(module, heads.num_q_heads)?)
                }
                None => None,
            },
            o: find_if(has_attention, &attention.o)?,
            recurrence_block: match recurrence_block {
                Some(block) => Some(RecurrenceBlockSource::find(tensors, index, block, find)?),
                None => None,
            },
            multipliers: *multipliers,
            column_factors: match column_factors {
                Some(factors) => {
                    let find = |name| tensors.parameter(Module::of_layer(index, name), hidden);
                    Some([find(factors.attention)?, find(factors.feed_forward)?])
                }
                None => None,
            },
            streams: match &spec.streams {
                Some(streams) => Some(LayerStreamsSource::find(tensors, index, spec, streams)?),
                None => None,
            },
            gate_cutoff: *gate_cutoff,
            inner_norms: match inner_norms {
                Some(InnerNorms { attended, inside }) => Some([
                    norm(attended, &spec.norm, attention.o.num_inputs)?,
                    norm(inside, &spec.norm, feed_forward.width())?,
                ]),
                None => None,
            },
            feed_forward: match feed_forward {
                _ if !has_feed_forward => None,
                FeedForward::Gated {
                    gate_up: up, down, ..
                }
                | FeedForward::Plain { up, down, .. } => {
                    let up = find(up)?;
                    let down = find(down)?;
                    let alphas = match *feed_forward {
                        FeedForward::Plain {
                            alphas: Some([positive, negative]),
                            ..
                        } => {
                            let find = |name| tensors.parameter(Module::of_layer(index, name), 1);
                            Some([find(positive)?, find(negative)?])
                        }
                        _ => None,
                    };
                    let block = DenseSource { up, down };
                    Some(FeedForwardSource::Dense(feed_forward, block, alphas))
                }
                FeedForward::Experts(experts) => Some(find_experts(tensors, index, experts)?),
            },
            experts_block: match experts_block {
                Some(block) => Some(ExpertsBlockSource::find(tensors, index, spec, block)?),
                None => None,
            },
            input_block: match input_block {
                Some(block) => Some(InputBlockSource::find(tensors, index, spec, block, find)?),
                None => None,
            },
            scale: match *scale {
                Some(name) => Some(tensors.parameter(Module::of_layer(index, name), 1)?),
                None => None,
            },
        })
    }

    /// Bytes of its weights once they are packed, if float weights are rounded to `precision`.
    pub(super) fn num_bytes<D: Device>(&self, precision: Option<WeightPrecision>) -> u64 {
        num_bytes::<D>(self.projections(), precision)
    }

    /// Bytes of the vectors of its recurrence; other layers have few.
    fn num_vector_bytes(&self) -> u64 {
        let own = self.recurrence.iter();
        let beside = self.recurrence_block.iter();
        own.map(RecurrenceSource::num_vector_bytes)
            .chain(beside.map(RecurrenceBlockSource::num_vector_bytes))
            .sum()
    }

    fn share(self, share: &ModelShare, spec: &LayerSpec, head_dim: usize) -> Self {
        let of_heads = |heads: &Range<usize>| heads.start * head_dim..heads.end * head_dim;
        let queries = vec![of_heads(&share.heads.queries)];
        let keys: Vec<_> = share.heads.key_runs().iter().map(of_heads).collect();
        let recurrence = self.recurrence.as_ref();
        let recurrence = recurrence.map(|it| share.recurrence(it.shape()));
        let (qkv, attended) = match (&recurrence, &self.latent) {
            (Some(own), _) => (self.qkv.map(|qkv| own_inputs(&qkv, own)), own.mixed()),
            // Latents, of which each rank makes queries of its own.
            (None, Some(latent)) if latent.has_query_latents() => {
                (self.qkv, share.attended(latent.shape().value_dim))
            }
            (None, Some(latent)) => {
                let LatentShape { value_dim, .. } = latent.shape();
                let width = latent.shape().query_dim();
                let Range { start, end } = share.heads.queries;
                let own = start * width..end * width;
                let qkv = self.qkv.map(|qkv| qkv.same_outputs(own));
                (qkv, share.attended(value_dim))
            }
            (None, None) => {
                let kept = [queries.clone(), keys.clone(), keys.clone()];
                let qkv = self.qkv.map(|qkv| qkv.outputs(&kept));
                (qkv, share.attended(head_dim))
            }
        };
        Self {
            qk_norm: match (self.qk_norm, spec.attention.qk_norm) {
                (Some([q, k]), Some(norm)) => Some(match norm.kind {
                    QkNormKind::Head | QkNormKind::BiasedLayer | QkNormKind::RotatedHead => [q, k],
                    QkNormKind::Row => [q.elements(&queries), k.elements(&keys)],
                    QkNormKind::LayerOfHead => [
                        q.parts(std::slice::from_ref(&share.heads.queries)),
                        k.parts(&share.heads.key_runs()),
                    ],
                }),
                (norm, _) => norm,
            },
            qkv: qkv.map(|qkv| qkv.placed(share)),
            latent: self.latent.map(|latent| latent.share(share)),
            gate: self.gate.map(|gate| {
                let heads = share.heads.queries.clone();
                let kept = match spec.attention.has_gates_of_heads(head_dim) {
                    true => vec![heads],
                    false => queries.clone(),
                };
                gate.outputs(&[kept]).placed(share)
            }),
            sink_logits: self
                .sink_logits
                .map(|logits| logits.elements(share.heads.queries.clone())),
            o: self.o.map(|o| o.inputs(&attended, share).placed(share)),
            recurrence: self.recurrence.map(|it| it.share(share)),
            recurrence_block: self.recurrence_block.map(|it| it.share(share)),
            feed_forward: self.feed_forward.map(|block| block.share(share)),
            ..self
        }
    }

    /// The projections that read the results of a recurrence, or its channels, with its sizes.
    fn mixed(&self) -> impl Iterator<Item = (&RecurrenceShape, &ProjectionSource<'a>)> {
        let own = self.recurrence.iter().flat_map(|own| {
            let readers = own.late_of_channels().chain(&self.o);
            readers.map(|reader| (own.shape(), reader))
        });
        let block = self.recurrence_block.iter();
        own.chain(block.map(RecurrenceBlockSource::mixed))
    }

    /// All projections, and whether they belong to an expert or a head, which a device may [stack](Device::STACKS).
    fn projections(&self) -> impl Iterator<Item = (&ProjectionSource<'a>, bool)> {
        let router = match &self.feed_forward {
            Some(FeedForwardSource::Experts { router, .. }) => Some(router),
            Some(FeedForwardSource::Dense(..)) | None => None,
        };
        let beside = self.experts_block.as_ref();
        let router = router.or(beside.and_then(ExpertsBlockSource::router));
        let blocks = self.feed_forward.iter().flat_map(FeedForwardSource::blocks);
        let blocks = blocks.chain(beside.into_iter().flat_map(|it| it.experts.blocks()));
        let blocks = blocks
            .flat_map(|(block, is_chosen)| [&block.up, &block.down].map(|it| (it, is_chosen)));
        let latent = self.latent.iter().flat_map(LatentSource::projections);
        let inputs = self.input_block.iter();
        let beside = self.recurrence_block.iter();
        let late = self.recurrence.iter();
        let whole = self
            .qkv
            .iter()
            .chain(late.flat_map(RecurrenceSource::projections))
            .chain(&self.o)
            .chain(&self.gate)
            .chain(beside.flat_map(|block| [&block.input, &block.output]))
            .chain(inputs.flat_map(|block| [&block.gate, &block.down]))
            .chain(
                self.streams
                    .iter()
                    .flat_map(|it| [&it.router, &it.left, &it.right]),
            )
            .chain(router);
        whole.map(|it| (it, false)).chain(latent).chain(blocks)
    }
}

/// Bytes of projections once they are packed, if float weights are rounded to `precision`; a device may stack some.
fn num_bytes<'p, 'a: 'p, D: Device>(
    projections: impl Iterator<Item = (&'p ProjectionSource<'a>, bool)>,
    precision: Option<WeightPrecision>,
) -> u64 {
    let bytes = projections.map(|(projection, is_stacked)| {
        let form = projection.form(precision, D::HAS_FP8);
        match D::STACKS.filter(|_| is_stacked) {
            Some(stacks) => form.num_stacked_bytes::<D>(stacks, &projection.matrices),
            None => form.num_bytes::<D>(&projection.matrices),
        }
    });
    bytes.sum()
}

/// The learned positions that sequences may have, behind the row of padding if there is one.
fn positions<'a>(
    tensors: &ModelTensors<'a>,
    spec: &ModelSpec,
) -> Result<Option<(Matrix<'a>, Option<TokenId>)>, LoadError> {
    let Some(positions) = spec.learned_positions else {
        return Ok(None);
    };
    let module = Module::of_model(positions.module);
    let matrix = tensors.matrix(module, positions.num_rows, spec.hidden_size)?;
    let num_of_padding = usize::from(positions.padding_id.is_some());
    let rows = matrix.select(RowSelection {
        first: positions.first_row - num_of_padding,
        len: num_of_padding + spec.max_position_embeddings,
        order: RowOrder::Same,
        runs: None,
    });
    Ok(Some((rows, positions.padding_id)))
}

/// The norm of heads, `[len]`, in the order in which their rows are read.
fn in_order_of_heads(norm: Tensor<'_>, len: usize, order: RowOrder) -> Tensor<'_> {
    match order {
        RowOrder::Same => norm,
        RowOrder::Heads { .. } | RowOrder::AdjacentTails { .. } | RowOrder::Tiled { .. } => norm
            .select(RowSelection {
                first: 0,
                len,
                order,
                runs: None,
            }),
    }
}
