//! MiniMax-M2, by MiniMax.
//!
//! Llama with experts as [Mixtral](super::mixtral) names them: those with the largest sigmoids, to which a correction
//! of each expert is added for the choice alone; weights are divided by their sum. Queries and keys are normalised over
//! all of their heads together, and `rotary_dim` elements of each are rotated. The modules behind the last layer, for
//! predicting several tokens, are not used.
//!
//! Source: configuration_minimax_m2.py and modeling_minimax_m2.py of transformers.

use super::bounds::MAX_HEAD_DIM;
use super::dimensions::{Defaults, Dimensions, Sizes};
use super::experts::{ExpertDefaults, routing, scores_rule};
use super::family::Family;
use super::gguf::{GgufArchitecture, GgufExperts};
use super::mixtral::MODULES;
use super::rope_config::RopeDefaults;
use super::windows::no_windows;
use crate::spec::{FeedForward, ModelSpec, QkNormSpec};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::{QkNormKind, RouterScores};

pub const FAMILY: Family = Family {
    class: "MiniMaxM2ForCausalLM",
    gguf: Some(GgufArchitecture {
        modules: &[("block_sparse_moe.e_score_correction_bias", "exp_probs_b")],
        keys: &[("rope.dimension_count", ROTARY)],
        has_partial_rotary: true,
        experts: Some(GgufExperts {
            is_normalised: true,
            has_scale: false,
            gating: 2,
        }),
        ..GgufArchitecture::named("minimax-m2")
    }),
    describe,
};

const HEAD_DIM: usize = 128;
const ROTARY: &str = "rotary_dim";

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    check(config)?;
    let head_dim = config.size("head_dim", 1..=MAX_HEAD_DIM)?;
    let head_dim = head_dim.unwrap_or(HEAD_DIM);
    let rotary_dim = config.size(ROTARY, 1..=head_dim)?;
    if let Some(odd) = rotary_dim.filter(|dim| !dim.is_multiple_of(2)) {
        return Err(config.unexpected(ROTARY, odd, "even"));
    }
    let defaults = Defaults {
        sizes: Some(Sizes::new(200_064, 3072, 1536, 62, 48, 196_608)),
        num_kv_heads: Some(8),
        head_dim: Some(HEAD_DIM),
        rope: RopeDefaults {
            theta: 5_000_000.0,
            partial_rotary_factor: Some(rotary_dim.map_or(1.0, |dim| dim as f64 / head_dim as f64)),
            ..Defaults::LLAMA.rope
        },
        ..Defaults::LLAMA
    };
    let dimensions = Dimensions::from_config(config, &defaults)?;
    let experts = ExpertDefaults {
        num_experts: 256,
        num_chosen: 8,
    };
    let rule = scores_rule(RouterScores::Sigmoid, true, 1.0);
    let routing = routing(config, &experts, rule)?;
    let mut experts = dimensions.experts(&MODULES, routing, dimensions.intermediate_size);
    experts.correction = Some("block_sparse_moe.e_score_correction_bias");
    let mut layer = dimensions.llama_layer();
    layer.attention.qk_norm = Some(QkNormSpec {
        kind: QkNormKind::Row,
        ..QkNormSpec::of_heads(dimensions.norm.eps)
    });
    layer.feed_forward = FeedForward::Experts(experts);
    let windows = no_windows(dimensions.num_layers);
    Ok(dimensions.model(FAMILY.class, layer, windows))
}

/// Refuses what published configs say and transformers ignores, if it is something else.
fn check(config: &JsonFile) -> Result<(), LoadError> {
    const SCORES: &str = "scoring_func";
    if let Some(other) = config.string(SCORES)?
        && other != "sigmoid"
    {
        let expected = "'sigmoid' in this family";
        return Err(config.unexpected(SCORES, format_args!("'{other}'"), expected));
    }
    for key in ["use_qk_norm", "use_routing_bias"] {
        if !config.bool_or(key, true)? {
            return Err(config.unexpected(key, false, "supported in this family; only true is"));
        }
    }
    Ok(())
}
