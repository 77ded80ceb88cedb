//! LFM2 and LFM2-MoE, by Liquid AI: gated convolutions, and attention in some layers.
//!
//! A convolution reads the products `b * x` of `conv_L_cache` tokens, and `c` multiplies its sums. Attention has an RMS
//! norm of each query and key head. `layer_types` tells which layer is which or, in older configs, `full_attn_idxs`.
//! The width of the feed-forward blocks is `intermediate_size` times `2 / 3` and `block_ffn_dim_multiplier`, rounded up
//! to a multiple of `block_multiple_of`, unless `block_auto_adjust_ff_dim` is false. Experts, behind the first
//! `num_dense_layers`, are chosen by the sigmoids of their logits and a correction, `expert_bias`.
//!
//! Source: configuration_*.py and modeling_*.py of lfm2 and lfm2_moe of transformers; Liquid AI, arXiv:2511.23404.

use serde_json::{Map, Value as Json, json};

use super::bounds::{MAX_LAYERS, MAX_WIDTH};
use super::dimensions::{Defaults, Dimensions, Keys, Sizes};
use super::experts::{ExpertDefaults, ExpertModules, routing, scores_rule, width};
use super::family::Family;
use super::gguf::{GgufArchitecture, GgufConfig, GgufExperts};
use super::layer_lists::listed_layers;
use super::recurrent::{MAX_KERNEL_LEN, layers_of_type};
use super::rope_config::RopeDefaults;
use super::windows::no_windows;
use crate::recurrence_spec::RecurrenceSpec;
use crate::spec::{
    AttentionSpec, ExpertsSpec, FeedForward, ModelSpec, Norms, Projection, QkNormSpec,
    StackedExperts, StackedLayout,
};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::{Activation, QkNormKind, RecurrenceShape, RecurrentRule, RouterScores};
use inflight_numbers::Stacking;

pub const LFM2: Family = Family {
    class: "Lfm2ForCausalLM",
    gguf: Some(GgufArchitecture {
        // The metadata have the adjusted width.
        add_fixed: |config| {
            config.insert("block_auto_adjust_ff_dim".to_owned(), json!(false));
        },
        ..GGUF_ARCHITECTURE
    }),
    describe: |config| {
        let sizes = Sizes::new(65_536, 2560, 12_288, 32, 32, 128_000);
        let mut dimensions = dimensions(config, sizes)?;
        dimensions.intermediate_size = inner_size(config, dimensions.intermediate_size)?;
        let has_attention = match config.get("layer_types").is_some() {
            true => layers_of_type(config, dimensions.num_layers, LAYER_TYPES)?,
            false => listed_layers(config, "full_attn_idxs", dimensions.num_layers)?
                .unwrap_or_else(|| vec![true; dimensions.num_layers]),
        };
        describe(config, dimensions, LFM2.class, &has_attention)
    },
};

pub const LFM2_MOE: Family = Family {
    class: "Lfm2MoeForCausalLM",
    gguf: Some(GgufArchitecture {
        name: "lfm2moe",
        experts: Some(GgufExperts {
            is_normalised: true,
            has_scale: true,
            gating: 2,
        }),
        ..GGUF_ARCHITECTURE
    }),
    describe: |config| {
        let sizes = Sizes::new(65_536, 2048, 7168, 32, 32, 128_000);
        let dimensions = dimensions(config, sizes)?;
        let has_attention = layers_of_type(config, dimensions.num_layers, LAYER_TYPES)?;
        let experts = experts(config, &dimensions)?;
        let num_dense = config.size("num_dense_layers", 0..=MAX_LAYERS)?;
        let mut spec = describe(config, dimensions, LFM2_MOE.class, &has_attention)?;
        for layer in spec.layers.iter_mut().skip(num_dense.unwrap_or(2)) {
            layer.feed_forward = FeedForward::Experts(experts.clone());
        }
        Ok(spec)
    },
};

