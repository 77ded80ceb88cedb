//! The first DeepSeek with experts, DeepSeekMoE 16B.
//!
//! Llama whose layers behind the first ones (`first_k_dense_replace`) have experts: the ones with the largest softmax,
//! whose weights are divided by their sum if `norm_topk_prob` says so, and shared ones, which are one wide block.
//!
//! Source: configuration_deepseek.py and modeling_deepseek.py of the published model; DeepSeek-AI, arXiv:2401.06066.

use serde_json::json;

use super::dimensions::{Defaults, Dimensions};
use super::family::Family;
use super::gguf::{GgufArchitecture, GgufExperts, QUERIES_AND_KEYS};
use super::grouped_experts::{GroupedExperts, GroupedNames, experts};
use super::windows::no_windows;
use crate::spec::ModelSpec;
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::RouterScores;

pub const FAMILY: Family = Family {
    class: "DeepseekForCausalLM",
    gguf: Some(GgufArchitecture {
        permuted: QUERIES_AND_KEYS,
        keys: &[
            ("expert_count", "n_routed_experts"),
            ("expert_shared_count", "n_shared_experts"),
            ("leading_dense_block_count", "first_k_dense_replace"),
        ],
        experts: Some(GgufExperts::softmax(false)),
        ..GgufArchitecture::named("deepseek")
    }),
    describe,
};

const EXPERTS: GroupedExperts = GroupedExperts {
    scores: RouterScores::Softmax,
    num_experts: None,
    num_chosen: None,
    num_shared: None,
    expert_size: 1407,
    num_dense_layers: 0,
    num_groups: Some(1),
    num_chosen_groups: Some(1),
    num_group_scores: 1,
    // If config.json says so.
    is_normalised: true,
    routed_scale: 1.0,
    has_mlp_bias: false,
    names: GroupedNames::DEEPSEEK,
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let is_normalised = config.bool_or(GroupedNames::DEEPSEEK.is_normalised, false)?;
    let config = &config.with(GroupedNames::DEEPSEEK.is_normalised, json!(is_normalised));
    let dimensions = Dimensions::from_config(config, &Defaults::LLAMA)?;
    let experts = experts(config, &dimensions, &EXPERTS)?;
    let mut layer = dimensions.llama_layer();
    layer
        .attention
        .set_biases(config.bool_or("attention_bias", false)?);
    let windows = no_windows(dimensions.num_layers);
    let mut spec = dimensions.model(FAMILY.class, layer, windows);
    EXPERTS.replace_dense(config, &experts, &mut spec)?;
    Ok(spec)
}
