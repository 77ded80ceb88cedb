//! Laguna, by Poolside.
//!
//! Llama with an RMS norm of each query and key head, and gates of attention that are softplus: one for each head or,
//! if `gating` is `per-element`, one for each element. Layers may differ in their numbers of query heads
//! (`num_attention_heads_per_layer`), and those that `layer_types` lists have a window. The two kinds of layers have
//! their own sections of `rope_parameters`.
//!
//! `mlp_layer_types` lists the layers with experts, all but the first where config.json is silent: those with the
//! largest sigmoids, to which a correction of each expert is added for the choice alone; weights are divided by their
//! sum and multiplied by `moe_routed_scaling_factor`.
//!
//! Source: configuration_laguna.py and modeling_laguna.py of transformers.

use serde_json::{Map, Value, json};

use super::bounds::MAX_HEADS;
use super::dimensions::{Defaults, Dimensions, Sizes};
use super::experts::{EXPERT_MODULES, ExpertDefaults, SHARED_EXPERT, routing, scores_rule, width};
use super::family::Family;
use super::gguf::{GgufArchitecture, GgufConfig};
use super::glm4_moe::SIGMOIDS;
use super::layer_lists::layers_of_kind;
use super::rope_config::{RopeDefaults, rope_of, section_of};
use super::windows::{no_windows, set_rope_of_windows, windowed_layers, windows_of};
use crate::spec::{
    AttentionSpec, ExpertsSpec, FeedForward, GateSpec, ModelSpec, Projection, QkNormSpec,
};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::{GateFunction, RouterScores};

pub const FAMILY: Family = Family {
    class: "LagunaForCausalLM",
    gguf: Some(GgufArchitecture {
        modules: &[
            ("self_attn.g_proj", "attn_gate"),
            ("mlp.experts.e_score_correction_bias", "exp_probs_b"),
        ],
        keys: &[("expert_weights_scale", "moe_routed_scaling_factor")],
        by_layer: &[HEADS],
        has_windows: true,
        has_partial_rotary: true,
        experts: Some(SIGMOIDS),
        add_read: add_layers,
        ..GgufArchitecture::named("laguna")
    }),
    describe,
};

const HEADS: &str = "attention.head_count";

/// Adds what differs between layers, the kind of gates, and both position embeddings.
fn add_layers(gguf: &GgufConfig<'_>, config: &mut Map<String, Value>) -> Result<(), LoadError> {
    const GATES: &str = "blk.0.attn_gate.weight";
    let heads = gguf.numbers_of_layers(HEADS)?.unwrap_or_default();
    let heads: Vec<_> = heads.into_iter().map(|heads| heads as u64).collect();
    let head_dim = config.get("head_dim").and_then(Value::as_u64).unwrap_or(0);
    let num_gates = gguf.shape(GATES).and_then(<[usize]>::first).copied();
    let num_gates = num_gates.unwrap_or(0) as u64;
    let num_heads = heads.first().copied().unwrap_or(0);
    let gating = match num_gates {
        num if num == num_heads => "per-head",
        num if Some(num) == num_heads.checked_mul(head_dim) => "per-element",
        num => {
            let problem = format!("does not fit to {GATES}, which has {num} rows");
            return Err(gguf.error(HEADS, &problem, "the file is damaged"));
        }
    };
    config.insert("gating".to_owned(), json!(gating));
    // llama.cpp's laguna.cpp gives every fourth layer full attention, from the first one on, where layers have windows.
    if config.get("sliding_window").is_some_and(Value::is_u64)
        && !config.contains_key("layer_types")
    {
        let is_windowed: Vec<_> = (0..heads.len()).map(|layer| layer % 4 != 0).collect();
        let kinds = ["full_attention", "sliding_attention"];
        GgufConfig::add_layer_types(config, &is_windowed, kinds);
    }
    config.insert("num_attention_heads_per_layer".to_owned(), json!(heads));
    gguf.get("leading_dense_block_count");
    gguf.add_layers_with_experts(config)?;
    gguf.add_rope_of_windows(config, json!(1.0))
}

