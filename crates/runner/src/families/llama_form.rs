//! Models of Llama's form, which differ in their defaults.

use super::dimensions::{Defaults, Dimensions};
use super::windows::no_windows;
use crate::spec::ModelSpec;
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;

/// A Llama with other defaults.
///
/// # Errors
/// A value is not supported.
pub fn describe_with(
    config: &JsonFile,
    class: &'static str,
    defaults: &Defaults,
) -> Result<ModelSpec, LoadError> {
    let dimensions = Dimensions::from_config(config, defaults)?;
    let mut layer = dimensions.llama_layer();
    layer
        .attention
        .set_biases(config.bool_or("attention_bias", false)?);
    layer
        .feed_forward
        .set_biases(config.bool_or("mlp_bias", false)?);
    let windows = no_windows(dimensions.num_layers);
    Ok(dimensions.model(class, layer, windows))
}
