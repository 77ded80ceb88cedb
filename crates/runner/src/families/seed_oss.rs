//! Seed-OSS, by ByteDance.
//!
//! Llama with biases on queries, keys and values (`attention_bias`, true where config.json is silent); the output
//! projection has its own switch, `attention_out_bias`. Heads are wider than their share of the hidden size.
//!
//! Source: modeling_seed_oss.py of transformers.

use super::dimensions::{Defaults, Dimensions, Sizes};
use super::family::Family;
use super::gguf::GgufArchitecture;
use super::windows::no_windows;
use crate::spec::ModelSpec;
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;

pub const FAMILY: Family = Family {
    class: "SeedOssForCausalLM",
    gguf: Some(GgufArchitecture {
        modules: &[("post_attention_layernorm", "post_attention_norm")],
        ..GgufArchitecture::named("seed_oss")
    }),
    describe,
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(155_136, 4096, 27_648, 64, 80, 524_288)),
        num_kv_heads: Some(8),
        head_dim: Some(128),
        ..Defaults::LLAMA
    };
    let dimensions = Dimensions::from_config(config, &defaults)?;
    let mut layer = dimensions.llama_layer();
    layer.attention.qkv.has_bias = config.bool_or("attention_bias", true)?;
    layer.attention.o.has_bias = config.bool_or("attention_out_bias", false)?;
    layer
        .feed_forward
        .set_biases(config.bool_or("mlp_bias", false)?);
    let windows = no_windows(dimensions.num_layers);
    Ok(dimensions.model(FAMILY.class, layer, windows))
}
