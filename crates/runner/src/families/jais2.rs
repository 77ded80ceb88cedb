//! Jais 2, by Inception, MBZUAI and Cerebras.
//!
//! Llama with LayerNorm, and feed-forward blocks without a gate, with squared ReLU. All linear layers of a block have
//! biases unless `attention_bias` and `mlp_bias` are false.
//!
//! Source: configuration_jais2.py and modeling_jais2.py of transformers.

use super::dimensions::{Defaults, Dimensions, Keys, Sizes};
use super::family::Family;
use super::gguf::GgufArchitecture;
use super::windows::no_windows;
use crate::spec::{ModelSpec, NormKind};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::Activation;

pub const FAMILY: Family = Family {
    class: "Jais2ForCausalLM",
    gguf: Some(GgufArchitecture::named("jais2")),
    describe,
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(150_272, 3328, 26_624, 32, 26, 8192)),
        norm_eps: 1e-5,
        activation: Activation::SquaredRelu,
        keys: Keys {
            norm_eps: "layer_norm_eps",
            ..Keys::LLAMA
        },
        ..Defaults::LLAMA
    };
    let mut dimensions = Dimensions::from_config(config, &defaults)?;
    dimensions.norm.kind = NormKind::Layer { has_bias: true };
    let mut layer = dimensions.llama_layer();
    layer
        .attention
        .set_biases(config.bool_or("attention_bias", true)?);
    layer.feed_forward = dimensions.plain("mlp.up_proj", "mlp.down_proj");
    layer
        .feed_forward
        .set_biases(config.bool_or("mlp_bias", true)?);
    let windows = no_windows(dimensions.num_layers);
    Ok(dimensions.model(FAMILY.class, layer, windows))
}
