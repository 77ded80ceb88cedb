//! Nemotron 3 and 4, and Minitron, by NVIDIA, before they took Llama's shape.
//!
//! LayerNorm with biases, whose weights checkpoints store as differences from 1 (`layernorm1p`); a feed-forward block
//! without a gate, with squared ReLU; the first half of a head is rotated (`partial_rotary_factor`, 0.5 where
//! config.json is silent). `attention_bias` and `mlp_bias` add biases.
//!
//! Source: modeling_nemotron.py of transformers; NVIDIA, arXiv:2402.16819.

use super::dimensions::{Defaults, Dimensions, Keys, Sizes};
use super::family::Family;
use super::gguf::GgufArchitecture;
use super::rope_config::RopeDefaults;
use super::windows::no_windows;
use crate::spec::{ModelSpec, NormKind};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::Activation;

pub const FAMILY: Family = Family {
    class: "NemotronForCausalLM",
    gguf: Some(GgufArchitecture {
        keys: &[("attention.layer_norm_epsilon", "norm_eps")],
        has_partial_rotary: true,
        norms_include_one: true,
        ..GgufArchitecture::named("nemotron")
    }),
    describe,
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(256_000, 6144, 24_576, 32, 48, 4096)),
        norm_eps: 1e-5,
        rope: RopeDefaults {
            partial_rotary_factor: Some(0.5),
            ..Defaults::LLAMA.rope
        },
        activation: Activation::SquaredRelu,
        keys: Keys {
            norm_eps: "norm_eps",
            ..Keys::LLAMA
        },
        ..Defaults::LLAMA
    };
    let mut dimensions = Dimensions::from_config(config, &defaults)?;
    dimensions.norm.kind = NormKind::Layer { has_bias: true };
    dimensions.norm.weight_offset = 1.0;
    let mut layer = dimensions.llama_layer();
    layer
        .attention
        .set_biases(config.bool_or("attention_bias", false)?);
    layer.feed_forward = dimensions.plain("mlp.up_proj", "mlp.down_proj");
    layer
        .feed_forward
        .set_biases(config.bool_or("mlp_bias", false)?);
    let windows = no_windows(dimensions.num_layers);
    Ok(dimensions.model(FAMILY.class, layer, windows))
}
