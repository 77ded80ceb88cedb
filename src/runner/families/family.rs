//! The parts that a family's file provides.

use super::gguf::GgufArchitecture;
use crate::base::LoadError;
use crate::checkpoint::JsonFile;
use crate::runner::spec::ModelSpec;

/// A model family: models that differ only in their config.
pub struct Family {
    /// The class in transformers, which config.json names under `architectures`.
    pub class: &'static str,
    /// How llama.cpp stores the family. `None` if it converts its models to another family's architecture.
    pub gguf: Option<GgufArchitecture>,
    /// Describes the model of a config.json.
    pub describe: fn(&JsonFile) -> Result<ModelSpec, LoadError>,
}
