//! Gemma 4, by Google, for text.
//!
//! Gemma 3, but its norms store their weights as they are, scores have no factor, and
//!
//! - values have an RMS norm, too, without weights;
//! - full-attention layers have heads of another size (`global_head_dim`, `num_global_key_value_heads`), whose first
//!   pairs are rotated (`rope_type: proportional`: the exponents refer to the whole head), and, if `attention_k_eq_v`
//!   says so, one projection for keys and values;
//! - the last `num_kv_shared_layers` share the keys and values of the last layer of their kind before them, and have
//!   feed-forward blocks twice as wide if `use_double_wide_mlp` says so;
//! - experts may stand beside each feed-forward block (`enable_moe_block`), with norms of their own;
//! - each layer reads per-layer embeddings of the token (`hidden_size_per_layer_input`), and ends with a layer scalar.
//!
//! Of a checkpoint with encoders of images and sound, the language model is served.
//!
//! Source: configuration_gemma4.py and modeling_gemma4.py of transformers.

use std::num::NonZeroU32;

use serde_json::{Map, Value, json};

use super::bounds::{MAX_EXPERTS, MAX_HEAD_DIM, MAX_HEADS, MAX_VOCAB, MAX_WIDTH};
use super::dimensions::{Defaults, Dimensions, Keys, Sizes};
use super::experts::ExpertModules;
use super::family::Family;
use super::gemma::{NORMS, embedding_scale, soft_cap};
use super::gguf::{GgufArchitecture, GgufConfig, GgufExperts};
use super::rope_config::{RopeDefaults, THETA};
use super::windows::{no_windows, windowed_except_every, windows_of};
use crate::rope::{Rope, RopeAxes, RopeScaling};
use crate::spec::{
    ExpertsBlock, ExpertsNorms, InputBlock, KvHeads, LayerInputsSpec, LayerSpec, ModelSpec,
    Projection, QkNormSpec, StackedExperts, StackedLayout,
};
use inflight_base::LoadError;
use inflight_checkpoint::{GgufFolder, JsonFile};
use inflight_device::{Activation, LogitsTransform, Routing, RoutingRule};

pub const GEMMA4: Family = Family {
    class: "Gemma4ForCausalLM",
    gguf: Some(GGUF),
    describe: |config| describe(config, GEMMA4.class),
};

/// Gemma 4 with encoders of images and sound.
pub const GEMMA4_WITH_IMAGES: Family = Family {
    class: "Gemma4ForConditionalGeneration",
    gguf: None,
    describe: |config| {
        let text = config.object("text_config")?;
        let silent = || JsonFile::new(config.path(), "text_config.", Map::new());
        let text = text.unwrap_or_else(silent);
        describe(&text, GEMMA4_WITH_IMAGES.class)
    },
};

/// The modules of the experts of a layer.
const EXPERT_MODULES: ExpertModules = ExpertModules {
    router: "router.proj",
    gate: "experts.{}.gate_proj",
    up: "experts.{}.up_proj",
    down: "experts.{}.down_proj",
    stacked: StackedExperts {
        router: "router.proj",
        gate_up: "experts.gate_up_proj",
        down: "experts.down_proj",
        layout: StackedLayout::Outputs,
    },
};

/// How llama.cpp stores a model without experts (`Gemma4Model` of its converter): norms keep their weights, and the
/// metadata have the heads of full-attention layers where others have the heads of all layers.
const GGUF: GgufArchitecture = GgufArchitecture {
    modules: &[
        ("post_attention_layernorm", "post_attention_norm"),
        ("pre_feedforward_layernorm", "ffn_norm"),
        ("post_feedforward_layernorm", "post_ffw_norm"),
        ("layer_scalar", "layer_output_scale"),
        ("per_layer_input_gate", "inp_gate"),
        ("per_layer_projection", "proj"),
        ("post_per_layer_input_norm", "post_norm"),
        ("router.proj", "ffn_gate_inp"),
        ("router.scale", "ffn_gate_inp.scale"),
        // The converter makes them factors of what experts give.
        ("router.per_expert_scale", "ffn_down_exps.scale"),
        ("post_feedforward_layernorm_1", "post_ffw_norm_1"),
        ("pre_feedforward_layernorm_2", "pre_ffw_norm_2"),
        ("post_feedforward_layernorm_2", "post_ffw_norm_2"),
        (FUSED_EXPERTS, "ffn_gate_up_exps"),
        ("experts.{}.gate_proj", "ffn_gate_exps"),
        ("experts.{}.up_proj", "ffn_up_exps"),
        ("experts.{}.down_proj", "ffn_down_exps"),
    ],
    keys: &[
        ("attention.shared_kv_layers", SHARED_LAYERS),
        ("final_logit_softcapping", "final_logit_softcapping"),
        ("expert_used_count", "top_k_experts"),
    ],
    has_windows: true,
    by_layer: &["attention.head_count_kv", "feed_forward_length"],
    has_own_divisors: true,
    add_read: add_layers,
    rewrite: |gguf, spec| {
        fuse_experts(gguf, spec);
        Ok(())
    },
    ..GgufArchitecture::named("gemma4")
};

