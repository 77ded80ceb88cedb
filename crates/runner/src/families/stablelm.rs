//! StableLM 2 and StableLM 3B, by Stability AI.
//!
//! Llama with LayerNorm and its biases, and RoPE on the first part of each head (`partial_rotary_factor`, 0.25 where
//! config.json is silent). `use_qkv_bias` adds biases to queries, keys and values. With `use_parallel_residual`, both
//! blocks read the residual stream through the same norm. StableLM 2 12B has both that and a LayerNorm without biases
//! for each head of queries and keys, which is a module of its own (`qk_layernorm`).
//!
//! Source: modeling_stablelm.py of transformers; Bellagente et al., arXiv:2402.17834.

use super::dimensions::{Defaults, Dimensions, Keys, Sizes};
use super::family::Family;
use super::gguf::GgufArchitecture;
use super::rope_config::RopeDefaults;
use super::windows::no_windows;
use crate::spec::{ModelSpec, NormKind, Norms, QkNormSpec};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::QkNormKind;

pub const FAMILY: Family = Family {
    class: "StableLmForCausalLM",
    gguf: Some(GgufArchitecture {
        keys: &[("use_parallel_residual", "use_parallel_residual")],
        has_partial_rotary: true,
        modules: &[(Q_NORM, "attn_q_norm"), (K_NORM, "attn_k_norm")],
        optional_modules: &[(HAS_QK_NORM, Q_NORM)],
        ..GgufArchitecture::named("stablelm")
    }),
    describe,
};

const HAS_QK_NORM: &str = "qk_layernorm";
const Q_NORM: &str = "self_attn.q_layernorm.norms.{}";
const K_NORM: &str = "self_attn.k_layernorm.norms.{}";

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(50_304, 2560, 6912, 32, 32, 4096)),
        num_kv_heads: Some(32),
        norm_eps: 1e-5,
        rope: RopeDefaults {
            partial_rotary_factor: Some(0.25),
            ..Defaults::LLAMA.rope
        },
        keys: Keys {
            norm_eps: "layer_norm_eps",
            ..Keys::LLAMA
        },
        ..Defaults::LLAMA
    };
    let mut dimensions = Dimensions::from_config(config, &defaults)?;
    dimensions.norm.kind = NormKind::Layer { has_bias: true };
    let mut layer = dimensions.llama_layer();
    layer.attention.qkv.has_bias = config.bool_or("use_qkv_bias", false)?;
    if config.bool_or(HAS_QK_NORM, false)? {
        layer.attention.qk_norm = Some(QkNormSpec {
            q: Q_NORM,
            k: K_NORM,
            kind: QkNormKind::LayerOfHead,
            has_values: false,
            eps: dimensions.norm.eps,
        });
    }
    if config.bool_or("use_parallel_residual", false)? {
        layer.norms = Norms::Parallel {
            attention: "input_layernorm",
            feed_forward: None,
        };
    }
    let windows = no_windows(dimensions.num_layers);
    Ok(dimensions.model(FAMILY.class, layer, windows))
}
