//! StarCoder 2, by BigCode.
//!
//! Llama with LayerNorm, and feed-forward blocks without a gate, with GELU. `use_bias` adds biases to all projections.
//! All layers have the window `sliding_window`, if there is one.
//!
//! Source: modeling_starcoder2.py of transformers; Lozhkov et al., arXiv:2402.19173.

use super::dimensions::{Defaults, Dimensions, Keys, Sizes};
use super::family::Family;
use super::gguf::GgufArchitecture;
use super::windows::windows_if_given;
use crate::spec::{ModelSpec, NormKind};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::Activation;

pub const FAMILY: Family = Family {
    class: "Starcoder2ForCausalLM",
    gguf: Some(GgufArchitecture {
        keys: &[("attention.layer_norm_epsilon", "norm_epsilon")],
        ..GgufArchitecture::named("starcoder2")
    }),
    describe,
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(49_152, 3072, 12_288, 30, 24, 4096)),
        num_kv_heads: Some(2),
        norm_eps: 1e-5,
        tied_embeddings: true,
        activation: Activation::GeluTanh,
        keys: Keys {
            norm_eps: "norm_epsilon",
            ..Keys::LLAMA
        },
        ..Defaults::LLAMA
    };
    let mut dimensions = Dimensions::from_config(config, &defaults)?;
    dimensions.norm.kind = NormKind::Layer { has_bias: true };
    let mut layer = dimensions.llama_layer();
    layer.feed_forward = dimensions.plain("mlp.c_fc", "mlp.c_proj");
    let has_biases = config.bool_or("use_bias", true)?;
    layer.attention.set_biases(has_biases);
    layer.feed_forward.set_biases(has_biases);
    let windows = windows_if_given(config, dimensions.num_layers)?;
    Ok(dimensions.model(FAMILY.class, layer, windows))
}
