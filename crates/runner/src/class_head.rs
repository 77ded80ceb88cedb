//! The head of a model that sorts prompts into classes: one number for each class, from the state that stands for a
//! prompt.
//!
//! ```text
//! numbers [num_labels] = output [num_labels, hidden_size] * state [hidden_size]      decoders
//!                        output * tanh(dense [hidden_size, hidden_size] * state)     BERT and its like
//!                        output * norm(gelu(dense * state))                          ModernBERT
//! ```
//!
//! A model that generates is asked a question instead, and its number is how much more likely one token is as the
//! answer than another: the difference of their logits, by the difference of their rows of the output layer.
//!
//! It is computed on the host in f32, because it is small and a prompt has one state. Sums are over the same elements
//! in the same order for each prompt.
//!
//! Which function makes probabilities of the numbers depends on the task, as in vLLM
//! (`vllm/model_executor/layers/pooler`): of classes, that of the `problem_type` that the model was trained for in
//! transformers; of a score, that of the cross encoder in sentence-transformers.

use super::model_source::ModelSource;
use super::model_tensors::ModelTensors;
use super::spec::{
    ClassActivation, ClassHead, ClassModules, ClassTransform, ModelSpec, Module, NormKind,
};
use inflight_base::{LoadError, TokenId};
use inflight_checkpoint::JsonFile;
use inflight_config::PoolingMode;
use inflight_device::LogitsTransform;
use inflight_device_cpu::gelu;

/// The most classes.
const MAX_LABELS: usize = 1 << 16;

/// The labels of a config without any, in transformers.
const DEFAULT_NUM_LABELS: usize = 2;

/// Sums that are made side by side.
const NUM_SUMS: usize = 16;

impl ClassHead {
    /// The head of a config.json, for classes.
    ///
    /// # Errors
    /// Its labels are not numbered, or it has another `problem_type`.
    pub(super) fn classifying(modules: ClassModules, config: &JsonFile) -> Result<Self, LoadError> {
        let labels = labels(config)?;
        let transform = match config.string("problem_type")? {
            Some("regression") => ClassTransform::Identity,
            Some("multi_label_classification") => ClassTransform::Sigmoid,
            Some("single_label_classification") | None => match labels.len() {
                1 => ClassTransform::Sigmoid,
                _ => ClassTransform::Softmax,
            },
            Some(other) => {
                return Err(config.unexpected(
                    "problem_type",
                    format_args!("'{other}'"),
                    "one of regression, single_label_classification and multi_label_classification",
                ));
            }
        };
        Ok(Self {
            modules,
            labels,
            tokens: None,
            transform,
            padding: padding(config),
        })
    }

    /// The head of a config.json, for a score.
    ///
    /// # Errors
    /// It has several classes, or the activation is another function.
    pub(super) fn scoring(modules: ClassModules, config: &JsonFile) -> Result<Self, LoadError> {
        let labels = labels(config)?;
        if labels.len() != 1 {
            return Err(LoadError::Config {
                problem: format!(
                    "task is score, and the model has {} classes, where a score is the number of a single one",
                    labels.len()
                ),
                remedy: "set task to classify".to_owned(),
            });
        }
        Ok(Self {
            modules,
            labels,
            tokens: None,
            transform: score_transform(config)?,
            padding: padding(config),
        })
    }

    /// The head of a model that generates, for a score: the probability of the second of two tokens against the first.
    ///
    /// # Errors
    /// A token is none of the model's, or its logits are not the products of the output layer.
    pub(super) fn of_tokens(spec: &ModelSpec, tokens: [TokenId; 2]) -> Result<Self, LoadError> {
        if let Some(token) = tokens.iter().find(|&&it| it as usize >= spec.vocab_size) {
            return Err(LoadError::Config {
                problem: format!(
                    "classifier_from_token has token {token}, and the model has {} tokens",
                    spec.vocab_size
                ),
                remedy: "name tokens of the model".to_owned(),
            });
        }
        if spec.logits != LogitsTransform::IDENTITY {
            return Err(LoadError::Config {
                problem: format!(
                    "classifier_from_token is set, and logits of {} are scaled or bounded",
                    spec.family
                ),
                remedy: "serve a model of another family, or leave it out".to_owned(),
            });
        }
        Ok(Self {
            modules: ClassModules {
                pooling: PoolingMode::Last,
                dense: None,
                output: match spec.tied_embeddings {
                    true => spec.modules.embedding,
                    false => spec.modules.output_layer,
                },
                has_bias: spec.output_bias,
            },
            labels: vec!["LABEL_0".to_owned()],
            tokens: Some(tokens),
            transform: ClassTransform::Sigmoid,
            padding: None,
        })
    }
}

