//! Models in GGUF files: the names and the row order of their tensors, and their metadata as a config.
//!
//! llama.cpp gives the tensors of all architectures the same names (`TENSOR_NAMES` of gguf-py's constants.py), and the
//! metadata the same keys behind the name of the architecture. The metadata are turned into what config.json would
//! say, so that one reader checks both.

use std::cell::RefCell;
use std::collections::BTreeSet;

use serde_json::{Map, Value as Json, json};

use super::bounds::{MAX_LAYERS, MAX_WIDTH};
use crate::rope::RopeScaling;
use crate::spec::{FeedForward, ModelSpec, Module};
use inflight_base::LoadError;
use inflight_checkpoint::{GgufFolder, JsonFile, MetadataValue, RotaryPairs, RowOrder};
use inflight_device::{DeltaShape, RecurrentRule};

/// The way out for a model whose metadata do not tell enough.
const REMEDY: &str = "put the config.json of the model that it was made from beside the file";

/// What the keys begin with, behind the name of the architecture, that change what is computed: one that is not known
/// is refused.
const NUMERIC: [&str; 16] = [
    "rope.",
    "attention.",
    "expert",
    "logit_scale",
    "embedding_scale",
    "residual_scale",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "ssm.",
    "shortconv.",
    "leading_dense_block_count",
    "interleave_moe_layer_step",
    "moe_",
    "kda.",
    "altup.",
    "swiglu_",
];

/// The keys among them that are factors, so that 1 changes nothing.
const FACTORS: [&str; 4] = [
    "logit_scale",
    "embedding_scale",
    "residual_scale",
    "attention.output_scale",
];

