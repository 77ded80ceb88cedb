//! A plan in the terms of a device: where its tokens' keys and values go, and which rows matter.
//!
//! ```text
//! rows of a step     c c c c C C C S | g S | S | S D D    C: context logits needed, S: its logits choose a token
//! kept rows                  C C C S     S   S   S D D    ascending, each once; C and S may be the same row
//! sampled rows                     S     S   S   S D D    ascending, as indices of kept rows
//! ```
//!
//! D is the row of a draft. A token is sampled from it if the row before has chosen that draft.

use std::ops::Range;
use std::sync::Arc;

use super::adapter::UsedAdapter;
use super::limits::RunnerLimits;
use super::state_slots::StateSlots;
use inflight_base::{SeqSlot, TokenId};
use inflight_config::PoolingMode;
use inflight_device::{AdapterRun, AdapterWeights, KvSpan, SavedState, StepInputs, TokenInFlight};
use inflight_engine::StepPlan;
use inflight_sampling::{ChangeLists, DeviceSampling, PlainSampling};

/// The most rows of logits that are in memory for log-probabilities of a prompt.
const MAX_CONTEXT_ROWS: usize = 64;

/// The layout of one step. It is reused from step to step.
pub(super) struct StepLayout {
    /// Which rows stand for a prompt, if nothing is generated.
    pooling: Option<PoolingMode>,
    spans: Vec<KvSpan>,
    /// The slot of the states of each sequence.
    slots: Vec<u32>,
    states: StateSlots,
    saved_states: Vec<SavedState>,
    kept_rows: Vec<u32>,
    sampled_rows: Vec<u32>,
    /// The sequences that sample, as indices into the plan.
    sequences: Vec<usize>,
    /// For each of them, the first of its rows in `sampled_rows`.
    starts: Vec<u32>,
    /// The tokens that the step before samples.
    in_flight: Vec<TokenInFlight>,
    /// For each of the sequences that sample, whether it was planned ahead and that step has no token for it. Empty if
    /// none was planned ahead.
    is_lost: Vec<bool>,
    /// The sampled rows of which nothing but the largest logit is needed, as indices of sampled rows. Empty if all
    /// logits are.
    greedy_rows: Vec<u32>,
    /// For each of the sampled rows, how a device may sample from it. Empty if it does not.
    sampling: Vec<Option<DeviceSampling>>,
    change_lists: ChangeLists,
    contexts: Vec<ContextRows>,
    /// The tokens of second texts, in prompts of two.
    second_texts: Vec<Range<u32>>,
    /// The tokens that have an adapter, by row.
    adapters: Vec<AdapterRun>,
    /// The kept rows that have one, as indices of kept rows.
    kept_adapters: Vec<AdapterRun>,
    /// The sampled rows that have one, as indices of sampled rows.
    sampled_adapters: Vec<AdapterRun>,
}

/// The sampled rows of the sequences of a step, by slot.
#[derive(Default)]
pub(super) struct SampledRows {
    /// The rows of slots without a sequence are undefined.
    rows: Vec<u32>,
}

impl SampledRows {
    /// Sets the sampled rows of `plan`, with this layout.
    pub fn set(&mut self, plan: &StepPlan<'_>, layout: &StepLayout) {
        for (&index, &start) in layout.sequences().iter().zip(layout.starts()) {
            let slot = plan.sequences[index].slot.index();
            if slot >= self.rows.len() {
                self.rows.resize(slot + 1, 0);
            }
            self.rows[slot] = start;
        }
    }

    /// The row of the sequence in `slot`, which has sampled.
    fn row(&self, slot: SeqSlot) -> u32 {
        self.rows[slot.index()]
    }
}

/// Kept rows of one sequence whose context logits are needed, and what is made of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ContextRows {
    /// The sequence, as an index into the plan.
    pub sequence: usize,
    /// Which of the kept rows are its own.
    pub rows: Range<usize>,
    /// Whether the logits themselves are returned.
    pub returns_logits: bool,
    /// The tokens behind the first rows, whose log-probabilities are returned.
    pub next_tokens: Vec<TokenId>,
    /// With those of this many of the most likely ones.
    pub num_top: u32,
}

impl StepLayout {
    /// An empty layout with room for the largest generation step.
    pub fn new(limits: &RunnerLimits, pooling: Option<PoolingMode>) -> Self {
        let max_sequences = limits.max_num_requests as usize;
        let max_sampled_rows = limits.max_sampled_rows.index();
        Self {
            pooling,
            spans: Vec::with_capacity(max_sequences),
            slots: Vec::with_capacity(max_sequences),
            states: StateSlots::new(limits),
            saved_states: Vec::with_capacity(max_sampled_rows),
            kept_rows: Vec::with_capacity(max_sampled_rows),
            sampled_rows: Vec::with_capacity(max_sampled_rows),
            sequences: Vec::with_capacity(max_sequences),
            starts: Vec::with_capacity(max_sequences),
            in_flight: Vec::with_capacity(max_sequences),
            is_lost: Vec::with_capacity(max_sequences),
            greedy_rows: Vec::with_capacity(max_sampled_rows),
            sampling: Vec::with_capacity(max_sampled_rows),
            change_lists: ChangeLists::new(max_sequences, limits.max_seq_len.index()),
            contexts: Vec::new(),
            second_texts: Vec::new(),
            adapters: Vec::new(),
            kept_adapters: Vec::new(),
            sampled_adapters: Vec::new(),
        }
    }

