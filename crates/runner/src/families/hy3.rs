//! Hy3, by Tencent.
//!
//! Llama with norms of each query and key head, and experts as DeepSeek-V3 has them, without groups: those with the
//! largest sigmoids, to which a correction of each expert is added for the choice alone; weights are divided by their
//! sum and multiplied by `router_scaling_factor`. `mlp_layer_types` lists the layers with experts; by default the first
//! one has none. The layer behind the last one, for predicting several tokens, is not used.
//!
//! Source: configuration_hy_v3.py and modeling_hy_v3.py of transformers.

use super::bounds::{MAX_EXPERTS, MAX_LAYERS};
use super::dimensions::{Defaults, Dimensions, Sizes};
use super::experts::{EXPERT_MODULES, ExpertDefaults, ExpertModules, routing, scores_rule, width};
use super::family::Family;
use super::layer_lists::layers_of_kind;
use super::rope_config::RopeDefaults;
use super::windows::no_windows;
use crate::spec::{ExpertsSpec, FeedForward, ModelSpec, QkNormSpec, StackedExperts};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::RouterScores;

pub const FAMILY: Family = Family {
    class: "HYV3ForCausalLM",
    gguf: None,
    describe,
};

const MODULES: ExpertModules = ExpertModules {
    router: "mlp.router.gate",
    stacked: StackedExperts {
        router: "mlp.router.gate",
        ..EXPERT_MODULES.stacked
    },
    ..EXPERT_MODULES
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(120_832, 4096, 13_312, 80, 64, 131_072)),
        num_kv_heads: Some(8),
        head_dim: Some(128),
        norm_eps: 1e-5,
        rope: RopeDefaults {
            theta: 11_158_840.0,
            ..Defaults::LLAMA.rope
        },
        ..Defaults::LLAMA
    };
    check(config)?;
    let dimensions = Dimensions::from_config(config, &defaults)?;
    let num_layers = dimensions.num_layers;
    let mut layer = dimensions.llama_layer();
    layer.attention.qk_norm = Some(QkNormSpec::of_heads(dimensions.norm.eps));
    layer
        .attention
        .set_biases(config.bool_or("attention_bias", false)?);
    let has_bias = config.bool_or("mlp_bias", false)?;
    layer.feed_forward.set_biases(has_bias);
    let experts = experts(config, &dimensions, has_bias)?;
    const TYPES: &str = "mlp_layer_types";
    let has_experts = match config.get(TYPES) {
        Some(types) => layers_of_kind(config, (TYPES, types), num_layers, &[["dense", "sparse"]])?,
        None => (0..num_layers).map(|layer| layer > 0).collect(),
    };
    let mut spec = dimensions.model(FAMILY.class, layer, no_windows(num_layers));
    for (layer, has_experts) in spec.layers.iter_mut().zip(has_experts) {
        if has_experts {
            layer.feed_forward = FeedForward::Experts(experts.clone());
        }
    }
    Ok(spec)
}

/// Refuses what published configs say and transformers ignores, if it is something else.
fn check(config: &JsonFile) -> Result<(), LoadError> {
    const NUM_DENSE: &str = "first_k_dense_replace";
    for key in [
        "qk_norm",
        "route_norm",
        "moe_router_use_sigmoid",
        "moe_router_enable_expert_bias",
    ] {
        if !config.bool_or(key, true)? {
            return Err(config.unexpected(key, false, "supported in this family; only true is"));
        }
    }
    if let Some(other) = config.size(NUM_DENSE, 0..=MAX_LAYERS)?
        && other != 1
        && config.get("mlp_layer_types").is_none()
    {
        let expected =
            "supported in this family, where mlp_layer_types lists dense layers; only 1 is";
        return Err(config.unexpected(NUM_DENSE, other, expected));
    }
    Ok(())
}

fn experts(
    config: &JsonFile,
    dimensions: &Dimensions,
    has_bias: bool,
) -> Result<ExpertsSpec, LoadError> {
    let defaults = ExpertDefaults {
        num_experts: 192,
        num_chosen: 8,
    };
    let scale = config.number("router_scaling_factor", 0.0..=1e6)?;
    let rule = scores_rule(RouterScores::Sigmoid, true, scale.unwrap_or(2.826) as f32);
    let routing = routing(config, &defaults, rule)?;
    let expert_size = width(config, "moe_intermediate_size", 1536)?;
    let mut experts = dimensions.experts(&MODULES, routing, expert_size);
    experts.correction = Some("mlp.expert_bias");
    let num_shared = config.size("num_shared_experts", 1..=MAX_EXPERTS)?;
    let shared = [
        "mlp.shared_mlp.gate_proj",
        "mlp.shared_mlp.up_proj",
        "mlp.shared_mlp.down_proj",
    ];
    let shared_size = num_shared.unwrap_or(1) * expert_size;
    let mut shared = dimensions.shared_expert(shared, shared_size);
    (shared.gate_up.has_bias, shared.down.has_bias) = (has_bias, has_bias);
    experts.shared = Some(shared);
    Ok(experts)
}
