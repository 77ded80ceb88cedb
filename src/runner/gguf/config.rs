//! The model's shape from a file's metadata, for folders without config.json: said as config.json says it, so that one
//! reader checks both.

use std::path::Path;

use serde_json::{Map, Value as Json, json};

use super::folder::Gguf;
use super::metadata::Value;
use crate::base::LoadError;
use crate::runner::json_file::JsonFile;

/// The architectures, by their names in the file and in transformers.
const ARCHITECTURES: [(&str, &str); 3] = [
    ("llama", "LlamaForCausalLM"),
    ("qwen2", "Qwen2ForCausalLM"),
    ("qwen3", "Qwen3ForCausalLM"),
];
/// Where more of a model is said than here.
const REMEDY: &str = "put the config.json of the model that it was made from beside the file";

impl Gguf {
    /// What config.json would say.
    ///
    /// # Errors
    /// A key that is missing, or says what is not supported.
    pub(in crate::runner) fn config(&self) -> Result<JsonFile, LoadError> {
        let (prefix, class) = self.architecture()?;
        let keys = Keys { gguf: self, prefix };
        for unsupported in ["expert_count", "attention.sliding_window"] {
            if let Some(value) = keys.get(unsupported)
                && *value != Value::Unsigned(0)
            {
                return Err(keys.error(unsupported, "is not read from a GGUF file", REMEDY));
            }
        }
        let num_heads = keys.required("attention.head_count")?;
        let mut config = Map::new();
        let mut set = |key: &str, value: Json| config.insert(key.to_owned(), value);
        set("architectures", json!([class]));
        set("hidden_size", keys.required("embedding_length")?);
        set("intermediate_size", keys.required("feed_forward_length")?);
        set("num_hidden_layers", keys.required("block_count")?);
        set(
            "num_key_value_heads",
            keys.number("attention.head_count_kv")?
                .unwrap_or(num_heads.clone()),
        );
        set("num_attention_heads", num_heads);
        set("max_position_embeddings", keys.required("context_length")?);
        set(
            "rms_norm_eps",
            keys.required("attention.layer_norm_rms_epsilon")?,
        );
        set("vocab_size", json!(self.num_tokens()));
        set("rope_parameters", keys.rope()?);
        let head_dim = match keys.number("attention.key_length")? {
            Some(head_dim) => Some(head_dim),
            None => keys.number("rope.dimension_count")?,
        };
        for same in ["attention.value_length", "rope.dimension_count"] {
            if let (Some(other), Some(head_dim)) = (keys.number(same)?, &head_dim)
                && other != *head_dim
            {
                return Err(keys.error(
                    same,
                    "is not the width of a head",
                    "such models are not supported",
                ));
            }
        }
        if let Some(head_dim) = head_dim {
            set("head_dim", head_dim);
        }
        // transformers' biases of a llama are on all of a block's projections, or on none.
        let bias = |module: &str| json!(self.has(&format!("model.layers.0.{module}.bias")));
        set("attention_bias", bias("self_attn.o_proj"));
        set("mlp_bias", bias("mlp.down_proj"));
        Ok(JsonFile::new(
            self.path(),
            "its metadata as config.json: ",
            config,
        ))
    }

    /// The architecture's name here, and in transformers.
    pub(super) fn architecture(&self) -> Result<(&'static str, &'static str), LoadError> {
        let name = match self.get("general.architecture") {
            Some(Value::Text(name)) => name,
            _ => "none",
        };
        let known = ARCHITECTURES.into_iter().find(|(known, _)| *known == name);
        known.ok_or_else(|| {
            self.files[0].error(format!(
                "general.architecture: '{name}' is not one of llama (which Mistral is as well), qwen2, qwen3"
            ))
        })
    }

