//! OLMo Hybrid, by Ai2: the gated delta rule in most layers, and OLMo 3's attention in the others.
//!
//! Layers with attention have norms behind their blocks, the others in front of them. Strengths reach 2 with
//! `linear_allow_neg_eigval`. Attention has no positions if `rope_theta` is null. Checkpoints have convolutions of
//! queries, of keys and of values, and other names of norms than transformers.
//!
//! Source: configuration_olmo_hybrid.py and modeling_olmo_hybrid.py of transformers, and its conversion_mapping.py.

use super::dimensions::{Defaults, Sizes};
use super::family::Family;
use super::olmo2;
use super::qwen3_next::{DeltaDefaults, delta_recurrence, delta_shape};
use super::recurrent::{MAX_KERNEL_LEN, check_activation, layers_of_type};
use super::rope_config::rope_parameters;
use crate::recurrence_spec::RecurrenceSpec;
use crate::rope::Rope;
use crate::spec::{ModelSpec, Norms, Projection};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::DeltaShape;
use inflight_numbers::Stacking;

pub const FAMILY: Family = Family {
    class: "OlmoHybridForCausalLM",
    gguf: None,
    describe,
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(100_352, 3840, 11_008, 32, 30, 65_536)),
        ..Defaults::LLAMA
    };
    let (mut spec, dimensions) = olmo2::describe_dense(config, FAMILY.class, &defaults)?;
    check_activation(config, dimensions.activation)?;
    let (hidden, num_layers) = (spec.hidden_size, spec.num_layers());
    let is_null = |file: &JsonFile| file.has("rope_theta") && file.get("rope_theta").is_none();
    let has_positions = !rope_parameters(config)?
        .as_ref()
        .map_or(is_null(config), is_null);
    let has_attention = match config.get("layer_types") {
        Some(_) => layers_of_type(
            config,
            num_layers,
            &[["linear_attention", "full_attention"]],
        )?,
        None => (0..num_layers)
            .map(|layer| layer % 4 == 3 || num_layers < 4 && layer + 1 == num_layers)
            .collect(),
    };
    let delta_defaults = DeltaDefaults {
        heads: [spec.num_heads; 2],
        key_dim: |num_key_heads| 3 * hidden / (4 * num_key_heads),
        value_dim: |key_dim| 2 * key_dim,
    };
    let mut delta = delta_shape(config, &delta_defaults, 1e-5)?;
    if config.bool_or("linear_allow_neg_eigval", true)? {
        delta.strength_scale = 2.0;
    }
    let kernel_len = config.size("linear_conv_kernel_dim", 1..=MAX_KERNEL_LEN)?;
    for (layer, has_attention) in spec.layers.iter_mut().zip(has_attention) {
        let attention = &mut layer.attention;
        if !has_positions {
            attention.rope = Rope::none();
        }
        if has_attention {
            continue;
        }
        layer.norms = Norms::before("attention_layer_norm", "feedforward_layer_norm");
        attention.qk_norm = None;
        attention.qkv = inputs(&delta, hidden);
        attention.o = Projection::single("linear_attn.o_proj", hidden, delta.value_len());
        attention.recurrence = Some(RecurrenceSpec {
            convolution_parts: Some([
                "linear_attn.q_conv1d",
                "linear_attn.k_conv1d",
                "linear_attn.v_conv1d",
            ]),
            ..delta_recurrence(delta, kernel_len, "linear_attn.o_norm")
        });
    }
    Ok(spec)
}

/// The input projection: queries, keys, values, gates, strengths, decays.
fn inputs(delta: &DeltaShape, hidden_size: usize) -> Projection {
    let parts = [
        ("linear_attn.q_proj", delta.key_len()),
        ("linear_attn.k_proj", delta.key_len()),
        ("linear_attn.v_proj", delta.value_len()),
        ("linear_attn.g_proj", delta.value_len()),
        ("linear_attn.b_proj", delta.num_value_heads),
        ("linear_attn.a_proj", delta.num_value_heads),
    ];
    Projection::stacked(&parts, hidden_size, Stacking::Concatenated)
}
