//! What following an output costs, and its limits: counts, so that they do not differ from run to run.

use llguidance::earley::ParserStats;

use inflight_sampling::SampleError;

/// Look-ups of one token. A token that needs more has cost up to [`MAX_LOOKUPS`] when that is found.
const MAX_PER_TOKEN: u64 = 8_000_000;

/// Look-ups of one output.
const MAX_PER_OUTPUT: u64 = 5_000_000_000;

/// Items that the parser may add for one mask, to all of its rows.
pub(super) const MAX_ITEMS: usize = 20_000;

/// Items in a row behind which the parser goes no further.
pub(super) const MAX_ITEMS_IN_ROW: usize = 2_000;

/// Look-ups that computing what may follow one token never exceeds, whatever the guide: as many as the limits of the
/// parser allow. A guide of which a token has cost more is a fault of this crate.
pub const MAX_LOOKUPS: u64 = (MAX_ITEMS * MAX_ITEMS_IN_ROW) as u64;

/// The look-ups of an output, token by token.
///
/// The parser looks up every item that it adds to a row among those that the row has, one after the other: a row costs
/// the square of its items at least. An ambiguous grammar has rows that grow with the output.
#[derive(Default)]
pub(super) struct Work {
    /// What is computed once for the first tokens of the output, however often it is followed: up to each, inclusive.
    totals: Vec<u64>,
    largest: u64,
}

impl Work {
    /// Look-ups between two states of a parser's counters.
    pub(super) fn between(before: &ParserStats, after: &ParserStats) -> u64 {
        let spent = after.delta(before);
        let (items, rows) = (spent.all_items as u64, spent.rows as u64);
        items.saturating_mul(items) / rows.max(1)
    }

    /// Adds what follows the first `num_tokens` tokens of the output, if that is not counted yet.
    ///
    /// # Errors
    /// The token or the output costs too much.
    pub(super) fn add(&mut self, num_tokens: usize, lookups: u64) -> Result<(), SampleError> {
        self.largest = self.largest.max(lookups);
        if num_tokens == self.totals.len() {
            let before = self.totals.last().copied().unwrap_or(0);
            self.totals.push(before.saturating_add(lookups));
        }
        let total = self.totals.get(num_tokens).copied().unwrap_or(0);
        match lookups <= MAX_PER_TOKEN && total <= MAX_PER_OUTPUT {
            true => Ok(()),
            false => Err(SampleError::GuideTooComplex),
        }
    }

    /// The look-ups of the token that has cost most.
    pub(super) fn largest(&self) -> u64 {
        self.largest
    }

    /// Forgets what follows more than `num_tokens` tokens, because others have taken their place.
    pub(super) fn truncate(&mut self, num_tokens: usize) {
        self.totals.truncate(num_tokens + 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stats(all_items: usize, rows: usize) -> ParserStats {
        ParserStats {
            all_items,
            rows,
            ..ParserStats::default()
        }
    }

    #[test]
    fn a_row_costs_the_square_of_its_items() {
        assert_eq!(Work::between(&stats(5, 1), &stats(305, 2)), 300 * 300);
        assert_eq!(Work::between(&stats(0, 0), &stats(600, 6)), 6 * 100 * 100);
        assert_eq!(Work::between(&stats(7, 3), &stats(7, 3)), 0);
    }

    #[test]
    fn a_token_and_an_output_have_limits_and_nothing_counts_twice() {
        let mut work = Work::default();
        assert_eq!(work.add(0, MAX_PER_TOKEN), Ok(()));
        assert_eq!(
            work.add(1, MAX_PER_TOKEN + 1),
            Err(SampleError::GuideTooComplex)
        );
        work.truncate(0);
        for num_tokens in 1..MAX_PER_OUTPUT / MAX_PER_TOKEN {
            assert_eq!(work.add(num_tokens as usize, MAX_PER_TOKEN), Ok(()));
            assert_eq!(work.add(num_tokens as usize, MAX_PER_TOKEN), Ok(()));
        }
        let last = (MAX_PER_OUTPUT / MAX_PER_TOKEN) as usize;
        assert_eq!(work.add(last, 0), Ok(()));
        assert_eq!(
            work.add(last + 1, MAX_PER_TOKEN),
            Err(SampleError::GuideTooComplex)
        );
    }
}
