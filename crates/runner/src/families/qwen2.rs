//! Qwen 2 and Qwen 2.5.
//!
//! Llama with biases on queries, keys and values, which no key of the config tells, and on nothing else. With
//! `use_sliding_window`, the layers that `layer_types` lists have a window, or those from `max_window_layers` on.
//!
//! Source: modeling_qwen2.py of transformers; Yang et al., arXiv:2407.10671.

use super::dimensions::{Defaults, Dimensions, Sizes};
use super::family::Family;
use super::gguf::GgufArchitecture;
use super::windows::{no_windows, windows_in_some_layers};
use crate::spec::ModelSpec;
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;

pub const FAMILY: Family = Family {
    class: "Qwen2ForCausalLM",
    gguf: Some(GgufArchitecture::named("qwen2")),
    describe,
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(151_936, 4096, 22_016, 32, 32, 32_768)),
        num_kv_heads: Some(32),
        ..Defaults::LLAMA
    };
    let dimensions = Dimensions::from_config(config, &defaults)?;
    let mut layer = dimensions.llama_layer();
    layer.attention.qkv.has_bias = true;
    let windows = match config.bool_or("use_sliding_window", false)? {
        true => windows_in_some_layers(config, dimensions.num_layers)?,
        false => no_windows(dimensions.num_layers),
    };
    Ok(dimensions.model(FAMILY.class, layer, windows))
}
