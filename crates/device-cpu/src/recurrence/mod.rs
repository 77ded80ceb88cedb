//! Layers with recurrent states on CPU: see [`RecurrenceShape`].
//!
//! A task has some channels or a head of one sequence, and computes its tokens one after the other, so that a token's
//! bits depend on nothing but its sequence.

mod columns;
mod convolution;
mod delta;
mod scan;
mod space;

use std::ops::Range;

use half::bf16;
use half::slice::HalfFloatSliceExt;

use super::lines::Lines;
use super::math::{exp, from_bf16_bits, to_bf16_bits};
use super::rows::Rows;
use super::simd::for_each_simd;
use super::step::CpuStep;
use super::{Cpu, Simd};
use inflight_base::LoadError;
use inflight_device::{
    GateFunction, RecurrenceParams, RecurrenceShape, RecurrentOps, RecurrentRule, SavedState,
};
use inflight_threads::DisjointSlice;

/// The states of all slots.
pub struct CpuRecurrentStates {
    /// `[num_slots, state_len]` of each layer.
    layers: Vec<Lines<f32>>,
    num_slots: usize,
    /// The slots of the step.
    is_taken: Vec<bool>,
}

/// Copies of the states of slots, `[num_slots, state_len]` of each layer. Physical memory is taken when one is first
/// written.
pub struct CpuHostStates {
    layers: Vec<Lines<f32>>,
    num_slots: usize,
}

/// Scratch memory of one thread.
#[derive(Default)]
pub(super) struct RecurrenceScratch {
    values: Vec<f32>,
}

/// The operands of all tasks of a step.
struct Tasks<'a> {
    step: &'a CpuStep<'a>,
    simd: Simd,
    shape: &'a RecurrenceShape,
    /// `[num_tokens, input_len]`.
    x: DisjointSlice<f32>,
    /// `[kernel_len, num_channels]`.
    kernel: &'a [f32],
    /// `[num_channels]`, or empty.
    bias: &'a [f32],
    /// `[num_slots, state_len]`.
    states: DisjointSlice<f32>,
    /// `[num_tokens, out_len]`.
    out: DisjointSlice<u16>,
}

/// One sequence of a step.
#[derive(Clone)]
struct SpanState {
    tokens: Range<usize>,
    /// The first element of its state.
    state: usize,
    /// Whether its tokens are the first ones.
    begins: bool,
    /// Whether its only token is computed again, and changes no state.
    is_repeated: bool,
}

impl<'a> Tasks<'a> {
    /// Checks the operands of a layer.
    fn new(
        simd: Simd,
        step: &'a CpuStep<'a>,
        params: &RecurrenceParams<'a, Cpu>,
        x: &'a mut Rows<f32>,
        states: &'a mut CpuRecurrentStates,
        out: &'a mut Rows<bf16>,
    ) -> Self {
        let (shape, weights) = (params.shape, params.weights);
        let num_tokens = step.batch.num_tokens();
        assert_eq!(x.width(), shape.input_len(), "x is [m, input_len]");
        let num_channels = shape.num_channels();
        let kernel_len = shape.kernel_len * num_channels;
        assert_eq!(weights.convolution.len(), kernel_len, "convolution's shape");
        states.take(
            step.state_slots,
            step.batch.spans().len(),
            step.saved_states,
        );
        assert_eq!(step.is_repeated.len(), step.state_slots.len());
        let bias = weights.convolution_bias.as_deref().unwrap_or_default();
        assert!(
            bias.is_empty() || bias.len() == num_channels,
            "bias's shape"
        );
        Tasks {
            step,
            simd,
            shape,
            x: DisjointSlice::new(x.first_mut(num_tokens)),
            kernel: &weights.convolution,
            bias,
            states: DisjointSlice::new(&mut states.layers[params.layer]),
            out: DisjointSlice::new(out.first_mut(num_tokens).reinterpret_cast_mut()),
        }
    }

