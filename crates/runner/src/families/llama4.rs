//! Llama 4, by Meta, for text.
//!
//! Three of four layers (`no_rope_layers`) have a position embedding of neighbouring elements, an RMS norm of each head
//! behind that, without weights, and attention within chunks (`attention_chunk_size`). The others have no position
//! embedding, and a scale of queries by position (`attn_temperature_tuning`).
//!
//! Layers with experts (`moe_layers`, or every `interleave_moe_layer_step`-th one) have one beside those that are
//! chosen. What a chosen expert reads is multiplied with the sigmoid of its logit. Other layers are wider
//! (`intermediate_size_mlp`). Of a checkpoint with an encoder of images, the language model is served.
//!
//! Source: configuration_llama4.py and modeling_llama4.py of transformers; Meta AI, "The Llama 4 herd", 2025.

use std::num::NonZeroU32;

use serde_json::{Map, Value, json};

use super::bounds::{MAX_LAYERS, MAX_POSITIONS};
use super::dimensions::{Defaults, Dimensions, Sizes};
use super::experts::{ExpertDefaults, ExpertModules, routing, width};
use super::family::Family;
use super::gguf::{GgufArchitecture, GgufConfig, GgufExperts};
use super::layer_lists::{layers_of_kind, layers_with_rope, listed_layers};
use super::rope_config::RopeDefaults;
use super::windows::no_windows;
use super::with_images::describe_language_model;
use crate::rope::{QueryFactors, Rope};
use crate::spec::{
    ExpertsSpec, FeedForward, ModelSpec, Projection, QkNormSpec, StackedExperts, StackedLayout,
};
use inflight_base::LoadError;
use inflight_checkpoint::{JsonFile, RotaryPairs};
use inflight_device::{QkNormKind, RoutingRule};
use inflight_numbers::Stacking;

pub const LLAMA4: Family = Family {
    class: "Llama4ForCausalLM",
    gguf: Some(GgufArchitecture {
        modules: &[
            ("feed_forward.router", "ffn_gate_inp"),
            ("feed_forward.gate_proj", "ffn_gate"),
            ("feed_forward.up_proj", "ffn_up"),
            ("feed_forward.down_proj", "ffn_down"),
            ("feed_forward.shared_expert.gate_proj", "ffn_gate_shexp"),
            ("feed_forward.shared_expert.up_proj", "ffn_up_shexp"),
            ("feed_forward.shared_expert.down_proj", "ffn_down_shexp"),
        ],
        keys: &[
            ("feed_forward_length", "intermediate_size_mlp"),
            ("expert_feed_forward_length", "intermediate_size"),
            ("interleave_moe_layer_step", "interleave_moe_layer_step"),
        ],
        has_windows: true,
        experts: Some(GgufExperts {
            is_normalised: false,
            has_scale: false,
            gating: 2,
        }),
        unstacks_experts: true,
        add_read: add_attention,
        ..GgufArchitecture::named("llama4")
    }),
    describe,
};

/// Adds what llama.cpp makes of the metadata: all layers have a position embedding and none has chunks if the window is
/// 0, and queries and keys have no norm in the model with 128 experts.
fn add_attention(gguf: &GgufConfig<'_>, config: &mut Map<String, Value>) -> Result<(), LoadError> {
    let num_layers = gguf.num_layers()?.min(MAX_LAYERS as u64) as usize;
    if gguf.number("attention.sliding_window")? == Some(json!(0)) {
        GgufConfig::add_layer_types(config, &vec![true; num_layers], ["", "full_attention"]);
        config.insert("no_rope_layers".to_owned(), json!(vec![1; num_layers]));
    }
    let has_norms = gguf.number("expert_count")? != Some(json!(128));
    config.insert("use_qk_norm".to_owned(), json!(has_norms));
    Ok(())
}

/// Llama 4 with an encoder of images.
pub const LLAMA4_WITH_IMAGES: Family = Family {
    class: "Llama4ForConditionalGeneration",
    gguf: None,
    describe: |config| {
        let class = LLAMA4_WITH_IMAGES.class;
        describe_language_model(config, Map::new(), &LLAMA4, class)
    },
};

