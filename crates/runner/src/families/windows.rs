//! Keys of config.json that limit how far a layer's attention looks back. Missing keys have transformers' defaults.

use std::num::NonZeroU32;

use super::bounds::{MAX_LAYERS, MAX_POSITIONS};
use super::layer_lists::layers_of_kind;
use crate::rope::Rope;
use crate::spec::ModelSpec;
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;

/// The default of `sliding_window`.
const DEFAULT_WINDOW: usize = 4096;
/// The default of `max_window_layers`.
pub const DEFAULT_MAX_WINDOW_LAYERS: usize = 28;

/// No layer has a window.
pub fn no_windows(num_layers: usize) -> Vec<Option<NonZeroU32>> {
    vec![None; num_layers]
}

/// `sliding_window` in all layers.
pub fn windows_in_all_layers(
    config: &JsonFile,
    num_layers: usize,
) -> Result<Vec<Option<NonZeroU32>>, LoadError> {
    Ok(vec![window(config)?; num_layers])
}

/// `sliding_window` in all layers; none if config.json is silent.
pub fn windows_if_given(
    config: &JsonFile,
    num_layers: usize,
) -> Result<Vec<Option<NonZeroU32>>, LoadError> {
    match config.has("sliding_window") {
        true => windows_in_all_layers(config, num_layers),
        false => Ok(no_windows(num_layers)),
    }
}

/// `sliding_window` in the layers that `layer_types` lists or, in older configs, in all from `max_window_layers` on.
pub fn windows_in_some_layers(
    config: &JsonFile,
    num_layers: usize,
) -> Result<Vec<Option<NonZeroU32>>, LoadError> {
    windows_from(config, num_layers, DEFAULT_MAX_WINDOW_LAYERS)
}

/// [`windows_in_some_layers`] of a family with another default of `max_window_layers`.
pub fn windows_from(
    config: &JsonFile,
    num_layers: usize,
    default_first: usize,
) -> Result<Vec<Option<NonZeroU32>>, LoadError> {
    let is_windowed = windowed_layers(config, num_layers, default_first)?;
    let window = window(config)?;
    let windows = is_windowed.into_iter().map(|is| window.filter(|_| is));
    Ok(windows.collect())
}

/// `sliding_window` in the layers that `layer_types` lists or, if config.json is silent, in all but every `interval`-th
/// one.
pub fn windows_except_every(
    config: &JsonFile,
    num_layers: usize,
    interval: usize,
) -> Result<Vec<Option<NonZeroU32>>, LoadError> {
    let is_windowed = windowed_except_every(config, num_layers, interval)?;
    let window = window(config)?;
    let windows = is_windowed.into_iter().map(|is| window.filter(|_| is));
    Ok(windows.collect())
}

/// The windows of some layers, of `sliding_window` or `default` positions.
///
/// # Errors
/// `sliding_window` is null, or out of range.
pub fn windows_of(
    config: &JsonFile,
    is_windowed: &[bool],
    default: usize,
) -> Result<Vec<Option<NonZeroU32>>, LoadError> {
    const WINDOW: &str = "sliding_window";
    let window = config.size_or(WINDOW, 1..=MAX_POSITIONS, Some(default))?;
    let window = window.and_then(|window| NonZeroU32::new(window as u32));
    if window.is_none() && is_windowed.contains(&true) {
        let expected = "a number, as layers have a window";
        return Err(config.unexpected(WINDOW, "null", expected));
    }
    let windows = is_windowed.iter().map(|&is| window.filter(|_| is));
    Ok(windows.collect())
}

/// The layers with a window: those that `layer_types` lists or, if config.json is silent, all but every `interval`-th
/// one.
pub fn windowed_except_every(
    config: &JsonFile,
    num_layers: usize,
    interval: usize,
) -> Result<Vec<bool>, LoadError> {
    match config.get("layer_types") {
        Some(_) => windowed_layers(config, num_layers, 0),
        None => Ok((1..=num_layers)
            .map(|layer| !layer.is_multiple_of(interval))
            .collect()),
    }
}

/// Sets the [windows](windows_except_every) of a model's layers.
pub fn set_windows_except_every(
    spec: &mut ModelSpec,
    config: &JsonFile,
    interval: usize,
) -> Result<(), LoadError> {
    let windows = windows_except_every(config, spec.num_layers(), interval)?;
    for (layer, window) in spec.layers.iter_mut().zip(windows) {
        layer.attention.window = window;
    }
    Ok(())
}

/// Sets the position embedding of the layers with a window.
pub fn set_rope_of_windows(spec: &mut ModelSpec, rope: &Rope) {
    for layer in &mut spec.layers {
        if layer.attention.window.is_some() {
            layer.attention.rope = rope.clone();
        }
    }
}

/// `sliding_window`. An explicit `null` means that there is none.
pub fn window(config: &JsonFile) -> Result<Option<NonZeroU32>, LoadError> {
    window_or(config, DEFAULT_WINDOW)
}

/// [`window`] of a family with another default.
pub fn window_or(config: &JsonFile, default: usize) -> Result<Option<NonZeroU32>, LoadError> {
    let window = config.size_or("sliding_window", 1..=MAX_POSITIONS, Some(default))?;
    Ok(window.and_then(|window| NonZeroU32::new(window as u32)))
}

/// The layers with a window: those that `layer_types` lists or, in older configs, all from `max_window_layers` on.
pub fn windowed_layers(
    config: &JsonFile,
    num_layers: usize,
    default_first: usize,
) -> Result<Vec<bool>, LoadError> {
    let Some(types) = config.get("layer_types") else {
        let first = config.size("max_window_layers", 0..=MAX_LAYERS)?;
        let first = first.unwrap_or(default_first);
        return Ok((0..num_layers).map(|layer| layer >= first).collect());
    };
    let names = [["sliding_attention", "full_attention"]];
    let is_full = layers_of_kind(config, ("layer_types", types), num_layers, &names)?;
    Ok(is_full.into_iter().map(|is_full| !is_full).collect())
}
