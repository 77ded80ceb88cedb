//! GPT-Neo, by EleutherAI.
//!
//! GPT-2 with queries, keys and values apart and without biases, scores without a factor, and a window of `window_size`
//! positions in the layers that `attention_types` calls local, by default every second one.
//!
//! Source: configuration_gpt_neo.py and modeling_gpt_neo.py of transformers; Black et al., "GPT-Neo", 2021.

use std::num::NonZeroU32;

use serde_json::{Value, json};

use super::bounds::{MAX_LAYERS, MAX_POSITIONS};
use super::dimensions::{Defaults, Dimensions, Keys, Sizes};
use super::family::Family;
use super::gpt2::MODULES;
use crate::rope::Rope;
use crate::spec::{FeedForward, LearnedPositions, ModelSpec, NormKind, Norms, Projection};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::{Activation, PlainActivation};
use inflight_numbers::Stacking;

pub const FAMILY: Family = Family {
    class: "GPTNeoForCausalLM",
    gguf: None,
    describe,
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(50_257, 2048, 8192, 24, 16, 2048)),
        norm_eps: 1e-5,
        tied_embeddings: true,
        activation: Activation::GeluTanh,
        keys: Keys {
            num_layers: "num_layers",
            num_heads: "num_heads",
            may_lack_intermediate_size: true,
            activation: "activation_function",
            norm_eps: "layer_norm_epsilon",
            ..Keys::LLAMA
        },
        ..Defaults::LLAMA
    };
    let mut dimensions = Dimensions::from_config(config, &defaults)?;
    dimensions.norm.kind = NormKind::Layer { has_bias: true };
    dimensions.rope = Rope::none();
    let (hidden, inner) = (dimensions.hidden_size, dimensions.intermediate_size);
    let [q, kv, _] = dimensions.qkv_widths();
    let qkv = [
        ("attn.attention.q_proj", q),
        ("attn.attention.k_proj", kv),
        ("attn.attention.v_proj", kv),
    ];
    let mut layer = dimensions.llama_layer();
    layer.norms = Norms::before("ln_1", "ln_2");
    layer.attention.scale = 1.0;
    layer.attention.qkv = Projection::stacked(&qkv, hidden, Stacking::Concatenated);
    layer.attention.o = Projection::single("attn.attention.out_proj", hidden, q).with_bias(true);
    layer.feed_forward = FeedForward::Plain {
        up: Projection::single("mlp.c_fc", inner, hidden),
        activation: PlainActivation::Of(dimensions.activation),
        alphas: None,
        down: Projection::single("mlp.c_proj", hidden, inner),
    };
    layer.feed_forward.set_biases(true);
    let windows = windows(config, dimensions.num_layers)?;
    Ok(ModelSpec {
        learned_positions: Some(LearnedPositions {
            module: "transformer.wpe",
            first_row: 0,
            padding_id: None,
            num_rows: dimensions.max_position_embeddings,
        }),
        modules: MODULES,
        ..dimensions.model(FAMILY.class, layer, windows)
    })
}

/// `attention_types` is a list of runs: kinds of layers, and how often they are repeated.
fn windows(config: &JsonFile, num_layers: usize) -> Result<Vec<Option<NonZeroU32>>, LoadError> {
    const TYPES: &str = "attention_types";
    let window = config.size("window_size", 1..=MAX_POSITIONS)?;
    let window = NonZeroU32::new(window.unwrap_or(256) as u32);
    let silent = json!([[["global", "local"], 12]]);
    let types = config.get(TYPES).unwrap_or(&silent);
    let refused = || {
        let expected = format!(
            "a list of runs, each a list of 'global' and 'local' and a number, of {num_layers} layers together"
        );
        config.unexpected(TYPES, types, expected)
    };
    let is_local = |kind: &Value| match kind.as_str() {
        Some("global") => Some(false),
        Some("local") => Some(true),
        _ => None,
    };
    let run = |run: &Value| {
        let [kinds, times] = run.as_array()?.as_slice() else {
            return None;
        };
        let kinds: Option<Vec<_>> = kinds.as_array()?.iter().map(is_local).collect();
        let times = times.as_u64().filter(|times| *times <= MAX_LAYERS as u64)?;
        Some((kinds?, times as usize))
    };
    let runs: Option<Vec<_>> = types
        .as_array()
        .and_then(|runs| runs.iter().map(run).collect());
    let runs = runs.ok_or_else(refused)?;
    let lens = runs.iter().map(|(kinds, times)| kinds.len() * times);
    if lens.sum::<usize>() != num_layers {
        return Err(refused());
    }
    let layers = runs
        .into_iter()
        .flat_map(|(kinds, times)| kinds.repeat(times));
    Ok(layers.map(|is_local| window.filter(|_| is_local)).collect())
}
