//! Values of 8 bits as the numbers that a vision tower reads.

use half::bf16;

use crate::pixels::NUM_CHANNELS;

/// Mean and deviation of each channel.
pub type Scales = ([f64; NUM_CHANNELS], [f64; NUM_CHANNELS]);

/// The colour of the mean.
pub fn colour_of((mean, _): Scales) -> [u8; NUM_CHANNELS] {
    mean.map(|mean| (mean * 255.0) as u8)
}

/// How a value of 8 bits becomes a number.
#[derive(Clone, Debug, PartialEq)]
pub enum Normalisation {
    /// The difference to the mean, divided by the deviation. Both are of values from 0 to 255, for each channel.
    Standard {
        mean: [f32; NUM_CHANNELS],
        deviation: [f32; NUM_CHANNELS],
    },
    /// The product with a factor.
    Rescaled { factor: f32 },
    /// The product with a factor, its difference to the mean, and the quotient with the deviation, each rounded to
    /// bf16.
    Bf16 {
        factor: f32,
        mean: [f32; NUM_CHANNELS],
        deviation: [f32; NUM_CHANNELS],
    },
}

impl Normalisation {
    /// The product with a factor, its difference to the mean, and the quotient with the deviation. Rounded as
    /// transformers does, which multiplies mean and deviation with the inverse factor.
    pub fn standard(factor: f64, (mean, deviation): Scales) -> Self {
        let scaled = |number: f64| number as f32 * (1.0 / factor) as f32;
        Self::Standard {
            mean: mean.map(scaled),
            deviation: deviation.map(scaled),
        }
    }

    /// The numbers of all values, by channel.
    pub fn tables(&self) -> [[f32; 256]; NUM_CHANNELS] {
        std::array::from_fn(|channel| {
            std::array::from_fn(|value| self.number(channel, value as f32))
        })
    }

    fn number(&self, channel: usize, value: f32) -> f32 {
        match self {
            Self::Standard { mean, deviation } => (value - mean[channel]) / deviation[channel],
            Self::Rescaled { factor } => value * factor,
            Self::Bf16 {
                factor,
                mean,
                deviation,
            } => {
                let to_bf16 = |number: f32| bf16::from_f32(number).to_f32();
                let rescaled = to_bf16(value * factor);
                let centred = to_bf16(rescaled - to_bf16(mean[channel]));
                to_bf16(centred / to_bf16(deviation[channel]))
            }
        }
    }
}
