//! Command A+, by Cohere: [Cohere 2](super::cohere) with experts.
//!
//! Both blocks read the residual stream through one norm: an RMS norm if `rms_norm_eps` is a number, else a
//! LayerNorm without a bias. Experts are chosen and weighted by the softmax of their logits or by their sigmoids
//! (`expert_selection_fn`), which are divided by their sum if `norm_topk_prob` says so. With
//! `num_shared_experts`, which are one wide block, the result is the mean of both
//! (`shared_expert_combination_strategy`), or their sum. Layers without experts are listed by `mlp_layer_types`, or are
//! the first `first_k_dense_replace`; these have RoPE, whether they have a window or not, if
//! `prefix_dense_sliding_window_pattern` is 1. Other layers without a window have no RoPE.
//!
//! Source: configuration_cohere2_moe.py and modeling_cohere2_moe.py of transformers.

use serde_json::{Map, Value, json};

use super::bounds::{MAX_EXPERTS, MAX_LAYERS};
use super::cohere::{parts, with_logit_scale};
use super::dimensions::Dimensions;
use super::experts::{EXPERT_MODULES, ExpertDefaults, routing, scores_rule, width};
use super::family::Family;
use super::gguf::{GgufArchitecture, GgufConfig, GgufExperts};
use super::layer_lists::layers_of_kind;
use super::windows::windows_except_every;
use crate::rope::Rope;
use crate::spec::{ExpertsSpec, FeedForward, ModelSpec, NormKind, NormSpec};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::{RouterScores, RoutingRule};

pub const FAMILY: Family = Family {
    class: "Cohere2MoeForCausalLM",
    gguf: Some(GgufArchitecture {
        keys: &[
            ("logit_scale", "logit_scale"),
            ("feed_forward_length", "prefix_dense_intermediate_size"),
            ("leading_dense_block_count", "first_k_dense_replace"),
            ("expert_shared_count", "num_shared_experts"),
        ],
        has_windows: true,
        experts: Some(GgufExperts {
            is_normalised: false,
            has_scale: false,
            gating: 2,
        }),
        add_read: add_experts,
        // llama.cpp's cohere2moe.cpp halves the sum with shared experts.
        add_fixed: |config| {
            config.insert("expert_selection_fn".to_owned(), json!("sigmoid"));
        },
        ..GgufArchitecture::named("cohere2moe")
    }),
    describe,
};

/// Adds the width of experts, and checks that shared ones have it, too.
fn add_experts(gguf: &GgufConfig<'_>, config: &mut Map<String, Value>) -> Result<(), LoadError> {
    const WIDTH: &str = "expert_feed_forward_length";
    const SHARED: &str = "expert_shared_feed_forward_length";
    const KINDS: &str = "attention.sliding_window_pattern";
    const DAMAGED: &str = "the file is damaged";
    let width = gguf.required(WIDTH)?;
    let num_shared = gguf.number("expert_shared_count")?.unwrap_or(json!(0));
    if let Some(shared) = gguf.number(SHARED)? {
        let expected = width.as_u64().zip(num_shared.as_u64());
        let expected = expected.and_then(|(width, num)| width.checked_mul(num));
        if shared.as_u64() != expected {
            let problem = format!("is not expert_shared_count {num_shared} times {WIDTH} {width}");
            return Err(gguf.error(SHARED, &problem, DAMAGED));
        }
    }
    if gguf.get(KINDS).is_none() {
        return Err(gguf.error(KINDS, "is missing", DAMAGED));
    }
    config.insert("intermediate_size".to_owned(), width);
    // 0 is none there.
    if config.get("rms_norm_eps").and_then(Value::as_f64) == Some(0.0) {
        config.remove("rms_norm_eps");
    }
    Ok(())
}