/// How llama.cpp stores the families.
const GGUF_ARCHITECTURE: GgufArchitecture = GgufArchitecture {
    modules: &[
        ("operator_norm", "attn_norm"),
        ("ffn_norm", "ffn_norm"),
        ("self_attn.q_layernorm", "attn_q_norm"),
        ("self_attn.k_layernorm", "attn_k_norm"),
        ("self_attn.out_proj", "attn_output"),
        ("conv.in_proj", "shortconv.in_proj"),
        ("conv.conv", "shortconv.conv"),
        ("conv.out_proj", "shortconv.out_proj"),
        ("feed_forward.w1", "ffn_gate"),
        ("feed_forward.w2", "ffn_down"),
        ("feed_forward.w3", "ffn_up"),
        ("feed_forward.gate", "ffn_gate_inp"),
        ("feed_forward.experts.{}.w1", "ffn_gate_exps"),
        ("feed_forward.experts.{}.w2", "ffn_down_exps"),
        ("feed_forward.experts.{}.w3", "ffn_up_exps"),
        ("feed_forward.expert_bias", "exp_probs_b"),
    ],
    keys: &[
        ("attention.layer_norm_rms_epsilon", "norm_eps"),
        ("shortconv.l_cache", "conv_L_cache"),
        ("leading_dense_block_count", "num_dense_layers"),
    ],
    may_lack_blocks: true,
    add_read: |gguf: &GgufConfig<'_>, config: &mut Map<String, Json>| {
        if let Some(has_attention) = gguf.layers_with("attention.head_count_kv")? {
            GgufConfig::add_layer_types(config, &has_attention, LAYER_TYPES[0]);
        }
        Ok(())
    },
    ..GgufArchitecture::named("lfm2")
};

/// What `layer_types` calls the layers.
const LAYER_TYPES: &[[&str; 2]] = &[["conv", "full_attention"]];

/// The names of experts.
const MODULES: ExpertModules = ExpertModules {
    router: "feed_forward.gate",
    gate: "feed_forward.experts.{}.w1",
    up: "feed_forward.experts.{}.w3",
    down: "feed_forward.experts.{}.w2",
    stacked: StackedExperts {
        router: "feed_forward.gate",
        gate_up: "feed_forward.experts.gate_up_proj",
        down: "feed_forward.experts.down_proj",
        layout: StackedLayout::Outputs,
    },
};

fn dimensions(config: &JsonFile, sizes: Sizes) -> Result<Dimensions, LoadError> {
    let defaults = Defaults {
        sizes: Some(sizes),
        num_kv_heads: Some(8),
        norm_eps: 1e-5,
        rope: RopeDefaults {
            theta: 1_000_000.0,
            ..Defaults::LLAMA.rope
        },
        tied_embeddings: true,
        keys: Keys {
            norm_eps: "norm_eps",
            ..Keys::LLAMA
        },
        ..Defaults::LLAMA
    };
    let dimensions = Dimensions::from_config(config, &defaults)?;
    Ok(Dimensions {
        tied_embeddings: config.bool_or("tie_embedding", dimensions.tied_embeddings)?,
        // Whatever `hidden_act` says.
        activation: Activation::Silu,
        ..dimensions
    })
}

fn describe(
    config: &JsonFile,
    dimensions: Dimensions,
    class: &'static str,
    has_attention: &[bool],
) -> Result<ModelSpec, LoadError> {
    let hidden = dimensions.hidden_size;
    let eps = dimensions.norm.eps;
    let mut layer = dimensions.llama_layer();
    layer.norms = Norms::before("operator_norm", "ffn_norm");
    layer.attention.qk_norm = Some(QkNormSpec {
        q: "self_attn.q_layernorm",
        k: "self_attn.k_layernorm",
        kind: QkNormKind::Head,
        has_values: false,
        eps,
    });
    let num_inputs = layer.attention.o.num_inputs;
    layer.attention.o = Projection::single("self_attn.out_proj", hidden, num_inputs);
    layer.feed_forward = gated(&dimensions);
    let kernel_len = config.size("conv_L_cache", 1..=MAX_KERNEL_LEN)?;
    let has_bias = config.bool_or("conv_bias", false)?;
    let windows = no_windows(dimensions.num_layers);
    let mut spec = dimensions.model(class, layer, windows);
    spec.modules.final_norm = Some("model.embedding_norm");
    for (layer, has_attention) in spec.layers.iter_mut().zip(has_attention) {
        if *has_attention {
            continue;
        }
        convolution(
            &mut layer.attention,
            hidden,
            kernel_len.unwrap_or(3),
            has_bias,
        );
    }
    Ok(spec)
}

