//! Rotary position embedding: the frequency of each pair of a head's elements.
//!
//! Pair `i` of the `head_dim / 2` pairs of a head is rotated by `position * frequency[i]` (Su et al., RoFormer,
//! arXiv:2104.09864). Families differ in how they scale the frequencies for contexts longer than those of the first
//! training; the device makes one table of cosines and sines from whatever results.

use std::f64::consts::PI;

/// A position embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// The base of the geometric series of wavelengths.
    pub theta: f64,
    /// Elements of a head that are rotated, the first ones: all, in most families; an even number.
    pub rotary_dim: usize,
    /// How the series is changed.
    pub scaling: RopeScaling,
    /// The factors of rotated queries, if they have some.
    pub query_factors: Option<QueryFactors>,
    /// Which of a token's positions rotates which pairs.
    pub axes: RopeAxes,
}

/// Which of a token's [three positions](inflight_device::AxisPositions) rotates which pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeAxes {
    /// The position in the sequence rotates all.
    Sequence,
    /// M-RoPE: the first pairs are rotated by the position in the sequence, the next ones by the row, and the last ones
    /// by the column, so many each (Wang et al., Qwen2-VL, arXiv:2409.12191).
    Sections([usize; 3]),
    /// M-RoPE whose axes take turns, as long as they have pairs left; the last pairs are rotated by the position in the
    /// sequence (Qwen3-VL).
    Interleaved([usize; 3]),
    /// The row rotates half of the pairs, and the column the other half, with the frequencies of a head of half the
    /// width: patches in a vision tower.
    Plane,
    /// As [`RopeAxes::Plane`], with the frequencies of a head of full width: the even ones rotate by the row, the odd
    /// ones by the column (Pixtral).
    PlaneInTurn,
}

impl RopeAxes {
    /// The axis of each pair, `[num_pairs]`, as an index of the positions; `None` if each token has one position.
    fn of_pairs(self, num_pairs: usize) -> Option<Vec<u8>> {
        let axis = |pair: usize| match self {
            Self::Sequence => 0,
            Self::Sections([first, second, _]) => {
                u8::from(pair >= first) + u8::from(pair >= first + second)
            }
            Self::Interleaved(sections) => match pair % 3 {
                turn if pair < 3 * sections[turn] => turn as u8,
                _ => 0,
            },
            Self::Plane | Self::PlaneInTurn => 1 + u8::from(pair >= num_pairs / 2),
        };
        match self {
            Self::Sequence => None,
            _ => Some((0..num_pairs).map(axis).collect()),
        }
    }
}

/// Factors of queries that grow with their positions: `1 + slope * ln(1 + floor((position + first) / period))`
/// (Nakanishi, Scalable-Softmax, arXiv:2501.19399).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueryFactors {
    /// The growth.
    pub slope: f64,
    /// Positions with equal factors.
    pub period: f64,
    /// How far positions are ahead.
    pub first: usize,
}

impl QueryFactors {
    /// The factor at a position.
    pub fn at(&self, position: usize) -> f32 {
        let periods = ((position + self.first) as f64 / self.period).floor();
        (1.0 + self.slope * periods.ln_1p()) as f32
    }
}

/// How the frequencies are changed for contexts longer than those of the first training.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// All divided by `factor` (kaiokendev, "Extending context to 8K", 2023).
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Frequencies of long waves divided by `factor`, of short waves kept, and a ramp between (Llama 3.1 and later).
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
    /// Each divided by its own divisor, `[rotary_dim / 2]`: how GGUF files store the scaling of Llama 3.
    Divided {
        /// The divisors.
        divisors: Vec<f32>,
    },
    /// Each divided by its own divisor, which depends on the length that sequences may have (Ding et al., LongRoPE,
    /// arXiv:2402.13753). transformers chooses by the length that a sequence has reached, which changes the keys that
    /// are in the cache; a server chooses once.
    Long {
        /// The divisors for sequences up to `original_len`, `[rotary_dim / 2]`.
        short_divisors: Vec<f64>,
        /// The divisors for longer ones.
        long_divisors: Vec<f64>,
        /// Positions of the first training.
        original_len: usize,
        /// The factors of cosines and sines, for sequences up to `original_len` and for longer ones.
        attention_factors: [f64; 2],
    },
    /// "NTK by parts" with attention temperature (Peng et al., YaRN, 2023).
    Yarn {
        /// The divisor of the long waves.
        factor: f64,
        /// The factor of cosines and sines, which sharpens attention.
        attention_factor: f64,
        /// Pairs that rotate more often than this over `original_len` keep their frequency.
        beta_fast: f64,
        /// Frequencies of pairs that rotate less often than this are divided by `factor`.
        beta_slow: f64,
        /// Positions of the first training.
        original_len: f64,
        /// Whether the ramp's ends are rounded to whole pairs.
        truncate: bool,
    },
}