/// How llama.cpp stores a model with experts.
pub const GGUF_WITH_EXPERTS: GgufArchitecture = GgufArchitecture {
    experts: Some(GgufExperts::softmax(true)),
    add_fixed: |config| {
        config.insert("enable_moe_block".to_owned(), json!(true));
    },
    ..GGUF
};

/// Gate and up of an expert in one module.
const FUSED_EXPERTS: &str = "experts.gate_up_proj";

/// Adds what differs between layers, and the inputs of layers.
fn add_layers(gguf: &GgufConfig<'_>, config: &mut Map<String, Value>) -> Result<(), LoadError> {
    const LAYER_HEADS: &str = "attention.head_count_kv";
    const WIDTHS: &str = "feed_forward_length";
    const GLOBAL_DIM: &str = "attention.key_length";
    const LOCAL_DIM: &str = "attention.key_length_swa";
    const INPUTS: &str = "embedding_length_per_layer_input";
    const DAMAGED: &str = "the file is damaged";
    let [global_dim, local_dim] = [GLOBAL_DIM, LOCAL_DIM].map(|key| gguf.required(key));
    let (global_dim, local_dim) = (global_dim?, local_dim?);
    for key in ["attention.value_length_swa", "rope.dimension_count_swa"] {
        if gguf.number(key)?.is_some_and(|other| other != local_dim) {
            let problem = "is not the width of a head of layers with a window";
            return Err(gguf.error(key, problem, "such models are not supported"));
        }
    }
    let kinds = config.get("layer_types").and_then(Value::as_array).cloned();
    let kinds = kinds
        .ok_or_else(|| gguf.error("attention.sliding_window_pattern", "is missing", DAMAGED))?;
    let is_full = |layer: usize| {
        let kind = kinds.get(layer).and_then(Value::as_str);
        kind != Some("sliding_attention") || layer + 1 == kinds.len()
    };
    // `config` has the width of full-attention layers' heads.
    config.insert("head_dim".to_owned(), local_dim);
    let heads = gguf.numbers_of_layers(LAYER_HEADS)?.unwrap_or_default();
    let mut of_layers = Map::new();
    for layer in 0..kinds.len() {
        let mut own = Map::new();
        if is_full(layer) {
            own.insert("head_dim".to_owned(), global_dim.clone());
        }
        if let Some(&num) = heads.get(layer) {
            own.insert("num_key_value_heads".to_owned(), json!(num as u64));
        }
        of_layers.insert(layer.to_string(), Value::Object(own));
    }
    config.insert("per_layer_config".to_owned(), Value::Object(of_layers));
    let num_shared = config.get(SHARED_LAYERS).and_then(Value::as_u64);
    let num_own = kinds.len().saturating_sub(num_shared.unwrap_or(0) as usize);
    let widths = gguf.numbers_of_layers(WIDTHS)?.unwrap_or_default();
    let (own, shared) = widths.split_at(num_own.min(widths.len()));
    let width = own.first().copied().unwrap_or(0.0);
    let is_double = shared.first() == Some(&(2.0 * width));
    let of_shared = if is_double { 2.0 * width } else { width };
    if own.iter().any(|&it| it != width) || shared.iter().any(|&it| it != of_shared) {
        let problem =
            "is neither one width nor, in layers without keys of their own, twice as much";
        return Err(gguf.error(WIDTHS, problem, "such models are not supported"));
    }
    config.insert("use_double_wide_mlp".to_owned(), json!(is_double));
    // Keys are values where a layer has no projection of values (`use_alternative_attention` there).
    let has_values = gguf.layers_with_tensor("attn_v.weight")?;
    let mut full = (0..num_own).filter(|&layer| is_full(layer));
    let lacks = |layer: usize| has_values.get(layer) == Some(&false);
    let are_joined = full.clone().any(lacks);
    if are_joined && !full.all(lacks) {
        let problem = "where some layers of full attention have attn_v.weight, and others have not";
        return Err(gguf.error("block_count", problem, DAMAGED));
    }
    config.insert("attention_k_eq_v".to_owned(), json!(are_joined));
    config.insert(
        "hidden_size_per_layer_input".to_owned(),
        gguf.required(INPUTS)?,
    );
    if let Some([rows, _]) = gguf.shape("per_layer_token_embd.weight") {
        config.insert("vocab_size_per_layer_input".to_owned(), json!(rows));
    }
    let theta = gguf.required("rope.freq_base")?;
    let local_theta = gguf.number("rope.freq_base_swa")?;
    let ropes = json!({
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": theta,
            "partial_rotary_factor": rotated_share(gguf, global_dim.as_u64().unwrap_or(0))?,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": local_theta.unwrap_or(theta.clone())},
    });
    config.insert("rope_parameters".to_owned(), ropes);
    Ok(())
}

