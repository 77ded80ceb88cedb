//! The checkpoint of an EAGLE-3 head.

use std::path::Path;

use serde_json::Value;

use crate::families;
use crate::spec::ModelSpec;
use inflight_base::{LoadError, TokenId};
use inflight_checkpoint::{Checkpoint, JsonFile, Matrix, RowOrder, Store};

/// How many layers of the model a head reads.
pub(super) const NUM_STATES: usize = 3;

/// The class of heads in config.json.
const CLASS: &str = "LlamaForCausalLMEagle3";

/// The key that tells a config.json of speculators from others, and its value.
const SPECULATORS: (&str, &str) = ("speculators_model_type", "eagle3");

/// The key of the layers that a head reads.
const LAYERS: &str = "eagle_aux_hidden_state_layer_ids";

/// A head before its weights are read.
pub(super) struct EagleSource {
    checkpoint: Checkpoint,
    /// A model of one layer.
    spec: ModelSpec,
    /// Width of the residual stream of the model that it was trained for.
    target_width: usize,
    /// The width of the model's embeddings.
    embedding_width: usize,
    /// The layers of that model whose inputs it reads, ascending.
    layers: [usize; NUM_STATES],
    /// Tokens that it guesses.
    draft_vocab_size: usize,
    /// The prefix of the names of the layer's tensors.
    layer: &'static str,
    /// Whether the layer adds to the states as its norm leaves them, instead of the states themselves.
    adds_to_normed: bool,
}

impl EagleSource {
    /// Opens the checkpoint folder of a head for this model.
    ///
    /// # Errors
    /// A file is missing or damaged, or describes no head for such a model, or one that is not supported.
    pub(super) fn open(dir: &Path, target: &ModelSpec) -> Result<Self, LoadError> {
        let checkpoint = Checkpoint::open(dir)?;
        let (None, Some(config)) = (checkpoint.gguf(), checkpoint.config()) else {
            return Err(LoadError::File {
                path: dir.to_owned(),
                reason: "GGUF files have no EAGLE-3 heads: name a folder of safetensors".to_owned(),
            });
        };
        let nested = check_class(config)?;
        let layer_config = nested.as_ref().unwrap_or(config);
        for (config, keys) in [
            (layer_config, &["attention_bias", "mlp_bias"][..]),
            (config, &["norm_before_fc", "fc_norm", "norm_output"]),
        ] {
            for key in keys {
                if config.bool_or(key, false)? {
                    let expected = "false: other heads are not supported";
                    return Err(config.unexpected(key, true, expected));
                }
            }
        }
        let adds_to_normed = config.bool_or("norm_before_residual", nested.is_some())?;
        let spec = families::describe_draft_head(layer_config)?;
        if spec.num_layers() != 1 {
            return Err(layer_config.unexpected("num_hidden_layers", spec.num_layers(), 1));
        }
        if spec.vocab_size != target.vocab_size {
            let expected = format!("{}, the tokens of the model", target.vocab_size);
            return Err(layer_config.unexpected("vocab_size", spec.vocab_size, expected));
        }
        let target_width = target.hidden_size;
        let width = config.size("target_hidden_size", 1..=usize::MAX)?;
        if let Some(width) = width.filter(|&width| width != target_width) {
            let expected = format!("{target_width}, the hidden_size of the model");
            return Err(config.unexpected("target_hidden_size", width, expected));
        }
        let draft_vocab_size = config.size("draft_vocab_size", 1..=spec.vocab_size)?;
        let draft_vocab_size = draft_vocab_size.unwrap_or(spec.vocab_size);
        let layers = layers(config, target.num_layers())?;
        let store = checkpoint.store()?;
        let layer = match store.has("layers.0.hidden_norm.weight") {
            true => "layers.0",
            false => "midlayer",
        };
        for name in ["fc.bias", "lm_head.bias"] {
            if store.has(name) {
                return Err(LoadError::File {
                    path: dir.to_owned(),
                    reason: format!("has {name}: heads with biases are not supported"),
                });
            }
        }
        Ok(Self {
            target_width,
            embedding_width: target.embedding_width(),
            layers,
            draft_vocab_size,
            layer,
            adds_to_normed,
            spec,
            checkpoint,
        })
    }

    /// Its layer, as a model of one layer.
    pub(super) fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// Bytes of its weights in the files.
    ///
    /// # Errors
    /// They cannot be read.
    pub(super) fn num_weight_bytes(&self) -> Result<u64, LoadError> {
        Ok(self.checkpoint.store()?.num_bytes())
    }

    pub(super) fn embedding_width(&self) -> usize {
        self.embedding_width
    }

    pub(super) fn target_width(&self) -> usize {
        self.target_width
    }

    pub(super) fn layers(&self) -> [usize; NUM_STATES] {
        self.layers
    }

    pub(super) fn adds_to_normed(&self) -> bool {
        self.adds_to_normed
    }

