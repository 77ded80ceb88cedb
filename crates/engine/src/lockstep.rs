//! Lockstep (V1): a batch starts together, and no sequence joins or leaves it until all have ended.
//!
//! Everything that differs from in-flight batching is decided in this file; the rest of the engine asks it.
//! The contexts of a batch are padded to the longest. They take as many steps as `max_num_tokens` demands: it
//! bounds what the runner works on at a time, not who is in the batch. Generation starts when all contexts are
//! computed.
//!
//! ```text
//! max_num_tokens = 8       step 1              step 2          step 3 ...
//! context of 5            |c c c c c|         |         |     |g|
//! context of 7            |c c      |         |c c c c c|     |g|      chunks end where blocks end
//! ```
//!
//! - A batch may be joined only before it runs ([`LockstepBatch::is_open`]), also by a sequence that gets no
//!   tokens in the first step, or that could reuse blocks that another is about to write.
//! - Contexts are chunked whatever `enable_chunked_context` says, in order of arrival
//!   ([`is_context_chunked`], [`chunk_policy`]).
//! - A sequence that has ended stays in its row and keeps its blocks until the last of its batch has ended. Its
//!   slots in each generation step are empty.
//! - Statistics have one record for each batch, an iteration.

use crate::capacity;
use inflight_base::{LoadError, Tokens};
use inflight_config::{BatchingScheme, CapacityPolicy, ContextChunkPolicy};

/// Refuses options that lockstep cannot be combined with.
///
/// # Errors
/// The option, with what to write instead.
pub(super) fn check(
    scheme: BatchingScheme,
    policy: CapacityPolicy,
    num_micro_batches: usize,
    speculates: bool,
) -> Result<(), LoadError> {
    let refuse = |problem: &str, remedy: &str| {
        Err(LoadError::Config {
            problem: problem.to_owned(),
            remedy: remedy.to_owned(),
        })
    };
    if !scheme.is_lockstep() {
        Ok(())
    } else if capacity::pauses(policy) {
        refuse(
            "gpt_model_type is V1, which never pauses a request, and batch_scheduler_policy is \
             max_utilization",
            "set batch_scheduler_policy to guaranteed_no_evict or static_batch",
        )
    } else if num_micro_batches > 1 {
        refuse(
            "gpt_model_type is V1, which computes one batch at a time, and enable_trt_overlap is true",
            "set enable_trt_overlap to false, or gpt_model_type to inflight_fused_batching",
        )
    } else if speculates {
        refuse(
            "gpt_model_type is V1, which generates one token per request and step, and speculation is on",
            "set speculation to none, or gpt_model_type to inflight_fused_batching",
        )
    } else {
        Ok(())
    }
}

/// Whether a context may be spread over several steps.
pub(super) fn is_context_chunked(scheme: BatchingScheme, enable_chunked_context: bool) -> bool {
    enable_chunked_context || scheme.is_lockstep()
}

/// Which contexts get the tokens that are left.
pub(super) fn chunk_policy(
    scheme: BatchingScheme,
    configured: ContextChunkPolicy,
) -> ContextChunkPolicy {
    match scheme.is_lockstep() {
        true => ContextChunkPolicy::FirstComeFirstServed,
        false => configured,
    }
}

/// Totals of one or several batches; a batch is an iteration of V1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LockstepTotals {
    /// Requests of the batch.
    pub num_requests: u64,
    /// Context tokens that were computed, padding not included.
    pub num_context_tokens: u64,
    /// Generated tokens.
    pub num_generated_tokens: u64,
    /// Generation slots that were computed for requests that had ended.
    pub num_empty_slots: u64,
}

impl LockstepTotals {
    /// Zeros in lockstep, and `None` otherwise.
    pub(super) fn zero(scheme: BatchingScheme) -> Option<Self> {
        scheme.is_lockstep().then(Self::default)
    }

    pub(super) fn plus(self, other: Self) -> Self {
        Self {
            num_requests: self.num_requests + other.num_requests,
            num_context_tokens: self.num_context_tokens + other.num_context_tokens,
            num_generated_tokens: self.num_generated_tokens + other.num_generated_tokens,
            num_empty_slots: self.num_empty_slots + other.num_empty_slots,
        }
    }
}

/// The batch that runs in lockstep, if any runs.
#[derive(Default)]
pub(super) struct LockstepBatch {
    totals: LockstepTotals,
    /// The longest of its contexts, and the sum of all.
    longest: Tokens,
    num_tokens: Tokens,
}

impl LockstepBatch {
    /// No batch yet in lockstep, and `None` otherwise.
    pub(super) fn new(scheme: BatchingScheme) -> Option<Self> {
        scheme.is_lockstep().then(Self::default)
    }

    /// Whether sequences may join, when `num_running` are running.
    pub(super) fn is_open(num_running: usize) -> bool {
        num_running == 0
    }

    /// Whether no sequence may generate yet, because contexts of the batch are not computed.
    pub(super) fn holds_generation(any_in_context: bool) -> bool {
        any_in_context
    }

    /// Whether a batch runs.
    pub(super) fn is_running(&self) -> bool {
        self.totals.num_requests > 0
    }

    /// Whether the batch has not been computed at all yet.
    pub(super) fn is_new(&self) -> bool {
        self.totals.num_context_tokens == 0
    }

    /// Totals of the batch so far.
    pub(super) fn totals(&self) -> LockstepTotals {
        self.totals
    }

    /// Adds a sequence with `num_tokens` of context to compute.
    pub(super) fn join(&mut self, num_tokens: Tokens) {
        self.totals.num_requests += 1;
        self.longest = self.longest.max(num_tokens);
        self.num_tokens += num_tokens;
    }

    /// Padding of all contexts to the length of the longest. It is counted in the step that completes the last of them:
    /// the step completes `num_completed` of `num_in_context` contexts.
    pub(super) fn padding(&self, num_completed: usize, num_in_context: usize) -> Tokens {
        if num_completed == 0 || num_completed < num_in_context {
            return Tokens::ZERO;
        }
        let padded = self.totals.num_requests * u64::from(self.longest.0);
        let padding = padded - u64::from(self.num_tokens.0);
        Tokens(u32::try_from(padding).unwrap_or(u32::MAX))
    }

    /// Counts a step that was planned: its context tokens and, if it generates, the slots of those that have ended.
    pub(super) fn count_planned(&mut self, num_context_tokens: Tokens, num_empty_slots: usize) {
        if self.is_running() {
            self.totals.num_context_tokens += u64::from(num_context_tokens.0);
            self.totals.num_empty_slots += num_empty_slots as u64;
        }
    }

    /// Counts the tokens that a step has generated.
    pub(super) fn count_generated(&mut self, num_tokens: u64) {
        if self.is_running() {
            self.totals.num_generated_tokens += num_tokens;
        }
    }

    /// Ends the batch, if one is running, and returns its totals.
    pub(super) fn end(&mut self) -> Option<LockstepTotals> {
        let ended = std::mem::take(self);
        ended.is_running().then_some(ended.totals)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_batch_runs_before_a_sequence_has_joined() {
        let mut batch = LockstepBatch::default();
        assert!(!batch.is_running());
        assert_eq!(batch.end(), None);
        batch.join(Tokens(4));
        assert!(batch.is_running());
        assert_eq!(batch.end().map(|it| it.num_requests), Some(1));
    }
}