    fn num_spans(&self) -> usize {
        self.step.batch.spans().len()
    }

    fn span(&self, index: usize) -> SpanState {
        let span = &self.step.batch.spans()[index];
        SpanState {
            tokens: span.tokens.start as usize..span.tokens.end as usize,
            state: self.step.state_slots[index] as usize * self.shape.state_len(),
            begins: span.tokens.len() == span.kv_len as usize,
            is_repeated: self.step.is_repeated[index],
        }
    }

    /// The states of some heads of a sequence, which begins with zeros.
    ///
    /// # Safety
    ///
    /// No other task has these heads of the sequence.
    #[allow(clippy::mut_from_ref, reason = "the caller promises disjoint heads")]
    unsafe fn heads(&self, span: &SpanState, heads: Range<usize>, matrix_len: usize) -> &mut [f32] {
        let start = span.state + self.shape.convolution_len() + heads.start * matrix_len;
        // SAFETY: sequences have slots of their own, and the caller has these heads alone.
        let states = unsafe { self.states.slice(start, heads.len() * matrix_len) };
        if span.begins {
            states.fill(0.0);
        }
        states
    }

    /// The first elements of the slots that the state of the sequence behind `token` is copied to.
    fn saved_to(&self, token: usize) -> impl Iterator<Item = usize> {
        let saved = self.step.saved_states;
        let first = saved.partition_point(|saved| (saved.token as usize) < token);
        let saved = saved[first..].iter();
        let saved = saved.take_while(move |saved| saved.token as usize == token);
        saved.map(|saved| saved.slot as usize * self.shape.state_len())
    }

    /// Copies the states of some heads of a sequence behind `token`, if they are saved.
    ///
    /// # Safety
    ///
    /// No other task has these heads of the sequence.
    unsafe fn save_heads(
        &self,
        token: usize,
        heads: Range<usize>,
        matrix_len: usize,
        state: &[f32],
    ) {
        for slot in self.saved_to(token) {
            let start = slot + self.shape.convolution_len() + heads.start * matrix_len;
            // SAFETY: a slot takes the state behind one token, and the caller has these heads alone.
            unsafe { self.states.slice(start, state.len()) }.copy_from_slice(state);
        }
    }
}

impl RecurrentOps for Cpu {
    type RecurrentStates = CpuRecurrentStates;
    type HostStates = CpuHostStates;

    fn alloc_recurrent_states(
        &mut self,
        layers: &[RecurrenceShape],
        num_slots: usize,
    ) -> Result<CpuRecurrentStates, LoadError> {
        let alloc = |shape: &RecurrenceShape| {
            let len = shape.state_len().checked_mul(num_slots);
            let mut states: Lines<f32> = len.and_then(Lines::zeroed).ok_or_else(|| {
                LoadError::Resource(format!(
                    "no memory for {num_slots} recurrent states of {} x 4 bytes a layer; lower max_num_requests, \
                     max_batch_size, max_state_snapshots or max_draft_tokens",
                    shape.state_len()
                ))
            })?;
            // The memory is taken now, and not by the first requests. Nothing reads these numbers.
            states.fill(f32::NAN);
            Ok(states)
        };
        Ok(CpuRecurrentStates {
            layers: layers.iter().map(alloc).collect::<Result<_, LoadError>>()?,
            num_slots,
            is_taken: vec![false; num_slots],
        })
    }

    fn copy_recurrent_states(&mut self, states: &mut CpuRecurrentStates, from: u32, to: u32) {
        let num_slots = states.num_slots;
        let (from, to) = (from as usize, to as usize);
        assert!(
            from < num_slots && to < num_slots && from != to,
            "slots {from} and {to} of {num_slots}"
        );
        let Self { pool, workers, .. } = self;
        let num_layers = states.layers.len();
        let layers = DisjointSlice::new(&mut states.layers);
        pool.for_each(workers, num_layers, |_, layer| {
            // SAFETY: a layer is of one task.
            let states = &mut unsafe { layers.slice(layer, 1) }[0];
            let len = states.len() / num_slots;
            states.copy_within(from * len..(from + 1) * len, to * len);
        });
    }

