//! K-EXAONE, by LG AI Research: the attention of EXAONE 4.0 and the experts of DeepSeek-V3.
//!
//! Norms are in front of blocks, and each head of queries and keys is normalised. Layers with a window and those
//! without, which have no position embedding, are as in [EXAONE 4.0](super::exaone4). `mlp_layer_types`, or
//! `first_k_dense_replace`, tells which layers have experts. The layers for predicting several tokens are not used.
//!
//! Source: configuration_exaone_moe.py and modeling_exaone_moe.py of transformers.

use serde_json::json;

use super::dimensions::Dimensions;
use super::exaone4;
use super::family::Family;
use super::gguf::GgufArchitecture;
use super::glm4_moe::SIGMOIDS;
use super::grouped_experts::{CHOSEN_GROUPS, GROUPS, GroupedExperts, GroupedNames, experts};
use crate::spec::{ModelSpec, QkNormSpec};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::RouterScores;

pub const FAMILY: Family = Family {
    class: "ExaoneMoeForCausalLM",
    gguf: Some(GgufArchitecture {
        modules: &[("mlp.e_score_correction_bias", "exp_probs_b")],
        keys: &[
            ("expert_shared_count", "num_shared_experts"),
            ("expert_group_count", GROUPS),
            ("expert_group_used_count", CHOSEN_GROUPS),
            ("leading_dense_block_count", "first_k_dense_replace"),
        ],
        has_windows: true,
        experts: Some(SIGMOIDS),
        add_fixed: |config| {
            for (key, value) in [("num_shared_experts", 0), ("first_k_dense_replace", 0)] {
                config.entry(key).or_insert(json!(value));
            }
        },
        ..GgufArchitecture::named("exaone-moe")
    }),
    describe,
};

const EXPERTS: GroupedExperts = GroupedExperts {
    scores: RouterScores::Sigmoid,
    num_experts: Some(64),
    num_chosen: Some(8),
    num_shared: Some(1),
    expert_size: 1024,
    num_dense_layers: 1,
    num_groups: Some(1),
    num_chosen_groups: Some(1),
    num_group_scores: 2,
    is_normalised: true,
    routed_scale: 2.5,
    has_mlp_bias: false,
    names: GroupedNames {
        num_experts: "num_experts",
        num_shared: "num_shared_experts",
        layer_types: Some("mlp_layer_types"),
        correction: "mlp.e_score_correction_bias",
        ..GroupedNames::DEEPSEEK
    },
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let dimensions = Dimensions::from_config(config, &exaone4::DEFAULTS)?;
    let mut layer = dimensions.llama_layer();
    layer.attention.qk_norm = Some(QkNormSpec::of_heads(dimensions.norm.eps));
    let experts = experts(config, &dimensions, &EXPERTS)?;
    let mut spec = exaone4::model(config, FAMILY.class, dimensions, layer)?;
    EXPERTS.replace_dense(config, &experts, &mut spec)?;
    Ok(spec)
}
