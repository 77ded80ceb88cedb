//! Kolibri 1, by Aleph Alpha.
//!
//! Norms in front of both blocks and behind them, and of each query and key head. Four of five layers have a window
//! (`layer_types`), and the others no position embedding; without a `sliding_window` all layers have one.
//!
//! All layers have experts: those with the largest logits, to which a correction of each expert is added for the choice
//! alone. Weights are sigmoids, divided by their sum if `norm_topk_prob` says so. One more expert has all tokens.
//!
//! Source: configuration_kolibri1.py and modeling_kolibri1.py of transformers.

use super::dimensions::{Defaults, Dimensions, Sizes};
use super::experts::{EXPERT_MODULES, ExpertDefaults, routing, scores_rule, width};
use super::family::Family;
use super::windows::{window_or, windowed_except_every};
use crate::rope::Rope;
use crate::spec::{BlockNorms, ExpertsSpec, FeedForward, ModelSpec, Norms, QkNormSpec};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::RouterScores;

pub const FAMILY: Family = Family {
    class: "Kolibri1ForCausalLM",
    gguf: None,
    describe,
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    const WINDOW: &str = "sliding_window";
    let defaults = Defaults {
        // No layer has a block of an intermediate size.
        sizes: Some(Sizes::new(128_000, 2560, 512, 50, 48, 262_144)),
        num_kv_heads: Some(4),
        head_dim: Some(128),
        ..Defaults::LLAMA
    };
    let dimensions = Dimensions::from_config(config, &defaults)?;
    let is_windowed = windowed_except_every(config, dimensions.num_layers, 5)?;
    let window = window_or(config, 513)?;
    if window.is_none() && is_windowed.contains(&true) {
        let expected = "a number, as layers have a window";
        return Err(config.unexpected(WINDOW, "null", expected));
    }
    let mut layer = dimensions.llama_layer();
    layer.norms = Norms::Sequential {
        attention: BlockNorms {
            before: Some("input_layernorm"),
            after: Some("post_attn_norm"),
        },
        feed_forward: BlockNorms {
            before: Some("post_attention_layernorm"),
            after: Some("post_ffn_norm"),
        },
    };
    layer.attention.qk_norm = Some(QkNormSpec::of_heads(dimensions.norm.eps));
    layer.feed_forward = FeedForward::Experts(experts(config, &dimensions)?);
    let windows: Vec<_> = is_windowed
        .iter()
        .map(|&is| window.filter(|_| is))
        .collect();
    let mut spec = dimensions.model(FAMILY.class, layer, windows);
    for layer in &mut spec.layers {
        if window.is_some() && layer.attention.window.is_none() {
            layer.attention.rope = Rope::none();
        }
    }
    Ok(spec)
}

fn experts(config: &JsonFile, dimensions: &Dimensions) -> Result<ExpertsSpec, LoadError> {
    let is_normalised = config.bool_or("norm_topk_prob", false)?;
    let rule = scores_rule(RouterScores::SigmoidOfLogit, is_normalised, 1.0);
    let defaults = ExpertDefaults {
        num_experts: 384,
        num_chosen: 6,
    };
    let routing = routing(config, &defaults, rule)?;
    let expert_size = width(config, "moe_intermediate_size", 512)?;
    let shared_size = width(config, "shared_expert_intermediate_size", 512)?;
    let mut experts = dimensions.experts(&EXPERT_MODULES, routing, expert_size);
    experts.correction = Some("moe.router.expert_bias");
    let shared = [
        "mlp.shared_experts.gate_proj",
        "mlp.shared_experts.up_proj",
        "mlp.shared_experts.down_proj",
    ];
    experts.shared = Some(dimensions.shared_expert(shared, shared_size));
    Ok(experts)
}
