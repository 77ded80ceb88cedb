//! Log-probabilities of the chosen token and of the most likely ones.

use crate::candidate::Candidate;
use crate::draw::{Masses, Softmax};
use crate::peaks::{BLOCK, Peaks};
use crate::{TokenLogProb, TokenLogProbs};
use inflight_base::TokenId;

/// Computes log-probabilities from the model's own logits: the logarithm of their softmax over the whole vocabulary,
/// before the request's processors, temperature and truncation (vLLM's default, `raw_logprobs`). So they are comparable
/// between requests.
///
/// The sum is in one fixed order, in `f64` from block to block: the same bits everywhere.
pub struct LogProbs {
    /// The row before the sampler changed it. Its memory is allocated when the first row is kept.
    row: Vec<f32>,
    peaks: Peaks,
    masses: Masses,
    /// The most likely tokens so far, the likeliest first.
    best: Vec<Candidate>,
}

impl LogProbs {
    /// Room for rows of `vocab_size` logits.
    pub fn new(vocab_size: usize) -> Self {
        Self {
            row: Vec::new(),
            peaks: Peaks::new(vocab_size),
            masses: Masses::new(vocab_size),
            best: Vec::new(),
        }
    }

    /// Keeps a copy of a row, because the sampler changes it.
    pub fn keep(&mut self, logits: &[f32]) {
        self.row.clear();
        self.row.extend_from_slice(logits);
    }

    /// Takes the kept row.
    pub fn take(&mut self) -> Vec<f32> {
        std::mem::take(&mut self.row)
    }

    /// The log-probabilities of `token` and of the `num_top` most likely tokens in the kept row.
    ///
    /// # Panics
    /// If no row was kept, or `token` is not in it.
    pub fn of(&mut self, token: TokenId, num_top: u32) -> TokenLogProbs {
        let scale = self.scale(num_top);
        self.scaled(token, scale)
    }

    /// The same for each of several tokens.
    ///
    /// # Panics
    /// As [`LogProbs::of`].
    pub fn of_each(
        &mut self,
        tokens: impl IntoIterator<Item = TokenId>,
        num_top: u32,
    ) -> Vec<TokenLogProbs> {
        let scale = self.scale(num_top);
        let tokens = tokens.into_iter();
        tokens.map(|token| self.scaled(token, scale)).collect()
    }

    /// Computes the terms that all tokens share, and finds the `num_top` most likely tokens.
    fn scale(&mut self, num_top: u32) -> Scale {
        let row = &self.row;
        // A request's own processor may have made numbers of what were none: then nothing is known.
        let is_sound = self.peaks.find(row).is_ok();
        let max = self.peaks.max();
        let total = self.masses.of_all(
            row,
            Softmax {
                max,
                temperature: 1.0,
            },
        );
        let num_top = if is_sound { num_top as usize } else { 0 };
        find_best(row, &self.peaks, num_top, &mut self.best);
        Scale {
            is_sound,
            max,
            log_total: total.ln(),
        }
    }

    fn scaled(&self, token: TokenId, scale: Scale) -> TokenLogProbs {
        let row = &self.row;
        let logit = row[token as usize];
        let chosen = TokenLogProb {
            token,
            log_prob: scale.log_prob(logit),
            rank: rank(row, Candidate::new(logit, token)),
        };
        let ranked = (1..).zip(&self.best);
        let top = ranked.map(|(rank, candidate)| TokenLogProb {
            token: candidate.id(),
            log_prob: scale.log_prob(row[candidate.id() as usize]),
            rank,
        });
        TokenLogProbs {
            chosen,
            top: top.collect(),
        }
    }
}

/// Computes log-probabilities from a row's logits.
#[derive(Clone, Copy)]
struct Scale {
    is_sound: bool,
    max: f32,
    log_total: f64,
}

impl Scale {
    fn log_prob(self, logit: f32) -> f32 {
        match self.is_sound {
            true => (f64::from(logit) - f64::from(self.max) - self.log_total) as f32,
            false => f32::NAN,
        }
    }
}

/// The rank of a token, from 1.
fn rank(row: &[f32], candidate: Candidate) -> u32 {
    let keeps = |(id, &logit): (TokenId, &f32)| u32::from(candidate.keeps(logit, id));
    (0..).zip(row).map(keeps).sum()
}

