//! Values of 8 bits as the numbers that a vision tower reads.

use crate::pixels::NUM_CHANNELS;

/// How a value of 8 bits becomes a number.
#[derive(Clone, Debug, PartialEq)]
pub enum Normalisation {
    /// Its difference to the mean, divided by the deviation, both of values from 0 to 255 and of each channel.
    Standard {
        mean: [f32; NUM_CHANNELS],
        deviation: [f32; NUM_CHANNELS],
    },
    /// Its product with a factor.
    Rescaled { factor: f32 },
}

impl Normalisation {
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
        }
    }
}
