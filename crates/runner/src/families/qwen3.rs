//! Qwen 3, the dense models.
//!
//! Llama with an RMSNorm of each query and key head in front of RoPE, and a head width of its own (`head_dim`).
//! `attention_bias` adds biases to all four projections of attention. Windows are configured as in Qwen 2.
//!
//! Source: modeling_qwen3.py of transformers; Yang et al., arXiv:2505.09388.

use super::dimensions::{Defaults, Dimensions, Sizes};
use super::family::Family;
use super::gguf::GgufArchitecture;
use super::windows::{no_windows, windows_in_some_layers};
use crate::spec::{ModelSpec, QkNormSpec};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;

pub const FAMILY: Family = Family {
    class: "Qwen3ForCausalLM",
    gguf: Some(GgufArchitecture::named("qwen3")),
    describe,
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(151_936, 4096, 22_016, 32, 32, 32_768)),
        num_kv_heads: Some(32),
        head_dim: Some(128),
        ..Defaults::LLAMA
    };
    let dimensions = Dimensions::from_config(config, &defaults)?;
    let mut layer = dimensions.llama_layer();
    layer.attention.qk_norm = Some(QkNormSpec::of_heads(dimensions.norm.eps));
    layer
        .attention
        .set_biases(config.bool_or("attention_bias", false)?);
    let windows = match config.bool_or("use_sliding_window", false)? {
        true => windows_in_some_layers(config, dimensions.num_layers)?,
        false => no_windows(dimensions.num_layers),
    };
    Ok(dimensions.model(FAMILY.class, layer, windows))
}
