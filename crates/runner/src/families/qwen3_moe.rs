//! Qwen 3 MoE, such as Qwen3-30B-A3B and Qwen3-235B-A22B.
//!
//! Qwen 3 with experts in place of the feed-forward block of most layers: eight of 128, as in
//! [Qwen 2 MoE](super::qwen2_moe) but without a shared one. With `use_sliding_window`, all layers have the window.
//!
//! Source: modeling_qwen3_moe.py and configuration_qwen3_moe.py of transformers; Yang et al., arXiv:2505.09388.

use super::dimensions::{Defaults, Dimensions, Sizes};
use super::experts::{
    EXPERT_MODULES, ExpertDefaults, layers_with_experts, routing, softmax_rule, width,
};
use super::family::Family;
use super::gguf::{GgufArchitecture, GgufExperts};
use super::windows::{no_windows, windows_in_all_layers};
use crate::spec::{FeedForward, ModelSpec, QkNormSpec};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;

pub const FAMILY: Family = Family {
    class: "Qwen3MoeForCausalLM",
    gguf: Some(GgufArchitecture {
        experts: Some(GgufExperts::softmax(true)),
        ..GgufArchitecture::named("qwen3moe")
    }),
    describe,
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(151_936, 2048, 6144, 24, 32, 32_768)),
        num_kv_heads: Some(4),
        ..Defaults::LLAMA
    };
    let dimensions = Dimensions::from_config(config, &defaults)?;
    let experts = ExpertDefaults {
        num_experts: 128,
        num_chosen: 8,
    };
    let routing = routing(config, &experts, softmax_rule(config)?)?;
    let mut layer = dimensions.llama_layer();
    layer.attention.qk_norm = Some(QkNormSpec::of_heads(dimensions.norm.eps));
    layer
        .attention
        .set_biases(config.bool_or("attention_bias", false)?);
    let expert_size = width(config, "moe_intermediate_size", 768)?;
    let experts = dimensions.experts(&EXPERT_MODULES, routing, expert_size);

    let num_layers = dimensions.num_layers;
    let has_experts = layers_with_experts(config, num_layers)?;
    let windows = match config.bool_or("use_sliding_window", false)? {
        true => windows_in_all_layers(config, num_layers)?,
        false => no_windows(num_layers),
    };
    let mut spec = dimensions.model(FAMILY.class, layer, windows);
    for (layer, has_experts) in spec.layers.iter_mut().zip(has_experts) {
        if has_experts {
            layer.feed_forward = FeedForward::Experts(experts.clone());
        }
    }
    Ok(spec)
}
