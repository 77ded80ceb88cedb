//! Mixtral 8x7B and 8x22B.
//!
//! Mistral with experts in place of each feed-forward block: the two with the largest logits of eight, weighted by the
//! softmax of these two. Checkpoints call gate, down and up `w1`, `w2` and `w3`. `sliding_window` is mostly `null`, and
//! none if it is missing.
//!
//! llama.cpp stores it as a `llama` with experts, with the permuted rows of Llama.
//!
//! Source: modeling_mixtral.py of transformers; Jiang et al., arXiv:2401.04088.

use super::dimensions::{Defaults, Dimensions, Sizes};
use super::experts::{ExpertDefaults, ExpertModules, routing};
use super::family::Family;
use super::gguf::{GgufArchitecture, GgufExperts, QUERIES_AND_KEYS};
use super::rope_config::RopeDefaults;
use super::windows::{no_windows, windows_in_all_layers};
use crate::spec::{FeedForward, ModelSpec, StackedExperts, StackedLayout};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::RoutingRule;

pub const FAMILY: Family = Family {
    class: "MixtralForCausalLM",
    gguf: Some(GgufArchitecture {
        permuted: QUERIES_AND_KEYS,
        experts: Some(GgufExperts::softmax(true)),
        ..GgufArchitecture::named("llama")
    }),
    describe,
};

pub const MODULES: ExpertModules = ExpertModules {
    router: "block_sparse_moe.gate",
    gate: "block_sparse_moe.experts.{}.w1",
    up: "block_sparse_moe.experts.{}.w3",
    down: "block_sparse_moe.experts.{}.w2",
    stacked: StackedExperts {
        router: "mlp.gate",
        gate_up: "mlp.experts.gate_up_proj",
        down: "mlp.experts.down_proj",
        layout: StackedLayout::Outputs,
    },
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(32_000, 4096, 14_336, 32, 32, 131_072)),
        num_kv_heads: Some(8),
        norm_eps: 1e-5,
        rope: RopeDefaults {
            theta: 1_000_000.0,
            ..Defaults::LLAMA.rope
        },
        ..Defaults::LLAMA
    };
    let dimensions = Dimensions::from_config(config, &defaults)?;
    let experts = ExpertDefaults {
        num_experts: 8,
        num_chosen: 2,
    };
    let rule = RoutingRule::Softmax {
        is_normalised: true,
    };
    let routing = routing(config, &experts, rule)?;
    let mut layer = dimensions.llama_layer();
    let expert_size = dimensions.intermediate_size;
    layer.feed_forward = FeedForward::Experts(dimensions.experts(&MODULES, routing, expert_size));
    let windows = match config.get("sliding_window").is_some() {
        true => windows_in_all_layers(config, dimensions.num_layers)?,
        false => no_windows(dimensions.num_layers),
    };
    Ok(dimensions.model(FAMILY.class, layer, windows))
}
