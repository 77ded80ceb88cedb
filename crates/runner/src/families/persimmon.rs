//! Persimmon 8B, by Adept.
//!
//! As GPT-NeoX with one block behind the other, other names, and squared ReLU. Each query and key head has a LayerNorm,
//! whose weights and biases all heads share, unless `qk_layernorm` is false. Half of each head is rotated.
//!
//! Source: configuration_persimmon.py and modeling_persimmon.py of transformers.

use super::dimensions::{Defaults, Dimensions, Keys, Sizes};
use super::family::Family;
use super::rope_config::RopeDefaults;
use super::windows::no_windows;
use crate::spec::{ModelSpec, NormKind, Projection, QkNormSpec};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::{Activation, QkNormKind};

pub const FAMILY: Family = Family {
    class: "PersimmonForCausalLM",
    gguf: None,
    describe,
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(262_144, 4096, 16_384, 36, 64, 16_384)),
        norm_eps: 1e-5,
        rope: RopeDefaults {
            partial_rotary_factor: Some(0.5),
            ..Defaults::LLAMA.rope
        },
        activation: Activation::SquaredRelu,
        keys: Keys {
            norm_eps: "layer_norm_eps",
            ..Keys::LLAMA
        },
        ..Defaults::LLAMA
    };
    let mut dimensions = Dimensions::from_config(config, &defaults)?;
    dimensions.norm.kind = NormKind::Layer { has_bias: true };
    let (hidden, q_width) = (dimensions.hidden_size, dimensions.qkv_widths()[0]);
    let mut layer = dimensions.llama_layer();
    layer.attention.qkv = dimensions.qkv_by_group("self_attn.query_key_value");
    layer.attention.o = Projection::single("self_attn.dense", hidden, q_width);
    layer.attention.set_biases(true);
    if config.bool_or("qk_layernorm", true)? {
        layer.attention.qk_norm = Some(QkNormSpec {
            q: "self_attn.q_layernorm",
            k: "self_attn.k_layernorm",
            kind: QkNormKind::BiasedLayer,
            has_values: false,
            eps: dimensions.norm.eps,
        });
    }
    layer.feed_forward = dimensions.plain("mlp.dense_h_to_4h", "mlp.dense_4h_to_h");
    layer.feed_forward.set_biases(true);
    let windows = no_windows(dimensions.num_layers);
    let mut spec = dimensions.model(FAMILY.class, layer, windows);
    spec.modules.final_norm = Some("model.final_layernorm");
    Ok(spec)
}
