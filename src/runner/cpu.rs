//! The runner of a real model on CPU.
//!
//! ```text
//! rows of a step     c c c c C C C S | g S | S | S D D    C: context logits wanted, S: its token is sampled
//! states kept                C C C S     S   S   S D D    ascending, each once; C and S may be the same row
//! context logits             ------                       lm_head, straight into what is given back
//! logits                           S     S   S   S D D    lm_head, and then the sampler
//! ```
//!
//! D is a draft's row: a token is sampled from it if the draft is what the row before it has given. So a
//! sequence's rows are one thread's, one after the other.

use std::ops::Range;

use super::RunnerLimits;
use super::decoder::{Decoder, Rows};
use super::guide_thread::GuideThread;
use super::model_source::ModelSource;
use super::probe::{Operation, Probe, Work};
use super::spec::ModelSpec;
use crate::base::{BlockSize, LoadError, StepError};
use crate::device::cpu::{Cpu, CpuOptions, KvCache};
use crate::device::{KvDtype, KvLayout, KvSpan};
use crate::engine::{BeamCandidates, ExtraOutputs, PlannedSequence, Sampled, StepOutput, StepPlan};
use crate::sampling::{LogProbs, Sampler, prepare_batches};

/// A model on CPU: weights, KV cache, threads, and the buffers of its largest step.
///
/// What it computes for a sequence is bit for bit the same whatever else is in the step, however the
/// context was chunked, and on any number of threads.
pub struct CpuRunner<P = ()> {
    probe: P,
    cpu: Cpu,
    decoder: Decoder,
    cache: KvCache,
    limits: RunnerLimits,
    vocab_size: usize,
    /// `[max_sampled_rows, vocab_size]`.
    logits: Rows<f32>,
    /// One for each thread.
    choosers: Vec<Chooser>,
    guide_thread: GuideThread,
    spans: Vec<KvSpan>,
    /// Rows of the step whose states are kept.
    kept_rows: Vec<u32>,
    /// Of each sequence that samples: its place in the plan, and the first of its rows in `sampling_rows`.
    sampling: Vec<usize>,
    sampling_starts: Vec<u32>,
    /// The rows of last tokens and of drafts among those kept.
    sampling_rows: Vec<u32>,
    /// Of each sequence with context logits: its place in the plan, and their rows among those kept.
    contexts: Vec<(usize, Range<usize>)>,
    /// Of each of `sampling_rows`: what was chosen from it, `None` behind a draft that was wrong.
    chosen: Vec<Option<Sampled>>,
    /// Place in the plan, and its extra outputs; empty between runs.
    extra_outputs: Vec<(usize, ExtraOutputs)>,
    /// Row of the logits, and the candidates of a beam; empty between runs.
    candidates: Vec<(usize, BeamCandidates)>,
}

/// What one thread needs to choose tokens.
struct Chooser {
    sampler: Sampler,
    log_probs: LogProbs,
    /// Row of the logits, and what was chosen from it; of a sequence's rows the first ones.
    chosen: Vec<(usize, Sampled)>,
    /// Place in the plan, and its extra outputs; only of those that want any.
    extra_outputs: Vec<(usize, ExtraOutputs)>,
    /// Row of the logits, and the candidates of a beam.
    candidates: Vec<(usize, BeamCandidates)>,
}

impl CpuRunner {
    /// Loads a model's weights and reserves the KV pool. The source is not needed afterwards.
    ///
    /// # Errors
    /// A tensor that is missing, misshapen or not finite; limits that the model cannot keep; no
    /// memory, no threads.
    pub fn new(
        source: &ModelSource,
        limits: RunnerLimits,
        options: &CpuOptions,
    ) -> Result<Self, LoadError> {
        Self::with_probe(source, limits, options, ())
    }

    /// Bytes of the KV cache that one block takes, padding and scales included: what a pool is sized
    /// with.
    pub fn kv_bytes_per_block(spec: &ModelSpec, block_size: BlockSize, dtype: KvDtype) -> usize {
        KvCache::bytes_per_block(&kv_layout(spec, block_size, dtype), spec.num_layers)
    }
}

