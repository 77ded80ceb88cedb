//! Sampling: from rows of logits in host memory to the results of a step.
//!
//! It knows nothing of the device that has computed the logits, and it defines what is sampled: a device
//! that samples some rows by itself chooses the same tokens, and these rows are not sampled here.
//!
//! ```text
//! begin       masks of guides are requested, to be computed on threads of their own
//! (the forward pass)
//! sample      a sequence whose mask is not ready has missed its token, and is computed again;
//!             logits processors prepare all their rows; then each sequence's rows are sampled by one thread,
//!             one after the other, as a draft's row counts only if the row before has chosen the draft
//! ```

use super::guide_threads::{GuideThreads, MaskRequest};
use super::limits::RunnerLimits;
use super::sampling_worker::{Row, SamplingWorker};
use super::step_layout::{ContextRows, StepLayout};
use inflight_device::{DeviceSample, StepResults};
use inflight_engine::{
    BeamCandidates, ExtraOutputs, PlannedSequence, Sampled, StepOutput, StepPlan,
};
use inflight_sampling::prepare_batches;
use inflight_threads::Pool;

/// Samples the tokens of a step, and collects its extra outputs.
pub(super) struct StepSampling {
    vocab_size: usize,
    /// One per thread.
    workers: Vec<SamplingWorker>,
    guide_threads: GuideThreads,
    /// Whether all masks are waited for, because no thread computes them.
    waits_for_guides: bool,
    /// What was chosen from each row; `None` after a rejected draft.
    chosen: Vec<Option<Sampled>>,
    /// Extra outputs, each with the index of its sequence. Empty between steps.
    extra_outputs: Vec<(usize, ExtraOutputs)>,
    /// The candidates of beams, each with its row of logits. Empty between steps.
    candidates: Vec<(usize, BeamCandidates)>,
}

impl StepSampling {
    /// Sampling on `num_threads` threads.
    pub fn new(vocab_size: usize, limits: &RunnerLimits, num_threads: usize) -> Self {
        let max_rows = limits.max_sampled_rows.index();
        Self {
            vocab_size,
            workers: (0..num_threads)
                .map(|_| SamplingWorker::new(vocab_size, max_rows))
                .collect(),
            guide_threads: GuideThreads::default(),
            waits_for_guides: false,
            chosen: Vec::with_capacity(max_rows),
            extra_outputs: Vec::new(),
            candidates: Vec::new(),
        }
    }

    /// Begins a step: requests the masks of guides, to be computed during the forward pass.
    pub fn begin(&mut self, plan: &StepPlan<'_>, layout: &StepLayout) {
        // A step that has failed may have left some.
        self.extra_outputs.clear();
        self.candidates.clear();
        let requested = self.guide_threads.request(mask_requests(plan, layout));
        if let Err(error) = requested {
            // They are computed when they are needed.
            log::warn!("no thread computes guides: {error}");
            self.waits_for_guides = true;
        }
    }

    /// What is made of context logits, `[num_rows, vocab_size]`.
    ///
    /// # Panics
    ///
    /// If they are not those of `context`, or `threads` is not the pool that this was made for.
    pub fn context_outputs(
        &mut self,
        threads: &mut Pool,
        context: &ContextRows,
        logits: Vec<f32>,
    ) -> ExtraOutputs {
        let mut prompt_log_probs = vec![None; context.next_tokens.len()];
        threads.for_each_row(
            &mut self.workers,
            &mut prompt_log_probs,
            1,
            |worker, row, out| {
                let logits = &logits[row * self.vocab_size..][..self.vocab_size];
                out[0] = Some(worker.log_probs(logits, context.next_tokens[row], context.num_top));
            },
        );
        ExtraOutputs {
            context_logits: match context.returns_logits {
                true => logits,
                false => Vec::new(),
            },
            prompt_log_probs: prompt_log_probs.into_iter().flatten().collect(),
            ..ExtraOutputs::default()
        }
    }

