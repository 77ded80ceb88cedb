//! The layer of a head for multi-token prediction, on a device.

use super::head_step::{HeadOutputs, HeadStep};
use super::mtp_source::MtpSource;
use crate::decoder::Decoder;
use crate::draft_model::limits_of_draft_model;
use crate::embedding_rows::load_embedding;
use crate::limits::RunnerLimits;
use crate::linear_weights::NormWeights;
use crate::packer::Packer;
use crate::residual::norm_of;
use crate::spec::NormSpec;
use crate::weights::{Head, Weights};
use inflight_base::LoadError;
use inflight_device::{Device, EmbeddingTable, Linear, Output, StateOps};

/// The layer, which is one of the model's, and what is in front of it and behind it.
pub(super) struct MtpLayer<D: Device> {
    ops: D::States,
    decoder: Decoder<D>,
    norm: NormSpec,
    embedding_scale: f32,
    own: OwnWeights<D>,
    /// Embeddings, and then states, `[max_num_tokens, hidden_size]`.
    input: D::Sums,
    /// As they are normalised, `[max_num_tokens, hidden_size]`.
    normed: D::Inputs,
}

/// Weights outside of the layer.
struct OwnWeights<D: Device> {
    /// The norms of embeddings and of states.
    input_norms: [NormWeights<D>; 2],
    /// The projections of embeddings and of states to the layer's input.
    projections: [Linear<D>; 2],
    /// `None`: it has the model's.
    embedding: Option<D::Embedding>,
}

impl<D: Device> MtpLayer<D> {
    /// Loads the head of a model with these limits.
    pub(super) fn load(
        source: &MtpSource,
        limits: &RunnerLimits,
        device: &mut D,
        ops: D::States,
    ) -> Result<Self, LoadError> {
        let limits = limits_of_draft_model(limits);
        let tensors = source.tensors()?;
        let sources = source.weights(&tensors)?;
        let mut own = None;
        let decoder = Decoder::of_layers(source.spec(), &limits, device, |device| {
            let mut packer = Packer::new(device, limits.weights, None);
            let layer = sources.layer.load(&mut packer)?;
            let final_norm = sources.final_norm.load(&mut packer)?;
            let [of_embeddings, of_states] = &sources.input_norms;
            let input_norms = [
                of_embeddings.load(&mut packer)?,
                of_states.load(&mut packer)?,
            ];
            let [of_embeddings, of_states] = &sources.projections;
            let projections = [
                of_embeddings.load(&mut packer)?,
                of_states.load(&mut packer)?,
            ];
            let lm_head = match &sources.output_layer {
                Some(matrix) => Some(Linear {
                    matrix: packer.pack_output_layer(matrix)?,
                    bias: None,
                    place: None,
                }),
                None => None,
            };
            let embedding = match &sources.embedding {
                Some(rows) => Some(load_embedding(device, rows)?),
                None => None,
            };
            tensors.store().check()?;
            own = Some(OwnWeights {
                input_norms,
                projections,
                embedding,
            });
            let head = Head {
                final_norm: Some(final_norm),
                projection: None,
                lm_head,
            };
            Ok(Weights::of_layers(vec![layer], head))
        })?;
        let Some(own) = own else {
            unreachable!("the weights of the layer are loaded with them")
        };
        let spec = source.spec();
        let max_rows = limits.max_num_tokens.index();
        Ok(Self {
            ops,
            decoder,
            norm: spec.norm,
            embedding_scale: spec.embedding_scale,
            own,
            input: device.alloc_sums(max_rows, spec.hidden_size)?,
            normed: device.alloc_inputs(max_rows, spec.hidden_size)?,
        })
    }

    /// Computes tokens and the states that they follow, see [`HeadStep`].
    pub(super) fn compute(
        &mut self,
        device: &mut D,
        cache: &mut D::KvCache,
        at: HeadStep<'_, '_, D>,
        out: HeadOutputs<'_, D>,
    ) {
        let HeadStep {
            step,
            inputs,
            states,
            shared,
        } = at;
        let Self {
            ops,
            decoder,
            own,
            input,
            normed,
            ..
        } = self;
        let num_rows = inputs.token_ids.len();
        let embedding = match &own.embedding {
            Some(own) => EmbeddingTable::Own(own),
            None => shared.embedding,
        };
        let [of_embeddings, of_states] = &own.input_norms;
        let [from_embeddings, from_states] = &own.projections;
        let norm = |weights| norm_of(&self.norm, Some(weights));
        let hidden = decoder.hidden_mut();
        device.embed(step, embedding, self.embedding_scale, input);
        device.norm(num_rows, input, norm(of_embeddings), normed);
        device.project(
            num_rows,
            normed,
            from_embeddings,
            Output::Store,
            None,
            hidden,
        );
        ops.write_sums(device, states, input);
        device.norm(num_rows, input, norm(of_states), normed);
        device.project(num_rows, normed, from_states, Output::Add, None, hidden);
        let layers = 0..decoder.num_layers();
        decoder.compute_layers(device, cache, step, inputs, layers, &mut ());
        let num_kept = inputs.kept_rows.len();
        if num_kept > 0 {
            let normed = decoder.normed();
            ops.read_states(device, normed, num_kept, out.states);
            let lm_head = decoder.own_output_layer().unwrap_or(shared.output_layer);
            device.logits(
                num_kept,
                normed,
                lm_head,
                shared.transform,
                None,
                out.logits,
            );
        }
    }
}
