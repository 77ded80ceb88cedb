//! Mixtures of experts as DeepSeek-V2 and V3 have them, and others after them: chosen by groups, with shared experts
//! that are one wide block.
//!
//! Source: DeepSeek-AI, arXiv:2405.04434 and arXiv:2412.19437.

use super::bounds::{MAX_EXPERTS, MAX_LAYERS};
use super::dimensions::Dimensions;
use super::experts::{EXPERT_MODULES, width};
use super::layer_lists::layers_of_kind;
use crate::spec::{ExpertsSpec, FeedForward, ModelSpec};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::{GroupedRouting, RouterScores, Routing, RoutingRule};

pub const GROUPS: &str = "n_group";
pub const CHOSEN_GROUPS: &str = "topk_group";

/// The routing of a family, and its defaults.
pub struct GroupedExperts {
    pub scores: RouterScores,
    /// `None` if config.json must tell them. So for the next ones.
    pub num_experts: Option<usize>,
    pub num_chosen: Option<usize>,
    pub num_shared: Option<usize>,
    pub expert_size: usize,
    /// Layers in front of the first one with experts.
    pub num_dense_layers: usize,
    pub num_groups: Option<usize>,
    pub num_chosen_groups: Option<usize>,
    /// How many of its scores a group is chosen by.
    pub num_group_scores: usize,
    pub is_normalised: bool,
    pub routed_scale: f64,
    /// Whether `mlp_bias` says that shared experts have biases.
    pub has_mlp_bias: bool,
    pub names: GroupedNames,
}

/// Names in config.json and in checkpoints.
pub struct GroupedNames {
    pub num_experts: &'static str,
    pub num_chosen: &'static str,
    pub num_shared: &'static str,
    pub num_groups: &'static str,
    /// Whether weights are divided by their sum.
    pub is_normalised: &'static str,
    /// The number of dense layers, if the family reads it.
    pub num_dense: Option<&'static str>,
    /// The list of dense and sparse layers, which counts before that number, if the family reads it.
    pub layer_types: Option<&'static str>,
    /// The corrections of scores, if those are sigmoids.
    pub correction: &'static str,
}

impl GroupedNames {
    pub const DEEPSEEK: Self = Self {
        num_experts: "n_routed_experts",
        num_chosen: "num_experts_per_tok",
        num_shared: "n_shared_experts",
        num_groups: GROUPS,
        is_normalised: "norm_topk_prob",
        num_dense: Some("first_k_dense_replace"),
        layer_types: None,
        correction: "mlp.gate.e_score_correction_bias",
    };
}

impl GroupedExperts {
    /// Gives experts to the layers of a model that the list says or, if config.json is silent, to all but the first.
    ///
    /// # Errors
    /// Their number is out of range, or the list is malformed.
    pub fn replace_dense(
        &self,
        config: &JsonFile,
        experts: &ExpertsSpec,
        spec: &mut ModelSpec,
    ) -> Result<(), LoadError> {
        let num_layers = spec.num_layers();
        let listed = self.names.layer_types;
        let listed = listed.and_then(|key| Some((key, config.get(key)?)));
        let has_experts = match listed {
            Some(listed) => layers_of_kind(config, listed, num_layers, &[["dense", "sparse"]])?,
            None => {
                let num_dense = match self.names.num_dense {
                    Some(key) => config.size(key, 0..=MAX_LAYERS)?,
                    None => None,
                };
                let num_dense = num_dense.unwrap_or(self.num_dense_layers);
                (0..num_layers).map(|layer| layer >= num_dense).collect()
            }
        };
        for (layer, has_experts) in spec.layers.iter_mut().zip(has_experts) {
            if has_experts {
                layer.feed_forward = FeedForward::Experts(experts.clone());
            }
        }
        Ok(())
    }
}

