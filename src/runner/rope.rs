//! Rotary position embedding: from config.json to the cosines and sines of every position.
//!
//! Pair `i` of a head's `head_dim / 2` pairs turns by `position * frequency[i]` (Su et al., RoFormer,
//! 2021). What architectures differ in is how they scale the frequencies for contexts longer than
//! the ones they were first trained on; everything after that is one table.

use std::f64::consts::PI;

use crate::base::LoadError;
use crate::checkpoint::JsonFile;

const DEFAULT_THETA: f64 = 10_000.0;
const SUPPORTED: &str = "'default', 'linear', 'llama3' and 'yarn'";

/// Which frequencies the pairs of a head turn with.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// The base of the geometric series of wavelengths.
    pub theta: f64,
    /// What is done to the series.
    pub scaling: RopeScaling,
}

/// How the frequencies are changed to reach beyond the length of the first training.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// All divided by `factor` (kaiokendev, "Extending context to 8K", 2023).
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Long waves divided by `factor`, short ones kept, a ramp between (Llama 3.1 and later).
    Llama3 {
        /// The divisor of the long waves.
        factor: f64,
        /// Waves longer than `original_len / low_freq_factor` are long.
        low_freq_factor: f64,
        /// Waves shorter than `original_len / high_freq_factor` are short.
        high_freq_factor: f64,
        /// Positions of the first training.
        original_len: f64,
    },
    /// Each divided by one of its own, `[head_dim / 2]`: how GGUF files have Llama 3's.
    Divided {
        /// The divisors.
        divisors: Vec<f32>,
    },
    /// "NTK by parts" with attention temperature (Peng et al., YaRN, 2023).
    Yarn {
        /// The divisor of the long waves.
        factor: f64,
        /// Multiplies cosines and sines, and so sharpens attention.
        attention_factor: f64,
        /// Pairs that turn more often than this over `original_len` keep their frequency.
        beta_fast: f64,
        /// Pairs that turn less often than this are divided by `factor`.
        beta_slow: f64,
        /// Positions of the first training.
        original_len: f64,
        /// Whether the ramp's ends are rounded to whole pairs.
        truncate: bool,
    },
}

impl Rope {
    /// Reads `rope_parameters`, as transformers 5 writes it, or `rope_theta` and `rope_scaling`, as
    /// everybody wrote before. Of both, `rope_scaling` counts, unless it is empty: so it is in transformers 5
    /// (`convert_rope_params_to_dict`), and 4 knows no other.
    pub(super) fn from_config(
        config: &JsonFile,
        max_position_embeddings: usize,
    ) -> Result<Self, LoadError> {
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
            scaling = RopeScaling::from_parameters(parameters, max_position_embeddings)?;
        }
        let theta = theta.unwrap_or(DEFAULT_THETA);
        if matches!(scaling, RopeScaling::Yarn { .. }) && theta <= 1.0 {
            let expected =
                "above 1, as yarn needs it: its ramp is found by dividing by the logarithm";
            return Err(config.unexpected("rope_theta", theta, expected));
        }
        Ok(Self { theta, scaling })
    }

    /// Radians per position of each pair, `[head_dim / 2]`.
    pub fn frequencies(&self, head_dim: usize) -> Vec<f32> {
        let pairs = head_dim / 2;
        let plain = (0..pairs).map(|i| self.theta.powf(-((2 * i) as f64) / head_dim as f64));
        let scaled: Vec<f64> = match self.scaling {
            RopeScaling::None => plain.collect(),
            RopeScaling::Divided { ref divisors } => plain
                .zip(divisors)
                .map(|(frequency, &divisor)| frequency / f64::from(divisor))
                .collect(),
            RopeScaling::Linear { factor } => plain.map(|frequency| frequency / factor).collect(),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_len,
            } => plain
                .map(|frequency| {
                    let waves = original_len * frequency / (2.0 * PI);
                    let kept = (waves - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    blend(frequency / factor, frequency, kept)
                })
                .collect(),
            RopeScaling::Yarn {
                factor,
                beta_fast,
                beta_slow,
                original_len,
                truncate,
                ..
            } => {
                // The pair, not whole, that turns `beta` times over the original length.
                let pair = |beta: f64| {
                    head_dim as f64 * (original_len / (beta * 2.0 * PI)).ln()
                        / (2.0 * self.theta.ln())
                };
                let (mut low, mut high) = (pair(beta_fast), pair(beta_slow));
                if truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                low = low.max(0.0);
                high = high.min((head_dim - 1) as f64);
                // As the reference implementation: an empty ramp is a step.
                let width = if low == high { 0.001 } else { high - low };
                plain
                    .enumerate()
                    .map(|(i, frequency)| {
                        let scaled = (i as f64 - low) / width;
                        blend(frequency, frequency / factor, scaled)
                    })
                    .collect()
            }
        };
        scaled
            .into_iter()
            .map(|frequency| frequency as f32)
            .collect()
    }

    /// What cosines and sines are multiplied by: 1 but for YaRN.
    pub fn attention_factor(&self) -> f32 {
        match self.scaling {
            RopeScaling::Yarn {
                attention_factor, ..
            } => attention_factor as f32,
            _ => 1.0,
        }
    }
}

