//! A pass: what is computed of a step, from its beginning to its end on the device.
//!
//! ```text
//! a step of a plan        forward pass, logits of contexts, logits of sampled rows
//! the share of a rank     such a pass over its part; without the output layer it ends with the rows for the next stage
//! a pooling model         forward pass; its states are read afterwards
//! drafts, first steps     forward pass, logits of sampled rows
//! ```

use std::ops::Range;

use super::decoder::Decoder;
use super::probe::{Operation, Probe, Work};
use super::step_layout::run_of;
use inflight_device::{Device, RankHost, StepInputs};

/// What a pass runs on.
pub(super) struct PassOn<'r, D: Device, P> {
    pub(super) device: &'r mut D,
    pub(super) host: &'r mut RankHost,
    pub(super) decoder: &'r mut Decoder<D>,
    pub(super) cache: &'r mut D::KvCache,
    /// `[max_sampled_rows, vocab_size]`, of the sampled rows afterwards.
    pub(super) logits: &'r mut D::Logits,
    pub(super) probe: &'r mut P,
}

/// Kept rows whose logits are wanted in memory of the host, `num_rows * vocab_size` in all on a rank that gets them.
pub(super) struct ContextLogits<C, T> {
    /// The rows of each context.
    pub(super) rows: C,
    /// The size of the vocabulary; 0 on a rank that does not get them.
    pub(super) width: usize,
    /// Takes the logits of each context, with its index.
    pub(super) take: T,
}

impl<D: Device, P: Probe> PassOn<'_, D, P> {
    /// Computes a step. Where the output layer is, `contexts` takes the logits of contexts, and the device samples from
    /// the logits of the sampled rows.
    pub(super) fn compute(
        self,
        inputs: StepInputs<'_>,
        contexts: ContextLogits<
            impl IntoIterator<Item = Range<usize>>,
            impl FnMut(&mut D, &mut RankHost, usize, Vec<f32>),
        >,
    ) {
        let Self {
            device,
            host,
            decoder,
            cache,
            logits,
            probe,
        } = self;
        let is_repeated = decoder.begin_states(device, inputs);
        let inputs = StepInputs {
            is_repeated: &is_repeated,
            ..inputs
        };
        host.begin_step(&inputs);
        let step = device.begin_step(cache, inputs);
        probe.ended(Operation::Plan, Work::default);
        decoder.forward(device, host, cache, &step, inputs, probe);
        if decoder.has_logits() {
            let ContextLogits {
                rows,
                width,
                mut take,
            } = contexts;
            let mut num_contexts = 0;
            for rows in rows {
                let mut own = vec![0.0; rows.len() * width];
                let adapter = run_of(inputs.kept_adapters, &rows);
                decoder.context_logits(device, host, rows, adapter, &mut own, probe);
                take(device, host, num_contexts, own);
                num_contexts += 1;
            }
            if num_contexts > 0 {
                decoder.keep_sampled_rows(device, &step);
            }
            let num_rows = inputs.sampled_rows.len();
            let sampled = (inputs.sampled_adapters, inputs.greedy_rows);
            decoder.logits(device, host, num_rows, sampled, logits, probe);
            device.sample(&step, logits);
        }
        device.end_step(step);
        decoder.end_step(device, host);
        decoder.end_states(is_repeated);
    }

    /// Computes a step without contexts.
    pub(super) fn compute_rows(self, inputs: StepInputs<'_>) {
        let none = ContextLogits {
            rows: [],
            width: 0,
            take: |_: &mut D, _: &mut RankHost, _, _| {},
        };
        self.compute(inputs, none);
    }
}