impl<P: Probe> CpuRunner<P> {
    /// The same, which tells `probe` what it does.
    ///
    /// # Errors
    /// As [`CpuRunner::new`].
    pub fn with_probe(
        source: &ModelSource,
        limits: RunnerLimits,
        options: &CpuOptions,
        probe: P,
    ) -> Result<Self, LoadError> {
        let spec = source.spec();
        check(spec, &limits)?;
        let mut cpu = Cpu::new(options)?;
        let max_num_requests = limits.max_num_requests as usize;
        let max_sampled_rows = limits.max_sampled_rows.index();
        Ok(Self {
            decoder: Decoder::new(source, &limits, &mut cpu)?,
            cache: kv_cache(spec, &limits)?,
            vocab_size: spec.vocab_size,
            logits: Rows::new(max_sampled_rows, spec.vocab_size)?,
            choosers: (0..cpu.num_threads())
                .map(|_| Chooser {
                    sampler: Sampler::new(spec.vocab_size),
                    log_probs: LogProbs::new(spec.vocab_size),
                    chosen: Vec::with_capacity(max_sampled_rows),
                    extra_outputs: Vec::new(),
                    candidates: Vec::new(),
                })
                .collect(),
            guide_thread: GuideThread::default(),
            spans: Vec::with_capacity(max_num_requests),
            kept_rows: Vec::with_capacity(max_sampled_rows),
            sampling: Vec::with_capacity(max_num_requests),
            sampling_starts: Vec::with_capacity(max_num_requests),
            sampling_rows: Vec::with_capacity(max_sampled_rows),
            chosen: Vec::with_capacity(max_sampled_rows),
            contexts: Vec::new(),
            extra_outputs: Vec::new(),
            candidates: Vec::new(),
            cpu,
            limits,
            probe,
        })
    }

    /// Whom it tells.
    pub fn probe_mut(&mut self) -> &mut P {
        &mut self.probe
    }

    /// Tokens are below it.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Computes a step, or a part of one, and appends what it samples to `output`. After the first steps it allocates nothing.
    ///
    /// # Errors
    /// A token id that is not in the vocabulary, in a request that nobody checked.
    ///
    /// # Panics
    /// If the plan exceeds the limits that the runner was made for, or names blocks that the pool
    /// does not have.
    pub fn run(&mut self, plan: StepPlan<'_>, output: &mut StepOutput) -> Result<(), StepError> {
        self.prepare(&plan)?;
        for copy in plan.copies {
            let num_positions = copy.num_positions as usize;
            self.cache
                .copy_positions(copy.source, copy.target, num_positions);
        }
        if plan.token_ids.is_empty() {
            return Ok(());
        }
        let inputs = self
            .sampling
            .iter()
            .map(|&index| plan.sampling_input(index));
        self.guide_thread.ask(inputs);
        let turn = self.cpu.turn();
        let batch = self.cache.batch(&self.spans, plan.block_tables);
        self.probe.ended(Operation::Plan, Work::default);
        self.decoder.forward(
            &mut self.cpu,
            &mut self.cache,
            &batch,
            plan.token_ids,
            &self.kept_rows,
            &mut self.probe,
        );
        self.gather_contexts();
        let num_sampling = self.sampling_rows.len();
        let logits = self.logits.first_mut(num_sampling);
        self.decoder
            .logits(&mut self.cpu, 0..num_sampling, logits, &mut self.probe);
        // What comes may wait for guides, and for what the user's logits processors do.
        drop(turn);
        self.guide_thread.stop_asking();
        self.prepare_batches(&plan);
        self.sample(&plan, output);
        let vocab_size = self.vocab_size;
        self.probe.ended(Operation::Sampling, || {
            Work::elements(num_sampling, vocab_size, 4, 0)
        });
        Ok(())
    }

    /// The logits that the last run's tokens were chosen from, `[num_sampled, vocab_size]`, in the
    /// order of its output, and those of the rest of a sequence's drafts behind its own. Penalties and
    /// biases of the request are in them where a token was chosen, temperature is not.
    pub fn logits(&self) -> &[f32] {
        self.logits.first(self.sampling_rows.len())
    }

