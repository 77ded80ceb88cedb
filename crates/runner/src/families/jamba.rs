//! Jamba, by AI21: attention without positions in one of eight layers, the selective scan of Mamba in the others, and
//! experts in every other layer; or, with one expert, an ordinary block in each.
//!
//! Times, keys and queries of the scan are normalised. The experts of a token are weighted by the softmax over all.
//!
//! Source: configuration_jamba.py and modeling_jamba.py of transformers; Lieber et al., arXiv:2403.19887.

use super::bamba::feed_forward;
use super::bounds::{MAX_EXPERTS, MAX_LAYERS};
use super::dimensions::{Defaults, Dimensions, Sizes};
use super::experts::{ExpertDefaults, ExpertModules, routing};
use super::family::Family;
use super::recurrent::check_activation;
use super::selective_scan::{ScanKeys, ScanModules, SelectiveScan};
use super::windows::no_windows;
use crate::recurrence_spec::RuleModules;
use crate::rope::Rope;
use crate::spec::{FeedForward, ModelSpec, Norms, StackedExperts, StackedLayout};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::RoutingRule;

pub const FAMILY: Family = Family {
    class: "JambaForCausalLM",
    gguf: None,
    describe,
};

const MODULES: ExpertModules = ExpertModules {
    router: "feed_forward.router",
    gate: "feed_forward.experts.{}.gate_proj",
    up: "feed_forward.experts.{}.up_proj",
    down: "feed_forward.experts.{}.down_proj",
    stacked: StackedExperts {
        router: "feed_forward.router",
        gate_up: "feed_forward.experts.gate_up_proj",
        down: "feed_forward.experts.down_proj",
        layout: StackedLayout::Outputs,
    },
};

const KEYS: ScanKeys = ScanKeys {
    num_channels: None,
    expand: "mamba_expand",
    state_dim: "mamba_d_state",
    kernel_len: "mamba_d_conv",
    rank: "mamba_dt_rank",
    has_convolution_bias: "mamba_conv_bias",
    has_bias: "mamba_proj_bias",
};

const SCAN_MODULES: ScanModules = ScanModules {
    input: "mamba.in_proj",
    convolution: "mamba.conv1d",
    selection: "mamba.x_proj",
    times: "mamba.dt_proj",
    time_norm: Some("mamba.dt_layernorm"),
    rule: RuleModules {
        log_rates: "mamba.A_log",
        time_biases: "mamba.dt_proj.bias",
        skips: Some("mamba.D"),
        norm: None,
        key_norms: Some(["mamba.b_layernorm", "mamba.c_layernorm"]),
    },
    output: "mamba.out_proj",
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(65_536, 4096, 14_336, 32, 32, 262_144)),
        num_kv_heads: Some(8),
        ..Defaults::LLAMA
    };
    let dimensions = Dimensions {
        rope: Rope::none(),
        ..Dimensions::from_config(config, &defaults)?
    };
    check_activation(config, dimensions.activation)?;
    let experts = ExpertDefaults {
        num_experts: 16,
        num_chosen: 2,
    };
    let rule = RoutingRule::Softmax {
        is_normalised: false,
    };
    // One expert is an ordinary block, whatever `num_experts_per_tok` says.
    let experts = match config.size("num_experts", 1..=MAX_EXPERTS)? {
        Some(1) => None,
        _ => {
            let routing = routing(config, &experts, rule)?;
            Some(dimensions.experts(&MODULES, routing, dimensions.intermediate_size))
        }
    };
    let mut layer = dimensions.llama_layer();
    layer.norms = Norms::before("input_layernorm", "pre_ff_layernorm");
    layer.feed_forward = feed_forward(&dimensions);
    let (hidden, num_layers) = (dimensions.hidden_size, dimensions.num_layers);
    let norm_eps = Some(dimensions.norm.eps);
    let scan = SelectiveScan::read(config, &KEYS, SCAN_MODULES, hidden, norm_eps)?;
    let has_attention = every(config, ["attn_layer_period", "attn_layer_offset"], [8, 4])?;
    let has_experts = every(
        config,
        ["expert_layer_period", "expert_layer_offset"],
        [2, 1],
    )?;
    let mut spec = dimensions.model(FAMILY.class, layer, no_windows(num_layers));
    spec.modules.final_norm = Some("model.final_layernorm");
    for (index, layer) in spec.layers.iter_mut().enumerate() {
        if let Some(experts) = experts.as_ref().filter(|_| has_experts(index)) {
            layer.feed_forward = FeedForward::Experts(experts.clone());
        }
        if !has_attention(index) {
            scan.replace(&mut layer.attention, hidden);
        }
    }
    Ok(spec)
}

/// Whether a layer is one of every so many, by the keys of their distance and of the first one.
fn every(
    config: &JsonFile,
    [period, offset]: [&str; 2],
    [default_period, default_offset]: [usize; 2],
) -> Result<impl Fn(usize) -> bool, LoadError> {
    let num = config.size(period, 1..=MAX_LAYERS)?;
    let num = num.unwrap_or(default_period);
    let first = config.size(offset, 0..=MAX_LAYERS)?;
    let first = first.unwrap_or(default_offset);
    match first < num {
        true => Ok(move |layer: usize| layer % num == first),
        false => Err(config.unexpected(offset, first, format_args!("below {period}, {num}"))),
    }
}
