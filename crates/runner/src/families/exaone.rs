//! EXAONE 3.0 and 3.5, by LG AI Research.
//!
//! Llama with other names of modules, and two names of some keys of config.json. Published checkpoints write
//! `num_layers`; those saved by transformers `num_hidden_layers`. transformers gives the class `LlamaForCausalLM` to
//! the models that it saves, with the `model_type` `exaone`.
//!
//! Source: configuration_exaone.py and conversion_mapping.py of transformers; LG AI Research, arXiv:2408.03541 and
//! arXiv:2412.04862.

use super::dimensions::{Defaults, Dimensions, Keys, Sizes};
use super::family::Family;
use super::gguf::GgufArchitecture;
use super::gpt2::MODULES;
use super::rope_config::RopeDefaults;
use super::windows::no_windows;
use crate::spec::{FeedForward, ModelSpec, Norms, Projection};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_numbers::Stacking;

pub const FAMILY: Family = Family {
    class: "ExaoneForCausalLM",
    gguf: Some(GgufArchitecture {
        modules: &[
            ("attn.attention.q_proj", "attn_q"),
            ("attn.attention.k_proj", "attn_k"),
            ("attn.attention.v_proj", "attn_v"),
            ("attn.attention.out_proj", "attn_output"),
            ("mlp.c_fc_0", "ffn_gate"),
            ("mlp.c_fc_1", "ffn_up"),
        ],
        ..GgufArchitecture::named("exaone")
    }),
    describe,
};

/// The `model_type` of the family in transformers.
pub const TYPE: &str = "exaone";

/// Describes a model.
///
/// # Errors
/// A value is not supported.
pub fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let either = |first, second| match config.get(first) {
        Some(_) => first,
        None => second,
    };
    let defaults = Defaults {
        sizes: Some(Sizes::new(102_400, 4096, 14_336, 32, 32, 4096)),
        num_kv_heads: Some(8),
        norm_eps: 1e-5,
        rope: RopeDefaults {
            theta: 500_000.0,
            ..Defaults::LLAMA.rope
        },
        keys: Keys {
            num_layers: either("num_layers", "num_hidden_layers"),
            activation: either("activation_function", "hidden_act"),
            norm_eps: either("layer_norm_epsilon", "rms_norm_eps"),
            ..Keys::LLAMA
        },
        ..Defaults::LLAMA
    };
    let dimensions = Dimensions::from_config(config, &defaults)?;
    let (hidden, inner) = (dimensions.hidden_size, dimensions.intermediate_size);
    let [q, kv, _] = dimensions.qkv_widths();
    let mut layer = dimensions.llama_layer();
    layer.norms = Norms::before("ln_1", "ln_2");
    let qkv = [
        ("attn.attention.q_proj", q),
        ("attn.attention.k_proj", kv),
        ("attn.attention.v_proj", kv),
    ];
    layer.attention.qkv = Projection::stacked(&qkv, hidden, Stacking::Concatenated);
    dimensions.order_heads(&mut layer.attention.qkv);
    layer.attention.o = Projection::single("attn.attention.out_proj", hidden, q);
    layer
        .attention
        .set_biases(config.bool_or("attention_bias", false)?);
    let gate_up = [("mlp.c_fc_0", inner), ("mlp.c_fc_1", inner)];
    layer.feed_forward = FeedForward::Gated {
        gate_up: Projection::stacked(&gate_up, hidden, Stacking::Interleaved),
        activation: dimensions.activation,
        down: Projection::single("mlp.c_proj", hidden, inner),
    };
    layer
        .feed_forward
        .set_biases(config.bool_or("mlp_bias", false)?);
    let windows = no_windows(dimensions.num_layers);
    Ok(ModelSpec {
        modules: MODULES,
        ..dimensions.model(FAMILY.class, layer, windows)
    })
}
