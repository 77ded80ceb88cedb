//! Mistral 7B and its successors of the same class, and Ministral 8B.
//!
//! Llama without biases, with a sliding window in all layers (`sliding_window`; `null` for none). A Mistral whose
//! config has `layer_types` has it in the layers listed there: transformers takes such a model for a Ministral.
//!
//! llama.cpp stores it as a `llama`; its files do not tell the window.
//!
//! Source: modeling_mistral.py and modeling_ministral.py of transformers; Jiang et al., arXiv:2310.06825.

use super::dimensions::{Defaults, Dimensions, Sizes};
use super::family::Family;
use super::windows::{windows_in_all_layers, windows_in_some_layers};
use crate::spec::ModelSpec;
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;

pub const FAMILY: Family = Family {
    class: "MistralForCausalLM",
    gguf: None,
    describe: |config| describe(config, FAMILY.class),
};

/// Ministral 8B, which has a class of its own.
pub const MINISTRAL: Family = Family {
    class: "MinistralForCausalLM",
    gguf: None,
    describe: |config| describe(config, MINISTRAL.class),
};

fn describe(config: &JsonFile, class: &'static str) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(32_000, 4096, 14_336, 32, 32, 131_072)),
        num_kv_heads: Some(8),
        ..Defaults::LLAMA
    };
    let dimensions = Dimensions::from_config(config, &defaults)?;
    let layer = dimensions.llama_layer();
    let windows = match config.get("layer_types").is_some() {
        true => windows_in_some_layers(config, dimensions.num_layers)?,
        false => windows_in_all_layers(config, dimensions.num_layers)?,
    };
    Ok(dimensions.model(class, layer, windows))
}
