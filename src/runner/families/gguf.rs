//! Models in GGUF files: the names and the row order of their tensors, and their metadata as a config.
//!
//! llama.cpp gives the tensors of all architectures the same names (`TENSOR_NAMES` of gguf-py's constants.py), and the
//! metadata the same keys behind the name of the architecture. The metadata are turned into what config.json would
//! say, so that one reader checks both.

use serde_json::{Map, Value as Json, json};

use crate::base::LoadError;
use crate::checkpoint::{GgufFolder, JsonFile, MetadataValue, RotaryPairs, RowOrder};
use crate::runner::rope::RopeScaling;
use crate::runner::spec::{ModelSpec, Module};

/// The way out for a model whose metadata do not tell enough.
const REMEDY: &str = "put the config.json of the model that it was made from beside the file";

/// Modules outside of the layers, by their names in transformers and in GGUF files.
const MODEL_MODULES: [(&str, &str); 3] = [
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
    ("lm_head", "output"),
];
/// Modules of a layer, likewise.
const LAYER_MODULES: [(&str, &str); 23] = [
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    // Of experts, a tensor has the weights of all.
    ("mlp.gate", "ffn_gate_inp"),
    ("mlp.experts.{}.gate_proj", "ffn_gate_exps"),
    ("mlp.experts.{}.up_proj", "ffn_up_exps"),
    ("mlp.experts.{}.down_proj", "ffn_down_exps"),
    ("block_sparse_moe.gate", "ffn_gate_inp"),
    ("block_sparse_moe.experts.{}.w1", "ffn_gate_exps"),
    ("block_sparse_moe.experts.{}.w3", "ffn_up_exps"),
    ("block_sparse_moe.experts.{}.w2", "ffn_down_exps"),
    ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
    ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
    ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
];

/// An architecture of llama.cpp.
#[derive(Clone, Copy, Debug)]
pub struct GgufArchitecture {
    /// `general.architecture`.
    pub name: &'static str,
    /// Modules of a layer whose rows the converter permutes: queries and keys, if it does.
    pub permuted: &'static [&'static str],
    /// Of an architecture with experts, how llama.cpp weighs those of a token.
    pub experts: Option<GgufExperts>,
}

/// The experts of an architecture.
#[derive(Clone, Copy, Debug)]
pub struct GgufExperts {
    /// Whether weights are divided by their sum, if the metadata do not say so.
    pub is_normalised: bool,
}

impl GgufArchitecture {
    /// The row order of a module.
    pub fn row_order(&self, module: Module, head_dim: usize) -> RowOrder {
        match module.layer.is_some() && self.permuted.contains(&module.name) {
            true => RowOrder::of_heads(head_dim, head_dim, RotaryPairs::Adjacent),
            false => RowOrder::Same,
        }
    }
}

