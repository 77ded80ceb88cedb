//! A Hugging Face checkpoint folder, opened and checked, its weights not yet read.

use std::path::Path;

use serde_json::Value;

use super::json_file::JsonFile;
use super::spec::ModelSpec;
use super::tensors::Tensors;
use crate::base::{LoadError, TokenId};

/// `config.json`, `generation_config.json` and the mapped `*.safetensors` of one folder.
///
/// Needed only while a model is being loaded; the folder may be changed once it is dropped.
pub struct Checkpoint {
    spec: ModelSpec,
    end_ids: Vec<TokenId>,
    tensors: Tensors,
}

impl Checkpoint {
    /// Opens the folder; the tensors' shapes are checked when they are read.
    ///
    /// # Errors
    /// A file that is missing, is not what its name says, or describes a model that is not
    /// supported.
    pub fn open(dir: &Path) -> Result<Self, LoadError> {
        let config = JsonFile::read(&dir.join("config.json"))?;
        let spec = ModelSpec::from_config(&config)?;
        let end_ids = end_ids(dir, &config, spec.vocab_size)?;
        Ok(Self {
            spec,
            end_ids,
            tensors: Tensors::open(dir)?,
        })
    }

    /// The model's shape.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// The tokens that end a text: `eos_token_id` of generation_config.json, or of config.json
    /// where the former says nothing. Empty where neither does.
    pub fn end_ids(&self) -> &[TokenId] {
        &self.end_ids
    }

    pub(super) fn tensors(&self) -> &Tensors {
        &self.tensors
    }
}

fn end_ids(dir: &Path, config: &JsonFile, vocab_size: usize) -> Result<Vec<TokenId>, LoadError> {
    const KEY: &str = "eos_token_id";
    let path = dir.join("generation_config.json");
    let generation_config = match path.exists() {
        true => Some(JsonFile::read(&path)?),
        false => None,
    };
    let Some((file, value)) = [generation_config.as_ref(), Some(config)]
        .into_iter()
        .flatten()
        .find_map(|file| Some((file, file.get(KEY)?)))
    else {
        return Ok(Vec::new());
    };
    let ids = match value {
        Value::Array(ids) => ids.as_slice(),
        one => std::slice::from_ref(one),
    };
    ids.iter()
        .map(|id| {
            id.as_u64()
                .filter(|&id| id < vocab_size as u64)
                .map(|id| id as TokenId)
                .ok_or_else(|| {
                    let expected =
                        format!("a token id below vocab_size {vocab_size}, or a list of them");
                    file.unexpected(KEY, value, expected)
                })
        })
        .collect()
}
