//! MiMo V2 Flash, by Xiaomi.
//!
//! Llama whose values are narrower than its keys (`v_head_dim`) and have a factor (`attention_value_scale`). All layers
//! but the first and every sixth have a window, twice as many key and value heads, attention-sink logits, and a
//! position embedding of their own.
//!
//! All layers but the first have experts (`mlp_layer_types`): those with the largest sigmoids, to which a correction of
//! each expert is added for the choice alone. The layers for predicting several tokens, `model.mtp`, are not used.
//!
//! A query sees `sliding_window_size` positions before its own; `sliding_window`, which counts where config.json has no
//! other number, includes its own.
//!
//! Source: configuration_mimo_v2_flash.py and modeling_mimo_v2_flash.py of transformers, and the config.json of the
//! published model, whose keys have other names.

use std::num::NonZeroU32;

use serde_json::{Map, Value, json};

use super::bounds::{MAX_HEAD_DIM, MAX_HEADS, MAX_POSITIONS};
use super::dimensions::{Defaults, Dimensions, Sizes};
use super::family::Family;
use super::gguf::{GgufArchitecture, GgufConfig, GgufExperts};
use super::glm4_moe::SIGMOIDS;
use super::grouped_experts::{CHOSEN_GROUPS, GROUPS, GroupedExperts, GroupedNames, experts};
use super::layer_lists::flagged_layers;
use super::rope_config::{RopeDefaults, THETA, rope_of, section_of};
use super::windows::{windowed_layers, windows_of};
use crate::rope::Rope;
use crate::spec::{AttentionSpec, KvHeads, ModelSpec, Multipliers, Projection};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::RouterScores;
use inflight_numbers::Stacking;

pub const FAMILY: Family = Family {
    class: "MiMoV2FlashForCausalLM",
    gguf: Some(GgufArchitecture {
        modules: &[
            (SINKS, "attn_sinks"),
            (GroupedNames::DEEPSEEK.correction, "exp_probs_b"),
        ],
        keys: &[
            ("expert_count", "n_routed_experts"),
            ("expert_group_count", GROUPS),
            ("expert_group_used_count", CHOSEN_GROUPS),
            ("attention.value_length", VALUE_DIM),
        ],
        by_layer: &[KV_HEADS],
        has_windows: true,
        has_partial_rotary: true,
        has_value_width: true,
        experts: Some(GgufExperts {
            is_normalised: true,
            ..SIGMOIDS
        }),
        add_read: add_layers,
        ..GgufArchitecture::named("mimo2")
    }),
    describe,
};

const SINKS: &str = "self_attn.attention_sink_bias";
const KV_HEADS: &str = "attention.head_count_kv";
const VALUE_DIM: &str = "v_head_dim";
const VALUE_SCALE: &str = "attention_value_scale";
const WINDOWED_HEADS: &str = "swa_num_key_value_heads";
const LAYER_TYPES: &str = "layer_types";
const MLP_TYPES: &str = "mlp_layer_types";

/// Adds what differs between layers. A file without the factor of values has none.
fn add_layers(gguf: &GgufConfig<'_>, config: &mut Map<String, Value>) -> Result<(), LoadError> {
    let scale = gguf.number("attention.value_scale")?;
    config.insert(VALUE_SCALE.to_owned(), scale.unwrap_or(Value::Null));
    gguf.add_layers_with_experts(config)?;
    let share = config.get("rope_parameters");
    let share = share.and_then(|rope| rope.get("partial_rotary_factor"));
    gguf.add_rope_of_windows(config, json!(share))?;
    gguf.add_heads_of_kinds(config, KV_HEADS, ["num_key_value_heads", WINDOWED_HEADS])
}

const ROPE: RopeDefaults = RopeDefaults {
    theta: 5_000_000.0,
    partial_rotary_factor: Some(0.334),
    section: Some("full_attention"),
    ..Defaults::LLAMA.rope
};

