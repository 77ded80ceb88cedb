//! Stateless random numbers: a pure function of the request's seed and a counter.
//!
//! Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC
//! 2011), the generator of cuRAND and PyTorch. The key is the seed, the counter is how many tokens
//! the sequence has generated. So the numbers cannot depend on the batch, on chunking, or on whether
//! the sequence was paused and computed again: there is nothing to save and nothing to advance.

const ROUNDS: usize = 10;
const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const KEY_STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// The random number, uniform in `[0, 1)` in steps of 2^-53, that draws the token after
/// `num_generated` others.
pub(super) fn uniform(seed: u64, num_generated: u64) -> f64 {
    let counter = [num_generated as u32, (num_generated >> 32) as u32, 0, 0];
    let key = [seed as u32, (seed >> 32) as u32];
    let [low, high, ..] = philox4x32(counter, key);
    let bits = u64::from(high) << 32 | u64::from(low);
    (bits >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

fn philox4x32(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..ROUNDS {
        let a = u64::from(MULTIPLIERS[0]) * u64::from(counter[0]);
        let b = u64::from(MULTIPLIERS[1]) * u64::from(counter[2]);
        counter = [
            (b >> 32) as u32 ^ counter[1] ^ key[0],
            b as u32,
            (a >> 32) as u32 ^ counter[3] ^ key[1],
            a as u32,
        ];
        key = [
            key[0].wrapping_add(KEY_STEPS[0]),
            key[1].wrapping_add(KEY_STEPS[1]),
        ];
    }
    counter
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn philox_gives_the_known_answers_of_its_authors() {
        // From kat_vectors of the Random123 distribution.
        let known = [
            (
                [0; 4],
                [0; 2],
                [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8],
            ),
            (
                [u32::MAX; 4],
                [u32::MAX; 2],
                [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd],
            ),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, answer) in known {
            assert_eq!(philox4x32(counter, key), answer);
        }
    }

    #[test]
    fn every_bit_of_a_seed_and_of_a_counter_counts() {
        let values = [0, 1, 1 << 31, 1 << 32, 1 << 63];
        let pairs = values
            .iter()
            .flat_map(|&seed| values.map(|num| (seed, num)));
        let numbers: BTreeSet<u64> = pairs
            .map(|(seed, num_generated)| uniform(seed, num_generated).to_bits())
            .collect();
        assert_eq!(numbers.len(), 25);
    }

    #[test]
    fn numbers_are_uniform_over_counters_and_over_seeds() {
        // Chi-square, 99 degrees of freedom: above 150 once in a thousand for a fair generator.
        for by_seed in [false, true] {
            let mut cells = [0u32; 100];
            for i in 0..100_000 {
                let number = if by_seed {
                    uniform(i, 3)
                } else {
                    uniform(3, i)
                };
                cells[(number * 100.0) as usize] += 1;
            }
            let chi_square: f64 = cells
                .iter()
                .map(|&count| (f64::from(count) - 1000.0).powi(2) / 1000.0)
                .sum();
            assert!(chi_square < 150.0, "by_seed {by_seed}: {chi_square}");
        }
    }
}
