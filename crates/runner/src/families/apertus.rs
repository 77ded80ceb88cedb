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
use super::rope_config::{RopeDefaults, rope_parameters};
use super::windows::no_windows;
use crate::spec::{FeedForward, ModelSpec, Norms, QkNormSpec};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;

pub const FAMILY: Family = Family {
    class: "ApertusForCausalLM",
    gguf: None,
    describe,
};

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
