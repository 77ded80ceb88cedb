//! ERNIE 4.5, by Baidu.
//!
//! Llama whose RoPE rotates neighbouring elements of a head. `use_bias` adds biases to all projections of a layer,
//! except the experts', and, in a model with experts, to the output layer.
//!
//! Layers from `moe_layer_start_index` to `moe_layer_end_index` have experts, of these every `moe_layer_interval`-th
//! one: those with the largest softmax, to which a correction of each expert is added for the choice alone; weights are
//! divided by their sum. Experts that all tokens have are one wide block.
//!
//! Source: configuration_*.py and modeling_*.py of ernie4_5 and ernie4_5_moe of transformers.

use serde_json::{Map, Value as Json, json};

use super::bounds::{MAX_EXPERTS, MAX_LAYERS};
use super::dimensions::{Defaults, Dimensions, Sizes};
use super::experts::{EXPERT_MODULES, ExpertDefaults, routing_of, scores_rule, width};
use super::family::Family;
use super::gguf::{GgufArchitecture, GgufConfig, GgufExperts};
use super::rope_config::RopeDefaults;
use super::windows::no_windows;
use crate::spec::{ExpertsSpec, FeedForward, LayerSpec, ModelSpec};
use inflight_base::LoadError;
use inflight_checkpoint::{JsonFile, RotaryPairs};
use inflight_device::RouterScores;

pub const FAMILY: Family = Family {
    class: "Ernie4_5ForCausalLM",
    gguf: Some(GgufArchitecture::named("ernie4_5")),
    describe,
};

pub const MOE: Family = Family {
    class: "Ernie4_5_MoeForCausalLM",
    gguf: Some(GgufArchitecture {
        modules: &[("mlp.moe_statics.e_score_correction_bias", "exp_probs_b")],
        keys: &[
            ("expert_used_count", "moe_k"),
            ("expert_shared_count", "moe_num_shared_experts"),
            ("leading_dense_block_count", "moe_layer_start_index"),
            ("interleave_moe_layer_step", "moe_layer_interval"),
        ],
        experts: Some(GgufExperts::softmax(true)),
        add_read: add_last_layer,
        optional_biases: &[("use_bias", "self_attn.o_proj")],
        ..GgufArchitecture::named("ernie4_5-moe")
    }),
    describe: describe_moe,
};

/// Adds what the metadata do not tell of the layers with experts: the last one. Shared experts are 0 if they do not.
fn add_last_layer(gguf: &GgufConfig<'_>, config: &mut Map<String, Json>) -> Result<(), LoadError> {
    let has_experts = gguf.layers_with_tensor("ffn_gate_inp.weight")?;
    if let Some(last) = has_experts.iter().rposition(|&has| has) {
        config.insert("moe_layer_end_index".to_owned(), json!(last));
    }
    config.entry("moe_num_shared_experts").or_insert(json!(0));
    Ok(())
}

const DEFAULTS: Defaults = Defaults {
    norm_eps: 1e-5,
    rope: RopeDefaults {
        theta: 500_000.0,
        ..Defaults::LLAMA.rope
    },
    tied_embeddings: true,
    ..Defaults::LLAMA
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(103_424, 1024, 3072, 18, 16, 131_072)),
        num_kv_heads: Some(2),
        head_dim: Some(128),
        ..DEFAULTS
    };
    let (dimensions, layer) = dense(config, &defaults)?;
    let windows = no_windows(dimensions.num_layers);
    Ok(dimensions.model(FAMILY.class, layer, windows))
}

fn describe_moe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(103_424, 2560, 12_288, 28, 20, 131_072)),
        num_kv_heads: Some(4),
        ..DEFAULTS
    };
    let (dimensions, layer) = dense(config, &defaults)?;
    let experts = experts(config, &dimensions)?;
    let has_experts = layers_with_experts(config, dimensions.num_layers)?;
    let windows = no_windows(dimensions.num_layers);
    let mut spec = dimensions.model(MOE.class, layer, windows);
    spec.output_bias = config.bool_or("use_bias", false)?;
    for (layer, has_experts) in spec.layers.iter_mut().zip(has_experts) {
        if has_experts {
            layer.feed_forward = FeedForward::Experts(experts.clone());
        }
    }
    Ok(spec)
}

/// A layer without experts.
fn dense(config: &JsonFile, defaults: &Defaults) -> Result<(Dimensions, LayerSpec), LoadError> {
    let mut dimensions = Dimensions::from_config(config, defaults)?;
    dimensions.rotary_pairs = RotaryPairs::Adjacent;
    let mut layer = dimensions.llama_layer();
    let use_bias = config.bool_or("use_bias", false)?;
    layer.attention.set_biases(use_bias);
    layer.feed_forward.set_biases(use_bias);
    Ok((dimensions, layer))
}

fn experts(config: &JsonFile, dimensions: &Dimensions) -> Result<ExpertsSpec, LoadError> {
    // The least divisor of weights. Here they are divided by their sum, which is larger unless all chosen experts have
    // almost no probability.
    config.number("moe_norm_min", 0.0..=1e-6)?;
    let defaults = ExpertDefaults {
        num_experts: 64,
        num_chosen: 6,
    };
    let rule = scores_rule(RouterScores::Softmax, true, 1.0);
    let keys = (["moe_num_experts", "num_experts"], "moe_k");
    let routing = routing_of(config, keys, &defaults, rule)?;
    let expert_size = width(config, "moe_intermediate_size", 1536)?;
    let mut experts = dimensions.experts(&EXPERT_MODULES, routing, expert_size);
    experts.correction = Some("mlp.moe_statics.e_score_correction_bias");
    let num_shared = config.size("moe_num_shared_experts", 0..=MAX_EXPERTS)?;
    if let num_shared @ 1.. = num_shared.unwrap_or(2) {
        let mut shared = dimensions.shared_experts(num_shared, expert_size);
        let use_bias = config.bool_or("use_bias", false)?;
        (shared.gate_up.has_bias, shared.down.has_bias) = (use_bias, use_bias);
        experts.shared = Some(shared);
    }
    Ok(experts)
}

fn layers_with_experts(config: &JsonFile, num_layers: usize) -> Result<Vec<bool>, LoadError> {
    const LAST: &str = "moe_layer_end_index";
    let first = config.size("moe_layer_start_index", 0..=MAX_LAYERS)?;
    let is_last = config
        .get(LAST)
        .is_some_and(|last| last.as_i64() == Some(-1));
    let last = match is_last {
        true => None,
        false => config.size(LAST, 0..=MAX_LAYERS)?,
    };
    let interval = config.size("moe_layer_interval", 1..=MAX_LAYERS)?;
    let layers = first.unwrap_or(1)..=last.unwrap_or(num_layers);
    let has_experts =
        |layer: usize| layers.contains(&layer) && (layer + 1).is_multiple_of(interval.unwrap_or(1));
    Ok((0..num_layers).map(has_experts).collect())
}
