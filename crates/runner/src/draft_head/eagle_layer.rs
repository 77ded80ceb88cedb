//! The layer of an EAGLE-3 head, on a device.

use super::eagle_source::EagleSource;
use super::eagle_weights::EagleWeights;
use super::head_step::{HeadOutputs, HeadStep};
use crate::layer_attention::upload_angles;
use crate::limits::RunnerLimits;
use inflight_base::{LoadError, TokenId};
use inflight_device::{
    AttentionParams, Device, EmbeddingTable, HeadBiases, HeadShape, InnerActivation,
    LogitsTransform, Norm, Output, RopeParams, StateOps,
};

/// The weights of a head, and the activations of its largest pass.
pub(super) struct EagleLayer<D: Device> {
    ops: D::States,
    weights: EagleWeights<D>,
    angles: D::Angles,
    heads: HeadShape,
    attention: AttentionParams,
    norm_eps: f32,
    /// Whether its layer adds to the states as their norm leaves them.
    adds_to_normed: bool,
    buffers: Buffers<D>,
}

/// Activations, each `[max_num_tokens, width]`.
struct Buffers<D: Device> {
    embedded: D::Sums,
    hidden: D::Sums,
    normed: D::Inputs,
    qkv: D::Sums,
    q: D::Inputs,
    attended: D::Inputs,
    inner: D::Inputs,
}

impl<D: Device> EagleLayer<D> {
    /// Loads a head for a model with these limits.
    pub(super) fn load(
        source: &EagleSource,
        limits: &RunnerLimits,
        device: &mut D,
        ops: D::States,
    ) -> Result<Self, LoadError> {
        let spec = source.spec();
        let weights = EagleWeights::load(source, limits.weights, device)?;
        let max_rows = limits.max_num_tokens.index();
        let heads = spec.head_shape(0);
        let attention = &spec.layers[0].attention;
        let max_seq_len = limits.max_seq_len;
        let ropes = [(&attention.rope, spec.head_dim)];
        let mut angles = upload_angles(device, spec, &ropes, max_seq_len, max_seq_len)?;
        let Some(angles) = angles.pop() else {
            unreachable!("there is one table for each position embedding")
        };
        let width = spec.hidden_size;
        Ok(Self {
            ops,
            weights,
            angles,
            heads,
            attention: AttentionParams {
                shape: heads,
                scale: attention.scale,
                soft_cap: attention.soft_cap,
                window: None,
                chunk: None,
                is_bidirectional: false,
                num_sinks: 0,
                shifts_sinks: false,
            },
            norm_eps: spec.norm.eps,
            adds_to_normed: source.adds_to_normed(),
            buffers: Buffers {
                embedded: device.alloc_sums(max_rows, width)?,
                hidden: device.alloc_sums(max_rows, width)?,
                normed: device.alloc_inputs(max_rows, width)?,
                qkv: device.alloc_sums(max_rows, heads.qkv_len())?,
                q: device.alloc_inputs(max_rows, heads.q_len())?,
                attended: device.alloc_inputs(max_rows, heads.q_len())?,
                inner: device.alloc_inputs(max_rows, spec.max_intermediate_size())?,
            },
        })
    }

    /// The token of the model for one of its own.
    pub(super) fn token_of(&self, own: u32) -> TokenId {
        let tokens = self.weights.tokens.as_deref();
        tokens.map_or(own, |tokens| tokens[own as usize])
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
            weights,
            buffers,
            ..
        } = self;
        let Buffers {
            embedded,
            hidden,
            normed,
            qkv,
            q,
            attended,
            inner,
        } = buffers;
        let num_rows = inputs.token_ids.len();
        let eps = self.norm_eps;
        let rms = |weight| Norm::Rms { weight, eps };
        let embedding = match &weights.embedding {
            Some(own) => EmbeddingTable::Own(own),
            None => shared.embedding,
        };
        device.embed(step, embedding, 1.0, embedded);
        ops.write_sums(device, states, hidden);
        let [of_embeddings, of_states] = &weights.input_norms;
        device.norm(num_rows, embedded, rms(of_embeddings), normed);
        device.project(num_rows, normed, &weights.qkv[0], Output::Store, None, qkv);
        match self.adds_to_normed {
            true => ops.norm_in_place(device, num_rows, hidden, rms(of_states), normed),
            false => device.norm(num_rows, hidden, rms(of_states), normed),
        }
        device.project(num_rows, normed, &weights.qkv[1], Output::Add, None, qkv);
        let rope = RopeParams {
            heads: self.heads,
            qk_norm: None,
            angles: &self.angles,
        };
        device.rope_and_store(step, rope, qkv, cache, 0, q, None);
        let (params, none) = (&self.attention, HeadBiases::NONE);
        device.paged_attention(step, params, none, (q, None), cache, 0, attended);
        let num_kept = inputs.kept_rows.len();
        if num_kept > 0 {
            device.keep_rows(step, hidden, attended);
            device.project(num_kept, attended, &weights.o, Output::Add, None, hidden);
            device.norm(num_kept, hidden, rms(&weights.feed_forward_norm), normed);
            let gate_up = &weights.gate_up;
            let activation = InnerActivation::Gated(weights.activation);
            device.project_activated(num_kept, normed, gate_up, activation, None, inner);
            device.project(num_kept, inner, &weights.down, Output::Add, None, hidden);
            device.norm(num_kept, hidden, Norm::Identity, normed);
            ops.read_states(device, normed, num_kept, out.states);
            device.norm(num_kept, hidden, rms(&weights.final_norm), normed);
            let transform = LogitsTransform::IDENTITY;
            device.logits(
                num_kept,
                normed,
                &weights.lm_head,
                transform,
                None,
                out.logits,
            );
        }
    }
}