/// The function of a cross encoder's score: `sentence_transformers.activation_fn`, or the key of versions before 4.
/// Where neither is there, the logistic function.
fn score_transform(config: &JsonFile) -> Result<ClassTransform, LoadError> {
    const KEY: &str = "activation_fn";
    const OLD_KEY: &str = "sbert_ce_default_activation_function";
    let own = config.object("sentence_transformers")?;
    let (file, key) = match &own {
        Some(own) if own.get(KEY).is_some() => (own, KEY),
        _ => (config, OLD_KEY),
    };
    let Some(class) = file.string(key)? else {
        return Ok(ClassTransform::Sigmoid);
    };
    match class.rsplit('.').next() {
        Some("Sigmoid") => Ok(ClassTransform::Sigmoid),
        Some("Identity") => Ok(ClassTransform::Identity),
        _ => Err(file.unexpected(
            key,
            format_args!("'{class}'"),
            "supported; torch.nn's Sigmoid and Identity are",
        )),
    }
}

/// The token that pads prompts, if the config tells one.
fn padding(config: &JsonFile) -> Option<TokenId> {
    let id = config.get("pad_token_id")?.as_u64()?;
    TokenId::try_from(id).ok()
}

/// The names of the classes: `id2label`, or as many as `num_labels` says, named as in transformers.
fn labels(config: &JsonFile) -> Result<Vec<String>, LoadError> {
    let num_labels = config.size("num_labels", 1..=MAX_LABELS)?;
    let Some(names) = config.object("id2label")? else {
        let num_labels = num_labels.unwrap_or(DEFAULT_NUM_LABELS);
        return Ok((0..num_labels).map(|id| format!("LABEL_{id}")).collect());
    };
    let num_names = names.entries().count();
    if !(1..=MAX_LABELS).contains(&num_names) || num_labels.is_some_and(|num| num != num_names) {
        let expected = match num_labels {
            Some(num) => format!("num_labels, {num}"),
            None => format!("1 to {MAX_LABELS}"),
        };
        return Err(config.error(format!(
            "id2label has {num_names} names, and there must be as many as {expected}"
        )));
    }
    let name = |id: usize| {
        let key = id.to_string();
        let name = names.string(&key)?;
        name.map(str::to_owned).ok_or_else(|| names.missing(&key))
    };
    (0..num_names).map(name).collect()
}

/// The weights of a head.
pub(super) struct ClassWeights {
    dense: Option<DenseWeights>,
    output: HostLinear,
}

/// What is in front of the last layer.
struct DenseWeights {
    linear: HostLinear,
    activation: ClassActivation,
    norm: Option<HostNorm>,
}

/// A LayerNorm in memory of the host.
struct HostNorm {
    weight: Vec<f32>,
    /// Empty if there is none.
    bias: Vec<f32>,
    eps: f32,
}

/// A linear layer in memory of the host.
struct HostLinear {
    /// `[num_outputs, num_inputs]`.
    weight: Vec<f32>,
    num_inputs: usize,
    /// Empty if there is none.
    bias: Vec<f32>,
}

