//! How many drafts of a sequence are worth computing, by how many were right lately and by what a draft costs.
//!
//! A draft is worth its cost if it is right more often than its price, the share of a token's cost that it adds to the
//! step. If drafts are right with probability `p`, the `i`-th of a step is accepted with `p^i`: so many are drafted
//! that the last one is still worth it.
//!
//! ```text
//! p^i     0.8   0.64   0.51   0.41   0.33
//! price   0.4 ......................               four drafts
//! ```
//!
//! Where none is, one is drafted once in a while, to find out when that changes. It adds at most [`PROBING_COST`] to
//! the cost of a token, and as long as such a draft is right, the next step has one too.
//!
//! Leviathan et al., "Fast inference from transformers via speculative decoding" (arXiv:2211.17192), section 3.5,
//! chooses the number in this way, with a `p` that is known beforehand.

/// What remains of the weight of a draft when another one is verified: some five drafts count.
const FORGETTING: f32 = 0.8;

/// The share of a token's cost that may be spent to find out whether drafts are right again.
const PROBING_COST: f32 = 0.03;

/// The lowest and the highest probability that is assumed.
const BOUNDS: (f32, f32) = (0.01, 0.99);

/// The drafts of a sequence that were right lately.
#[derive(Clone, Copy, Debug)]
pub(super) struct Acceptance {
    /// The weights of the drafts that were verified, and of those that were right.
    num_verified: f32,
    num_right: f32,
    /// Steps since the last one with drafts; `None` if its drafts were right, or there was none.
    num_without: Option<u32>,
}

impl Default for Acceptance {
    /// As if one of two drafts had been right.
    fn default() -> Self {
        Self::unknown(0.5)
    }
}

impl Acceptance {
    /// As if drafts had been right with this probability, which nobody has tried: the first step has one.
    pub(super) fn unknown(probability: f32) -> Self {
        Self {
            num_without: None,
            ..Self::at(probability)
        }
    }

    /// As if drafts had been right with this probability, and none had been made for long.
    pub(super) fn at(probability: f32) -> Self {
        Self {
            num_verified: 2.0,
            num_right: 2.0 * probability,
            num_without: Some(0),
        }
    }

    /// The probability that the next draft is right.
    pub(super) fn probability(&self) -> f32 {
        (self.num_right / self.num_verified).clamp(BOUNDS.0, BOUNDS.1)
    }

    /// How many drafts the next step of the sequence should have, at the price of one: 0 to 1.
    pub(super) fn num_drafts(&mut self, price: f32) -> usize {
        match self.num_worth(price) {
            0 => usize::from(self.num_without.is_none() || self.probes(price)),
            num_worth => num_worth,
        }
    }

    /// How many drafts are worth the price of each.
    pub(super) fn num_worth(&self, price: f32) -> usize {
        // The largest i with p^i >= price: any, at the price 0.
        (price.ln() / self.probability().ln()) as usize
    }

    /// Whether the next step has a draft to find out whether it is right, at a price that may be above 1. It is asked
    /// once in each step without one that is worth it.
    pub(super) fn probes(&mut self, price: f32) -> bool {
        if self.num_without.is_none() && price < 1.0 {
            return true;
        }
        let num_without = self.num_without.get_or_insert(0);
        *num_without = num_without.saturating_add(1);
        *num_without as f32 * PROBING_COST >= price
    }

    /// Counts the drafts of a step. Those behind the first wrong one say nothing.
    pub(super) fn count(&mut self, num_drafted: usize, num_accepted: usize) {
        for _ in 0..num_accepted {
            self.num_verified = self.num_verified * FORGETTING + 1.0;
            self.num_right = self.num_right * FORGETTING + 1.0;
        }
        if num_accepted < num_drafted {
            self.num_verified = self.num_verified * FORGETTING + 1.0;
            self.num_right *= FORGETTING;
        }
        self.num_without = (num_accepted < num_drafted).then_some(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The drafts of 1000 steps and how many of them are right, if the `n`-th draft is right where `is_right(n)`.
    fn drafts(price: f32, max: usize, is_right: impl Fn(usize) -> bool) -> (usize, usize) {
        let mut acceptance = Acceptance::default();
        let (mut num_drafted, mut num_accepted, mut verified) = (0, 0, 0);
        for _ in 0..1000 {
            let num = acceptance.num_drafts(price).min(max);
            if num == 0 {
                continue;
            }
            let right = (0..num).take_while(|n| is_right(verified + n)).count();
            verified += right + usize::from(right < num);
            acceptance.count(num, right);
            num_drafted += num;
            num_accepted += right;
        }
        (num_drafted, num_accepted)
    }

    #[test]
    fn wrong_drafts_cost_little_at_any_price() {
        for percent in 1..=100 {
            let price = percent as f32 / 100.0;
            let (num_drafted, _) = drafts(price, 4, |_| false);
            let cost = num_drafted as f32 * price / 1000.0;
            assert!(cost < 0.035, "{cost} at the price {price}");
            assert!(num_drafted > 10, "{num_drafted} at the price {price}");
        }
    }

    #[test]
    fn right_drafts_are_as_many_as_are_allowed() {
        for price in [0.0, 0.06, 0.5, 0.9] {
            let (num_drafted, num_accepted) = drafts(price, 4, |_| true);
            assert!(num_drafted > 3900, "{num_drafted} at the price {price}");
            assert_eq!(num_accepted, num_drafted);
        }
        // Nothing is gained where a draft costs as much as a token.
        assert_eq!(drafts(1.0, 4, |_| true), (1000, 1000));
    }

    #[test]
    fn drafts_that_are_right_now_and_then_are_made_where_they_are_cheap() {
        let every_third = |n| n % 3 == 0;
        let gain = |price| {
            let (num_drafted, num_accepted) = drafts(price, 4, every_third);
            num_accepted as f32 - price * num_drafted as f32
        };
        assert!(gain(0.05) > 250.0, "{}", gain(0.05));
        assert!(gain(0.9) > -35.0, "{}", gain(0.9));
    }

    #[test]
    fn drafts_come_back_when_they_are_right_again() {
        let (num_drafted, num_accepted) = drafts(0.75, 4, |n| n > 20);
        // Twenty wrong ones, at most one in 25 steps, and then as many as are allowed.
        assert!((1500..2100).contains(&num_drafted), "{num_drafted}");
        assert!(num_accepted > 1400, "{num_accepted}");
    }

    #[test]
    fn each_verified_draft_weighs_a_fifth_less_than_the_next() {
        let mut acceptance = Acceptance::at(0.5);
        acceptance.count(4, 1);
        // One was right, the next one wrong, and the other two say nothing.
        let right = 1.0_f32 * 0.64 + 0.8;
        let verified = 2.0_f32 * 0.64 + 0.8 + 1.0;
        assert!((acceptance.probability() - right / verified).abs() < 1e-6);
    }

    #[test]
    fn drafts_that_cost_a_token_are_not_tried_at_once() {
        assert!(Acceptance::unknown(0.5).probes(0.99));
        assert!(!Acceptance::unknown(0.5).probes(1.0));
    }
}
