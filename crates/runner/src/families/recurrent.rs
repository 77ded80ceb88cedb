//! Keys of config.json that tell which layers have a recurrent state.

use serde_json::Value;

use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;

/// The most positions that a convolution reads.
pub const MAX_KERNEL_LEN: usize = 64;

/// Whether each layer has the second of two kinds, by `layer_types`.
///
/// # Errors
/// It has another kind, or lists other layers.
pub fn layers_of_type(
    config: &JsonFile,
    num_layers: usize,
    kinds: [&str; 2],
) -> Result<Vec<bool>, LoadError> {
    const KEY: &str = "layer_types";
    let types = config.get(KEY).unwrap_or(&Value::Null);
    let is_second = |kind: &Value| {
        let kind = kinds.iter().position(|it| kind.as_str() == Some(*it));
        kind.map(|kind| kind == 1)
    };
    types
        .as_array()
        .filter(|types| types.len() == num_layers)
        .and_then(|types| types.iter().map(is_second).collect())
        .ok_or_else(|| {
            let [first, second] = kinds;
            let expected = format!("a list of {num_layers} entries, each '{first}' or '{second}'");
            config.unexpected(KEY, types, expected)
        })
}

/// Whether each layer is in the list of a key; all, if there is none.
///
/// # Errors
/// It lists something else.
pub fn layers_with_index(
    config: &JsonFile,
    num_layers: usize,
    key: &str,
) -> Result<Vec<bool>, LoadError> {
    let listed = match config.get(key) {
        None | Some(Value::Null) => return Ok(vec![true; num_layers]),
        Some(listed) => listed,
    };
    let index = |layer: &Value| {
        let layer = usize::try_from(layer.as_u64()?).ok()?;
        (layer < num_layers).then_some(layer)
    };
    let layers: Option<Vec<_>> = listed
        .as_array()
        .and_then(|layers| layers.iter().map(index).collect());
    let layers = layers.ok_or_else(|| {
        config.unexpected(
            key,
            listed,
            format_args!("a list of layers below {num_layers}"),
        )
    })?;
    let mut is_listed = vec![false; num_layers];
    for layer in layers {
        is_listed[layer] = true;
    }
    Ok(is_listed)
}