    /// Checks the plan, and turns it into what the device understands.
    fn prepare(&mut self, plan: &StepPlan<'_>) -> Result<(), StepError> {
        assert!(plan.token_ids.len() <= self.limits.max_num_tokens.index());
        assert!(plan.sequences.len() <= self.limits.max_num_requests as usize);
        assert_eq!(plan.block_size, self.limits.block_size);
        let vocab_size = self.vocab_size;
        if let Some(id) = plan.token_ids.iter().find(|&&id| id as usize >= vocab_size) {
            let reason = format!("token id {id} is not below the vocabulary size {vocab_size}");
            return Err(StepError(reason));
        }
        self.spans.clear();
        self.kept_rows.clear();
        self.contexts.clear();
        self.sampling.clear();
        self.sampling_starts.clear();
        self.sampling_rows.clear();
        for (index, sequence) in plan.sequences.iter().enumerate() {
            self.spans.push(KvSpan {
                tokens: sequence.tokens.clone(),
                kv_len: sequence.kv_len,
                block_table: sequence.block_table.clone(),
            });
            let context_logits = plan.context_logits(index);
            if !context_logits.is_empty() {
                let start = self.kept_rows.len();
                self.kept_rows.extend(context_logits);
                self.contexts.push((index, start..self.kept_rows.len()));
            }
            if sequence.samples {
                self.sampling.push(index);
                self.sampling_starts.push(self.sampling_rows.len() as u32);
                let end = sequence.tokens.end;
                for row in end - 1 - sequence.num_drafts..end {
                    if self.kept_rows.last() != Some(&row) {
                        self.kept_rows.push(row);
                    }
                    self.sampling_rows.push(self.kept_rows.len() as u32 - 1);
                }
            }
        }
        Ok(())
    }

    /// Computes the logits of contexts into memory that is given away, and leaves only the states of the
    /// rows that are sampled from.
    fn gather_contexts(&mut self) {
        if self.contexts.is_empty() {
            return;
        }
        for (index, rows) in self.contexts.drain(..) {
            let mut context_logits = vec![0.0; rows.len() * self.vocab_size];
            self.decoder
                .logits(&mut self.cpu, rows, &mut context_logits, &mut self.probe);
            let extra_outputs = ExtraOutputs {
                context_logits,
                ..ExtraOutputs::default()
            };
            self.extra_outputs.push((index, extra_outputs));
        }
        self.decoder.keep(&self.sampling_rows);
    }

    /// Lets the logits processors that work on batches see all of their rows, but those of beams: what they
    /// process is not the logits.
    fn prepare_batches(&self, plan: &StepPlan<'_>) {
        let inputs = self.sampling.iter().flat_map(|&index| {
            let num_drafts = plan.sequences[index].num_drafts as usize;
            (0..=num_drafts).map(move |num| plan.sampling_input_after(index, num))
        });
        let logits = self.logits.first(self.sampling_rows.len());
        let rows = logits.chunks_exact(self.vocab_size).zip(inputs);
        prepare_batches(rows.filter(|(_, input)| input.params.beam_search.is_none()));
    }

