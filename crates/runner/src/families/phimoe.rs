//! Phi-3.5-MoE, by Microsoft.
//!
//! Two of sixteen experts for each token, whose tensors have the names of Mixtral's, and LayerNorm with biases.
//! `attention_bias` and `lm_head_bias` add biases. The experts are chosen one after the other, and weighted by a
//! softmax of which most of the logits are left out: see [`RoutingRule::SparseMixer`]. `longrope` has its factors of
//! cosines and sines as `short_mscale` and `long_mscale`; of its two sets of frequencies, one is used for all
//! sequences, as for [Phi-3](super::phi3).
//!
//! Checkpoints on the Hub call the class `PhiMoEForCausalLM`. GGUF files have no `short_mscale` and `long_mscale`, but
//! the factor that Phi-3's formula gives, and no `router_jitter_noise`. llama.cpp weights the experts by a softmax of
//! the chosen two, and normalises by RMS; the weights are the same.
//!
//! Source: modeling_phimoe.py of transformers; phi.py and phi3.cpp of llama.cpp; Abdin et al.,
//! arXiv:2404.14219; Liu et al., arXiv:2409.12136.

use super::dimensions::{Defaults, Dimensions, Sizes};
use super::experts::{ExpertDefaults, ExpertModules, routing};
use super::family::Family;
use super::gguf::{GgufArchitecture, GgufExperts};
use super::mixtral;
use super::rope_config::RopeDefaults;
use super::windows::{no_windows, windows_in_all_layers};
use crate::rope::RopeScaling;
use crate::spec::{FeedForward, ModelSpec, NormKind, StackedExperts};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::RoutingRule;

pub const FAMILY: Family = Family {
    class: "PhimoeForCausalLM",
    gguf: Some(GgufArchitecture {
        has_windows: true,
        // Its router has a rule of its own.
        experts: Some(GgufExperts::softmax(true)),
        ..GgufArchitecture::named("phimoe")
    }),
    describe,
};

/// As the model's own code calls it.
pub const ORIGINAL: Family = Family {
    class: "PhiMoEForCausalLM",
    ..FAMILY
};

const MODULES: ExpertModules = ExpertModules {
    stacked: StackedExperts {
        router: "mlp.router",
        ..mixtral::MODULES.stacked
    },
    ..mixtral::MODULES
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    const CHOSEN: &str = "num_experts_per_tok";
    let defaults = Defaults {
        sizes: Some(Sizes::new(32_064, 4096, 6400, 32, 32, 131_072)),
        num_kv_heads: Some(8),
        norm_eps: 1e-5,
        rope: RopeDefaults {
            theta: 1_000_000.0,
            has_mscales: true,
            ..Defaults::LLAMA.rope
        },
        ..Defaults::LLAMA
    };
    let mut dimensions = Dimensions::from_config(config, &defaults)?;
    dimensions.norm.kind = NormKind::Layer { has_bias: true };
    if !matches!(
        dimensions.rope.scaling,
        RopeScaling::None | RopeScaling::Long { .. }
    ) {
        return Err(config.error(
            "the rope_type of this family may be 'default' or 'longrope', and is another one"
                .to_owned(),
        ));
    }
    let experts = ExpertDefaults {
        num_experts: 16,
        num_chosen: 2,
    };
    let jitter = config.number("router_jitter_noise", 0.0..=1.0)?;
    let rule = RoutingRule::SparseMixer {
        jitter: jitter.unwrap_or(0.01) as f32,
    };
    let routing = routing(config, &experts, rule)?;
    if routing.num_chosen != 2 {
        return Err(config.unexpected(CHOSEN, routing.num_chosen, "2, as its router requires"));
    }
    let mut layer = dimensions.llama_layer();
    layer
        .attention
        .set_biases(config.bool_or("attention_bias", false)?);
    let expert_size = dimensions.intermediate_size;
    layer.feed_forward = FeedForward::Experts(dimensions.experts(&MODULES, routing, expert_size));
    let windows = match config.get("sliding_window").is_some() {
        true => windows_in_all_layers(config, dimensions.num_layers)?,
        false => no_windows(dimensions.num_layers),
    };
    Ok(ModelSpec {
        output_bias: config.bool_or("lm_head_bias", false)?,
        ..dimensions.model(FAMILY.class, layer, windows)
    })
}
