//! Qwen 1.5 MoE and Qwen 2 MoE.
//!
//! Qwen 2 with experts in place of the feed-forward block of most layers: four of sixty, each narrow
//! (`moe_intermediate_size`), weighted by the softmax of all logits, which is divided by the sum of the chosen ones
//! only if `norm_topk_prob` says so. All tokens have one more expert, whose result is multiplied by the sigmoid of a
//! gate of its own. Layers that `mlp_only_layers` lists, and those between every `decoder_sparse_step`-th, have no
//! experts.
//!
//! `qkv_bias` says whether queries, keys and values have biases. With `use_sliding_window`, every second one of the
//! first `max_window_layers` layers has a window, if `layer_types` does not list them.
//!
//! Source: modeling_qwen2_moe.py and configuration_qwen2_moe.py of transformers; Yang et al., arXiv:2407.10671.

use std::num::NonZeroU32;

use super::bounds::MAX_LAYERS;
use super::dimensions::{Defaults, Dimensions, Sizes};
use super::experts::{ExpertDefaults, layers_with_experts, routing, softmax_rule, width};
use super::family::Family;
use super::gguf::{GgufArchitecture, GgufExperts};
use super::windows::{no_windows, windows_in_all_layers, windows_in_some_layers};
use crate::spec::{FeedForward, ModelSpec};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;

pub const FAMILY: Family = Family {
    class: "Qwen2MoeForCausalLM",
    gguf: Some(GgufArchitecture {
        experts: Some(GgufExperts::softmax(false)),
        ..GgufArchitecture::named("qwen2moe")
    }),
    describe,
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(151_936, 2048, 5632, 24, 16, 32_768)),
        num_kv_heads: Some(16),
        ..Defaults::LLAMA
    };
    let dimensions = Dimensions::from_config(config, &defaults)?;
    let experts = ExpertDefaults {
        num_experts: 60,
        num_chosen: 4,
    };
    let routing = routing(config, &experts, softmax_rule(config)?)?;
    let mut layer = dimensions.llama_layer();
    layer.attention.qkv.has_bias = config.bool_or("qkv_bias", true)?;
    let expert_size = width(config, "moe_intermediate_size", 1408)?;
    let shared_size = width(config, "shared_expert_intermediate_size", 5632)?;
    let experts = dimensions.experts_beside_a_gated_one(routing, expert_size, shared_size);

    let has_experts = layers_with_experts(config, dimensions.num_layers)?;
    let windows = windows(config, dimensions.num_layers)?;
    let mut spec = dimensions.model(FAMILY.class, layer, windows);
    for (layer, has_experts) in spec.layers.iter_mut().zip(has_experts) {
        if has_experts {
            layer.feed_forward = FeedForward::Experts(experts.clone());
        }
    }
    Ok(spec)
}

fn windows(config: &JsonFile, num_layers: usize) -> Result<Vec<Option<NonZeroU32>>, LoadError> {
    if !config.bool_or("use_sliding_window", false)? {
        return Ok(no_windows(num_layers));
    }
    if config.get("layer_types").is_some() {
        return windows_in_some_layers(config, num_layers);
    }
    let num_windowed = config
        .size("max_window_layers", 0..=MAX_LAYERS)?
        .unwrap_or(28);
    let windows = windows_in_all_layers(config, num_layers)?
        .into_iter()
        .enumerate();
    let is_windowed = |layer: usize| layer.is_multiple_of(2) && layer < num_windowed;
    Ok(windows
        .map(|(layer, window)| window.filter(|_| is_windowed(layer)))
        .collect())
}