impl ClassWeights {
    /// Reads them.
    ///
    /// # Errors
    /// They are missing, misshapen or not finite.
    pub fn load(head: &ClassHead, source: &ModelSource) -> Result<Self, LoadError> {
        let width = source.spec().embedding_width();
        let modules = head.modules;
        let tensors = source.tensors()?;
        let linear = |module, num_outputs, has_bias| {
            HostLinear::load(&tensors, module, [num_outputs, width], has_bias)
        };
        let weights = Self {
            dense: match modules.dense {
                Some(dense) => Some(DenseWeights {
                    linear: linear(dense.module, width, dense.has_bias)?,
                    activation: dense.activation,
                    norm: match dense.norm {
                        Some(norm) => Some(HostNorm::load(&tensors, norm, source.spec())?),
                        None => None,
                    },
                }),
                None => None,
            },
            output: match head.tokens {
                None => linear(modules.output, head.labels.len(), modules.has_bias)?,
                Some(tokens) => HostLinear::between(tokens, &tensors, &modules, source.spec())?,
            },
        };
        tensors.store().check()?;
        Ok(weights)
    }

    /// The number of each class.
    pub fn of(&self, state: &[f32]) -> Vec<f32> {
        match &self.dense {
            None => self.output.of(state),
            Some(dense) => {
                let mut inner = dense.linear.of(state);
                match dense.activation {
                    ClassActivation::Tanh => inner.iter_mut().for_each(|it| *it = it.tanh()),
                    ClassActivation::Gelu => inner.iter_mut().for_each(|it| *it = gelu(*it)),
                }
                if let Some(norm) = &dense.norm {
                    norm.apply(&mut inner);
                }
                self.output.of(&inner)
            }
        }
    }
}

impl HostNorm {
    fn load(
        tensors: &ModelTensors<'_>,
        module: &'static str,
        spec: &ModelSpec,
    ) -> Result<Self, LoadError> {
        let module = Module::of_model(module);
        let has_bias = spec.norm.kind == NormKind::Layer { has_bias: true };
        Ok(Self {
            weight: tensors.norm(module, spec.hidden_size)?.to_f32()?,
            bias: match has_bias {
                true => tensors.bias(module, spec.hidden_size)?.to_f32()?,
                false => Vec::new(),
            },
            eps: spec.norm.eps,
        })
    }

    fn apply(&self, x: &mut [f32]) {
        let len = x.len() as f32;
        let mean = x.iter().sum::<f32>() / len;
        let squares = x.iter().map(|it| (it - mean) * (it - mean));
        let scale = 1.0 / (squares.sum::<f32>() / len + self.eps).sqrt();
        let biases = self.bias.iter().copied().chain(std::iter::repeat(0.0));
        for ((value, weight), bias) in x.iter_mut().zip(&self.weight).zip(biases) {
            *value = (*value - mean) * scale * weight + bias;
        }
    }
}

impl HostLinear {
    fn load(
        tensors: &ModelTensors<'_>,
        module: &'static str,
        [num_outputs, num_inputs]: [usize; 2],
        has_bias: bool,
    ) -> Result<Self, LoadError> {
        let module = Module::of_model(module);
        let matrix = tensors.matrix(module, num_outputs, num_inputs)?;
        let mut weight = vec![0.0; num_outputs * num_inputs];
        for (index, row) in weight.chunks_exact_mut(num_inputs).enumerate() {
            matrix.read_row(index, row);
            if !row.iter().all(|value| value.is_finite()) {
                return Err(matrix.not_finite(index));
            }
        }
        Ok(Self {
            weight,
            num_inputs,
            bias: match has_bias {
                true => tensors.bias(module, num_outputs)?.to_f32()?,
                false => Vec::new(),
            },
        })
    }

    /// The second of two rows of the output layer, less the first.
    fn between(
        [less, more]: [TokenId; 2],
        tensors: &ModelTensors<'_>,
        modules: &ClassModules,
        spec: &ModelSpec,
    ) -> Result<Self, LoadError> {
        let module = Module::of_model(modules.output);
        let width = spec.embedding_width();
        let matrix = tensors.matrix(module, spec.vocab_size, width)?;
        let row = |token: TokenId| {
            let mut row = vec![0.0; width];
            matrix.read_row(token as usize, &mut row);
            match row.iter().all(|value: &f32| value.is_finite()) {
                true => Ok(row),
                false => Err(matrix.not_finite(token as usize)),
            }
        };
        let (less_row, more_row) = (row(less)?, row(more)?);
        let difference = more_row
            .iter()
            .zip(&less_row)
            .map(|(more, less)| more - less);
        Ok(Self {
            weight: difference.collect(),
            num_inputs: width,
            bias: match modules.has_bias {
                true => {
                    let biases = tensors.bias(module, spec.vocab_size)?.to_f32()?;
                    vec![biases[more as usize] - biases[less as usize]]
                }
                false => Vec::new(),
            },
        })
    }