/// Modules outside of the layers, by their names in transformers and in GGUF files.
const MODEL_MODULES: &[(&str, &str)] = &[
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
    ("model.final_layernorm", "output_norm"),
    ("model.embedding_norm", "token_embd_norm"),
    ("model.embeddings", "token_embd"),
    ("model.norm_f", "output_norm"),
    ("lm_head", "output"),
    ("gpt_neox.embed_in", "token_embd"),
    ("gpt_neox.final_layer_norm", "output_norm"),
    ("embed_out", "output"),
    ("transformer.wte", "token_embd"),
    ("transformer.wpe", "position_embd"),
    ("transformer.word_embeddings", "token_embd"),
    ("transformer.word_embeddings_layernorm", "token_embd_norm"),
    ("transformer.ln_f", "output_norm"),
    ("transformer.norm_f", "output_norm"),
    ("backbone.embeddings", "token_embd"),
    ("backbone.norm_f", "output_norm"),
    ("model.tok_embeddings", "token_embd"),
    ("model.word_embeddings", "token_embd"),
    ("transformer.embedding.word_embeddings", "token_embd"),
    ("transformer.encoder.final_layernorm", "output_norm"),
    ("transformer.output_layer", "output"),
    ("output", "output"),
    ("model.embed_tokens_per_layer", "per_layer_token_embd"),
    ("model.per_layer_model_projection", "per_layer_model_proj"),
    ("model.per_layer_projection_norm", "per_layer_proj_norm"),
    // Of several streams, a tensor has the weights of all but the first.
    ("model.altup_projections.{}", "altup_proj"),
    ("model.altup_unembed_projections.{}", "altup_unembd_proj"),
];
/// Modules of a layer, likewise.
const LAYER_MODULES: &[(&str, &str)] = &[
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
    ("mlp.shared_experts.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_experts.up_proj", "ffn_up_shexp"),
    ("mlp.shared_experts.down_proj", "ffn_down_shexp"),
    // Of GPT-NeoX, GPT-2, Falcon and BLOOM.
    ("attention.query_key_value", "attn_qkv"),
    ("attention.dense", "attn_output"),
    ("mlp.dense_h_to_4h", "ffn_up"),
    ("mlp.dense_4h_to_h", "ffn_down"),
    ("ln_1", "attn_norm"),
    ("attn.c_attn", "attn_qkv"),
    ("attn.c_proj", "attn_output"),
    ("ln_2", "ffn_norm"),
    ("mlp.c_fc", "ffn_up"),
    ("mlp.c_proj", "ffn_down"),
    ("self_attention.query_key_value", "attn_qkv"),
    ("self_attention.dense", "attn_output"),
    ("ln_mlp", "attn_norm"),
    ("ln_attn", "attn_norm_2"),
    // Latent attention.
    ("self_attn.q_a_proj", "attn_q_a"),
    ("self_attn.q_a_layernorm", "attn_q_a_norm"),
    ("self_attn.q_b_proj", "attn_q_b"),
    ("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    ("self_attn.kv_a_layernorm", "attn_kv_a_norm"),
    ("self_attn.kv_b_proj", "attn_kv_b"),
    ("self_attn.k_b_proj", "attn_k_b"),
    ("self_attn.v_b_proj", "attn_v_b"),
];

/// Names of the norms in front of blocks and behind them, likewise.
pub const NORMS_AROUND: &[(&str, &str)] = &[
    ("post_attention_layernorm", "post_attention_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
];

/// The modules whose rows the converter permutes for most architectures.
pub const QUERIES_AND_KEYS: &[&str] = &["self_attn.q_proj", "self_attn.k_proj"];

/// An architecture of llama.cpp.
#[derive(Clone, Copy, Debug)]
pub struct GgufArchitecture {
    /// `general.architecture`.
    pub name: &'static str,
    /// Modules of a layer with names of their own.
    pub modules: &'static [(&'static str, &'static str)],
    /// Modules of a layer whose rows the converter permutes: queries and keys, if it does.
    pub permuted: &'static [&'static str],
    /// Further metadata, behind the name of the architecture, and the keys of config.json that they are.
    pub keys: &'static [(&'static str, &'static str)],
    /// Whether layers have windows.
    pub has_windows: bool,
    /// Whether a part of a head may be rotated.
    pub has_partial_rotary: bool,
    /// Whether values may have another width than keys.
    pub has_value_width: bool,
    /// Whether the rotation has sections (M-RoPE), which change nothing where all tokens are text.
    pub has_mrope: bool,
    /// Whether the converter adds 1 to the weights of norms, which are stored as differences from 1 otherwise.
    pub norms_include_one: bool,
    /// Whether the converter puts all queries of a module before its keys, and those before its values, which alternate
    /// by groups of heads otherwise.
    pub has_ordered_qkv: bool,
    /// Of an architecture with experts, how llama.cpp weighs a token's experts.
    pub experts: Option<GgufExperts>,
    /// Whether attention is latent.
    pub has_latents: bool,
    /// Whether the converter turns the weights of all experts, `[inputs, outputs]` with gate and up in one tensor, into
    /// those of most architectures.
    pub unstacks_experts: bool,
    /// Whether the converter stores the heads of values of a delta rule by their places among those that share a key.
    pub tiles_values: bool,
    /// Whether `attention.head_count_kv` and `feed_forward_length` are 0 for layers without attention or block.
    pub may_lack_blocks: bool,
    /// Metadata that may differ from layer to layer: `add_read` reads them, and elsewhere the first one counts.
    pub by_layer: &'static [&'static str],
    /// Whether `rope_freqs.weight` is read by `add_read`, and tells something else than a divisor of each frequency.
    pub has_own_divisors: bool,
    /// Whether `rope_freqs.weight` has divisors for layers without a window only.
    pub divides_unwindowed: bool,
    /// Whether a file is of this family, where families share the name.
    pub is_of: fn(&GgufFolder) -> bool,
    /// Adds what is a part of llama.cpp's code, and not of the metadata.
    pub add_fixed: fn(&mut Map<String, Json>),
    /// Adds what takes more than one key of the metadata.
    pub add_read: fn(&GgufConfig<'_>, &mut Map<String, Json>) -> Result<(), LoadError>,
    /// Changes a spec that describes safetensors further to what the converter has made of them.
    pub rewrite: fn(&GgufFolder, &mut ModelSpec) -> Result<(), LoadError>,
    /// Keys of config.json for modules of a layer that not all models have: whether the file has the module's weights.
    pub optional_modules: &'static [(&'static str, &'static str)],
    /// Keys of config.json for biases that not all models have, likewise, by any layer.
    pub optional_biases: &'static [(&'static str, &'static str)],
}

/// The experts of an architecture.
#[derive(Clone, Copy, Debug)]
pub struct GgufExperts {
    /// Whether weights are divided by their sum, if the metadata do not say so.
    pub is_normalised: bool,
    /// Whether they may be multiplied by `expert_weights_scale`.
    pub has_scale: bool,
    /// The score of an expert, `expert_gating_func`, which tells families of one architecture apart; 1, if the metadata
    /// do not say, is a softmax, and 2 a sigmoid.
    pub gating: u64,
}

impl GgufExperts {
    /// Weights of a softmax.
    pub const fn softmax(is_normalised: bool) -> Self {
        Self {
            is_normalised,
            has_scale: false,
            gating: 1,
        }
    }
}

impl GgufArchitecture {
    /// An architecture whose tensors have the usual names and rows, and whose layers have no window.
    pub const fn named(name: &'static str) -> Self {
        Self {
            name,
            modules: &[],
            permuted: &[],
            keys: &[],
            has_windows: false,
            has_partial_rotary: false,
            has_value_width: false,
            has_mrope: false,
            norms_include_one: false,
            has_ordered_qkv: false,
            experts: None,
            has_latents: false,
            unstacks_experts: false,
            tiles_values: false,
            may_lack_blocks: false,
            by_layer: &[],
            has_own_divisors: false,
            divides_unwindowed: false,
            is_of: |_| true,
            add_fixed: |_| {},
            add_read: |_, _| Ok(()),
            rewrite: |_, _| Ok(()),
            optional_modules: &[],
            optional_biases: &[],
        }
    }

    /// The name of a module in GGUF files, such as `blk.3.ffn_up`; `None` if it has none.
    pub fn module_name(&self, module: Module) -> Option<String> {
        match module.layer {
            Some(layer) => {
                let name = self.layer_module_name(module.name)?;
                Some(format!("blk.{layer}.{name}"))
            }
            None => {
                let found = MODEL_MODULES.iter().find(|(name, _)| *name == module.name);
                found.map(|(_, gguf)| (*gguf).to_owned())
            }
        }
    }

    /// The name of a module of a layer, without the layer.
    fn layer_module_name(&self, module: &str) -> Option<&'static str> {
        let mut names = self.modules.iter().chain(LAYER_MODULES);
        let found = names.find(|(name, _)| *name == module);
        found.map(|(_, gguf)| *gguf)
    }

    /// Whether GGUF files have this parameter of a module.
    pub fn has_parameter(&self, gguf: &GgufFolder, module: Module, parameter: &str) -> bool {
        let name = self.module_name(module);
        name.is_some_and(|name| gguf.shape(&format!("{name}.{parameter}")).is_some())
    }

    /// Changes a spec that describes safetensors to what the converter has made of them.
    ///
    /// # Errors
    /// The metadata contradict the model.
    pub fn convert(&self, gguf: &GgufFolder, spec: &mut ModelSpec) -> Result<(), LoadError> {
        if self.norms_include_one {
            spec.norm.weight_offset = 0.0;
        }
        if self.has_ordered_qkv {
            for layer in &mut spec.layers {
                layer.attention.qkv.join_runs();
            }
        }
        if self.unstacks_experts {
            for layer in &mut spec.layers {
                if let FeedForward::Experts(experts) = &mut layer.feed_forward {
                    experts.unstack();
                }
            }
        }
        (self.rewrite)(gguf, spec)
    }

    /// The row order of a module.
    pub fn row_order(&self, module: Module, spec: &ModelSpec) -> RowOrder {
        let head_dim = spec.head_dim;
        match module.layer.is_some() && self.permuted.contains(&module.name) {
            true => RowOrder::of_heads(head_dim, head_dim, RotaryPairs::Adjacent),
            false => match self.tiled_values(module, spec) {
                Some(delta) => tiled_rows(module.name, &delta),
                None => RowOrder::Same,
            },
        }
    }

    /// The order of the inputs of a module, and how many of them stay together; `None` if it is the order of the spec.
    pub fn column_order(&self, module: Module, spec: &ModelSpec) -> Option<(RowOrder, usize)> {
        let delta = self.tiled_values(module, spec)?;
        // With one head of values for each key, both orders are one.
        let is_output =
            module.name == "linear_attn.out_proj" && delta.num_value_heads > delta.num_key_heads;
        is_output.then(|| (tiled(&delta, 0, delta.value_dim), delta.value_dim))
    }

    /// The delta rule of a module's layer, if its heads of values are stored in another order.
    fn tiled_values(&self, module: Module, spec: &ModelSpec) -> Option<DeltaShape> {
        let layer = spec
            .layers
            .get(module.layer.filter(|_| self.tiles_values)?)?;
        match layer.attention.recurrence?.shape.rule {
            RecurrentRule::GatedDelta(delta) => Some(delta),
            _ => None,
        }
    }
}