/// The part of the heads of full-attention layers that is rotated: the converter gives other pairs a divisor of 1e30.
fn rotated_share(gguf: &GgufConfig<'_>, head_dim: u64) -> Result<f64, LoadError> {
    let head_dim = usize::try_from(head_dim).unwrap_or(0).min(MAX_HEAD_DIM);
    let Some(divisors) = gguf.rope_divisors(head_dim)? else {
        return Ok(1.0);
    };
    let num_rotated = divisors.iter().take_while(|&&it| it == 1.0).count();
    if divisors[num_rotated..].iter().any(|&it| it < 1e20) {
        let problem =
            "beside a rope_freqs.weight that is not 1 for the first pairs, and 1e30 for the others";
        return Err(gguf.error("rope.freq_base", problem, "such models are not supported"));
    }
    // A quarter of a pair more, which is rounded off.
    Ok(((2 * num_rotated) as f64 + 0.5).min(head_dim as f64) / head_dim as f64)
}

/// Gives gate and up of experts one module where the file has one tensor of them, as the converter leaves them.
fn fuse_experts(gguf: &GgufFolder, spec: &mut ModelSpec) {
    let hidden = spec.hidden_size;
    for (index, layer) in spec.layers.iter_mut().enumerate() {
        let name = format!("blk.{index}.ffn_gate_up_exps.weight");
        if let Some(block) = &mut layer.experts_block
            && gguf.shape(&name).is_some()
        {
            let experts = &mut block.experts;
            let width = experts.down.num_inputs;
            let stacking = experts.gate_up.stacking;
            experts.gate_up = Projection::fused(FUSED_EXPERTS, &[width, width], hidden, stacking);
        }
    }
}

const SHARED_LAYERS: &str = "num_kv_shared_layers";
const DEFAULT_WINDOW: usize = 512;
/// By default every sixth layer has full attention.
const INTERVAL: usize = 6;

/// The properties that differ between layers.
struct Layers {
    /// Whether each has a window.
    is_windowed: Vec<bool>,
    windows: Vec<Option<NonZeroU32>>,
    kv_heads: Vec<KvHeads>,
    /// The position embedding of full-attention layers.
    global_rope: Rope,
    /// How many of the first ones have keys and values of their own.
    num_own: usize,
    /// Whether full-attention layers have one projection for keys and values.
    shares_kv_projection: bool,
    has_wide_shared: bool,
    /// Elements of the inputs of a layer.
    input_width: Option<usize>,
}