const EXPERTS: GroupedExperts = GroupedExperts {
    scores: RouterScores::Sigmoid,
    num_experts: Some(256),
    num_chosen: Some(8),
    num_shared: None,
    expert_size: 2048,
    num_dense_layers: 1,
    num_groups: Some(1),
    num_chosen_groups: Some(1),
    num_group_scores: 2,
    is_normalised: true,
    routed_scale: 1.0,
    has_mlp_bias: false,
    names: GroupedNames {
        num_dense: None,
        layer_types: Some(MLP_TYPES),
        ..GroupedNames::DEEPSEEK
    },
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let config = &renamed(config)?;
    let defaults = Defaults {
        sizes: Some(Sizes::new(152_576, 4096, 16_384, 48, 64, 131_072)),
        num_kv_heads: Some(4),
        head_dim: Some(192),
        norm_eps: 1e-5,
        rope: ROPE,
        ..Defaults::LLAMA
    };
    let dimensions = Dimensions::from_config(config, &defaults)?;
    let num_layers = dimensions.num_layers;
    let is_windowed = match config.get(LAYER_TYPES) {
        Some(_) => windowed_layers(config, num_layers, 0)?,
        None => (0..num_layers)
            .map(|layer| layer > 0 && !(layer + 1).is_multiple_of(6))
            .collect(),
    };
    let [full, windowed] = kinds(config, &dimensions)?;
    let windows = windows(config, &is_windowed)?;
    let experts = experts(config, &dimensions, &EXPERTS)?;
    let value_scale = value_scale(config)?;
    let mut layer = dimensions.llama_layer();
    layer.multipliers = (value_scale != 1.0).then_some(Multipliers {
        attention: value_scale,
        gate: 1.0,
        feed_forward: 1.0,
    });
    let mut spec = dimensions.model(FAMILY.class, layer, windows);
    for (layer, is_windowed) in spec.layers.iter_mut().zip(is_windowed) {
        let window = layer.attention.window;
        layer.attention = if is_windowed { &windowed } else { &full }.clone();
        layer.attention.window = window;
    }
    EXPERTS.replace_dense(config, &experts, &mut spec)?;
    Ok(spec)
}

/// The config with the names of transformers for the keys of the published one.
fn renamed(config: &JsonFile) -> Result<JsonFile, LoadError> {
    const WINDOWED: &str = "hybrid_layer_pattern";
    const WITH_EXPERTS: &str = "moe_layer_freq";
    const EPS: [&str; 2] = ["rms_norm_eps", "layernorm_epsilon"];
    let mut renamed = config.with(WITH_EXPERTS, Value::Null);
    for (key, published, kinds) in [
        (
            LAYER_TYPES,
            WINDOWED,
            ["full_attention", "sliding_attention"],
        ),
        (MLP_TYPES, WITH_EXPERTS, ["dense", "sparse"]),
    ] {
        if let (None, Some(flags)) = (config.get(key), config.get(published)) {
            let num_layers = flags.as_array().map_or(0, Vec::len);
            let flags = flagged_layers(config, (published, flags), num_layers)?;
            let kinds: Vec<_> = flags.iter().map(|&is| kinds[usize::from(is)]).collect();
            renamed = renamed.with(key, json!(kinds));
        }
    }
    if let (None, Some(eps)) = (config.get(EPS[0]), config.get(EPS[1])) {
        renamed = renamed.with(EPS[0], eps.clone());
    }
    Ok(renamed)
}