    fn of(&self, x: &[f32]) -> Vec<f32> {
        let rows = self.weight.chunks_exact(self.num_inputs);
        let biases = self.bias.iter().copied().chain(std::iter::repeat(0.0));
        rows.zip(biases)
            .map(|(row, bias)| dot(row, x) + bias)
            .collect()
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (a_groups, a_rest) = a.as_chunks::<NUM_SUMS>();
    let (b_groups, b_rest) = b.as_chunks::<NUM_SUMS>();
    let mut sums = [0.0; NUM_SUMS];
    for (a, b) in a_groups.iter().zip(b_groups) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    let rest = a_rest.iter().zip(b_rest).map(|(a, b)| a * b);
    sums.iter().sum::<f32>() + rest.sum::<f32>()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Value, json};

    use super::*;

    const SCORE: ClassModules = ClassModules {
        pooling: PoolingMode::Last,
        dense: None,
        output: "score",
        has_bias: false,
    };

    fn config(value: &Value) -> JsonFile {
        let object = value.as_object().expect("an object").clone();
        JsonFile::new(Path::new("config.json"), "", object)
    }

    #[test]
    fn the_function_is_that_which_the_model_was_trained_for() {
        use ClassTransform::{Identity, Sigmoid, Softmax};
        let names = |num: usize| (0..num).map(|id| (id.to_string(), json!(format!("c{id}"))));
        for (problem_type, num, expected) in [
            (None, 1, Sigmoid),
            (None, 3, Softmax),
            (Some("single_label_classification"), 2, Softmax),
            (Some("multi_label_classification"), 3, Sigmoid),
            (Some("regression"), 1, Identity),
        ] {
            let id2label: serde_json::Map<_, _> = names(num).collect();
            let config = config(&json!({ "id2label": id2label, "problem_type": problem_type }));
            let head = ClassHead::classifying(SCORE, &config).expect("a head");
            assert_eq!(head.transform, expected, "{problem_type:?} {num}");
            assert_eq!(head.labels.last(), Some(&format!("c{}", num - 1)));
        }
        for (value, expected) in [
            (json!({}), Sigmoid),
            (
                json!({ "sentence_transformers": { "activation_fn": "torch.nn.modules.linear.Identity" } }),
                Identity,
            ),
            (
                json!({ "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity" }),
                Identity,
            ),
        ] {
            let mut value = value;
            value["num_labels"] = json!(1);
            let head = ClassHead::scoring(SCORE, &config(&value)).expect("a head");
            assert_eq!((head.transform, &head.labels[0][..]), (expected, "LABEL_0"));
        }
    }

    #[test]
    fn what_is_not_understood_is_refused() {
        let classifying = ClassHead::classifying as fn(ClassModules, &JsonFile) -> _;
        for (head, value, part) in [
            (
                classifying,
                json!({ "problem_type": "ranking" }),
                "'ranking'",
            ),
            (classifying, json!({ "id2label": {} }), "has 0 names"),
            (
                classifying,
                json!({ "id2label": { "1": "a" } }),
                "id2label.0",
            ),
            (
                classifying,
                json!({ "id2label": { "0": "a" }, "num_labels": 2 }),
                "num_labels, 2",
            ),
            (classifying, json!({ "num_labels": 1 << 20 }), "num_labels"),
            (ClassHead::scoring, json!({}), "has 2 classes"),
            (
                ClassHead::scoring,
                json!({ "num_labels": 1, "sentence_transformers": { "activation_fn": "torch.nn.Tanh" } }),
                "sentence_transformers.activation_fn",
            ),
        ] {
            let error = head(SCORE, &config(&value)).expect_err(part).to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
