//! Qwen 1, by Alibaba.
//!
//! Llama with one module for queries, keys and values, which have biases; `w2` is the gate. `no_bias`, true where
//! config.json is silent, leaves biases out elsewhere. `intermediate_size` counts gate and up.
//!
//! Beyond `seq_length`, the base of RoPE is stretched by the length of the text (`use_dynamic_ntk`), and queries have a
//! factor that grows with their positions (`use_logn_attn`). `seq_length` is the limit here, unless config.json sets
//! both to false; both are true by default.
//!
//! Source: configuration_qwen.py and modeling_qwen.py of Qwen/Qwen-7B; Bai et al., arXiv:2309.16609.

use serde_json::json;

use super::dimensions::{Defaults, Dimensions, Keys, Sizes};
use super::family::Family;
use super::gguf::GgufArchitecture;
use super::rope_config::{RopeDefaults, THETA};
use super::windows::no_windows;
use crate::spec::{FeedForward, ModelModules, ModelSpec, Norms, Projection};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_numbers::Stacking;

pub const FAMILY: Family = Family {
    class: "QWenLMHeadModel",
    gguf: Some(GgufArchitecture {
        modules: &[("mlp.w1", "ffn_up"), ("mlp.w2", "ffn_gate")],
        keys: &[
            ("attention.layer_norm_rms_epsilon", "layer_norm_epsilon"),
            // llama.cpp changes nothing for longer sequences.
            ("context_length", SEQ_LENGTH),
        ],
        ..GgufArchitecture::named("qwen")
    }),
    describe,
};

const SEQ_LENGTH: &str = "seq_length";

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    const IMAGES: &str = "visual";
    const INNER: &str = "intermediate_size";
    if let Some(images) = config.get(IMAGES) {
        return Err(config.unexpected(IMAGES, images, "supported; only models for text are"));
    }
    let mut is_limited = false;
    for key in ["use_dynamic_ntk", "use_logn_attn"] {
        is_limited |= config.bool_or(key, true)?;
    }
    let theta = config.number("rotary_emb_base", THETA)?;
    let defaults = Defaults {
        sizes: Some(Sizes::new(151_936, 4096, 22_016, 32, 32, 8192)),
        rope: RopeDefaults {
            theta: theta.unwrap_or(10_000.0),
            partial_rotary_factor: Some(1.0),
            ..Defaults::LLAMA.rope
        },
        keys: Keys {
            num_kv_heads: Keys::LLAMA.num_heads,
            positions: match is_limited {
                true => SEQ_LENGTH,
                false => Keys::LLAMA.positions,
            },
            norm_eps: "layer_norm_epsilon",
            ..Keys::LLAMA
        },
        ..Defaults::LLAMA
    };
    let mut told = config.clone();
    for (key, ours) in [
        ("kv_channels", "head_dim"),
        ("rotary_pct", "partial_rotary_factor"),
    ] {
        if let Some(value) = config.get(key) {
            told = told.with(ours, json!(value));
        }
    }
    let mut dimensions = Dimensions::from_config(&told, &defaults)?;
    if !dimensions.intermediate_size.is_multiple_of(2) {
        let expected = "an even number, of gates and ups";
        return Err(config.unexpected(INNER, dimensions.intermediate_size, expected));
    }
    dimensions.intermediate_size /= 2;
    let (hidden, inner) = (dimensions.hidden_size, dimensions.intermediate_size);
    let [q, ..] = dimensions.qkv_widths();
    let has_bias = !config.bool_or("no_bias", true)?;
    let mut layer = dimensions.llama_layer();
    layer.norms = Norms::before("ln_1", "ln_2");
    layer.attention.qkv = dimensions.fused_qkv("attn.c_attn").with_bias(true);
    layer.attention.o = Projection::single("attn.c_proj", hidden, q).with_bias(has_bias);
    let gate_up = [("mlp.w2", inner), ("mlp.w1", inner)];
    layer.feed_forward = FeedForward::Gated {
        gate_up: Projection::stacked(&gate_up, hidden, Stacking::Interleaved),
        activation: dimensions.activation,
        down: Projection::single("mlp.c_proj", hidden, inner),
    };
    layer.feed_forward.set_biases(has_bias);
    let windows = no_windows(dimensions.num_layers);
    Ok(ModelSpec {
        modules: ModelModules {
            embedding: "transformer.wte",
            layers: "transformer.h",
            first_layer: 0,
            layers_per_module: 1,
            final_norm: Some("transformer.ln_f"),
            output_layer: "lm_head",
        },
        ..dimensions.model(FAMILY.class, layer, windows)
    })
}
