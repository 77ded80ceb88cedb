//! What drafts cost in a step, as shares of the cost of a token.
//!
//! ```text
//! n sequences generate        fixed + n * per_token            so a token costs fixed / n + per_token
//! a draft more                                  per_token
//! made by the draft model     + draft_fixed / m + draft_per_token, if it makes the drafts of m sequences
//! ```

use crate::StepCost;

/// The prices of drafts in one step.
#[derive(Clone, Copy, Debug)]
pub(super) struct DraftPrices {
    /// Of a draft that is only verified.
    pub(super) given: f32,
    /// Of one that the draft model makes, too.
    pub(super) made: f32,
    /// Of a token that the draft model has to catch up on.
    pub(super) caught_up: f32,
}

impl DraftPrices {
    /// The prices if `num_generating` sequences generate, and the draft model, whose passes cost `draft`, makes drafts
    /// for `num_drafting` of them.
    pub(super) fn new(
        cost: StepCost,
        draft: Option<StepCost>,
        num_generating: usize,
        num_drafting: usize,
    ) -> Self {
        let given = cost.price_of_draft(num_generating);
        let Some(draft) = draft else {
            return Self {
                given,
                made: given,
                caught_up: 0.0,
            };
        };
        let of_token =
            cost.fixed_ns as f64 / num_generating.max(1) as f64 + cost.per_token_ns as f64;
        let of_pass = draft.fixed_ns as f64 / num_drafting.max(1) as f64;
        let share = |ns: f64| (ns / of_token.max(1.0)) as f32;
        Self {
            given,
            made: given + share(of_pass + draft.per_token_ns as f64),
            caught_up: share(draft.per_token_ns as f64),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_of_the_draft_model_is_cheaper_the_more_share_it() {
        let cost = StepCost {
            fixed_ns: 160,
            per_token_ns: 10,
        };
        let draft = StepCost {
            fixed_ns: 16,
            per_token_ns: 1,
        };
        let prices = |num_generating, num_drafting| {
            let prices = DraftPrices::new(cost, Some(draft), num_generating, num_drafting);
            [prices.given, prices.made, prices.caught_up]
        };
        assert_eq!(prices(1, 1), [10.0 / 170.0, 27.0 / 170.0, 1.0 / 170.0]);
        assert_eq!(prices(16, 16), [0.5, 0.6, 0.05]);
        assert_eq!(prices(16, 1), [0.5, 0.5 + 0.85, 0.05]);
        let given = DraftPrices::new(cost, None, 16, 16);
        assert_eq!([given.given, given.made, given.caught_up], [0.5, 0.5, 0.0]);
    }
}
