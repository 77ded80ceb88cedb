//! Step 3.5 Flash, and the language model of Step 3.7 Flash, by StepFun.
//!
//! Llama with an RMS norm of each query and key head, norms whose weights are stored as differences from one, and
//! sigmoid gates of attention, one for each head. Layers with a window have another number of query heads and a
//! position embedding of their own, which rotates whole heads; the others rotate half of each.
//!
//! Layers that config.json lists have experts: those with the largest sigmoids, to which a correction of each expert is
//! added for the choice alone; weights are divided by their sum and multiplied by `moe_router_scaling_factor`. Gates
//! and ups are bounded ([`Gating::Bounded`]) in layers with a number above 0 in `swiglu_limits` or, for the expert that
//! all tokens have, in `swiglu_limits_shared`. The weights of all experts of a layer are in one tensor for each
//! projection.
//!
//! Lists may have further elements for the layers behind the last one, which predict several tokens and are not used.
//!
//! Source: configuration_step3p7.py and modeling_step3p7.py of transformers, and the config.json of the published
//! models, whose keys have other names.

use std::num::NonZeroU32;

use serde_json::{Map, Value, json};

use super::bounds::{MAX_HEADS, MAX_LAYERS};
use super::dimensions::{Defaults, Dimensions, Sizes};
use super::experts::{ExpertDefaults, ExpertModules, routing_of, scores_rule, width};
use super::family::Family;
use super::gguf::{GgufArchitecture, GgufConfig};
use super::glm4_moe::SIGMOIDS;
use super::layer_lists::{layers_of_kind, listed_layers};
use super::rope_config::{RopeDefaults, rope_of, section_of};
use super::windows::{no_windows, windowed_layers, windows_of};
use super::with_images::describe_language_model;
use crate::rope::Rope;
use crate::spec::{
    AttentionSpec, ExpertsSpec, FeedForward, GateSpec, ModelSpec, Projection, QkNormSpec,
    StackedExperts, StackedLayout,
};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::{GateFunction, Gating, RouterScores};

pub const STEP_3_5: Family = Family {
    class: "Step3p5ForCausalLM",
    gguf: Some(GgufArchitecture {
        modules: &[
            ("self_attn.g_proj", "attn_gate"),
            ("moe.gate", "ffn_gate_inp"),
            ("moe.router_bias", "exp_probs_b"),
            ("moe.gate_proj.weight", "ffn_gate_exps"),
            ("moe.up_proj.weight", "ffn_up_exps"),
            ("moe.down_proj.weight", "ffn_down_exps"),
            ("share_expert.gate_proj", "ffn_gate_shexp"),
            ("share_expert.up_proj", "ffn_up_shexp"),
            ("share_expert.down_proj", "ffn_down_shexp"),
        ],
        keys: &[
            ("expert_count", "n_routed_experts"),
            ("expert_weights_scale", "moe_router_scaling_factor"),
            ("expert_shared_feed_forward_length", "share_expert_dim"),
        ],
        by_layer: &[HEADS],
        has_windows: true,
        has_partial_rotary: true,
        norms_include_one: true,
        divides_unwindowed: true,
        experts: Some(SIGMOIDS),
        add_read: add_layers,
        ..GgufArchitecture::named("step35")
    }),
    describe,
};

pub const STEP_3_7: Family = Family {
    class: "Step3p7ForConditionalGeneration",
    gguf: None,
    describe: |config| {
        let class = STEP_3_7.class;
        describe_language_model(config, Map::new(), &STEP_3_5, class)
    },
};

const MODULES: ExpertModules = ExpertModules {
    router: "moe.gate",
    gate: "moe.gate_proj.weight",
    up: "moe.up_proj.weight",
    down: "moe.down_proj.weight",
    stacked: StackedExperts {
        router: "moe.gate",
        gate_up: "moe.gate_proj.weight",
        down: "moe.down_proj.weight",
        layout: StackedLayout::Parts,
    },
};