    /// What ends a text: `tokenizer.ggml.eos_token_id` and its relatives.
    pub(in crate::runner) fn end_ids(&self) -> impl Iterator<Item = u64> {
        let keys = ["eos_token_id", "eot_token_id", "eom_token_id"];
        let ids = keys.into_iter().filter_map(|key| {
            match self.get(&format!("tokenizer.ggml.{key}"))? {
                &Value::Unsigned(id) => Some(id),
                _ => None,
            }
        });
        let mut known = Vec::new();
        ids.filter(move |id| {
            let is_new = !known.contains(id);
            known.push(*id);
            is_new
        })
    }

    /// The divisors of a head's frequencies, `[head_dim / 2]`, where a file has them (Llama 3.1 and later).
    ///
    /// # Errors
    /// Their number is another one, or one is not a number above 0.
    pub(in crate::runner) fn rope_divisors(
        &self,
        head_dim: usize,
    ) -> Result<Option<Vec<f32>>, LoadError> {
        const NAME: &str = "rope_freqs.weight";
        if !self.has_own(NAME) {
            return Ok(None);
        }
        let tensor = self.own_vector(NAME, head_dim / 2)?;
        let divisors = tensor.to_f32()?;
        match divisors.iter().all(|&divisor| divisor > 0.0) {
            true => Ok(Some(divisors)),
            false => Err(tensor
                .place()
                .error("has a value that is not above 0".to_owned())),
        }
    }

    /// The file that says what the model is.
    pub(in crate::runner) fn path(&self) -> &Path {
        &self.files[0].path
    }

    fn get(&self, key: &str) -> Option<&Value> {
        self.files[0].metadata.get(key)
    }
}

/// The keys of an architecture.
struct Keys<'a> {
    gguf: &'a Gguf,
    prefix: &'a str,
}

impl<'a> Keys<'a> {
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.gguf.get(&format!("{}.{key}", self.prefix))
    }

    /// A number, for the reader of config.json to judge.
    fn number(&self, key: &str) -> Result<Option<Json>, LoadError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Unsigned(number)) => Ok(Some(json!(number))),
            Some(Value::Signed(number)) => Ok(Some(json!(number))),
            Some(Value::Float(number)) if number.is_finite() => Ok(Some(json!(number))),
            Some(Value::Array(_)) => {
                Err(self.error(key, "differs from layer to layer", "all have to be alike"))
            }
            Some(_) => Err(self.error(key, "is not a number", "the file is damaged")),
        }
    }

    fn required(&self, key: &str) -> Result<Json, LoadError> {
        self.number(key)?
            .ok_or_else(|| self.error(key, "is missing", REMEDY))
    }

    /// The `rope_parameters` of config.json.
    fn rope(&self) -> Result<Json, LoadError> {
        let mut rope = Map::new();
        if let Some(theta) = self.number("rope.freq_base")? {
            rope.insert("rope_theta".to_owned(), theta);
        }
        let kind = match self.get("rope.scaling.type") {
            Some(Value::Text(kind)) if kind != "none" => kind.as_str(),
            _ => "default",
        };
        rope.insert("rope_type".to_owned(), json!(kind));
        for (theirs, ours) in [
            ("factor", "factor"),
            (
                "original_context_length",
                "original_max_position_embeddings",
            ),
            ("yarn_beta_fast", "beta_fast"),
            ("yarn_beta_slow", "beta_slow"),
        ] {
            if let Some(value) = self.number(&format!("rope.scaling.{theirs}"))? {
                rope.insert(ours.to_owned(), value);
            }
        }
        for other in [
            "attn_factor",
            "yarn_attn_factor",
            "yarn_ext_factor",
            "yarn_log_multiplier",
        ] {
            let key = format!("rope.scaling.{other}");
            if let Some(value) = self.number(&key)?
                && value.as_f64() != Some(1.0)
            {
                return Err(self.error(&key, "is not read", REMEDY));
            }
        }
        Ok(Json::Object(rope))
    }

    fn error(&self, key: &str, problem: &str, remedy: &str) -> LoadError {
        let value = match self.get(key) {
            Some(value) => format!("{value} "),
            None => String::new(),
        };
        self.gguf.files[0].error(format!("{}.{key}: {value}{problem}; {remedy}", self.prefix))
    }
}
