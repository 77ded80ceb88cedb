//! LoRA adapters as PEFT saves them: `adapter_config.json` and `adapter_model.safetensors`.
//!
//! The adapter of a linear layer is `scale * B * A`, with A `[rank, inputs]` and B `[outputs, rank]`. In the file they
//! are `base_model.model.<module>.lora_A.weight` and `...lora_B.weight`; the scale is `lora_alpha / rank`, or
//! `lora_alpha / sqrt(rank)` with `use_rslora`. See <https://huggingface.co/docs/peft/developer_guides/checkpoint>. Of
//! an embedding they are `lora_embedding_A`, `[rank, tokens]`, and `lora_embedding_B`, `[width, rank]`. With DoRA (Liu
//! et al., arXiv:2402.09353) there is `lora_magnitude_vector`, `[outputs]`, too. A module that was trained as a whole
//! (`modules_to_save`, `bias`) is there as in a checkpoint, with `.base_layer` behind its name if it has A and B as
//! well.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::json_file::JsonFile;
use super::safetensors::SafetensorsFile;
use super::tensor::Tensor;
use inflight_base::LoadError;

pub(super) const CONFIG: &str = "adapter_config.json";
pub(super) const WEIGHTS: &str = "adapter_model.safetensors";
/// In front of the names of the model's modules.
const PREFIX: &str = "base_model.model.";

/// Keys that, with any other value than these, mean that the adapter does something else, or changes the base model.
const NEUTRAL: &[(&str, &[&str])] = &[
    ("peft_type", &["\"LORA\""]),
    ("use_qalora", &["false"]),
    ("use_bdlora", &["null", "false"]),
    ("bias", &["\"none\"", "\"all\"", "\"lora_only\""]),
    ("layer_replication", &["null"]),
    ("alora_invocation_tokens", &["null"]),
    ("arrow_config", &["null"]),
    ("kasa_config", &["null"]),
    ("monteclora_config", &["null"]),
    ("target_parameters", &["null", "[]"]),
    ("trainable_token_indices", &["null", "[]", "{}"]),
    (
        "init_lora_weights",
        &["true", "false", "\"gaussian\"", "\"eva\"", "\"orthogonal\""],
    ),
];

/// The largest factor of an adapter: above all that are trained, and far from overflow.
const MAX_SCALE: f32 = 65536.0;

/// An adapter's open files.
pub struct PeftAdapter {
    dir: PathBuf,
    file: SafetensorsFile,
    /// By name of the model's module.
    modules: BTreeMap<String, TensorNames>,
}

/// The tensors of a module, and its factor.
#[derive(Default)]
struct TensorNames {
    by_role: BTreeMap<Role, String>,
    rank: usize,
    scale: f32,
}

/// What a tensor is to its module.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Role {
    A,
    B,
    EmbeddingA,
    EmbeddingB,
    BiasOfB,
    Magnitudes,
    Weight,
    Bias,
}

/// The ends of names. The first one that fits says what a tensor is.
const ROLES: &[(&str, Role)] = &[
    (".lora_A.weight", Role::A),
    (".lora_B.weight", Role::B),
    (".lora_B.bias", Role::BiasOfB),
    (".lora_embedding_A", Role::EmbeddingA),
    (".lora_embedding_B", Role::EmbeddingB),
    (".lora_magnitude_vector", Role::Magnitudes),
    (".lora_magnitude_vector.weight", Role::Magnitudes),
    (".base_layer.weight", Role::Weight),
    (".base_layer.bias", Role::Bias),
    (".weight", Role::Weight),
    (".bias", Role::Bias),
];

/// What an adapter changes of one module.
pub struct AdaptedModule<'a> {
    /// What is added to its weights.
    pub low_rank: Option<LowRankModule<'a>>,
    /// DoRA: the lengths of the rows of its weights after that, `[outputs]`.
    pub magnitudes: Option<Tensor<'a>>,
    /// The weights that replace the module's, if any: `[outputs, inputs]`.
    pub weight: Option<Tensor<'a>>,
    /// The bias that replaces the module's, if any: `[outputs]`.
    pub bias: Option<Tensor<'a>>,
}

