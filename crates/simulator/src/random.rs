//! Random numbers for workloads: the same for a seed on every machine and in every version.
//!
//! SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).

use std::f64::consts::PI;

/// A stream of random numbers.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The stream for a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Uniform over all values.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    /// Uniform over (0, 1].
    pub fn uniform(&mut self) -> f64 {
        ((self.next_u64() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// Uniform over the integers from `first` to `last`, inclusive.
    pub fn integer(&mut self, first: u32, last: u32) -> u32 {
        let range = u64::from(last - first) + 1;
        first + ((u128::from(self.next_u64()) * u128::from(range)) >> 64) as u32
    }

    /// Exponential: the waiting time between independent events at `rate`.
    pub fn exponential(&mut self, rate: f64) -> f64 {
        -self.uniform().ln() / rate
    }

    /// Standard normal (Box and Muller).
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * self.uniform().ln()).sqrt();
        radius * (2.0 * PI * self.uniform()).cos()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matches_the_reference_implementation() {
        // Output of the reference implementation for the seed 1234567.
        let mut random = Random::new(1_234_567);
        let numbers: [u64; 3] = std::array::from_fn(|_| random.next_u64());
        assert_eq!(
            numbers,
            [
                6_457_827_717_110_365_317,
                3_203_168_211_198_807_973,
                9_817_491_932_198_370_423
            ]
        );
    }

    #[test]
    fn distributions_have_their_means_and_spreads() {
        let mut random = Random::new(7);
        let n = 200_000;
        let mut draw = |what: fn(&mut Random) -> f64| {
            let values: Vec<_> = (0..n).map(|_| what(&mut random)).collect();
            let mean = values.iter().sum::<f64>() / f64::from(n);
            let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / f64::from(n);
            (mean, variance)
        };
        let near = |(mean, variance): (f64, f64), expected: (f64, f64)| {
            assert!(
                (mean - expected.0).abs() < 0.02,
                "{mean} is not {}",
                expected.0
            );
            assert!(
                (variance - expected.1).abs() < 0.05,
                "{variance} is not {}",
                expected.1
            );
        };
        near(draw(Random::normal), (0.0, 1.0));
        near(draw(|random| random.exponential(2.0)), (0.5, 0.25));
        near(draw(|random| f64::from(random.integer(3, 7))), (5.0, 2.0));
    }
}