    /// Adds what was made of context logits of the sequence at `index` of the plan, behind those of the rows before.
    pub fn add_context_outputs(&mut self, index: usize, mut outputs: ExtraOutputs) {
        match self.extra_outputs.last_mut() {
            Some((last, before)) if *last == index => {
                before.context_logits.append(&mut outputs.context_logits);
                before
                    .prompt_log_probs
                    .append(&mut outputs.prompt_log_probs);
            }
            _ => self.extra_outputs.push((index, outputs)),
        }
    }

    /// Samples from the logits of `results`, `[num_sampled_rows, vocab_size]`, where the device has not, and appends
    /// the results of the step to `output`. Penalties, biases and guides change the logits in place.
    ///
    /// # Panics
    ///
    /// If the logits have another shape, or `threads` is not the pool that this was made for.
    pub fn sample(
        &mut self,
        threads: &mut Pool,
        plan: &StepPlan<'_>,
        layout: &StepLayout,
        results: StepResults<'_>,
        output: &mut StepOutput,
    ) {
        let StepResults { logits, samples } = results;
        assert_eq!(
            logits.len(),
            layout.num_sampled_rows() * self.vocab_size,
            "logits are [num_sampled_rows, vocab_size]"
        );
        if !self.waits_for_guides {
            let requests = mask_requests(plan, layout);
            let is_alone = requests.clone().count() == plan.sequences.len();
            self.guide_threads.wait(requests, is_alone);
        }
        self.prepare_processors(plan, layout, logits);
        self.sample_rows(threads, plan, layout, logits, samples);
        self.append_tokens(plan, layout, output);
        self.append_candidates(output);
        self.append_extra_outputs(plan, output);
    }

    /// Appends the results of a step whose logits are gone, because the next one has been computed: what the device has
    /// sampled.
    pub fn take_samples(
        &mut self,
        plan: &StepPlan<'_>,
        layout: &StepLayout,
        samples: &[DeviceSample],
        output: &mut StepOutput,
    ) {
        self.extra_outputs.clear();
        let groups = layout.sequences().iter().zip(layout.starts());
        let sampled = groups.enumerate().map(|(group, (&index, &start))| {
            let planned = &plan.sequences[index];
            let is_missed = layout.is_lost(group) || planned.num_drafts > 0;
            let sampled = match samples.get(start as usize) {
                Some(&DeviceSample::Sampled(sample)) if !is_missed => {
                    sample.map_or_else(Sampled::Failed, Sampled::Token)
                }
                _ => Sampled::Missed,
            };
            (planned.slot, sampled)
        });
        output.sampled.extend(sampled);
    }

    /// Shows logits processors that work on batches all of their rows, except those of beams, whose
    /// processors get log-probabilities instead of logits.
    fn prepare_processors(&self, plan: &StepPlan<'_>, layout: &StepLayout, logits: &[f32]) {
        let inputs = layout.sequences().iter().flat_map(|&index| {
            let planned = &plan.sequences[index];
            (0..=planned.num_drafts as usize).map(move |num| {
                let is_known = !planned.is_ahead;
                is_known.then(|| plan.sampling_input_after(index, num))
            })
        });
        let rows = logits.chunks_exact(self.vocab_size).zip(inputs);
        let rows = rows.filter_map(|(row, input)| Some((row, input?)));
        prepare_batches(rows.filter(|(_, input)| input.params.beam_search.is_none()));
    }