const SHARED_EXPERT: [&str; 3] = [
    "share_expert.gate_proj",
    "share_expert.up_proj",
    "share_expert.down_proj",
];

const HEADS: &str = "attention.head_count";
const FULL: &str = "full_attention";
const WINDOWED: &str = "sliding_attention";
const LAYER_TYPES: &str = "layer_types";
const MLP_TYPES: &str = "mlp_layer_types";
const WITH_EXPERTS: &str = "moe_layers_enum";
const LIMITS: [&str; 2] = ["swiglu_limits", "swiglu_limits_shared"];
const OTHER_HEADS: &str = "attention_other_setting";
const WINDOWED_HEADS: &str = "num_sliding_attention_heads";
const KV_HEADS: &str = "num_key_value_heads";

/// Adds what differs between layers.
fn add_layers(gguf: &GgufConfig<'_>, config: &mut Map<String, Value>) -> Result<(), LoadError> {
    // Layers with a router have experts, whatever these say.
    for key in ["leading_dense_block_count", "moe_every_n_layers"] {
        gguf.get(key);
    }
    gguf.add_layers_with_experts(config)?;
    for (key, list) in LIMITS
        .into_iter()
        .zip(["swiglu_clamp_exp", "swiglu_clamp_shexp"])
    {
        if let Some(limits) = gguf.numbers_of_layers(list)? {
            config.insert(key.to_owned(), json!(limits));
        }
    }
    gguf.add_heads_of_kinds(config, HEADS, ["num_attention_heads", WINDOWED_HEADS])?;
    // llama.cpp rotates half of a head where files tell nothing else.
    if gguf.number("rope.dimension_count")?.is_none()
        && let Some(rope) = config.get_mut("rope_parameters")
    {
        rope["partial_rotary_factor"] = json!(0.5);
    }
    gguf.add_rope_of_windows(config, json!(1.0))
}

const ROPE: RopeDefaults = RopeDefaults {
    partial_rotary_factor: Some(1.0),
    section: Some(FULL),
    ..Defaults::LLAMA.rope
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    check(config)?;
    let config = &in_names_of_transformers(config)?;
    let defaults = Defaults {
        sizes: Some(Sizes::new(128_815, 4096, 11_264, 45, 64, 128_000)),
        num_kv_heads: Some(8),
        head_dim: Some(128),
        norm_eps: 1e-5,
        rope: ROPE,
        ..Defaults::LLAMA
    };
    let mut dimensions = Dimensions::from_config(config, &defaults)?;
    dimensions.norm.weight_offset = 1.0;
    let num_layers = dimensions.num_layers;
    let is_windowed = match config.get(LAYER_TYPES) {
        Some(_) => windowed_layers(config, num_layers, 0)?,
        None => vec![false; num_layers],
    };
    let windows = windows(config, &is_windowed)?;
    let has_experts = layers_with_experts(config, num_layers)?;
    let [limits, shared_limits] = LIMITS.map(|key| limits(config, key, num_layers));
    let (limits, shared_limits) = (limits?, shared_limits?);
    let experts = experts(config, &dimensions)?;
    let (full, windowed) = (attention(config, &dimensions)?, {
        let of_windows = Dimensions {
            num_heads: windowed_heads(config, &dimensions)?,
            rope: rope_of_windows(config, &dimensions)?,
            ..dimensions.clone()
        };
        let mut windowed = attention(config, &of_windows)?;
        let heads = of_windows.heads();
        windowed.kv_heads = Some(heads).filter(|heads| *heads != dimensions.heads());
        windowed
    });
    let mut layer = dimensions.llama_layer();
    layer
        .feed_forward
        .set_biases(config.bool_or("mlp_bias", false)?);
    let activation = dimensions.activation;
    let mut spec = dimensions.model(STEP_3_5.class, layer, windows);
    for (index, layer) in spec.layers.iter_mut().enumerate() {
        let window = layer.attention.window;
        layer.attention = if is_windowed[index] { &windowed } else { &full }.clone();
        layer.attention.window = window;
        let gating = |limit: Option<f32>| limit.map(|limit| Gating::Bounded(activation, limit));
        let [own, shared] = [limits[index], shared_limits[index]].map(gating);
        if has_experts[index] {
            let mut experts = experts.clone();
            experts.gating = own.unwrap_or(experts.gating);
            if let Some(expert) = &mut experts.shared {
                expert.gating = Some(shared.unwrap_or(activation.into()));
            }
            layer.feed_forward = FeedForward::Experts(experts);
        } else if let Some(limit) = shared_limits[index] {
            let expected = format!("0 in layer {index}, which has no experts");
            return Err(config.unexpected(LIMITS[1], limit, expected));
        }
    }
    Ok(spec)
}

