//! Code World Model, by Meta.
//!
//! Llama with a window in all layers but the first of each four, or in those that `layer_types` lists. `mlp_bias` adds
//! biases to feed-forward blocks. Where config.json is silent, the frequencies of RoPE are scaled as in Llama 3.1.
//!
//! Source: configuration_cwm.py and modeling_cwm.py of transformers; FAIR CodeGen team, arXiv:2510.02387.

use serde_json::json;

use super::dimensions::{Defaults, Dimensions, Sizes};
use super::family::Family;
use super::rope_config::{RopeDefaults, rope_parameters};
use super::windows::{windowed_layers, windows_of};
use crate::spec::ModelSpec;
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;

pub const FAMILY: Family = Family {
    class: "CwmForCausalLM",
    gguf: None,
    describe,
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(128_256, 6144, 21_504, 64, 48, 131_072)),
        num_kv_heads: Some(8),
        head_dim: Some(128),
        norm_eps: 1e-5,
        rope: RopeDefaults {
            theta: 1e6,
            ..Defaults::LLAMA.rope
        },
        ..Defaults::LLAMA
    };
    let rope = json!({
        "rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    });
    let config = &match rope_parameters(config)? {
        Some(_) => config.clone(),
        None => config.with("rope_parameters", rope),
    };
    let dimensions = Dimensions::from_config(config, &defaults)?;
    let mut layer = dimensions.llama_layer();
    layer
        .feed_forward
        .set_biases(config.bool_or("mlp_bias", false)?);
    let num_layers = dimensions.num_layers;
    let is_windowed = match config.get("layer_types") {
        Some(_) => windowed_layers(config, num_layers, 0)?,
        None => (0..num_layers)
            .map(|layer| !layer.is_multiple_of(4))
            .collect(),
    };
    let windows = windows_of(config, &is_windowed, 8192)?;
    Ok(dimensions.model(FAMILY.class, layer, windows))
}
