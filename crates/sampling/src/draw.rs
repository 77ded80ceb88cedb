//! The softmax, and drawing a token from it.

use crate::candidate::{Candidate, Cut};
use crate::exp::exp_nonpositive;
use crate::peaks::{BLOCK, Peaks};
use inflight_base::TokenId;

/// Unnormalised probabilities, called weights: the most likely token weighs 1.
#[derive(Clone, Copy)]
pub(super) struct Softmax {
    /// The largest logit.
    pub max: f32,
    /// Above zero.
    pub temperature: f32,
}

impl Softmax {
    /// The weight of a token, at most 1. A division, so that no temperature above zero, however
    /// small, makes a NaN.
    #[inline(always)]
    pub(super) fn weight(self, logit: f32) -> f32 {
        exp_nonpositive((logit - self.max) / self.temperature)
    }

    /// The weights of at most `BLOCK` tokens, then zeros: a loop that the compiler vectorises.
    #[inline(always)]
    fn weights(self, logits: impl Iterator<Item = f32>) -> [f32; BLOCK] {
        let mut weights = [0.0; BLOCK];
        for (weight, logit) in weights.iter_mut().zip(logits) {
            *weight = self.weight(logit);
        }
        weights
    }

    /// The total weight of some tokens.
    pub(super) fn total_weight(self, candidates: &[Candidate]) -> f64 {
        candidates
            .chunks(BLOCK)
            .map(|block| sum(self.weights(block.iter().map(|candidate| candidate.logit()))))
            .sum()
    }

    /// The logit that weighs `weight`.
    pub(super) fn logit_of(self, weight: f64) -> f32 {
        self.logit_at(weight.ln())
    }

    /// The logit whose weight is `e^exponent`.
    pub(super) fn logit_at(self, exponent: f64) -> f32 {
        (f64::from(self.max) + f64::from(self.temperature) * exponent) as f32
    }

    /// The natural logarithm of a token's weight; at most 0.
    #[inline(always)]
    pub(super) fn exponent(self, logit: f32) -> f64 {
        (f64::from(logit) - f64::from(self.max)) / f64::from(self.temperature)
    }

    /// The total weight of all tokens, or of those down to `least`, and the mean of their exponents.
    pub(super) fn moments(
        self,
        logits: &[f32],
        peaks: &Peaks,
        least: Option<Candidate>,
    ) -> (f64, f64) {
        let (mut total, mut moment) = (0.0, 0.0);
        for (index, (block, &peak)) in logits.chunks(BLOCK).zip(peaks.blocks()).enumerate() {
            if least.is_some_and(|least| peak < least.logit()) {
                continue;
            }
            let ids = (index * BLOCK) as TokenId..;
            let weights = self.weights(block.iter().copied());
            for ((&logit, weight), id) in block.iter().zip(weights).zip(ids) {
                // Zero times an infinite exponent would be NaN.
                if weight > 0.0 && least.is_none_or(|least| least.keeps(logit, id)) {
                    total += f64::from(weight);
                    moment += f64::from(weight) * self.exponent(logit);
                }
            }
        }
        (total, moment / total)
    }
}

/// The weight of each block of tokens, so that a draw finds its block first and its token there.
pub(super) struct Masses {
    /// `[ceil(vocab_size / BLOCK)]`
    blocks: Vec<f64>,
}

impl Masses {
    pub(super) fn new(vocab_size: usize) -> Self {
        Self {
            blocks: vec![0.0; vocab_size.div_ceil(BLOCK)],
        }
    }

    /// The weight of all tokens.
    pub(super) fn of_all(&mut self, logits: &[f32], softmax: Softmax) -> f64 {
        for (block, mass) in logits.chunks(BLOCK).zip(&mut self.blocks) {
            *mass = sum(softmax.weights(block.iter().copied()));
        }
        self.blocks.iter().sum()
    }

    /// The weight of the tokens that `cut` keeps.
    fn of_kept(&mut self, logits: &[f32], peaks: &Peaks, softmax: Softmax, cut: Cut) -> f64 {
        let blocks = logits.chunks(BLOCK).zip(peaks.blocks());
        for (index, ((block, &peak), mass)) in blocks.zip(&mut self.blocks).enumerate() {
            *mass = if peak < cut.least.logit() {
                0.0
            } else {
                let mut weights = softmax.weights(block.iter().copied());
                let ids = (index * BLOCK) as TokenId..;
                for ((weight, &logit), id) in weights.iter_mut().zip(block).zip(ids) {
                    *weight = if cut.keeps(logit, id) { *weight } else { 0.0 };
                }
                sum(weights)
            };
        }
        self.blocks.iter().sum()
    }