/// Refuses what published configs say and transformers ignores, if it is something else.
fn check(config: &JsonFile) -> Result<(), LoadError> {
    const SCORES: &str = "moe_router_activation";
    const SCALED: &str = "yarn_only_types";
    if let Some(other) = config.string(SCORES)?.filter(|it| *it != "sigmoid") {
        let expected = "'sigmoid' in this family";
        return Err(config.unexpected(SCORES, format_args!("'{other}'"), expected));
    }
    for key in [
        "use_head_wise_attn_gate",
        "use_moe_router_bias",
        "norm_expert_weight",
    ] {
        if !config.bool_or(key, true)? {
            return Err(config.unexpected(key, false, "supported in this family; only true is"));
        }
    }
    if let Some(other) = config.get(SCALED).filter(|it| **it != json!([FULL])) {
        return Err(config.unexpected(SCALED, other, format_args!("['{FULL}']")));
    }
    Ok(())
}

/// The config with the names of transformers for the keys of published ones, and lists as long as the model.
fn in_names_of_transformers(config: &JsonFile) -> Result<JsonFile, LoadError> {
    const THETAS: &str = "rope_theta";
    const SHARES: &str = "partial_rotary_factors";
    // Whatever a config says, transformers has SiLU.
    let mut known = config.with("hidden_act", json!("silu"));
    let num_layers = config.size("num_hidden_layers", 1..=MAX_LAYERS)?;
    let num_layers = num_layers.unwrap_or(45);
    for key in [LAYER_TYPES, MLP_TYPES, LIMITS[0], LIMITS[1], THETAS, SHARES] {
        let listed = known.get(key).and_then(Value::as_array);
        if let Some(listed) = listed.filter(|listed| listed.len() > num_layers) {
            let listed = json!(listed[..num_layers]);
            known = known.with(key, listed);
        }
    }
    for (key, published) in [
        (KV_HEADS, "num_attention_groups"),
        ("n_routed_experts", "moe_num_experts"),
        ("num_experts_per_tok", "moe_top_k"),
        ("share_expert_dim", "share_expert_dims"),
    ] {
        if let (None, Some(value)) = (known.get(key), config.get(published)) {
            known = known.with(key, value.clone());
        }
    }
    let has_sections = config.get("rope_parameters").is_some();
    let of_lists = [THETAS, SHARES].map(|key| known.get(key).cloned());
    if has_sections || of_lists == [None, None] && config.get("rope_scaling").is_none() {
        return Ok(known);
    }
    let types = known.get(LAYER_TYPES).cloned();
    let types = types.unwrap_or_else(|| json!(vec![FULL; num_layers]));
    let section = |kind: &str| {
        let mut section = Map::new();
        for (key, list, name) in [
            (THETAS, &of_lists[0], THETAS),
            (SHARES, &of_lists[1], "partial_rotary_factor"),
        ] {
            let value = match list {
                Some(list) if list.is_array() => of_kind(&known, (key, list), &types, kind)?,
                one => one.clone(),
            };
            section.extend(value.map(|value| (name.to_owned(), value)));
        }
        Ok::<_, LoadError>(section)
    };
    let (mut full, windowed) = (section(FULL)?, section(WINDOWED)?);
    if let Some(Value::Object(scaling)) = config.get("rope_scaling") {
        full.extend(scaling.clone());
    }
    Ok([
        (THETAS, Value::Null),
        (SHARES, Value::Null),
        ("rope_scaling", Value::Null),
    ]
    .into_iter()
    .chain([("rope_parameters", json!({FULL: full, WINDOWED: windowed}))])
    .fold(known.clone(), |known, (key, value)| known.with(key, value)))
}

