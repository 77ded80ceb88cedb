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

const EMBEDDING: &str = "model.embed_tokens.weight";
const OUTPUT_LAYER: &str = "lm_head.weight";

/// `config.json`, `generation_config.json` and the `*.safetensors` of one folder, or its `*.gguf`.
///
/// Needed while an instance is being loaded. A file that is written to after it was opened fails that load.
pub struct Checkpoint {
    spec: ModelSpec,
    end_ids: Vec<TokenId>,
    store: Store,
    /// That of config.json, if there is one.
    config_stamp: Option<Stamp>,
    weight_cache: Option<WeightCachePlace>,
}

/// Where rounded weights are kept, and who may read them there.
pub(super) struct WeightCachePlace {
    pub(super) path: PathBuf,
    pub(super) mode: u32,
}

impl Checkpoint {
    /// Opens the folder; the tensors' shapes are checked when they are read. Of a folder that has both,
    /// the safetensors files count.
    ///
    /// # Errors
    /// A file that is missing, is not what its name says, or describes a model that is not
    /// supported.
    pub fn open(dir: &Path) -> Result<Self, LoadError> {
        check_folder(dir)?;
        let gguf_files = gguf::files(dir);
        if !gguf_files.is_empty() && !Tensors::are_in(dir) {
            return Self::open_gguf(dir, &gguf_files);
        }
        let path = dir.join("config.json");
        let config_stamp = stamp(&path);
        let config = JsonFile::read(&path)?;
        let mut spec = ModelSpec::from_config(&config)?;
        let method = Method::from_config(&config)?;
        let end_ids = end_ids(dir, &config, spec.vocab_size)?;
        let tensors = Tensors::open(dir)?;
        if spec.tied_embeddings && !tensors.are_equal(EMBEDDING, OUTPUT_LAYER)? {
            log::warn!(
                "{}: tie_word_embeddings is true, and {OUTPUT_LAYER} is there and is not {EMBEDDING}: it is computed with, \
                 as in transformers 5; write tie_word_embeddings: false, or take {OUTPUT_LAYER} out of the checkpoint",
                path.display()
            );
            spec.tied_embeddings = false;
        }
        Ok(Self {
            spec,
            end_ids,
            store: Store::Safetensors(tensors, method),
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

    /// Where weights that are rounded while they are loaded are kept for the next load: a file of this mode (and whoever
    /// may read it may enter the folders that are made for it), which is made where it is missing, and made anew where it was made from something else or is damaged. Whatever goes wrong with it is
    /// told in the log.
    #[must_use]
    pub fn with_weight_cache(self, path: PathBuf, mode: u32) -> Self {
        Self {
            weight_cache: Some(WeightCachePlace { path, mode }),
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

    pub(super) fn weight_cache(&self) -> Option<&WeightCachePlace> {
        self.weight_cache.as_ref()
    }

    /// Of all files that say what the weights are.
    pub(super) fn stamps(&self) -> impl Iterator<Item = &Stamp> {
        self.config_stamp.iter().chain(self.store.stamps())
    }
}

/// A folder of a whole model.
fn check_folder(dir: &Path) -> Result<(), LoadError> {
    let fail = |path: &Path, reason: &str| {
        Err(LoadError::File {
            path: path.to_owned(),
            reason: reason.to_owned(),
        })
    };
    if !dir.is_dir() {
        return fail(
            dir,
            "is no folder; put the checkpoint there (config.json, *.safetensors or a *.gguf, tokenizer.json), or write \
             its folder into the parameter gpt_model_path",
        );
    }
    let adapter = dir.join("adapter_config.json");
    match adapter.exists() {
        true => fail(
            &adapter,
            "is that of an adapter, and adapters are not served yet; merge it into its model (merge_and_unload of peft), \
             and serve the folder that this makes",
        ),
        false => Ok(()),
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