impl Rope {
    /// No rotation: no element is rotated.
    pub fn none() -> Self {
        Self {
            theta: 1.0,
            rotary_dim: 0,
            scaling: RopeScaling::None,
            query_factors: None,
            axes: RopeAxes::Sequence,
        }
    }

    /// The axis of each pair of a head, `[head_dim / 2]`, as an index of a token's positions; `None` if each token has
    /// one position.
    pub fn pair_axes(&self, head_dim: usize) -> Option<Vec<u8>> {
        let mut axes = self.axes.of_pairs(self.rotary_dim / 2)?;
        axes.resize(head_dim / 2, 0);
        Some(axes)
    }

    /// The positions that a scaled embedding reaches: with YaRN those of the first training times the factor, which
    /// model cards leave `max_position_embeddings` below. `None` where config.json alone says.
    pub fn scaled_positions(&self) -> Option<usize> {
        match self.scaling {
            RopeScaling::Yarn {
                factor,
                original_len,
                ..
            } => Some((factor * original_len) as usize),
            _ => None,
        }
    }

    /// Radians per position of each pair, `[head_dim / 2]`, for sequences of up to `max_seq_len` tokens. Pairs that are
    /// not rotated are the last ones, with a frequency of 0.
    pub fn frequencies(&self, head_dim: usize, max_seq_len: usize) -> Vec<f32> {
        let rotary_dim = self.rotary_dim;
        let pairs = rotary_dim / 2;
        let half = (pairs / 2).max(1);
        let exponent = |pair: usize| match self.axes {
            RopeAxes::Plane => (pair % half) as f64 / half as f64,
            RopeAxes::PlaneInTurn => (pair % half * 2 + pair / half) as f64 / pairs as f64,
            _ => pair as f64 / pairs as f64,
        };
        let plain = (0..pairs).map(|pair| self.theta.powf(-exponent(pair)));
        let scaled: Vec<f64> = match self.scaling {
            RopeScaling::None => plain.collect(),
            RopeScaling::Divided { ref divisors } => plain
                .zip(divisors)
                .map(|(frequency, &divisor)| frequency / f64::from(divisor))
                .collect(),
            RopeScaling::Long {
                ref short_divisors,
                ref long_divisors,
                original_len,
                ..
            } => {
                let divisors = match max_seq_len > original_len {
                    true => long_divisors,
                    false => short_divisors,
                };
                plain
                    .zip(divisors)
                    .map(|(frequency, divisor)| frequency / divisor)
                    .collect()
            }
            RopeScaling::Linear { factor } => plain.map(|frequency| frequency / factor).collect(),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_len,
            } => plain
                .map(|frequency| {
                    let waves = original_len * frequency / (2.0 * PI);
                    let between = high_freq_factor - low_freq_factor;
                    let kept = match between > 0.0 {
                        true => (waves - low_freq_factor) / between,
                        false => f64::from(u8::from(waves >= low_freq_factor)),
                    };
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
                // The fractional pair that rotates `beta` times over the original length.
                let pair = |beta: f64| {
                    rotary_dim as f64 * (original_len / (beta * 2.0 * PI)).ln()
                        / (2.0 * self.theta.ln())
                };
                let (mut low, mut high) = (pair(beta_fast), pair(beta_slow));
                if truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                low = low.max(0.0);
                high = high.min((rotary_dim - 1) as f64);
                // An empty ramp is a step, as in the reference implementation.
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
        let mut frequencies: Vec<f32> = scaled
            .into_iter()
            .map(|frequency| frequency as f32)
            .collect();
        frequencies.resize(head_dim / 2, 0.0);
        frequencies
    }

    /// The factor of cosines and sines, for sequences of up to `max_seq_len` tokens: 1 except for YaRN and LongRoPE.
    pub fn attention_factor(&self, max_seq_len: usize) -> f32 {
        match self.scaling {
            RopeScaling::Yarn {
                attention_factor, ..
            } => attention_factor as f32,
            RopeScaling::Long {
                attention_factors: [short, long],
                original_len,
                ..
            } => match max_seq_len > original_len {
                true => long as f32,
                false => short as f32,
            },
            _ => 1.0,
        }
    }
}

/// `from` where `share` is at most 0, `to` where it is at least 1, and linear between.
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
            rotary_dim: 8,
            scaling: RopeScaling::None,
            query_factors: None,
            axes: RopeAxes::Sequence,
        };
        let frequencies = rope.frequencies(8, 100);
        for (frequency, expected) in frequencies.iter().zip([1.0, 0.1, 0.01, 0.001]) {
            assert!((frequency - expected).abs() < 1e-7, "{frequencies:?}");
        }
    }

    #[test]
    fn pairs_are_rotated_by_the_position_on_their_axis() {
        let axes = |axes: RopeAxes, num_pairs| axes.of_pairs(num_pairs).expect("several axes");
        assert_eq!(RopeAxes::Sequence.of_pairs(8), None);
        let sections = RopeAxes::Sections([2, 3, 3]);
        assert_eq!(axes(sections, 8), [0, 0, 1, 1, 1, 2, 2, 2]);
        let interleaved = RopeAxes::Interleaved([4, 2, 2]);
        assert_eq!(axes(interleaved, 8), [0, 1, 2, 0, 1, 2, 0, 0]);
        assert_eq!(axes(RopeAxes::Plane, 4), [1, 1, 2, 2]);
        let rope = Rope {
            theta: 100.0,
            rotary_dim: 8,
            axes: RopeAxes::Plane,
            ..Rope::none()
        };
        assert_eq!(rope.pair_axes(12), Some(vec![1, 1, 2, 2, 0, 0]));
        let in_turn = Rope {
            theta: 10_000.0,
            axes: RopeAxes::PlaneInTurn,
            ..rope.clone()
        };
        assert_eq!(in_turn.pair_axes(12), rope.pair_axes(12));
        let frequencies = [
            (rope, [1.0, 0.1, 1.0, 0.1, 0.0, 0.0]),
            (in_turn, [1.0, 0.01, 0.1, 0.001, 0.0, 0.0]),
        ];
        for (rope, expected) in frequencies {
            for (frequency, expected) in rope.frequencies(12, 100).iter().zip(expected) {
                assert!((frequency - expected).abs() < 1e-7, "{frequency}");
            }
        }
    }

    #[test]
    fn llama3_scaling_keeps_short_waves_and_divides_long_ones() {
        let rope = Rope {
            theta: 500_000.0,
            rotary_dim: 64,
            scaling: RopeScaling::Llama3 {
                factor: 32.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_len: 8192.0,
            },
            query_factors: None,
            axes: RopeAxes::Sequence,
        };
        let plain = Rope {
            scaling: RopeScaling::None,
            ..rope.clone()
        };
        let ratios: Vec<f32> = rope
            .frequencies(64, 100)
            .iter()
            .zip(plain.frequencies(64, 100))
            .map(|(scaled, plain)| plain / scaled)
            .collect();
        assert_eq!(ratios[0], 1.0);
        assert_eq!(ratios[31], 32.0);
        // As in Llama 4 Scout.
        let step = Rope {
            scaling: RopeScaling::Llama3 {
                factor: 16.0,
                low_freq_factor: 1.0,
                high_freq_factor: 1.0,
                original_len: 8192.0,
            },
            ..plain.clone()
        };
        let pairs = step.frequencies(64, 100).into_iter();
        for (scaled, plain) in pairs.zip(plain.frequencies(64, 100)) {
            let is_long = 8192.0 * f64::from(plain) < 2.0 * PI;
            let expected = if is_long { plain / 16.0 } else { plain };
            assert!((scaled - expected).abs() <= expected * 1e-6);
        }
        assert!(ratios.is_sorted(), "{ratios:?}");
        assert!(
            ratios.iter().any(|ratio| (1.5..31.0).contains(ratio)),
            "{ratios:?}"
        );
    }

    #[test]
    fn pairs_beyond_the_rotary_width_are_not_rotated() {
        let rope = Rope {
            theta: 10_000.0,
            rotary_dim: 4,
            scaling: RopeScaling::None,
            query_factors: None,
            axes: RopeAxes::Sequence,
        };
        let frequencies = rope.frequencies(8, 100);
        assert_eq!(frequencies, [1.0, 0.01, 0.0, 0.0]);
        assert_eq!(Rope::none().frequencies(8, 100), [0.0; 4]);
    }

    #[test]
    fn long_rope_chooses_by_the_longest_sequence() {
        let rope = Rope {
            theta: 10_000.0,
            rotary_dim: 4,
            scaling: RopeScaling::Long {
                short_divisors: vec![1.0, 2.0],
                long_divisors: vec![4.0, 10.0],
                original_len: 100,
                attention_factors: [1.25, 1.5],
            },
            query_factors: None,
            axes: RopeAxes::Sequence,
        };
        assert_eq!(rope.frequencies(4, 100), [1.0, 0.005]);
        assert_eq!(rope.frequencies(4, 101), [0.25, 0.001]);
        assert_eq!(rope.attention_factor(100), 1.25);
        assert_eq!(rope.attention_factor(101), 1.5);
    }
}
