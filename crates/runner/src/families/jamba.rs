//! Jamba, by AI21: attention without positions in one of eight layers, the selective scan of Mamba in the others, and
//! experts in every other layer.
//!
//! Times, keys and queries of the scan are normalised. The experts of a token are weighted by the softmax over all.
//!
//! Source: configuration_jamba.py and modeling_jamba.py of transformers; Lieber et al., arXiv:2403.19887.

use super::bamba::feed_forward;
use super::bounds::{MAX_HEAD_DIM, MAX_LAYERS, MAX_WIDTH};
use super::dimensions::{Defaults, Dimensions, Sizes};
use super::experts::{ExpertDefaults, ExpertModules, routing};
use super::family::Family;
use super::recurrent::{MAX_KERNEL_LEN, check_activation};
use super::windows::no_windows;
use crate::recurrence_spec::{RecurrenceSpec, RuleModules};
use crate::rope::Rope;
use crate::spec::{
    AttentionSpec, FeedForward, LateInputsSpec, ModelSpec, Norms, Projection, StackedExperts,
    StackedLayout,
};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::{RecurrenceShape, RecurrentRule, RoutingRule, ScanShape};
use inflight_numbers::Stacking;

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
    let routing = routing(config, &experts, rule)?;
    let experts = dimensions.experts(&MODULES, routing, dimensions.intermediate_size);
    let mut layer = dimensions.llama_layer();
    layer.norms = Norms::before("input_layernorm", "pre_ff_layernorm");
    layer.feed_forward = feed_forward(&dimensions);
    let scan = Scan::read(config, &dimensions)?;
    let (hidden, num_layers) = (dimensions.hidden_size, dimensions.num_layers);
    let has_attention = every(config, ["attn_layer_period", "attn_layer_offset"], [8, 4])?;
    let has_experts = every(
        config,
        ["expert_layer_period", "expert_layer_offset"],
        [2, 1],
    )?;
    let mut spec = dimensions.model(FAMILY.class, layer, no_windows(num_layers));
    spec.modules.final_norm = Some("model.final_layernorm");
    for (index, layer) in spec.layers.iter_mut().enumerate() {
        if routing.num_experts > 1 && has_experts(index) {
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

/// The selective scan of a layer without attention.
struct Scan {
    shape: ScanShape,
    kernel_len: usize,
    /// Results of the first projection of times.
    rank: usize,
    has_convolution_bias: bool,
    has_bias: bool,
}

impl Scan {
    fn read(config: &JsonFile, dimensions: &Dimensions) -> Result<Self, LoadError> {
        const RANK: &str = "mamba_dt_rank";
        let size = |key, max, default: usize| Ok(config.size(key, 1..=max)?.unwrap_or(default));
        let hidden = dimensions.hidden_size;
        let told = match config.string(RANK) {
            Ok(Some("auto")) => None,
            _ => config.size(RANK, 1..=MAX_WIDTH)?,
        };
        Ok(Self {
            shape: ScanShape {
                num_channels: size("mamba_expand", 16, 2)? * hidden,
                state_dim: size("mamba_d_state", MAX_HEAD_DIM, 16)?,
                norm_eps: Some(dimensions.norm.eps),
            },
            kernel_len: size("mamba_d_conv", MAX_KERNEL_LEN, 4)?,
            rank: told.unwrap_or(hidden.div_ceil(16)),
            has_convolution_bias: config.bool_or("mamba_conv_bias", true)?,
            has_bias: config.bool_or("mamba_proj_bias", false)?,
        })
    }

    /// Puts it in the place of attention.
    fn replace(&self, attention: &mut AttentionSpec, hidden_size: usize) {
        let ScanShape {
            num_channels,
            state_dim,
            norm_eps,
        } = self.shape;
        let projection = |module, outputs, inputs| {
            Projection::single(module, outputs, inputs).with_bias(self.has_bias)
        };
        // Times of low rank, keys, queries.
        let parts = [self.rank, state_dim, state_dim];
        let module = "mamba.x_proj";
        let mut times = Projection::fused(module, &parts, num_channels, Stacking::Concatenated);
        let mut keys = times.clone();
        keys.parts.remove(0);
        times.parts.truncate(1);
        attention.qkv = projection("mamba.in_proj", 2 * num_channels, hidden_size);
        attention.o = projection("mamba.out_proj", hidden_size, num_channels);
        attention.late = Some(LateInputsSpec::Selected {
            times: [
                times,
                Projection::single("mamba.dt_proj", num_channels, self.rank),
            ],
            time_norm: norm_eps.map(|eps| ("mamba.dt_layernorm", eps)),
            keys,
        });
        attention.recurrence = Some(RecurrenceSpec {
            shape: RecurrenceShape {
                kernel_len: self.kernel_len,
                rule: RecurrentRule::SelectiveScan(self.shape),
            },
            convolution: "mamba.conv1d",
            convolution_parts: None,
            has_convolution_bias: self.has_convolution_bias,
            modules: Some(RuleModules {
                log_rates: "mamba.A_log",
                time_biases: "mamba.dt_proj.bias",
                skips: Some("mamba.D"),
                norm: None,
                key_norms: Some(["mamba.b_layernorm", "mamba.c_layernorm"]),
            }),
        });
    }
}