fn describe(config: &JsonFile, class: &'static str) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(262_144, 2304, 9216, 30, 8, 131_072)),
        num_kv_heads: Some(4),
        head_dim: Some(256),
        tied_embeddings: true,
        activation: Activation::GeluTanh,
        rope: RopeDefaults {
            section: Some("sliding_attention"),
            ..Defaults::LLAMA.rope
        },
        keys: Keys {
            activation: "hidden_activation",
            ..Keys::LLAMA
        },
        ..Defaults::LLAMA
    };
    const SEES_ALL: &str = "use_bidirectional_attention";
    let sees = config.get(SEES_ALL);
    if let Some(other) = sees.filter(|it| it.as_str() != Some("vision")) {
        let expected = "null or 'vision': tokens of a text see those before them";
        return Err(config.unexpected(SEES_ALL, other, expected));
    }
    let dimensions = Dimensions::from_config(config, &defaults)?;
    let layers = Layers::from_config(config, &dimensions)?;
    let has_bias = config.bool_or("attention_bias", false)?;
    let num_layers = dimensions.num_layers;
    let all = (0..num_layers).map(|index| layers.describe(&dimensions, index, has_bias));
    let all = all.collect::<Result<Vec<_>, _>>();
    let all = all.map_err(|kind| {
        let problem = format!(
            "{} of {num_layers} layers, and no {kind} layer before them has keys and values",
            num_layers - layers.num_own
        );
        config.unexpected(SHARED_LAYERS, problem, "fewer")
    })?;
    let activation = dimensions.activation;
    let hidden = dimensions.hidden_size;
    let layer = dimensions.llama_layer();
    let mut spec = dimensions
        .clone()
        .model(class, layer, no_windows(num_layers));
    spec.layers = all;
    check_shared(config, &spec)?;
    spec.embedding_scale = embedding_scale(hidden);
    spec.logits = LogitsTransform {
        scale: 1.0,
        soft_cap: soft_cap(config, "final_logit_softcapping", None)?,
    };
    if config.bool_or("enable_moe_block", false)? {
        let block = experts_block(config, &dimensions)?;
        for layer in &mut spec.layers {
            layer.experts_block = Some(block.clone());
        }
    }
    if let Some(width) = layers.input_width {
        spec.layer_inputs = Some(layer_inputs(config, &spec, width)?);
        for layer in &mut spec.layers {
            layer.input_block = Some(InputBlock {
                gate: Projection::single("per_layer_input_gate", width, hidden),
                activation,
                down: Projection::single("per_layer_projection", hidden, width),
                after: "post_per_layer_input_norm",
            });
        }
    }
    Ok(spec)
}

/// Refuses layers that share keys and values of other heads.
fn check_shared(config: &JsonFile, spec: &ModelSpec) -> Result<(), LoadError> {
    for (index, layer) in spec.layers.iter().enumerate() {
        if let Some(source) = layer.attention.kv_source {
            let [own, others] = [index, source].map(|layer| spec.head_shape(layer));
            if own != others {
                let problem = format!(
                    "layer {index} reads the keys and values of layer {source}, and has {} heads of {} elements instead of \
                     {} of {}",
                    own.num_kv_heads, own.head_dim, others.num_kv_heads, others.head_dim
                );
                return Err(config.error(problem));
            }
        }
    }
    Ok(())
}

fn experts_block(config: &JsonFile, dimensions: &Dimensions) -> Result<ExpertsBlock, LoadError> {
    const CHOSEN: &str = "top_k_experts";
    let size = |key, max| {
        config
            .size(key, 1..=max)?
            .ok_or_else(|| config.missing(key))
    };
    let num_experts = size("num_experts", MAX_EXPERTS)?;
    let num_chosen = size(CHOSEN, MAX_EXPERTS)?;
    if num_chosen > num_experts {
        let expected = format!("at most the number of experts, {num_experts}");
        return Err(config.unexpected(CHOSEN, num_chosen, expected));
    }
    let routing = Routing {
        num_experts,
        num_zero_experts: 0,
        num_chosen,
        rule: RoutingRule::Softmax {
            is_normalised: true,
        },
        has_shared_gate: false,
    };
    let expert_size = size("moe_intermediate_size", MAX_WIDTH)?;
    Ok(ExpertsBlock {
        experts: dimensions.experts(&EXPERT_MODULES, routing, expert_size),
        norms: Some(ExpertsNorms {
            router_scale: "router.scale",
            expert_scales: "router.per_expert_scale",
            dense_after: "post_feedforward_layernorm_1",
            before: "pre_feedforward_layernorm_2",
            after: "post_feedforward_layernorm_2",
        }),
    })
}

