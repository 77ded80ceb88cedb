//! gpt-oss, by OpenAI.
//!
//! Four experts for each token, weighted by the softmax of their logits. Their gates are clamped ([`Gating::Clamped`]),
//! and they have biases, as attention (`attention_bias`) and the router have. The weights of all experts of a layer are
//! in one tensor, as rows of inputs with gate and up taking turns, or in MXFP4 (`quant_method: mxfp4`). Each query head
//! has a learned attention-sink logit, which only adds to the sum that its probabilities are divided by. Every second
//! layer, from the first on, has a window, if `layer_types` does not list them. YaRN's ramp is not rounded to whole
//! pairs.
//!
//! Source: modeling_gpt_oss.py and configuration_gpt_oss.py of transformers; OpenAI, gpt-oss model card,
//! arXiv:2508.10925.

use std::num::NonZeroU32;

use serde_json::json;

use super::dimensions::{Defaults, Dimensions, Sizes};
use super::experts::{ExpertDefaults, ExpertModules, routing};
use super::family::Family;
use super::gguf::{GgufArchitecture, GgufExperts};
use super::rope_config::RopeDefaults;
use super::windows::windows_except_every;
use crate::rope::RopeScaling;
use crate::spec::{FeedForward, ModelSpec, StackedExperts, StackedLayout};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::{Gating, RoutingRule};

pub const FAMILY: Family = Family {
    class: "GptOssForCausalLM",
    gguf: Some(GgufArchitecture {
        modules: &[
            ("self_attn.sinks", "attn_sinks"),
            ("post_attention_layernorm", "post_attention_norm"),
            ("mlp.router", "ffn_gate_inp"),
        ],
        has_windows: true,
        experts: Some(GgufExperts::softmax(true)),
        unstacks_experts: true,
        add_fixed: |config| {
            // Published models have it; no metadata tell it.
            if let Some(rope) = config.get_mut("rope_parameters") {
                rope["truncate"] = json!(false);
            }
        },
        ..GgufArchitecture::named("gpt-oss")
    }),
    describe,
};

const MODULES: ExpertModules = ExpertModules {
    router: "mlp.router",
    gate: "mlp.experts.gate_up_proj",
    up: "mlp.experts.gate_up_proj",
    down: "mlp.experts.down_proj",
    stacked: StackedExperts {
        router: "mlp.router",
        gate_up: "mlp.experts.gate_up_proj",
        down: "mlp.experts.down_proj",
        layout: StackedLayout::Inputs,
    },
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(201_088, 2880, 2880, 36, 64, 131_072)),
        num_kv_heads: Some(8),
        head_dim: Some(64),
        norm_eps: 1e-5,
        rope: RopeDefaults {
            theta: 150_000.0,
            ..Defaults::LLAMA.rope
        },
        ..Defaults::LLAMA
    };
    let mut dimensions = Dimensions::from_config(config, &defaults)?;
    if config.get("rope_parameters").is_none() && config.get("rope_scaling").is_none() {
        dimensions.rope.scaling = RopeScaling::Yarn {
            factor: 32.0,
            attention_factor: 0.1 * 32_f64.ln() + 1.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_len: 4096.0,
            truncate: false,
        };
    }
    let experts = ExpertDefaults {
        num_experts: 128,
        num_chosen: 4,
    };
    let rule = RoutingRule::Softmax {
        is_normalised: true,
    };
    let routing = routing(config, &experts, rule)?;
    let mut experts = dimensions.experts(&MODULES, routing, dimensions.intermediate_size);
    experts.gating = Gating::Clamped {
        alpha: config.number("swiglu_alpha", 1e-3..=1e3)?.unwrap_or(1.702) as f32,
        limit: config.number("swiglu_limit", 1e-3..=1e6)?.unwrap_or(7.0) as f32,
    };
    experts.router.has_bias = true;
    experts.gate_up.has_bias = true;
    experts.down.has_bias = true;
    let mut layer = dimensions.llama_layer();
    layer
        .attention
        .set_biases(config.bool_or("attention_bias", true)?);
    layer.attention.sink_logits = Some("self_attn.sinks");
    layer.feed_forward = FeedForward::Experts(experts);
    let mut windows = windows_except_every(config, dimensions.num_layers, 2)?;
    if !config.has("sliding_window") {
        for window in windows.iter_mut().flatten() {
            *window = NonZeroU32::new(128).unwrap_or(*window);
        }
    }
    Ok(dimensions.model(FAMILY.class, layer, windows))
}