    /// The token at `position`, in `[0, 1)`, if the tokens that `cut` keeps are laid end to end in order of id, each as
    /// long as its probability.
    pub(super) fn draw(
        &mut self,
        logits: &[f32],
        peaks: &Peaks,
        softmax: Softmax,
        cut: Option<Cut>,
        position: f64,
    ) -> TokenId {
        let total = match cut {
            None => self.of_all(logits, softmax),
            Some(cut) => self.of_kept(logits, peaks, softmax, cut),
        };
        let mut ahead = position * total;
        let mut chosen = 0;
        for (index, &mass) in self.blocks.iter().enumerate() {
            if mass > 0.0 {
                chosen = index;
                if ahead < mass {
                    break;
                }
                ahead -= mass;
            }
        }
        // Sums of the same numbers in another order differ in their last bits, so the walk may reach the end of the
        // block with a remainder: then it is the block's last token.
        let start = chosen * BLOCK;
        let end = logits.len().min(start + BLOCK);
        let mut token = start as TokenId;
        for (id, &logit) in (start as TokenId..).zip(&logits[start..end]) {
            let weight = f64::from(softmax.weight(logit));
            if weight > 0.0 && cut.is_none_or(|cut| cut.keeps(logit, id)) {
                token = id;
                if ahead < weight {
                    break;
                }
                ahead -= weight;
            }
        }
        token
    }
}

/// The sum of a block's weights, always in this order: eight lanes, then the lanes.
fn sum(weights: [f32; BLOCK]) -> f64 {
    let mut lanes = [0.0f32; 8];
    for row in weights.as_chunks::<8>().0 {
        for (lane, weight) in lanes.iter_mut().zip(row) {
            *lane += weight;
        }
    }
    lanes.into_iter().map(f64::from).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Softmax = Softmax {
        max: 0.0,
        temperature: 1.0,
    };

    fn peaks_of(logits: &[f32]) -> Peaks {
        let mut peaks = Peaks::new(logits.len());
        peaks.find(logits).expect("numbers");
        peaks
    }

    fn draw(logits: &[f32], cut: Option<Cut>, position: f64) -> TokenId {
        Masses::new(logits.len()).draw(logits, &peaks_of(logits), PLAIN, cut, position)
    }

    #[test]
    fn equal_tokens_share_the_range_equally() {
        let logits = [0.0; 2 * BLOCK];
        for token in 0..logits.len() {
            let position = token as f64 / logits.len() as f64;
            assert_eq!(draw(&logits, None, position), token as TokenId);
        }
    }

    #[test]
    fn a_remainder_of_rounding_goes_to_the_last_possible_token() {
        // A weight of 64, and eight of 0.6 times its last bit, of which each is rounded up when the total is summed.
        let mut logits = vec![f32::NEG_INFINITY; 16 * BLOCK];
        logits[..BLOCK].fill(0.0);
        for block in 1..=8 {
            logits[block * BLOCK] = -32.4;
        }
        let largest = 1.0 - f64::EPSILON / 2.0;
        assert_eq!(draw(&logits, None, largest), (8 * BLOCK) as TokenId);
    }

    #[test]
    fn the_last_token_that_is_kept_may_be_the_most_likely_of_its_block() {
        let mut logits = [-5.0; 2 * BLOCK];
        (logits[0], logits[BLOCK]) = (0.0, -1.0);
        let least = Candidate::new(-1.0, BLOCK as TokenId);
        let cut = Cut { least, most: 0.0 };
        assert_eq!(draw(&logits, Some(cut), 0.99), BLOCK as TokenId);
        let (total, mean) = PLAIN.moments(&logits, &peaks_of(&logits), Some(least));
        let weight = (-1.0_f64).exp();
        assert!((total - (1.0 + weight)).abs() < 1e-6, "{total}");
        assert!((mean + weight / total).abs() < 1e-6, "{mean}");
    }

    #[test]
    fn of_equal_tokens_those_with_higher_ids_than_the_last_are_left_out() {
        let logits = [0.0; 3 * BLOCK];
        let last = BLOCK + 1;
        let least = Candidate::new(0.0, last as TokenId);
        let cut = Cut { least, most: 0.0 };
        assert_eq!(draw(&logits, Some(cut), 0.999), last as TokenId);
        let (total, _) = PLAIN.moments(&logits, &peaks_of(&logits), Some(least));
        assert_eq!(total, (last + 1) as f64);
    }
}
