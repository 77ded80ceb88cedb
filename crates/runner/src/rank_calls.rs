//! What rank 0 of a model tells the others of each model call, so that they compute their shares of it.
//!
//! ```text
//! rank 0   plan -> SentCalls::set -> message ..................................> its share
//! rank 1                               \...> ReceivedCalls::take -> run_share -> its share
//! ```

mod rank_adapters;
mod rank_call;

use inflight_base::{BlockSize, StepError};
use inflight_engine::{BlockMove, StepPlan};

use super::adapter_parts::AdapterParts;
use super::limits::RunnerLimits;
use super::step_layout::StepLayout;
use rank_adapters::{ReceivedAdapters, SentAdapters, for_each_piece};

pub(super) use rank_adapters::AdapterRuns;
pub(super) use rank_call::RankCall;

/// The model calls that rank 0 sends, one after the other.
pub struct SentCalls {
    layout: StepLayout,
    call: RankCall,
    adapters: SentAdapters,
    /// The number of the next call.
    number: u32,
    /// Of the last message; reused.
    words: Vec<u32>,
}

/// The model calls that another rank receives.
pub struct ReceivedCalls {
    block_size: BlockSize,
    num_groups: usize,
    call: RankCall,
    /// The number of the next call.
    number: u32,
    adapters: ReceivedAdapters,
    runs: AdapterRuns,
    /// Of the last message; reused.
    words: Vec<u32>,
}

impl SentCalls {
    /// None yet, for a runner with these limits.
    pub fn new(limits: &RunnerLimits) -> Self {
        Self {
            layout: StepLayout::new(limits, None),
            call: RankCall::default(),
            adapters: SentAdapters::default(),
            number: 0,
            words: Vec::new(),
        }
    }

    /// Calls `send` with messages for the other ranks: their parts of the adapters of a plan that they do not have yet.
    /// The first argument is the index of the rank behind rank 0.
    ///
    /// # Errors
    /// Those of `send`, or an adapter has parts for another number of ranks.
    pub fn send_adapters(
        &mut self,
        plan: &StepPlan<'_>,
        num_others: usize,
        mut send: impl FnMut(usize, &[u8]) -> Result<(), StepError>,
    ) -> Result<(), StepError> {
        let Self {
            adapters, words, ..
        } = self;
        adapters.send(plan, |number, parts: &AdapterParts| {
            if parts.others().len() != num_others {
                return Err(StepError(format!(
                    "an adapter has {} parts for {} ranks",
                    1 + parts.others().len(),
                    1 + num_others
                )));
            }
            let mut parts = parts.others().iter().enumerate();
            parts.try_for_each(|(other, part)| {
                for_each_piece(number, part, words, |words| {
                    send(other, bytemuck::cast_slice(words))
                })
            })
        })
    }

    /// The next call is that of a plan, whose adapters were sent. With `gathers_largest` the ranks send only the
    /// largest logit of a row where nothing else is needed.
    pub fn set(&mut self, plan: &StepPlan<'_>, gathers_largest: bool) {
        self.layout.set(plan);
        if gathers_largest {
            self.layout.set_greedy(plan);
        }
        self.call.set(plan, &self.layout, Some(&self.adapters));
        self.layout.forget_adapters();
        self.adapters.forget(&mut self.call.forgotten);
        self.write();
    }

    /// The next call is moves of blocks without a computation.
    pub fn set_moves(&mut self, moves: &[BlockMove]) {
        self.call.set_moves(moves);
        self.write();
    }

    /// The number of tokens of the call.
    pub fn num_tokens(&self) -> usize {
        self.call.token_ids.len()
    }

    /// The message of the call for the other ranks.
    pub fn message(&self) -> &[u8] {
        bytemuck::cast_slice(&self.words)
    }

    fn write(&mut self) {
        self.call.write(self.number, &mut self.words);
        self.number = self.number.wrapping_add(1);
    }
}

impl ReceivedCalls {
    /// None yet, for a runner with these limits.
    pub fn new(limits: &RunnerLimits) -> Self {
        Self {
            block_size: limits.block_size,
            num_groups: limits.num_groups(),
            call: RankCall::default(),
            number: 0,
            adapters: ReceivedAdapters::default(),
            runs: AdapterRuns::default(),
            words: Vec::new(),
        }
    }

    /// Takes the next message of rank 0. Returns whether it is a call, which is to be computed now; otherwise it is a
    /// piece of an adapter.
    ///
    /// # Errors
    /// It is something else, there is no memory, or an adapter was not sent.
    pub fn take(&mut self, message: &[u8]) -> Result<bool, StepError> {
        self.words.clear();
        let (chunks, _) = message.as_chunks();
        let words = chunks.iter().map(|word| u32::from_ne_bytes(*word));
        self.words.extend(words);
        if ReceivedAdapters::is_piece(&self.words) {
            self.adapters.take(&self.words)?;
            return Ok(false);
        }
        self.call
            .read(self.number, self.block_size, self.num_groups, &self.words)?;
        self.number = self.number.wrapping_add(1);
        let [tokens, kept, sampled] = &self.call.adapters;
        self.adapters
            .find([tokens, kept, sampled], &mut self.runs)?;
        Ok(true)
    }

    /// The call that was taken last, and the rows that adapters are added to.
    pub(super) fn call(&self) -> (&RankCall, &AdapterRuns) {
        (&self.call, &self.runs)
    }

    /// Gives the memory of adapters back that no call after this one has.
    pub(super) fn forget_adapters(&mut self) {
        self.adapters.forget(&self.call.forgotten);
    }
}
