//! Bamba, by IBM, Princeton, CMU and UIUC: Llama whose layers mostly have a state space in place of attention.
//!
//! `attn_layer_indices` lists the layers with attention, which rotates half of each head; the others have the state
//! space of Mamba-2.
//!
//! Source: configuration_bamba.py and modeling_bamba.py of transformers.

use super::dimensions::{Defaults, Dimensions, Sizes};
use super::family::Family;
use super::layer_lists::listed_layers;
use super::recurrent::check_activation;
use super::rope_config::RopeDefaults;
use super::state_space::StateSpace;
use super::windows::no_windows;
use crate::spec::{FeedForward, ModelSpec, Norms, Projection};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_numbers::Stacking;

pub const FAMILY: Family = Family {
    class: "BambaForCausalLM",
    gguf: None,
    describe,
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(128_000, 4096, 14_336, 32, 32, 262_144)),
        num_kv_heads: Some(8),
        norm_eps: 1e-5,
        rope: RopeDefaults {
            partial_rotary_factor: Some(0.5),
            ..Defaults::LLAMA.rope
        },
        ..Defaults::LLAMA
    };
    const SHARE: &str = "partial_rotary_factor";
    // Beside rope_parameters, transformers ignores it.
    if let Some(other) = config
        .number(SHARE, 0.0..=1.0)?
        .filter(|share| *share != 0.5)
    {
        return Err(config.unexpected(SHARE, other, "0.5, as in this family"));
    }
    let dimensions = Dimensions::from_config(config, &defaults)?;
    check_activation(config, dimensions.activation)?;
    let mut layer = dimensions.llama_layer();
    layer.norms = Norms::before("input_layernorm", "pre_ff_layernorm");
    layer
        .attention
        .set_biases(config.bool_or("attention_bias", false)?);
    layer.feed_forward = feed_forward(&dimensions);
    layer
        .feed_forward
        .set_biases(config.bool_or("mlp_bias", false)?);
    let space = StateSpace::read(config, &dimensions)?;
    let (hidden, num_layers) = (dimensions.hidden_size, dimensions.num_layers);
    let has_attention = listed_layers(config, "attn_layer_indices", num_layers)?;
    let has_attention = has_attention.unwrap_or_else(|| vec![false; num_layers]);
    let mut spec = dimensions.model(FAMILY.class, layer, no_windows(num_layers));
    spec.modules.final_norm = Some("model.final_layernorm");
    for (layer, has_attention) in spec.layers.iter_mut().zip(has_attention) {
        if !has_attention {
            space.replace(&mut layer.attention, hidden);
        }
    }
    Ok(spec)
}

/// The feed-forward block, under its names.
pub fn feed_forward(dimensions: &Dimensions) -> FeedForward {
    let (hidden, inner) = (dimensions.hidden_size, dimensions.intermediate_size);
    let gate_up = [
        ("feed_forward.gate_proj", inner),
        ("feed_forward.up_proj", inner),
    ];
    FeedForward::Gated {
        gate_up: Projection::stacked(&gate_up, hidden, Stacking::Interleaved),
        activation: dimensions.activation,
        down: Projection::single("feed_forward.down_proj", hidden, inner),
    }
}
