//! Falcon-H1, by TII: attention and the state space of Mamba-2 side by side in each layer.
//!
//! Both read one norm, and `x += ssm_out_multiplier * space + attention_out_multiplier * attention`. All blocks have
//! multipliers: `ssm_multipliers` for gates, values, keys, queries and times, `mlp_multipliers` for the gates and the
//! results of the feed-forward block. The state space has a norm in front of its gates or behind them
//! (`mamba_norm_before_gate`), or none (`mamba_rms_norm`).
//!
//! Source: configuration_falcon_h1.py and modeling_falcon_h1.py of transformers; Falcon-LLM team, arXiv:2507.22448.

use serde_json::{Map, Value, json};

use super::bamba::feed_forward;
use super::bounds::MAX_WIDTH;
use super::dimensions::{Defaults, Dimensions, Sizes};
use super::family::Family;
use super::gguf::{GgufArchitecture, GgufConfig};
use super::granite::multiplier;
use super::recurrent::check_activation;
use super::state_space::StateSpace;
use super::windows::no_windows;
use crate::spec::{ModelSpec, Multipliers, Norms};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::{RecurrentRule, SpaceNorm};

pub const FAMILY: Family = Family {
    class: "FalconH1ForCausalLM",
    gguf: Some(GgufArchitecture {
        modules: &[
            ("pre_ff_layernorm", "ffn_norm"),
            ("feed_forward.gate_proj", "ffn_gate"),
            ("feed_forward.up_proj", "ffn_up"),
            ("feed_forward.down_proj", "ffn_down"),
            ("mamba.in_proj", "ssm_in"),
            ("mamba.conv1d", "ssm_conv1d"),
            ("mamba.A_log", "ssm_a"),
            ("mamba.dt_bias", "ssm_dt"),
            ("mamba.D", "ssm_d"),
            ("mamba.norm", "ssm_norm"),
            ("mamba.out_proj", "ssm_out"),
        ],
        keys: &[
            ("ssm.conv_kernel", "mamba_d_conv"),
            ("ssm.inner_size", "mamba_d_ssm"),
            ("ssm.state_size", "mamba_d_state"),
            ("ssm.group_count", "mamba_n_groups"),
            ("ssm.time_step_rank", "mamba_n_heads"),
        ],
        optional_modules: &[("mamba_rms_norm", "mamba.norm")],
        optional_biases: &[("mamba_conv_bias", "mamba.conv1d")],
        add_read: add_space,
        rewrite: |_, spec| {
            leave_multipliers_out(spec);
            Ok(())
        },
        ..GgufArchitecture::named("falcon-h1")
    }),
    describe,
};

/// Adds the width of the state space's heads, and the order of its norm, which is llama.cpp's.
fn add_space(gguf: &GgufConfig<'_>, config: &mut Map<String, Value>) -> Result<(), LoadError> {
    let head_dim = gguf.quotient("ssm.inner_size", "ssm.time_step_rank")?;
    config.insert("mamba_d_head".to_owned(), json!(head_dim));
    config.insert("mamba_norm_before_gate".to_owned(), json!(false));
    Ok(())
}

/// Takes all multipliers for 1: `FalconH1Model` of llama.cpp's converter has multiplied the weights by them.
fn leave_multipliers_out(spec: &mut ModelSpec) {
    spec.embedding_scale = 1.0;
    spec.logits.scale = 1.0;
    for layer in &mut spec.layers {
        layer.multipliers = None;
        layer.attention.scale = 1.0 / (spec.head_dim as f32).sqrt();
        if let Some(block) = &mut layer.recurrence_block {
            block.scale = 1.0;
            if let RecurrentRule::StateSpace(space) = &mut block.recurrence.shape.rule {
                space.input_scales = [1.0; 5];
            }
        }
    }
}

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(128_000, 4096, 14_336, 32, 32, 8192)),
        num_kv_heads: Some(8),
        norm_eps: 1e-5,
        ..Defaults::LLAMA
    };
    let dimensions = Dimensions::from_config(config, &defaults)?;
    check_activation(config, dimensions.activation)?;
    // Multipliers apply to products without biases only.
    for key in [
        "attention_bias",
        "mamba_proj_bias",
        "mlp_bias",
        "projectors_bias",
    ] {
        if config.bool_or(key, false)? {
            let expected = "supported beside multipliers; only false is";
            return Err(config.unexpected(key, true, expected));
        }
    }
    let factor = |key| Ok::<_, LoadError>(multiplier(config, key)? as f32);
    let in_attention = factor("attention_in_multiplier")?;
    let [gate, feed_forward_scale] = multipliers(config, "mlp_multipliers")?;
    let space = space(config, &dimensions)?;
    let mut layer = dimensions.llama_layer();
    layer.norms = Norms::before("input_layernorm", "pre_ff_layernorm");
    layer.feed_forward = feed_forward(&dimensions);
    // Of queries and of keys; values have it in the results.
    layer.attention.scale *= in_attention * in_attention * factor("key_multiplier")?;
    layer.multipliers = Some(Multipliers {
        attention: in_attention * factor("attention_out_multiplier")?,
        gate,
        feed_forward: feed_forward_scale,
    });
    let scale = factor("ssm_out_multiplier")?;
    layer.recurrence_block = Some(space.beside(dimensions.hidden_size, scale));
    let windows = no_windows(dimensions.num_layers);
    let mut spec = dimensions.model(FAMILY.class, layer, windows);
    spec.modules.final_norm = Some("model.final_layernorm");
    spec.embedding_scale = factor("embedding_multiplier")?;
    spec.logits.scale = factor("lm_head_multiplier")?;
    Ok(spec)
}

fn space(config: &JsonFile, dimensions: &Dimensions) -> Result<StateSpace, LoadError> {
    let mut space = match config.size_or("mamba_d_ssm", 1..=MAX_WIDTH, Some(1024))? {
        Some(inner) => StateSpace::of_width(config, dimensions, inner)?,
        None => StateSpace::read(config, dimensions)?,
    };
    let is_first = config.bool_or("mamba_norm_before_gate", true)?;
    let has_norm = config.bool_or("mamba_rms_norm", false)?;
    space.shape.norm = match (has_norm, is_first) {
        (false, _) => SpaceNorm::Absent,
        (true, true) => SpaceNorm::Ungated,
        (true, false) => SpaceNorm::Gated,
    };
    let [gates, values, keys, queries, times] = multipliers(config, "ssm_multipliers")?;
    let factor = multiplier(config, "ssm_in_multiplier")? as f32;
    let scales = [values, keys, queries, gates, times];
    space.shape.input_scales = scales.map(|scale| scale * factor);
    Ok(space)
}

/// A list of so many factors; each 1 where config.json is silent.
fn multipliers<const N: usize>(config: &JsonFile, key: &str) -> Result<[f32; N], LoadError> {
    let Some(told) = config.get(key) else {
        return Ok([1.0; N]);
    };
    let factor = |value: &Value| {
        let factor = value.as_f64()?;
        (1e-4..=1e4).contains(&factor).then_some(factor as f32)
    };
    let factors: Option<Vec<_>> = told
        .as_array()
        .and_then(|it| it.iter().map(factor).collect());
    factors
        .and_then(|factors| factors.try_into().ok())
        .ok_or_else(|| {
            let expected = format!("a list of {N} numbers from 0.0001 to 10000");
            config.unexpected(key, told, expected)
        })
}
