//! BLOOM, BLOOMZ and others of BigScience's shape.
//!
//! LayerNorm with biases, also of the embedded tokens; a feed-forward block without a gate; biases in all linear
//! layers; and no position embedding, but linear biases of scores ([ALiBi](crate::alibi)), which are added to scaled
//! scores. Queries, keys and values are one module: the query, key and value of a head, then those of the next. The
//! sizes have two names each: BigScience's own are `n_embed`, `n_layer` and `num_attention_heads`. BigScience's
//! checkpoints lack the `transformer.` in front of names. No sequence is longer than those of the training,
//! `seq_length`; 2048 where config.json is silent.
//!
//! Source: modeling_bloom.py and configuration_bloom.py of transformers; BigScience, arXiv:2211.05100.

use super::dimensions::{Defaults, Dimensions, Keys, Sizes};
use super::family::Family;
use super::gguf::GgufArchitecture;
use super::windows::no_windows;
use crate::rope::Rope;
use crate::spec::{LayerSpec, ModelModules, ModelSpec, NormKind, Norms, Projection};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::Activation;

pub const FAMILY: Family = Family {
    class: "BloomForCausalLM",
    gguf: Some(GgufArchitecture {
        keys: &[
            ("feed_forward_length", "n_inner"),
            ("attention.layer_norm_epsilon", "layer_norm_epsilon"),
        ],
        has_ordered_qkv: true,
        ..GgufArchitecture::named("bloom")
    }),
    describe,
};

/// The modules of BLOOM, and of Falcon, whose code is derived from it.
pub(super) const MODULES: ModelModules = ModelModules {
    embedding: "transformer.word_embeddings",
    layers: "transformer.h",
    first_layer: 0,
    layers_per_module: 1,
    final_norm: Some("transformer.ln_f"),
    output_layer: "lm_head",
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    const NORMED_RESIDUAL: &str = "apply_residual_connection_post_layernorm";
    if config.bool_or(NORMED_RESIDUAL, false)? {
        return Err(config.unexpected(NORMED_RESIDUAL, true, "supported; only false is"));
    }
    // As transformers has it: the first name if it is there.
    let either = |first, second| match config.get(first) {
        Some(_) => first,
        None => second,
    };
    let defaults = Defaults {
        sizes: Some(Sizes::new(250_880, 64, 256, 2, 8, 2048)),
        norm_eps: 1e-5,
        tied_embeddings: true,
        activation: Activation::GeluTanh,
        keys: Keys {
            hidden_size: either("n_embed", "hidden_size"),
            num_layers: either("num_hidden_layers", "n_layer"),
            num_heads: either("num_attention_heads", "n_head"),
            positions: either("seq_length", "max_position_embeddings"),
            intermediate_size: "n_inner",
            may_lack_intermediate_size: true,
            norm_eps: "layer_norm_epsilon",
            ..Keys::LLAMA
        },
        ..Defaults::LLAMA
    };
    let mut dimensions = Dimensions::from_config(config, &defaults)?;
    dimensions.norm.kind = NormKind::Layer { has_bias: true };
    dimensions.rope = Rope::none();
    let norms = Norms::before("input_layernorm", "post_attention_layernorm");
    let layer = layer(&dimensions, norms, true);
    let windows = no_windows(dimensions.num_layers);
    Ok(ModelSpec {
        embedding_norm: Some("transformer.word_embeddings_layernorm"),
        slope_factor: Some(1.0),
        modules: MODULES,
        ..dimensions.model(FAMILY.class, layer, windows)
    })
}

/// A layer of BLOOM or Falcon.
pub(super) fn layer(dimensions: &Dimensions, norms: Norms, has_bias: bool) -> LayerSpec {
    let (hidden, q_width) = (dimensions.hidden_size, dimensions.qkv_widths()[0]);
    let mut layer = dimensions.llama_layer();
    layer.norms = norms;
    layer.attention.qkv = dimensions.qkv_by_group("self_attention.query_key_value");
    layer.attention.o = Projection::single("self_attention.dense", hidden, q_width);
    layer.attention.set_biases(has_bias);
    layer.feed_forward = dimensions.plain("mlp.dense_h_to_4h", "mlp.dense_4h_to_h");
    layer.feed_forward.set_biases(has_bias);
    layer
}
