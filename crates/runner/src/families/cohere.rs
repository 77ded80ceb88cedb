//! Command R (`CohereForCausalLM`), Aya, and Command R7B and A (`Cohere2ForCausalLM`), by Cohere.
//!
//! Both blocks read the residual stream through the same norm, a LayerNorm without biases. RoPE rotates neighbouring
//! elements of a head. Logits have the factor `logit_scale`, 0.0625 where config.json is silent.
//!
//! - Cohere: Command R+ normalises each head of queries and keys by a LayerNorm with weights of its own
//!   (`use_qk_norm`).
//! - Cohere2: three of four layers have a window (`sliding_window_pattern`, or `layer_types`), and the others have no
//!   position embedding.
//!
//! Source: modeling_cohere.py and modeling_cohere2.py of transformers.

use super::bounds::MAX_LAYERS;
use super::dimensions::{Defaults, Dimensions, Keys, Sizes};
use super::family::Family;
use super::gguf::GgufArchitecture;
use super::rope_config::RopeDefaults;
use super::windows::{no_windows, windows_except_every};
use crate::rope::Rope;
use crate::spec::{LayerSpec, ModelSpec, NormKind, Norms, QkNormSpec};
use inflight_base::LoadError;
use inflight_checkpoint::{JsonFile, RotaryPairs};
use inflight_device::{LogitsTransform, QkNormKind};

pub const COHERE: Family = Family {
    class: "CohereForCausalLM",
    gguf: Some(GgufArchitecture {
        keys: &[("logit_scale", "logit_scale")],
        optional_modules: &[(HAS_QK_NORM, Q_NORM)],
        ..GgufArchitecture::named("command-r")
    }),
    describe: |config| {
        let (dimensions, mut layer) = parts(config, 500_000.0)?;
        if config.bool_or(HAS_QK_NORM, false)? {
            layer.attention.qk_norm = Some(QkNormSpec {
                q: Q_NORM,
                k: "self_attn.k_norm",
                kind: QkNormKind::LayerOfHead,
                has_values: false,
                eps: dimensions.norm.eps,
            });
        }
        let windows = no_windows(dimensions.num_layers);
        with_logit_scale(config, dimensions.model(COHERE.class, layer, windows))
    },
};

const HAS_QK_NORM: &str = "use_qk_norm";
const Q_NORM: &str = "self_attn.q_norm";

pub const COHERE2: Family = Family {
    class: "Cohere2ForCausalLM",
    gguf: Some(GgufArchitecture {
        keys: &[("logit_scale", "logit_scale")],
        has_windows: true,
        ..GgufArchitecture::named("cohere2")
    }),
    describe: |config| {
        let (dimensions, layer) = parts(config, 10_000.0)?;
        let interval = config.size("sliding_window_pattern", 1..=MAX_LAYERS)?;
        let windows = windows_except_every(config, dimensions.num_layers, interval.unwrap_or(4))?;
        let mut spec = dimensions.model(COHERE2.class, layer, windows);
        for layer in &mut spec.layers {
            if layer.attention.window.is_none() {
                layer.attention.rope = Rope::none();
            }
        }
        with_logit_scale(config, spec)
    },
};

/// The sizes, and a layer.
///
/// # Errors
/// A key is out of range.
pub fn parts(config: &JsonFile, theta: f64) -> Result<(Dimensions, LayerSpec), LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(256_000, 8192, 22_528, 40, 64, 8192)),
        norm_eps: 1e-5,
        rope: RopeDefaults {
            theta,
            ..Defaults::LLAMA.rope
        },
        tied_embeddings: true,
        keys: Keys {
            norm_eps: "layer_norm_eps",
            ..Keys::LLAMA
        },
        ..Defaults::LLAMA
    };
    let mut dimensions = Dimensions::from_config(config, &defaults)?;
    dimensions.norm.kind = NormKind::Layer { has_bias: false };
    dimensions.rotary_pairs = RotaryPairs::Adjacent;
    let mut layer = dimensions.llama_layer();
    layer.norms = Norms::Parallel {
        attention: "input_layernorm",
        feed_forward: None,
    };
    layer
        .attention
        .set_biases(config.bool_or("attention_bias", false)?);
    Ok((dimensions, layer))
}

/// The model with the factor of its logits.
///
/// # Errors
/// It is out of range.
pub fn with_logit_scale(config: &JsonFile, spec: ModelSpec) -> Result<ModelSpec, LoadError> {
    let scale = config.number("logit_scale", 1e-4..=1e4)?.unwrap_or(0.0625);
    Ok(ModelSpec {
        logits: LogitsTransform {
            scale: scale as f32,
            soft_cap: None,
        },
        ..spec
    })
}