/// The row order of a module whose heads of values are stored by their places among those that share a key.
fn tiled_rows(module: &str, delta: &DeltaShape) -> RowOrder {
    match module {
        "linear_attn.in_proj_qkv" | "linear_attn.conv1d" => {
            tiled(delta, 2 * delta.key_len(), delta.value_dim)
        }
        "linear_attn.in_proj_z" => tiled(delta, 0, delta.value_dim),
        "linear_attn.in_proj_b"
        | "linear_attn.in_proj_a"
        | "linear_attn.A_log"
        | "linear_attn.dt_bias" => tiled(delta, 0, 1),
        _ => RowOrder::Same,
    }
}

fn tiled(delta: &DeltaShape, first: usize, head_dim: usize) -> RowOrder {
    RowOrder::Tiled {
        num_skipped: 0,
        first,
        num_groups: delta.num_key_heads,
        group_len: delta.num_value_heads / delta.num_key_heads,
        head_dim,
    }
}

/// Reads the config of a model from the metadata of its GGUF files.
pub struct GgufConfig<'a> {
    gguf: &'a GgufFolder,
    architecture: GgufArchitecture,
    /// The keys that have been looked for, behind the name of the architecture.
    asked: RefCell<BTreeSet<String>>,
}

impl<'a> GgufConfig<'a> {
    pub fn new(gguf: &'a GgufFolder, architecture: GgufArchitecture) -> Self {
        // Looked at to tell families apart, or in place of newer keys only.
        let asked = [
            "expert_count",
            "expert_gating_func",
            "attention.key_length",
            "attention.value_length",
        ];
        let asked = asked.map(str::to_owned);
        Self {
            gguf,
            architecture,
            asked: RefCell::new(asked.into()),
        }
    }

    /// The equivalent values of config.json for a model of this class.
    ///
    /// # Errors
    /// A key is missing, or its value is not supported.
    pub fn config(&self, class: &str) -> Result<JsonFile, LoadError> {
        let Self { gguf, .. } = self;
        let num_heads = self.required("attention.head_count")?;
        let has_experts = self.architecture.experts.is_some();
        let mut config = match self.architecture.experts {
            Some(experts) => self.experts(experts)?,
            None => Map::new(),
        };
        let mut set = |key: &str, value: Json| config.insert(key.to_owned(), value);
        set("architectures", json!([class]));
        set("hidden_size", self.required("embedding_length")?);
        match self.number("feed_forward_length")? {
            Some(width) => set("intermediate_size", width),
            // A model whose layers all have experts may not tell it.
            None if has_experts => None,
            None => set("intermediate_size", self.required("feed_forward_length")?),
        };
        set("num_hidden_layers", json!(self.num_layers()?));
        set(
            "num_key_value_heads",
            self.number("attention.head_count_kv")?
                .unwrap_or(num_heads.clone()),
        );
        set("num_attention_heads", num_heads);
        set("max_position_embeddings", self.required("context_length")?);
        const RMS_NORM_EPS: &str = "attention.layer_norm_rms_epsilon";
        let eps = self.number("attention.layer_norm_epsilon")?;
        let rms_eps = match eps {
            Some(_) => self.number(RMS_NORM_EPS)?,
            None => Some(self.required(RMS_NORM_EPS)?),
        };
        // A file may have both; the family knows which one is its own.
        for (key, eps) in [("layer_norm_eps", eps), ("rms_norm_eps", rms_eps)] {
            if let Some(eps) = eps {
                set(key, eps);
            }
        }
        let embedding = gguf.shape("token_embd.weight");
        let vocab_size = embedding.and_then(<[usize]>::first).copied();
        set("vocab_size", json!(vocab_size.unwrap_or(0)));
        if self.architecture.has_latents {
            for (key, value) in self.latents()? {
                set(key, value);
            }
            set("rope_parameters", self.rope(None)?);
        } else {
            let head_dim = self.head_dim()?;
            set("rope_parameters", self.rope(head_dim.as_ref())?);
            // An explicit null is the share of a head in the hidden size, and not the default of the family.
            set("head_dim", head_dim.unwrap_or(Json::Null));
        }
        // In transformers, a llama has biases on all projections of a block or on none.
        let bias = |module| {
            let module = Module::of_layer(0, module);
            json!(self.architecture.has_parameter(gguf, module, "bias"))
        };
        set("attention_bias", bias("self_attn.o_proj"));
        set("attention_out_bias", bias("self_attn.o_proj"));
        set("mlp_bias", bias("mlp.down_proj"));
        set("use_bias", bias("mlp.down_proj"));
        let output = Module::of_model("lm_head");
        let has_output_bias = self.architecture.has_parameter(gguf, output, "bias");
        set("lm_head_bias", json!(has_output_bias));
        for (key, module) in self.architecture.optional_modules {
            let module = Module::of_layer(0, module);
            let is_there = self.architecture.has_parameter(gguf, module, "weight");
            set(key, json!(is_there));
        }
        for (key, module) in self.architecture.optional_biases {
            let name = self
                .architecture
                .layer_module_name(module)
                .unwrap_or(module);
            let has_bias = self.layers_with_tensor(&format!("{name}.bias"))?;
            set(key, json!(has_bias.contains(&true)));
        }
        for (key, ours) in self.architecture.keys {
            if let Some(value) = self.value(key)? {
                set(ours, value);
            }
        }
        self.add_windows(&mut config)?;
        (self.architecture.add_read)(self, &mut config)?;
        self.refuse_unknown()?;
        (self.architecture.add_fixed)(&mut config);
        Ok(JsonFile::new(
            gguf.path(),
            "its metadata as config.json: ",
            config,
        ))
    }

