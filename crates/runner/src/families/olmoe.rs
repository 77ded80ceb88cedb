//! OLMoE, by Ai2.
//!
//! Llama with experts in place of each feed-forward block: eight of 64, weighted by the softmax of all logits, which is
//! divided by the sum of the chosen ones only if `norm_topk_prob` says so. Queries and keys are normalised over all of
//! their heads together. `attention_bias` adds biases to all four projections of attention. `clip_qkv`, which bounds
//! queries, keys and values, is not supported; released models do not set it.
//!
//! Source: modeling_olmoe.py of transformers; Muennighoff et al., arXiv:2409.02060.

use super::dimensions::{Defaults, Dimensions, Sizes};
use super::experts::{EXPERT_MODULES, ExpertDefaults, routing, softmax_rule};
use super::family::Family;
use super::gguf::{GgufArchitecture, GgufExperts};
use super::windows::no_windows;
use crate::spec::{FeedForward, ModelSpec, QkNormSpec};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::QkNormKind;

pub const FAMILY: Family = Family {
    class: "OlmoeForCausalLM",
    gguf: Some(GgufArchitecture {
        experts: Some(GgufExperts::softmax(false)),
        ..GgufArchitecture::named("olmoe")
    }),
    describe,
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    const CLIP: &str = "clip_qkv";
    if let Some(bound) = config.get(CLIP) {
        return Err(config.unexpected(CLIP, bound, "supported; null is"));
    }
    let defaults = Defaults {
        sizes: Some(Sizes::new(50_304, 2048, 2048, 16, 16, 4096)),
        norm_eps: 1e-5,
        ..Defaults::LLAMA
    };
    let dimensions = Dimensions::from_config(config, &defaults)?;
    let experts = ExpertDefaults {
        num_experts: 64,
        num_chosen: 8,
    };
    let routing = routing(config, &experts, softmax_rule(config)?)?;
    let mut layer = dimensions.llama_layer();
    layer
        .attention
        .set_biases(config.bool_or("attention_bias", false)?);
    layer.attention.qk_norm = Some(QkNormSpec {
        q: "self_attn.q_norm",
        k: "self_attn.k_norm",
        kind: QkNormKind::Row,
        has_values: false,
        eps: dimensions.norm.eps,
    });
    let expert_size = dimensions.intermediate_size;
    let experts = dimensions.experts(&EXPERT_MODULES, routing, expert_size);
    layer.feed_forward = FeedForward::Experts(experts);
    let windows = no_windows(dimensions.num_layers);
    Ok(dimensions.model(FAMILY.class, layer, windows))
}
