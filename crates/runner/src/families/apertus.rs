//! Apertus, by the Swiss AI Initiative.
//!
//! Llama with an RMS norm of each head of queries and keys, and feed-forward blocks without a gate, whose activation is
//! xIELU with two learned parameters in each layer. Its other two, `beta` and `eps`, which checkpoints have too, are
//! constants. Where config.json is silent, the frequencies of RoPE are scaled as in Llama 3.1.
//!
//! Source: configuration_apertus.py, modeling_apertus.py and activations.py of transformers; Huang and Schlag,
//! arXiv:2411.13010; Project Apertus, arXiv:2509.14233.

use serde_json::{Value, json};

use super::dimensions::{Defaults, Dimensions, Sizes};
use super::family::Family;
use super::gguf::GgufArchitecture;
use super::rope_config::{RopeDefaults, rope_parameters};
use super::windows::no_windows;
use crate::feed_forward_weights::xielu;
use crate::spec::{FeedForward, ModelSpec, Norms, QkNormSpec};
use inflight_base::LoadError;
use inflight_checkpoint::{GgufFolder, JsonFile};

pub const FAMILY: Family = Family {
    class: "ApertusForCausalLM",
    gguf: Some(GgufArchitecture {
        modules: &[
            ("attention_layernorm", "attn_norm"),
            ("feedforward_layernorm", "ffn_norm"),
        ],
        rewrite: read_activations,
        ..GgufArchitecture::named("apertus")
    }),
    describe,
};

/// Takes the parameters of activations from the metadata, where llama.cpp's converter puts them.
fn read_activations(gguf: &GgufFolder, spec: &mut ModelSpec) -> Result<(), LoadError> {
    const BETA: &str = "xielu.beta";
    const EPS: &str = "xielu.eps";
    let num_layers = spec.num_layers();
    let read = |key| match gguf.numbers(key)? {
        Some(numbers) if numbers.len() != num_layers => Err(gguf.error(format!(
            "{key} has {} elements for {num_layers} layers; the file is damaged",
            numbers.len()
        ))),
        Some(numbers) => match numbers.iter().find(|number| !number.is_finite()) {
            Some(number) => Err(gguf.error(format!(
                "{key}: {number} is not finite; the file is damaged"
            ))),
            None => Ok(numbers),
        },
        None => Err(gguf.error(format!(
            "{key} is missing, or no list of numbers; convert the model again"
        ))),
    };
    let [above, below] = [read("xielu.alpha_p")?, read("xielu.alpha_n")?];
    if let Some(other) = read(BETA)?.into_iter().find(|&beta| beta != 0.5) {
        return Err(gguf.error(format!(
            "{BETA}: {other} is not supported; only 0.5 is: serve the checkpoint of safetensors"
        )));
    }
    // Files have the -1e-6 of the formula as bf16.
    if let Some(other) = read(EPS)?.into_iter().find(|eps| (eps + 1e-6).abs() > 1e-8) {
        return Err(gguf.error(format!(
            "{EPS}: {other} is not supported; only -1e-6 is: serve the checkpoint of safetensors"
        )));
    }
    for (index, layer) in spec.layers.iter_mut().enumerate() {
        if let FeedForward::Plain {
            activation,
            alphas: alphas @ Some(_),
            ..
        } = &mut layer.feed_forward
        {
            *alphas = None;
            *activation = xielu(above[index], below[index]);
        }
    }
    Ok(())
}

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    const ACTIVATION: &str = "hidden_act";
    let defaults = Defaults {
        sizes: Some(Sizes::new(131_072, 4096, 14_336, 32, 32, 65_536)),
        norm_eps: 1e-5,
        rope: RopeDefaults {
            theta: 12_000_000.0,
            ..Defaults::LLAMA.rope
        },
        ..Defaults::LLAMA
    };
    let rope = json!({
        "rope_type": "llama3", "rope_theta": 12_000_000.0, "factor": 8.0, "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    });
    let mut config = match rope_parameters(config)? {
        Some(_) => config.clone(),
        None => config.with("rope_parameters", rope),
    };
    let is_xielu = matches!(config.string(ACTIVATION)?, None | Some("xielu"));
    if is_xielu {
        config = config.with(ACTIVATION, Value::Null);
    }
    let dimensions = Dimensions::from_config(&config, &defaults)?;
    let mut layer = dimensions.llama_layer();
    layer.norms = Norms::before("attention_layernorm", "feedforward_layernorm");
    layer
        .attention
        .set_biases(config.bool_or("attention_bias", false)?);
    layer.attention.qk_norm = Some(QkNormSpec::of_heads(dimensions.norm.eps));
    layer.feed_forward = dimensions.plain("mlp.up_proj", "mlp.down_proj");
    if let FeedForward::Plain { alphas, .. } = &mut layer.feed_forward {
        *alphas = is_xielu.then_some(["mlp.act_fn.alpha_p", "mlp.act_fn.alpha_n"]);
    }
    let windows = no_windows(dimensions.num_layers);
    Ok(dimensions.model(FAMILY.class, layer, windows))
}