/// Replaces attention by a convolution.
pub fn convolution(
    attention: &mut AttentionSpec,
    hidden: usize,
    kernel_len: usize,
    has_bias: bool,
) {
    attention.qk_norm = None;
    let inputs = [hidden; 3];
    attention.qkv = Projection::fused("conv.in_proj", &inputs, hidden, Stacking::Concatenated);
    attention.o = Projection::single("conv.out_proj", hidden, hidden);
    attention.set_biases(has_bias);
    attention.recurrence = Some(RecurrenceSpec {
        shape: RecurrenceShape {
            kernel_len,
            rule: RecurrentRule::GatedConvolution {
                num_channels: hidden,
            },
        },
        convolution: "conv.conv",
        convolution_parts: None,
        has_convolution_bias: has_bias,
        modules: None,
    });
}

/// A feed-forward block under the names of the families.
pub fn gated(dimensions: &Dimensions) -> FeedForward {
    let (hidden, inner) = (dimensions.hidden_size, dimensions.intermediate_size);
    let gate_up = [("feed_forward.w1", inner), ("feed_forward.w3", inner)];
    FeedForward::Gated {
        gate_up: Projection::stacked(&gate_up, hidden, Stacking::Interleaved),
        activation: dimensions.activation,
        down: Projection::single("feed_forward.w2", hidden, inner),
    }
}

fn experts(config: &JsonFile, dimensions: &Dimensions) -> Result<ExpertsSpec, LoadError> {
    let is_normalised = config.bool_or("norm_topk_prob", true)?;
    let scale = config.number("routed_scaling_factor", 0.0..=1e6)?;
    let rule = scores_rule(
        RouterScores::Sigmoid,
        is_normalised,
        scale.unwrap_or(1.0) as f32,
    );
    let defaults = ExpertDefaults {
        num_experts: 32,
        num_chosen: 4,
    };
    let routing = routing(config, &defaults, rule)?;
    let expert_size = width(config, "moe_intermediate_size", 1792)?;
    let mut experts = dimensions.experts(&MODULES, routing, expert_size);
    if config.bool_or("use_expert_bias", true)? {
        experts.correction = Some("feed_forward.expert_bias");
    }
    Ok(experts)
}

/// The width of the feed-forward blocks, from the one that config.json tells.
fn inner_size(config: &JsonFile, told: usize) -> Result<usize, LoadError> {
    let told = config.size("block_ff_dim", 1..=MAX_WIDTH)?.unwrap_or(told);
    if !config.bool_or("block_auto_adjust_ff_dim", true)? {
        return Ok(told);
    }
    const MULTIPLIER: &str = "block_ffn_dim_multiplier";
    let two_thirds = 2 * told / 3;
    // An explicit null leaves it at that.
    if config.has(MULTIPLIER) && config.get(MULTIPLIER).is_none() {
        return checked(config, MULTIPLIER, two_thirds);
    }
    let multiplier = config.number(MULTIPLIER, 0.0..=16.0)?.unwrap_or(1.0);
    let unit = config.size("block_multiple_of", 1..=MAX_WIDTH)?;
    let adjusted = (multiplier * two_thirds as f64) as usize;
    checked(
        config,
        MULTIPLIER,
        adjusted.next_multiple_of(unit.unwrap_or(256)),
    )
}

fn checked(config: &JsonFile, key: &str, inner: usize) -> Result<usize, LoadError> {
    match (1..=MAX_WIDTH).contains(&inner) {
        true => Ok(inner),
        false => Err(config.error(format!(
            "the width of the feed-forward blocks, by intermediate_size and {key}, is {inner}; expected 1 to {MAX_WIDTH}"
        ))),
    }
}
