//! AFMoE, the Trinity models, by Arcee AI.
//!
//! Llama with norms in front of and behind each block, and of each head of queries and keys, whose attention has gates,
//! by a projection of their own. Three of four layers have a window (`global_attn_every_n_layers`, or `layer_types`),
//! and the others no position embedding. `mup_enabled` multiplies embedded tokens by the root of the hidden size.
//!
//! Layers behind the first, `num_dense_layers`, have experts: those with the largest sigmoids, to which a correction of
//! each expert is added for the choice alone; weights are divided by their sum and multiplied by `route_scale`. Experts
//! that all tokens have are one wide block.
//!
//! Source: configuration_afmoe.py and modeling_afmoe.py of transformers.

use std::num::NonZeroU32;

use serde_json::json;

use super::bounds::{MAX_EXPERTS, MAX_LAYERS};
use super::dimensions::{Defaults, Dimensions, Sizes};
use super::experts::{EXPERT_MODULES, ExpertDefaults, ExpertModules, routing, scores_rule, width};
use super::family::Family;
use super::gguf::GgufArchitecture;
use super::glm4_moe::SIGMOIDS;
use super::windows::{windowed_except_every, windows_of};
use crate::rope::Rope;
use crate::spec::{
    BlockNorms, ExpertsSpec, FeedForward, GateSpec, LayerSpec, ModelSpec, Norms, Projection,
    QkNormSpec, StackedExperts,
};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::{GateFunction, RouterScores};

pub const FAMILY: Family = Family {
    class: "AfmoeForCausalLM",
    gguf: Some(GgufArchitecture {
        modules: &[
            ("post_attention_layernorm", "post_attention_norm"),
            ("pre_mlp_layernorm", "ffn_norm"),
            ("post_mlp_layernorm", "post_ffw_norm"),
            ("self_attn.gate_proj", "attn_gate"),
            ("mlp.router.gate", "ffn_gate_inp"),
            ("mlp.expert_bias", "exp_probs_b"),
        ],
        keys: &[
            ("expert_shared_count", "num_shared_experts"),
            ("leading_dense_block_count", "num_dense_layers"),
            ("expert_weights_scale", "route_scale"),
            ("expert_weights_norm", "route_norm"),
            ("expert_group_count", "n_group"),
            ("expert_group_used_count", "topk_group"),
        ],
        has_windows: true,
        experts: Some(SIGMOIDS),
        add_fixed: |config| {
            config.insert("mup_enabled".to_owned(), json!(true));
            for key in ["num_shared_experts", "num_dense_layers"] {
                config.entry(key).or_insert(json!(0));
            }
        },
        ..GgufArchitecture::named("afmoe")
    }),
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
        sizes: Some(Sizes::new(200_192, 2048, 6144, 32, 16, 16_384)),
        head_dim: Some(128),
        norm_eps: 1e-5,
        ..Defaults::LLAMA
    };
    let dimensions = Dimensions::from_config(config, &defaults)?;
    let layer = layer(config, &dimensions)?;
    let experts = experts(config, &dimensions)?;
    let num_dense = config.size("num_dense_layers", 0..=MAX_LAYERS)?;
    let windows = windows(config, dimensions.num_layers)?;
    let mut spec = dimensions.model(FAMILY.class, layer, windows);
    if config.bool_or("mup_enabled", false)? {
        spec.embedding_scale = (spec.hidden_size as f32).sqrt();
    }
    for (index, layer) in spec.layers.iter_mut().enumerate() {
        if layer.attention.window.is_none() {
            layer.attention.rope = Rope::none();
        }
        if index >= num_dense.unwrap_or(1) {
            layer.feed_forward = FeedForward::Experts(experts.clone());
        }
    }
    Ok(spec)
}

fn windows(config: &JsonFile, num_layers: usize) -> Result<Vec<Option<NonZeroU32>>, LoadError> {
    let interval = config.size("global_attn_every_n_layers", 1..=MAX_LAYERS)?;
    let is_windowed = windowed_except_every(config, num_layers, interval.unwrap_or(4))?;
    windows_of(config, &is_windowed, 1024)
}

fn layer(config: &JsonFile, dimensions: &Dimensions) -> Result<LayerSpec, LoadError> {
    let mut layer = dimensions.llama_layer();
    layer.norms = Norms::Sequential {
        attention: BlockNorms {
            before: Some("input_layernorm"),
            after: Some("post_attention_layernorm"),
        },
        feed_forward: BlockNorms {
            before: Some("pre_mlp_layernorm"),
            after: Some("post_mlp_layernorm"),
        },
    };
    let attention = &mut layer.attention;
    attention.set_biases(config.bool_or("attention_bias", false)?);
    attention.qk_norm = Some(QkNormSpec::of_heads(dimensions.norm.eps));
    let [q, ..] = dimensions.qkv_widths();
    let gate = Projection::single("self_attn.gate_proj", q, dimensions.hidden_size);
    // Without biases, whatever the others have.
    attention.gate = Some(GateSpec {
        projection: gate,
        function: GateFunction::Sigmoid,
    });
    Ok(layer)
}

/// Refuses what published configs say and transformers ignores, if it is something else.
fn check_experts(config: &JsonFile) -> Result<(), LoadError> {
    const SCORES: &str = "score_func";
    const IS_NORMALISED: &str = "route_norm";
    if let Some(other) = config.string(SCORES)?.filter(|it| *it != "sigmoid") {
        let expected = "'sigmoid' in this family";
        return Err(config.unexpected(SCORES, format_args!("'{other}'"), expected));
    }
    if !config.bool_or(IS_NORMALISED, true)? {
        let expected = "supported in this family; only true is";
        return Err(config.unexpected(IS_NORMALISED, false, expected));
    }
    for key in ["n_group", "topk_group"] {
        if let Some(other) = config.size(key, 0..=MAX_EXPERTS)?.filter(|it| *it > 1) {
            return Err(config.unexpected(key, other, "supported in this family; only 1 is"));
        }
    }
    Ok(())
}

fn experts(config: &JsonFile, dimensions: &Dimensions) -> Result<ExpertsSpec, LoadError> {
    check_experts(config)?;
    let scale = config.number("route_scale", 0.0..=1e6)?;
    let rule = scores_rule(RouterScores::Sigmoid, true, scale.unwrap_or(1.0) as f32);
    let defaults = ExpertDefaults {
        num_experts: 64,
        num_chosen: 6,
    };
    let routing = routing(config, &defaults, rule)?;
    let expert_size = width(config, "moe_intermediate_size", 1408)?;
    let mut experts = dimensions.experts(&MODULES, routing, expert_size);
    experts.correction = Some("mlp.expert_bias");
    let num_shared = config.size("num_shared_experts", 0..=MAX_EXPERTS)?;
    if let num_shared @ 1.. = num_shared.unwrap_or(2) {
        experts.shared = Some(dimensions.shared_experts(num_shared, expert_size));
    }
    Ok(experts)
}
