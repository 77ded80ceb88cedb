//! A model's config from the metadata of its GGUF files, for folders without config.json. It is written as
//! config.json would be, so that one reader checks both.

use serde_json::{Map, Value as Json, json};

use super::gguf_names::gguf_name;
use crate::base::LoadError;
use crate::checkpoint::{GgufFolder, JsonFile, MetadataValue, RowOrder};

/// The architectures, by their names in GGUF files and in transformers.
const ARCHITECTURES: [(&str, &str); 3] = [
    ("llama", "LlamaForCausalLM"),
    ("qwen2", "Qwen2ForCausalLM"),
    ("qwen3", "Qwen3ForCausalLM"),
];
/// The way out for a model whose metadata do not tell enough.
const REMEDY: &str = "put the config.json of the model that it was made from beside the file";

/// What config.json would say.
///
/// # Errors
/// A key is missing, or its value is not supported.
pub(super) fn config(gguf: &GgufFolder) -> Result<JsonFile, LoadError> {
    let (prefix, class) = architecture(gguf)?;
    let keys = Keys { gguf, prefix };
    for unsupported in ["expert_count", "attention.sliding_window"] {
        if let Some(value) = keys.get(unsupported)
            && *value != MetadataValue::Unsigned(0)
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
    let embedding = gguf.shape("token_embd.weight");
    let vocab_size = embedding.and_then(<[usize]>::first).copied();
    set("vocab_size", json!(vocab_size.unwrap_or(0)));
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
    // In transformers, a llama has biases on all projections of a block or on none.
    let bias = |module: &str| {
        let name = gguf_name(&format!("model.layers.0.{module}"));
        let name = name.map(|name| format!("{name}.bias"));
        json!(name.is_some_and(|name| gguf.shape(&name).is_some()))
    };
    set("attention_bias", bias("self_attn.o_proj"));
    set("mlp_bias", bias("mlp.down_proj"));
    Ok(JsonFile::new(
        gguf.path(),
        "its metadata as config.json: ",
        config,
    ))
}

/// The architecture's name in GGUF files, and its class in transformers.
///
/// # Errors
/// It is not supported.
pub(super) fn architecture(gguf: &GgufFolder) -> Result<(&'static str, &'static str), LoadError> {
    let name = match gguf.metadata("general.architecture") {
        Some(MetadataValue::Text(name)) => name,
        _ => "none",
    };
    let known = ARCHITECTURES.into_iter().find(|(known, _)| *known == name);
    known.ok_or_else(|| {
        gguf.error(format!(
            "general.architecture: '{name}' is not one of llama (which includes Mistral), qwen2, qwen3"
        ))
    })
}

/// The tokens that end a text: `tokenizer.ggml.eos_token_id` and its relatives, each once.
pub(super) fn end_ids(gguf: &GgufFolder) -> impl Iterator<Item = u64> {
    let keys = ["eos_token_id", "eot_token_id", "eom_token_id"];
    let ids = keys.into_iter().filter_map(|key| {
        match gguf.metadata(&format!("tokenizer.ggml.{key}"))? {
            &MetadataValue::Unsigned(id) => Some(id),
            _ => None,
        }
    });
    let mut seen = Vec::new();
    ids.filter(move |id| {
        let is_new = !seen.contains(id);
        seen.push(*id);
        is_new
    })
}

/// The divisors of the RoPE frequencies, `[head_dim / 2]`, if the files have them (Llama 3.1 and later).
///
/// # Errors
/// Their number is wrong, or one of them is not above 0.
pub(super) fn rope_divisors(
    gguf: &GgufFolder,
    head_dim: usize,
) -> Result<Option<Vec<f32>>, LoadError> {
    const NAME: &str = "rope_freqs.weight";
    if gguf.shape(NAME).is_none() {
        return Ok(None);
    }
    let tensor = gguf.vector(NAME, head_dim / 2, RowOrder::Same)?;
    let divisors = tensor.to_f32()?;
    match divisors.iter().all(|&divisor| divisor > 0.0) {
        true => Ok(Some(divisors)),
        false => Err(tensor
            .location()
            .error("has a value that is not above 0".to_owned())),
    }
}

/// The metadata keys of an architecture.
struct Keys<'a> {
    gguf: &'a GgufFolder,
    prefix: &'a str,
}

impl<'a> Keys<'a> {
    fn get(&self, key: &str) -> Option<&'a MetadataValue> {
        self.gguf.metadata(&format!("{}.{key}", self.prefix))
    }

    /// A number, which the reader of the config checks.
    fn number(&self, key: &str) -> Result<Option<Json>, LoadError> {
        match self.get(key) {
            None => Ok(None),
            Some(MetadataValue::Unsigned(number)) => Ok(Some(json!(number))),
            Some(MetadataValue::Signed(number)) => Ok(Some(json!(number))),
            Some(MetadataValue::Float(number)) if number.is_finite() => Ok(Some(json!(number))),
            Some(MetadataValue::Array(_)) => {
                Err(self.error(key, "differs from layer to layer", "all have to be alike"))
            }
            Some(_) => Err(self.error(key, "is not a number", "the file is damaged")),
        }
    }

    fn required(&self, key: &str) -> Result<Json, LoadError> {
        self.number(key)?
            .ok_or_else(|| self.error(key, "is missing", REMEDY))
    }

    /// `rope_parameters` of config.json.
    fn rope(&self) -> Result<Json, LoadError> {
        let mut rope = Map::new();
        if let Some(theta) = self.number("rope.freq_base")? {
            rope.insert("rope_theta".to_owned(), theta);
        }
        let kind = match self.get("rope.scaling.type") {
            Some(MetadataValue::Text(kind)) if kind != "none" => kind.as_str(),
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
        self.gguf
            .error(format!("{}.{key}: {value}{problem}; {remedy}", self.prefix))
    }
}