/// The experts of a layer.
///
/// # Errors
/// A key is out of range, or asks for a choice that the family does not have.
pub fn experts(
    config: &JsonFile,
    dimensions: &Dimensions,
    family: &GroupedExperts,
) -> Result<ExpertsSpec, LoadError> {
    if let Some(step) = config.size("moe_layer_freq", 1..=MAX_LAYERS)?
        && step != 1
    {
        return Err(config.unexpected("moe_layer_freq", step, "supported; only 1 is"));
    }
    let routing = routing(config, family)?;
    let expert_size = width(config, "moe_intermediate_size", family.expert_size)?;
    let mut experts = dimensions.experts(&EXPERT_MODULES, routing, expert_size);
    let names = &family.names;
    let num_shared = config.size_or(names.num_shared, 0..=MAX_EXPERTS, family.num_shared)?;
    if let Some(num_shared @ 1..) = num_shared {
        let mut shared = dimensions.shared_experts(num_shared, expert_size);
        let has_bias = family.has_mlp_bias && config.bool_or("mlp_bias", false)?;
        (shared.gate_up.has_bias, shared.down.has_bias) = (has_bias, has_bias);
        experts.shared = Some(shared);
    }
    if family.scores == RouterScores::Sigmoid {
        experts.correction = Some(names.correction);
    }
    Ok(experts)
}

fn routing(config: &JsonFile, family: &GroupedExperts) -> Result<Routing, LoadError> {
    let names = &family.names;
    let (score, methods): (_, &[_]) = match family.scores {
        RouterScores::Softmax => ("softmax", &["greedy", "group_limited_greedy"]),
        RouterScores::Sigmoid | RouterScores::SigmoidOfLogit => ("sigmoid", &["noaux_tc"]),
    };
    // dots.llm1 has the name of the method there.
    if let Some(other) = config.string("scoring_func")?
        && other != score
        && !methods.contains(&other)
    {
        let expected = format!("'{score}' in this family");
        return Err(config.unexpected("scoring_func", format_args!("'{other}'"), expected));
    }
    let method = config.string("topk_method")?.unwrap_or(methods[0]);
    if !methods.contains(&method) {
        let expected = format!("supported; '{}' is", methods.join("' and '"));
        return Err(config.unexpected("topk_method", format_args!("'{method}'"), expected));
    }
    let is_normalised = config.bool_or(names.is_normalised, family.is_normalised)?;
    if is_normalised && family.scores == RouterScores::Softmax && !family.is_normalised {
        let expected = "supported in this family, where transformers ignores it; only false is";
        return Err(config.unexpected(names.is_normalised, true, expected));
    }
    let key = names.num_experts;
    let num_experts = match family.num_experts {
        Some(default) => config.size(key, 1..=MAX_EXPERTS)?.unwrap_or(default),
        None => config.required_size(key, 1..=MAX_EXPERTS)?,
    };
    let [num_groups, num_chosen_groups] = match method {
        "greedy" => [1, 1],
        _ => {
            let groups = config.size_or(names.num_groups, 1..=MAX_EXPERTS, family.num_groups)?;
            let groups = groups.unwrap_or(1);
            let default = family.num_chosen_groups;
            let chosen = config.size_or(CHOSEN_GROUPS, 1..=MAX_EXPERTS, default)?;
            let chosen = chosen.unwrap_or(groups);
            if chosen > groups {
                let expected = format!("at most the number of groups, {groups}");
                return Err(config.unexpected(CHOSEN_GROUPS, chosen, expected));
            }
            [groups, chosen]
        }
    };
    let group_len = num_experts / num_groups;
    if !num_experts.is_multiple_of(num_groups) || group_len < family.num_group_scores {
        let expected = format!(
            "a divisor of the number of experts, {num_experts}, with groups of at least {}",
            family.num_group_scores
        );
        return Err(config.unexpected(names.num_groups, num_groups, expected));
    }
    let num_candidates = num_chosen_groups * group_len;
    let num_chosen = match family.num_chosen {
        Some(default) => config
            .size(names.num_chosen, 1..=MAX_EXPERTS)?
            .unwrap_or(default),
        None => config.required_size(names.num_chosen, 1..=MAX_EXPERTS)?,
    };
    if num_chosen > num_candidates {
        let expected = format!("at most {num_candidates}, the experts of the chosen groups");
        return Err(config.unexpected(names.num_chosen, num_chosen, expected));
    }
    let scale = config.number("routed_scaling_factor", 0.0..=1e6)?;
    Ok(Routing {
        num_experts,
        num_zero_experts: 0,
        num_chosen,
        rule: RoutingRule::Grouped(GroupedRouting {
            scores: family.scores,
            num_groups,
            num_chosen_groups,
            num_group_scores: match num_groups {
                1 => 1,
                _ => family.num_group_scores,
            },
            is_normalised,
            scale: scale.unwrap_or(family.routed_scale) as f32,
        }),
        has_shared_gate: false,
    })
}
