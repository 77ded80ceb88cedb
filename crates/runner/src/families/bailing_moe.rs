//! Ling 2.0 and Ring 2.0 (mini, flash and 1T), by Inclusion AI, and Sarvam 30B, by Sarvam AI: GLM-4.5's experts and
//! norms of heads, under names of their own, with queries, keys and values in one module.
//!
//! The first Ling (lite and plus) has experts in all layers, which a softmax chooses, and no norms of heads. Sarvam
//! 105B is as DeepSeek-V3, with Ling's keys in its config.
//!
//! transformers gives the class `Glm4MoeForCausalLM` to a Sarvam that it saves, with a `model_type` of its own.
//!
//! Source: configuration_bailing_moe_v2.py and modeling_bailing_moe_v2.py of inclusionAI/Ling-mini-2.0;
//! configuration_bailing_moe.py and modeling_bailing_moe.py of inclusionAI/Ling-lite; sarvam_moe, sarvam_mla and
//! conversion_mapping.py of transformers; Ling Team, arXiv:2503.05139 and arXiv:2510.22115.

use serde_json::{Map, Value as Json, json};

use super::deepseek::{DEEPSEEK_PARTS, Generation, V3_EXPERTS, describe_generation};
use super::dimensions::{Defaults, Dimensions, Sizes};
use super::family::Family;
use super::gguf::{GgufArchitecture, GgufExperts, QUERIES_AND_KEYS};
use super::glm4_moe::{self, GGUF_ARCHITECTURE, GLM_EXPERTS, add_absent};
use super::grouped_experts::{GroupedExperts, GroupedNames, experts};
use super::internlm2::split_heads;
use super::rope_config::RopeDefaults;
use super::windows::no_windows;
use crate::spec::{ModelSpec, Projection, QkNormSpec};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::RouterScores;

pub const LING_2: Family = Family {
    class: "BailingMoeV2ForCausalLM",
    gguf: Some(GgufArchitecture {
        name: "bailingmoe2",
        modules: &[
            (Q_NORM, "attn_q_norm"),
            (K_NORM, "attn_k_norm"),
            (CORRECTION, "exp_probs_b"),
        ],
        has_partial_rotary: true,
        optional_biases: &[
            ("use_qkv_bias", "attention.query_key_value"),
            ("use_bias", "attention.dense"),
        ],
        ..GGUF_ARCHITECTURE
    }),
    describe: |config| {
        let defaults = Defaults {
            sizes: Some(Sizes::new(157_184, 2048, 5120, 20, 16, 32_768)),
            num_kv_heads: Some(4),
            head_dim: Some(128),
            ..with_theta(600_000.0)
        };
        describe(config, LING_2.class, &defaults, &LING_EXPERTS)
    },
};

/// The first Ling.
pub const LING: Family = Family {
    class: "BailingMoeForCausalLM",
    gguf: Some(GgufArchitecture {
        name: "bailingmoe",
        modules: &[],
        permuted: QUERIES_AND_KEYS,
        experts: Some(GgufExperts {
            has_scale: true,
            ..GgufExperts::softmax(false)
        }),
        rewrite: |gguf, spec| {
            split_heads(gguf, spec);
            Ok(())
        },
        add_fixed: |config| {
            add_absent(config);
            config.insert(HAS_NORMS.to_owned(), json!(false));
        },
        ..GGUF_ARCHITECTURE
    }),
    describe: |config| {
        const NORMED: &str = "norm_softmax";
        if config.bool_or(NORMED, false)? {
            return Err(config.unexpected(NORMED, true, "supported; only false is"));
        }
        let defaults = Defaults {
            sizes: Some(Sizes::new(126_464, 2048, 5632, 28, 16, 16_384)),
            num_kv_heads: Some(4),
            ..with_theta(600_000.0)
        };
        let config = &config.with(HAS_NORMS, json!(false));
        describe(config, LING.class, &defaults, &FIRST_EXPERTS)
    },
};

pub const SARVAM_105B: Family = Family {
    class: "SarvamMLAForCausalLM",
    gguf: None,
    describe: describe_mla,
};

pub const SARVAM: Family = Family {
    class: "SarvamMoEForCausalLM",
    // llama.cpp's converter makes it a Ling.
    gguf: None,
    describe: |config| {
        let defaults = Defaults {
            sizes: Some(Sizes::new(262_144, 4096, 8192, 19, 64, 131_072)),
            num_kv_heads: Some(4),
            head_dim: Some(64),
            ..with_theta(8_000_000.0)
        };
        describe(config, SARVAM.class, &defaults, &SARVAM_EXPERTS)
    },
};

/// GLM-4.5, or the family that a `model_type` of its class names.
pub const GLM4_MOE: Family = Family {
    describe: |config| match config.string("model_type")? {
        Some("sarvam_moe") => (SARVAM.describe)(config),
        _ => (glm4_moe::GLM4_MOE.describe)(config),
    },
    ..glm4_moe::GLM4_MOE
};

const HAS_NORMS: &str = "use_qk_norm";
const Q_NORM: &str = "attention.query_layernorm";
const K_NORM: &str = "attention.key_layernorm";
const CORRECTION: &str = "mlp.gate.expert_bias";

const LING_EXPERTS: GroupedExperts = GroupedExperts {
    num_experts: Some(256),
    expert_size: 512,
    num_groups: Some(8),
    num_chosen_groups: Some(4),
    routed_scale: 2.5,
    names: GroupedNames {
        correction: CORRECTION,
        ..GroupedNames::DEEPSEEK
    },
    ..GLM_EXPERTS
};