/// The adapter of one module: `scale * B * A`.
pub struct LowRankModule<'a> {
    /// Rows of A.
    pub rank: usize,
    /// The factor of the product.
    pub scale: f32,
    /// `[rank, inputs]`; of an embedding, `[rank, tokens]`.
    pub a: Tensor<'a>,
    /// `[outputs, rank]`.
    pub b: Tensor<'a>,
    /// The bias of B, `[outputs]`, which has the factor, too.
    pub bias: Option<Tensor<'a>>,
}

/// The keys of adapter_config.json that factors depend on.
struct Scaling {
    rank: usize,
    alpha: f64,
    is_rank_stabilised: bool,
    has_magnitudes: bool,
    has_biases: bool,
    ranks: Vec<(Pattern, f64)>,
    alphas: Vec<(Pattern, f64)>,
}

/// The name of a module, or the end of one.
struct Pattern {
    name: String,
    is_whole: bool,
}

impl PeftAdapter {
    /// Opens an adapter's folder. Of its weights only the names and shapes are read.
    ///
    /// # Errors
    /// A file is missing or damaged, a rank is above `max_rank`, or the adapter is more than A and B of linear layers.
    pub fn open(dir: &Path, max_rank: usize) -> Result<Self, LoadError> {
        let config = JsonFile::read(&dir.join(CONFIG))?;
        let scaling = Scaling::read(&config)?;
        let file = SafetensorsFile::open(&dir.join(WEIGHTS), "save the adapter again")?;
        let mut adapter = Self {
            dir: dir.to_owned(),
            file,
            modules: BTreeMap::new(),
        };
        let names: Vec<_> = adapter.file.tensor_names().collect();
        for name in names {
            let role = name.strip_prefix(PREFIX).and_then(|name| {
                let mut roles = ROLES.iter();
                roles.find_map(|(end, role)| name.strip_suffix(end).map(|module| (module, *role)))
            });
            let Some((module, role)) = role else {
                let tensor = adapter.file.tensor(&name)?;
                return Err(tensor.location.error(
                    "is not known: neither a tensor of a LoRA adapter nor weights or bias of a module; save the \
                     adapter with PEFT, or merge it into the checkpoint"
                        .to_owned(),
                ));
            };
            let tensors = adapter.modules.entry(module.to_owned()).or_default();
            if let Some(other) = tensors.by_role.insert(role, name.clone()) {
                return Err(adapter.error(format!("has both {other} and {name}")));
            }
        }
        if adapter.modules.is_empty() {
            return Err(adapter.error("has no weights: its file has no tensors".to_owned()));
        }
        let mut modules = std::mem::take(&mut adapter.modules);
        for (module, names) in &mut modules {
            let Some((a, _)) = adapter.factors(module, names, &scaling)? else {
                continue;
            };
            let a = adapter.file.tensor(a)?;
            let rank = a.shape.first().copied().unwrap_or_default();
            let expected = scaling.rank_of(module);
            if rank != expected || rank == 0 {
                return Err(a.location.error(format!(
                    "has shape {:?}; {CONFIG} calls for rank {expected}",
                    a.shape
                )));
            }
            if rank > max_rank {
                return Err(a.location.error(format!(
                    "has rank {rank}; lora_cache_max_adapter_size is {max_rank}: raise it in the model's config.pbtxt"
                )));
            }
            names.rank = rank;
            names.scale = scaling.scale_of(module, rank);
            if !names.scale.is_finite() || names.scale.abs() > MAX_SCALE {
                return Err(adapter.error(format!(
                    "has the factor {} for {module}; at most {MAX_SCALE} is possible",
                    names.scale
                )));
            }
        }
        adapter.modules = modules;
        Ok(adapter)
    }