    fn alloc_host_states(
        &mut self,
        states: &CpuRecurrentStates,
        num_slots: usize,
    ) -> Result<CpuHostStates, LoadError> {
        let alloc = |layer: &Lines<f32>| {
            let state_len = layer.len() / states.num_slots;
            let len = state_len.checked_mul(num_slots);
            len.and_then(Lines::zeroed).ok_or_else(|| {
                LoadError::Resource(format!(
                    "no memory for {num_slots} recurrent states of {state_len} x 4 bytes a layer; lower \
                     kv_cache_host_memory_bytes"
                ))
            })
        };
        Ok(CpuHostStates {
            layers: states.layers.iter().map(alloc).collect::<Result<_, _>>()?,
            num_slots,
        })
    }

    fn offload_states(
        &mut self,
        states: &CpuRecurrentStates,
        source: u32,
        host: &mut CpuHostStates,
        target: u32,
    ) {
        let (from, to) = ((source, states.num_slots), (target, host.num_slots));
        self.copy_slot(&states.layers, from, &mut host.layers, to);
    }

    fn onboard_states(
        &mut self,
        host: &CpuHostStates,
        source: u32,
        states: &mut CpuRecurrentStates,
        target: u32,
    ) {
        let (from, to) = ((source, host.num_slots), (target, states.num_slots));
        self.copy_slot(&host.layers, from, &mut states.layers, to);
    }

    fn convolve(
        &mut self,
        step: &CpuStep<'_>,
        params: RecurrenceParams<'_, Self>,
        x: &mut Rows<f32>,
        states: &mut CpuRecurrentStates,
        out: &mut Rows<bf16>,
    ) {
        let width = params.shape.num_channels();
        assert_eq!(out.width(), width, "out is [m, num_channels]");
        let tasks = Tasks::new(self.simd, step, &params, x, states, out);
        self.convolve_channels(&tasks);
        self.round_channels(&tasks);
    }

    fn mix_recurrence(
        &mut self,
        step: &CpuStep<'_>,
        params: RecurrenceParams<'_, Self>,
        x: &mut Rows<f32>,
        states: &mut CpuRecurrentStates,
        out: &mut Rows<bf16>,
    ) {
        let (shape, weights) = (params.shape, params.weights);
        assert_eq!(out.width(), shape.out_len(), "out is [m, out_len]");
        let tasks = Tasks::new(self.simd, step, &params, x, states, out);
        match (&shape.rule, &weights.rule) {
            (RecurrentRule::GatedConvolution { .. }, _) => self.mix_convolution(&tasks),
            (RecurrentRule::GatedDelta(shape), Some(weights)) => {
                self.convolve_channels(&tasks);
                self.mix_delta(&tasks, shape, weights, params.late);
            }
            (RecurrentRule::StateSpace(shape), Some(weights)) => {
                self.scale_inputs(&tasks, shape);
                self.convolve_channels(&tasks);
                self.mix_space(&tasks, shape, weights);
            }
            (RecurrentRule::SelectiveScan(shape), Some(weights)) => {
                self.mix_scan(&tasks, shape, weights, params.late);
            }
            (
                RecurrentRule::GatedDelta(_)
                | RecurrentRule::StateSpace(_)
                | RecurrentRule::SelectiveScan(_),
                None,
            ) => panic!("the rule's weights"),
        }
    }

