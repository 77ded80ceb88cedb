//! BitNet b1.58, by Microsoft.
//!
//! Llama with squared ReLU in the gate, and RMS norms of what the output and down projections read.
//!
//! The projections are trained to have weights of three values, -s, 0 and s, and inputs of 8 bits. What a checkpoint
//! stores, and how it becomes these, is a matter of its [quantisation](inflight_checkpoint), not of the family.
//!
//! Source: configuration_bitnet.py and modeling_bitnet.py of transformers; Ma et al., arXiv:2402.17764 and
//! arXiv:2504.12285.

use super::dimensions::{Defaults, Dimensions, Sizes};
use super::family::Family;
use super::rope_config::RopeDefaults;
use super::windows::no_windows;
use crate::spec::{InnerNorms, ModelSpec};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::Activation;

pub const FAMILY: Family = Family {
    class: "BitNetForCausalLM",
    // llama.cpp's architecture is an older model, whose gate has SiLU.
    gguf: None,
    describe,
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(128_256, 2560, 6912, 30, 20, 2048)),
        num_kv_heads: Some(5),
        norm_eps: 1e-5,
        rope: RopeDefaults {
            theta: 500_000.0,
            ..Defaults::LLAMA.rope
        },
        activation: Activation::SquaredRelu,
        ..Defaults::LLAMA
    };
    let dimensions = Dimensions::from_config(config, &defaults)?;
    let mut layer = dimensions.llama_layer();
    layer
        .attention
        .set_biases(config.bool_or("attention_bias", false)?);
    layer.inner_norms = Some(InnerNorms {
        attended: "self_attn.attn_sub_norm",
        inside: "mlp.ffn_sub_norm",
    });
    let windows = no_windows(dimensions.num_layers);
    Ok(dimensions.model(FAMILY.class, layer, windows))
}
