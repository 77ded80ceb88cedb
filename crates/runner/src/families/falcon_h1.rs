//! Falcon-H1, by TII: attention and the state space of Mamba-2 side by side in each layer.
//!
//! Both read one norm, and `x += ssm_out_multiplier * space + attention_out_multiplier * attention`. All blocks have
//! multipliers: `ssm_multipliers` for gates, values, keys, queries and times, `mlp_multipliers` for the gates and the
//! results of the feed-forward block. The state space has a norm in front of its gates or behind them
//! (`mamba_norm_before_gate`), or none (`mamba_rms_norm`).
//!
//! Source: configuration_falcon_h1.py and modeling_falcon_h1.py of transformers; Falcon-LLM team, arXiv:2507.22448.

use serde_json::Value;

use super::bamba::feed_forward;
use super::bounds::MAX_WIDTH;
use super::dimensions::{Defaults, Dimensions, Sizes};
use super::family::Family;
use super::granite::multiplier;
use super::recurrent::check_activation;
use super::state_space::StateSpace;
use super::windows::no_windows;
use crate::spec::{ModelSpec, Multipliers, Norms};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::SpaceNorm;

pub const FAMILY: Family = Family {
    class: "FalconH1ForCausalLM",
    gguf: None,
    describe,
};

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