    /// Refuses a key that changes what is computed and that nothing has looked for. Other keys say something about the
    /// model, and change no number.
    fn refuse_unknown(&self) -> Result<(), LoadError> {
        let mut keys: Vec<_> = self
            .gguf
            .keys()
            .filter_map(|key| self.own_key(key))
            .collect();
        keys.sort_unstable();
        // A copy, because what follows asks for more.
        let asked = self.asked.borrow().clone();
        for key in keys {
            let is_numeric = NUMERIC.iter().any(|prefix| key.starts_with(prefix));
            if is_numeric && !asked.contains(key) && !self.is_neutral(key)? {
                return Err(self.error(key, "is not known", REMEDY));
            }
        }
        Ok(())
    }

    /// A key behind the name of the architecture.
    fn own_key<'k>(&self, key: &'k str) -> Option<&'k str> {
        key.strip_prefix(self.architecture.name)?.strip_prefix('.')
    }

    /// Whether the value of a key changes nothing: 0 is the default of llama.cpp, and what layers with windows have of
    /// their own may be what the others have.
    fn is_neutral(&self, key: &str) -> Result<bool, LoadError> {
        let value = self.gguf.metadata(&self.key(key));
        let is_neutral = match value {
            Some(MetadataValue::Text(_)) | None => false,
            Some(&MetadataValue::Bool(value)) => value == (key == "attention.causal"),
            Some(MetadataValue::Array(_)) => {
                let numbers = self.gguf.numbers(&self.key(key))?;
                numbers.is_some_and(|all| all.iter().all(|&number| number == 0.0))
            }
            Some(_) => {
                let number = self.number(key)?.and_then(|it| it.as_f64());
                let is_factor = FACTORS.contains(&key);
                number == Some(0.0) || is_factor && number == Some(1.0)
            }
        };
        let others = key.strip_suffix("_swa").map(|key| self.key(key));
        let is_shared = others.is_some_and(|others| self.gguf.metadata(&others) == value);
        let is_said_only = key == "rope.scaling.finetuned"
            || key == "rope.dimension_sections" && self.architecture.has_mrope;
        Ok(is_neutral || is_shared || is_said_only)
    }

    /// The sizes of latents and of what heads make of them. Until April 2025, the width of a head was that of its key.
    fn latents(&self) -> Result<[(&'static str, Json); 5], LoadError> {
        const KEYS: [&str; 2] = ["attention.key_length_mla", "attention.key_length"];
        const VALUES: [&str; 2] = ["attention.value_length_mla", "attention.value_length"];
        const ROTARY: &str = "rope.dimension_count";
        let width = |[key, older]: [&str; 2]| match self.number(key)? {
            Some(width) => Ok(width),
            None => self.required(older),
        };
        let (keys, rotary) = (width(KEYS)?, self.required(ROTARY)?);
        let content = match (keys.as_u64(), rotary.as_u64()) {
            (Some(keys), Some(rotary)) if rotary < keys => keys - rotary,
            _ => return Err(self.error(ROTARY, "is not a part of a key", "the file is damaged")),
        };
        let is_told = VALUES.iter().any(|key| self.get(key).is_some());
        let values = match is_told {
            true => None,
            false => self.latent_values(content)?,
        };
        let rank = self.number("attention.q_lora_rank")?;
        Ok([
            // An explicit null is none, and not the default of the family.
            ("q_lora_rank", rank.unwrap_or(Json::Null)),
            ("kv_lora_rank", self.required("attention.kv_lora_rank")?),
            ("qk_nope_head_dim", json!(content)),
            ("qk_rope_head_dim", rotary),
            ("v_head_dim", values.map_or_else(|| width(VALUES), Ok)?),
        ])
    }

    /// The width of the values of a head, by the rows that make the contents of keys and values of all heads; `None` if
    /// the files have no such tensor.
    fn latent_values(&self, content: u64) -> Result<Option<Json>, LoadError> {
        let num_heads = self.required("attention.head_count")?.as_u64();
        let Some([rows, _]) = self.shape("blk.0.attn_kv_b.weight") else {
            return Ok(None);
        };
        let of_head = num_heads.and_then(|num| (*rows as u64).checked_div(num));
        let values = of_head.and_then(|width| width.checked_sub(content));
        Ok(values.map(|values| json!(values)))
    }

    /// The width of a head, if the metadata tell it.
    fn head_dim(&self) -> Result<Option<Json>, LoadError> {
        const ROTARY: &str = "rope.dimension_count";
        let (key_length, rotary) = (self.number("attention.key_length")?, self.number(ROTARY)?);
        let has_partial_rotary = self.architecture.has_partial_rotary;
        let head_dim = match key_length {
            None if !has_partial_rotary => rotary.clone(),
            key_length => key_length,
        };
        let value_length = self.number("attention.value_length")?;
        let value_length = value_length.filter(|_| !self.architecture.has_value_width);
        let rotary = rotary.filter(|_| !has_partial_rotary);
        for (key, other) in [("attention.value_length", value_length), (ROTARY, rotary)] {
            if let (Some(other), Some(head_dim)) = (other, &head_dim)
                && other != *head_dim
            {
                let problem = "is not the width of a head";
                return Err(self.error(key, problem, "such models are not supported"));
            }
        }
        Ok(head_dim)
    }

    /// The width of windows, and the layers that have them, if the metadata tell which. 0 is no window.
    fn add_windows(&self, config: &mut Map<String, Json>) -> Result<(), LoadError> {
        const WINDOW: &str = "attention.sliding_window";
        const LAYERS: &str = "attention.sliding_window_pattern";
        let window = self.number(WINDOW)?;
        let window = window.filter(|window| window.as_u64() != Some(0));
        if window.is_some() && !self.architecture.has_windows {
            return Err(self.error(WINDOW, "is not supported in a GGUF file", REMEDY));
        }
        config.insert("sliding_window".to_owned(), window.unwrap_or(Json::Null));
        let is_local = match self.get(LAYERS) {
            None => return Ok(()),
            Some(&MetadataValue::Unsigned(interval)) => self.except_every(interval)?,
            Some(_) => {
                let layers = self.gguf.numbers(&self.key(LAYERS))?.ok_or_else(|| {
                    let problem = "is neither a number nor a list of numbers";
                    self.error(LAYERS, problem, "the file is damaged")
                })?;
                // Layers for predicting several tokens are left out.
                let is_of_blocks =
                    Some(layers.len() as u64) == self.required("block_count")?.as_u64();
                let num_layers = match is_of_blocks {
                    true => self.num_layers()? as usize,
                    false => layers.len(),
                };
                let layers = layers.into_iter().take(num_layers);
                layers.map(|layer| layer != 0.0).collect()
            }
        };
        let kinds = is_local.into_iter().map(|is_local| match is_local {
            true => "sliding_attention",
            false => "full_attention",
        });
        let kinds: Vec<_> = kinds.collect();
        config.insert("layer_types".to_owned(), json!(kinds));
        Ok(())
    }

    /// The layers, without those for predicting several tokens.
    ///
    /// # Errors
    /// A count is missing, or there are more of these.
    pub fn num_layers(&self) -> Result<u64, LoadError> {
        const HEADS: &str = "nextn_predict_layers";
        let all = self.required("block_count")?.as_u64().unwrap_or(0);
        let heads = self.number(HEADS)?;
        let heads = heads.and_then(|it| it.as_u64()).unwrap_or(0);
        all.checked_sub(heads).ok_or_else(|| {
            let problem = format!("is more than {} {all}", self.key("block_count"));
            self.error(HEADS, &problem, "the file is damaged")
        })
    }

    /// Whether each layer has a number above 0 under a key; `None` if there is no array under it.
    ///
    /// # Errors
    /// The array has another length than the model has layers.
    pub fn layers_with(&self, key: &str) -> Result<Option<Vec<bool>>, LoadError> {
        let Some(MetadataValue::Array(_)) = self.get(key) else {
            return Ok(None);
        };
        let numbers = self.numbers_of_layers(key)?;
        let layers = numbers.map(|all| all.into_iter().map(|number| number > 0.0).collect());
        Ok(layers)
    }

    /// As [`GgufConfig::layers_with`], of a key that has to be an array.
    ///
    /// # Errors
    /// It is none, or has another length than the model has layers.
    pub fn required_layers_with(&self, key: &str) -> Result<Vec<bool>, LoadError> {
        self.layers_with(key)?
            .ok_or_else(|| self.error(key, "is no array of all layers", "the file is damaged"))
    }

    /// The number of each layer under a key, where there is an array or one number for all; `None` if there is nothing.
    ///
    /// # Errors
    /// The array has another length than the model has layers, or there are no numbers.
    pub fn numbers_of_layers(&self, key: &str) -> Result<Option<Vec<f64>>, LoadError> {
        let num_layers = self.num_layers()?;
        let is_array = matches!(self.get(key), Some(MetadataValue::Array(_)));
        if !is_array {
            let number = self.number(key)?.and_then(|it| it.as_f64());
            // The reader of the config refuses more layers.
            let num_layers = num_layers.min(MAX_LAYERS as u64) as usize;
            return Ok(number.map(|number| vec![number; num_layers]));
        }
        let numbers = self.gguf.numbers(&self.key(key))?;
        let numbers =
            numbers.ok_or_else(|| self.error(key, "is not numbers", "the file is damaged"))?;
        let num = numbers.len() as u64;
        let num_blocks = self.required("block_count")?.as_u64().unwrap_or(0);
        if num != num_layers && num != num_blocks {
            let problem = format!("has {num} elements for {num_layers} layers");
            return Err(self.error(key, &problem, "the file is damaged"));
        }
        let layers = numbers.into_iter().take(num_layers as usize);
        Ok(Some(layers.collect()))
    }

    /// The layers that have a tensor, such as `ffn_gate_inp.weight`.
    ///
    /// # Errors
    /// The number of layers is missing.
    pub fn layers_with_tensor(&self, name: &str) -> Result<Vec<bool>, LoadError> {
        let layers = 0..self.num_layers()?.min(MAX_LAYERS as u64);
        let has = |layer| self.gguf.shape(&format!("blk.{layer}.{name}")).is_some();
        Ok(layers.map(has).collect())
    }

    /// Adds the heads of layers without a window and of layers with one, by a key with a number for each layer.
    ///
    /// # Errors
    /// Layers of one kind have different numbers.
    pub fn add_heads_of_kinds(
        &self,
        config: &mut Map<String, Json>,
        key: &str,
        [full, windowed]: [&str; 2],
    ) -> Result<(), LoadError> {
        let heads = self.numbers_of_layers(key)?.unwrap_or_default();
        let kinds = config.get("layer_types").and_then(Json::as_array).cloned();
        let kinds = kinds.unwrap_or_default();
        for (name, kind) in [(full, "full_attention"), (windowed, "sliding_attention")] {
            let mut of_kind = kinds.iter().zip(&heads).filter(|(it, _)| *it == kind);
            let Some((_, &heads)) = of_kind.next() else {
                continue;
            };
            if of_kind.any(|(_, other)| *other != heads) {
                let problem = "differs among layers of one kind";
                return Err(self.error(key, problem, "such models are not supported"));
            }
            config.insert(name.to_owned(), json!(heads as u64));
        }
        Ok(())
    }

    /// Makes of `rope_parameters` a section for layers without a window and one for layers with one, whose share of
    /// rotated elements is `share` if the metadata do not tell it.
    ///
    /// # Errors
    /// A value is no number.
    pub fn add_rope_of_windows(
        &self,
        config: &mut Map<String, Json>,
        share: Json,
    ) -> Result<(), LoadError> {
        const ROPE: &str = "rope_parameters";
        let full = config.remove(ROPE).unwrap_or_default();
        let theta = self.number("rope.freq_base_swa")?;
        let rotary_dim = self.number("rope.dimension_count_swa")?;
        let head_dim = config.get("head_dim").and_then(Json::as_f64);
        let told = rotary_dim.and_then(|it| it.as_f64()).zip(head_dim);
        let sliding = json!({
            "rope_type": "default",
            "rope_theta": theta.or_else(|| full.get("rope_theta").cloned()),
            "partial_rotary_factor": told.map_or(share, |(rotary, all)| json!(rotary / all)),
        });
        let ropes = json!({"full_attention": full, "sliding_attention": sliding});
        config.insert(ROPE.to_owned(), ropes);
        Ok(())
    }

    /// Adds `mlp_layer_types`, by which layers have a router.
    ///
    /// # Errors
    /// The number of layers is missing.
    pub fn add_layers_with_experts(&self, config: &mut Map<String, Json>) -> Result<(), LoadError> {
        let has_experts = self.layers_with_tensor("ffn_gate_inp.weight")?;
        let kinds = has_experts
            .iter()
            .map(|has| if *has { "sparse" } else { "dense" });
        let kinds: Vec<_> = kinds.collect();
        config.insert("mlp_layer_types".to_owned(), json!(kinds));
        Ok(())
    }

    /// Adds `layer_types`, by whether layers have the second kind.
    pub fn add_layer_types(config: &mut Map<String, Json>, has: &[bool], kinds: [&str; 2]) {
        let kinds = has.iter().map(|&has| kinds[usize::from(has)]);
        let kinds: Vec<_> = kinds.collect();
        config.insert("layer_types".to_owned(), json!(kinds));
    }

    /// The quotient of two numbers, such as the width of a head from the width of all.
    ///
    /// # Errors
    /// One is missing, or does not divide the other.
    pub fn quotient(&self, all: &str, num: &str) -> Result<u64, LoadError> {
        let [whole, part] = [all, num].map(|key| self.required(key));
        let (whole, part) = (whole?, part?);
        match (whole.as_u64(), part.as_u64()) {
            (Some(whole), Some(part @ 1..)) if whole.is_multiple_of(part) => Ok(whole / part),
            _ => {
                let problem = format!("is no multiple of {} {part}", self.key(num));
                Err(self.error(all, &problem, "the file is damaged"))
            }
        }
    }

    /// All layers but every `interval`-th one; 0 for all.
    fn except_every(&self, interval: u64) -> Result<Vec<bool>, LoadError> {
        // The reader of the config refuses more.
        let layers = 1..=self.num_layers()?.min(MAX_LAYERS as u64);
        let is_local = layers.map(|layer| interval == 0 || !layer.is_multiple_of(interval));
        Ok(is_local.collect())
    }

    /// The keys of mixtures of experts.
    fn experts(&self, experts: GgufExperts) -> Result<Map<String, Json>, LoadError> {
        const WEIGHTS_SCALE: &str = "expert_weights_scale";
        let scale = self.number(WEIGHTS_SCALE)?;
        // 0 stands for none.
        let scale = scale.filter(|scale| ![Some(0.0), Some(1.0)].contains(&scale.as_f64()));
        if scale.is_some() && !experts.has_scale {
            return Err(self.error(WEIGHTS_SCALE, "is not supported", REMEDY));
        }
        let is_normalised = match self.get("expert_weights_norm") {
            Some(&MetadataValue::Bool(is_normalised)) => is_normalised,
            _ => experts.is_normalised,
        };
        const GATING: &str = "expert_gating_func";
        let gating = self.number(GATING)?.and_then(|it| it.as_u64());
        if gating.is_some_and(|gating| gating != 0 && gating != experts.gating) {
            return Err(self.error(GATING, "is not supported in this family", REMEDY));
        }
        let mut config = Map::new();
        let mut set = |key: &str, value: Json| config.insert(key.to_owned(), value);
        set("num_experts", self.required("expert_count")?);
        set("num_experts_per_tok", self.required("expert_used_count")?);
        set("norm_topk_prob", json!(is_normalised));
        if experts.has_scale {
            set("routed_scaling_factor", scale.unwrap_or(json!(1.0)));
        }
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
        let divisors = match self.architecture.has_own_divisors {
            true => None,
            false => self.rope_divisors(spec.head_dim)?,
        };
        for (index, layer) in spec.layers.iter_mut().enumerate() {
            let qkv = &mut layer.attention.qkv;
            qkv.has_bias = qkv.parts.first().is_some_and(|q| {
                let module = Module::of_layer(index, q.module);
                self.architecture.has_parameter(self.gguf, module, "bias")
            });
            let is_exempt =
                self.architecture.divides_unwindowed && layer.attention.window.is_some();
            if let Some(divisors) = divisors.as_ref().filter(|_| !is_exempt) {
                if layer.attention.rope.scaling != RopeScaling::None {
                    let problem = "is not supported together with rope_freqs.weight";
                    return Err(self.error("rope.scaling.type", problem, REMEDY));
                }
                // Divisors behind the rotated pairs stand for no pair.
                let num_pairs = layer.attention.rope.rotary_dim / 2;
                let divisors = divisors[..num_pairs.min(divisors.len())].to_vec();
                layer.attention.rope.scaling = RopeScaling::Divided { divisors };
            }
        }
        Ok(())
    }

    /// The divisors of the RoPE frequencies, `[head_dim / 2]`, if the files have them (Llama 3.1 and later).
    ///
    /// # Errors
    /// There is another number of them, or one is not above 0.
    pub fn rope_divisors(&self, head_dim: usize) -> Result<Option<Vec<f32>>, LoadError> {
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

    /// The largest magnitude of queries, keys and values; `None` if they are not clipped, for which 0 stands, too.
    ///
    /// # Errors
    /// It is no number.
    pub fn clip(&self) -> Result<Option<Json>, LoadError> {
        let bound = self.number("attention.clamp_kqv")?;
        Ok(bound.filter(|bound| bound.as_f64() != Some(0.0)))
    }

    /// The dimensions of a tensor, rows first; `None` if there is none of this name.
    pub fn shape(&self, name: &str) -> Option<&'a [usize]> {
        self.gguf.shape(name)
    }

    pub fn get(&self, key: &str) -> Option<&'a MetadataValue> {
        self.asked.borrow_mut().insert(key.to_owned());
        self.gguf.metadata(&self.key(key))
    }

    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture.name)
    }

    /// A number or a truth value, which the reader of the config checks.
    pub fn value(&self, key: &str) -> Result<Option<Json>, LoadError> {
        match self.get(key) {
            Some(MetadataValue::Bool(value)) => Ok(Some(json!(value))),
            _ => self.number(key),
        }
    }

    /// A number, which the reader of the config checks.
    pub fn number(&self, key: &str) -> Result<Option<Json>, LoadError> {
        match self.get(key) {
            None => Ok(None),
            Some(MetadataValue::Unsigned(number)) => Ok(Some(json!(number))),
            Some(MetadataValue::Signed(number)) => Ok(Some(json!(number))),
            Some(MetadataValue::Float(number)) if number.is_finite() => Ok(Some(json!(number))),
            Some(MetadataValue::Array(_)) => match self.architecture.by_layer.contains(&key) {
                true => Ok(self.gguf.numbers(&self.key(key))?.and_then(|all| {
                    let first = all.iter().find(|&&number| number != 0.0).or(all.first());
                    first.map(|&first| whole_if_possible(first))
                })),
                false => self.number_of_all_layers(key).map(Some),
            },
            Some(_) => Err(self.error(key, "is not a number", "the file is damaged")),
        }
    }

    /// The number that an array has for every layer, or for every one that has such a block.
    fn number_of_all_layers(&self, key: &str) -> Result<Json, LoadError> {
        let mut numbers = self.gguf.numbers(&self.key(key))?;
        if let Some(numbers) = &mut numbers
            && self.architecture.may_lack_blocks
            && numbers.iter().any(|&number| number != 0.0)
        {
            numbers.retain(|&number| number != 0.0);
        }
        match numbers.as_deref() {
            Some([first, others @ ..]) if others.iter().all(|other| other == first) => {
                Ok(whole_if_possible(*first))
            }
            Some([_, ..]) => {
                Err(self.error(key, "differs from layer to layer", "all have to be alike"))
            }
            _ => Err(self.error(key, "is not numbers", "the file is damaged")),
        }
    }

    pub fn required(&self, key: &str) -> Result<Json, LoadError> {
        self.number(key)?
            .ok_or_else(|| self.error(key, "is missing", REMEDY))
    }

    /// `rope_parameters` of config.json.
    fn rope(&self, head_dim: Option<&Json>) -> Result<Json, LoadError> {
        let mut rope = Map::new();
        if self.architecture.has_partial_rotary
            && let Some(rotary) = self.number("rope.dimension_count")?
        {
            let widths = [
                self.number("embedding_length")?,
                self.number("attention.head_count")?,
            ];
            let [hidden_size, num_heads] = widths.map(|it| it.and_then(|it| it.as_f64()));
            let share = hidden_size.zip(num_heads).map(|(size, num)| size / num);
            let head_dim = head_dim.and_then(Json::as_f64).or(share);
            let factor = rotary.as_f64().zip(head_dim).map(|(part, all)| part / all);
            rope.insert("partial_rotary_factor".to_owned(), json!(factor));
        } else if self.architecture.has_partial_rotary {
            // Whole heads, whatever the family's default is.
            rope.insert("partial_rotary_factor".to_owned(), json!(1.0));
        }
        let theta = self.number("rope.freq_base")?;
        rope.insert("rope_theta".to_owned(), theta.unwrap_or(json!(10_000.0)));
        let kind = self.scaling(&mut rope)?;
        for (theirs, ours) in [
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
        if let Some([long, short]) = self.long_rope()? {
            if !["default", "longrope"].contains(&kind) {
                let problem = "is not supported together with rope_factors_long.weight";
                return Err(self.error("rope.scaling.type", problem, REMEDY));
            }
            rope.insert("rope_type".to_owned(), json!("longrope"));
            rope.insert("long_factor".to_owned(), json!(long));
            rope.insert("short_factor".to_owned(), json!(short));
            if let Some(factor) = self.number("rope.scaling.attn_factor")? {
                // Some families have one for each set of frequencies.
                for key in ["attention_factor", "short_mscale", "long_mscale"] {
                    rope.insert(key.to_owned(), factor.clone());
                }
            }
            return Ok(Json::Object(rope));
        }
        const LOG_MULTIPLIER: &str = "yarn_log_multiplier";
        if self.architecture.has_latents
            && let Some(multiplier) = self.number(&format!("rope.scaling.{LOG_MULTIPLIER}"))?
        {
            // A tenth of the scale, as f32. The factor of cosines and sines is 1, as for equal scales.
            let tenth = multiplier.as_f64().map(|it| (it as f32).to_string());
            let tenth = tenth.and_then(|tenth| tenth.parse::<f64>().ok());
            for key in ["mscale", "mscale_all_dim"] {
                rope.insert(key.to_owned(), json!(tenth.map(|tenth| 10.0 * tenth)));
            }
        }
        for other in [
            "attn_factor",
            "yarn_attn_factor",
            "yarn_ext_factor",
            LOG_MULTIPLIER,
        ] {
            let key = format!("rope.scaling.{other}");
            let is_known = other == LOG_MULTIPLIER && self.architecture.has_latents;
            let is_neutral = |value: f64| match other {
                // The share of "NTK by parts", which only YaRN has; below 0 is none given.
                "yarn_ext_factor" => value < 0.0 || value == f64::from(u8::from(kind == "yarn")),
                LOG_MULTIPLIER => value == 0.0 || value == 1.0,
                _ => value == 1.0,
            };
            if let Some(value) = self.number(&key)?
                && !value.as_f64().is_some_and(is_neutral)
                && !is_known
            {
                return Err(self.error(&key, "is not supported", REMEDY));
            }
        }
        Ok(Json::Object(rope))
    }

    /// Adds the kind of scaling and its factor. As llama.cpp has it, a factor without a kind is linear, its key was
    /// `rope.scale_linear` until the end of 2023, and 0 or none is 1.
    fn scaling(&self, rope: &mut Map<String, Json>) -> Result<&'a str, LoadError> {
        const TYPE: &str = "rope.scaling.type";
        let factors = ["rope.scaling.factor", "rope.scale_linear"].map(|key| self.number(key));
        let [factor, older] = factors;
        let factor = factor?
            .or(older?)
            .filter(|factor| factor.as_f64() != Some(0.0));
        let factor = factor.unwrap_or(json!(1.0));
        let is_one = factor.as_f64() == Some(1.0);
        let kind = match self.get(TYPE) {
            None => "linear",
            Some(MetadataValue::Text(kind)) => kind.as_str(),
            Some(_) => return Err(self.error(TYPE, "is not a text", "the file is damaged")),
        };
        let kind = match kind {
            "none" => "default",
            "linear" if is_one => "default",
            other => other,
        };
        rope.insert("rope_type".to_owned(), json!(kind));
        // Otherwise that of LongRoPE follows from the lengths.
        if kind != "default" && (kind != "longrope" || !is_one) {
            rope.insert("factor".to_owned(), factor);
        }
        Ok(kind)
    }

    /// The divisors of LongRoPE, for long and for short sequences, if the files have them.
    fn long_rope(&self) -> Result<Option<[Vec<f32>; 2]>, LoadError> {
        let names = ["rope_factors_long.weight", "rope_factors_short.weight"];
        let [Some(&[num_long]), Some(&[num_short])] = names.map(|name| self.gguf.shape(name))
        else {
            return Ok(None);
        };
        if num_long.max(num_short) > MAX_WIDTH {
            return Err(self.gguf.error(format!(
                "{} has {num_long} values, and {} {num_short}; the file is damaged",
                names[0], names[1]
            )));
        }
        let read = |name, len| self.gguf.vector(name, len, RowOrder::Same)?.to_f32();
        Ok(Some([
            read(names[0], num_long)?,
            read(names[1], num_short)?,
        ]))
    }

    pub fn error(&self, key: &str, problem: &str, remedy: &str) -> LoadError {
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

/// A number of an array, as JSON has it.
fn whole_if_possible(number: f64) -> Json {
    match number.fract() == 0.0 && (0.0..1e15).contains(&number) {
        true => json!(number as u64),
        false => json!(number),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn modules_have_names_and_permuted_ones_their_row_order() {
        let layer = |index, name| Module::of_layer(index, name);
        let llama = GgufArchitecture {
            permuted: &["self_attn.k_proj"],
            ..GgufArchitecture::named("llama")
        };
        for (module, name) in [
            (Module::of_model("model.embed_tokens"), "token_embd"),
            (Module::of_model("lm_head"), "output"),
            (Module::of_model("model.norm"), "output_norm"),
            (layer(11, "self_attn.q_proj"), "blk.11.attn_q"),
            (layer(0, "post_attention_layernorm"), "blk.0.ffn_norm"),
        ] {
            assert_eq!(llama.module_name(module).as_deref(), Some(name));
        }
        assert_eq!(llama.module_name(layer(0, "mlp.router")), None);
        assert_eq!(
            llama.module_name(Module::of_model("self_attn.q_proj")),
            None
        );
        let gemma = GgufArchitecture {
            modules: NORMS_AROUND,
            ..llama
        };
        let norm = layer(1, "post_attention_layernorm");
        let name = gemma.module_name(norm);
        assert_eq!(name.as_deref(), Some("blk.1.post_attention_norm"));
        let config = json!({"architectures": ["LlamaForCausalLM"], "head_dim": 16});
        let config = config.as_object().expect("an object").clone();
        let config = JsonFile::new(Path::new("config.json"), "", config);
        let spec = crate::families::describe(&config).expect("a llama");
        let order = |name| llama.row_order(layer(0, name), &spec);
        let pairs = RowOrder::of_heads(16, 16, RotaryPairs::Adjacent);
        assert_eq!(order("self_attn.k_proj"), pairs);
        assert_eq!(order("self_attn.k_norm"), RowOrder::Same);
    }
}
