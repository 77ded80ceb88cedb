//! Keys of config.json that list layers by their indices.

use serde_json::Value;

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
