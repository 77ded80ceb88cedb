//! SmolLM3, by Hugging Face.
//!
//! Llama in which some layers have no position embedding: those with a 0 in `no_rope_layers` or, where config.json is
//! silent, every `no_rope_layer_interval`-th one (Yang et al., arXiv:2501.18795). With `use_sliding_window`, the layers
//! that `layer_types` lists have a window, or those without a position embedding.
//!
//! Source: modeling_smollm3.py of transformers.

use std::num::NonZeroU32;

use super::bounds::MAX_POSITIONS;
use super::dimensions::{Defaults, Dimensions, Sizes};
use super::family::Family;
use super::gguf::{GgufArchitecture, QUERIES_AND_KEYS};
use super::layer_lists::layers_with_rope;
use super::rope_config::RopeDefaults;
use super::windows::{no_windows, windows_in_some_layers};
use crate::rope::Rope;
use crate::spec::ModelSpec;
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;

pub const FAMILY: Family = Family {
    class: "SmolLM3ForCausalLM",
    gguf: Some(GgufArchitecture {
        permuted: QUERIES_AND_KEYS,
        ..GgufArchitecture::named("smollm3")
    }),
    describe,
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(128_256, 2048, 11_008, 36, 16, 32_768)),
        num_kv_heads: Some(4),
        rope: RopeDefaults {
            theta: 2_000_000.0,
            ..Defaults::LLAMA.rope
        },
        tied_embeddings: true,
        ..Defaults::LLAMA
    };
    let dimensions = Dimensions::from_config(config, &defaults)?;
    let mut layer = dimensions.llama_layer();
    layer
        .attention
        .set_biases(config.bool_or("attention_bias", false)?);
    layer
        .feed_forward
        .set_biases(config.bool_or("mlp_bias", false)?);
    let num_layers = dimensions.num_layers;
    let has_rope = layers_with_rope(config, num_layers)?;
    let windows = windows(config, &has_rope)?;
    let mut spec = dimensions.model(FAMILY.class, layer, windows);
    for (layer, has_rope) in spec.layers.iter_mut().zip(has_rope) {
        if !has_rope {
            layer.attention.rope = Rope::none();
        }
    }
    Ok(spec)
}

fn windows(config: &JsonFile, has_rope: &[bool]) -> Result<Vec<Option<NonZeroU32>>, LoadError> {
    let use_window = config.bool_or("use_sliding_window", false)?;
    let window = config.size("sliding_window", 1..=MAX_POSITIONS)?;
    let window = window.and_then(|window| NonZeroU32::new(window as u32));
    match window {
        Some(_) if use_window && config.get("layer_types").is_some() => {
            windows_in_some_layers(config, has_rope.len())
        }
        Some(window) if use_window => {
            let windows = has_rope
                .iter()
                .map(|has_rope| (!has_rope).then_some(window));
            Ok(windows.collect())
        }
        _ => Ok(no_windows(has_rope.len())),
    }
}
