//! OLMo 1, by Ai2.
//!
//! Llama whose norms are LayerNorms without weights and biases, with an epsilon of 1e-5. `attention_bias` adds biases
//! to all four projections of attention. `clip_qkv` clips queries, keys and values.
//!
//! Source: configuration_olmo.py and modeling_olmo.py of transformers; Groeneveld et al., arXiv:2402.00838.

use super::dimensions::{Defaults, Dimensions, Sizes, clip_qkv};
use super::family::Family;
use super::gguf::{GgufArchitecture, QUERIES_AND_KEYS};
use super::windows::no_windows;
use crate::spec::{ModelSpec, NormKind, NormSpec};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;

pub const FAMILY: Family = Family {
    class: "OlmoForCausalLM",
    gguf: Some(GgufArchitecture {
        permuted: QUERIES_AND_KEYS,
        keys: &[("attention.clamp_kqv", "clip_qkv")],
        ..GgufArchitecture::named("olmo")
    }),
    describe,
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(50_304, 4096, 11_008, 32, 32, 2048)),
        ..Defaults::LLAMA
    };
    let mut dimensions = Dimensions::from_config(config, &defaults)?;
    dimensions.norm = NormSpec {
        kind: NormKind::Layer { has_bias: false },
        has_weights: false,
        eps: 1e-5,
        weight_offset: 0.0,
    };
    let mut layer = dimensions.llama_layer();
    layer
        .attention
        .set_biases(config.bool_or("attention_bias", false)?);
    layer.attention.clip = clip_qkv(config)?;
    let windows = no_windows(dimensions.num_layers);
    Ok(dimensions.model(FAMILY.class, layer, windows))
}