/// The element of a list that all layers of a kind have; `None` if there are none.
fn of_kind(
    config: &JsonFile,
    (key, list): (&str, &Value),
    types: &Value,
    kind: &str,
) -> Result<Option<Value>, LoadError> {
    let [list_of, types] = [list, types].map(|it| it.as_array().map_or(&[][..], Vec::as_slice));
    if list_of.len() < types.len() {
        let expected = format!("a list of {} numbers", types.len());
        return Err(config.unexpected(key, list, expected));
    }
    let of_kind = list_of.iter().zip(types).filter(|(_, it)| *it == kind);
    let mut of_kind = of_kind.map(|(value, _)| value);
    let first = of_kind.next();
    match of_kind.find(|other| Some(*other) != first) {
        None => Ok(first.cloned()),
        Some(other) => {
            let expected = format!("the number that other layers of '{kind}' have");
            Err(config.unexpected(key, other, expected))
        }
    }
}

fn windows(config: &JsonFile, is_windowed: &[bool]) -> Result<Vec<Option<NonZeroU32>>, LoadError> {
    match config.get("sliding_window") {
        Some(_) => windows_of(config, is_windowed, 512),
        None => Ok(no_windows(is_windowed.len())),
    }
}

/// The query heads of layers with a window.
fn windowed_heads(config: &JsonFile, dimensions: &Dimensions) -> Result<usize, LoadError> {
    let Dimensions {
        num_heads,
        num_kv_heads,
        head_dim,
        ..
    } = *dimensions;
    let mut told = (config.clone(), WINDOWED_HEADS);
    if config.get(WINDOWED_HEADS).is_none()
        && let Some(others) = config.object(OTHER_HEADS)?
    {
        for (key, of_model) in [
            ("num_attention_groups", num_kv_heads),
            ("head_dim", head_dim),
        ] {
            if let Some(other) = others
                .size(key, 1..=MAX_HEADS)?
                .filter(|it| *it != of_model)
            {
                let expected = format!("{of_model}, as in layers without a window");
                return Err(others.unexpected(key, other, expected));
            }
        }
        told = (others, "num_attention_heads");
    }
    let (config, key) = told;
    let heads = config.size(key, 1..=MAX_HEADS)?.unwrap_or(num_heads);
    match heads.is_multiple_of(num_kv_heads) {
        true => Ok(heads),
        false => {
            let expected = format!("a multiple of {KV_HEADS} {num_kv_heads}");
            Err(config.unexpected(key, heads, expected))
        }
    }
}

fn rope_of_windows(config: &JsonFile, dimensions: &Dimensions) -> Result<Rope, LoadError> {
    let section = section_of(config, WINDOWED)?;
    rope_of(
        config,
        section.as_ref(),
        None,
        dimensions.max_position_embeddings,
        dimensions.head_dim,
        ROPE,
    )
}

