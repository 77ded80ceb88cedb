//! GLM-4.5, 4.6 and 4.7, by Z.ai, dots.llm1, by rednote, and Solar Open, by Upstage: Llama with the experts of
//! DeepSeek-V3.
//!
//! GLM rotates the first half of each head, and normalises each query and key head if `use_qk_norm` says so. dots.llm1
//! normalises them always, and has windows as Qwen 2. The layer behind GLM's last one makes drafts (mtp.rs). Solar Open
//! has experts in all layers.
//!
//! Source: configuration_*.py and modeling_*.py of glm4_moe, dots1 and solar_open of transformers; GLM-4.5 team,
//! arXiv:2508.06471.

use serde_json::{Map, Value as Json, json};

use super::dimensions::{Defaults, Dimensions, Sizes};
use super::family::Family;
use super::gguf::{GgufArchitecture, GgufExperts};
use super::grouped_experts::{CHOSEN_GROUPS, GROUPS, GroupedExperts, GroupedNames, experts};
use super::rope_config::RopeDefaults;
use super::windows::{no_windows, windows_from};
use crate::spec::{ModelSpec, QkNormSpec};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::RouterScores;

pub const GLM4_MOE: Family = Family {
    class: "Glm4MoeForCausalLM",
    gguf: Some(GgufArchitecture {
        modules: &[
            ("post_attention_layernorm", "post_attention_norm"),
            ("mlp.gate.e_score_correction_bias", "exp_probs_b"),
        ],
        has_partial_rotary: true,
        has_mrope: true,
        optional_modules: &[("use_qk_norm", "self_attn.q_norm")],
        ..GGUF_ARCHITECTURE
    }),
    describe: describe_glm,
};

pub const DOTS1: Family = Family {
    class: "Dots1ForCausalLM",
    gguf: Some(GgufArchitecture {
        name: "dots1",
        ..GGUF_ARCHITECTURE
    }),
    describe: describe_dots,
};

pub const SOLAR_OPEN: Family = Family {
    class: "SolarOpenForCausalLM",
    gguf: None,
    describe: describe_solar,
};

/// How llama.cpp stores the families; it makes a Solar Open a GLM.
pub const GGUF_ARCHITECTURE: GgufArchitecture = GgufArchitecture {
    modules: &[("mlp.gate.e_score_correction_bias", "exp_probs_b")],
    keys: &[
        ("expert_count", "n_routed_experts"),
        ("expert_shared_count", "n_shared_experts"),
        ("expert_group_count", GROUPS),
        ("expert_group_used_count", CHOSEN_GROUPS),
        ("leading_dense_block_count", NUM_DENSE),
    ],
    experts: Some(SIGMOIDS),
    add_fixed: add_absent,
    ..GgufArchitecture::named("glm4moe")
};

/// Weights of sigmoids.
pub const SIGMOIDS: GgufExperts = GgufExperts {
    is_normalised: false,
    has_scale: true,
    gating: 2,
};

const NUM_DENSE: &str = "first_k_dense_replace";

/// Adds llama.cpp's defaults of metadata that a file does not have: no groups, no shared expert, experts in all layers.
pub fn add_absent(config: &mut Map<String, Json>) {
    for (key, value) in [
        (GROUPS, 1),
        (CHOSEN_GROUPS, 1),
        ("n_shared_experts", 0),
        (NUM_DENSE, 0),
    ] {
        config.entry(key).or_insert(json!(value));
    }
}

/// GLM-4.5's experts.
pub const GLM_EXPERTS: GroupedExperts = GroupedExperts {
    scores: RouterScores::Sigmoid,
    num_experts: Some(128),
    num_chosen: Some(8),
    num_shared: Some(1),
    expert_size: 1408,
    num_dense_layers: 1,
    num_groups: Some(1),
    num_chosen_groups: Some(1),
    num_group_scores: 2,
    is_normalised: true,
    routed_scale: 1.0,
    has_mlp_bias: false,
    names: GroupedNames::DEEPSEEK,
};

const DOTS_EXPERTS: GroupedExperts = GroupedExperts {
    num_experts: None,
    num_chosen: None,
    num_shared: None,
    num_dense_layers: 0,
    is_normalised: false,
    ..GLM_EXPERTS
};

const SOLAR_EXPERTS: GroupedExperts = GroupedExperts {
    expert_size: 1280,
    num_dense_layers: 0,
    names: GroupedNames {
        num_dense: None,
        ..GroupedNames::DEEPSEEK
    },
    ..GLM_EXPERTS
};

fn describe_glm(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(151_552, 4096, 10_944, 46, 96, 131_072)),
        num_kv_heads: Some(8),
        norm_eps: 1e-5,
        rope: RopeDefaults {
            partial_rotary_factor: Some(0.5),
            ..Defaults::LLAMA.rope
        },
        ..Defaults::LLAMA
    };
    let dimensions = Dimensions::from_config(config, &defaults)?;
    let mut layer = dimensions.llama_layer();
    layer.attention.qkv.has_bias = config.bool_or("attention_bias", false)?;
    if config.bool_or("use_qk_norm", false)? {
        layer.attention.qk_norm = Some(QkNormSpec::of_heads(dimensions.norm.eps));
    }
    let experts = experts(config, &dimensions, &GLM_EXPERTS)?;
    let windows = no_windows(dimensions.num_layers);
    let mut spec = dimensions.model(GLM4_MOE.class, layer, windows);
    GLM_EXPERTS.replace_dense(config, &experts, &mut spec)?;
    Ok(spec)
}

fn describe_dots(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(152_064, 4608, 10_944, 62, 32, 2048)),
        num_kv_heads: Some(32),
        ..Defaults::LLAMA
    };
    let dimensions = Dimensions::from_config(config, &defaults)?;
    let mut layer = dimensions.llama_layer();
    layer
        .attention
        .set_biases(config.bool_or("attention_bias", false)?);
    layer.attention.qk_norm = Some(QkNormSpec::of_heads(dimensions.norm.eps));
    let experts = experts(config, &dimensions, &DOTS_EXPERTS)?;
    let windows = windows_from(config, dimensions.num_layers, 62)?;
    let mut spec = dimensions.model(DOTS1.class, layer, windows);
    DOTS_EXPERTS.replace_dense(config, &experts, &mut spec)?;
    Ok(spec)
}

fn describe_solar(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        // No layer has a block of the intermediate size.
        sizes: Some(Sizes::new(196_608, 4096, 10_240, 48, 64, 131_072)),
        num_kv_heads: Some(8),
        head_dim: Some(128),
        norm_eps: 1e-5,
        rope: RopeDefaults {
            theta: 1_000_000.0,
            ..Defaults::LLAMA.rope
        },
        ..Defaults::LLAMA
    };
    let dimensions = Dimensions::from_config(config, &defaults)?;
    let mut layer = dimensions.llama_layer();
    layer.attention.qkv.has_bias = config.bool_or("attention_bias", false)?;
    let experts = experts(config, &dimensions, &SOLAR_EXPERTS)?;
    let windows = no_windows(dimensions.num_layers);
    let mut spec = dimensions.model(SOLAR_OPEN.class, layer, windows);
    SOLAR_EXPERTS.replace_dense(config, &experts, &mut spec)?;
    Ok(spec)
}
