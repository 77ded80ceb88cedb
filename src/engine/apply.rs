//! How the results of a step are taken in.
//!
//! Nearly every sequence has one token a step and wants nothing else: it takes the short way. The long one is
//! for those that search with beams, may have drafts, or want to know more than their tokens.

use std::iter::Peekable;
use std::slice;
use std::vec::Drain;

use crate::base::{SeqSlot, Tokens};
use crate::engine::engine::forget;
use crate::engine::kv::KvCacheManager;
use crate::engine::sequence::{Sequence, SequenceText};
use crate::engine::{
    BatchingScheme, BeamCandidates, Engine, Event, ExtraOutputs, PlannedSequence, Sampled, Step,
    StepOutput,
};
use crate::sampling::FinishReason;

impl Engine {
    /// Takes in the results of a step, and appends to `events` what happened since the last time, in the
    /// order in which it happened.
    ///
    /// A request that was cancelled since `schedule` has no events.
    ///
    /// # Panics
    /// If `output` is not the step's: entries for each sequence that samples, in the step's order.
    pub fn apply(&mut self, mut step: Step, output: &mut StepOutput, events: &mut Vec<Event>) {
        let is_known = |event: &Event| {
            matches!(event, Event::Finished(..) | Event::Hypotheses(..))
                || self.sequences.find(event.sequence_id()).is_some()
        };
        events.extend(self.changes.drain(..).filter(is_known));

        if !step.is_empty() {
            self.is_out[step.micro_batch()] = false;
        }
        let mut results = Results::new(output);
        let mut any_gone = false;
        let mut num_generated = 0;
        for (planned, text) in step.drain() {
            let result = results.next(planned);
            let generates = planned.beam == 0 && result.is_some() && !has_failed(result);
            num_generated += u64::from(generates);
            let sequence = self.sequences.get_mut(planned.slot);
            let ended = match sequence.filter(|it| it.is_plain && self.cancelled.is_empty()) {
                Some(sequence) => {
                    let text = sequence.text.insert(text);
                    let computed = Tokens(planned.kv_len);
                    if !has_failed(result) {
                        self.kv.commit(&mut sequence.blocks, &text.tokens, computed);
                    }
                    sequence.computed = computed;
                    result.and_then(|result| choose(sequence, result, events))
                }
                None => self.take_back(planned, text, result, &mut results, events),
            };
            if let Some(reason) = ended {
                self.end(planned.slot, reason, events);
                any_gone = true;
            }
        }
        results.check_end();
        if any_gone {
            self.running.retain(|&slot| self.sequences.is_taken(slot));
        }
        self.spare_steps.push(step);
        if self.lockstep.is_running() {
            self.lockstep.totals.num_generated_tokens += num_generated;
        }
        self.end_lockstep_batch();
        events.append(&mut self.changes);
    }

    /// In lockstep, lets the answers leave when all of the batch have ended.
    pub(super) fn end_lockstep_batch(&mut self) {
        if self.running.is_empty() || self.num_ended() < self.running.len() {
            return;
        }
        for slot in self.running.drain(..) {
            let sequence = &mut self.sequences[slot];
            let reason = sequence.ended.expect("all have ended");
            self.totals.count(sequence);
            tell_end(sequence, reason, &mut self.changes);
            forget(&mut self.sequences, &mut self.kv, slot);
        }
        self.end_lockstep_iteration();
    }

    /// In lockstep, writes down what the batch has come to, if nobody of it is left.
    pub(super) fn end_lockstep_iteration(&mut self) {
        if self.running.is_empty()
            && self.lockstep.is_running()
            && let Some(last) = &self.stats
        {
            self.lockstep.end(last);
        }
    }

    /// Takes a sequence back that is more than plain, or one that may have been cancelled, or a beam. Says
    /// whether the sequence has ended.
    // Kept out of the loop over all sequences, as `end`.
    #[inline(never)]
    fn take_back(
        &mut self,
        planned: &PlannedSequence,
        text: Box<SequenceText>,
        result: Option<Sampled>,
        results: &mut Results<'_>,
        events: &mut Vec<Event>,
    ) -> Option<FinishReason> {
        let candidates = results.candidates(result);
        if planned.beam > 0 {
            // If it was cancelled, it is gone with its first beam.
            let sequence = self.sequences.get_mut(planned.slot)?;
            sequence.take_beam_back(planned, text, result, &mut self.kv);
            return take_candidates(sequence, result?, candidates, &mut self.kv, events);
        }
        let more = results.accepted(planned);
        let sequence = &mut self.sequences[planned.slot];
        let text = sequence.text.insert(text);
        if let Some(place) = self.cancelled.iter().position(|&slot| slot == planned.slot) {
            while results.extra_outputs(planned.slot).is_some() {}
            self.cancelled.swap_remove(place);
            forget(&mut self.sequences, &mut self.kv, planned.slot);
            return None;
        }
        let num_accepted = more.len();
        let num_rejected = planned.num_drafts - num_accepted as u32;
        let computed = Tokens(planned.kv_len - num_rejected);
        let last = more.last().map_or(result, |(_, result)| Some(*result));
        if !has_failed(last) {
            self.kv.commit(&mut sequence.blocks, &text.tokens, computed);
        }
        sequence.computed = computed;
        if planned.num_drafts > 0 {
            sequence.take_back_drafts(num_accepted);
            self.drafts.add(planned.num_drafts as usize, num_accepted);
        }
        if sequence.details.has_extra_outputs {
            let mut extra_outputs = results.extra_outputs(planned.slot);
            sequence.tell_news(&mut extra_outputs);
            events.extend(extra_outputs.map(|it| Event::ExtraOutputs(planned.id, it)));
        }
        let result = result?;
        if sequence.has_beams() {
            return take_candidates(sequence, result, candidates, &mut self.kv, events);
        }
        let mut ended = choose(sequence, result, events);
        for &(_, result) in more {
            let extra_outputs = results.extra_outputs(planned.slot);
            // What it gives after its end is nothing.
            if ended.is_none() {
                events.extend(extra_outputs.map(|it| Event::ExtraOutputs(planned.id, it)));
                ended = choose(sequence, result, events);
            }
        }
        ended
    }

