//! HyperCLOVA X SEED Think 14B, by NAVER.
//!
//! Granite whose logits are multiplied by `logits_scaling` instead of divided, whose scores have the usual factor
//! unless `attention_multiplier` says otherwise, and whose blocks' results are normalised too (`use_post_norm`).
//!
//! Refused: such norms with a `residual_multiplier`, which no published model has. [Granite](super::granite) divides
//! the residual stream by it, and the epsilon of all norms with it; these norms would need another one.
//!
//! Source: configuration_hyperclovax.py and modeling_hyperclovax.py of transformers.

use super::family::Family;
use super::granite::{describe_dense, multiplier, set_mlp_biases};
use crate::spec::{BlockNorms, ModelSpec, Norms};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;

pub const FAMILY: Family = Family {
    class: "HyperCLOVAXForCausalLM",
    gguf: None,
    describe,
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    const RESIDUAL: &str = "residual_multiplier";
    let (mut spec, dimensions) = describe_dense(config, FAMILY.class)?;
    set_mlp_biases(config, &mut spec)?;
    spec.logits.scale = multiplier(config, "logits_scaling")? as f32;
    if config.get("attention_multiplier").is_none() {
        let scale = dimensions.llama_layer().attention.scale;
        for layer in &mut spec.layers {
            layer.attention.scale = scale;
        }
    }
    if config.bool_or("use_post_norm", true)? {
        let residual = multiplier(config, RESIDUAL)?;
        if residual != 1.0 {
            let expected = "supported with use_post_norm; only 1 is";
            return Err(config.unexpected(RESIDUAL, residual, expected));
        }
        let block = |before, after| BlockNorms {
            before: Some(before),
            after: Some(after),
        };
        for layer in &mut spec.layers {
            layer.norms = Norms::Sequential {
                attention: block("input_layernorm", "post_norm1"),
                feed_forward: block("post_attention_layernorm", "post_norm2"),
            };
        }
    }
    Ok(spec)
}
