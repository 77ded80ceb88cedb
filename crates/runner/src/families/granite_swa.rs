//! Granite Swash, by IBM, with and without experts.
//!
//! Granite with a learned attention-sink logit for each head. `layer_types` says which layers have a window; by
//! default every fourth layer, from layer 0 on, has full attention. Each layer has its own RoPE base
//! (`layer_rope_theta`), where 0 is a layer without a position embedding. The experts are like the experts of
//! [Granite](super::granite_moe), in tensors of other names.
//!
//! Source: configuration_*.py and modeling_*.py of granite_swa and granitemoe_swa of transformers.

use serde_json::{Map, Value, json};

use super::dimensions::{Defaults, Sizes};
use super::family::Family;
use super::gguf::{GgufArchitecture, GgufConfig, GgufExperts, QUERIES_AND_KEYS};
use super::granite::{describe_dense, describe_dense_with, set_mlp_biases};
use super::granite_moe::set_experts_beside_shared;
use super::rope_config::THETA;
use super::windows::{windowed_layers, windows_of};
use crate::rope::Rope;
use crate::spec::{FeedForward, ModelSpec, Projection, StackedExperts};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;

pub const FAMILY: Family = Family {
    class: "GraniteSWAForCausalLM",
    gguf: Some(GGUF_ARCHITECTURE),
    describe,
};

pub const WITH_EXPERTS: Family = Family {
    class: "GraniteMoeSWAForCausalLM",
    gguf: Some(GgufArchitecture {
        experts: Some(GgufExperts::softmax(true)),
        rewrite: |_, spec| {
            rename_experts(spec);
            Ok(())
        },
        ..GGUF_ARCHITECTURE
    }),
    describe: describe_with_experts,
};

/// How llama.cpp stores the families.
const GGUF_ARCHITECTURE: GgufArchitecture = GgufArchitecture {
    modules: &[
        ("self_attn.sinks", "attn_sinks"),
        (ROUTER, "ffn_gate_inp"),
        (GATE_UP, "ffn_gate_up_exps"),
        ("shared_mlp.input_linear", "ffn_up_shexp"),
        ("shared_mlp.output_linear", "ffn_down_shexp"),
    ],
    keys: &[
        ("attention.scale", "attention_multiplier"),
        ("embedding_scale", "embedding_multiplier"),
        ("residual_scale", "residual_multiplier"),
        ("logit_scale", "logits_scaling"),
        (
            "expert_shared_feed_forward_length",
            "shared_intermediate_size",
        ),
    ],
    permuted: QUERIES_AND_KEYS,
    has_windows: true,
    add_read: add_thetas,
    ..GgufArchitecture::named("granite_swa")
};

/// Gate and up of all experts in a GGUF file.
const GATE_UP: &str = "mlp.experts.{}.gate_up_proj";

/// Adds the bases of all layers: one, but for those without a position embedding.
fn add_thetas(gguf: &GgufConfig<'_>, config: &mut Map<String, Value>) -> Result<(), LoadError> {
    let Some(has_rope) = gguf.layers_with("attention.rope_pattern")? else {
        return Ok(());
    };
    let theta = gguf.number("rope.freq_base")?.unwrap_or(json!(10_000.0));
    let thetas = has_rope.into_iter().map(|has_rope| match has_rope {
        true => theta.clone(),
        false => json!(0),
    });
    config.insert("layer_rope_theta".to_owned(), thetas.collect());
    Ok(())
}

/// Gives experts the names that have a tensor in a GGUF file.
fn rename_experts(spec: &mut ModelSpec) {
    for layer in &mut spec.layers {
        if let FeedForward::Experts(experts) = &mut layer.feed_forward {
            experts.unstack();
            let (width, stacking) = (experts.down.num_inputs, experts.gate_up.stacking);
            let inputs = experts.gate_up.num_inputs;
            experts.gate_up = Projection::fused(GATE_UP, &[width; 2], inputs, stacking);
        }
    }
}

const ROUTER: &str = "block_sparse_moe.router";

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(100_352, 2560, 8192, 24, 20, 8192)),
        num_kv_heads: Some(4),
        norm_eps: 1e-5,
        tied_embeddings: true,
        ..Defaults::LLAMA
    };
    let (mut spec, _) = describe_dense_with(config, FAMILY.class, &defaults)?;
    set_mlp_biases(config, &mut spec)?;
    set_attention(config, &mut spec)?;
    Ok(spec)
}

fn describe_with_experts(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let (mut spec, dimensions) = describe_dense(config, WITH_EXPERTS.class)?;
    set_experts_beside_shared(config, &mut spec, &dimensions)?;
    for layer in &mut spec.layers {
        if let FeedForward::Experts(experts) = &mut layer.feed_forward {
            experts.router.parts[0].module = ROUTER;
            experts.stacked = StackedExperts {
                router: ROUTER,
                gate_up: "block_sparse_moe.experts.gate_up_proj",
                down: "block_sparse_moe.experts.down_proj",
                ..experts.stacked
            };
        }
    }
    set_attention(config, &mut spec)?;
    Ok(spec)
}

/// Gives the layers their windows, sinks and position embeddings.
fn set_attention(config: &JsonFile, spec: &mut ModelSpec) -> Result<(), LoadError> {
    let num_layers = spec.num_layers();
    let is_windowed = match config.get("layer_types") {
        Some(_) => windowed_layers(config, num_layers, 0)?,
        None => (0..num_layers)
            .map(|layer| !layer.is_multiple_of(4))
            .collect(),
    };
    let windows = windows_of(config, &is_windowed, 128)?;
    let thetas = thetas(config, num_layers)?;
    for (index, layer) in spec.layers.iter_mut().enumerate() {
        let attention = &mut layer.attention;
        attention.sink_logits = Some("self_attn.sinks");
        attention.window = windows[index];
        if let Some(thetas) = &thetas {
            attention.rope = match thetas[index] {
                0.0 => Rope::none(),
                theta => Rope {
                    theta,
                    ..attention.rope.clone()
                },
            };
        }
    }
    Ok(())
}

/// The base of each layer. `None`: all have the one in `rope_parameters`.
fn thetas(config: &JsonFile, num_layers: usize) -> Result<Option<Vec<f64>>, LoadError> {
    const KEY: &str = "layer_rope_theta";
    let Some(value) = config.get(KEY) else {
        return Ok(None);
    };
    let is_valid = |theta: &f64| *theta == 0.0 || THETA.contains(theta);
    let read = |theta: &Value| theta.as_f64().filter(is_valid);
    let thetas = value.as_array().filter(|list| list.len() == num_layers);
    match thetas.and_then(|list| list.iter().map(read).collect()) {
        Some(thetas) => Ok(Some(thetas)),
        None => {
            let expected = format!("a list of {num_layers} numbers, each 0 or from 1 on");
            Err(config.unexpected(KEY, value, expected))
        }
    }
}