    fn sample_rows(
        &mut self,
        threads: &mut Pool,
        plan: &StepPlan<'_>,
        layout: &StepLayout,
        logits: &mut [f32],
        samples: &[DeviceSample],
    ) {
        let vocab_size = self.vocab_size;
        let waits = self.waits_for_guides;
        let (sequences, starts) = (layout.sequences(), layout.starts());
        let sample = |worker: &mut SamplingWorker, group: usize, logits: &mut [f32]| {
            let first_row = starts[group] as usize;
            let is_ahead = plan.sequences[sequences[group]].is_ahead;
            let rows = logits.chunks_exact_mut(vocab_size).enumerate();
            let rows = rows.map(|(row, logits)| match samples.get(first_row + row) {
                _ if layout.is_lost(group) => Row::Missed,
                Some(DeviceSample::Sampled(sample)) => Row::Sampled(*sample),
                _ if is_ahead => Row::Missed,
                Some(DeviceSample::Unclear) => Row::Changed(logits),
                Some(DeviceSample::Skipped) | None => Row::Logits(logits),
            });
            let index = sequences[group];
            let is_ready =
                |num_accepted| waits || is_ahead || is_guide_ready(plan, index, num_accepted);
            worker.sample(plan, index, first_row, rows, is_ready);
        };
        let is_sampled = |sample: &DeviceSample| matches!(sample, DeviceSample::Sampled(_));
        if !samples.is_empty() && samples.iter().all(is_sampled) {
            // Nothing that is worth waking a thread.
            for (group, &start) in starts.iter().enumerate() {
                let next = starts
                    .get(group + 1)
                    .map_or(samples.len(), |&it| it as usize);
                let logits = &mut logits[start as usize * vocab_size..next * vocab_size];
                sample(&mut self.workers[0], group, logits);
            }
        } else {
            threads.for_each_group(&mut self.workers, logits, vocab_size, starts, sample);
        }
        self.chosen.clear();
        self.chosen.resize(layout.num_sampled_rows(), None);
        for worker in &mut self.workers {
            for (row, sampled) in worker.chosen.drain(..) {
                self.chosen[row] = Some(sampled);
            }
            self.extra_outputs.append(&mut worker.extra_outputs);
            self.candidates.append(&mut worker.candidates);
        }
    }

    fn append_tokens(&self, plan: &StepPlan<'_>, layout: &StepLayout, output: &mut StepOutput) {
        for (&index, &start) in layout.sequences().iter().zip(layout.starts()) {
            let PlannedSequence {
                slot, num_drafts, ..
            } = plan.sequences[index];
            let rows = &self.chosen[start as usize..][..1 + num_drafts as usize];
            let chosen = rows.iter().map_while(|chosen| *chosen);
            output.sampled.extend(chosen.map(|sampled| (slot, sampled)));
        }
    }

    fn append_candidates(&mut self, output: &mut StepOutput) {
        self.candidates.sort_by_key(|(row, _)| *row);
        let candidates = self.candidates.drain(..).map(|(_, candidates)| candidates);
        output.beam_candidates.extend(candidates);
    }

    /// A sequence has either the outputs of its context and those of one token, in this order, which become one
    /// entry, or an entry for each of several tokens.
    fn append_extra_outputs(&mut self, plan: &StepPlan<'_>, output: &mut StepOutput) {
        self.extra_outputs.sort_by_key(|(index, _)| *index);
        let mut last = None;
        for (index, extra_outputs) in self.extra_outputs.drain(..) {
            let is_same = last == Some(index) && plan.sequences[index].num_drafts == 0;
            match output.extra_outputs.last_mut().filter(|_| is_same) {
                Some((_, of_context)) => {
                    of_context.log_probs = extra_outputs.log_probs;
                    of_context.generation_logits = extra_outputs.generation_logits;
                }
                None => {
                    let slot = plan.sequences[index].slot;
                    output.extra_outputs.push((slot, extra_outputs));
                }
            }
            last = Some(index);
        }
    }
}

/// What guides have to compute for a step: for each sequence that is about to sample, if its tokens are known.
fn mask_requests<'a>(
    plan: &'a StepPlan<'_>,
    layout: &'a StepLayout,
) -> impl Iterator<Item = MaskRequest<'a>> + Clone {
    let sequences = layout.sequences().iter();
    let known = sequences.filter(|&&index| !plan.sequences[index].is_ahead);
    known.filter_map(|&index| {
        let input = plan.sampling_input(index);
        Some(MaskRequest {
            guide: input.params.guide.as_ref()?,
            generated: input.generated(),
            drafts: plan.drafts(&plan.sequences[index]),
        })
    })
}

/// Whether it is known what may follow the sequence at `index` of the plan, with so many of its drafts.
fn is_guide_ready(plan: &StepPlan<'_>, index: usize, num_accepted: usize) -> bool {
    let input = plan.sampling_input_after(index, num_accepted);
    let guide = input.params.guide.as_ref();
    guide.is_none_or(|guide| guide.0.is_ready(input.generated()))
}

#[cfg(test)]
mod tests;
