//! A checkpoint folder, opened and checked, its weights not yet read.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::gguf::{self, Gguf};
use super::json_file::JsonFile;
use super::precision::WeightPrecision;
use super::quantised::Method;
use super::rope::RopeScaling;
use super::spec::ModelSpec;
use super::stamp::Stamp;
use super::store::Store;
use super::tensors::Tensors;
use super::weights::Weights;
use crate::base::{LoadError, TokenId};

/// `config.json`, `generation_config.json` and the mapped `*.safetensors` of one folder, or its `*.gguf`.
///
/// Needed only while a model is being loaded; the folder may be changed once it is dropped.
pub struct Checkpoint {
    spec: ModelSpec,
    end_ids: Vec<TokenId>,
    store: Store,
    /// That of config.json, if there is one.
    config_stamp: Option<Stamp>,
    weight_cache: Option<PathBuf>,
}

impl Checkpoint {
    /// Opens the folder; the tensors' shapes are checked when they are read. Of a folder that has both,
    /// the safetensors files count.
    ///
    /// # Errors
    /// A file that is missing, is not what its name says, or describes a model that is not
    /// supported.
    pub fn open(dir: &Path) -> Result<Self, LoadError> {
        let gguf_files = gguf::files(dir);
        if !gguf_files.is_empty() && !Tensors::are_in(dir) {
            return Self::open_gguf(dir, &gguf_files);
        }
        let path = dir.join("config.json");
        let config_stamp = stamp(&path);
        let config = JsonFile::read(&path)?;
        let spec = ModelSpec::from_config(&config)?;
        let method = Method::from_config(&config)?;
        let end_ids = end_ids(dir, &config, spec.vocab_size)?;
        Ok(Self {
            spec,
            end_ids,
            store: Store::Safetensors(Tensors::open(dir)?, method),
            config_stamp,
            weight_cache: None,
        })
    }

    /// Opens GGUF files. What the model is says config.json, or else the files' metadata.
    fn open_gguf(dir: &Path, files: &[PathBuf]) -> Result<Self, LoadError> {
        let mut gguf = Gguf::open(files)?;
        let path = dir.join("config.json");
        let config_stamp = stamp(&path);
        let (config, mut spec) = match path.exists() {
            true => {
                let config = JsonFile::read(&path)?;
                let spec = ModelSpec::from_config(&config)?;
                (config, spec)
            }
            false => {
                let config = gguf.config()?;
                let mut spec = ModelSpec::from_config(&config)?;
                spec.qkv_bias = gguf.has("model.layers.0.self_attn.q_proj.bias");
                if let Some(divisors) = gguf.rope_divisors(spec.head_dim)? {
                    spec.rope.scaling = RopeScaling::Divided { divisors };
                }
                (config, spec)
            }
        };
        gguf.set_head_dim(spec.head_dim)?;
        spec.tied_embeddings = !gguf.has("lm_head.weight");
        let mut end_ids = end_ids(dir, &config, spec.vocab_size)?;
        if end_ids.is_empty() {
            let ids = gguf.end_ids().filter(|&id| id < spec.vocab_size as u64);
            end_ids = ids.map(|id| id as TokenId).collect();
        }
        Ok(Self {
            spec,
            end_ids,
            store: Store::Gguf(gguf),
            config_stamp,
            weight_cache: None,
        })
    }

    /// Where weights that are rounded while they are loaded are kept for the next load: a file, which is made where
    /// it is missing, and made anew where it was made from something else or is damaged. Whatever goes wrong with it is
    /// told in the log.
    #[must_use]
    pub fn with_weight_cache(self, path: PathBuf) -> Self {
        Self {
            weight_cache: Some(path),
            ..self
        }
    }

    /// The model's shape.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// The tokens that end a text: `eos_token_id` of generation_config.json, or of config.json
    /// where the former says nothing, or of a GGUF file's metadata. Empty where nothing does.
    pub fn end_ids(&self) -> &[TokenId] {
        &self.end_ids
    }

    /// Bytes of the weights as the runner keeps them, but for padding; those of floating point are rounded to
    /// `precision`.
    ///
    /// # Errors
    /// A tensor that is missing, or has another shape or type than it should.
    pub fn num_weight_bytes(&self, precision: Option<WeightPrecision>) -> Result<u64, LoadError> {
        Weights::num_bytes(self, precision)
    }

    pub(super) fn store(&self) -> &Store {
        &self.store
    }

    pub(super) fn weight_cache(&self) -> Option<&Path> {
        self.weight_cache.as_deref()
    }

    /// Of all files that say what the weights are.
    pub(super) fn stamps(&self) -> impl Iterator<Item = &Stamp> {
        self.config_stamp.iter().chain(self.store.stamps())
    }
}

fn stamp(path: &Path) -> Option<Stamp> {
    let metadata = fs::metadata(path).ok()?;
    Some(Stamp::new(path, &metadata))
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
