//! The weights of a decoder, packed for a device.

use std::time::Instant;

use super::embedding_rows::load_embedding;
use super::experts_block::ExpertsBlockWeights;
use super::feed_forward_weights::FeedForwardWeights;
use super::latent::LatentWeights;
use super::layer_inputs::{InputBlockWeights, LayerInputsWeights};
use super::linear_weights::{NormWeights, SummedLinear, linears_of};
use super::model_source::ModelSource;
use super::packer::Packer;
use super::positions::Positions;
use super::precision::WeightPrecision;
use super::progress::Progress;
use super::recurrence::{LayerRecurrence, RecurrenceBlockWeights};
use super::spec::{Multipliers, Norms};
use super::stage::ModelPart;
use super::stream_weights::{LayerStreams, StreamsWeights};
use super::weight_sources::{LayerSource, WeightSources};
use inflight_base::LoadError;
use inflight_device::{Device, EmbeddingTable, Linear, PackedWeights};

/// All weights of a model, on a device.
pub(super) struct Weights<D: Device> {
    /// `None` if `lm_head` has its rows, and after the first stage.
    embedding: Option<D::Embedding>,
    /// From embeddings of another width to the residual stream. Only in the first stage.
    pub(super) embedding_projection: Option<Linear<D>>,
    positions: Option<Positions<D>>,
    /// The row of the first type of tokens, and the difference between it and the row of the second one.
    pub(super) types: Vec<D::Vector>,
    /// The norm of the embedded tokens.
    pub(super) embedding_norm: Option<NormWeights<D>>,
    /// Inputs of each layer's own.
    pub(super) layer_inputs: Option<LayerInputsWeights<D>>,
    /// Between tokens and other residual streams.
    pub(super) streams: Option<StreamsWeights<D>>,
    /// The layers of the stage.
    pub(super) layers: Vec<Layer<D>>,
    /// Only in the last stage.
    pub(super) head: Option<Head<D>>,
}

/// What comes after the last layer.
pub(super) struct Head<D: Device> {
    /// `None` if the last layer has normalised the residual stream.
    pub(super) final_norm: Option<NormWeights<D>>,
    /// From the residual stream to the width of embeddings, if that is another one.
    pub(super) projection: Option<Linear<D>>,
    /// `[vocab_size, embedding_width]`; `None` if nothing is generated.
    pub(super) lm_head: Option<Linear<D>>,
}

/// One decoder layer.
pub(super) struct Layer<D: Device> {
    pub(super) norms: Norms<NormWeights<D>>,
    /// Queries, keys and values in one: `[q_width + 2 * kv_width, hidden_size]`. With latent attention only the
    /// queries, or their latents. `None` without attention.
    pub(super) qkv: Option<Linear<D>>,
    pub(super) latent: Option<LatentWeights<D>>,
    /// In place of attention: `qkv` makes what it reads.
    pub(super) recurrence: Option<LayerRecurrence<D>>,
    /// The gates of attention, `[q_width, hidden_size]`.
    pub(super) gate: Option<Linear<D>>,
    /// The largest magnitude of queries, keys and values.
    pub(super) clip: Option<f32>,
    /// The norms of queries and of keys.
    pub(super) qk_norm: Option<[D::Vector; 2]>,
    /// The attention-sink logit of each query head.
    pub(super) sink_logits: Option<D::Vector>,
    /// `[hidden_size, q_width]`. `None` without attention.
    pub(super) o: Option<SummedLinear<D>>,
    /// A recurrence beside attention.
    pub(super) recurrence_block: Option<RecurrenceBlockWeights<D>>,
    /// `None` for a layer that has attention alone.
    pub(super) feed_forward: Option<FeedForwardWeights<D>>,
    /// Experts beside the feed-forward block.
    pub(super) experts_block: Option<ExpertsBlockWeights<D>>,
    /// The block that reads the layer's own inputs.
    pub(super) input_block: Option<InputBlockWeights<D>>,
    /// The factor of the residual stream behind all blocks.
    pub(super) scale: Option<f32>,
    /// The factors of what its blocks compute.
    pub(super) multipliers: Option<Multipliers>,
    /// The factors of the columns of what attention and the feed-forward block compute.
    pub(super) column_factors: Option<[D::Vector; 2]>,
    /// Of the other residual streams.
    pub(super) streams: Option<LayerStreams<D>>,
    /// The gates that count, in standard deviations above the mean.
    pub(super) gate_cutoff: Option<f32>,
    /// The norms of what attention gives and of the inside of the feed-forward block.
    pub(super) inner_norms: Option<[D::Vector; 2]>,
}

