//! What a runner is loaded from: a checkpoint, and the model that it describes.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::gguf_config;
use super::gguf_names::{gguf_name, is_permuted};
use super::precision::WeightPrecision;
use super::rope::RopeScaling;
use super::spec::ModelSpec;
use super::weights;
use crate::base::{LoadError, TokenId};
use crate::checkpoint::{Checkpoint, JsonFile, Matrix, RowOrder, Store, Tensor};

const EMBEDDING: &str = "model.embed_tokens.weight";
const OUTPUT_LAYER: &str = "lm_head.weight";

/// A model before its weights are read: its shape, its end tokens, and the checkpoint that holds its weights.
///
/// Kept as long as instances may be added, each of which reads the weights again.
pub struct ModelSource {
    checkpoint: Checkpoint,
    spec: ModelSpec,
    end_ids: Vec<TokenId>,
    weight_cache: Option<WeightCachePath>,
}

/// Where rounded weights are kept, and the mode of that file.
pub(super) struct WeightCachePath {
    pub(super) path: PathBuf,
    pub(super) mode: u32,
}

impl ModelSource {
    /// Opens a checkpoint folder. The shapes of tensors are checked when they are read.
    ///
    /// # Errors
    /// A file is missing or damaged, or describes a model that is not supported.
    pub fn open(dir: &Path) -> Result<Self, LoadError> {
        let checkpoint = Checkpoint::open(dir)?;
        let (spec, end_ids) = match checkpoint.gguf() {
            Some(_) => describe_gguf(&checkpoint)?,
            None => describe_safetensors(&checkpoint)?,
        };
        // An unsupported quantisation is reported here, and not when the weights are read.
        checkpoint.store()?;
        Ok(Self {
            checkpoint,
            spec,
            end_ids,
            weight_cache: None,
        })
    }

    /// Keeps weights that are rounded at load in the file `path` for the next load. The file is created with `mode`
    /// (and missing folders so that whoever may read it may enter them), and replaced if it is damaged or was made
    /// from anything else. Problems with it are logged and fail no load.
    #[must_use]
    pub fn with_weight_cache(self, path: PathBuf, mode: u32) -> Self {
        Self {
            weight_cache: Some(WeightCachePath { path, mode }),
            ..self
        }
    }

    /// The model's shape.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// The tokens that end a text: `eos_token_id` of generation_config.json, else of config.json, else of a GGUF
    /// file's metadata. Empty if none of them has it.
    pub fn end_ids(&self) -> &[TokenId] {
        &self.end_ids
    }

    /// Bytes of the weights in memory, without padding, if float weights are rounded to `precision`.
    ///
    /// # Errors
    /// A tensor is missing, or has the wrong shape or type.
    pub fn num_weight_bytes(&self, precision: Option<WeightPrecision>) -> Result<u64, LoadError> {
        weights::num_weight_bytes(self, precision)
    }

    pub(super) fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    pub(super) fn weight_cache(&self) -> Option<&WeightCachePath> {
        self.weight_cache.as_ref()
    }

    /// The weights under transformers' names, in transformers' order of rows.
    pub(super) fn tensors(&self) -> Result<ModelTensors<'_>, LoadError> {
        let gguf_architecture = self.checkpoint.gguf().map(gguf_config::architecture);
        Ok(ModelTensors {
            store: self.checkpoint.store()?,
            gguf_architecture: gguf_architecture.transpose()?.map(|(name, _)| name),
            head_dim: self.spec.head_dim,
        })
    }
}

/// The weights of a model under transformers' names.
pub(super) struct ModelTensors<'a> {
    store: Store<'a>,
    /// The architecture of GGUF files, which have names and an order of their own.
    gguf_architecture: Option<&'static str>,
    head_dim: usize,
}

impl<'a> ModelTensors<'a> {
    /// The weights of a linear layer, as [`Store::matrix`].
    pub(super) fn matrix(
        &self,
        module: &str,
        outputs: usize,
        inputs: usize,
    ) -> Result<Matrix<'a>, LoadError> {
        let name = self.stored_name(module);
        let row_order = self.row_order(module);
        self.store.matrix(&name, outputs, inputs, row_order)
    }

    /// A parameter of a module: its `weight`, if it is a norm, or its `bias`.
    pub(super) fn vector(
        &self,
        module: &str,
        parameter: &str,
        len: usize,
    ) -> Result<Tensor<'a>, LoadError> {
        let name = format!("{}.{parameter}", self.stored_name(module));
        self.store.vector(&name, len, self.row_order(module))
    }

    pub(super) fn store(&self) -> &Store<'a> {
        &self.store
    }

    fn stored_name(&self, module: &str) -> String {
        let gguf = self.gguf_architecture.and_then(|_| gguf_name(module));
        gguf.unwrap_or_else(|| module.to_owned())
    }

    /// llama.cpp's converter permutes queries and keys of llamas.
    fn row_order(&self, module: &str) -> RowOrder {
        match self.gguf_architecture {
            Some("llama") if is_permuted(module) => RowOrder::AdjacentPairs {
                head_dim: self.head_dim,
            },
            _ => RowOrder::Same,
        }
    }
}