    /// What it changes of a module; `None` if nothing. `is_embedding` if that is the embedding of tokens.
    ///
    /// # Errors
    /// A tensor has a type that is not floating point, or is neither matrix nor vector.
    pub fn module(
        &self,
        name: &str,
        is_embedding: bool,
    ) -> Result<Option<AdaptedModule<'_>>, LoadError> {
        let Some(names) = self.modules.get(name) else {
            return Ok(None);
        };
        let tensor = |role, num_dimensions| self.tensor(names, role, num_dimensions);
        let (of_a, of_b) = match is_embedding {
            true => (Role::EmbeddingA, Role::EmbeddingB),
            false => (Role::A, Role::B),
        };
        let (a, b) = (tensor(of_a, 2)?, tensor(of_b, 2)?);
        if names.rank > 0 && a.is_none() {
            return Err(self.error(match is_embedding {
                true => format!("has A and B of a linear layer for {name}, which is an embedding"),
                false => format!("has A and B of an embedding for {name}, which is a linear layer"),
            }));
        }
        let bias = tensor(Role::BiasOfB, 1)?;
        Ok(Some(AdaptedModule {
            low_rank: a.zip(b).map(|(a, b)| LowRankModule {
                rank: names.rank,
                scale: names.scale,
                a,
                b,
                bias,
            }),
            magnitudes: tensor(Role::Magnitudes, 1)?,
            weight: tensor(Role::Weight, 2)?,
            bias: tensor(Role::Bias, 1)?,
        }))
    }

    /// Whether it is for this module.
    pub fn has_module(&self, name: &str) -> bool {
        self.modules.contains_key(name)
    }

    /// The modules that it is for.
    pub fn module_names(&self) -> impl Iterator<Item = &str> {
        self.modules.keys().map(String::as_str)
    }

    /// How many there are.
    pub fn num_modules(&self) -> usize {
        self.modules.len()
    }

    /// Checks that everything read so far is what the file held when it was opened.
    ///
    /// # Errors
    /// It has been cut short or written to.
    pub fn check(&self) -> Result<(), LoadError> {
        self.file.check()
    }

    /// An error about the adapter.
    pub fn error(&self, reason: String) -> LoadError {
        LoadError::File {
            path: self.dir.clone(),
            reason,
        }
    }

    /// The names of A and B of a module, if it has them. Whatever else belongs to them is there, too.
    fn factors<'n>(
        &self,
        module: &str,
        names: &'n TensorNames,
        scaling: &Scaling,
    ) -> Result<Option<(&'n str, &'n str)>, LoadError> {
        let name = |role| names.by_role.get(&role).map(String::as_str);
        let is_embedding = [Role::EmbeddingA, Role::EmbeddingB]
            .iter()
            .any(|role| name(*role).is_some());
        let (a, b, end) = match is_embedding {
            true => (name(Role::EmbeddingA), name(Role::EmbeddingB), "embedding_"),
            false => (name(Role::A), name(Role::B), ""),
        };
        let has_factors = a.is_some() || b.is_some();
        for (tensor, other, role) in [(a, b, "A"), (b, a, "B")] {
            if tensor.is_none() && other.is_some() {
                return Err(self.error(format!("has no lora_{end}{role} of {module}")));
            }
        }
        for (role, what, key, is_on) in [
            (
                Role::Magnitudes,
                "lora_magnitude_vector",
                "use_dora",
                scaling.has_magnitudes,
            ),
            (
                Role::BiasOfB,
                "bias of lora_B",
                "lora_bias",
                scaling.has_biases,
            ),
        ] {
            let is_expected = is_on && has_factors && !is_embedding;
            if is_on && is_embedding && role == Role::Magnitudes {
                return Err(self.error(format!(
                    "has DoRA for the embedding {module}; train it without, or merge the adapter into the checkpoint"
                )));
            }
            if name(role).is_some() != is_expected {
                let is = if is_expected { "has no" } else { "has a" };
                return Err(self.error(format!(
                    "{is} {what} of {module}; {key} is {is_on} in {CONFIG}"
                )));
            }
        }
        Ok(a.zip(b))
    }

    fn tensor<'a>(
        &'a self,
        names: &'a TensorNames,
        role: Role,
        num_dimensions: usize,
    ) -> Result<Option<Tensor<'a>>, LoadError> {
        let Some(name) = names.by_role.get(&role) else {
            return Ok(None);
        };
        let tensor = self.file.tensor(name)?;
        let what = match num_dimensions {
            1 => "vector",
            _ => "matrix",
        };
        match tensor.shape.len() == num_dimensions {
            true => tensor.to_float().map(Some),
            false => Err(tensor
                .location
                .error(format!("has shape {:?}, and is no {what}", tensor.shape))),
        }
    }
}