    /// Makes it the layout of `plan`.
    pub fn set(&mut self, plan: &StepPlan<'_>) {
        self.spans.clear();
        self.slots.clear();
        self.saved_states.clear();
        self.kept_rows.clear();
        self.sampled_rows.clear();
        self.sequences.clear();
        self.starts.clear();
        self.in_flight.clear();
        self.is_lost.clear();
        self.greedy_rows.clear();
        self.sampling.clear();
        self.change_lists.clear();
        self.contexts.clear();
        self.second_texts.clear();
        self.forget_adapters();
        let saves = plan.state_saves.iter().map(|save| SavedState {
            token: save.token,
            slot: self.states.snapshot(save.snapshot),
        });
        self.saved_states.extend(saves);
        for (index, sequence) in plan.sequences.iter().enumerate() {
            self.spans.push(KvSpan {
                tokens: sequence.tokens.clone(),
                kv_len: sequence.kv_len,
                block_table: sequence.block_table.clone(),
            });
            self.slots.push(sequence.states.0);
            // Behind the last draft, the states are in the slot of the sequence.
            let end = sequence.tokens.end - 1;
            let drafted = (1..).zip(end - sequence.num_drafts..end);
            self.saved_states
                .extend(drafted.map(|(place, token)| SavedState {
                    token,
                    slot: self.states.draft(sequence.states, place),
                }));
            if let Some(second_text) = plan.second_text(index) {
                let Range { start, end } = sequence.tokens;
                let position = sequence.kv_len - (end - start);
                let first = start + second_text.0.saturating_sub(position);
                self.second_texts.push(first.min(end)..end);
            }
            let first_kept = self.kept_rows.len() as u32;
            let first_sampled = self.sampled_rows.len() as u32;
            self.add_contexts(plan, index);
            if sequence.samples {
                self.sequences.push(index);
                self.starts.push(self.sampled_rows.len() as u32);
                let Range { start, end } = sequence.tokens;
                let rows = match self.pooling {
                    None | Some(PoolingMode::Last) => end - 1 - sequence.num_drafts..end,
                    // The whole prompt is in the step.
                    Some(PoolingMode::Cls) => start..start + 1,
                    Some(PoolingMode::Mean) => start..end,
                };
                for row in rows {
                    if self.kept_rows.last() != Some(&row) {
                        self.kept_rows.push(row);
                    }
                    self.sampled_rows.push(self.kept_rows.len() as u32 - 1);
                }
            }
            if let Some(adapter) = &sequence.adapter {
                let adapter = adapter.contents::<UsedAdapter>();
                let parts = adapter.expect("an adapter of this runner").parts();
                let weights = parts.own();
                add_run(&mut self.adapters, weights, sequence.tokens.clone());
                let kept = first_kept..self.kept_rows.len() as u32;
                let sampled = first_sampled..self.sampled_rows.len() as u32;
                for (runs, rows) in [
                    (&mut self.kept_adapters, kept),
                    (&mut self.sampled_adapters, sampled),
                ] {
                    if !rows.is_empty() {
                        add_run(runs, weights, rows);
                    }
                }
            }
        }
        self.saved_states.sort_unstable_by_key(|saved| saved.token);
    }

    /// Adds the rows whose context logits are needed of the sequence at `index` of the plan. Those for which only
    /// log-probabilities are returned are in pieces.
    fn add_contexts(&mut self, plan: &StepPlan<'_>, index: usize) {
        let context_logits = plan.context_logits(index);
        if context_logits.is_empty() {
            return;
        }
        let outputs = plan.outputs(index);
        let start = self.kept_rows.len();
        self.kept_rows.extend(context_logits);
        let end = self.kept_rows.len();
        let max_rows = match outputs.context_logits {
            true => end - start,
            false => MAX_CONTEXT_ROWS,
        };
        let mut next_tokens = plan.prompt_after(index);
        for first in (start..end).step_by(max_rows) {
            let rows = first..end.min(first + max_rows);
            let (own, rest) = next_tokens.split_at(rows.len().min(next_tokens.len()));
            next_tokens = rest;
            self.contexts.push(ContextRows {
                sequence: index,
                rows,
                returns_logits: outputs.context_logits,
                next_tokens: own.to_vec(),
                num_top: outputs.prompt_log_probs.unwrap_or_default(),
            });
        }
    }

    /// Lets go of the adapters of the step, which has been computed.
    pub fn forget_adapters(&mut self) {
        self.adapters.clear();
        self.kept_adapters.clear();
        self.sampled_adapters.clear();
    }

