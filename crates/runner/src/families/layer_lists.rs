//! Keys of config.json that list layers, by their indices or kinds.

use serde_json::Value;

use super::bounds::MAX_LAYERS;
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;

/// Whether each layer is in the list of a key; `None` if there is no list.
///
/// # Errors
/// It lists something else.
pub fn listed_layers(
    config: &JsonFile,
    key: &str,
    num_layers: usize,
) -> Result<Option<Vec<bool>>, LoadError> {
    let Some(listed) = config.get(key) else {
        return Ok(None);
    };
    let index = |layer: &Value| {
        let layer = usize::try_from(layer.as_u64()?).ok()?;
        (layer < num_layers).then_some(layer)
    };
    let layers: Option<Vec<_>> = listed
        .as_array()
        .and_then(|layers| layers.iter().map(index).collect());
    let layers = layers.ok_or_else(|| {
        let expected = format!("a list of layers below {num_layers}");
        config.unexpected(key, listed, expected)
    })?;
    let mut is_listed = vec![false; num_layers];
    for layer in layers {
        is_listed[layer] = true;
    }
    Ok(Some(is_listed))
}

/// Whether each layer has the second of two kinds, by the list of a key. `names` are the spellings of the pair.
///
/// # Errors
/// It has another kind, or lists other layers.
pub fn layers_of_kind(
    config: &JsonFile,
    (key, kinds): (&str, &Value),
    num_layers: usize,
    names: &[[&str; 2]],
) -> Result<Vec<bool>, LoadError> {
    let is_second = |kind: &Value| {
        let kind = kind.as_str()?;
        let pair = names.iter().find(|pair| pair.contains(&kind))?;
        Some(pair[1] == kind)
    };
    kinds
        .as_array()
        .filter(|kinds| kinds.len() == num_layers)
        .and_then(|kinds| kinds.iter().map(is_second).collect())
        .ok_or_else(|| {
            let [first, second] = names[0];
            let expected = format!("a list of {num_layers} entries, each '{first}' or '{second}'");
            config.unexpected(key, kinds, expected)
        })
}

/// The kind of each layer, by the list of a key. `names` are the spellings of all kinds.
///
/// # Errors
/// It has another kind, or lists other layers.
pub fn kinds_of_layers<T: Copy>(
    config: &JsonFile,
    (key, told): (&str, &Value),
    num_layers: usize,
    names: &[(&str, T)],
) -> Result<Vec<T>, LoadError> {
    let kind = |told: &Value| {
        let told = told.as_str()?;
        let mut names = names.iter();
        names.find_map(|&(name, kind)| (name == told).then_some(kind))
    };
    let kinds = told.as_array().filter(|told| told.len() == num_layers);
    let kinds = kinds.and_then(|told| told.iter().map(kind).collect());
    kinds.ok_or_else(|| {
        let known: Vec<_> = names.iter().map(|&(name, _)| name).collect();
        let known = known.join("', '");
        let expected = format!("a list of {num_layers} entries, each of '{known}'");
        config.unexpected(key, told, expected)
    })
}

/// The layers with a position embedding: those with a 1 in `no_rope_layers` or, where config.json is silent, all but
/// every `no_rope_layer_interval`-th one.
///
/// # Errors
/// One of the keys is malformed.
pub fn layers_with_rope(config: &JsonFile, num_layers: usize) -> Result<Vec<bool>, LoadError> {
    const KEY: &str = "no_rope_layers";
    let Some(given) = config.get(KEY) else {
        let interval = config.size("no_rope_layer_interval", 1..=MAX_LAYERS)?;
        let interval = interval.unwrap_or(4);
        let layers = 1..=num_layers;
        return Ok(layers
            .map(|layer| !layer.is_multiple_of(interval))
            .collect());
    };
    flagged_layers(config, (KEY, given), num_layers)
}

/// Whether each layer has a 1 in the list of a key, whose others are 0.
///
/// # Errors
/// It has another entry, or none for a layer.
pub fn flagged_layers(
    config: &JsonFile,
    (key, flags): (&str, &Value),
    num_layers: usize,
) -> Result<Vec<bool>, LoadError> {
    let is_one = |value: &Value| match value.as_u64() {
        Some(0) => Some(false),
        Some(1) => Some(true),
        _ => None,
    };
    flags
        .as_array()
        .filter(|layers| layers.len() >= num_layers)
        .and_then(|layers| layers.iter().take(num_layers).map(is_one).collect())
        .ok_or_else(|| {
            let expected = format!("a list of {num_layers} entries, each 0 or 1");
            config.unexpected(key, flags, expected)
        })
}
