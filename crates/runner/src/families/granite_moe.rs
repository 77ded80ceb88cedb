//! Granite with experts, by IBM, and Granite 4, whose layers mostly have a state space in place of attention.
//!
//! The multipliers of the dense models, and experts whose weights are a softmax of the chosen logits. GraniteMoeShared
//! and Granite 4 add a block that all tokens have; a Granite 4 without experts has nothing else. `layer_types` of
//! Granite 4 tells which layers have attention, which has positions only if `position_embedding_type` is `rope`; the
//! others have the state space of Mamba-2.
//!
//! Source: configuration_*.py and modeling_*.py of granitemoe, granitemoeshared and granitemoehybrid of transformers.

use super::bounds::{MAX_EXPERTS, MAX_WIDTH};
use super::dimensions::Dimensions;
use super::experts::{ExpertDefaults, ExpertModules, routing, width};
use super::family::Family;
use super::granite::describe_dense;
use super::recurrent::{check_activation, layers_of_type};
use super::state_space::StateSpace;
use crate::rope::Rope;
use crate::spec::{
    ExpertsSpec, FeedForward, ModelSpec, Projection, SharedExpert, StackedExperts, StackedLayout,
};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::RoutingRule;
use inflight_numbers::Stacking;

pub const GRANITE_MOE: Family = Family {
    class: "GraniteMoeForCausalLM",
    gguf: None,
    describe: |config| {
        let (mut spec, dimensions) = describe_dense(config, GRANITE_MOE.class)?;
        let experts = FeedForward::Experts(experts(config, &dimensions, 0)?);
        for layer in &mut spec.layers {
            layer.feed_forward = experts.clone();
        }
        Ok(spec)
    },
};

pub const GRANITE_MOE_SHARED: Family = Family {
    class: "GraniteMoeSharedForCausalLM",
    gguf: None,
    describe: |config| {
        let (mut spec, dimensions) = describe_dense(config, GRANITE_MOE_SHARED.class)?;
        set_experts_beside_shared(config, &mut spec, &dimensions)?;
        Ok(spec)
    },
};

/// Gives all layers experts, and the block of `shared_intermediate_size` that all tokens have, if it is not 0.
///
/// # Errors
/// A key is out of range.
pub fn set_experts_beside_shared(
    config: &JsonFile,
    spec: &mut ModelSpec,
    dimensions: &Dimensions,
) -> Result<(), LoadError> {
    let shared_size = config.size("shared_intermediate_size", 0..=MAX_WIDTH)?;
    let experts = experts(config, dimensions, shared_size.unwrap_or(0))?;
    for layer in &mut spec.layers {
        layer.feed_forward = FeedForward::Experts(experts.clone());
    }
    Ok(())
}

pub const GRANITE_4: Family = Family {
    class: "GraniteMoeHybridForCausalLM",
    gguf: None,
    describe: describe_hybrid,
};

/// The names of experts: all in one tensor.
const MODULES: ExpertModules = ExpertModules {
    router: "block_sparse_moe.router.layer",
    gate: "block_sparse_moe.input_linear.{}",
    up: "block_sparse_moe.input_linear.{}",
    down: "block_sparse_moe.output_linear.{}",
    stacked: StackedExperts {
        router: "block_sparse_moe.router.layer",
        gate_up: "block_sparse_moe.input_linear.weight",
        down: "block_sparse_moe.output_linear.weight",
        layout: StackedLayout::Outputs,
    },
};

/// What `layer_types` calls the layers, and what transformers 5 does.
const LAYER_TYPES: [[&str; 2]; 2] = [
    ["mamba", "attention"],
    ["linear_attention", "full_attention"],
];

fn describe_hybrid(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let (mut spec, dimensions) = describe_dense(config, GRANITE_4.class)?;
    check_activation(config, dimensions.activation)?;
    let has_rope = config.string("position_embedding_type")? == Some("rope");
    let shared_size = width(config, "shared_intermediate_size", 1024)?;
    let num_experts = config.size("num_local_experts", 0..=MAX_EXPERTS)?;
    let feed_forward = match num_experts {
        Some(0) => FeedForward::Gated {
            gate_up: shared_gate_up(&dimensions, shared_size),
            activation: dimensions.activation,
            down: shared_down(&dimensions, shared_size),
        },
        _ => FeedForward::Experts(experts(config, &dimensions, shared_size)?),
    };
    let has_attention = match config
        .get("layer_types")
        .or(config.get("layers_block_type"))
    {
        Some(_) => layers_of_type(config, spec.num_layers(), &LAYER_TYPES)?,
        None => vec![false; spec.num_layers()],
    };
    let space = StateSpace::read(config, &dimensions)?;
    for (layer, has_attention) in spec.layers.iter_mut().zip(has_attention) {
        layer.feed_forward = feed_forward.clone();
        if !has_rope {
            layer.attention.rope = Rope::none();
        }
        if !has_attention {
            space.replace(&mut layer.attention, dimensions.hidden_size);
        }
    }
    Ok(spec)
}

fn experts(
    config: &JsonFile,
    dimensions: &Dimensions,
    shared_size: usize,
) -> Result<ExpertsSpec, LoadError> {
    let defaults = ExpertDefaults {
        num_experts: 8,
        num_chosen: 2,
    };
    let rule = RoutingRule::Softmax {
        is_normalised: true,
    };
    let routing = routing(config, &defaults, rule)?;
    let mut experts = dimensions.experts(&MODULES, routing, dimensions.intermediate_size);
    if shared_size > 0 {
        experts.shared = Some(SharedExpert {
            gate_up: shared_gate_up(dimensions, shared_size),
            down: shared_down(dimensions, shared_size),
        });
    }
    Ok(experts)
}

fn shared_gate_up(dimensions: &Dimensions, size: usize) -> Projection {
    Projection::fused(
        "shared_mlp.input_linear",
        &[size, size],
        dimensions.hidden_size,
        Stacking::Interleaved,
    )
}

fn shared_down(dimensions: &Dimensions, size: usize) -> Projection {
    Projection::single("shared_mlp.output_linear", dimensions.hidden_size, size)
}