const EXPERT_MODULES: ExpertModules = ExpertModules {
    router: "feed_forward.router",
    gate: "feed_forward.experts.{}.gate_proj",
    up: "feed_forward.experts.{}.up_proj",
    down: "feed_forward.experts.{}.down_proj",
    stacked: StackedExperts {
        router: "feed_forward.router",
        gate_up: "feed_forward.experts.gate_up_proj",
        down: "feed_forward.experts.down_proj",
        layout: StackedLayout::InputsInParts,
    },
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(202_048, 5120, 8192, 48, 40, 131_072)),
        num_kv_heads: Some(8),
        head_dim: Some(128),
        norm_eps: 1e-5,
        rope: RopeDefaults {
            theta: 500_000.0,
            ..Defaults::LLAMA.rope
        },
        ..Defaults::LLAMA
    };
    let mut dimensions = Dimensions::from_config(config, &defaults)?;
    dimensions.rotary_pairs = RotaryPairs::Adjacent;
    let num_layers = dimensions.num_layers;
    let mut layer = dimensions.llama_layer();
    layer
        .attention
        .set_biases(config.bool_or("attention_bias", false)?);
    layer.feed_forward = dense(config, &dimensions)?;
    let has_experts = layers_with_experts(config, num_layers)?;
    // A model without experts says that it has 0.
    let experts = match has_experts.contains(&true) {
        true => Some(experts(config, &dimensions)?),
        false => None,
    };
    let has_rope = match config.get("no_rope_layers").and_then(Value::as_array) {
        Some(list) if list.is_empty() => {
            layers_with_rope(&config.with("no_rope_layers", Value::Null), num_layers)?
        }
        _ => layers_with_rope(config, num_layers)?,
    };
    let chunks = chunks(config, &has_rope)?;
    let query_factors = query_factors(config)?;
    let has_norms = config.bool_or("use_qk_norm", true)?;
    let norms = QkNormSpec {
        q: "",
        k: "",
        kind: QkNormKind::RotatedHead,
        ..QkNormSpec::of_heads(dimensions.norm.eps)
    };
    let mut spec = dimensions.model(LLAMA4.class, layer, no_windows(num_layers));
    for (index, layer) in spec.layers.iter_mut().enumerate() {
        let attention = &mut layer.attention;
        (attention.window, attention.chunk) = (chunks[index], chunks[index]);
        match has_rope[index] {
            true => attention.qk_norm = has_norms.then_some(norms),
            false => {
                attention.rope = Rope {
                    query_factors,
                    ..Rope::none()
                }
            }
        }
        if let (true, Some(experts)) = (has_experts[index], &experts) {
            layer.feed_forward = FeedForward::Experts(experts.clone());
        }
    }
    Ok(spec)
}

fn dense(config: &JsonFile, dimensions: &Dimensions) -> Result<FeedForward, LoadError> {
    let inner = width(config, "intermediate_size_mlp", 16_384)?;
    let hidden = dimensions.hidden_size;
    let gate_up = [
        ("feed_forward.gate_proj", inner),
        ("feed_forward.up_proj", inner),
    ];
    Ok(FeedForward::Gated {
        gate_up: Projection::stacked(&gate_up, hidden, Stacking::Interleaved),
        activation: dimensions.activation,
        down: Projection::single("feed_forward.down_proj", hidden, inner),
    })
}

fn experts(config: &JsonFile, dimensions: &Dimensions) -> Result<ExpertsSpec, LoadError> {
    let defaults = ExpertDefaults {
        num_experts: 16,
        num_chosen: 1,
    };
    let routing = routing(config, &defaults, RoutingRule::WeightedInputs)?;
    let inner = dimensions.intermediate_size;
    let mut experts = dimensions.experts(&EXPERT_MODULES, routing, inner);
    let shared = [
        "feed_forward.shared_expert.gate_proj",
        "feed_forward.shared_expert.up_proj",
        "feed_forward.shared_expert.down_proj",
    ];
    experts.shared = Some(dimensions.shared_expert(shared, inner));
    Ok(experts)
}

fn layers_with_experts(config: &JsonFile, num_layers: usize) -> Result<Vec<bool>, LoadError> {
    if let Some(listed) = listed_layers(config, "moe_layers", num_layers)? {
        return Ok(listed);
    }
    let step = config.size("interleave_moe_layer_step", 1..=MAX_LAYERS)?;
    let step = step.unwrap_or(1);
    let layers = 1..=num_layers;
    Ok(layers.map(|layer| layer.is_multiple_of(step)).collect())
}

/// The chunks of each layer: those that `layer_types` lists or, if config.json is silent, all with a position embedding
/// have some.
fn chunks(config: &JsonFile, has_rope: &[bool]) -> Result<Vec<Option<NonZeroU32>>, LoadError> {
    const LEN: &str = "attention_chunk_size";
    let len = config.size_or(LEN, 1..=MAX_POSITIONS, Some(8192))?;
    let len = len.and_then(|len| NonZeroU32::new(len as u32));
    let names = [["full_attention", "chunked_attention"]];
    let has_chunks = match config.get("layer_types") {
        None => has_rope.iter().map(|is| is & len.is_some()).collect(),
        Some(kinds) => layers_of_kind(config, ("layer_types", kinds), has_rope.len(), &names)?,
    };
    if len.is_none() && has_chunks.contains(&true) {
        return Err(config.unexpected(LEN, "null", "a number, as layers have chunks"));
    }
    let chunks = has_chunks.into_iter().map(|has| len.filter(|_| has));
    Ok(chunks.collect())
}

fn query_factors(config: &JsonFile) -> Result<Option<QueryFactors>, LoadError> {
    const TUNING: &str = "attn_temperature_tuning";
    // The first checkpoints have a number.
    let is_tuned = match config.get(TUNING).and_then(Value::as_u64) {
        Some(number) => number > 0,
        None => config.bool_or(TUNING, true)?,
    };
    let period = config.size("floor_scale", 1..=MAX_POSITIONS)?;
    let slope = config.number("attn_scale", 0.0..=1e6)?;
    let factors = QueryFactors {
        slope: slope.unwrap_or(0.1),
        period: period.unwrap_or(8192) as f64,
        first: 1,
    };
    Ok(is_tuned.then_some(factors))
}
