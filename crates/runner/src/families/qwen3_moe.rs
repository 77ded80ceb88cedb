//! Qwen 3 MoE, such as Qwen3-30B-A3B and Qwen3-235B-A22B, and Mellum 2, by JetBrains.
//!
//! Qwen 3 with experts in place of the feed-forward block of most layers: eight of 128, as in
//! [Qwen 2 MoE](super::qwen2_moe) but without a shared one. With `use_sliding_window`, all layers have the window.
//!
//! `layer_types` of Mellum 2 lists the layers with a window, which have their own section of `rope_parameters`, and
//! `mlp_layer_types` the dense ones. Its module for predicting several tokens is not used.
//!
//! Source: modeling_*.py and configuration_*.py of qwen3_moe and mellum of transformers; Yang et al., arXiv:2505.09388.

use super::dimensions::{Defaults, Dimensions, Sizes};
use super::experts::{
    EXPERT_MODULES, ExpertDefaults, layers_with_experts, routing, softmax_rule, width,
};
use super::family::Family;
use super::gguf::{GgufArchitecture, GgufExperts};
use super::layer_lists::layers_of_kind;
use super::rope_config::{RopeDefaults, rope_of, section_of};
use super::windows::{
    no_windows, set_rope_of_windows, windowed_layers, windows_in_all_layers, windows_of,
};
use crate::spec::{ExpertsSpec, FeedForward, LayerSpec, ModelSpec, QkNormSpec, StackedLayout};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::RoutingRule;

pub const FAMILY: Family = Family {
    class: "Qwen3MoeForCausalLM",
    gguf: Some(GgufArchitecture {
        experts: Some(GgufExperts::softmax(true)),
        ..GgufArchitecture::named("qwen3moe")
    }),
    describe: |config| describe_qwen3(config, 128),
};

/// The language model of Qwen3-VL, which may store experts as rows of inputs.
pub const OF_VL: Family = Family {
    describe: |config| {
        let mut spec = describe_qwen3(config, 60)?;
        for layer in &mut spec.layers {
            if let FeedForward::Experts(experts) = &mut layer.feed_forward {
                experts.stacked.layout = StackedLayout::InputsInParts;
            }
        }
        Ok(spec)
    },
    ..FAMILY
};

pub const MELLUM: Family = Family {
    class: "MellumForCausalLM",
    gguf: None,
    describe: describe_mellum,
};

/// The position embedding of layers without windows.
const MELLUM_ROPE: RopeDefaults = RopeDefaults {
    theta: 500_000.0,
    partial_rotary_factor: Some(1.0),
    section: Some("full_attention"),
    ..Defaults::LLAMA.rope
};

/// `num_experts`: how many there are where config.json is silent.
fn describe_qwen3(config: &JsonFile, num_experts: usize) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(151_936, 2048, 6144, 24, 32, 32_768)),
        num_kv_heads: Some(4),
        ..Defaults::LLAMA
    };
    let dimensions = Dimensions::from_config(config, &defaults)?;
    let num_layers = dimensions.num_layers;
    let experts = experts(
        config,
        &dimensions,
        [num_experts, 768],
        softmax_rule(config)?,
    )?;
    let has_experts = layers_with_experts(config, num_layers)?;
    let windows = match config.bool_or("use_sliding_window", false)? {
        true => windows_in_all_layers(config, num_layers)?,
        false => no_windows(num_layers),
    };
    let layer = layer(config, &dimensions)?;
    let mut spec = dimensions.model(FAMILY.class, layer, windows);
    set_experts(&mut spec, &experts, &has_experts);
    Ok(spec)
}

fn describe_mellum(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(98_304, 2304, 7168, 28, 32, 131_072)),
        num_kv_heads: Some(4),
        head_dim: Some(128),
        rope: MELLUM_ROPE,
        ..Defaults::LLAMA
    };
    let dimensions = Dimensions::from_config(config, &defaults)?;
    let num_layers = dimensions.num_layers;
    let rule = RoutingRule::Softmax {
        is_normalised: config.bool_or("norm_topk_prob", true)?,
    };
    let experts = experts(config, &dimensions, [64, 896], rule)?;
    const TYPES: &str = "mlp_layer_types";
    let has_experts = match config.get(TYPES) {
        Some(types) => layers_of_kind(config, (TYPES, types), num_layers, &[["dense", "sparse"]])?,
        None => vec![true; num_layers],
    };
    let windows = match config.get("layer_types") {
        Some(_) => windows_of(config, &windowed_layers(config, num_layers, 0)?, 1024)?,
        None => no_windows(num_layers),
    };
    let local = section_of(config, "sliding_attention")?;
    let local = rope_of(
        config,
        local.as_ref(),
        Some(10_000.0),
        dimensions.max_position_embeddings,
        dimensions.head_dim,
        MELLUM_ROPE,
    )?;
    let layer = layer(config, &dimensions)?;
    let mut spec = dimensions.model(MELLUM.class, layer, windows);
    set_rope_of_windows(&mut spec, &local);
    set_experts(&mut spec, &experts, &has_experts);
    Ok(spec)
}

/// A layer with a dense block.
fn layer(config: &JsonFile, dimensions: &Dimensions) -> Result<LayerSpec, LoadError> {
    let mut layer = dimensions.llama_layer();
    layer.attention.qk_norm = Some(QkNormSpec::of_heads(dimensions.norm.eps));
    layer
        .attention
        .set_biases(config.bool_or("attention_bias", false)?);
    Ok(layer)
}

/// The experts of a layer, with the defaults of their number and width.
fn experts(
    config: &JsonFile,
    dimensions: &Dimensions,
    [num_experts, expert_size]: [usize; 2],
    rule: RoutingRule,
) -> Result<ExpertsSpec, LoadError> {
    let defaults = ExpertDefaults {
        num_experts,
        num_chosen: 8,
    };
    let routing = routing(config, &defaults, rule)?;
    let expert_size = width(config, "moe_intermediate_size", expert_size)?;
    Ok(dimensions.experts(&EXPERT_MODULES, routing, expert_size))
}

fn set_experts(spec: &mut ModelSpec, experts: &ExpertsSpec, has_experts: &[bool]) {
    for (layer, has_experts) in spec.layers.iter_mut().zip(has_experts) {
        if *has_experts {
            layer.feed_forward = FeedForward::Experts(experts.clone());
        }
    }
}
