//! Random weights.

use std::io::Write;

use crate::Result;

/// A stream of random weights.
pub struct Weights {
    random: Random,
    /// The weights that are written next, from `position` on.
    block: Vec<u8>,
    position: usize,
    repeats: bool,
}

impl Weights {
    /// No multiple of a row's bytes in any shape, so that rows differ.
    const BLOCK_BYTES: usize = (16 << 20) + 2 * 641;

    pub fn new(repeats: bool) -> Self {
        Self {
            random: Random(0x5eed),
            block: vec![0; Self::BLOCK_BYTES],
            position: Self::BLOCK_BYTES,
            repeats,
        }
    }

    pub fn write(&mut self, mut num_bytes: usize, out: &mut impl Write) -> Result<()> {
        while num_bytes > 0 {
            if self.position == self.block.len() {
                self.refill();
            }
            let rest = &self.block[self.position..];
            let part = &rest[..rest.len().min(num_bytes)];
            out.write_all(part)?;
            self.position += part.len();
            num_bytes -= part.len();
        }
        Ok(())
    }

    fn refill(&mut self) {
        self.position = 0;
        let is_filled = self.random.0 != 0x5eed;
        if is_filled && self.repeats {
            return;
        }
        for weight in self.block.as_chunks_mut::<2>().0 {
            *weight = bf16_bits(self.random.normal() * 0.02).to_le_bytes();
        }
    }
}

/// Rounds a finite value to bf16, ties to even.
pub fn bf16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

/// splitmix64 (Steele, Lea, Flood, 2014): small, fast, the same everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// Approximately normal with mean 0 and standard deviation 1: the sum of four uniform numbers.
    fn normal(&mut self) -> f32 {
        const MEAN: f32 = 2.0 * 65_535.0;
        // The standard deviation of one of them is 65536 / sqrt(12).
        const DEVIATION: f32 = 2.0 * 65_536.0 / 3.464_101_6;
        let bits = self.next();
        let sum: u64 = (0..4).map(|i| (bits >> (16 * i)) & 0xffff).sum();
        (sum as f32 - MEAN) / DEVIATION
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_weights_begin_as_others_do_and_go_on() {
        let written = |repeats, num_bytes| {
            let mut out = Vec::new();
            let mut weights = Weights::new(repeats);
            weights.write(6, &mut out).expect("memory");
            weights.write(num_bytes - 6, &mut out).expect("memory");
            out
        };
        let (block, more) = (Weights::BLOCK_BYTES, 1000);
        let [repeated, other] = [true, false].map(|repeats| written(repeats, block + more));
        assert_eq!(repeated[..block], other[..block]);
        assert_eq!(repeated[block..], repeated[..more]);
        assert_ne!(other[block..], other[..more]);
    }

    #[test]
    fn random_weights_have_mean_zero_and_deviation_one() {
        let mut random = Random(1);
        let values: Vec<f64> = (0..100_000).map(|_| f64::from(random.normal())).collect();
        let mean = values.iter().sum::<f64>() / 1e5;
        let variance = values.iter().map(|x| x * x).sum::<f64>() / 1e5;
        assert!(
            mean.abs() < 0.02 && (variance - 1.0).abs() < 0.02,
            "{mean} {variance}"
        );
    }
}
