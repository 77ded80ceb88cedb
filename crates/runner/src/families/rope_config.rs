//! Keys of config.json that describe the position embedding.

use std::ops::RangeInclusive;

use serde_json::Value;

use super::bounds::MAX_POSITIONS;
use crate::rope::{Rope, RopeAxes, RopeScaling};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;

const ORIGINAL_LEN: &str = "original_max_position_embeddings";
const FACTOR: RangeInclusive<f64> = 1.0..=1e6;
/// What `rope_theta` may be.
pub const THETA: RangeInclusive<f64> = 1.0..=1e15;
const SUPPORTED: &str = "'default', 'dynamic', 'linear', 'llama3', 'longrope' and 'yarn'";

/// What a family's position embedding is where config.json is silent.
#[derive(Clone, Copy, Debug)]
pub struct RopeDefaults {
    /// `rope_theta`.
    pub theta: f64,
    /// `partial_rotary_factor`; `None` for families that always rotate whole heads.
    pub partial_rotary_factor: Option<f64>,
    /// The part of `rope_parameters` that counts, for families that have several position embeddings. What is not
    /// divided counts as a whole.
    pub section: Option<&'static str>,
    /// Whether `longrope` has the factors of cosines and sines as `short_mscale` and `long_mscale`.
    pub has_mscales: bool,
}

/// The length that scaled position embeddings refer to.
struct Lengths {
    max_position_embeddings: usize,
    /// `original_max_position_embeddings` outside of the section on RoPE.
    original: Option<usize>,
}

/// `rope_parameters`, which transformers 5 writes, or `rope_scaling`, which earlier versions wrote. If a config has
/// both, a non-empty `rope_scaling` is used, as in transformers 5 (`convert_rope_params_to_dict`); transformers 4 reads
/// nothing else.
///
/// # Errors
/// One of them is malformed.
pub fn rope_parameters(config: &JsonFile) -> Result<Option<JsonFile>, LoadError> {
    let scaling = config.object("rope_scaling")?;
    match scaling.filter(|section| section.entries().next().is_some()) {
        Some(scaling) => Ok(Some(scaling)),
        None => config.object("rope_parameters"),
    }
}

/// A section of the [parameters](rope_parameters), of families that have several position embeddings.
///
/// # Errors
/// As [`rope_parameters`], or it is malformed.
pub fn section_of(config: &JsonFile, section: &str) -> Result<Option<JsonFile>, LoadError> {
    match rope_parameters(config)? {
        Some(parameters) => parameters.object(section),
        None => Ok(None),
    }
}

/// Reads the [parameters](rope_parameters), and `rope_theta`, which earlier versions of transformers wrote beside them.
pub fn rope(
    config: &JsonFile,
    max_position_embeddings: usize,
    head_dim: usize,
    defaults: RopeDefaults,
) -> Result<Rope, LoadError> {
    let parameters = rope_parameters(config)?;
    let section = match (&parameters, defaults.section) {
        (Some(parameters), Some(section)) => parameters.object(section)?,
        _ => None,
    };
    let theta = config.number("rope_theta", THETA)?;
    rope_of(
        config,
        section.or(parameters).as_ref(),
        theta,
        max_position_embeddings,
        head_dim,
        defaults,
    )
}

/// Reads a position embedding from its parameters. `theta` is the base if they do not tell it.
pub fn rope_of(
    config: &JsonFile,
    parameters: Option<&JsonFile>,
    mut theta: Option<f64>,
    max_position_embeddings: usize,
    head_dim: usize,
    defaults: RopeDefaults,
) -> Result<Rope, LoadError> {
    let mut scaling = RopeScaling::None;
    let rotary_dim = rotary_dim(config, parameters, head_dim, defaults)?;
    if let Some(parameters) = parameters {
        theta = parameters.number("rope_theta", THETA)?.or(theta);
        let lengths = Lengths {
            max_position_embeddings,
            original: config.size(ORIGINAL_LEN, 1..=MAX_POSITIONS)?,
        };
        scaling = scaling_of(parameters, &lengths, rotary_dim, defaults.has_mscales)?;
    }
    let theta = theta.unwrap_or(defaults.theta);
    if matches!(scaling, RopeScaling::Yarn { .. }) && theta <= 1.0 {
        let expected = "above 1, which yarn requires: it divides by the logarithm";
        return Err(config.unexpected("rope_theta", theta, expected));
    }
    Ok(Rope {
        theta,
        rotary_dim,
        scaling,
        query_factors: None,
        axes: RopeAxes::Sequence,
    })
}

/// Elements of a head that are rotated.
fn rotary_dim(
    config: &JsonFile,
    parameters: Option<&JsonFile>,
    head_dim: usize,
    defaults: RopeDefaults,
) -> Result<usize, LoadError> {
    const KEY: &str = "partial_rotary_factor";
    let (mut told_by, mut factor) = (config, defaults.partial_rotary_factor.unwrap_or(1.0));
    for section in [Some(config), parameters].into_iter().flatten() {
        if let Some(given) = section.number(KEY, 0.0..=1.0)? {
            (told_by, factor) = (section, given);
        }
    }
    if defaults.partial_rotary_factor.is_none() && factor != 1.0 {
        return Err(told_by.unexpected(KEY, factor, "supported; only 1 is"));
    }
    let rotary_dim = (head_dim as f64 * factor) as usize;
    match rotary_dim > 0 && rotary_dim.is_multiple_of(2) {
        true => Ok(rotary_dim),
        false => {
            let expected = format!("a share of {head_dim} that is even");
            Err(told_by.unexpected(KEY, factor, expected))
        }
    }
}

