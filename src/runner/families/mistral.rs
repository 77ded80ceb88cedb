//! Mistral 7B and its successors of the same class.
//!
//! Llama without biases, with a sliding window in all layers (`sliding_window`; `null` for none). A Mistral whose
//! config has `layer_types` has it in the layers listed there: transformers takes such a model for a Ministral.
//!
//! llama.cpp stores it as a `llama`; its files do not tell the window.
//!
//! Source: modeling_mistral.py and modeling_ministral.py of transformers; Jiang et al., arXiv:2310.06825.

use super::dimensions::Dimensions;
use super::family::Family;
use super::windows::{windows_in_all_layers, windows_in_some_layers};
use crate::base::LoadError;
use crate::checkpoint::JsonFile;
use crate::runner::spec::ModelSpec;

pub const FAMILY: Family = Family {
    class: "MistralForCausalLM",
    gguf: None,
    describe,
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let dimensions = Dimensions::from_config(config)?;
    let layer = dimensions.llama_layer();
    let windows = match config.get("layer_types").is_some() {
        true => windows_in_some_layers(config, dimensions.num_layers)?,
        false => windows_in_all_layers(config, dimensions.num_layers)?,
    };
    Ok(dimensions.model(FAMILY.class, layer, windows))
}
