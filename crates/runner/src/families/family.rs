//! The parts that a family's file provides.

use super::gguf::GgufArchitecture;
use crate::spec::ModelSpec;
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;

/// A model family: models that differ only in their config.
#[derive(Clone, Copy)]
pub struct Family {
    /// The class in transformers, which config.json names under `architectures`.
    pub class: &'static str,
    /// How llama.cpp stores the family. `None` if it does not, or converts its models to another family's architecture.
    pub gguf: Option<GgufArchitecture>,
    /// Describes the model of a config.json.
    pub describe: fn(&JsonFile) -> Result<ModelSpec, LoadError>,
}

impl Family {
    /// What the names of its classes begin with, such as `Qwen3`.
    pub fn base_class(&self) -> Option<&'static str> {
        let mut ends = ["ForCausalLM", "LMHeadModel", "Model"].iter();
        ends.find_map(|end| self.class.strip_suffix(end))
    }
}
