//! Keys of config.json that describe the position embedding.

use super::bounds::MAX_POSITIONS;
use crate::base::LoadError;
use crate::checkpoint::JsonFile;
use crate::runner::rope::{Rope, RopeScaling};

const DEFAULT_THETA: f64 = 10_000.0;
const SUPPORTED: &str = "'default', 'linear', 'llama3' and 'yarn'";

/// Reads `rope_parameters`, which transformers 5 writes, or `rope_theta` and `rope_scaling`, which earlier versions
/// wrote. If a config has both, a non-empty `rope_scaling` is used, as in transformers 5
/// (`convert_rope_params_to_dict`); transformers 4 reads nothing else.
pub fn rope(config: &JsonFile, max_position_embeddings: usize) -> Result<Rope, LoadError> {
    const THETA: std::ops::RangeInclusive<f64> = 1.0..=1e15;
    let scaling = config.object("rope_scaling")?;
    let scaling = scaling.filter(|section| section.entries().next().is_some());
    let parameters = match scaling {
        Some(scaling) => Some(scaling),
        None => config.object("rope_parameters")?,
    };
    let mut theta = config.number("rope_theta", THETA)?;
    let mut scaling = RopeScaling::None;
    for section in [Some(config), parameters.as_ref()].into_iter().flatten() {
        if let Some(factor) = section.number("partial_rotary_factor", 0.0..=1.0)?
            && factor != 1.0
        {
            return Err(section.unexpected(
                "partial_rotary_factor",
                factor,
                "supported; only 1 is",
            ));
        }
    }
    if let Some(parameters) = &parameters {
        theta = parameters.number("rope_theta", THETA)?.or(theta);
        scaling = scaling_of(parameters, max_position_embeddings)?;
    }
    let theta = theta.unwrap_or(DEFAULT_THETA);
    if matches!(scaling, RopeScaling::Yarn { .. }) && theta <= 1.0 {
        let expected = "above 1, which yarn requires: it divides by the logarithm";
        return Err(config.unexpected("rope_theta", theta, expected));
    }
    Ok(Rope { theta, scaling })
}

fn scaling_of(
    parameters: &JsonFile,
    max_position_embeddings: usize,
) -> Result<RopeScaling, LoadError> {
    const FACTOR: std::ops::RangeInclusive<f64> = 1.0..=1e6;
    if let Some((kind, value)) = parameters.entries().find(|(_, value)| value.is_object()) {
        let expected = "supported: all layers have one position embedding";
        return Err(parameters.unexpected(kind, value, expected));
    }
    let original_len = || {
        let key = "original_max_position_embeddings";
        let original = parameters.size(key, 1..=MAX_POSITIONS)?;
        Ok::<_, LoadError>(original.unwrap_or(max_position_embeddings) as f64)
    };
    let key = match parameters.string("rope_type")? {
        Some(_) => "rope_type",
        None => "type",
    };
    match parameters.string(key)?.unwrap_or("default") {
        "default" => Ok(RopeScaling::None),
        "linear" => Ok(RopeScaling::Linear {
            factor: parameters.required_number("factor", FACTOR)?,
        }),
        "llama3" => {
            let low_freq_factor = parameters.required_number("low_freq_factor", 1e-6..=1e6)?;
            let high_freq_factor = parameters.required_number("high_freq_factor", 1e-6..=1e6)?;
            if high_freq_factor <= low_freq_factor {
                let expected = format!("above low_freq_factor {low_freq_factor}");
                return Err(parameters.unexpected("high_freq_factor", high_freq_factor, expected));
            }
            Ok(RopeScaling::Llama3 {
                factor: parameters.required_number("factor", FACTOR)?,
                low_freq_factor,
                high_freq_factor,
                original_len: original_len()?,
            })
        }
        "yarn" => {
            let original_len = original_len()?;
            let factor = match parameters.number("factor", FACTOR)? {
                Some(factor) => factor,
                None => (max_position_embeddings as f64 / original_len).max(1.0),
            };
            Ok(RopeScaling::Yarn {
                factor,
                attention_factor: yarn_attention_factor(parameters, factor)?,
                beta_fast: parameters.number("beta_fast", 1e-6..=1e6)?.unwrap_or(32.0),
                beta_slow: parameters.number("beta_slow", 1e-6..=1e6)?.unwrap_or(1.0),
                original_len,
                truncate: parameters.bool_or("truncate", true)?,
            })
        }
        other => Err(parameters.unexpected(
            key,
            format_args!("'{other}'"),
            format_args!("supported; {SUPPORTED} are"),
        )),
    }
}

/// The temperature of the config, or else the one of the paper.
fn yarn_attention_factor(parameters: &JsonFile, factor: f64) -> Result<f64, LoadError> {
    if let Some(given) = parameters.number("attention_factor", 1e-6..=1e6)? {
        return Ok(given);
    }
    let temperature = |scale: f64| 0.1 * scale * factor.ln() + 1.0;
    let mscale = parameters.number("mscale", 0.0..=1e6)?.unwrap_or(0.0);
    let mscale_all_dim = parameters
        .number("mscale_all_dim", 0.0..=1e6)?
        .unwrap_or(0.0);
    if mscale > 0.0 && mscale_all_dim > 0.0 {
        Ok(temperature(mscale) / temperature(mscale_all_dim))
    } else {
        Ok(temperature(1.0))
    }
}
