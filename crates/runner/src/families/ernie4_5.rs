//! ERNIE 4.5, the dense models, by Baidu.
//!
//! Llama whose RoPE rotates neighbouring elements of a head. `use_bias` adds biases to all projections of a layer.
//!
//! Source: modeling_ernie4_5.py of transformers.

use super::dimensions::{Defaults, Dimensions, Sizes};
use super::family::Family;
use super::gguf::GgufArchitecture;
use super::rope_config::RopeDefaults;
use super::windows::no_windows;
use crate::spec::ModelSpec;
use inflight_base::LoadError;
use inflight_checkpoint::{JsonFile, RotaryPairs};

pub const FAMILY: Family = Family {
    class: "Ernie4_5ForCausalLM",
    gguf: Some(GgufArchitecture::named("ernie4_5")),
    describe,
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(103_424, 1024, 3072, 18, 16, 131_072)),
        num_kv_heads: Some(2),
        head_dim: Some(128),
        norm_eps: 1e-5,
        rope: RopeDefaults {
            theta: 500_000.0,
            ..Defaults::LLAMA.rope
        },
        tied_embeddings: true,
        ..Defaults::LLAMA
    };
    let mut dimensions = Dimensions::from_config(config, &defaults)?;
    dimensions.rotary_pairs = RotaryPairs::Adjacent;
    let mut layer = dimensions.llama_layer();
    let use_bias = config.bool_or("use_bias", false)?;
    layer.attention.set_biases(use_bias);
    layer.feed_forward.set_biases(use_bias);
    let windows = no_windows(dimensions.num_layers);
    Ok(dimensions.model(FAMILY.class, layer, windows))
}
