//! LFM3, by Liquid AI: gated convolutions, and attention in some layers, most of it with a window.
//!
//! Convolutions are those of [LFM2](super::lfm2). Attention has an RMS norm of each query and key head and, unless
//! `use_attention_gate` is false, one gate for each head. Both blocks of a layer have norms behind them, unless
//! `use_sandwich_norm` is false. `layer_types` tells which layer is which; the two kinds of attention have their own
//! sections of `rope_parameters`. Its default is a convolution in every second layer and the first one, a window in
//! every fourth one, and attention to all tokens in the others.
//!
//! Source: configuration_lfm3.py and modeling_lfm3.py of transformers.

use std::num::NonZeroU32;

use serde_json::{Value, json};

use super::bounds::MAX_POSITIONS;
use super::dimensions::{Defaults, Dimensions, Keys, Sizes};
use super::family::Family;
use super::gemma4::proportional_rope;
use super::layer_lists::kinds_of_layers;
use super::lfm2::{convolution, gated};
use super::recurrent::MAX_KERNEL_LEN;
use super::rope_config::{THETA, rope_of, rope_parameters, section_of};
use super::windows::no_windows;
use crate::spec::{BlockNorms, GateSpec, LayerSpec, ModelSpec, Norms, Projection, QkNormSpec};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::{Activation, GateFunction};

pub const FAMILY: Family = Family {
    class: "Lfm3ForCausalLM",
    gguf: None,
    describe,
};

/// The block in front of the feed-forward block of a layer.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Convolution,
    Windowed,
    Full,
}

const WINDOWED: &str = "sliding_attention";
const FULL: &str = "full_attention";
const NAMES: [(&str, Kind); 3] = [
    ("conv", Kind::Convolution),
    (WINDOWED, Kind::Windowed),
    (FULL, Kind::Full),
];

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let config = &config
        .with("rope_parameters", sections(config)?)
        .with("rope_scaling", Value::Null);
    let defaults = Defaults {
        sizes: Some(Sizes::new(128_000, 2048, 7680, 24, 16, 128_000)),
        num_kv_heads: Some(4),
        head_dim: Some(128),
        norm_eps: 1e-5,
        tied_embeddings: true,
        keys: Keys {
            norm_eps: "norm_eps",
            ..Keys::LLAMA
        },
        ..Defaults::LLAMA
    };
    // Each kind of attention has a position embedding of its own.
    let without_rope = config.with("rope_parameters", Value::Null);
    let dimensions = Dimensions {
        // The class does not read `hidden_act`.
        activation: Activation::Silu,
        ..Dimensions::from_config(&without_rope, &defaults)?
    };
    let kinds = kinds(config, dimensions.num_layers)?;
    let section = |name: &str, kind: Kind| match section_of(config, name)? {
        None if kinds.contains(&kind) => Err(config.missing(&format!("rope_parameters.{name}"))),
        section => Ok(section),
    };
    let local = rope_of(
        config,
        section(WINDOWED, Kind::Windowed)?.as_ref(),
        None,
        dimensions.max_position_embeddings,
        dimensions.head_dim,
        defaults.rope,
    )?;
    section(FULL, Kind::Full)?;
    let full = proportional_rope(config, dimensions.head_dim)?;
    let window = window(config, &kinds)?;
    let kernel_len = config.size("conv_L_cache", 1..=MAX_KERNEL_LEN)?;
    let has_bias = config.bool_or("conv_bias", false)?;
    let (hidden, num_layers) = (dimensions.hidden_size, dimensions.num_layers);
    let layer = layer(config, &dimensions)?;
    let mut spec = dimensions.model(FAMILY.class, layer, no_windows(num_layers));
    spec.modules.final_norm = Some("model.embedding_norm");
    for (layer, kind) in spec.layers.iter_mut().zip(kinds) {
        let attention = &mut layer.attention;
        match kind {
            Kind::Convolution => {
                attention.gate = None;
                convolution(attention, hidden, kernel_len.unwrap_or(7), has_bias);
            }
            Kind::Windowed => (attention.rope, attention.window) = (local.clone(), window),
            Kind::Full => attention.rope = full.clone(),
        }
    }
    Ok(spec)
}

/// The position embeddings of both kinds of attention, as sections of `rope_parameters`. A section that tells no base
/// has the base beside the sections, as in transformers.
fn sections(config: &JsonFile) -> Result<Value, LoadError> {
    let Some(told) = rope_parameters(config)? else {
        return Ok(json!({
            WINDOWED: {"rope_type": "default", "rope_theta": 1e4},
            FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        }));
    };
    let theta = config.number("rope_theta", THETA)?.unwrap_or(1e6);
    let with_theta = |(name, section): (&String, &Value)| {
        let mut section = section.clone();
        if let Value::Object(section) = &mut section {
            section.entry("rope_theta").or_insert(json!(theta));
        }
        (name.clone(), section)
    };
    Ok(Value::Object(told.entries().map(with_theta).collect()))
}

/// A layer with attention.
fn layer(config: &JsonFile, dimensions: &Dimensions) -> Result<LayerSpec, LoadError> {
    let mut layer = dimensions.llama_layer();
    layer.norms = match config.bool_or("use_sandwich_norm", true)? {
        true => Norms::Sequential {
            attention: BlockNorms {
                before: Some("operator_norm"),
                after: Some("post_operator_norm"),
            },
            feed_forward: BlockNorms {
                before: Some("ffn_norm"),
                after: Some("post_ffn_norm"),
            },
        },
        false => Norms::before("operator_norm", "ffn_norm"),
    };
    layer.feed_forward = gated(dimensions);
    let attention = &mut layer.attention;
    attention.qk_norm = Some(QkNormSpec::of_heads(dimensions.norm.eps));
    attention.set_biases(config.bool_or("attention_bias", false)?);
    if config.bool_or("use_attention_gate", true)? {
        let (heads, hidden) = (dimensions.num_heads, dimensions.hidden_size);
        attention.gate = Some(GateSpec {
            // Without biases, whatever the others have.
            projection: Projection::single("self_attn.gate_proj", heads, hidden),
            function: GateFunction::Sigmoid,
        });
    }
    Ok(layer)
}

fn kinds(config: &JsonFile, num_layers: usize) -> Result<Vec<Kind>, LoadError> {
    const KEY: &str = "layer_types";
    let Some(told) = config.get(KEY) else {
        let kind = |layer: usize| match layer % 4 {
            2 => Kind::Full,
            0 if layer > 0 => Kind::Windowed,
            _ => Kind::Convolution,
        };
        return Ok((0..num_layers).map(kind).collect());
    };
    kinds_of_layers(config, (KEY, told), num_layers, &NAMES)
}

fn window(config: &JsonFile, kinds: &[Kind]) -> Result<Option<NonZeroU32>, LoadError> {
    const KEY: &str = "sliding_window";
    let window = config.size_or(KEY, 1..=MAX_POSITIONS, Some(256))?;
    let window = window.and_then(|window| NonZeroU32::new(window as u32));
    match window.is_none() && kinds.contains(&Kind::Windowed) {
        true => Err(config.unexpected(KEY, "null", "a number, as layers have a window")),
        false => Ok(window),
    }
}
