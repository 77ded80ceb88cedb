//! Granite with experts, by IBM, and Granite 4, whose layers mostly have a state space in place of attention.
//!
//! The multipliers of the dense models, and experts whose weights are a softmax of the chosen logits. GraniteMoeShared
//! and Granite 4 add a block that all tokens have; a Granite 4 without experts has nothing else. `layer_types` of
//! Granite 4 tells which layers have attention, which has positions only if `position_embedding_type` is `rope`; the
//! others have the state space of Mamba-2.
//!
//! Source: configuration_*.py and modeling_*.py of granitemoe, granitemoeshared and granitemoehybrid of transformers.

use serde_json::{Map, Value as Json, json};

use super::bounds::{MAX_EXPERTS, MAX_WIDTH};
use super::dimensions::Dimensions;
use super::experts::{ExpertDefaults, ExpertModules, routing, width};
use super::family::Family;
use super::gguf::{GgufArchitecture, GgufConfig, GgufExperts, QUERIES_AND_KEYS};
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
    gguf: Some(GgufArchitecture {
        add_fixed: |config| {
            // A GraniteMoe is one whose shared block has no width.
            config.entry(SHARED_SIZE).or_insert(json!(0));
        },
        ..GGUF_ARCHITECTURE
    }),
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
    let shared_size = config.size(SHARED_SIZE, 0..=MAX_WIDTH)?;
    let experts = experts(config, dimensions, shared_size.unwrap_or(0))?;
    for layer in &mut spec.layers {
        layer.feed_forward = FeedForward::Experts(experts.clone());
    }
    Ok(())
}

pub const GRANITE_4: Family = Family {
    class: "GraniteMoeHybridForCausalLM",
    gguf: Some(GGUF_GRANITE_4),
    describe: describe_hybrid,
};

/// How llama.cpp stores a Granite 4 without experts.
pub const DENSE_GGUF: GgufArchitecture = GgufArchitecture {
    experts: None,
    add_fixed: |config| {
        config.insert("num_local_experts".to_owned(), json!(0));
        // The shared block is the only one.
        let width = config.get("intermediate_size").cloned();
        config.entry(SHARED_SIZE).or_insert(json!(width));
    },
    ..GGUF_GRANITE_4
};

const SHARED_SIZE: &str = "shared_intermediate_size";

/// How llama.cpp stores the families with experts.
const GGUF_ARCHITECTURE: GgufArchitecture = GgufArchitecture {
    modules: &[
        ("block_sparse_moe.router.layer", "ffn_gate_inp"),
        ("mamba.in_proj", "ssm_in"),
        ("mamba.conv1d", "ssm_conv1d"),
        ("mamba.A_log", "ssm_a"),
        ("mamba.dt_bias", "ssm_dt"),
        ("mamba.D", "ssm_d"),
        ("mamba.norm", "ssm_norm"),
        ("mamba.out_proj", "ssm_out"),
    ],
    keys: &[
        ("attention.scale", "attention_multiplier"),
        ("embedding_scale", "embedding_multiplier"),
        ("residual_scale", "residual_multiplier"),
        ("logit_scale", "logits_scaling"),
        ("expert_used_count", "num_experts_per_tok"),
        ("expert_shared_feed_forward_length", SHARED_SIZE),
        ("ssm.conv_kernel", "mamba_d_conv"),
        ("ssm.state_size", "mamba_d_state"),
        ("ssm.group_count", "mamba_n_groups"),
        ("ssm.time_step_rank", "mamba_n_heads"),
    ],
    // The converter writes the sizes of state spaces that the model does not have.
    add_read: |gguf, _| {
        gguf.get("ssm.inner_size");
        Ok(())
    },
    permuted: QUERIES_AND_KEYS,
    experts: Some(GgufExperts::softmax(true)),
    rewrite: |_, spec| {
        split_blocks(spec);
        Ok(())
    },
    ..GgufArchitecture::named("granitemoe")
};

const GGUF_GRANITE_4: GgufArchitecture = GgufArchitecture {
    name: "granitehybrid",
    may_lack_blocks: true,
    optional_biases: &[
        ("mamba_conv_bias", "mamba.conv1d"),
        ("mamba_proj_bias", "mamba.in_proj"),
    ],
    add_read: add_spaces,
    ..GGUF_ARCHITECTURE
};

/// Adds which layers have a state space, its width, and whether the others have a position embedding.
fn add_spaces(gguf: &GgufConfig<'_>, config: &mut Map<String, Json>) -> Result<(), LoadError> {
    if let Some(has_attention) = gguf.layers_with("attention.head_count_kv")? {
        GgufConfig::add_layer_types(config, &has_attention, LAYER_TYPES[0]);
    }
    let head_dim = gguf.quotient("ssm.inner_size", "ssm.time_step_rank")?;
    config.insert("mamba_d_head".to_owned(), json!(head_dim));
    let expand = gguf.quotient("ssm.inner_size", "embedding_length")?;
    config.insert("mamba_expand".to_owned(), json!(expand));
    // llama.cpp takes this key for a switch of RoPE, which is on without it.
    let has_rope = gguf.value("rope.scaling.finetuned")? != Some(json!(false));
    let positions = if has_rope { "rope" } else { "nope" };
    config.insert("position_embedding_type".to_owned(), json!(positions));
    Ok(())
}

/// Gives gate and up of blocks modules of their own, with the usual names.
fn split_blocks(spec: &mut ModelSpec) {
    let hidden = spec.hidden_size;
    for layer in &mut spec.layers {
        match &mut layer.feed_forward {
            FeedForward::Gated { gate_up, down, .. } => {
                let width = down.num_inputs;
                let parts = [("mlp.gate_proj", width), ("mlp.up_proj", width)];
                *gate_up = Projection::stacked(&parts, hidden, gate_up.stacking);
                *down = Projection::single("mlp.down_proj", hidden, width);
            }
            FeedForward::Experts(experts) => {
                experts.unstack();
                if let Some(SharedExpert { gate_up, down, .. }) = &mut experts.shared {
                    let width = down.num_inputs;
                    let parts = [
                        ("mlp.shared_experts.gate_proj", width),
                        ("mlp.shared_experts.up_proj", width),
                    ];
                    *gate_up = Projection::stacked(&parts, hidden, gate_up.stacking);
                    *down = Projection::single("mlp.shared_experts.down_proj", hidden, width);
                }
            }
            FeedForward::Plain { .. } => {}
        }
    }
}

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
    let shared_size = width(config, SHARED_SIZE, 1024)?;
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
            gating: None,
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
