//! Flint, by Recursive.
//!
//! Qwen 3 with attention-sink logits and, in most layers, a window: the first two layers have none, nor has every
//! fourth one or the last (`layer_types`). Layers without a window have no position embedding.
//!
//! All layers that `mlp_only_layers` does not list have experts: the ones with the largest sigmoids, whose weights are
//! divided by their sum (`norm_topk_prob`), and one that all tokens have.
//!
//! Source: configuration_flint.py and modeling_flint.py of transformers.

use serde_json::json;

use super::dimensions::{Defaults, Dimensions, Sizes};
use super::experts::{
    EXPERT_MODULES, ExpertDefaults, SHARED_EXPERT, layers_with_experts, routing, scores_rule, width,
};
use super::family::Family;
use super::windows::{windowed_layers, windows_of};
use crate::rope::Rope;
use crate::spec::{ExpertsSpec, FeedForward, ModelSpec, QkNormSpec};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::RouterScores;

pub const FAMILY: Family = Family {
    class: "FlintForCausalLM",
    gguf: None,
    describe,
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    const DENSE: &str = "mlp_only_layers";
    let defaults = Defaults {
        sizes: Some(Sizes::new(150_144, 2048, 6144, 49, 32, 262_144)),
        num_kv_heads: Some(4),
        head_dim: Some(128),
        ..Defaults::LLAMA
    };
    let dimensions = Dimensions::from_config(config, &defaults)?;
    let num_layers = dimensions.num_layers;
    let dense: Vec<usize> = (0..num_layers.min(2)).collect();
    let dense = config.get(DENSE).cloned().unwrap_or_else(|| json!(dense));
    let has_experts = layers_with_experts(&config.with(DENSE, dense), num_layers)?;
    let is_windowed = match config.get("layer_types") {
        Some(_) => windowed_layers(config, num_layers, 0)?,
        None => (0..num_layers)
            .map(|layer| layer >= 2 && layer % 4 != 1 && layer + 1 < num_layers)
            .collect(),
    };
    let windows = windows_of(config, &is_windowed, 513)?;
    let experts = experts(config, &dimensions)?;
    let mut layer = dimensions.llama_layer();
    let attention = &mut layer.attention;
    attention.qk_norm = Some(QkNormSpec::of_heads(dimensions.norm.eps));
    attention.set_biases(config.bool_or("attention_bias", false)?);
    attention.sink_logits = Some("self_attn.softmax_offset");
    let mut spec = dimensions.model(FAMILY.class, layer, windows);
    for (layer, has_experts) in spec.layers.iter_mut().zip(has_experts) {
        if layer.attention.window.is_none() {
            layer.attention.rope = Rope::none();
        }
        if has_experts {
            layer.feed_forward = FeedForward::Experts(experts.clone());
        }
    }
    Ok(spec)
}

fn experts(config: &JsonFile, dimensions: &Dimensions) -> Result<ExpertsSpec, LoadError> {
    let is_normalised = config.bool_or("norm_topk_prob", true)?;
    let rule = scores_rule(RouterScores::Sigmoid, is_normalised, 1.0);
    let defaults = ExpertDefaults {
        num_experts: 256,
        num_chosen: 6,
    };
    let routing = routing(config, &defaults, rule)?;
    let expert_size = width(config, "moe_intermediate_size", 512)?;
    let shared_size = width(config, "shared_expert_intermediate_size", 1024)?;
    let mut experts = dimensions.experts(&EXPERT_MODULES, routing, expert_size);
    experts.shared = Some(dimensions.shared_expert(SHARED_EXPERT, shared_size));
    Ok(experts)
}
