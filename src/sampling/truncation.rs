//! Top-k, top-p and min-p: which tokens may be drawn.
//!
//! Each keeps the most likely tokens down to some last one, so all three together are one *cut*: the
//! least likely token that is kept. Finding it needs no sort: a running threshold for top-k, halving
//! for top-p, a comparison for min-p.

use crate::base::TokenId;
use crate::sampling::SamplingParams;
use crate::sampling::draw::{Masses, Softmax};
use crate::sampling::peaks::{BLOCK, Peaks};

/// A token and its logit as one number whose order is likelihood: the larger logit first, the lower
/// id on a tie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Candidate(u64);

impl Candidate {
    pub(super) fn new(logit: f32, id: TokenId) -> Self {
        // Adding zero makes -0.0 equal to 0.0. Flipping all bits of negative numbers and the sign
        // of the others makes their order that of integers.
        let bits = (logit + 0.0).to_bits();
        let flip = if bits >> 31 == 1 { u32::MAX } else { 1 << 31 };
        Self(u64::from(bits ^ flip) << 32 | u64::from(!id))
    }

    pub(super) fn logit(self) -> f32 {
        let order = (self.0 >> 32) as u32;
        let flip = if order >> 31 == 1 { 1 << 31 } else { u32::MAX };
        f32::from_bits(order ^ flip)
    }

    pub(super) fn id(self) -> TokenId {
        !(self.0 as u32)
    }

    /// Whether a token is at least as likely as this one.
    #[inline(always)]
    pub(super) fn keeps(self, logit: f32, id: TokenId) -> bool {
        logit > self.logit() || (logit == self.logit() && id <= self.id())
    }
}

/// Finds cuts; owns the room for it.
pub(super) struct Truncation {
    /// What may be above the cut. At most `vocab_size`.
    candidates: Vec<Candidate>,
}

impl Truncation {
    pub(super) fn new(vocab_size: usize) -> Self {
        Self {
            candidates: Vec::with_capacity(vocab_size),
        }
    }

    /// The least likely token that `params` keeps; `None` keeps all. It keeps the most likely token
    /// whatever `params` says.
    ///
    /// As in transformers, each filter sees what the one before it left: top-p is a share of the
    /// probability of the top k. Min-p compares with the most likely token, which none removes.
    pub(super) fn cut(
        &mut self,
        logits: &[f32],
        peaks: &Peaks,
        softmax: Softmax,
        params: &SamplingParams,
        masses: &mut Masses,
    ) -> Option<Candidate> {
        let mut cut = None;
        let top_k = params.top_k as usize;
        if (1..logits.len()).contains(&top_k) {
            self.keep_top_k(logits, peaks, top_k);
            cut = self.candidates.iter().min().copied();
        }
        if params.top_p < 1.0 {
            let total = if cut.is_some() {
                softmax.total_weight(&self.candidates)
            } else {
                let total = masses.of_all(logits, softmax);
                self.keep_possible_nucleus(logits, peaks, softmax, params.top_p, total);
                total
            };
            let target = f64::from(params.top_p) * total;
            cut = cut.max(self.nucleus(softmax, target));
        }
        if params.min_p > 0.0 {
            let floor = softmax.logit_of(f64::from(params.min_p)).min(peaks.max());
            cut = cut.max(Some(Candidate::new(floor, TokenId::MAX)));
        }
        cut
    }

    /// Leaves the `k` most likely tokens as candidates.
    ///
    /// A token below the k-th best so far is out for good, so a sequence of random logits enters
    /// about `k log(n / k)` candidates and most blocks are passed over by their peak alone.
    fn keep_top_k(&mut self, logits: &[f32], peaks: &Peaks, k: usize) {
        let room = (2 * k).max(BLOCK).min(logits.len());
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

    /// Keeps the `k` best candidates; gives the logit of the last of them.
    fn shrink(&mut self, k: usize) -> f32 {
        let (_, kth, _) = self
            .candidates
            .select_nth_unstable_by(k - 1, |a, b| b.cmp(a));
        let logit = kth.logit();
        self.candidates.truncate(k);
        logit
    }

    /// Leaves as candidates a superset of the nucleus: what is above `(1 - top_p) / n` of the mass,
    /// since all that is below sums to less than `1 - top_p`.
    fn keep_possible_nucleus(
        &mut self,
        logits: &[f32],
        peaks: &Peaks,
        softmax: Softmax,
        top_p: f32,
        total: f64,
    ) {
        let share = (1.0 - f64::from(top_p)) * total / logits.len() as f64;
        // A little lower than exact, for what rounding may have done to `total`.
        let floor = softmax.logit_of(0.99 * share);
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

    /// The last of the most likely candidates whose weights sum to at least `target` (Holtzman et
    /// al., "The curious case of neural text degeneration", ICLR 2020). Reorders the candidates.
    ///
    /// ```text
    /// |-- in the nucleus --|-- likelier half --|-- other half --|-- not in it --|
    ///                      lo                  mid              hi
    /// ```
    /// Each turn decides one half, so it costs a few passes over the candidates, not a sort.
    fn nucleus(&mut self, softmax: Softmax, target: f64) -> Option<Candidate> {
        let mut undecided = &mut self.candidates[..];
        let mut missing = target;
        while undecided.len() > 1 {
            let mid = undecided.len() / 2;
            undecided.select_nth_unstable_by(mid, |a, b| b.cmp(a));
            let (likelier, others) = undecided.split_at_mut(mid);
            let weight = softmax.total_weight(likelier);
            if weight >= missing {
                undecided = likelier;
            } else {
                missing -= weight;
                undecided = others;
            }
        }
        undecided.first().copied()
    }
}