/// Finds the `num` most likely tokens that are possible at all. They are few, so an ordered list and the peaks of
/// blocks are faster than a selection.
pub(super) fn find_best(row: &[f32], peaks: &Peaks, num: usize, best: &mut Vec<Candidate>) {
    best.clear();
    if num == 0 {
        return;
    }
    let mut threshold = f32::NEG_INFINITY;
    for (index, (block, &peak)) in row.chunks(BLOCK).zip(peaks.blocks()).enumerate() {
        if peak <= threshold {
            continue;
        }
        for (id, &logit) in ((index * BLOCK) as TokenId..).zip(block) {
            // Not `>=`: an equal token that came before has the lower id.
            if logit > threshold {
                let candidate = Candidate::new(logit, id);
                let place = best.partition_point(|&other| other >= candidate);
                best.truncate(num - 1);
                best.insert(place, candidate);
                if best.len() == num {
                    threshold = best[num - 1].logit();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of(row: &[f32], token: TokenId, num_top: u32) -> TokenLogProbs {
        let mut log_probs = LogProbs::new(row.len());
        log_probs.keep(row);
        log_probs.of(token, num_top)
    }

    /// The definition, in f64 with a sort.
    fn expected(row: &[f32]) -> Vec<(TokenId, f64)> {
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weights = row.iter().map(|&logit| f64::from(logit - max).exp());
        let total: f64 = weights.sum();
        let log_prob = |&logit: &f32| f64::from(logit) - f64::from(max) - total.ln();
        let mut all: Vec<_> = (0..).zip(row.iter().map(log_prob)).collect();
        all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        all
    }

    fn agrees(row: &[f32], token: TokenId, num_top: u32) -> Result<(), TestCaseError> {
        let (ours, all) = (of(row, token, num_top), expected(row));
        let place = all.iter().position(|&(id, _)| id == token).expect("there");
        prop_assert_eq!(ours.chosen.rank as usize, place + 1);
        let possible = all.iter().filter(|(_, it)| it.is_finite()).count();
        prop_assert_eq!(ours.top.len(), possible.min(num_top as usize));
        for (rank, (ours, expected)) in (1..).zip(ours.top.iter().zip(&all)) {
            prop_assert_eq!((ours.token, ours.rank), (expected.0, rank));
        }
        let chosen = std::iter::once((&ours.chosen, &all[place]));
        for (ours, (_, expected)) in chosen.chain(ours.top.iter().zip(&all)) {
            let ours = f64::from(ours.log_prob);
            let is_near = (ours - expected).abs() <= 1e-6 * (1.0 + expected.abs());
            prop_assert!(is_near || ours == *expected, "{} {}", ours, expected);
        }
        Ok(())
    }

    #[test]
    fn a_row_that_is_kept_can_be_taken_back() {
        let mut log_probs = LogProbs::new(2);
        log_probs.keep(&[3.0, 4.0]);
        log_probs.keep(&[1.0, -2.0]);
        assert_eq!(log_probs.take(), [1.0, -2.0]);
        assert!(log_probs.take().is_empty());
    }

    #[test]
    fn several_tokens_of_a_row_have_what_each_has_alone() {
        let row = [0.5, -2.0, 3.0, 3.0, f32::NEG_INFINITY];
        let mut log_probs = LogProbs::new(row.len());
        log_probs.keep(&row);
        let each = log_probs.of_each(0..5, 3);
        let alone: Vec<_> = (0..5).map(|token| of(&row, token, 3)).collect();
        assert_eq!(each, alone);
    }

    proptest! {
        #[test]
        fn they_are_those_of_the_definition(
            row in proptest::collection::vec(-30.0f32..30.0, 1..500),
            token in any::<proptest::sample::Index>(),
            num_top in 0u32..21,
        ) {
            agrees(&row, token.index(row.len()) as TokenId, num_top)?;
        }

        #[test]
        fn equal_and_impossible_tokens_have_their_ranks_too(
            row in proptest::collection::vec(0usize..4, 2..300),
            token in any::<proptest::sample::Index>(),
            num_top in 0u32..21,
        ) {
            let logits = [f32::NEG_INFINITY, -0.0, 0.0, 1.5];
            let mut row: Vec<_> = row.into_iter().map(|it| logits[it]).collect();
            row[0] = 1.0;
            agrees(&row, token.index(row.len()) as TokenId, num_top)?;
        }
    }

    #[test]
    fn a_row_of_one_possible_token_is_certain() {
        let row = [f32::NEG_INFINITY, 3.0, f32::NEG_INFINITY];
        let certain = TokenLogProb {
            token: 1,
            log_prob: 0.0,
            rank: 1,
        };
        let ours = of(&row, 1, 5);
        assert_eq!((ours.chosen, ours.top), (certain, vec![certain]));
        assert_eq!(of(&row, 2, 0).chosen.log_prob, f32::NEG_INFINITY);
    }

    #[test]
    fn nothing_is_said_of_logits_that_are_no_numbers() {
        for bad in [f32::NAN, f32::INFINITY] {
            let ours = of(&[1.0, bad, 2.0], 0, 3);
            assert!(ours.chosen.log_prob.is_nan());
            assert_eq!(ours.top, []);
        }
    }
}