fn describe_safetensors(checkpoint: &Checkpoint) -> Result<(ModelSpec, Vec<TokenId>), LoadError> {
    let config = checkpoint.config().expect("a folder of safetensors has it");
    let mut spec = ModelSpec::from_config(config)?;
    let end_ids = end_ids(checkpoint, config, spec.vocab_size)?;
    if spec.tied_embeddings && !checkpoint.are_equal(EMBEDDING, OUTPUT_LAYER)? {
        log::warn!(
            "{}: tie_word_embeddings is true, but the checkpoint has an {OUTPUT_LAYER} that differs from {EMBEDDING}: \
             {OUTPUT_LAYER} is used, as in transformers 5; write tie_word_embeddings: false, or remove {OUTPUT_LAYER} \
             from the checkpoint",
            checkpoint.dir().join("config.json").display()
        );
        spec.tied_embeddings = false;
    }
    Ok((spec, end_ids))
}

/// config.json describes the model if there is one, and else the metadata of the files.
fn describe_gguf(checkpoint: &Checkpoint) -> Result<(ModelSpec, Vec<TokenId>), LoadError> {
    let gguf = checkpoint.gguf().expect("the caller has found GGUF files");
    let has = |module: &str, parameter: &str| {
        let name = gguf_name(module).map(|name| format!("{name}.{parameter}"));
        name.is_some_and(|name| gguf.shape(&name).is_some())
    };
    let from_metadata;
    let (config, mut spec) = match checkpoint.config() {
        Some(config) => (config, ModelSpec::from_config(config)?),
        None => {
            from_metadata = gguf_config::config(gguf)?;
            let mut spec = ModelSpec::from_config(&from_metadata)?;
            spec.qkv_bias = has("model.layers.0.self_attn.q_proj", "bias");
            if let Some(divisors) = gguf_config::rope_divisors(gguf, spec.head_dim)? {
                spec.rope.scaling = RopeScaling::Divided { divisors };
            }
            (&from_metadata, spec)
        }
    };
    // Names and row order depend on it.
    gguf_config::architecture(gguf)?;
    spec.tied_embeddings = !has("lm_head", "weight");
    let mut end_ids = end_ids(checkpoint, config, spec.vocab_size)?;
    if end_ids.is_empty() {
        let ids = gguf_config::end_ids(gguf).filter(|&id| id < spec.vocab_size as u64);
        end_ids = ids.map(|id| id as TokenId).collect();
    }
    Ok((spec, end_ids))
}

fn end_ids(
    checkpoint: &Checkpoint,
    config: &JsonFile,
    vocab_size: usize,
) -> Result<Vec<TokenId>, LoadError> {
    const KEY: &str = "eos_token_id";
    let Some((file, value)) = [checkpoint.generation_config(), Some(config)]
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::Path;

    use safetensors::SafeTensors;

    use super::ModelSource;

    /// Rows of every matrix of every quantised fixture, as their formats' own tools dequantise them: see
    /// tests/fixtures/make_quantised_fixtures.py.
    #[test]
    fn weights_are_what_the_formats_own_tools_make_of_them() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/quantised");
        let mut num_checkpoints = 0;
        for entry in fs::read_dir(dir).expect("the fixtures") {
            let folder = entry.expect("the fixtures").path();
            if folder.is_dir() {
                num_checkpoints += 1;
                agrees(&folder);
            }
        }
        assert_eq!(num_checkpoints, 10);
    }

    fn agrees(folder: &Path) {
        let source = ModelSource::open(folder).expect("the checkpoint opens");
        let bytes = fs::read(folder.with_extension("safetensors")).expect("its rows");
        let expected = SafeTensors::deserialize(&bytes).expect("whole");
        let spec = source.spec();
        let tensors = source.tensors().expect("a known quantisation");
        let (hidden, inter, q) = (spec.hidden_size, spec.intermediate_size, spec.q_width());
        let mut seen = BTreeSet::new();
        for (module, rows) in expected.tensors() {
            let kind = module.rsplit_once('.').map_or(&*module, |(_, kind)| kind);
            let (outputs, inputs) = match kind {
                "embed_tokens" | "lm_head" => (spec.vocab_size, hidden),
                "q_proj" => (q, hidden),
                "k_proj" | "v_proj" => (spec.kv_width(), hidden),
                "o_proj" => (hidden, q),
                "down_proj" => (hidden, inter),
                _ => (inter, hidden),
            };
            seen.insert(kind.to_owned());
            let matrix = tensors.matrix(&module, outputs, inputs);
            let matrix = matrix.expect("the matrix is there");
            matrix.preload().expect("it is read");
            assert_eq!((matrix.rows(), matrix.columns()), (outputs, inputs));
            let stride = (outputs / 8).max(1) | 1;
            let mut row = vec![0.0; inputs];
            let (values, _) = rows.data().as_chunks();
            let chunks = values.chunks_exact(inputs);
            assert_eq!(chunks.len(), outputs.div_ceil(stride), "{module}");
            for (index, expected) in chunks.enumerate() {
                let index = index * stride;
                matrix.read_row(index, &mut row);
                for (column, (got, expected)) in row.iter().zip(expected).enumerate() {
                    let expected = f32::from_le_bytes(*expected);
                    // Of a scale times a code plus an offset, in one order or another.
                    assert!(
                        (got - expected).abs() <= 1e-6,
                        "{}: {module}, row {index}, column {column}: {got} is not {expected}",
                        folder.display()
                    );
                }
            }
        }
        assert!(seen.len() >= 8, "{seen:?}");
    }
}