const SARVAM_EXPERTS: GroupedExperts = GroupedExperts {
    num_experts: Some(128),
    num_chosen: Some(6),
    expert_size: 1024,
    num_groups: Some(1),
    num_chosen_groups: Some(1),
    ..LING_EXPERTS
};

const FIRST_EXPERTS: GroupedExperts = GroupedExperts {
    scores: RouterScores::Softmax,
    num_experts: Some(64),
    num_chosen: Some(6),
    num_shared: Some(2),
    expert_size: 1408,
    num_dense_layers: 0,
    num_groups: Some(1),
    num_chosen_groups: Some(1),
    num_group_scores: 1,
    routed_scale: 1.0,
    ..LING_EXPERTS
};

const MLA_GENERATION: Generation = Generation {
    class: SARVAM_105B.class,
    sizes: Sizes::new(262_144, 4096, 16_384, 32, 64, 4096),
    norm_eps: 1e-6,
    rope_theta: 10_000.0,
    parts: DEEPSEEK_PARTS,
    is_tied: false,
    experts: Some(GroupedExperts {
        num_experts: Some(128),
        num_dense_layers: 1,
        num_groups: Some(1),
        num_chosen_groups: Some(1),
        ..V3_EXPERTS
    }),
};

const fn with_theta(theta: f64) -> Defaults {
    Defaults {
        rope: RopeDefaults {
            theta,
            partial_rotary_factor: Some(1.0),
            ..Defaults::LLAMA.rope
        },
        ..Defaults::LLAMA
    }
}

fn describe(
    config: &JsonFile,
    class: &'static str,
    defaults: &Defaults,
    family: &GroupedExperts,
) -> Result<ModelSpec, LoadError> {
    let config = &with_names_of_glm(config);
    check(config, family.scores)?;
    let dimensions = Dimensions::from_config(config, defaults)?;
    let (hidden, [q, ..]) = (dimensions.hidden_size, dimensions.qkv_widths());
    let mut layer = dimensions.llama_layer();
    let attention = &mut layer.attention;
    attention.qkv = dimensions.fused_qkv("attention.query_key_value");
    attention.qkv.has_bias = config.bool_or("attention_bias", false)?;
    let has_bias = config.bool_or("use_bias", false)?;
    attention.o = Projection::single("attention.dense", hidden, q).with_bias(has_bias);
    if config.bool_or(HAS_NORMS, true)? {
        attention.qk_norm = Some(QkNormSpec {
            q: Q_NORM,
            k: K_NORM,
            ..QkNormSpec::of_heads(dimensions.norm.eps)
        });
    }
    let mut experts = experts(config, &dimensions, family)?;
    if !config.bool_or("moe_router_enable_expert_bias", true)? {
        experts.correction = None;
    }
    let windows = no_windows(dimensions.num_layers);
    let mut spec = dimensions.model(class, layer, windows);
    spec.modules.embedding = "model.word_embeddings";
    family.replace_dense(config, &experts, &mut spec)?;
    Ok(spec)
}

/// Queries have no latents unless the config says so, and YaRN may have a name of its own.
fn describe_mla(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    const RANK: &str = "q_lora_rank";
    const SCALING: &str = "rope_scaling";
    check(config, RouterScores::Sigmoid)?;
    let mut told = with_names_of_glm(config);
    if config.get(RANK).is_none() {
        told = told.with(RANK, Json::Null);
    }
    if let Some(scaling) = config.object(SCALING)? {
        let mut scaling: Map<_, _> = scaling
            .entries()
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect();
        for key in ["type", "rope_type"] {
            if scaling.get(key) == Some(&json!("deepseek_yarn")) {
                scaling.insert(key.to_owned(), json!("yarn"));
            }
        }
        told = told.with(SCALING, Json::Object(scaling));
    }
    describe_generation(&told, &MLA_GENERATION)
}

/// The config with the keys of GLM-4.5.
fn with_names_of_glm(config: &JsonFile) -> JsonFile {
    let mut told = config.clone();
    for (published, ours) in [
        ("num_experts", "n_routed_experts"),
        ("num_shared_experts", "n_shared_experts"),
        ("use_qkv_bias", "attention_bias"),
    ] {
        if let Some(value) = config.get(published) {
            told = told.with(ours, value.clone());
        }
    }
    told
}

/// Refuses choices that no published model has.
fn check(config: &JsonFile, scores: RouterScores) -> Result<(), LoadError> {
    let scores = match scores {
        RouterScores::Softmax => "softmax",
        RouterScores::Sigmoid | RouterScores::SigmoidOfLogit => "sigmoid",
    };
    for (key, supported) in [
        ("score_function", json!(scores)),
        ("use_sliding_window", json!(false)),
        ("use_rmsnorm", json!(true)),
        ("norm_head", json!(false)),
    ] {
        if let Some(other) = config.get(key).filter(|value| **value != supported) {
            let expected = format!("supported; {supported} is");
            return Err(config.unexpected(key, other, expected));
        }
    }
    const SHARED: &str = "moe_shared_expert_intermediate_size";
    let of = |key| config.get(key).and_then(Json::as_u64);
    let whole = of("moe_intermediate_size").zip(of("n_shared_experts"));
    if let Some((shared, (width, num))) = of(SHARED).zip(whole)
        && num.checked_mul(width) != Some(shared)
    {
        let expected = format!("moe_intermediate_size {width} times {num} shared experts");
        return Err(config.unexpected(SHARED, shared, expected));
    }
    Ok(())
}