/// The name of a module in GGUF files, such as `blk.3.ffn_up`; `None` if it has none.
pub fn gguf_name(module: Module) -> Option<String> {
    let find = |names: &[(&str, &'static str)]| {
        let found = names.iter().find(|(name, _)| *name == module.name);
        found.map(|(_, gguf)| *gguf)
    };
    match module.layer {
        Some(layer) => Some(format!("blk.{layer}.{}", find(&LAYER_MODULES)?)),
        None => find(&MODEL_MODULES).map(str::to_owned),
    }
}

/// Whether GGUF files have this parameter of a module.
pub fn has_parameter(gguf: &GgufFolder, module: Module, parameter: &str) -> bool {
    let name = gguf_name(module).map(|name| format!("{name}.{parameter}"));
    name.is_some_and(|name| gguf.shape(&name).is_some())
}

/// The tokens that end a text: `tokenizer.ggml.eos_token_id` and its relatives, each once.
pub fn end_ids(gguf: &GgufFolder) -> impl Iterator<Item = u64> {
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

/// Reads the config of a model from the metadata of its GGUF files.
pub struct GgufConfig<'a> {
    gguf: &'a GgufFolder,
    architecture: GgufArchitecture,
}

impl<'a> GgufConfig<'a> {
    pub fn new(gguf: &'a GgufFolder, architecture: GgufArchitecture) -> Self {
        Self { gguf, architecture }
    }

    /// The equivalent values of config.json for a model of this class.
    ///
    /// # Errors
    /// A key is missing, or its value is not supported.
    pub fn config(&self, class: &str) -> Result<JsonFile, LoadError> {
        let Self { gguf, .. } = self;
        const WINDOW: &str = "attention.sliding_window";
        if let Some(value) = self.get(WINDOW)
            && *value != MetadataValue::Unsigned(0)
        {
            return Err(self.error(WINDOW, "is not supported in a GGUF file", REMEDY));
        }
        let num_heads = self.required("attention.head_count")?;
        let mut config = match self.architecture.experts {
            Some(experts) => self.experts(experts)?,
            None => Map::new(),
        };
        let mut set = |key: &str, value: Json| config.insert(key.to_owned(), value);
        set("architectures", json!([class]));
        set("hidden_size", self.required("embedding_length")?);
        set("intermediate_size", self.required("feed_forward_length")?);
        set("num_hidden_layers", self.required("block_count")?);
        set(
            "num_key_value_heads",
            self.number("attention.head_count_kv")?
                .unwrap_or(num_heads.clone()),
        );
        set("num_attention_heads", num_heads);
        set("max_position_embeddings", self.required("context_length")?);
        set(
            "rms_norm_eps",
            self.required("attention.layer_norm_rms_epsilon")?,
        );
        let embedding = gguf.shape("token_embd.weight");
        let vocab_size = embedding.and_then(<[usize]>::first).copied();
        set("vocab_size", json!(vocab_size.unwrap_or(0)));
        set("rope_parameters", self.rope()?);
        let head_dim = match self.number("attention.key_length")? {
            Some(head_dim) => Some(head_dim),
            None => self.number("rope.dimension_count")?,
        };
        for same in ["attention.value_length", "rope.dimension_count"] {
            if let (Some(other), Some(head_dim)) = (self.number(same)?, &head_dim)
                && other != *head_dim
            {
                return Err(self.error(
                    same,
                    "is not the width of a head",
                    "such models are not supported",
                ));
            }
        }
        // An explicit null is the share of a head in the hidden size, and not the default of the family.
        set("head_dim", head_dim.unwrap_or(Json::Null));
        // In transformers, a llama has biases on all projections of a block or on none.
        let bias = |module| json!(has_parameter(gguf, Module::of_layer(0, module), "bias"));
        set("attention_bias", bias("self_attn.o_proj"));
        set("mlp_bias", bias("mlp.down_proj"));
        Ok(JsonFile::new(
            gguf.path(),
            "its metadata as config.json: ",
            config,
        ))
    }

    /// The keys of mixtures of experts.
    fn experts(&self, experts: GgufExperts) -> Result<Map<String, Json>, LoadError> {
        const WEIGHTS_SCALE: &str = "expert_weights_scale";
        if let Some(scale) = self.number(WEIGHTS_SCALE)?
            && ![Some(0.0), Some(1.0)].contains(&scale.as_f64())
        {
            return Err(self.error(WEIGHTS_SCALE, "is not supported", REMEDY));
        }
        let is_normalised = match self.get("expert_weights_norm") {
            Some(&MetadataValue::Bool(is_normalised)) => is_normalised,
            _ => experts.is_normalised,
        };
        let mut config = Map::new();
        let mut set = |key: &str, value: Json| config.insert(key.to_owned(), value);
        set("num_experts", self.required("expert_count")?);
        set("num_experts_per_tok", self.required("expert_used_count")?);
        set("norm_topk_prob", json!(is_normalised));
        for (key, ours) in [
            ("expert_feed_forward_length", "moe_intermediate_size"),
            (
                "expert_shared_feed_forward_length",
                "shared_expert_intermediate_size",
            ),
        ] {
            if let Some(width) = self.number(key)? {
                set(ours, width);
            }
        }
        Ok(config)
    }

    /// Adds to a spec what no key of a config tells: biases of queries, keys and values, and divisors of frequencies.
    ///
    /// # Errors
    /// The number of divisors is wrong, or one of them is not above 0.
    pub fn complete(&self, spec: &mut ModelSpec) -> Result<(), LoadError> {
        let first = spec.layers.first().map(|layer| &layer.attention.qkv);
        let has_bias = first
            .and_then(|qkv| qkv.parts.first())
            .is_some_and(|q| has_parameter(self.gguf, Module::of_layer(0, q.module), "bias"));
        let divisors = self.rope_divisors(spec.head_dim)?;
        for layer in &mut spec.layers {
            layer.attention.qkv.has_bias = has_bias;
            if let Some(divisors) = &divisors {
                let divisors = divisors.clone();
                layer.attention.rope.scaling = RopeScaling::Divided { divisors };
            }
        }
        Ok(())
    }

    /// The divisors of the RoPE frequencies, `[head_dim / 2]`, if the files have them (Llama 3.1 and later).
    fn rope_divisors(&self, head_dim: usize) -> Result<Option<Vec<f32>>, LoadError> {
        const NAME: &str = "rope_freqs.weight";
        if self.gguf.shape(NAME).is_none() {
            return Ok(None);
        }
        let tensor = self.gguf.vector(NAME, head_dim / 2, RowOrder::Same)?;
        let divisors = tensor.to_f32()?;
        match divisors.iter().all(|&divisor| divisor > 0.0) {
            true => Ok(Some(divisors)),
            false => Err(tensor
                .location()
                .error("has a value that is not above 0".to_owned())),
        }
    }

    fn get(&self, key: &str) -> Option<&'a MetadataValue> {
        self.gguf
            .metadata(&format!("{}.{key}", self.architecture.name))
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
                return Err(self.error(&key, "is not supported", REMEDY));
            }
        }
        Ok(Json::Object(rope))
    }

    fn error(&self, key: &str, problem: &str, remedy: &str) -> LoadError {
        let value = match self.get(key) {
            Some(value) => format!("{value} "),
            None => String::new(),
        };
        self.gguf.error(format!(
            "{}.{key}: {value}{problem}; {remedy}",
            self.architecture.name
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_have_names_and_permuted_ones_their_row_order() {
        let layer = |index, name| Module::of_layer(index, name);
        for (module, name) in [
            (Module::of_model("model.embed_tokens"), "token_embd"),
            (Module::of_model("lm_head"), "output"),
            (Module::of_model("model.norm"), "output_norm"),
            (layer(11, "self_attn.q_proj"), "blk.11.attn_q"),
            (layer(0, "post_attention_layernorm"), "blk.0.ffn_norm"),
        ] {
            assert_eq!(gguf_name(module).as_deref(), Some(name));
        }
        assert_eq!(gguf_name(layer(0, "mlp.router")), None);
        assert_eq!(gguf_name(Module::of_model("self_attn.q_proj")), None);
        let llama = GgufArchitecture {
            name: "llama",
            permuted: &["self_attn.k_proj"],
            experts: None,
        };
        let order = |name| llama.row_order(layer(0, name), 16);
        let pairs = RowOrder::of_heads(16, 16, RotaryPairs::Adjacent);
        assert_eq!(order("self_attn.k_proj"), pairs);
        assert_eq!(order("self_attn.k_norm"), RowOrder::Same);
    }
}
