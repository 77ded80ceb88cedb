//! GLM-4 9B and GLM-Edge (`GlmForCausalLM`), by Z.ai.
//!
//! Llama whose RoPE rotates neighbouring elements of the first half of a head (`partial_rotary_factor`, 0.5 where
//! config.json is silent). Gate and up are one module, gate first. `attention_bias`, true where config.json is silent,
//! adds biases to queries, keys and values.
//!
//! Source: modeling_glm.py of transformers; GLM Team, arXiv:2406.12793.

use super::dimensions::{Defaults, Dimensions};
use super::family::Family;
use super::gguf::GgufArchitecture;
use super::rope_config::RopeDefaults;
use super::windows::no_windows;
use crate::base::LoadError;
use crate::checkpoint::{JsonFile, RotaryPairs};
use crate::runner::spec::ModelSpec;

pub const FAMILY: Family = Family {
    class: "GlmForCausalLM",
    gguf: Some(GgufArchitecture {
        modules: &[("mlp.gate_up_proj", "ffn_up")],
        has_partial_rotary: true,
        ..GgufArchitecture::named("chatglm")
    }),
    describe,
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        num_kv_heads: Some(2),
        head_dim: Some(128),
        norm_eps: 1.5625e-7,
        rope: RopeDefaults {
            partial_rotary_factor: Some(0.5),
            ..Defaults::LLAMA.rope
        },
        ..Defaults::LLAMA
    };
    let mut dimensions = Dimensions::from_config(config, &defaults)?;
    dimensions.rotary_pairs = RotaryPairs::Adjacent;
    let mut layer = dimensions.llama_layer();
    layer.attention.qkv.has_bias = config.bool_or("attention_bias", true)?;
    layer.feed_forward = dimensions.fused_gated("mlp.gate_up_proj");
    let windows = no_windows(dimensions.num_layers);
    Ok(dimensions.model(FAMILY.class, layer, windows))
}