impl<D: Device> Layer<D> {
    /// In the order in which they were packed.
    fn matrices(&self) -> impl Iterator<Item = &D::Matrix> {
        let mut linears: Vec<_> = self.qkv.iter().collect();
        linears.extend(self.latent.iter().flat_map(LatentWeights::linears));
        linears.extend(self.recurrence.iter().flat_map(LayerRecurrence::linears));
        linears.extend(self.o.iter().flat_map(linears_of));
        linears.extend(&self.gate);
        if let Some(block) = &self.recurrence_block {
            linears.push(&block.input);
            linears.extend(linears_of(&block.output));
        }
        match &self.feed_forward {
            None => {}
            Some(FeedForwardWeights::Dense(dense)) => {
                linears.push(&dense.up);
                linears.extend(linears_of(&dense.down));
            }
            Some(FeedForwardWeights::Experts {
                router, experts, ..
            }) => {
                linears.push(router);
                for experts in experts.parts() {
                    let all = experts.chosen.iter().chain(&experts.shared);
                    linears.extend(all.flat_map(|expert| [&expert.gate_up, &expert.down]));
                }
            }
        }
        linears.extend(
            self.experts_block
                .iter()
                .flat_map(ExpertsBlockWeights::linears),
        );
        if let Some(block) = &self.input_block {
            linears.push(&block.gate);
            linears.extend(linears_of(&block.down));
        }
        if let Some(streams) = &self.streams {
            linears.extend([&streams.router, &streams.left]);
            linears.extend(linears_of(&streams.right));
        }
        linears.into_iter().map(|linear| &linear.matrix)
    }
}

impl<D: Device> Weights<D> {
    /// Finds and checks all weights, and packs those of the part of a rank.
    ///
    /// # Errors
    /// A tensor is missing, misshapen, not finite or changed while it was read, or memory is short.
    pub(super) fn load(
        source: &ModelSource,
        precision: Option<WeightPrecision>,
        part: &ModelPart,
        device: &mut D,
    ) -> Result<Self, LoadError> {
        let started = Instant::now();
        let spec = source.spec();
        let tensors = source.tensors()?;
        let store = tensors.store();
        let stage = &part.stage;
        let mut sources = WeightSources::find(&tensors, spec)?;
        sources.layers = sources.layers.drain(stage.layers.clone()).collect();
        if let Some(share) = &part.share {
            sources = sources.share(share, &spec.layers[stage.layers.clone()], spec.head_dim);
        }
        let cache = match part.is_whole() {
            true => source.open_weight_cache(precision, device),
            false => None,
        };
        let mut packer = Packer::new(device, precision, cache);

        let mut layers = Vec::with_capacity(stage.layers.len());
        let mut progress = Progress::new(stage.layers.len());
        // Dropping a layer's source frees what was preloaded for it.
        for source in sources.layers.drain(..) {
            layers.push(source.load(&mut packer)?);
            store.check()?;
            progress.report(layers.len());
        }
        let output_place = spec.output_place() * part.num_tiles();
        let head = match stage.is_last() {
            true => Some(sources.load_head(output_place, &mut packer)?),
            false => None,
        };
        let embedding_projection = match &sources.embedding_projections {
            Some([input, _]) if stage.is_first() => Some(input.load(&mut packer)?),
            _ => None,
        };
        let packed_inputs = match &sources.layer_inputs {
            Some(inputs) => Some(inputs.pack(&mut packer)?),
            None => None,
        };
        let streams = match &sources.streams {
            Some(streams) => Some(streams.load(&mut packer)?),
            None => None,
        };
        let types = match &sources.token_types {
            Some(types) if stage.is_first() => packer.upload_types(types)?,
            _ => Vec::new(),
        };
        let embedding_norm = match &sources.embedding_norm {
            Some(norm) if stage.is_first() => Some(norm.load(&mut packer)?),
            _ => None,
        };
        store.check()?;
        let packed = layers.iter().flat_map(Layer::matrices);
        let lm_head = head.as_ref().and_then(|head| head.lm_head.as_ref());
        let output_projection = head.as_ref().and_then(|head| head.projection.as_ref());
        let input_projection = packed_inputs.as_ref().map(|(projection, _)| projection);
        let outside = [
            output_projection,
            lm_head,
            embedding_projection.as_ref(),
            input_projection,
        ];
        let of_streams = streams.iter().flat_map(StreamsWeights::linears);
        let outside = outside.into_iter().flatten().chain(of_streams);
        let outside = outside.map(|linear| &linear.matrix);
        packer.keep(packed.chain(outside));
        let num_requantised = packer.num_requantised();
        let has_rows = |lm_head: &Linear<D>| lm_head.matrix.has_rows();
        let is_embedding = sources.output_layer.is_none() && lm_head.is_some_and(has_rows);
        let embedding = match stage.is_first() && !is_embedding {
            true => Some(load_embedding(device, &sources.embedding)?),
            false => None,
        };
        let positions = match &sources.positions {
            Some((positions, padding_id)) if stage.is_first() => Some(Positions {
                table: load_embedding(device, positions)?,
                padding_id: *padding_id,
            }),
            _ => None,
        };
        let layer_inputs = match sources.layer_inputs.as_ref().zip(packed_inputs) {
            Some((inputs, packed)) => Some(inputs.load(device, packed)?),
            None => None,
        };
        store.check()?;
        let weights = Self {
            layer_inputs,
            streams,
            embedding,
            embedding_projection,
            positions,
            types,
            embedding_norm,
            layers,
            head,
        };
        if num_requantised > 0 {
            log::info!(
                "{num_requantised} projections were quantised again, to int8 in groups of 32: no kernel supports their \
                 format, or their parts have different formats"
            );
        }
        log::info!(
            "loaded {} of {:.1} MB in {:.1} s; computing with {}",
            spec.family,
            store.num_bytes() as f64 / 1e6,
            started.elapsed().as_secs_f64(),
            device.description()
        );
        Ok(weights)
    }

