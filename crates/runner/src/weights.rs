//! The weights of a decoder, packed for a device.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use bytemuck::allocation::try_zeroed_vec;
use half::bf16;
use half::slice::HalfFloatSliceExt;

use super::experts_block::ExpertsBlockWeights;
use super::latent::LatentWeights;
use super::layer_inputs::{InputBlockWeights, LayerInputsWeights};
use super::linear_weights::{NormWeights, ProjectionSource, SummedLinear, linears_of};
use super::model_source::ModelSource;
use super::packer::Packer;
use super::positions::Positions;
use super::precision::WeightPrecision;
use super::progress::Progress;
use super::recurrence::LayerRecurrence;
use super::spec::{FeedForward, Norms};
use super::stage::ModelPart;
use super::summed::Summed;
use super::weight_sources::{
    DenseSource, ExpertsSource, FeedForwardSource, LayerSource, WeightSources,
};
use inflight_base::LoadError;
use inflight_checkpoint::Matrix;
use inflight_device::{
    Device, EmbeddingTable, Expert, Experts, Gating, InnerActivation, Linear, PackedWeights,
};

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
    /// Those of the stage.
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
    /// queries, or their latents.
    pub(super) qkv: Linear<D>,
    pub(super) latent: Option<LatentWeights<D>>,
    /// In place of attention: `qkv` makes what it reads.
    pub(super) recurrence: Option<LayerRecurrence<D>>,
    /// The gates of attention, `[q_width, hidden_size]`.
    pub(super) gate: Option<Linear<D>>,
    /// The norms of queries and of keys.
    pub(super) qk_norm: Option<[D::Vector; 2]>,
    /// The attention-sink logit of each query head.
    pub(super) sink_logits: Option<D::Vector>,
    /// `[hidden_size, q_width]`.
    pub(super) o: SummedLinear<D>,
    pub(super) feed_forward: FeedForwardWeights<D>,
    /// Experts beside the feed-forward block.
    pub(super) experts_block: Option<ExpertsBlockWeights<D>>,
    /// The block that reads the layer's own inputs.
    pub(super) input_block: Option<InputBlockWeights<D>>,
    /// The factor of the residual stream behind all blocks.
    pub(super) scale: Option<f32>,
}

/// A feed-forward block.
pub(super) enum FeedForwardWeights<D: Device> {
    Dense(DenseWeights<D>),
    Experts {
        /// `[num_logits, hidden_size]`.
        router: Linear<D>,
        /// The corrections of the scores of experts.
        correction: Option<D::Vector>,
        /// The tiles of a rank of several have some of the inside of all experts each.
        experts: Summed<D, Experts<D>>,
    },
}

/// A block without experts.
pub(super) struct DenseWeights<D: Device> {
    /// To the inside: `[intermediate_size, hidden_size]`, or gate and up interleaved: `[2 * intermediate_size,
    /// hidden_size]`.
    pub(super) up: Linear<D>,
    pub(super) activation: InnerActivation,
    /// `[hidden_size, intermediate_size]`.
    pub(super) down: SummedLinear<D>,
}

