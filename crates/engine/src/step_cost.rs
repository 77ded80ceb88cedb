//! What a step costs, as a line: some time for the step, and some for each of its tokens.

/// The time of a step that computes `n` tokens: `fixed_ns + n * per_token_ns`.
///
/// The fixed part is mostly the reading of the weights. It is many times the other on a large model, and less than it
/// on one that the processor's caches hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepCost {
    /// Nanoseconds of a step, however few tokens it has.
    pub fixed_ns: u64,
    /// Nanoseconds of each token.
    pub per_token_ns: u64,
}

impl StepCost {
    /// The line through two steps, each given as its tokens and its nanoseconds; `None` if they have the same number of
    /// tokens, or take no time.
    pub fn through(fewer: (u32, u64), more: (u32, u64)) -> Option<Self> {
        let num_more = u64::from(more.0.checked_sub(fewer.0)?);
        let per_token_ns = more.1.saturating_sub(fewer.1).checked_div(num_more)?;
        let fixed_ns = fewer.1.saturating_sub(u64::from(fewer.0) * per_token_ns);
        (fixed_ns + per_token_ns > 0).then_some(Self {
            fixed_ns,
            per_token_ns,
        })
    }

    /// Cost of one extra token in a step with `num_sequences` generating sequences, relative to the step's cost per
    /// generated token: 0 (free) to 1.
    pub(super) fn price_of_draft(self, num_sequences: usize) -> f32 {
        let computed = num_sequences as f64 * self.per_token_ns as f64;
        let price = computed / (self.fixed_ns as f64 + computed);
        // 0 / 0 if nothing generates and nothing is fixed.
        if price.is_nan() { 1.0 } else { price as f32 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_goes_through_both_steps() {
        let cost = |fixed_ns, per_token_ns| {
            Some(StepCost {
                fixed_ns,
                per_token_ns,
            })
        };
        assert_eq!(StepCost::through((1, 110), (5, 150)), cost(100, 10));
        assert_eq!(StepCost::through((1, 10), (40, 400)), cost(0, 10));
        assert_eq!(StepCost::through((1, 100), (9, 90)), cost(100, 0), "noise");
        assert_eq!(StepCost::through((1, 10), (2, 1000)), cost(0, 990), "noise");
        assert_eq!(StepCost::through((2, 10), (2, 20)), None);
        assert_eq!(StepCost::through((3, 10), (2, 20)), None);
        assert_eq!(StepCost::through((1, 0), (2, 0)), None);
    }

    #[test]
    fn a_draft_is_dearer_the_more_sequences_share_the_fixed_part() {
        let cost = StepCost {
            fixed_ns: 160,
            per_token_ns: 10,
        };
        let prices = [1, 4, 16, 64].map(|num| cost.price_of_draft(num));
        assert_eq!(prices, [1.0 / 17.0, 0.2, 0.5, 0.8]);
        let computed = StepCost {
            fixed_ns: 0,
            per_token_ns: 1,
        };
        assert_eq!([0, 1, 9].map(|num| computed.price_of_draft(num)), [1.0; 3]);
    }
}
