//! Keys of config.json that describe mixtures of experts, and the names of their modules.

use super::bounds::{MAX_EXPERTS, MAX_LAYERS, MAX_WIDTH};
use super::dimensions::Dimensions;
use super::layer_lists::listed_layers;
use crate::spec::{ExpertsSpec, Linear, Projection, SharedExpert, StackedExperts, StackedLayout};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::{GroupedRouting, RouterScores, Routing, RoutingRule};
use inflight_numbers::Stacking;

/// The modules of a mixture of experts.
pub struct ExpertModules {
    pub router: &'static str,
    pub gate: &'static str,
    pub up: &'static str,
    pub down: &'static str,
    pub stacked: StackedExperts,
}

/// The gate, up and down projections of the one shared expert of most families.
pub const SHARED_EXPERT: [&str; 3] = [
    "mlp.shared_expert.gate_proj",
    "mlp.shared_expert.up_proj",
    "mlp.shared_expert.down_proj",
];

/// The names of most families.
pub const EXPERT_MODULES: ExpertModules = ExpertModules {
    router: "mlp.gate",
    gate: "mlp.experts.{}.gate_proj",
    up: "mlp.experts.{}.up_proj",
    down: "mlp.experts.{}.down_proj",
    stacked: StackedExperts {
        router: "mlp.gate",
        gate_up: "mlp.experts.gate_up_proj",
        down: "mlp.experts.down_proj",
        layout: StackedLayout::Outputs,
    },
};

/// What transformers assumes of a family where config.json is silent.
pub struct ExpertDefaults {
    pub num_experts: usize,
    pub num_chosen: usize,
}

/// `num_experts`, or `num_local_experts`, and `num_experts_per_tok`.
///
/// # Errors
/// One of them is out of range.
pub fn routing(
    config: &JsonFile,
    defaults: &ExpertDefaults,
    rule: RoutingRule,
) -> Result<Routing, LoadError> {
    let keys = (["num_experts", "num_local_experts"], "num_experts_per_tok");
    routing_of(config, keys, defaults, rule)
}

/// [`routing`] by other keys: two names of the number of experts, and how many are chosen.
pub fn routing_of(
    config: &JsonFile,
    (experts, chosen): ([&str; 2], &str),
    defaults: &ExpertDefaults,
    rule: RoutingRule,
) -> Result<Routing, LoadError> {
    let mut num_experts = None;
    for key in experts {
        num_experts = num_experts.or(config.size(key, 1..=MAX_EXPERTS)?);
    }
    let num_experts = num_experts.unwrap_or(defaults.num_experts);
    let num_chosen = config.size(chosen, 1..=MAX_EXPERTS)?;
    let num_chosen = num_chosen.unwrap_or(defaults.num_chosen);
    match num_chosen <= num_experts {
        true => Ok(Routing {
            num_experts,
            num_zero_experts: 0,
            num_chosen,
            rule,
            has_shared_gate: false,
        }),
        false => Err(config.unexpected(
            chosen,
            num_chosen,
            format_args!("at most the number of experts, {num_experts}"),
        )),
    }
}

/// The softmax of all logits, whose chosen ones are divided by their sum if `norm_topk_prob` says so.
///
/// # Errors
/// The key is no boolean.
pub fn softmax_rule(config: &JsonFile) -> Result<RoutingRule, LoadError> {
    let is_normalised = config.bool_or("norm_topk_prob", false)?;
    Ok(RoutingRule::Softmax { is_normalised })
}

/// The largest of all scores, to which a correction of each expert may be added for the choice.
pub const fn scores_rule(scores: RouterScores, is_normalised: bool, scale: f32) -> RoutingRule {
    RoutingRule::Grouped(GroupedRouting {
        scores,
        num_groups: 1,
        num_chosen_groups: 1,
        num_group_scores: 1,
        is_normalised,
        scale,
    })
}

