//! Keys of config.json that tell which layers have a recurrent state.

use serde_json::Value;

use super::layer_lists::layers_of_kind;
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::Activation;

/// The most positions that a convolution reads.
pub const MAX_KERNEL_LEN: usize = 64;

/// Whether each layer has the second of two kinds, by `layer_types`, which has these names of both, or those.
///
/// # Errors
/// It has another kind, or lists other layers.
pub fn layers_of_type(
    config: &JsonFile,
    num_layers: usize,
    names: &[[&str; 2]],
) -> Result<Vec<bool>, LoadError> {
    let mut keys = ["layer_types", "layers_block_type"].into_iter();
    let told = keys.find_map(|key| Some((key, config.get(key)?)));
    let told = told.unwrap_or(("layer_types", &Value::Null));
    layers_of_kind(config, told, num_layers, names)
}

/// The least and the largest time of a state space: any, if there is no such key.
///
/// # Errors
/// It is no list of two numbers, the second of which may be infinite.
pub fn times(config: &JsonFile, key: &str) -> Result<[f32; 2], LoadError> {
    let Some(told) = config.get(key) else {
        return Ok([0.0, f32::INFINITY]);
    };
    let time = |value: &Value| {
        // As transformers 5 writes what JSON does not have.
        let time = match value.get("__float__").and_then(Value::as_str) {
            Some("Infinity") => f32::INFINITY,
            _ => value.as_f64()? as f32,
        };
        (time >= 0.0).then_some(time)
    };
    let times: Option<Vec<_>> = told.as_array().and_then(|it| it.iter().map(time).collect());
    match times.as_deref() {
        Some(&[least, most]) if least <= most => Ok([least, most]),
        _ => Err(config.unexpected(key, told, "a least and a largest time")),
    }
}

/// Refuses a `hidden_act` that convolutions with SiLU do not have.
///
/// # Errors
/// They have.
pub fn check_activation(config: &JsonFile, activation: Activation) -> Result<(), LoadError> {
    match activation {
        Activation::Silu => Ok(()),
        other => Err(config.unexpected("hidden_act", format_args!("{other:?}"), "'silu'")),
    }
}