    /// Adds how a device may sample the tokens of `plan`, whose layout this is: wherever nothing but the token is
    /// wanted, and its options are among those of [`DeviceSampling`].
    pub fn set_sampling(&mut self, plan: &StepPlan<'_>) {
        for &index in &self.sequences {
            let num_drafts = plan.sequences[index].num_drafts as usize;
            if let Some(sampling) = plan.sampling_ahead(index) {
                self.sampling.push(Some(sampling.into()));
                continue;
            }
            let is_only_token = !plan.outputs(index).is_any_per_token();
            let lists = &mut self.change_lists;
            self.sampling.extend((0..=num_drafts).map(|num_accepted| {
                let input = plan.sampling_input_after(index, num_accepted);
                match is_only_token {
                    true => DeviceSampling::of(input, lists),
                    false => None,
                }
            }));
        }
    }

    /// Adds of which rows nothing but the largest logit is needed: those of greedy sequences whose options change no
    /// logits and that want nothing but tokens.
    pub fn set_greedy(&mut self, plan: &StepPlan<'_>) {
        for (&index, &start) in self.sequences.iter().zip(&self.starts) {
            if plan.outputs(index).is_any_per_token() {
                continue;
            }
            let rows = 0..=plan.sequences[index].num_drafts;
            self.greedy_rows.extend(rows.filter_map(|row| {
                let input = plan.sampling_input_after(index, row as usize);
                let is_greedy = PlainSampling::of(input).is_some_and(|it| it.temperature == 0.0);
                is_greedy.then_some(start + row)
            }));
        }
    }

    /// Adds where the tokens of sequences that are planned ahead are sampled, in the step with the layout `before`.
    pub fn set_ahead(&mut self, plan: &StepPlan<'_>, before: &SampledRows) {
        let ahead = plan.sequences.iter().filter(|planned| planned.is_ahead);
        self.in_flight.extend(ahead.map(|planned| TokenInFlight {
            token: planned.tokens.start,
            sampled_row: before.row(planned.slot),
        }));
    }

    /// Adds which of these tokens are lost: those that the device has not sampled. `has_token` says it for each of the
    /// rows of the step before.
    pub fn set_lost(&mut self, plan: &StepPlan<'_>, has_token: &[bool]) {
        if self.in_flight.is_empty() {
            return;
        }
        let mut in_flight = self.in_flight.iter();
        self.is_lost.extend(self.sequences.iter().map(|&index| {
            let source = match plan.sequences[index].is_ahead {
                true => in_flight.next(),
                false => None,
            };
            source.is_some_and(|it| has_token.get(it.sampled_row as usize) != Some(&true))
        }));
    }

    /// Whether the token of a sequence, by its place in [`StepLayout::sequences`], is lost.
    pub fn is_lost(&self, group: usize) -> bool {
        self.is_lost.get(group) == Some(&true)
    }

    /// What a device needs for the forward pass over `plan`, whose layout this is.
    pub fn inputs<'a>(&'a self, plan: &StepPlan<'a>) -> StepInputs<'a> {
        StepInputs {
            token_ids: plan.token_ids,
            spans: &self.spans,
            block_tables: plan.block_tables,
            state_slots: &self.slots,
            saved_states: &self.saved_states,
            // The decoder knows which tokens its states sum up.
            is_repeated: &[],
            kept_rows: &self.kept_rows,
            sampled_rows: &self.sampled_rows,
            in_flight: &self.in_flight,
            greedy_rows: &self.greedy_rows,
            sampling: &self.sampling,
            change_lists: self.change_lists.words(),
            adapters: &self.adapters,
            kept_adapters: &self.kept_adapters,
            sampled_adapters: &self.sampled_adapters,
            second_texts: &self.second_texts,
            // The runner has them.
            images: &[],
            deep_images: &[],
            positions: &[],
            mutual: &[],
            has_context_logits: !self.contexts.is_empty(),
        }
    }

    /// Rows of logits that tokens are sampled from.
    pub fn num_sampled_rows(&self) -> usize {
        self.sampled_rows.len()
    }

    /// The sequences that sample, as indices into the plan, in order.
    pub fn sequences(&self) -> &[usize] {
        &self.sequences
    }

    /// For each of [`StepLayout::sequences`], the first of its rows of logits.
    pub fn starts(&self) -> &[u32] {
        &self.starts
    }

    /// The rows whose context logits are needed, in order.
    pub fn contexts(&self) -> &[ContextRows] {
        &self.contexts
    }
}

/// The run that these rows, which are of one sequence, are in.
pub(super) fn run_of<'a>(runs: &'a [AdapterRun], rows: &Range<usize>) -> Option<&'a AdapterRun> {
    let row = rows.start as u32;
    runs.iter().find(|run| run.rows.contains(&row))
}

/// Appends rows with an adapter, to those before them if they have the same.
fn add_run(runs: &mut Vec<AdapterRun>, weights: &Arc<AdapterWeights>, rows: Range<u32>) {
    match runs.last_mut() {
        Some(last) if last.rows.end == rows.start && Arc::ptr_eq(&last.weights, weights) => {
            last.rows.end = rows.end;
        }
        _ => runs.push(AdapterRun {
            weights: Arc::clone(weights),
            rows,
        }),
    }
}