fn attention(config: &JsonFile, dimensions: &Dimensions) -> Result<AttentionSpec, LoadError> {
    const SCALE: &str = "query_pre_attn_scalar";
    let mut attention = dimensions.llama_layer().attention;
    attention.qk_norm = Some(QkNormSpec::of_heads(dimensions.norm.eps));
    attention.set_biases(config.bool_or("attention_bias", false)?);
    if let Some(scalar) = config.number(SCALE, 1e-6..=1e6)? {
        attention.scale = (scalar as f32).sqrt().recip();
    }
    let (num_heads, hidden) = (dimensions.num_heads, dimensions.hidden_size);
    attention.gate = Some(GateSpec {
        // Without biases, whatever the others have.
        projection: Projection::single("self_attn.g_proj", num_heads, hidden),
        function: GateFunction::Sigmoid,
    });
    Ok(attention)
}

/// Layers with experts: of a list of kinds, or of indices, which may be a text.
fn layers_with_experts(config: &JsonFile, num_layers: usize) -> Result<Vec<bool>, LoadError> {
    if let Some(types) = config.get(MLP_TYPES) {
        return layers_of_kind(
            config,
            (MLP_TYPES, types),
            num_layers,
            &[["dense", "sparse"]],
        );
    }
    let Some(listed) = config.get(WITH_EXPERTS) else {
        return Ok((0..num_layers).map(|layer| layer >= 3).collect());
    };
    let listed = match listed.as_str() {
        None => listed.clone(),
        Some(text) => {
            let indices = text.split(',').map(str::trim).filter(|it| !it.is_empty());
            let indices: Result<Vec<usize>, _> = indices.map(str::parse).collect();
            let indices = indices.map_err(|_| {
                let expected = "layers with commas between them";
                config.unexpected(WITH_EXPERTS, listed, expected)
            })?;
            // Layers behind the last one are not used.
            json!(
                indices
                    .into_iter()
                    .filter(|&layer| layer < num_layers)
                    .collect::<Vec<_>>()
            )
        }
    };
    let config = config.with(WITH_EXPERTS, listed);
    let layers = listed_layers(&config, WITH_EXPERTS, num_layers)?;
    Ok(layers.unwrap_or_default())
}

/// The bound of each layer, if it has one.
fn limits(config: &JsonFile, key: &str, num_layers: usize) -> Result<Vec<Option<f32>>, LoadError> {
    let Some(told) = config.get(key) else {
        return Ok(vec![None; num_layers]);
    };
    let limit = |limit: &Value| match limit.as_f64() {
        None => limit.is_null().then_some(None),
        Some(0.0) => Some(None),
        Some(limit) => (1e-3..=1e6).contains(&limit).then_some(Some(limit as f32)),
    };
    let listed = told.as_array().filter(|told| told.len() == num_layers);
    let listed = listed.and_then(|told| told.iter().map(limit).collect());
    listed.ok_or_else(|| {
        let expected =
            format!("a list of {num_layers} numbers from 0.001 to 1000000, or 0 or null");
        config.unexpected(key, told, expected)
    })
}

fn experts(config: &JsonFile, dimensions: &Dimensions) -> Result<ExpertsSpec, LoadError> {
    let scale = config.number("moe_router_scaling_factor", 0.0..=1e6)?;
    let rule = scores_rule(RouterScores::Sigmoid, true, scale.unwrap_or(1.0) as f32);
    let defaults = ExpertDefaults {
        num_experts: 288,
        num_chosen: 8,
    };
    let keys = (
        ["n_routed_experts", "num_local_experts"],
        "num_experts_per_tok",
    );
    let routing = routing_of(config, keys, &defaults, rule)?;
    let expert_size = width(config, "moe_intermediate_size", 1280)?;
    let shared_size = width(config, "share_expert_dim", 1280)?;
    let mut experts = dimensions.experts(&MODULES, routing, expert_size);
    experts.correction = Some("moe.router_bias");
    let mut shared = dimensions.shared_expert(SHARED_EXPERT, shared_size);
    let has_bias = config.bool_or("mlp_bias", false)?;
    (shared.gate_up.has_bias, shared.down.has_bias) = (has_bias, has_bias);
    experts.shared = Some(shared);
    Ok(experts)
}
