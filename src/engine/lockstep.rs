//! A batch in lockstep (V1): what it has come to, from its first step until its answers leave.
//!
//! Its contexts are padded to the longest one. They are computed in as many steps as `max_num_tokens` demands:
//! that bounds what the runner works on at a time, and not who is in the batch. Nobody generates before all
//! contexts are computed.
//!
//! ```text
//! max_num_tokens = 8       step 1              step 2          step 3 ...
//! context of 5            |c c c c c|         |         |     |g|
//! context of 7            |c c      |         |c c c c c|     |g|      its chunks end where blocks do
//! ```

use crate::base::Tokens;
use crate::engine::stats::StepStats;

/// What a V1 iteration has come to so far: a batch from its start to its end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LockstepTotals {
    /// Requests of the batch.
    pub num_requests: u64,
    /// Tokens of their contexts that were computed, padding not included.
    pub num_context_tokens: u64,
    /// Tokens that they have generated.
    pub num_generated_tokens: u64,
    /// Generation slots that were computed for those that had ended.
    pub num_empty_slots: u64,
}

impl LockstepTotals {
    pub(super) fn and(self, other: Self) -> Self {
        Self {
            num_requests: self.num_requests + other.num_requests,
            num_context_tokens: self.num_context_tokens + other.num_context_tokens,
            num_generated_tokens: self.num_generated_tokens + other.num_generated_tokens,
            num_empty_slots: self.num_empty_slots + other.num_empty_slots,
        }
    }
}

/// The batch that runs, if any.
#[derive(Default)]
pub(super) struct LockstepBatch {
    pub(super) totals: LockstepTotals,
    /// Of its contexts: the longest, and all together.
    longest: Tokens,
    num_tokens: Tokens,
    /// Records of iterations that have ended and that nobody has taken.
    pub(super) ended: Vec<StepStats>,
}

impl LockstepBatch {
    /// Whether there is one.
    pub(super) fn is_running(&self) -> bool {
        self.totals.num_requests > 0
    }

    /// Whether nothing of it was computed.
    pub(super) fn is_new(&self) -> bool {
        self.totals.num_context_tokens == 0
    }

    /// Takes in a request with `rest` tokens of context to compute.
    pub(super) fn join(&mut self, rest: Tokens) {
        self.totals.num_requests += 1;
        self.longest = self.longest.max(rest);
        self.num_tokens += rest;
    }

    /// The tokens that are computed for nothing, so that all contexts are as long as the longest.
    pub(super) fn num_padding_tokens(&self) -> Tokens {
        let padded = self.totals.num_requests * u64::from(self.longest.0);
        let padding = padded - u64::from(self.num_tokens.0);
        Tokens(u32::try_from(padding).unwrap_or(u32::MAX))
    }

    /// Ends the iteration, of which `last` was the last step's record.
    pub(super) fn end(&mut self, last: &StepStats) {
        self.ended.push(StepStats {
            lockstep: Some(self.totals),
            ..last.clone()
        });
        self.totals = LockstepTotals::default();
        self.longest = Tokens::ZERO;
        self.num_tokens = Tokens::ZERO;
    }
}