/// Gives the experts of a layer, and the gate, up and down of the shared one, these names.
pub fn rename_experts(
    experts: &mut ExpertsSpec,
    modules: &ExpertModules,
    [gate, up, down]: [&'static str; 3],
) {
    let rename = |projection: &mut Projection, names: &[&'static str]| {
        for (part, name) in projection.parts.iter_mut().zip(names) {
            part.module = name;
        }
    };
    rename(&mut experts.router, &[modules.router]);
    rename(&mut experts.gate_up, &[modules.gate, modules.up]);
    rename(&mut experts.down, &[modules.down]);
    experts.stacked = modules.stacked;
    if let Some(shared) = &mut experts.shared {
        rename(&mut shared.gate_up, &[gate, up]);
        rename(&mut shared.down, &[down]);
    }
}

/// A width of `key`, or the default.
///
/// # Errors
/// It is out of range.
pub fn width(config: &JsonFile, key: &str, default: usize) -> Result<usize, LoadError> {
    Ok(config.size(key, 1..=MAX_WIDTH)?.unwrap_or(default))
}

/// Which layers have experts: every `decoder_sparse_step`-th one, without those that `mlp_only_layers` lists.
///
/// # Errors
/// One of them is malformed.
pub fn layers_with_experts(config: &JsonFile, num_layers: usize) -> Result<Vec<bool>, LoadError> {
    const DENSE: &str = "mlp_only_layers";
    let step = config
        .size("decoder_sparse_step", 1..=MAX_LAYERS)?
        .unwrap_or(1);
    let mut has_experts: Vec<_> = (1..=num_layers)
        .map(|layer| layer.is_multiple_of(step))
        .collect();
    if let Some(is_dense) = listed_layers(config, DENSE, num_layers)? {
        for (has_experts, is_dense) in has_experts.iter_mut().zip(is_dense) {
            *has_experts &= !is_dense;
        }
    }
    Ok(has_experts)
}

impl ExpertsSpec {
    /// Gives gate, up and down of each expert the names of `EXPERT_MODULES`, whose weights are `[outputs, inputs]`.
    pub fn unstack(&mut self) {
        let (width, hidden) = (self.down.num_inputs, self.gate_up.num_inputs);
        let gate_up = [(EXPERT_MODULES.gate, width), (EXPERT_MODULES.up, width)];
        self.gate_up.parts = Projection::stacked(&gate_up, hidden, self.gate_up.stacking).parts;
        self.down.parts = Projection::single(EXPERT_MODULES.down, hidden, width).parts;
        self.stacked = EXPERT_MODULES.stacked;
    }
}

impl Dimensions {
    /// Experts of a width, without biases.
    pub fn experts(
        &self,
        modules: &ExpertModules,
        routing: Routing,
        expert_size: usize,
    ) -> ExpertsSpec {
        let hidden = self.hidden_size;
        let gate_up = [(modules.gate, expert_size), (modules.up, expert_size)];
        ExpertsSpec {
            router: Projection::single(modules.router, routing.num_experts, hidden),
            routing,
            correction: None,
            may_lack_correction: false,
            gate_up: Projection::stacked(&gate_up, hidden, Stacking::Interleaved),
            gating: self.activation.into(),
            down: Projection::single(modules.down, hidden, expert_size),
            shared: None,
            scale: None,
            stacked: modules.stacked,
        }
    }

    /// Experts beside one that all tokens have, whose weight is a gate of the router: Qwen 2's, 3-Next's and 3.5's.
    pub fn experts_beside_a_gated_one(
        &self,
        routing: Routing,
        expert_size: usize,
        shared_size: usize,
    ) -> ExpertsSpec {
        let routing = Routing {
            has_shared_gate: true,
            ..routing
        };
        let mut experts = self.experts(&EXPERT_MODULES, routing, expert_size);
        let gate = Linear::whole("mlp.shared_expert_gate", 1);
        experts.router.parts.push(gate);
        experts.shared = Some(self.shared_expert(SHARED_EXPERT, shared_size));
        experts
    }

    /// So many experts that all tokens have, which are one wide block without biases.
    pub fn shared_experts(&self, num: usize, expert_size: usize) -> SharedExpert {
        let modules = [
            "mlp.shared_experts.gate_proj",
            "mlp.shared_experts.up_proj",
            "mlp.shared_experts.down_proj",
        ];
        self.shared_expert(modules, num * expert_size)
    }

    /// An expert that all tokens have, without biases.
    pub fn shared_expert(
        &self,
        [gate, up, down]: [&'static str; 3],
        shared_size: usize,
    ) -> SharedExpert {
        let hidden = self.hidden_size;
        let gate_up = [(gate, shared_size), (up, shared_size)];
        SharedExpert {
            gate_up: Projection::stacked(&gate_up, hidden, Stacking::Interleaved),
            down: Projection::single(down, hidden, shared_size),
            gating: None,
        }
    }
}
