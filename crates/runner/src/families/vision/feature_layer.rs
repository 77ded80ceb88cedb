//! Which rows of an encoder a projector reads.

use serde_json::json;

use super::TEXT_ONLY;
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;

/// The layers in front of the rows that are read. `vision_feature_layer` counts from the embedded patches, or from the
/// last layer if it is negative.
///
/// # Errors
/// The value is no layer, or several.
pub fn num_read_layers(
    config: &JsonFile,
    default: i64,
    num_layers: usize,
) -> Result<usize, LoadError> {
    const KEY: &str = "vision_feature_layer";
    let given = config.get(KEY).cloned().unwrap_or_else(|| json!(default));
    let layer = given.as_i64().map(|layer| match layer < 0 {
        true => num_layers as i64 + 1 + layer,
        false => layer,
    });
    let layer = layer.and_then(|layer| usize::try_from(layer).ok());
    let layer = layer.filter(|layer| (1..=num_layers).contains(layer));
    layer.ok_or_else(|| {
        config.unexpected(
            KEY,
            given,
            format_args!("one layer of {num_layers}: {TEXT_ONLY}"),
        )
    })
}

/// Demands the rows that `vision_feature_select_strategy` names: `default`, without the first row, or `full`.
///
/// # Errors
/// The strategy is another one.
pub fn demand_strategy(config: &JsonFile, default: &str, demanded: &str) -> Result<(), LoadError> {
    const KEY: &str = "vision_feature_select_strategy";
    let strategy = config.string(KEY)?.unwrap_or(default);
    match strategy == demanded {
        true => Ok(()),
        false => Err(config.unexpected(
            KEY,
            format_args!("'{strategy}'"),
            format_args!("'{demanded}': {TEXT_ONLY}"),
        )),
    }
}
