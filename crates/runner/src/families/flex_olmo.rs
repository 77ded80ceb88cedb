//! FlexOlmo, by Ai2: [OLMo 2](super::olmo2) with the experts of [OLMoE](super::olmoe).
//!
//! Source: configuration_flex_olmo.py and modeling_flex_olmo.py of transformers; Shi et al., arXiv:2507.07024.

use super::dimensions::{Defaults, Sizes};
use super::experts::{EXPERT_MODULES, ExpertDefaults, routing, softmax_rule};
use super::family::Family;
use super::olmo2;
use super::rope_config::RopeDefaults;
use crate::spec::{FeedForward, ModelSpec};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;

pub const FAMILY: Family = Family {
    class: "FlexOlmoForCausalLM",
    gguf: None,
    describe,
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(100_352, 4096, 11_008, 32, 32, 4096)),
        rope: RopeDefaults {
            theta: 500_000.0,
            ..Defaults::LLAMA.rope
        },
        ..Defaults::LLAMA
    };
    let (mut spec, dimensions) = olmo2::describe_dense(config, FAMILY.class, &defaults)?;
    let experts = ExpertDefaults {
        num_experts: 7,
        num_chosen: 5,
    };
    let routing = routing(config, &experts, softmax_rule(config)?)?;
    let experts = dimensions.experts(&EXPERT_MODULES, routing, dimensions.intermediate_size);
    for layer in &mut spec.layers {
        layer.feed_forward = FeedForward::Experts(experts.clone());
    }
    Ok(spec)
}