const ROPE: RopeDefaults = RopeDefaults {
    partial_rotary_factor: Some(1.0),
    section: Some("full_attention"),
    ..Defaults::LLAMA.rope
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let silent = json!({
        "full_attention": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    });
    let config = &match config.get("rope_parameters") {
        Some(_) => config.with("rope_scaling", Value::Null),
        None => config.with("rope_parameters", silent),
    };
    let defaults = Defaults {
        sizes: Some(Sizes::new(100_352, 2048, 8192, 40, 48, 131_072)),
        num_kv_heads: Some(8),
        head_dim: Some(128),
        rope: ROPE,
        ..Defaults::LLAMA
    };
    let dimensions = Dimensions::from_config(config, &defaults)?;
    let num_layers = dimensions.num_layers;
    let local = section_of(config, "sliding_attention")?;
    let local = rope_of(
        config,
        local.as_ref(),
        None,
        dimensions.max_position_embeddings,
        dimensions.head_dim,
        ROPE,
    )?;
    let windows = match config.get("layer_types") {
        Some(_) => windows_of(config, &windowed_layers(config, num_layers, 0)?, 512)?,
        None => no_windows(num_layers),
    };
    let heads = query_heads(config, &dimensions)?;
    let experts = experts(config, &dimensions)?;
    const TYPES: &str = "mlp_layer_types";
    let has_experts = match config.get(TYPES) {
        Some(types) => layers_of_kind(config, (TYPES, types), num_layers, &[["dense", "sparse"]])?,
        None => (0..num_layers).map(|layer| layer > 0).collect(),
    };
    let layer = dimensions.llama_layer();
    let mut spec = dimensions.clone().model(FAMILY.class, layer, windows);
    for (index, layer) in spec.layers.iter_mut().enumerate() {
        let is_windowed = layer.attention.window.is_some();
        let of_layer = Dimensions {
            num_heads: heads[index],
            rope: if is_windowed {
                &local
            } else {
                &dimensions.rope
            }
            .clone(),
            ..dimensions.clone()
        };
        let window = layer.attention.window;
        layer.attention = attention(config, &of_layer)?;
        layer.attention.window = window;
        if heads[index] != dimensions.num_heads {
            layer.attention.kv_heads = Some(of_layer.heads());
        }
        if has_experts[index] {
            layer.feed_forward = FeedForward::Experts(experts.clone());
        }
    }
    set_rope_of_windows(&mut spec, &local);
    Ok(spec)
}

/// The query heads of each layer.
fn query_heads(config: &JsonFile, dimensions: &Dimensions) -> Result<Vec<usize>, LoadError> {
    const KEY: &str = "num_attention_heads_per_layer";
    let num_layers = dimensions.num_layers;
    let Some(told) = config.get(KEY) else {
        return Ok(vec![dimensions.num_heads; num_layers]);
    };
    let num_kv_heads = dimensions.num_kv_heads;
    let heads = |told: &Value| {
        let heads = usize::try_from(told.as_u64()?).ok()?;
        let is_known = (1..=MAX_HEADS).contains(&heads) && heads.is_multiple_of(num_kv_heads);
        is_known.then_some(heads)
    };
    let listed = told.as_array().filter(|told| told.len() == num_layers);
    let listed = listed.and_then(|told| told.iter().map(heads).collect());
    listed.ok_or_else(|| {
        let expected = format!(
            "a list of {num_layers} multiples of num_key_value_heads {num_kv_heads}, up to {MAX_HEADS}"
        );
        config.unexpected(KEY, told, expected)
    })
}

fn attention(config: &JsonFile, dimensions: &Dimensions) -> Result<AttentionSpec, LoadError> {
    const GATING: &str = "gating";
    let gating = config.get(GATING).cloned().unwrap_or(Value::Bool(true));
    let [q, ..] = dimensions.qkv_widths();
    let num_gates = match (&gating, gating.as_str()) {
        (Value::Bool(true), _) | (_, Some("per-head")) => dimensions.num_heads,
        (_, Some("per-element")) => q,
        _ => return Err(config.unexpected(GATING, gating, "true, 'per-head' or 'per-element'")),
    };
    let mut attention = dimensions.llama_layer().attention;
    attention.qk_norm = Some(QkNormSpec::of_heads(dimensions.norm.eps));
    attention.set_biases(config.bool_or("attention_bias", false)?);
    attention.gate = Some(GateSpec {
        // Without biases, whatever the others have.
        projection: Projection::single("self_attn.g_proj", num_gates, dimensions.hidden_size),
        function: GateFunction::Softplus,
    });
    Ok(attention)
}

fn experts(config: &JsonFile, dimensions: &Dimensions) -> Result<ExpertsSpec, LoadError> {
    const WEIGHTS_INPUTS: &str = "moe_apply_router_weight_on_input";
    const SOFT_CAP: &str = "moe_router_logit_softcapping";
    if config.bool_or(WEIGHTS_INPUTS, false)? {
        return Err(config.unexpected(WEIGHTS_INPUTS, true, "supported; only false is"));
    }
    if let Some(cap) = config.number(SOFT_CAP, 0.0..=1e6)?.filter(|cap| *cap > 0.0) {
        return Err(config.unexpected(SOFT_CAP, cap, "supported; only 0 is"));
    }
    let scale = config.number("moe_routed_scaling_factor", 0.0..=1e6)?;
    let rule = scores_rule(RouterScores::Sigmoid, true, scale.unwrap_or(1.0) as f32);
    let defaults = ExpertDefaults {
        num_experts: 256,
        num_chosen: 8,
    };
    let routing = routing(config, &defaults, rule)?;
    let expert_size = width(config, "moe_intermediate_size", 512)?;
    let shared_size = width(config, "shared_expert_intermediate_size", 512)?;
    let mut experts = dimensions.experts(&EXPERT_MODULES, routing, expert_size);
    experts.correction = Some("mlp.experts.e_score_correction_bias");
    experts.shared = Some(dimensions.shared_expert(SHARED_EXPERT, shared_size));
    Ok(experts)
}
