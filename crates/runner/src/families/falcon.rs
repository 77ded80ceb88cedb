//! Falcon 7B, 40B, 180B and 11B (Falcon 2), by TII. Falcon 3 has Llama's shape and class.
//!
//! LayerNorm with biases, and a feed-forward block without a gate. Queries, keys and values are one module: the query
//! heads of a key head, that key head, its value head, and so on for all key heads. `bias` adds biases to all linear
//! layers.
//!
//! - Falcon 7B: one key head (`multi_query`); both blocks read the residual stream through the same norm
//!   (`parallel_attn`), or one follows the other.
//! - The others (`new_decoder_architecture`): `num_kv_heads` key heads; the blocks have a norm each, or one for both
//!   (`num_ln_in_parallel_attn`).
//! - Falcon-RW: as many key heads as query heads, blocks that follow one another, and linear biases of scores in place
//!   of RoPE (`alibi`; [ALiBi](crate::alibi)). These are added to scores that are not scaled yet. transformers rounds
//!   slopes and biases to bf16; here they are exact, as the paper has them.
//!
//! Source: modeling_falcon.py and configuration_falcon.py of transformers; Almazrouei et al., arXiv:2311.16867.

use serde_json::json;

use super::bloom;
use super::dimensions::{Defaults, Dimensions, Keys, Sizes};
use super::family::Family;
use super::gguf::GgufArchitecture;
use super::windows::no_windows;
use crate::rope::Rope;
use crate::spec::{ModelSpec, NormKind, Norms};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::Activation;

pub const FAMILY: Family = Family {
    class: "FalconForCausalLM",
    gguf: Some(GgufArchitecture {
        keys: &[
            ("attention.head_count_kv", "num_kv_heads"),
            ("feed_forward_length", "ffn_hidden_size"),
            ("attention.layer_norm_epsilon", "layer_norm_epsilon"),
        ],
        has_ordered_qkv: true,
        add_fixed: |config| {
            // With one key head and one norm, both forms are the same.
            config.insert("new_decoder_architecture".to_owned(), json!(true));
            let has_two_norms = config.get(HAS_TWO_NORMS) == Some(&json!(true));
            let num_norms = if has_two_norms { 2 } else { 1 };
            config.insert(NUM_NORMS.to_owned(), json!(num_norms));
            let has_bias = config.get("mlp_bias").cloned().unwrap_or_default();
            config.insert("bias".to_owned(), has_bias);
        },
        optional_modules: &[(HAS_TWO_NORMS, "ln_attn")],
        ..GgufArchitecture::named("falcon")
    }),
    describe,
};

const NUM_NORMS: &str = "num_ln_in_parallel_attn";
/// What a GGUF file has instead.
const HAS_TWO_NORMS: &str = "has_ln_attn";

const DEFAULTS: Defaults = Defaults {
    sizes: Some(Sizes::new(65_024, 4544, 18_176, 32, 71, 2048)),
    norm_eps: 1e-5,
    tied_embeddings: true,
    activation: Activation::Gelu,
    keys: Keys {
        num_kv_heads: "num_kv_heads",
        intermediate_size: "ffn_hidden_size",
        may_lack_intermediate_size: true,
        activation: "activation",
        norm_eps: "layer_norm_epsilon",
        ..Keys::LLAMA
    },
    ..Defaults::LLAMA
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let has_slopes = config.bool_or("alibi", false)?;
    let is_new = config.bool_or("new_decoder_architecture", false)?;
    let mut dimensions = Dimensions::from_config(config, &DEFAULTS)?;
    dimensions.norm.kind = NormKind::Layer { has_bias: true };
    if !is_new {
        dimensions.num_kv_heads = match config.bool_or("multi_query", true)? {
            true => 1,
            false => dimensions.num_heads,
        };
    }
    if has_slopes {
        dimensions.rope = Rope::none();
    }
    let has_bias = config.bool_or("bias", false)?;
    let layer = bloom::layer(&dimensions, norms(config, is_new)?, has_bias);
    let windows = no_windows(dimensions.num_layers);
    let slope_factor = has_slopes.then_some(layer.attention.scale);
    Ok(ModelSpec {
        slope_factor,
        modules: bloom::MODULES,
        ..dimensions.model(FAMILY.class, layer, windows)
    })
}

fn norms(config: &JsonFile, is_new: bool) -> Result<Norms, LoadError> {
    const PARALLEL: &str = "parallel_attn";
    let of_both = Norms::Parallel {
        attention: "input_layernorm",
        feed_forward: None,
    };
    let is_parallel = config.bool_or(PARALLEL, true)?;
    match (is_new, is_parallel) {
        (false, false) => Ok(Norms::before("input_layernorm", "post_attention_layernorm")),
        (false, true) => Ok(of_both),
        (true, false) => {
            let expected = "supported with new_decoder_architecture; only true is";
            Err(config.unexpected(PARALLEL, false, expected))
        }
        (true, true) => match config.size(NUM_NORMS, 1..=2)? {
            Some(1) => Ok(of_both),
            _ => Ok(Norms::Parallel {
                attention: "ln_attn",
                feed_forward: Some("ln_mlp"),
            }),
        },
    }
}
