//! Helium 1, by Kyutai.
//!
//! Llama whose RoPE rotates neighbouring elements of a head, with a base of 100,000 and an epsilon of 1e-8.
//! `attention_bias` adds biases to queries, keys and values only, `mlp_bias` to all of the feed-forward block.
//!
//! Source: modeling_helium.py of transformers.

use super::dimensions::{Defaults, Dimensions, Sizes};
use super::family::Family;
use super::rope_config::RopeDefaults;
use super::windows::no_windows;
use crate::spec::ModelSpec;
use inflight_base::LoadError;
use inflight_checkpoint::{JsonFile, RotaryPairs};

pub const FAMILY: Family = Family {
    class: "HeliumForCausalLM",
    gguf: None,
    describe,
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(48_000, 2560, 7040, 24, 20, 4096)),
        num_kv_heads: Some(20),
        head_dim: Some(128),
        norm_eps: 1e-8,
        rope: RopeDefaults {
            theta: 100_000.0,
            ..Defaults::LLAMA.rope
        },
        ..Defaults::LLAMA
    };
    let mut dimensions = Dimensions::from_config(config, &defaults)?;
    dimensions.rotary_pairs = RotaryPairs::Adjacent;
    let mut layer = dimensions.llama_layer();
    layer.attention.qkv.has_bias = config.bool_or("attention_bias", false)?;
    layer
        .feed_forward
        .set_biases(config.bool_or("mlp_bias", false)?);
    let windows = no_windows(dimensions.num_layers);
    Ok(dimensions.model(FAMILY.class, layer, windows))
}