fn scaling_of(
    parameters: &JsonFile,
    lengths: &Lengths,
    rotary_dim: usize,
    has_mscales: bool,
) -> Result<RopeScaling, LoadError> {
    if let Some((kind, value)) = parameters.entries().find(|(_, value)| value.is_object()) {
        let expected = "supported: all layers have one position embedding";
        return Err(parameters.unexpected(kind, value, expected));
    }
    let original_len = || {
        let original = parameters.size(ORIGINAL_LEN, 1..=MAX_POSITIONS)?;
        let original = original.or(lengths.original);
        Ok::<_, LoadError>(original.unwrap_or(lengths.max_position_embeddings))
    };
    let key = match parameters.string("rope_type")? {
        Some(_) => "rope_type",
        None => "type",
    };
    match parameters.string(key)?.unwrap_or("default") {
        // The three positions of a text's token are equal.
        "default" | "mrope" => Ok(RopeScaling::None),
        // Up to `max_position_embeddings`, and no sequence is longer here, it is none. transformers stretches the base
        // for a longer one by its length, and has rotated its earlier keys by others then.
        "dynamic" => {
            let alpha = parameters.number("alpha", 0.0..=1e6)?;
            if let Some(alpha) = alpha.filter(|&alpha| alpha > 0.0) {
                let expected = "0: only Hunyuan stretches its base by it";
                return Err(parameters.unexpected("alpha", alpha, expected));
            }
            parameters.required_number("factor", FACTOR)?;
            Ok(RopeScaling::None)
        }
        "linear" => Ok(RopeScaling::Linear {
            factor: parameters.required_number("factor", FACTOR)?,
        }),
        "llama3" => {
            let low_freq_factor = parameters.required_number("low_freq_factor", 1e-6..=1e6)?;
            let high_freq_factor = parameters.required_number("high_freq_factor", 1e-6..=1e6)?;
            // Both are equal in Llama 4 Scout, of which no wave is between them.
            if high_freq_factor < low_freq_factor {
                let expected = format!("at least low_freq_factor {low_freq_factor}");
                return Err(parameters.unexpected("high_freq_factor", high_freq_factor, expected));
            }
            Ok(RopeScaling::Llama3 {
                factor: parameters.required_number("factor", FACTOR)?,
                low_freq_factor,
                high_freq_factor,
                original_len: original_len()? as f64,
            })
        }
        // Phi 3 called it `su` first.
        "longrope" | "su" => {
            let original_len = original_len()?;
            Ok(RopeScaling::Long {
                short_divisors: divisors(parameters, "short_factor", rotary_dim)?,
                long_divisors: divisors(parameters, "long_factor", rotary_dim)?,
                original_len,
                attention_factors: match has_mscales {
                    true => [
                        parameters.required_number("short_mscale", 1e-6..=1e6)?,
                        parameters.required_number("long_mscale", 1e-6..=1e6)?,
                    ],
                    false => [long_attention_factor(parameters, lengths, original_len)?; 2],
                },
            })
        }
        "yarn" => {
            let original_len = original_len()? as f64;
            let factor = match parameters.number("factor", FACTOR)? {
                Some(factor) => factor,
                None => (lengths.max_position_embeddings as f64 / original_len).max(1.0),
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

/// The divisors of the frequencies, `[rotary_dim / 2]`.
fn divisors(parameters: &JsonFile, key: &str, rotary_dim: usize) -> Result<Vec<f64>, LoadError> {
    let value = parameters.get(key).unwrap_or(&Value::Null);
    let read = |divisor: &Value| {
        divisor
            .as_f64()
            .filter(|divisor| (1e-6..=1e6).contains(divisor))
    };
    value
        .as_array()
        .filter(|divisors| divisors.len() == rotary_dim / 2)
        .and_then(|divisors| divisors.iter().map(read).collect())
        .ok_or_else(|| {
            let expected = format!("a list of {} numbers above 0", rotary_dim / 2);
            parameters.unexpected(key, value, expected)
        })
}

/// The factor of the config, or else the one of the paper: the square root of `1 + ln(factor) / ln(original_len)`.
fn long_attention_factor(
    parameters: &JsonFile,
    lengths: &Lengths,
    original_len: usize,
) -> Result<f64, LoadError> {
    if let Some(given) = parameters.number("attention_factor", 1e-6..=1e6)? {
        return Ok(given);
    }
    let factor = match parameters.number("factor", 1e-6..=1e6)? {
        Some(factor) => factor,
        None => lengths.max_position_embeddings as f64 / original_len as f64,
    };
    if factor <= 1.0 {
        return Ok(1.0);
    }
    if original_len < 2 {
        return Err(parameters.unexpected(ORIGINAL_LEN, original_len, "above 1"));
    }
    Ok((1.0 + factor.ln() / (original_len as f64).ln()).sqrt())
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
