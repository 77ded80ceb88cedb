//! Applies the results of a step.
//!
//! Nearly every sequence gets one token per step and nothing else, and takes the short path. The long path is for
//! beams, drafts, extra outputs, and sequences that were cancelled meanwhile, or have ended in the step before.

use std::iter::Peekable;
use std::slice;
use std::vec::Drain;

use crate::active::ActiveSequences;
use crate::plan::PlannedSequence;
use crate::recorder::Recorder;
use crate::sequence_tokens::SequenceTokens;
use crate::step::Step;
use crate::{BeamCandidates, Event, ExtraOutputs, Sampled, StepOutput};
use inflight_base::{SeqSlot, Tokens};
use inflight_sampling::FinishReason;

/// Applies the results of `step`, and ends finished sequences: at once, or in lockstep with their batch. Returns how
/// many sequences got a result.
///
/// # Panics
/// If `output` is not the step's.
pub(super) fn apply(
    step: &mut Step,
    output: &mut StepOutput,
    active: &mut ActiveSequences,
    recorder: &mut Recorder,
    is_lockstep: bool,
    events: &mut Vec<Event>,
) -> u64 {
    let mut results = Results::new(output);
    let mut num_generated = 0;
    let mut any_ended = false;
    for (planned, tokens) in step.drain() {
        let result = results.next(planned);
        let has_failed = Sampled::is_failure(result);
        num_generated += u64::from(planned.beam == 0 && Sampled::is_generated(result));
        let any_cancelled = active.any_cancelled();
        let sequence = active.get_mut(planned.slot);
        let ended = match sequence.filter(|(it, _)| it.is_plain() && !any_cancelled) {
            Some((sequence, kv)) => {
                sequence.land(tokens, Tokens(planned.kv_len), has_failed, kv);
                result.and_then(|result| sequence.take_result(result, events))
            }
            None => {
                let mut landing = Landing {
                    active: &mut *active,
                    recorder: &mut *recorder,
                    events: &mut *events,
                };
                landing.apply(planned, tokens, result, &mut results)
            }
        };
        if let Some(reason) = ended {
            let (sequence, _) = active.sequence_mut(planned.slot);
            if is_lockstep {
                sequence.end_in_batch(reason);
                continue;
            }
            recorder.count_ended(sequence);
            sequence.report_end(reason, events);
            active.end(planned.slot);
            any_ended = true;
        }
    }
    results.check_end();
    if any_ended {
        active.sweep();
    }
    num_generated
}

/// The long path.
struct Landing<'a> {
    active: &'a mut ActiveSequences,
    recorder: &'a mut Recorder,
    events: &'a mut Vec<Event>,
}

impl Landing<'_> {
    /// Applies the result of a sequence that is not plain, of one that may have been cancelled, or of a beam. Returns
    /// why the sequence has ended, if it has.
    // Kept out of the loop over all sequences.
    #[inline(never)]
    fn apply(
        &mut self,
        planned: &PlannedSequence,
        mut tokens: Option<Box<SequenceTokens>>,
        result: Option<Sampled>,
        results: &mut Results<'_>,
    ) -> Option<FinishReason> {
        let Self {
            active,
            recorder,
            events,
        } = self;
        let candidates = results.candidates(result);
        let kv_len = Tokens(planned.kv_len);
        if planned.beam > 0 {
            // If the sequence was cancelled, it has ended with its first beam.
            let (sequence, kv) = active.get_mut(planned.slot)?;
            let has_failed = Sampled::is_failure(result);
            let tokens = tokens.expect("beams are not planned ahead");
            sequence.land_beam(planned.beam, tokens, kv_len, has_failed, kv);
            return sequence.take_candidates(result?, candidates, kv, events);
        }
        let accepted = results.accepted(planned);
        if active.end_cancelled(planned.slot, &mut tokens) {
            while results.extra_outputs(planned.slot).is_some() {}
            return None;
        }
        let (sequence, kv) = active.sequence_mut(planned.slot);
        if planned.is_ahead && sequence.has_missed() {
            // Computed from a token that it does not have.
            sequence.come_back(tokens);
            return None;
        }
        let num_accepted = accepted.len();
        let num_rejected = planned.num_drafts - num_accepted as u32;
        let last = accepted.last().map_or(result, |(_, result)| Some(*result));
        let computed = kv_len - Tokens(num_rejected);
        sequence.land(tokens, computed, Sampled::is_failure(last), kv);
        if planned.num_drafts > 0 {
            sequence.drop_drafts(num_accepted);
            recorder.count_drafts(
                planned.num_drafts as usize,
                num_accepted,
                planned.drafts_made_from.is_some(),
            );
        }
        let report = |it| Event::ExtraOutputs(planned.id, it);
        if sequence.has_extra_outputs() {
            let mut extra_outputs = results.extra_outputs(planned.slot);
            sequence.add_counts(&mut extra_outputs);
            events.extend(extra_outputs.map(report));
        }
        let result = result?;
        if sequence.has_beams() {
            return sequence.take_candidates(result, candidates, kv, events);
        }
        if !Sampled::is_failure(Some(result)) {
            sequence.make_up();
        }
        let mut ended = sequence.take_result(result, events);
        for &(_, result) in accepted {
            let extra_outputs = results.extra_outputs(planned.slot);
            // Tokens behind the one that ends it do not count.
            if ended.is_none() {
                events.extend(extra_outputs.map(report));
                ended = sequence.take_result(result, events);
            }
        }
        ended
    }
}

/// The results that a runner has written, in the step's order.
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

    /// The result of the next sequence, if it samples.
    #[inline]
    fn next(&mut self, planned: &PlannedSequence) -> Option<Sampled> {
        if !planned.samples {
            return None;
        }
        let (slot, result) = self.sampled.next().expect("a result for each that samples");
        assert_eq!(*slot, planned.slot, "results are in the step's order");
        Some(*result)
    }

    /// The further results of a sequence: one for each draft that was accepted.
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

    /// The candidates of a beam.
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
            "no result for a sequence that does not sample"
        );
        assert!(
            self.extra_outputs.next().is_none(),
            "extra outputs are in the step's order"
        );
    }
}