const LAYER_TYPES: &str = "layer_types";

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    const EPS: &str = "rms_norm_eps";
    let silent = config.with("head_dim", json!(128));
    let told = if config.has("head_dim") {
        config
    } else {
        &silent
    };
    let (mut dimensions, mut layer) = parts(told, 10_000.0)?;
    if let Some(eps) = config.number(EPS, 0.0..=1.0)? {
        dimensions.norm = NormSpec {
            kind: NormKind::Rms,
            eps: eps as f32,
            ..dimensions.norm
        };
    }
    let num_layers = dimensions.num_layers;
    let num_first = config.size("first_k_dense_replace", 0..=num_layers)?;
    let num_first = num_first.unwrap_or(0);
    let pattern = |key, default| {
        let pattern = config.size(key, 1..=MAX_LAYERS)?;
        Ok::<_, LoadError>(pattern.unwrap_or(default))
    };
    let of_dense = pattern("prefix_dense_sliding_window_pattern", 1)?;
    let of_others = pattern("sliding_window_pattern", 4)?;
    let told = match config.get(LAYER_TYPES) {
        Some(_) => config.clone(),
        None => {
            let kinds = kinds_of_layers(num_layers, num_first, [of_dense, of_others]);
            config.with(LAYER_TYPES, kinds)
        }
    };
    let windows = windows_except_every(&told, num_layers, of_others)?;
    let has_experts = match config.get("mlp_layer_types") {
        Some(kinds) => {
            let names = [["dense", "sparse"]];
            layers_of_kind(config, ("mlp_layer_types", kinds), num_layers, &names)?
        }
        None => (0..num_layers).map(|layer| layer >= num_first).collect(),
    };
    let experts = mixture(config, &dimensions)?;
    let expert_size = dimensions.intermediate_size;
    dimensions.intermediate_size = width(config, "prefix_dense_intermediate_size", expert_size)?;
    layer.feed_forward = dimensions.llama_layer().feed_forward;
    let mut spec = dimensions.model(FAMILY.class, layer, windows);
    for (layer, has_experts) in spec.layers.iter_mut().zip(has_experts) {
        let is_forced = !has_experts && of_dense == 1;
        if layer.attention.window.is_none() && !is_forced {
            layer.attention.rope = Rope::none();
        }
        if has_experts {
            layer.feed_forward = FeedForward::Experts(experts.clone());
        }
    }
    with_logit_scale(config, spec)
}

/// The kinds of layers that transformers assumes: in each of the two parts, all but every n-th one have a
/// window, n being the pattern of the part.
fn kinds_of_layers(num_layers: usize, num_first: usize, patterns: [usize; 2]) -> Value {
    let kinds = |num: usize, pattern: usize| {
        (1..=num).map(move |layer| match layer.is_multiple_of(pattern) {
            true => "full_attention",
            false => "sliding_attention",
        })
    };
    let first = kinds(num_first, patterns[0]);
    json!(
        first
            .chain(kinds(num_layers - num_first, patterns[1]))
            .collect::<Vec<_>>()
    )
}

fn mixture(config: &JsonFile, dimensions: &Dimensions) -> Result<ExpertsSpec, LoadError> {
    const FUNCTION: &str = "expert_selection_fn";
    const STRATEGY: &str = "shared_expert_combination_strategy";
    let rule = match config.string(FUNCTION)?.unwrap_or("softmax") {
        "softmax" => RoutingRule::Softmax {
            is_normalised: true,
        },
        "sigmoid" => {
            let is_normalised = config.bool_or("norm_topk_prob", true)?;
            scores_rule(RouterScores::Sigmoid, is_normalised, 1.0)
        }
        other => {
            let expected = "supported; 'softmax' and 'sigmoid' are";
            return Err(config.unexpected(FUNCTION, format_args!("'{other}'"), expected));
        }
    };
    let defaults = ExpertDefaults {
        num_experts: 8,
        num_chosen: 2,
    };
    let routing = routing(config, &defaults, rule)?;
    let expert_size = dimensions.intermediate_size;
    let mut experts = dimensions.experts(&EXPERT_MODULES, routing, expert_size);
    let num_shared = config.size("num_shared_experts", 0..=MAX_EXPERTS)?;
    if let Some(num_shared @ 1..) = num_shared {
        experts.shared = Some(dimensions.shared_experts(num_shared, expert_size));
        experts.scale = match config.string(STRATEGY)?.unwrap_or("average") {
            "average" => Some(0.5),
            "sum" => None,
            other => {
                let expected = "supported; 'average' and 'sum' are";
                return Err(config.unexpected(STRATEGY, format_args!("'{other}'"), expected));
            }
        };
    }
    Ok(experts)
}