/// The attention of layers without a window, and with one.
fn kinds(config: &JsonFile, dimensions: &Dimensions) -> Result<[AttentionSpec; 2], LoadError> {
    let (num_heads, head_dim) = (dimensions.num_heads, dimensions.head_dim);
    let value_dim = config.size(VALUE_DIM, 1..=MAX_HEAD_DIM)?.unwrap_or(128);
    for (key, of_model) in [
        ("swa_num_attention_heads", num_heads),
        ("swa_head_dim", head_dim),
        ("swa_v_head_dim", value_dim),
    ] {
        if let Some(other) = config.size(key, 1..=MAX_HEADS.max(MAX_HEAD_DIM))?
            && other != of_model
        {
            let expected = format!("{of_model}, as in layers without a window");
            return Err(config.unexpected(key, other, expected));
        }
    }
    let num_windowed = config.size(WINDOWED_HEADS, 1..=MAX_HEADS)?;
    let num_windowed = num_windowed.unwrap_or(2 * dimensions.num_kv_heads);
    if !num_heads.is_multiple_of(num_windowed) {
        let expected = format!("a divisor of num_attention_heads {num_heads}");
        return Err(config.unexpected(WINDOWED_HEADS, num_windowed, expected));
    }
    let has_biases = config.bool_or("attention_bias", false)?;
    let of_kind = |num_kv_heads, rope: Rope, has_sinks: bool| {
        let of_kind = Dimensions {
            num_kv_heads,
            rope,
            ..dimensions.clone()
        };
        let mut attention = attention(&of_kind, value_dim);
        attention.qkv.has_bias = has_biases;
        attention.sink_logits = has_sinks.then_some(SINKS);
        attention
    };
    Ok([
        of_kind(
            dimensions.num_kv_heads,
            dimensions.rope.clone(),
            config.bool_or("add_full_attention_sink_bias", false)?,
        ),
        of_kind(
            num_windowed,
            rope_of_windows(config, dimensions)?,
            config.bool_or("add_swa_attention_sink_bias", true)?,
        ),
    ])
}

/// Attention whose values have another width than its keys.
fn attention(dimensions: &Dimensions, value_dim: usize) -> AttentionSpec {
    let hidden = dimensions.hidden_size;
    let [q, k, _] = dimensions.qkv_widths();
    let qkv = [
        ("self_attn.q_proj", q),
        ("self_attn.k_proj", k),
        ("self_attn.v_proj", dimensions.num_kv_heads * value_dim),
    ];
    let mut qkv = Projection::stacked(&qkv, hidden, Stacking::Concatenated);
    dimensions.order_heads(&mut qkv);
    let attended = dimensions.num_heads * value_dim;
    AttentionSpec {
        qkv,
        kv_heads: Some(KvHeads {
            value_dim,
            ..dimensions.heads()
        }),
        o: Projection::single("self_attn.o_proj", hidden, attended),
        ..dimensions.llama_layer().attention
    }
}

/// The position embedding of layers with a window: a section of its own, or the base of the published config.
fn rope_of_windows(config: &JsonFile, dimensions: &Dimensions) -> Result<Rope, LoadError> {
    let section = section_of(config, "sliding_attention")?;
    let theta = config.number("swa_rope_theta", THETA)?;
    rope_of(
        config,
        section.as_ref(),
        theta,
        dimensions.max_position_embeddings,
        dimensions.head_dim,
        RopeDefaults {
            theta: 10_000.0,
            ..ROPE
        },
    )
}

fn windows(config: &JsonFile, is_windowed: &[bool]) -> Result<Vec<Option<NonZeroU32>>, LoadError> {
    const BEFORE: &str = "sliding_window_size";
    match config.size(BEFORE, 0..=MAX_POSITIONS - 1)? {
        Some(before) => {
            let config = config.with("sliding_window", json!(before + 1));
            windows_of(&config, is_windowed, 1)
        }
        None => windows_of(config, is_windowed, 129),
    }
}

/// The factor of values. An explicit `null` is none.
fn value_scale(config: &JsonFile) -> Result<f32, LoadError> {
    let scale = config.number(VALUE_SCALE, 1e-6..=1e6)?;
    let default = if config.has(VALUE_SCALE) { 1.0 } else { 0.707 };
    Ok(scale.unwrap_or(default) as f32)
}
