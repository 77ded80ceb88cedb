//! Phi-3, Phi-3.5 and Phi-4, by Microsoft.
//!
//! Llama with one module for queries, keys and values, and one for gate and up. Phi-4-mini rotates only the first part
//! of a head (`partial_rotary_factor`). Models for long contexts have two sets of divisors of the RoPE frequencies
//! (`longrope`): see [`RopeScaling::Long`](crate::rope::RopeScaling::Long) for which one is used. A
//! `sliding_window` holds in all layers.
//!
//! Source: modeling_phi3.py of transformers; Abdin et al., arXiv:2404.14219.

use super::dimensions::{Defaults, Dimensions, Sizes};
use super::family::Family;
use super::gguf::GgufArchitecture;
use super::rope_config::RopeDefaults;
use super::windows::{no_windows, windows_in_all_layers};
use crate::spec::ModelSpec;
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;

pub const FAMILY: Family = Family {
    class: "Phi3ForCausalLM",
    gguf: Some(GgufArchitecture {
        modules: &[
            ("self_attn.qkv_proj", "attn_qkv"),
            ("mlp.gate_up_proj", "ffn_up"),
        ],
        keys: &[(
            "rope.scaling.original_context_length",
            "original_max_position_embeddings",
        )],
        has_windows: true,
        has_partial_rotary: true,
        ..GgufArchitecture::named("phi3")
    }),
    describe,
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(32_064, 3072, 8192, 32, 32, 4096)),
        norm_eps: 1e-5,
        rope: RopeDefaults {
            partial_rotary_factor: Some(1.0),
            ..Defaults::LLAMA.rope
        },
        ..Defaults::LLAMA
    };
    let dimensions = Dimensions::from_config(config, &defaults)?;
    let mut layer = dimensions.llama_layer();
    layer.attention.qkv = dimensions.fused_qkv("self_attn.qkv_proj");
    layer.feed_forward = dimensions.fused_gated("mlp.gate_up_proj");
    let windows = match config.get("sliding_window").is_some() {
        true => windows_in_all_layers(config, dimensions.num_layers)?,
        false => no_windows(dimensions.num_layers),
    };
    Ok(dimensions.model(FAMILY.class, layer, windows))
}
