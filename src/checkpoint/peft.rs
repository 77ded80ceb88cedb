//! LoRA adapters as PEFT saves them: `adapter_config.json` and `adapter_model.safetensors`.
//!
//! The adapter of a linear layer is `scale * B * A`, with A `[rank, inputs]` and B `[outputs, rank]`. In the file they are
//! `base_model.model.<module>.lora_A.weight` and `...lora_B.weight`; the scale is `lora_alpha / rank`, or `lora_alpha /
//! sqrt(rank)` with `use_rslora`. See <https://huggingface.co/docs/peft/developer_guides/checkpoint>.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::file_stamp::FileStamp;
use super::json_file::JsonFile;
use super::safetensors::SafetensorsFile;
use super::tensor::Tensor;
use crate::base::LoadError;

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";
/// In front of the names of the model's modules.
const PREFIX: &str = "base_model.model.";

/// Keys that, with any other value than these, mean that the adapter does something else, or changes the base model.
const NEUTRAL: &[(&str, &[&str])] = &[
    ("peft_type", &["\"LORA\""]),
    ("use_dora", &["false"]),
    ("use_qalora", &["false"]),
    ("use_bdlora", &["null", "false"]),
    ("lora_bias", &["false"]),
    ("bias", &["\"none\""]),
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
    a: Option<String>,
    b: Option<String>,
    rank: usize,
    scale: f32,
}

/// The adapter of one module: `scale * B * A`.
pub struct LowRankModule<'a> {
    /// Rows of A.
    pub rank: usize,
    /// The factor of the product.
    pub scale: f32,
    /// `[rank, inputs]`.
    pub a: Tensor<'a>,
    /// `[outputs, rank]`.
    pub b: Tensor<'a>,
}

/// The stamps of an adapter's files: equal ones have equal contents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterStamp([FileStamp; 2]);

impl AdapterStamp {
    /// The stamps of the files in `dir`; `None` if one of them is not there.
    pub fn of(dir: &Path) -> Option<Self> {
        let [config, weights] = [CONFIG, WEIGHTS].map(|name| FileStamp::of(&dir.join(name)));
        Some(Self([config?, weights?]))
    }
}

impl std::fmt::Display for AdapterStamp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [config, weights] = &self.0;
        write!(f, "{config}; {weights}")
    }
}

/// The keys of adapter_config.json that factors depend on.
struct Scaling {
    rank: usize,
    alpha: f64,
    is_rank_stabilised: bool,
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
            let module = name.strip_prefix(PREFIX).and_then(|name| {
                let a = name.strip_suffix(".lora_A.weight").map(|it| (it, true));
                a.or_else(|| name.strip_suffix(".lora_B.weight").map(|it| (it, false)))
            });
            let Some((module, is_a)) = module else {
                let tensor = adapter.file.tensor(&name)?;
                return Err(tensor.location.error(
                    "is neither A nor B of a linear layer; save the adapter without modules_to_save, embeddings and \
                     biases (save_embedding_layers=False), or merge it into the checkpoint"
                        .to_owned(),
                ));
            };
            let names = adapter.modules.entry(module.to_owned()).or_default();
            *(if is_a { &mut names.a } else { &mut names.b }) = Some(name);
        }
        if adapter.modules.is_empty() {
            return Err(adapter.error("has no weights: its file has no tensors".to_owned()));
        }
        let mut modules = std::mem::take(&mut adapter.modules);
        for (module, names) in &mut modules {
            let (Some(a), Some(_)) = (&names.a, &names.b) else {
                let missing = if names.a.is_none() {
                    "lora_A"
                } else {
                    "lora_B"
                };
                return Err(adapter.error(format!("has no {missing} of {module}")));
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

    /// The adapter of a module; `None` if it has none.
    ///
    /// # Errors
    /// A tensor has a type that is not floating point, or is no matrix.
    pub fn module(&self, name: &str) -> Result<Option<LowRankModule<'_>>, LoadError> {
        let Some(names) = self.modules.get(name) else {
            return Ok(None);
        };
        Ok(Some(LowRankModule {
            rank: names.rank,
            scale: names.scale,
            a: self.matrix(names.a.as_deref())?,
            b: self.matrix(names.b.as_deref())?,
        }))
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

    fn matrix<'a>(&'a self, name: Option<&'a str>) -> Result<Tensor<'a>, LoadError> {
        let tensor = self.file.tensor(name.expect("both were found"))?;
        match tensor.shape.len() {
            2 => tensor.to_float(),
            _ => Err(tensor
                .location
                .error(format!("has shape {:?}, and is no matrix", tensor.shape))),
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
                    "{}: adapters are A and B of linear layers over an unchanged base model; merge this one into its \
                     checkpoint, or convert it with PEFT",
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
