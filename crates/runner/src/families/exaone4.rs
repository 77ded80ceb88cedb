//! EXAONE 4.0, by LG AI Research, the dense models.
//!
//! Llama whose blocks read the residual stream as it is, and whose results are normalised before they are added; each
//! head of queries and keys is normalised. With a `sliding_window`, three of four layers have it
//! (`sliding_window_pattern`, or `layer_types`), and the others have no position embedding.
//!
//! Source: modeling_exaone4.py of transformers; LG AI Research, arXiv:2507.11407.

use std::num::NonZeroU32;

use super::bounds::MAX_LAYERS;
use super::dimensions::{Defaults, Dimensions, Sizes};
use super::family::Family;
use super::gguf::{GgufArchitecture, NORMS_AROUND};
use super::windows::{no_windows, window, windows_except_every};
use crate::rope::Rope;
use crate::spec::{LayerSpec, ModelSpec, Norms, QkNormSpec};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;

pub const FAMILY: Family = Family {
    class: "Exaone4ForCausalLM",
    gguf: Some(GgufArchitecture {
        modules: NORMS_AROUND,
        has_windows: true,
        ..GgufArchitecture::named("exaone4")
    }),
    describe,
};

pub const DEFAULTS: Defaults = Defaults {
    sizes: Some(Sizes::new(102_400, 4096, 16_384, 32, 32, 2048)),
    num_kv_heads: Some(32),
    norm_eps: 1e-5,
    ..Defaults::LLAMA
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let dimensions = Dimensions::from_config(config, &DEFAULTS)?;
    let mut layer = dimensions.llama_layer();
    layer.norms = Norms::after("post_attention_layernorm", "post_feedforward_layernorm");
    layer.attention.qk_norm = Some(QkNormSpec::of_heads(dimensions.norm.eps));
    model(config, FAMILY.class, dimensions, layer)
}

/// A model of such layers, some of which have windows, and the others no position embedding.
///
/// # Errors
/// A key of windows is malformed.
pub fn model(
    config: &JsonFile,
    class: &'static str,
    dimensions: Dimensions,
    layer: LayerSpec,
) -> Result<ModelSpec, LoadError> {
    let num_layers = dimensions.num_layers;
    if window(config)?.is_none() {
        return Ok(dimensions.model(class, layer, no_windows(num_layers)));
    }
    let windows = windows(config, num_layers)?;
    let mut spec = dimensions.model(class, layer, windows);
    for layer in &mut spec.layers {
        if layer.attention.window.is_none() {
            layer.attention.rope = Rope::none();
        }
    }
    Ok(spec)
}

/// `sliding_window_pattern` is a number, or a text that is repeated: L for layers with a window, G for those without,
/// which the last one always is.
fn windows(config: &JsonFile, num_layers: usize) -> Result<Vec<Option<NonZeroU32>>, LoadError> {
    const KEY: &str = "sliding_window_pattern";
    let pattern = config.get(KEY).and_then(|pattern| pattern.as_str());
    let (Some(pattern), None) = (pattern, config.get("layer_types")) else {
        let interval = match pattern {
            Some(_) => None,
            None => config.size(KEY, 1..=MAX_LAYERS)?,
        };
        return windows_except_every(config, num_layers, interval.unwrap_or(4));
    };
    if pattern.is_empty() || pattern.chars().any(|kind| !"LG".contains(kind)) {
        return Err(config.unexpected(KEY, pattern, "a number, or a text of L and G"));
    }
    let window = window(config)?;
    let kinds = pattern.chars().cycle().take(num_layers).enumerate();
    let windows = kinds.map(|(layer, kind)| {
        let has_window = kind == 'L' && layer + 1 < num_layers;
        window.filter(|_| has_window)
    });
    Ok(windows.collect())
}
