//! Jamba, by AI21: attention without positions in one of eight layers, the selective scan of Mamba in the others, and
//! experts in every other layer; or, with one expert, an ordinary block in each.
//!
//! Times, keys and queries of the scan are normalised. The experts of a token are weighted by the softmax over all.
//!
//! Source: configuration_jamba.py and modeling_jamba.py of transformers; Lieber et al., arXiv:2403.19887.

use serde_json::{Map, Value, json};

use super::bamba::feed_forward;
use super::bounds::{MAX_EXPERTS, MAX_LAYERS};
use super::dimensions::{Defaults, Dimensions, Sizes};
use super::experts::{ExpertDefaults, ExpertModules, routing};
use super::family::Family;
use super::gguf::{GgufArchitecture, GgufConfig, GgufExperts};
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
    gguf: Some(GgufArchitecture {
        modules: &[
            ("pre_ff_layernorm", "ffn_norm"),
            ("feed_forward.gate_proj", "ffn_gate"),
            ("feed_forward.up_proj", "ffn_up"),
            ("feed_forward.down_proj", "ffn_down"),
            ("feed_forward.router", "ffn_gate_inp"),
            ("feed_forward.experts.{}.gate_proj", "ffn_gate_exps"),
            ("feed_forward.experts.{}.up_proj", "ffn_up_exps"),
            ("feed_forward.experts.{}.down_proj", "ffn_down_exps"),
            ("mamba.in_proj", "ssm_in"),
            ("mamba.conv1d", "ssm_conv1d"),
            ("mamba.x_proj", "ssm_x"),
            ("mamba.dt_proj", "ssm_dt"),
            ("mamba.dt_proj.bias", "ssm_dt.bias"),
            ("mamba.dt_layernorm", "ssm_dt_norm"),
            ("mamba.b_layernorm", "ssm_b_norm"),
            ("mamba.c_layernorm", "ssm_c_norm"),
            ("mamba.A_log", "ssm_a"),
            ("mamba.D", "ssm_d"),
            ("mamba.out_proj", "ssm_out"),
        ],
        keys: &[
            ("ssm.conv_kernel", "mamba_d_conv"),
            ("ssm.state_size", "mamba_d_state"),
            ("ssm.time_step_rank", "mamba_dt_rank"),
        ],
        experts: Some(GgufExperts::softmax(false)),
        may_lack_blocks: true,
        optional_biases: &[
            ("mamba_conv_bias", "mamba.conv1d"),
            ("mamba_proj_bias", "mamba.in_proj"),
        ],
        add_read: add_layers,
        ..GgufArchitecture::named("jamba")
    }),
    describe,
};

/// Adds the width of the scan, and which layers have attention and experts: as the distance of such layers and the
/// first one, which is how a config tells it.
fn add_layers(gguf: &GgufConfig<'_>, config: &mut Map<String, Value>) -> Result<(), LoadError> {
    let expand = gguf.quotient("ssm.inner_size", "embedding_length")?;
    config.insert("mamba_expand".to_owned(), json!(expand));
    const HEADS: &str = "attention.head_count_kv";
    let has_attention = gguf.required_layers_with(HEADS)?;
    let has_experts = gguf.layers_with_tensor("ffn_gate_inp.weight")?;
    for (key, has, [period, offset]) in [
        (HEADS, has_attention, ATTENTION_LAYERS),
        ("expert_count", has_experts, EXPERT_LAYERS),
    ] {
        let (num, first) = regular(&has).ok_or_else(|| {
            let problem = "is for layers at irregular distances, as tensors and heads tell";
            gguf.error(key, problem, "such models are not supported")
        })?;
        config.insert(period.to_owned(), json!(num));
        config.insert(offset.to_owned(), json!(first));
    }
    Ok(())
}

/// The distance of layers that have something, and the first one; `None` if distances differ.
fn regular(has: &[bool]) -> Option<(usize, usize)> {
    let having = || (0..has.len()).filter(|&layer| has[layer]);
    let first = having().next().unwrap_or(has.len());
    let num = match having().nth(1) {
        Some(second) => second - first,
        // Behind the last layer.
        None => has.len() + 1,
    };
    let is_regular = (0..has.len()).all(|layer| has[layer] == (layer % num == first));
    is_regular.then_some((num, first))
}

/// The keys of the distance of layers with attention or experts, and of the first one.
const ATTENTION_LAYERS: [&str; 2] = ["attn_layer_period", "attn_layer_offset"];
const EXPERT_LAYERS: [&str; 2] = ["expert_layer_period", "expert_layer_offset"];

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
    let has_attention = every(config, ATTENTION_LAYERS, [8, 4])?;
    let has_experts = every(config, EXPERT_LAYERS, [2, 1])?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_at_regular_distances_have_a_distance_and_a_first_one() {
        let of = |layers: &str| {
            let has: Vec<_> = layers.chars().map(|layer| layer == 'x').collect();
            regular(&has)
        };
        for (layers, expected) in [
            ("....x.......x...", Some((8, 4))),
            (".x.x.x", Some((2, 1))),
            ("xxx", Some((1, 0))),
            ("..x.", Some((5, 2))),
            ("....", Some((5, 4))),
            ("x.x.xx", None),
            ("....x.x", None),
            ("xx..", None),
        ] {
            assert_eq!(of(layers), expected, "{layers}");
        }
    }
}