    /// Ends a sequence; in lockstep, with its batch.
    #[inline(never)]
    fn end(&mut self, slot: SeqSlot, reason: FinishReason, events: &mut Vec<Event>) {
        let sequence = &mut self.sequences[slot];
        if self.config.scheme == BatchingScheme::V1 {
            sequence.ended = Some(reason);
            return;
        }
        self.totals.count(sequence);
        tell_end(sequence, reason, events);
        forget(&mut self.sequences, &mut self.kv, slot);
    }
}

/// What a runner has written, in the step's order.
struct Results<'a> {
    sampled: slice::Iter<'a, (SeqSlot, Sampled)>,
    candidates: Drain<'a, BeamCandidates>,
    extra_outputs: Peekable<Drain<'a, (SeqSlot, ExtraOutputs)>>,
}

impl<'a> Results<'a> {
    fn new(output: &'a mut StepOutput) -> Self {
        Self {
            sampled: output.sampled.iter(),
            candidates: output.beam_candidates.drain(..),
            extra_outputs: output.extra_outputs.drain(..).peekable(),
        }
    }

    /// What was chosen for the next sequence, if it samples.
    fn next(&mut self, planned: &PlannedSequence) -> Option<Sampled> {
        if !planned.samples {
            return None;
        }
        let (slot, result) = self.sampled.next().expect("a result for each that samples");
        assert_eq!(*slot, planned.slot, "results are in the step's order");
        Some(*result)
    }

    /// What was chosen behind its drafts that were accepted.
    fn accepted(&mut self, planned: &PlannedSequence) -> &'a [(SeqSlot, Sampled)] {
        if planned.num_drafts == 0 {
            return &[];
        }
        let results = self.sampled.as_slice();
        let is_own = |(slot, _): &&(SeqSlot, Sampled)| *slot == planned.slot;
        let num_accepted = results.iter().take_while(is_own).count();
        let (accepted, rest) = results.split_at(num_accepted);
        self.sampled = rest.iter();
        accepted
    }

    /// What could follow a beam.
    fn candidates(&mut self, result: Option<Sampled>) -> Option<BeamCandidates> {
        match result {
            Some(Sampled::Candidates) => self.candidates.next(),
            _ => None,
        }
    }

    /// The next extra outputs, if they are of the sequence in `slot`.
    fn extra_outputs(&mut self, slot: SeqSlot) -> Option<Box<ExtraOutputs>> {
        let extra_outputs = self.extra_outputs.next_if(|(owner, _)| *owner == slot);
        extra_outputs.map(|(_, extra_outputs)| Box::new(extra_outputs))
    }

    fn check_end(mut self) {
        assert!(
            self.sampled.next().is_none(),
            "no result for one that does not sample"
        );
        assert!(
            self.extra_outputs.next().is_none(),
            "extra outputs are in the step's order"
        );
    }
}

/// Keys and values of what has failed may be no numbers: nobody else is to have them.
pub(super) fn has_failed(result: Option<Sampled>) -> bool {
    matches!(result, Some(Sampled::Failed(_)))
}

/// Gives a sequence the token that was chosen for it, and says whether it ends with that.
#[inline(always)]
fn choose(
    sequence: &mut Sequence,
    result: Sampled,
    events: &mut Vec<Event>,
) -> Option<FinishReason> {
    match result {
        Sampled::Token(token) => {
            events.push(Event::Token(sequence.id, token));
            sequence.push(token)
        }
        Sampled::Failed(error) => Some(FinishReason::of(error)),
        Sampled::Candidates => unreachable!("only a beam has candidates"),
    }
}

/// Takes in the candidates of a sequence's next beam. Returns why the search is over, if it is.
fn take_candidates(
    sequence: &mut Sequence,
    result: Sampled,
    candidates: Option<BeamCandidates>,
    kv: &mut KvCacheManager,
    events: &mut Vec<Event>,
) -> Option<FinishReason> {
    let ended = sequence.take_candidates(result, candidates, kv);
    if ended.is_none() {
        events.extend(sequence.beam_news());
    }
    ended
}

/// Says that a sequence has ended, and what it has found.
fn tell_end(sequence: &mut Sequence, reason: FinishReason, events: &mut Vec<Event>) {
    let beams = sequence.details.beams.as_mut();
    let found = beams.map(|beams| std::mem::take(&mut beams.found));
    if let Some(found) = found.filter(|found| !found.is_empty()) {
        events.push(Event::Hypotheses(sequence.id, found));
    }
    events.push(Event::Finished(sequence.id, reason));
}