impl<D: Device> Layer<D> {
    /// In the order in which they were packed.
    fn matrices(&self) -> impl Iterator<Item = &D::Matrix> {
        let mut linears = vec![&self.qkv];
        linears.extend(self.latent.iter().flat_map(LatentWeights::linears));
        linears.extend(linears_of(&self.o));
        linears.extend(&self.gate);
        match &self.feed_forward {
            FeedForwardWeights::Dense(dense) => {
                linears.push(&dense.up);
                linears.extend(linears_of(&dense.down));
            }
            FeedForwardWeights::Experts {
                router, experts, ..
            } => {
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
        let outside = outside.into_iter().flatten().map(|linear| &linear.matrix);
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
    fn load<D: Device>(self, packer: &mut Packer<'_, D>) -> Result<Layer<D>, LoadError> {
        Ok(Layer {
            norms: self.norms.try_map(|norm| norm.load(packer))?,
            qkv: self.qkv.load(packer)?,
            latent: match self.latent {
                Some(latent) => Some(latent.load(packer)?),
                None => None,
            },
            recurrence: match &self.recurrence {
                Some(recurrence) => Some(recurrence.load(packer)?),
                None => None,
            },
            qk_norm: match &self.qk_norm {
                Some([q, k]) => Some([q.load(packer)?.weight, k.load(packer)?.weight]),
                None => None,
            },
            sink_logits: match &self.sink_logits {
                Some(logits) => Some(packer.upload(logits)?),
                None => None,
            },
            o: self.o.load_summed(packer)?,
            gate: match &self.gate {
                Some(gate) => Some(gate.load(packer)?),
                None => None,
            },
            feed_forward: self.feed_forward.load(packer)?,
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
        })
    }
}

impl FeedForwardSource<'_> {
    pub(super) fn load<D: Device>(
        self,
        packer: &mut Packer<'_, D>,
    ) -> Result<FeedForwardWeights<D>, LoadError> {
        Ok(match self {
            Self::Dense(spec, block) => {
                let activation = match spec {
                    FeedForward::Gated { activation, .. } => InnerActivation::Gated(*activation),
                    FeedForward::Plain { activation, .. } => InnerActivation::Plain(*activation),
                    FeedForward::Experts(_) => unreachable!("its weights are those of experts"),
                };
                FeedForwardWeights::Dense(DenseWeights {
                    up: block.up.load(packer)?,
                    activation,
                    down: block.down.load_summed(packer)?,
                })
            }
            Self::Experts {
                router,
                correction,
                gating,
                tiles,
            } => FeedForwardWeights::Experts {
                router: router.load(packer)?,
                correction: match correction {
                    Some(correction) => Some(packer.upload(&correction)?),
                    None => None,
                },
                experts: Summed::of_tiles(
                    tiles
                        .into_iter()
                        .map(|tile| tile.load(gating, packer))
                        .collect::<Result<_, _>>()?,
                )?,
            },
        })
    }
}

impl ExpertsSource<'_> {
    /// `None` if there is nothing of any.
    fn load<D: Device>(
        self,
        gating: Gating,
        packer: &mut Packer<'_, D>,
    ) -> Result<Option<Experts<D>>, LoadError> {
        if self.chosen.is_empty() && self.shared.is_none() {
            return Ok(None);
        }
        Ok(Some(Experts {
            gating,
            chosen: load_experts(self.chosen, packer)?,
            shared: match &self.shared {
                Some(shared) => Some(shared.load(packer)?),
                None => None,
            },
        }))
    }
}

impl DenseSource<'_> {
    fn load<D: Device>(&self, packer: &mut Packer<'_, D>) -> Result<Expert<D>, LoadError> {
        Ok(Expert {
            gate_up: self.up.load(packer)?,
            down: self.down.load(packer)?,
        })
    }
}

/// Packs the experts of a layer as the device wants them: each by itself, or all as one.
fn load_experts<D: Device>(
    experts: Vec<DenseSource<'_>>,
    packer: &mut Packer<'_, D>,
) -> Result<Vec<Expert<D>>, LoadError> {
    let Some(stacks) = D::STACKS else {
        return experts.iter().map(|expert| expert.load(packer)).collect();
    };
    let (gate_up, down): (Vec<_>, Vec<_>) = experts
        .into_iter()
        .map(|expert| (expert.up, expert.down))
        .unzip();
    Ok(vec![Expert {
        gate_up: ProjectionSource::load_stacked(gate_up, stacks, packer)?,
        down: ProjectionSource::load_stacked(down, stacks, packer)?,
    }])
}

/// Reads the embedding as bf16.
pub(super) fn load_embedding<D: Device>(
    device: &mut D,
    source: &Matrix<'_>,
) -> Result<D::Embedding, LoadError> {
    source.preload()?;
    let hidden_size = source.columns();
    let len = source.rows() * hidden_size;
    let mut rows = try_zeroed_vec::<bf16>(len)
        .map_err(|()| LoadError::Resource(format!("no memory for an embedding of {len} bf16")))?;
    let threads = device.host_threads();
    let mut rows_f32 = vec![vec![0.0; hidden_size]; threads.num_threads()];
    let bad_row = AtomicUsize::new(usize::MAX);
    threads.for_each_row(
        &mut rows_f32,
        &mut rows,
        hidden_size,
        |row_f32, index, row| {
            source.read_row(index, row_f32);
            row.convert_from_f32_slice(row_f32);
            // A fold and not a search: it is vectorised, and bad values are the exception.
            if !row
                .iter()
                .fold(true, |finite, value| finite & value.is_finite())
            {
                bad_row.fetch_min(index, Ordering::Relaxed);
            }
        },
    );
    match bad_row.into_inner() {
        usize::MAX => device.upload_embedding(rows, hidden_size),
        row => Err(source.not_finite(row)),
    }
}