    fn gate_attention(
        &mut self,
        num_rows: usize,
        function: GateFunction,
        gates: &Rows<f32>,
        attended: &mut Rows<bf16>,
    ) {
        let (num_gates, width) = (gates.width(), attended.width());
        assert!(
            width.is_multiple_of(num_gates),
            "a gate for each run of elements"
        );
        let run_len = width / num_gates;
        let (simd, gates) = (self.simd, gates.first(num_rows));
        let attended = attended.first_mut(num_rows).reinterpret_cast_mut();
        self.for_each_row_block(num_rows, width, attended, |first, attended| {
            let gates = &gates[first * num_gates..][..attended.len() / run_len];
            match (function, run_len) {
                (GateFunction::Sigmoid, 1) => {
                    for_each_simd!(simd, gate, (gates: &[f32], attended: &mut [u16]));
                }
                (GateFunction::Sigmoid, _) => gate_runs(sigmoid, gates, attended, run_len),
                (GateFunction::Softplus, _) => gate_runs(softplus, gates, attended, run_len),
            }
        });
    }
}

impl Cpu {
    /// Copies one slot of every layer to another slot. Each task copies the slot of one layer.
    fn copy_slot(
        &mut self,
        sources: &[Lines<f32>],
        (source, num_sources): (u32, usize),
        targets: &mut [Lines<f32>],
        (target, num_targets): (u32, usize),
    ) {
        let (source, target) = (source as usize, target as usize);
        assert!(
            source < num_sources && target < num_targets,
            "slots {source} of {num_sources} and {target} of {num_targets}"
        );
        let Self { pool, workers, .. } = self;
        let targets = DisjointSlice::new(targets);
        pool.for_each(workers, sources.len(), |_, layer| {
            let states = &sources[layer];
            let len = states.len() / num_sources;
            // SAFETY: a layer is of one task.
            let copies = &mut unsafe { targets.slice(layer, 1) }[0];
            copies[target * len..][..len].copy_from_slice(&states[source * len..][..len]);
        });
    }
}

impl CpuRecurrentStates {
    /// Checks that each sequence has a slot of its own, as each state that is saved.
    fn take(&mut self, slots: &[u32], num_spans: usize, saved: &[SavedState]) {
        assert_eq!(slots.len(), num_spans, "a slot for each sequence");
        assert!(
            saved.is_sorted_by_key(|saved| saved.token),
            "saved states are in order of their tokens"
        );
        self.is_taken.fill(false);
        let saved = saved.iter().map(|saved| saved.slot);
        for slot in slots.iter().copied().chain(saved) {
            let slot = slot as usize;
            assert!(slot < self.num_slots, "slot {slot} of {}", self.num_slots);
            assert!(
                !std::mem::replace(&mut self.is_taken[slot], true),
                "slot {slot} has two states"
            );
        }
    }
}

#[inline(always)]
fn gate(gates: &[f32], attended: &mut [u16]) {
    for (attended, gate) in attended.iter_mut().zip(gates) {
        *attended = to_bf16_bits(from_bf16_bits(*attended) * sigmoid(*gate));
    }
}

fn gate_runs(function: fn(f32) -> f32, gates: &[f32], attended: &mut [u16], run_len: usize) {
    for (attended, gate) in attended.chunks_exact_mut(run_len).zip(gates) {
        let factor = function(*gate);
        for attended in attended {
            *attended = to_bf16_bits(from_bf16_bits(*attended) * factor);
        }
    }
}

#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `ln(1 + e^x)`.
#[inline(always)]
fn softplus(x: f32) -> f32 {
    match x > 20.0 {
        true => x,
        false => x.exp().ln_1p(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers from -1 to 1.
    pub(super) fn values(len: usize, seed: usize) -> Vec<f32> {
        let value = |i: usize| ((i * 7919 + seed * 104_729) % 2003) as f32 / 1000.0 - 1.0;
        (0..len).map(value).collect()
    }

    #[test]
    fn softplus_is_near_its_definition() {
        for x in [-100.0, -10.0, -1.0, 0.0, 0.5, 10.0, 19.9, 20.1, 80.0_f32] {
            let expected = f64::from(x).exp().ln_1p();
            let error = (f64::from(softplus(x)) - expected).abs();
            assert!(error <= 1e-6 * expected.max(1e-30), "{x}: {error}");
        }
        assert!(softplus(f32::NAN).is_nan());
    }
}
