//! OPT, by Meta.
//!
//! LayerNorm with biases, ReLU in a feed-forward block without a gate, and learned positions, whose first two rows are
//! unused. All linear layers have biases unless `enable_bias` is false. OPT 350M is of another shape: a norm is behind
//! the sum of each block and the residual stream (`do_layer_norm_before: false`), so that there is none behind the last
//! layer, and embeddings are narrower than layers (`word_embed_proj_dim`), with a linear layer without a bias on either
//! side. Refused: checkpoints without a final norm or without weights of norms.
//!
//! Source: modeling_opt.py of transformers; Zhang et al., arXiv:2205.01068.

use super::bounds::MAX_WIDTH;
use super::dimensions::{Defaults, Dimensions, Keys, Sizes};
use super::family::Family;
use super::windows::no_windows;
use crate::rope::Rope;
use crate::spec::{
    EmbeddingProjections, LearnedPositions, ModelModules, ModelSpec, NormKind, Norms, Projection,
};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::Activation;

pub const FAMILY: Family = Family {
    class: "OPTForCausalLM",
    gguf: None,
    describe,
};

/// The row of position 0.
const FIRST_POSITION: usize = 2;

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(50_272, 768, 3072, 12, 12, 2048)),
        norm_eps: 1e-5,
        tied_embeddings: true,
        activation: Activation::Relu,
        keys: Keys {
            intermediate_size: "ffn_dim",
            activation: "activation_function",
            ..Keys::LLAMA
        },
        ..Defaults::LLAMA
    };
    let mut dimensions = Dimensions::from_config(config, &defaults)?;
    check(config)?;
    let is_norm_before = config.bool_or("do_layer_norm_before", true)?;
    dimensions.norm.kind = NormKind::Layer { has_bias: true };
    dimensions.rope = Rope::none();
    let (hidden, q_width) = (dimensions.hidden_size, dimensions.qkv_widths()[0]);
    let has_bias = config.bool_or("enable_bias", true)?;
    let mut layer = dimensions.llama_layer();
    let (attention, feed_forward) = ("self_attn_layer_norm", "final_layer_norm");
    layer.norms = match is_norm_before {
        true => Norms::before(attention, feed_forward),
        false => Norms::OfSums {
            attention,
            feed_forward,
        },
    };
    layer.attention.o = Projection::single("self_attn.out_proj", hidden, q_width);
    layer.attention.set_biases(has_bias);
    layer.feed_forward = dimensions.plain("fc1", "fc2");
    layer.feed_forward.set_biases(has_bias);
    let windows = no_windows(dimensions.num_layers);
    let num_positions = dimensions.max_position_embeddings;
    let width = config.size("word_embed_proj_dim", 1..=MAX_WIDTH)?;
    Ok(ModelSpec {
        embedding_projections: width.filter(|&it| it != hidden).map(|width| {
            let [input, output] = ["model.decoder.project_in", "model.decoder.project_out"];
            EmbeddingProjections {
                input: Projection::single(input, hidden, width),
                output: Projection::single(output, width, hidden),
            }
        }),
        learned_positions: Some(LearnedPositions {
            module: "model.decoder.embed_positions",
            first_row: FIRST_POSITION,
            padding_id: None,
            num_rows: FIRST_POSITION + num_positions,
        }),
        modules: ModelModules {
            embedding: "model.decoder.embed_tokens",
            layers: "model.decoder.layers",
            first_layer: 0,
            layers_per_module: 1,
            final_norm: is_norm_before.then_some("model.decoder.final_layer_norm"),
            output_layer: "lm_head",
        },
        ..dimensions.model(FAMILY.class, layer, windows)
    })
}

fn check(config: &JsonFile) -> Result<(), LoadError> {
    for (key, supported) in [
        ("layer_norm_elementwise_affine", true),
        ("_remove_final_layer_norm", false),
    ] {
        if config.bool_or(key, supported)? != supported {
            let expected = format!("supported; only {supported} is");
            return Err(config.unexpected(key, !supported, expected));
        }
    }
    Ok(())
}