impl RopeScaling {
    fn from_parameters(
        parameters: &JsonFile,
        max_position_embeddings: usize,
    ) -> Result<Self, LoadError> {
        const FACTOR: std::ops::RangeInclusive<f64> = 1.0..=1e6;
        if let Some((kind, value)) = parameters.entries().find(|(_, value)| value.is_object()) {
            let expected = "supported: all layers have one position embedding";
            return Err(parameters.unexpected(kind, value, expected));
        }
        let original_len = || {
            let key = "original_max_position_embeddings";
            let original = parameters.size(key, 1..=super::spec::MAX_POSITIONS)?;
            Ok::<_, LoadError>(original.unwrap_or(max_position_embeddings) as f64)
        };
        let key = match parameters.string("rope_type")? {
            Some(_) => "rope_type",
            None => "type",
        };
        match parameters.string(key)?.unwrap_or("default") {
            "default" => Ok(Self::None),
            "linear" => Ok(Self::Linear {
                factor: parameters.required_number("factor", FACTOR)?,
            }),
            "llama3" => {
                let low_freq_factor = parameters.required_number("low_freq_factor", 1e-6..=1e6)?;
                let high_freq_factor =
                    parameters.required_number("high_freq_factor", 1e-6..=1e6)?;
                if high_freq_factor <= low_freq_factor {
                    let expected = format!("above low_freq_factor {low_freq_factor}");
                    return Err(parameters.unexpected(
                        "high_freq_factor",
                        high_freq_factor,
                        expected,
                    ));
                }
                Ok(Self::Llama3 {
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
                Ok(Self::Yarn {
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
}

/// The paper's temperature, or what the config says instead.
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

/// `from` where `share` is 0 or less, `to` where it is 1 or more, a straight line between.
fn blend(from: f64, to: f64, share: f64) -> f64 {
    let share = share.clamp(0.0, 1.0);
    from * (1.0 - share) + to * share
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unscaled_frequencies_are_a_geometric_series() {
        let rope = Rope {
            theta: 10_000.0,
            scaling: RopeScaling::None,
        };
        let frequencies = rope.frequencies(8);
        for (frequency, expected) in frequencies.iter().zip([1.0, 0.1, 0.01, 0.001]) {
            assert!((frequency - expected).abs() < 1e-7, "{frequencies:?}");
        }
    }

    #[test]
    fn llama3_scaling_keeps_short_waves_and_divides_long_ones() {
        let rope = Rope {
            theta: 500_000.0,
            scaling: RopeScaling::Llama3 {
                factor: 32.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_len: 8192.0,
            },
        };
        let plain = Rope {
            scaling: RopeScaling::None,
            ..rope.clone()
        };
        let ratios: Vec<f32> = rope
            .frequencies(64)
            .iter()
            .zip(plain.frequencies(64))
            .map(|(scaled, plain)| plain / scaled)
            .collect();
        assert_eq!(ratios[0], 1.0);
        assert_eq!(ratios[31], 32.0);
        assert!(ratios.is_sorted(), "{ratios:?}");
        assert!(
            ratios.iter().any(|ratio| (1.5..31.0).contains(ratio)),
            "{ratios:?}"
        );
    }
}