fn layer_inputs(
    config: &JsonFile,
    spec: &ModelSpec,
    width: usize,
) -> Result<LayerInputsSpec, LoadError> {
    const ROWS: &str = "vocab_size_per_layer_input";
    let num_rows = config.size(ROWS, 1..=MAX_VOCAB)?.unwrap_or(262_144);
    if num_rows < spec.vocab_size {
        let expected = format_args!("at least {}, the vocab_size", spec.vocab_size).to_string();
        return Err(config.unexpected(ROWS, num_rows, expected));
    }
    let num_outputs = width * spec.num_layers();
    Ok(LayerInputsSpec {
        embedding: "model.embed_tokens_per_layer",
        num_rows,
        embedding_scale: embedding_scale(width),
        projection: Projection::single(
            "model.per_layer_model_projection",
            num_outputs,
            spec.hidden_size,
        ),
        projection_scale: (spec.hidden_size as f32).sqrt().recip(),
        norm: "model.per_layer_projection_norm",
        scale: 2.0_f32.sqrt().recip(),
        width,
    })
}

impl Layers {
    fn from_config(config: &JsonFile, dimensions: &Dimensions) -> Result<Self, LoadError> {
        let num_layers = dimensions.num_layers;
        let mut is_windowed = windowed_except_every(config, num_layers, INTERVAL)?;
        // As transformers does, with a warning.
        is_windowed[num_layers - 1] = false;
        let shares_kv_projection = config.bool_or("attention_k_eq_v", false)?;
        let kv_heads = kv_heads(config, dimensions, &is_windowed, shares_kv_projection)?;
        let num_shared = config.size(SHARED_LAYERS, 0..=num_layers)?.unwrap_or(0);
        let input_width =
            config.size_or("hidden_size_per_layer_input", 0..=MAX_WIDTH, Some(256))?;
        let mut global = kv_heads.iter().zip(&is_windowed);
        let global = global.find_map(|(heads, is_windowed)| (!is_windowed).then_some(heads.dim));
        Ok(Self {
            windows: windows_of(config, &is_windowed, DEFAULT_WINDOW)?,
            global_rope: proportional_rope(config, global.unwrap_or(dimensions.head_dim))?,
            is_windowed,
            kv_heads,
            num_own: num_layers - num_shared,
            shares_kv_projection,
            has_wide_shared: config.bool_or("use_double_wide_mlp", false)?,
            input_width: input_width.filter(|&width| width > 0),
        })
    }

    /// One of the layers, or the kind of layers that it shares keys and values with, if there is none.
    fn describe(
        &self,
        dimensions: &Dimensions,
        index: usize,
        has_bias: bool,
    ) -> Result<LayerSpec, &'static str> {
        let is_windowed = self.is_windowed[index];
        let is_shared = index >= self.num_own;
        let heads = self.kv_heads[index];
        let is_wide = is_shared && self.has_wide_shared;
        let of_layer = Dimensions {
            num_kv_heads: heads.num,
            head_dim: heads.dim,
            intermediate_size: dimensions.intermediate_size * if is_wide { 2 } else { 1 },
            rope: Rope {
                rotary_dim: heads.dim,
                ..dimensions.rope.clone()
            },
            ..dimensions.clone()
        };
        let mut layer = of_layer.llama_layer();
        layer.norms = NORMS;
        layer.scale = Some("layer_scalar");
        let attention = &mut layer.attention;
        attention.scale = 1.0;
        attention.qk_norm = Some(QkNormSpec {
            has_values: true,
            ..QkNormSpec::of_heads(dimensions.norm.eps)
        });
        let of_model = dimensions.heads();
        attention.kv_heads = Some(heads).filter(|heads| *heads != of_model);
        match is_windowed {
            true => attention.window = self.windows[index],
            false => attention.rope = self.global_rope.clone(),
        }
        if !is_windowed && self.shares_kv_projection {
            attention.qkv.parts[2].module = attention.qkv.parts[1].module;
        }
        if is_shared {
            let own = &self.is_windowed[..self.num_own];
            let source = own.iter().rposition(|&other| other == is_windowed);
            let kind = if is_windowed {
                "sliding_attention"
            } else {
                "full_attention"
            };
            attention.kv_source = Some(source.ok_or(kind)?);
            attention.qkv.parts.truncate(1);
            // The norm of keys is never applied, as there are none.
            attention.qk_norm = Some(QkNormSpec {
                k: "self_attn.q_norm",
                ..QkNormSpec::of_heads(dimensions.norm.eps)
            });
        }
        attention.set_biases(has_bias);
        Ok(layer)
    }
}

