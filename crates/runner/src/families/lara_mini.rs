//! Lara 4 Mini, by Translated: the gated delta rule in some layers, and Qwen 3's attention in the others.
//!
//! `layer_types` tells which layer is which or, where config.json is silent, a pattern of five. Layers with a window
//! have positions, and those that see all tokens have none. The rule is Qwen 3.5's, and reads one projection. Each
//! layer has experts: those with the largest softmax, whose weights are divided by their sum unless `norm_topk_prob` is
//! false, and one that all tokens have.
//!
//! Source: configuration_lara_mini.py and modeling_lara_mini.py of transformers, and its conversion_mapping.py.

use super::dimensions::{Defaults, Dimensions, Sizes};
use super::experts::{EXPERT_MODULES, ExpertDefaults, SHARED_EXPERT, routing, width};
use super::family::Family;
use super::layer_lists::kinds_of_layers;
use super::qwen3_next::{DeltaDefaults, delta_recurrence, delta_shape};
use super::recurrent::{MAX_KERNEL_LEN, check_activation};
use super::windows::windows_of;
use crate::rope::Rope;
use crate::spec::{ExpertsSpec, FeedForward, ModelSpec, Projection, QkNormSpec};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::{DeltaShape, RoutingRule};
use inflight_numbers::Stacking;

pub const FAMILY: Family = Family {
    class: "LaraMiniForCausalLM",
    gguf: None,
    describe,
};

/// The block in front of the experts of a layer.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Recurrent,
    Windowed,
    Full,
}

const KINDS: [(&str, Kind); 3] = [
    ("linear_attention", Kind::Recurrent),
    ("sliding_attention", Kind::Windowed),
    ("full_attention", Kind::Full),
];

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        // No layer has a block of the intermediate size.
        sizes: Some(Sizes::new(151_936, 1024, 512, 34, 16, 131_072)),
        num_kv_heads: Some(4),
        head_dim: Some(128),
        tied_embeddings: true,
        ..Defaults::LLAMA
    };
    let dimensions = Dimensions::from_config(config, &defaults)?;
    check_activation(config, dimensions.activation)?;
    let (hidden, num_layers) = (dimensions.hidden_size, dimensions.num_layers);
    let kinds = kinds(config, num_layers)?;
    let is_windowed: Vec<_> = kinds.iter().map(|it| *it == Kind::Windowed).collect();
    let windows = windows_of(config, &is_windowed, 512)?;
    let delta_defaults = DeltaDefaults {
        heads: [8, 16],
        key_dim: |_| 128,
        value_dim: |_| 128,
    };
    let delta = delta_shape(config, &delta_defaults, dimensions.norm.eps)?;
    let kernel_len = config.size("linear_conv_kernel_dim", 1..=MAX_KERNEL_LEN)?;
    let mut layer = dimensions.llama_layer();
    layer.attention.qk_norm = Some(QkNormSpec::of_heads(dimensions.norm.eps));
    layer
        .attention
        .set_biases(config.bool_or("attention_bias", false)?);
    layer.feed_forward = FeedForward::Experts(experts(config, &dimensions)?);
    let mut spec = dimensions.model(FAMILY.class, layer, windows);
    for (layer, kind) in spec.layers.iter_mut().zip(kinds) {
        let attention = &mut layer.attention;
        if kind != Kind::Windowed {
            attention.rope = Rope::none();
        }
        if kind != Kind::Recurrent {
            continue;
        }
        attention.qk_norm = None;
        attention.qkv = inputs(&delta, hidden);
        attention.o = Projection::single("linear_attn.out_proj", hidden, delta.value_len());
        attention.recurrence = Some(delta_recurrence(delta, kernel_len, "linear_attn.out_norm"));
    }
    Ok(spec)
}

fn kinds(config: &JsonFile, num_layers: usize) -> Result<Vec<Kind>, LoadError> {
    const KEY: &str = "layer_types";
    const PATTERN: [Kind; 5] = [
        Kind::Recurrent,
        Kind::Windowed,
        Kind::Recurrent,
        Kind::Full,
        Kind::Windowed,
    ];
    match config.get(KEY) {
        Some(told) => kinds_of_layers(config, (KEY, told), num_layers, &KINDS),
        None => Ok(PATTERN.into_iter().cycle().take(num_layers).collect()),
    }
}

/// The input projection in one module: queries, keys and values, gates, strengths, decays.
fn inputs(delta: &DeltaShape, hidden_size: usize) -> Projection {
    let num_heads = delta.num_value_heads;
    let widths = [
        2 * delta.key_len() + delta.value_len(),
        delta.value_len(),
        num_heads,
        num_heads,
    ];
    Projection::fused(
        "linear_attn.in_proj",
        &widths,
        hidden_size,
        Stacking::Concatenated,
    )
}

fn experts(config: &JsonFile, dimensions: &Dimensions) -> Result<ExpertsSpec, LoadError> {
    let defaults = ExpertDefaults {
        num_experts: 128,
        num_chosen: 4,
    };
    let is_normalised = config.bool_or("norm_topk_prob", true)?;
    let routing = routing(config, &defaults, RoutingRule::Softmax { is_normalised })?;
    let expert_size = width(config, "moe_intermediate_size", 512)?;
    let shared_size = width(config, "shared_expert_intermediate_size", 512)?;
    let mut experts = dimensions.experts(&EXPERT_MODULES, routing, expert_size);
    experts.shared = Some(dimensions.shared_expert(SHARED_EXPERT, shared_size));
    Ok(experts)
}