impl Scaling {
    fn read(config: &JsonFile) -> Result<Self, LoadError> {
        for (key, neutral) in NEUTRAL {
            // Older versions of PEFT have not all of them.
            let Some(value) = config.get(key) else {
                continue;
            };
            if !neutral.contains(&value.to_string().as_str()) {
                let expected = format!(
                    "{}: other adapters are not supported; merge this one into its checkpoint, or convert it with PEFT",
                    neutral.join(" or ")
                );
                return Err(config.unexpected(key, value, expected));
            }
        }
        let rank = config.size("r", 1..=MAX_RANK)?;
        let rank = rank.ok_or_else(|| config.error("r is missing: the rank".to_owned()))?;
        let alpha = number(config, "lora_alpha")?;
        let alpha = alpha.ok_or_else(|| config.error("lora_alpha is missing".to_owned()))?;
        Ok(Self {
            rank,
            alpha,
            is_rank_stabilised: config.bool_or("use_rslora", false)?,
            has_magnitudes: config.bool_or("use_dora", false)?,
            has_biases: config.bool_or("lora_bias", false)?,
            ranks: patterns(config, "rank_pattern")?,
            alphas: patterns(config, "alpha_pattern")?,
        })
    }

    fn rank_of(&self, module: &str) -> usize {
        value_of(&self.ranks, module).map_or(self.rank, |rank| rank as usize)
    }

    fn scale_of(&self, module: &str, rank: usize) -> f32 {
        let alpha = value_of(&self.alphas, module).unwrap_or(self.alpha);
        let divisor = match self.is_rank_stabilised {
            true => (rank as f64).sqrt(),
            false => rank as f64,
        };
        (alpha / divisor) as f32
    }
}

impl Pattern {
    /// A key of a pattern, which PEFT takes as a regular expression for the end of a name; `None` if it is more than a
    /// name.
    fn new(key: &str) -> Option<Self> {
        let whole = key.strip_prefix('^');
        let name = whole.unwrap_or(key);
        let name = name.strip_suffix('$').unwrap_or(name).replace("\\.", ".");
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '.';
        (!name.is_empty() && name.chars().all(is_name)).then_some(Self {
            name,
            is_whole: whole.is_some(),
        })
    }

    fn matches(&self, module: &str) -> bool {
        let before = module.strip_suffix(&self.name);
        before.is_some_and(|before| before.is_empty() || before.ends_with('.') && !self.is_whole)
    }
}

/// More than any adapter's rank.
const MAX_RANK: usize = 1 << 16;

/// The value of the first pattern that matches.
fn value_of(patterns: &[(Pattern, f64)], module: &str) -> Option<f64> {
    let found = patterns.iter().find(|(pattern, _)| pattern.matches(module));
    found.map(|(_, value)| *value)
}

fn patterns(config: &JsonFile, key: &str) -> Result<Vec<(Pattern, f64)>, LoadError> {
    let Some(object) = config.object(key)? else {
        return Ok(Vec::new());
    };
    let entries = object.entries().map(|(pattern, value)| {
        let known = Pattern::new(pattern).zip(value.as_f64());
        known.ok_or_else(|| {
            object.unexpected(
                pattern,
                value,
                "a number for the end of a module's name, without further regular expressions",
            )
        })
    });
    entries.collect()
}

fn number(config: &JsonFile, key: &str) -> Result<Option<f64>, LoadError> {
    match config.get(key) {
        None => Ok(None),
        Some(value) => match value.as_f64() {
            Some(number) => Ok(Some(number)),
            None => Err(config.unexpected(key, value, "a number")),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_is_the_end_of_a_name() {
        let matches = |pattern: &str, module| Pattern::new(pattern).map(|it| it.matches(module));
        let module = "model.layers.1.self_attn.q_proj";
        let whole = format!("^{module}$");
        for pattern in ["q_proj", "q_proj$", "self_attn\\.q_proj", module, &whole] {
            assert_eq!(matches(pattern, module), Some(true), "{pattern}");
        }
        for pattern in ["proj", "k_proj", "layers.1", "^q_proj"] {
            assert_eq!(matches(pattern, module), Some(false), "{pattern}");
        }
        for pattern in ["", "layers.[0-9]+.q_proj", ".*q_proj"] {
            assert_eq!(matches(pattern, module), None, "{pattern}");
        }
    }
}