    /// The weights of layers that begin with rows that they are given, and of what is behind them.
    pub(super) fn of_layers(layers: Vec<Layer<D>>, head: Head<D>) -> Self {
        Self {
            embedding: None,
            embedding_projection: None,
            positions: None,
            types: Vec::new(),
            embedding_norm: None,
            layer_inputs: None,
            streams: None,
            layers,
            head: Some(head),
        }
    }

    /// The rows of learned positions.
    pub(super) fn positions(&self) -> Option<&Positions<D>> {
        self.positions.as_ref()
    }

    /// The rows of the token embedding, `[vocab_size, embedding_width]`. Only in the first stage.
    pub(super) fn embedding(&self) -> EmbeddingTable<'_, D> {
        match &self.embedding {
            Some(embedding) => EmbeddingTable::Own(embedding),
            None => EmbeddingTable::Tied(&self.output_layer().matrix),
        }
    }

    /// The output layer, if this stage has it.
    pub(super) fn lm_head(&self) -> Option<&Linear<D>> {
        self.head.as_ref()?.lm_head.as_ref()
    }

    /// The output layer. Only in the last stage of a model that generates.
    pub(super) fn output_layer(&self) -> &Linear<D> {
        match self.lm_head() {
            Some(lm_head) => lm_head,
            None => unreachable!("only the last stage has logits"),
        }
    }
}

impl WeightSources<'_> {
    fn load_head<D: Device>(
        &self,
        place: usize,
        packer: &mut Packer<'_, D>,
    ) -> Result<Head<D>, LoadError> {
        Ok(Head {
            final_norm: match &self.final_norm {
                Some(norm) => Some(norm.load(packer)?),
                None => None,
            },
            projection: match &self.embedding_projections {
                Some([_, output]) => Some(output.load(packer)?),
                None => None,
            },
            lm_head: match self.output_matrix() {
                Some(matrix) => Some(Linear {
                    matrix: packer.pack_output_layer(matrix)?,
                    bias: match &self.output_bias {
                        Some(bias) => Some(packer.upload(bias)?),
                        None => None,
                    },
                    place: Some(place),
                }),
                None => None,
            },
        })
    }
}

impl LayerSource<'_> {
    pub(super) fn load<D: Device>(self, packer: &mut Packer<'_, D>) -> Result<Layer<D>, LoadError> {
        Ok(Layer {
            norms: self.norms.try_map(|norm| norm.load(packer))?,
            qkv: match &self.qkv {
                Some(qkv) => Some(qkv.load(packer)?),
                None => None,
            },
            latent: match self.latent {
                Some(latent) => Some(latent.load(packer)?),
                None => None,
            },
            recurrence: match &self.recurrence {
                Some(recurrence) => Some(recurrence.load(packer)?),
                None => None,
            },
            clip: self.clip,
            qk_norm: match &self.qk_norm {
                Some([q, k]) => Some([q.load(packer)?.weight, k.load(packer)?.weight]),
                None => None,
            },
            sink_logits: match &self.sink_logits {
                Some(logits) => Some(packer.upload(logits)?),
                None => None,
            },
            o: match &self.o {
                Some(o) => Some(o.load_summed(packer)?),
                None => None,
            },
            gate: match &self.gate {
                Some(gate) => Some(gate.load(packer)?),
                None => None,
            },
            recurrence_block: match &self.recurrence_block {
                Some(block) => Some(block.load(packer)?),
                None => None,
            },
            feed_forward: match self.feed_forward {
                Some(block) => Some(block.load(packer, self.multipliers)?),
                None => None,
            },
            experts_block: match self.experts_block {
                Some(block) => Some(block.load(packer)?),
                None => None,
            },
            input_block: match &self.input_block {
                Some(block) => Some(block.load(packer)?),
                None => None,
            },
            scale: match self.scale {
                Some(scale) => scale.to_f32()?.first().copied(),
                None => None,
            },
            multipliers: self.multipliers,
            column_factors: match &self.column_factors {
                Some([attention, feed_forward]) => {
                    Some([packer.upload(attention)?, packer.upload(feed_forward)?])
                }
                None => None,
            },
            streams: match &self.streams {
                Some(streams) => Some(streams.load(packer)?),
                None => None,
            },
            gate_cutoff: self.gate_cutoff,
            inner_norms: match &self.inner_norms {
                Some([attended, inside]) => {
                    Some([attended.load(packer)?.weight, inside.load(packer)?.weight])
                }
                None => None,
            },
        })
    }
}
