//! The weights of an EAGLE-3 head, on a device.

use super::eagle_source::EagleSource;
use crate::embedding_rows::load_embedding;
use crate::packer::{Packer, Packing};
use crate::precision::WeightPrecision;
use crate::spec::FeedForward;
use inflight_base::{LoadError, TokenId};
use inflight_checkpoint::{Matrix, RowOrder};
use inflight_device::{Activation, Device, Linear};
use inflight_numbers::Stacking;

/// All weights of a head but `fc`.
pub(super) struct EagleWeights<D: Device> {
    /// `None`: it has the model's.
    pub(super) embedding: Option<D::Embedding>,
    /// The norms of embeddings and of states, `[hidden_size]`.
    pub(super) input_norms: [D::Vector; 2],
    /// The columns of queries, keys and values for each of the two, `[q_width + 2 * kv_width, hidden_size]`.
    pub(super) qkv: [Linear<D>; 2],
    pub(super) o: Linear<D>,
    pub(super) feed_forward_norm: D::Vector,
    /// Interleaved.
    pub(super) gate_up: Linear<D>,
    pub(super) activation: Activation,
    pub(super) down: Linear<D>,
    pub(super) final_norm: D::Vector,
    /// `[draft_vocab_size, hidden_size]`.
    pub(super) lm_head: Linear<D>,
    /// The token of the model for each of its own; `None`: the same.
    pub(super) tokens: Option<Vec<TokenId>>,
}

impl<D: Device> EagleWeights<D> {
    pub(super) fn load(
        source: &EagleSource,
        precision: Option<WeightPrecision>,
        device: &mut D,
    ) -> Result<Self, LoadError> {
        const EMBEDDING: &str = "embed_tokens";
        let spec = source.spec();
        let store = source.store()?;
        let width = spec.hidden_size;
        let matrix = |module: &str, outputs, inputs| {
            store.matrix(&source.in_layer(module), outputs, inputs, RowOrder::Same)
        };
        let norm = |name: String| store.vector(&format!("{name}.weight"), width, RowOrder::Same);
        let embedding = match store.has(&format!("{EMBEDDING}.weight")) {
            true => {
                let rows = store.matrix(EMBEDDING, spec.vocab_size, width, RowOrder::Same)?;
                Some(load_embedding(device, &rows)?)
            }
            false if width == source.embedding_width() => None,
            false => {
                return Err(LoadError::Config {
                    problem: format!(
                        "the head has no {EMBEDDING}.weight, and {width} is not the width {} of the embeddings of the \
                         model, which it would share",
                        source.embedding_width()
                    ),
                    remedy: "name the checkpoint of a head with embeddings".to_owned(),
                });
            }
        };
        let [q_len, kv_len] = [spec.num_heads, spec.num_kv_heads].map(|num| num * spec.head_dim);
        let projections = ["q_proj", "k_proj", "v_proj"].into_iter();
        let qkv = projections
            .zip([q_len, kv_len, kv_len])
            .map(|(name, len)| matrix(&format!("self_attn.{name}"), len, 2 * width));
        let qkv = qkv.collect::<Result<Vec<_>, _>>()?;
        let FeedForward::Gated {
            activation, down, ..
        } = &spec.layers[0].feed_forward
        else {
            unreachable!("a Llama layer has a gated block")
        };
        let inner = down.num_inputs;
        let mut packer = Packer::new(device, precision, None);
        let input_norms = ["input_layernorm", "hidden_norm"]
            .map(|name| packer.upload(&norm(source.in_layer(name))?));
        let [embeddings, states] = input_norms;
        let of_columns = [0..width, width..2 * width].map(|columns| {
            let parts = qkv.iter();
            let parts = parts.map(|it| it.part(0..it.rows(), columns.clone()));
            load_linear(&mut packer, &parts.collect::<Vec<_>>())
        });
        let [of_embeddings, of_states] = of_columns;
        let gate_up = [
            matrix("mlp.gate_proj", inner, width)?,
            matrix("mlp.up_proj", inner, width)?,
        ];
        let gate_up = packer.pack(&gate_up, packing(Stacking::Interleaved))?;
        let lm_head = store.matrix("lm_head", source.draft_vocab_size(), width, RowOrder::Same)?;
        let weights = Self {
            embedding,
            input_norms: [embeddings?, states?],
            qkv: [of_embeddings?, of_states?],
            o: load_linear(&mut packer, &[matrix("self_attn.o_proj", width, q_len)?])?,
            feed_forward_norm: packer
                .upload(&norm(source.in_layer("post_attention_layernorm"))?)?,
            gate_up: unplaced(gate_up),
            activation: *activation,
            down: load_linear(&mut packer, &[matrix("mlp.down_proj", width, inner)?])?,
            final_norm: packer.upload(&norm("norm".to_owned())?)?,
            lm_head: unplaced(packer.pack_output_layer(&lm_head)?),
            tokens: source.tokens(&store)?,
        };
        store.check()?;
        Ok(weights)
    }
}

/// Packs matrices with the same inputs, one below the other.
pub(super) fn load_linear<D: Device>(
    packer: &mut Packer<'_, D>,
    parts: &[Matrix<'_>],
) -> Result<Linear<D>, LoadError> {
    parts.iter().try_for_each(Matrix::preload)?;
    Ok(unplaced(
        packer.pack(parts, packing(Stacking::Concatenated))?,
    ))
}

fn packing(stacking: Stacking) -> Packing {
    Packing {
        stacking,
        index: None,
        is_exact: false,
    }
}

/// A projection without a bias that adapters do not change.
fn unplaced<D: Device>(matrix: D::Matrix) -> Linear<D> {
    Linear {
        matrix,
        bias: None,
        place: None,
    }
}
