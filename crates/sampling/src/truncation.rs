//! Top-k, top-p, min-p and typical-p: which tokens may be drawn.
//!
//! Each of the first three keeps the most likely tokens down to some last one, so all three together are one token: the
//! least likely that is kept. Finding it needs no sort: top-k uses a running threshold, top-p bisection, min-p a
//! comparison. Typical-p, by bisection too, may also remove tokens that are too likely.

use std::cmp::Ordering;

use crate::candidate::{Candidate, Cut};
use crate::draw::{Masses, Softmax};
use crate::params::SamplingParams;
use crate::peaks::{BLOCK, Peaks};
use inflight_base::TokenId;

/// Finds cuts, and owns the memory for it.
pub(super) struct Truncation {
    /// Tokens that may be above the cut. At most `vocab_size`.
    candidates: Vec<Candidate>,
}

impl Truncation {
    pub(super) fn new(vocab_size: usize) -> Self {
        Self {
            candidates: Vec::with_capacity(vocab_size),
        }
    }

    /// The tokens that `params` keeps, with `top_p` instead of its own; `None` keeps all. There is always at least one.
    ///
    /// As in transformers, each filter sees what the one before it left: top-p is a share of the probability of the top
    /// k. Min-p compares with the most likely token, which only typical-p, the last, may remove.
    pub(super) fn cut(
        &mut self,
        logits: &[f32],
        peaks: &Peaks,
        softmax: Softmax,
        params: &SamplingParams,
        top_p: f32,
        masses: &mut Masses,
    ) -> Option<Cut> {
        let mut cut = None;
        let top_k = params.top_k as usize;
        if (1..logits.len()).contains(&top_k) {
            self.keep_top_k(logits, peaks, top_k);
            cut = self.candidates.iter().min().copied();
        }
        if top_p < 1.0 {
            let total = if cut.is_some() {
                softmax.total_weight(&self.candidates)
            } else {
                let total = masses.of_all(logits, softmax);
                let floor = softmax.logit_of(negligible(top_p, total, logits.len()));
                self.keep_from(logits, peaks, floor);
                total
            };
            let target = f64::from(top_p) * total;
            let by_likelihood = |a: &Candidate, b: &Candidate| b.cmp(a);
            cut = cut.max(first_of_mass(
                &mut self.candidates,
                softmax,
                target,
                by_likelihood,
            ));
        }
        if params.min_p > 0.0 {
            let floor = softmax.logit_of(f64::from(params.min_p)).min(peaks.max());
            cut = cut.max(Some(Candidate::new(floor, TokenId::MAX)));
        }
        if params.typical_p < 1.0 {
            return self.typical(logits, peaks, softmax, params.typical_p, cut);
        }
        cut.map(|least| Cut {
            least,
            most: peaks.max(),
        })
    }

    /// The tokens whose information is nearest to the entropy of what `least` keeps, until they have the share
    /// `typical_p` of its probability, and all that are as near as the last of them (Meister et al., "Locally typical
    /// sampling", TACL 2023).
    ///
    /// A token's information minus the entropy is the mean exponent minus its own:
    ///
    /// ```text
    /// -ln p - H = (ln Z - x) - (ln Z - E[x]) = E[x] - x       x = (logit - max) / temperature
    /// ```
    fn typical(
        &mut self,
        logits: &[f32],
        peaks: &Peaks,
        softmax: Softmax,
        typical_p: f32,
        least: Option<Candidate>,
    ) -> Option<Cut> {
        let (total, mean) = softmax.moments(logits, peaks, least);
        let floor = typical_floor(typical_p, total, mean, logits.len());
        let floor = softmax.logit_at(floor);
        self.keep_from(
            logits,
            peaks,
            least.map_or(floor, |least| floor.max(least.logit())),
        );
        if let Some(least) = least {
            self.candidates.retain(|candidate| *candidate >= least);
        }
        let distance = |candidate: &Candidate| (mean - softmax.exponent(candidate.logit())).abs();
        let last = first_of_mass(
            &mut self.candidates,
            softmax,
            f64::from(typical_p) * total,
            |a, b| distance(a).total_cmp(&distance(b)),
        );
        let farthest = distance(&last?);
        let typical = self.candidates.iter();
        let typical = typical.filter(|candidate| distance(candidate) <= farthest);
        let (mut from, mut to) = (f32::INFINITY, f32::NEG_INFINITY);
        for candidate in typical {
            from = from.min(candidate.logit());
            to = to.max(candidate.logit());
        }
        let lowest = Candidate::new(from, TokenId::MAX);
        Some(Cut {
            least: least.map_or(lowest, |least| least.max(lowest)),
            most: to,
        })
    }

    /// Leaves the `k` most likely tokens as candidates.
    ///
    /// A token below the k-th best so far is never considered again, so random logits give about `k log(n / k)`
    /// candidates, and most blocks are skipped by their peak alone.
    fn keep_top_k(&mut self, logits: &[f32], peaks: &Peaks, k: usize) {
        let room = k.saturating_mul(2).max(BLOCK).min(logits.len());
        let mut threshold = f32::NEG_INFINITY;
        self.candidates.clear();
        for (index, (block, &peak)) in logits.chunks(BLOCK).zip(peaks.blocks()).enumerate() {
            if peak <= threshold {
                continue;
            }
            for (offset, &logit) in block.iter().enumerate() {
                // Not `>=`: an equal token that came before has the lower id.
                if logit > threshold {
                    let id = (index * BLOCK + offset) as TokenId;
                    self.candidates.push(Candidate::new(logit, id));
                    if self.candidates.len() == room {
                        threshold = self.shrink(k);
                    }
                }
            }
        }
        if self.candidates.len() > k {
            self.shrink(k);
        }
    }