    /// Chooses tokens from the rows of the logits, the sequences spread over the threads.
    fn sample(&mut self, plan: &StepPlan<'_>, output: &mut StepOutput) {
        let (sampling, starts) = (&self.sampling, &self.sampling_starts);
        self.cpu.pool().for_each_group(
            &mut self.choosers,
            self.logits.first_mut(self.sampling_rows.len()),
            self.vocab_size,
            starts,
            |chooser, group, logits| {
                let rows = logits.chunks_exact_mut(self.vocab_size);
                chooser.choose(plan, sampling[group], starts[group] as usize, rows);
            },
        );
        self.chosen.clear();
        self.chosen.resize(self.sampling_rows.len(), None);
        for chooser in &mut self.choosers {
            for (row, sampled) in chooser.chosen.drain(..) {
                self.chosen[row] = Some(sampled);
            }
            self.extra_outputs.append(&mut chooser.extra_outputs);
            self.candidates.append(&mut chooser.candidates);
        }
        for (&index, &start) in sampling.iter().zip(starts) {
            let PlannedSequence {
                slot, num_drafts, ..
            } = plan.sequences[index];
            let rows = &self.chosen[start as usize..][..1 + num_drafts as usize];
            let chosen = rows.iter().map_while(|chosen| *chosen);
            output.sampled.extend(chosen.map(|sampled| (slot, sampled)));
        }
        self.candidates.sort_by_key(|(row, _)| *row);
        let candidates = self.candidates.drain(..).map(|(_, candidates)| candidates);
        output.beam_candidates.extend(candidates);
        // Of one sequence there are at most a context and a token, in this order, or several tokens.
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

impl Chooser {
    /// Chooses the next tokens of the sequence at `index`, whose rows begin with `first_row`: one from each
    /// of `rows`, until one is not the draft that the next row comes after.
    fn choose<'a>(
        &mut self,
        plan: &StepPlan<'_>,
        index: usize,
        first_row: usize,
        rows: impl Iterator<Item = &'a mut [f32]>,
    ) {
        if let Some(num_candidates) = plan.num_candidates(index) {
            for logits in rows {
                let sampled = self.name(plan, index, first_row, logits, num_candidates);
                self.chosen.push((first_row, sampled));
            }
            return;
        }
        let drafts = plan.drafts(&plan.sequences[index]);
        for (num_accepted, logits) in rows.enumerate() {
            let sampled = self.choose_one(plan, index, num_accepted, logits);
            self.chosen.push((first_row + num_accepted, sampled));
            let draft = drafts.get(num_accepted).copied();
            if draft.is_none_or(|draft| sampled != Sampled::Token(draft)) {
                return;
            }
        }
    }

    /// Chooses the token that follows `num_accepted` drafts.
    fn choose_one(
        &mut self,
        plan: &StepPlan<'_>,
        index: usize,
        num_accepted: usize,
        logits: &mut [f32],
    ) -> Sampled {
        let outputs = plan.outputs(index);
        if outputs.is_any_per_token() {
            self.log_probs.keep(logits);
        }
        let input = plan.sampling_input_after(index, num_accepted);
        let token = match self.sampler.sample(logits, input) {
            Ok(token) => token,
            Err(error) => return Sampled::Failed(error),
        };
        if outputs.is_any_per_token() {
            let log_probs = &mut self.log_probs;
            let extra_outputs = ExtraOutputs {
                log_probs: outputs
                    .log_probs
                    .map(|num_top| log_probs.of(token, num_top)),
                generation_logits: match outputs.generation_logits {
                    true => log_probs.take(),
                    false => Vec::new(),
                },
                ..ExtraOutputs::default()
            };
            self.extra_outputs.push((index, extra_outputs));
        }
        Sampled::Token(token)
    }

    /// Names what could follow the beam at `index`, whose logits are in `row`.
    fn name(
        &mut self,
        plan: &StepPlan<'_>,
        index: usize,
        row: usize,
        logits: &mut [f32],
        num_candidates: usize,
    ) -> Sampled {
        let outputs = plan.outputs(index);
        if outputs.is_any_per_token() {
            self.log_probs.keep(logits);
        }
        let input = plan.sampling_input(index);
        let candidates = match self.sampler.candidates(logits, input, num_candidates) {
            Ok(candidates) => candidates,
            Err(error) => return Sampled::Failed(error),
        };
        let mut candidates = BeamCandidates {
            candidates,
            ..BeamCandidates::default()
        };
        if let Some(num_top) = outputs.log_probs {
            let tokens = candidates.candidates.iter().map(|it| it.token);
            candidates.log_probs = self.log_probs.of_each(tokens, num_top);
        }
        if outputs.generation_logits {
            candidates.generation_logits = self.log_probs.take();
        }
        self.candidates.push((row, candidates));
        Sampled::Candidates
    }
}

fn kv_cache(spec: &ModelSpec, limits: &RunnerLimits) -> Result<KvCache, LoadError> {
    let layout = kv_layout(spec, limits.block_size, limits.kv_dtype);
    KvCache::new(layout, spec.num_layers, limits.num_blocks.index()).map_err(|error| {
        LoadError::Resource(format!(
            "{error}, for a KV cache of {} blocks of {} tokens; lower max_tokens_in_paged_kv_cache or \
             kv_cache_free_gpu_mem_fraction, or max_num_requests or max_seq_len with a contiguous cache",
            limits.num_blocks,
            limits.block_size.tokens()
        ))
    })
}

fn kv_layout(spec: &ModelSpec, block_size: BlockSize, dtype: KvDtype) -> KvLayout {
    KvLayout {
        num_kv_heads: spec.num_kv_heads,
        head_dim: spec.head_dim,
        block_size,
        dtype,
    }
}

/// Refuses limits that the model cannot keep.
fn check(spec: &ModelSpec, limits: &RunnerLimits) -> Result<(), LoadError> {
    let max_seq_len = spec.max_seq_len();
    if limits.max_seq_len.index() > max_seq_len {
        return Err(LoadError::Config {
            problem: format!(
                "max_seq_len {} is above {max_seq_len}, the model's max_position_embeddings",
                limits.max_seq_len
            ),
            remedy: format!("set it to at most {max_seq_len}"),
        });
    }
    let num_windows = limits.attention.windows.len();
    if num_windows > spec.num_layers {
        return Err(LoadError::Config {
            problem: format!(
                "max_attention_window_size has {num_windows} windows for {} layers",
                spec.num_layers
            ),
            remedy: "write one for each layer, or a shorter list, which is repeated".to_owned(),
        });
    }
    Ok(())
}