/// The key and value heads of each layer: `per_layer_config`, which transformers writes, or what the first checkpoints
/// have in its place.
fn kv_heads(
    config: &JsonFile,
    dimensions: &Dimensions,
    is_windowed: &[bool],
    shares_kv_projection: bool,
) -> Result<Vec<KvHeads>, LoadError> {
    const HEAD_DIM: &str = "head_dim";
    const NUM_HEADS: &str = "num_key_value_heads";
    let of_model = dimensions.heads();
    if let Some(of_layers) = config.object("per_layer_config")? {
        let mut heads = vec![of_model; is_windowed.len()];
        for (key, _) in of_layers.entries() {
            let layer = key.parse().ok().filter(|&it: &usize| it < heads.len());
            let (Some(layer), Some(own)) = (layer, of_layers.object(key)?) else {
                return Err(of_layers.error(format!("{key} is no layer of {}", heads.len())));
            };
            let mut told = own.entries().map(|(key, _)| key);
            if let Some(other) = told.find(|key| ![HEAD_DIM, NUM_HEADS].contains(&key.as_str())) {
                let problem =
                    format!("{other} is set, and only {HEAD_DIM} and {NUM_HEADS} are read");
                return Err(own.error(problem));
            }
            let dim = own.size(HEAD_DIM, 2..=MAX_HEAD_DIM)?;
            let num = own.size(NUM_HEADS, 1..=MAX_HEADS)?;
            let (num, dim) = (num.unwrap_or(of_model.num), dim.unwrap_or(of_model.dim));
            heads[layer] = KvHeads::of_dim(of_model.num_q, num, dim);
            check(&own, dimensions.num_heads, heads[layer])?;
        }
        return Ok(heads);
    }
    let dim = config.size("global_head_dim", 2..=MAX_HEAD_DIM)?;
    let num = config.size("num_global_key_value_heads", 1..=MAX_HEADS)?;
    let num = num.filter(|_| shares_kv_projection);
    let global = KvHeads::of_dim(
        of_model.num_q,
        num.unwrap_or(of_model.num),
        dim.unwrap_or(512),
    );
    check(config, dimensions.num_heads, global)?;
    let of_layer = |is_windowed: &bool| if *is_windowed { of_model } else { global };
    Ok(is_windowed.iter().map(of_layer).collect())
}

fn check(config: &JsonFile, num_heads: usize, heads: KvHeads) -> Result<(), LoadError> {
    if !num_heads.is_multiple_of(heads.num) || !heads.dim.is_multiple_of(2) {
        return Err(config.error(format!(
            "layers have {} key and value heads of {} elements; their number has to divide {num_heads}, and their \
             size to be even",
            heads.num, heads.dim
        )));
    }
    Ok(())
}

/// The position embedding of full-attention layers.
///
/// The frequency of pair `i` is `theta^(-2 i / head_dim)`, which is the usual one of `rotary_dim` elements for another
/// base.
pub fn proportional_rope(config: &JsonFile, head_dim: usize) -> Result<Rope, LoadError> {
    let parameters = config.object("rope_parameters")?;
    let parameters = match &parameters {
        Some(parameters) => parameters.object("full_attention")?,
        None => None,
    };
    let number = |key, range| match &parameters {
        Some(parameters) => parameters.number(key, range),
        None => Ok(None),
    };
    let theta = number("rope_theta", THETA)?.unwrap_or(1e6);
    let factor = number("factor", 1.0..=1e6)?.unwrap_or(1.0);
    let share = number("partial_rotary_factor", 0.0..=1.0)?;
    let kind = match &parameters {
        Some(parameters) => parameters.string("rope_type")?.unwrap_or("default"),
        None => "proportional",
    };
    let share = match (kind, &parameters) {
        ("proportional", None) => share.unwrap_or(0.25),
        ("proportional", Some(_)) => share.unwrap_or(1.0),
        // Of whole heads, whatever the other parameters say.
        ("default", _) => 1.0,
        (_, Some(parameters)) => {
            let expected = "'proportional' or 'default'";
            return Err(parameters.unexpected("rope_type", format_args!("'{kind}'"), expected));
        }
        (_, None) => unreachable!("it is the default"),
    };
    let rotary_dim = (share * head_dim as f64 / 2.0) as usize * 2;
    Ok(Rope {
        theta: theta.powf(rotary_dim as f64 / head_dim as f64),
        rotary_dim,
        scaling: match factor != 1.0 && kind == "proportional" {
            true => RopeScaling::Linear { factor },
            false => RopeScaling::None,
        },
        query_factors: None,
        axes: RopeAxes::Sequence,
    })
}