    pub(super) fn draft_vocab_size(&self) -> usize {
        self.draft_vocab_size
    }

    pub(super) fn store(&self) -> Result<Store<'_>, LoadError> {
        self.checkpoint.store()
    }

    /// `[hidden_size, 3 * target_width]`.
    pub(super) fn fc<'a>(&self, store: &Store<'a>) -> Result<Matrix<'a>, LoadError> {
        let num_inputs = NUM_STATES * self.target_width;
        store.matrix("fc", self.spec.hidden_size, num_inputs, RowOrder::Same)
    }

    /// The name of a module of the layer.
    pub(super) fn in_layer(&self, module: &str) -> String {
        format!("{}.{module}", self.layer)
    }

    /// The token of the model for each of those that it guesses; `None` if they are the same ones.
    ///
    /// # Errors
    /// They are missing or damaged.
    pub(super) fn tokens(&self, store: &Store<'_>) -> Result<Option<Vec<TokenId>>, LoadError> {
        const NAME: &str = "d2t";
        let vocab_size = self.spec.vocab_size;
        if !store.has(NAME) && self.draft_vocab_size == vocab_size {
            return Ok(None);
        }
        let offsets = store.integers(NAME, self.draft_vocab_size)?;
        let tokens = offsets.iter().zip(0..).map(|(offset, own)| {
            let token = offset.checked_add(own);
            let token = token.filter(|&token| (0..vocab_size as i64).contains(&token));
            token.map(|token| token as TokenId).ok_or_else(|| LoadError::File {
                path: self.checkpoint.dir().to_owned(),
                reason: format!(
                    "{NAME} has {offset} at place {own}: their sum must be a token below vocab_size {vocab_size}"
                ),
            })
        });
        tokens.collect::<Result<_, _>>().map(Some)
    }
}

/// Refuses what is no head. Returns the layer's part of a config.json of speculators.
fn check_class(config: &JsonFile) -> Result<Option<JsonFile>, LoadError> {
    const LAYER: &str = "transformer_layer_config";
    let (key, method) = SPECULATORS;
    if let Some(given) = config.get(key) {
        if given != method {
            return Err(config.unexpected(key, given, format!("\"{method}\"")));
        }
        let layer = config.object(LAYER)?.ok_or_else(|| config.missing(LAYER))?;
        let family = layer.string("model_type")?.unwrap_or("llama");
        return match family {
            "llama" => Ok(Some(layer)),
            other => Err(layer.unexpected("model_type", other, "llama")),
        };
    }
    let classes = config.get("architectures");
    let has = |classes: &Value| {
        let classes = classes.as_array();
        classes.is_some_and(|all| all.iter().any(|class| class == CLASS))
    };
    match classes {
        Some(classes) if has(classes) => Ok(None),
        Some(classes) => Err(config.unexpected("architectures", classes, format!("[\"{CLASS}\"]"))),
        None => Err(config.missing("architectures")),
    }
}

/// The layers whose inputs the head reads: those that its config.json names, or the third one, the middle one, and the
/// last but two.
///
/// At the top level, as speculators writes it, a number is that of the layer whose input it is: vLLM collects the
/// states before it computes that layer (`get_eagle3_aux_layers_from_config` in
/// v1/worker/gpu/spec_decode/eagle/eagle3_utils.py). In `eagle_config`, as SpecForge and ModelOpt write it, it is that
/// of the layer whose output it is: SGLang adds one to each (`set_eagle3_layers_to_capture` in srt/models/llama.py).
/// Without numbers, both read the inputs of 2, n / 2 and n - 3.
fn layers(config: &JsonFile, num_layers: usize) -> Result<[usize; NUM_STATES], LoadError> {
    let nested = config.object("eagle_config")?;
    let nested = nested.as_ref().filter(|it| it.has(LAYERS));
    let (layers, shift) = match (config.get(LAYERS), nested) {
        (Some(given), _) => (given.clone(), 0),
        (None, Some(nested)) => (nested.get(LAYERS).cloned().unwrap_or_default(), 1),
        (None, None) => {
            let usual = [2, num_layers / 2, num_layers.saturating_sub(3)];
            (Value::from(usual.map(|it| it as u64).to_vec()), 0)
        }
    };
    let list = layers.as_array().into_iter().flatten();
    let list = list.map(|it| it.as_u64().map(|it| it.saturating_add(shift) as usize));
    let list: Option<Vec<usize>> = list.collect();
    list.and_then(|list| <[usize; NUM_STATES]>::try_from(list).ok())
        .filter(|all| all.is_sorted_by(|a, b| a < b) && all[NUM_STATES - 1] < num_layers)
        .ok_or_else(|| {
            let expected = format!("three ascending layers of the {num_layers} of the model");
            config.unexpected(LAYERS, &layers, expected)
        })
}