    /// Keeps the `k` best candidates. Returns the logit of the last.
    fn shrink(&mut self, k: usize) -> f32 {
        let (_, kth, _) = self
            .candidates
            .select_nth_unstable_by(k - 1, |a, b| b.cmp(a));
        let logit = kth.logit();
        self.candidates.truncate(k);
        logit
    }

    /// Leaves as candidates the tokens whose logit is at least `floor`.
    fn keep_from(&mut self, logits: &[f32], peaks: &Peaks, floor: f32) {
        self.candidates.clear();
        for (index, (block, &peak)) in logits.chunks(BLOCK).zip(peaks.blocks()).enumerate() {
            if peak < floor {
                continue;
            }
            for (offset, &logit) in block.iter().enumerate() {
                if logit >= floor {
                    let id = (index * BLOCK + offset) as TokenId;
                    self.candidates.push(Candidate::new(logit, id));
                }
            }
        }
    }
}

/// The exponent of the least likely token that can be typical. The tokens that are as near to the entropy as the most
/// likely one, whose exponent is zero, or as the least likely one that matters, have the `share` together. A little
/// more allows for rounding.
fn typical_floor(share: f32, total: f64, mean: f64, num_tokens: usize) -> f64 {
    let floor = negligible(share, total, num_tokens).ln();
    floor.min(2.0 * mean) - 0.01
}

/// A weight so small that, of `num_tokens` tokens with a weight of `total`, all those below it together weigh less than
/// what `share` leaves out; a little smaller still, to allow for rounding in `total`.
fn negligible(share: f32, total: f64, num_tokens: usize) -> f64 {
    let mean = total / num_tokens as f64;
    0.99 * (1.0 - f64::from(share)) * mean
}

/// The last of the first candidates in `order` whose weights sum to at least `target`. Reorders the
/// candidates. By likelihood it is the last of the nucleus (Holtzman et al., "The curious case of
/// neural text degeneration", ICLR 2020).
///
/// ```text
/// |-- in the nucleus --|-- earlier half --|-- other half --|-- not in it --|
///                      lo                 mid              hi
/// ```
/// Each iteration decides one half, so it costs a few passes over the candidates, not a sort.
fn first_of_mass(
    candidates: &mut [Candidate],
    softmax: Softmax,
    target: f64,
    order: impl Fn(&Candidate, &Candidate) -> Ordering,
) -> Option<Candidate> {
    let mut undecided = candidates;
    let mut missing = target;
    while undecided.len() > 1 {
        let mid = undecided.len() / 2;
        undecided.select_nth_unstable_by(mid, &order);
        let (earlier, others) = undecided.split_at_mut(mid);
        let weight = softmax.total_weight(earlier);
        if weight >= missing {
            undecided = earlier;
        } else {
            missing -= weight;
            undecided = others;
        }
    }
    undecided.first().copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The ids of the tokens that are kept.
    fn kept(logits: &[f32], options: impl FnOnce(&mut SamplingParams)) -> Vec<TokenId> {
        let mut params = SamplingParams {
            temperature: 1.0,
            ..SamplingParams::default()
        };
        options(&mut params);
        let mut peaks = Peaks::new(logits.len());
        peaks.find(logits).expect("numbers");
        let softmax = Softmax {
            max: peaks.max(),
            temperature: params.temperature,
        };
        let mut masses = Masses::new(logits.len());
        let cut = Truncation::new(logits.len()).cut(
            logits,
            &peaks,
            softmax,
            &params,
            params.top_p,
            &mut masses,
        );
        let keeps = |&(id, &logit): &(TokenId, &f32)| cut.is_none_or(|cut| cut.keeps(logit, id));
        let tokens = (0..).zip(logits).filter(keeps);
        tokens.map(|(id, _)| id).collect()
    }

    #[test]
    fn shares_of_one_keep_tokens_that_are_lost_in_rounding() {
        assert_eq!(kept(&[0.0, -40.0], |_| ()), [0, 1]);
        assert_eq!(kept(&[0.0, -40.0], |params| params.top_p = 0.999), [0]);
    }

    #[test]
    fn equal_tokens_are_kept_in_order_of_id_wherever_they_stand() {
        let mut logits = [-9.0; 300];
        logits[130..230].fill(0.0);
        assert_eq!(kept(&logits, |params| params.top_k = 3), [130, 131, 132]);
        let seventy: Vec<_> = (130..200).collect();
        assert_eq!(kept(&logits, |params| params.top_k = 70), seventy);
        assert_eq!(
            kept(&logits, |params| params.top_p = 0.025),
            [130, 131, 132]
        );
    }

    #[test]
    fn tokens_almost_as_far_from_the_entropy_as_the_most_likely_one_are_found() {
        // The others have 0.5003 of the probability together, so that the entropy is a little nearer to them.
        let others: Vec<_> = (1..101).collect();
        for temperature in [0.5, 1.0] {
            let mut logits = [(0.001 - 100_f32.ln()) * temperature; 101];
            logits[0] = 0.0;
            let typical = kept(&logits, |params| {
                (params.temperature, params.typical_p) = (temperature, 0.3);
            });
            assert_eq!(typical, others, "temperature {temperature}");
        }
    }

    #[test]
    fn the_last_of_the_top_k_is_found_if_it_is_the_most_likely_of_its_block() {
        let mut logits = [-5.0; 2 * BLOCK];
        (logits[0], logits[BLOCK]) = (0.0, -1.0);
        let both = kept(&logits, |params| {
            (params.top_k, params.typical_p) = (2, 0.999);
        });
        assert_eq!(both, [0, BLOCK as TokenId]);
    }
}
