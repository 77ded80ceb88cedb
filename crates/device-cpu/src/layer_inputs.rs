//! Inputs of each layer's own, factors of the residual stream, and several residual streams.

use half::bf16;
use half::slice::HalfFloatSliceExt;

use super::Cpu;
use super::elementwise::{inverse_rms, mean_and_scale, round_to_bf16, sum};
use super::experts::ExpertRows;
use super::gemm::activate;
use super::math::{from_bf16_bits, tanh, to_bf16_bits};
use super::rows::Rows;
use super::simd::for_each_simd;
use super::step::CpuStep;
use inflight_device::{
    Activation, LayerInputOps, LayerInputParams, MAX_STREAMS, RopeTable, StreamCoefs,
};
use inflight_threads::DisjointSlice;

/// Operations of models whose layers have inputs of their own, on a CPU.
#[derive(Clone, Copy, Debug)]
pub struct CpuLayerInputs;

impl LayerInputOps<Cpu> for CpuLayerInputs {
    fn combine(
        self,
        cpu: &mut Cpu,
        step: &CpuStep<'_>,
        params: LayerInputParams<'_, Cpu>,
        inputs: &mut Rows<f32>,
    ) {
        let row_len = inputs.width();
        let table = params.table;
        assert_eq!(table.hidden_size(), row_len, "embeddings of all layers");
        assert!(
            !params.norm.is_empty() && row_len.is_multiple_of(params.norm.len()),
            "whole layers"
        );
        let (simd, num_rows) = (cpu.simd, step.token_ids.len());
        let call = &CombineCall {
            embedding_scale: params.embedding_scale,
            projection_scale: params.projection_scale,
            norm: params.norm,
            eps: params.eps,
            scale: params.scale,
        };
        let rows: &[u16] = table.rows().reinterpret_cast();
        let inputs = inputs.first_mut(num_rows);
        cpu.for_each_row_block(num_rows, row_len, inputs, |first, inputs| {
            for (row, inputs) in (first..).zip(inputs.chunks_exact_mut(row_len)) {
                let first = step.token_ids[row] as usize * row_len;
                let embedding = rows.get(first..first + row_len);
                let embedding = embedding.unwrap_or(&rows[..row_len]);
                for_each_simd!(simd, combine, (
                    call: &CombineCall<'_>,
                    embedding: &[u16],
                    inputs: &mut [f32],
                ));
            }
        });
    }

    fn gate(
        self,
        cpu: &mut Cpu,
        num_rows: usize,
        activation: Activation,
        gates: &mut Rows<f32>,
        inputs: &Rows<f32>,
        layer: usize,
        out: &mut Rows<bf16>,
    ) {
        let (width, row_len) = (gates.width(), inputs.width());
        assert_eq!(width, out.width(), "one gate for each input");
        assert!((layer + 1) * width <= row_len, "inputs of the layer");
        let (simd, inputs) = (cpu.simd, inputs.first(num_rows));
        let kind = (activation, simd.fuses());
        let gates = DisjointSlice::new(gates.first_mut(num_rows));
        let out = out.first_mut(num_rows).reinterpret_cast_mut();
        cpu.for_each_row_block(num_rows, width, out, |first, out| {
            for (row, out) in (first..).zip(out.chunks_exact_mut(width)) {
                // SAFETY: each row belongs to one task.
                let gates = unsafe { gates.slice(row * width, width) };
                let inputs = &inputs[row * row_len + layer * width..][..width];
                for_each_simd!(simd, gate, (
                    kind: (Activation, bool),
                    gates: &mut [f32],
                    inputs: &[f32],
                    out: &mut [u16],
                ));
            }
        });
    }

    fn keep_rows(self, _: &mut Cpu, step: &CpuStep<'_>, inputs: &mut Rows<f32>) {
        inputs.keep(step.kept_rows);
    }

    fn clear(self, _: &mut Cpu, num_rows: usize, out: &mut Rows<f32>) {
        out.first_mut(num_rows).fill(0.0);
    }

    fn scale_experts(self, _: &mut Cpu, num_rows: usize, scales: &Vec<f32>, rows: &mut ExpertRows) {
        rows.scale(num_rows, scales);
    }

    fn scale_queries(
        self,
        cpu: &mut Cpu,
        step: &CpuStep<'_>,
        angles: &RopeTable,
        q: &mut Rows<f32>,
    ) {
        let (batch, width, num_rows) = (&step.batch, q.width(), step.token_ids.len());
        cpu.for_each_row_block(num_rows, width, q.first_mut(num_rows), |first, q| {
            for (row, q) in (first..).zip(q.chunks_exact_mut(width)) {
                let (_, position) = batch.place(row);
                if let Some(factor) = angles.query_factor(position) {
                    q.iter_mut().for_each(|q| *q *= factor);
                }
            }
        });
    }

    fn scale_columns(
        self,
        cpu: &mut Cpu,
        num_rows: usize,
        x: &Rows<f32>,
        weight: &Vec<f32>,
        out: &mut Rows<bf16>,
    ) {
        let width = x.width();
        assert_eq!([weight.len(), out.width()], [width; 2], "columns");
        let (simd, x) = (cpu.simd, x.first(num_rows));
        let out = out.first_mut(num_rows).reinterpret_cast_mut();
        cpu.for_each_row_block(num_rows, width, out, |first, out| {
            let x = x[first * width..].chunks_exact(width);
            for (x, out) in x.zip(out.chunks_exact_mut(width)) {
                for_each_simd!(simd, scale_columns, (x: &[f32], weight: &[f32], out: &mut [u16]));
            }
        });
    }

    fn scale_columns_in_place(
        self,
        cpu: &mut Cpu,
        num_rows: usize,
        weight: &Vec<f32>,
        x: &mut Rows<f32>,
    ) {
        let width = x.width();
        assert_eq!(weight.len(), width, "columns");
        cpu.for_each_row_block(num_rows, width, x.first_mut(num_rows), |_, x| {
            for x in x.chunks_exact_mut(width) {
                for (x, weight) in x.iter_mut().zip(weight) {
                    *x *= weight;
                }
            }
        });
    }

    fn predict_streams(
        self,
        cpu: &mut Cpu,
        num_rows: usize,
        coefs: StreamCoefs<'_, Cpu>,
        hidden: &mut Rows<f32>,
        others: &mut [Rows<f32>],
        predicted: &mut Rows<f32>,
    ) {
        let (simd, width, num_streams) = (cpu.simd, hidden.width(), others.len() + 1);
        assert_eq!(predicted.width(), width, "a copy of the first stream");
        let call = &StreamCall::new(&coefs, num_rows, num_streams, num_streams * num_streams);
        let others = OtherStreams::new(others, num_rows, width);
        let predicted = DisjointSlice::new(predicted.first_mut(num_rows));
        let hidden = hidden.first_mut(num_rows);
        cpu.for_each_row_block(num_rows, width, hidden, |first, hidden| {
            for (row, hidden) in (first..).zip(hidden.chunks_exact_mut(width)) {
                // SAFETY: each row belongs to one task.
                let (others, predicted) =
                    unsafe { (&mut others.row(row), predicted.slice(row * width, width)) };
                for_each_simd!(simd, predict, (
                    call: &StreamCall<'_>,
                    row: usize,
                    hidden: &mut [f32],
                    others: &mut [&mut [f32]; MAX_STREAMS],
                    predicted: &mut [f32],
                ));
            }
        });
    }

    fn correct_streams(
        self,
        cpu: &mut Cpu,
        num_rows: usize,
        coefs: StreamCoefs<'_, Cpu>,
        predicted: &Rows<f32>,
        hidden: &mut Rows<f32>,
        others: &mut [Rows<f32>],
    ) {
        let (simd, width, num_streams) = (cpu.simd, hidden.width(), others.len() + 1);
        assert_eq!(predicted.width(), width, "a copy of the first stream");
        let call = &StreamCall::new(&coefs, num_rows, num_streams, num_streams);
        let others = OtherStreams::new(others, num_rows, width);
        let predicted = predicted.first(num_rows);
        let hidden = hidden.first_mut(num_rows);
        cpu.for_each_row_block(num_rows, width, hidden, |first, hidden| {
            for (row, hidden) in (first..).zip(hidden.chunks_exact_mut(width)) {
                // SAFETY: each row belongs to one task.
                let others = unsafe { &mut others.row(row) };
                let predicted = &predicted[row * width..][..width];
                for_each_simd!(simd, correct, (
                    call: &StreamCall<'_>,
                    row: usize,
                    predicted: &[f32],
                    hidden: &mut [f32],
                    others: &mut [&mut [f32]; MAX_STREAMS],
                ));
            }
        });
    }

    fn match_magnitudes(self, cpu: &mut Cpu, num_rows: usize, like: &Rows<f32>, x: &mut Rows<f32>) {
        let width = x.width();
        assert_eq!(like.width(), width, "rows of equal widths");
        let (simd, like) = (cpu.simd, like.first(num_rows));
        cpu.for_each_row_block(num_rows, width, x.first_mut(num_rows), |first, x| {
            let like = like[first * width..].chunks_exact(width);
            for (like, x) in like.zip(x.chunks_exact_mut(width)) {
                for_each_simd!(simd, match_magnitude, (like: &[f32], x: &mut [f32]));
            }
        });
    }

    fn gate_sparsely(
        self,
        cpu: &mut Cpu,
        num_rows: usize,
        activation: Activation,
        num_deviations: f32,
        gate_up: &mut Rows<f32>,
        out: &mut Rows<bf16>,
    ) {
        let (width, row_len) = (out.width(), gate_up.width());
        assert_eq!(2 * width, row_len, "gates and ups");
        let simd = cpu.simd;
        let call = &SparseCall {
            activation,
            fuses: simd.fuses(),
            num_deviations,
        };
        let gate_up = DisjointSlice::new(gate_up.first_mut(num_rows));
        let out = out.first_mut(num_rows).reinterpret_cast_mut();
        cpu.for_each_row_block(num_rows, width, out, |first, out| {
            for (row, out) in (first..).zip(out.chunks_exact_mut(width)) {
                // SAFETY: each row belongs to one task.
                let gate_up = unsafe { gate_up.slice(row * row_len, row_len) };
                for_each_simd!(simd, gate_sparsely, (
                    call: &SparseCall,
                    gate_up: &mut [f32],
                    out: &mut [u16],
                ));
            }
        });
    }

    fn norm_inputs(
        self,
        cpu: &mut Cpu,
        num_rows: usize,
        weight: &Vec<f32>,
        eps: f32,
        x: &mut Rows<bf16>,
    ) {
        let width = x.width();
        assert_eq!(weight.len(), width, "one weight for each column");
        let simd = cpu.simd;
        let x = x.first_mut(num_rows).reinterpret_cast_mut();
        cpu.for_each_row_block(num_rows, width, x, |_, x| {
            for x in x.chunks_exact_mut(width) {
                for_each_simd!(simd, norm_inputs, (
                    weight: &[f32],
                    eps: f32,
                    x: &mut [u16],
                ));
            }
        });
    }

    fn clip(self, cpu: &mut Cpu, num_rows: usize, bound: f32, x: &mut Rows<f32>) {
        let width = x.width();
        cpu.for_each_row_block(num_rows, width, x.first_mut(num_rows), |_, x| {
            x.iter_mut().for_each(|x| *x = x.clamp(-bound, bound));
        });
    }
}

/// The streams besides the first one.
struct OtherStreams {
    width: usize,
    rows: [Option<DisjointSlice<f32>>; MAX_STREAMS],
}

impl OtherStreams {
    fn new(others: &mut [Rows<f32>], num_rows: usize, width: usize) -> Self {
        assert!(others.len() < MAX_STREAMS, "at most {MAX_STREAMS} streams");
        let mut others = others.iter_mut();
        let rows = std::array::from_fn(|_| {
            let other = others.next()?;
            assert_eq!(other.width(), width, "streams of equal widths");
            Some(DisjointSlice::new(other.first_mut(num_rows)))
        });
        Self { width, rows }
    }

    /// A row of each; empty ones behind the last stream.
    ///
    /// # Safety
    ///
    /// The streams are still mutably borrowed, and nobody else has this row.
    #[allow(
        clippy::mut_from_ref,
        reason = "the caller promises that the row is nobody else's"
    )]
    unsafe fn row(&self, row: usize) -> [&mut [f32]; MAX_STREAMS] {
        self.rows.each_ref().map(|rows| match rows {
            // SAFETY: the caller promises it.
            Some(rows) => unsafe { rows.slice(row * self.width, self.width) },
            None => &mut [],
        })
    }
}

/// The operands that all tokens of a call share.
struct StreamCall<'a> {
    routed: &'a [f32],
    weights: &'a [f32],
    num_streams: usize,
    num_coefs: usize,
}

impl<'a> StreamCall<'a> {
    fn new(
        coefs: &StreamCoefs<'a, Cpu>,
        num_rows: usize,
        num_streams: usize,
        num_coefs: usize,
    ) -> Self {
        assert_eq!(coefs.routed.width(), num_streams, "one for each stream");
        assert_eq!(coefs.weights.len(), num_streams * num_coefs, "coefficients");
        Self {
            routed: coefs.routed.first(num_rows),
            weights: coefs.weights,
            num_streams,
            num_coefs,
        }
    }

    /// The coefficients of a row.
    #[inline(always)]
    fn coefs(&self, row: usize) -> [f32; MAX_STREAMS * MAX_STREAMS] {
        let mut coefs = [0.0; MAX_STREAMS * MAX_STREAMS];
        let routed = &self.routed[row * self.num_streams..][..self.num_streams];
        for (routed, weights) in routed.iter().zip(self.weights.chunks_exact(self.num_coefs)) {
            let share = from_bf16_bits(to_bf16_bits(tanh(*routed)));
            for (coef, weight) in coefs.iter_mut().zip(weights) {
                *coef += share * weight;
            }
        }
        coefs
    }
}

/// Columns whose old values are kept at once.
const BLOCK: usize = 128;

#[inline(always)]
fn norm_inputs(weight: &[f32], eps: f32, x: &mut [u16]) {
    let squares = sum(x, |bits| {
        let value = from_bf16_bits(bits);
        value * value
    });
    let scale = 1.0 / (squares / x.len() as f32 + eps).sqrt();
    for (bits, weight) in x.iter_mut().zip(weight) {
        *bits = to_bf16_bits(from_bf16_bits(*bits) * scale * weight);
    }
}

#[inline(always)]
fn predict(
    call: &StreamCall<'_>,
    row: usize,
    hidden: &mut [f32],
    others: &mut [&mut [f32]; MAX_STREAMS],
    predicted: &mut [f32],
) {
    let (coefs, num_streams) = (call.coefs(row), call.num_streams);
    let mut old = [[0.0; BLOCK]; MAX_STREAMS];
    for first in (0..hidden.len()).step_by(BLOCK) {
        let columns = first..hidden.len().min(first + BLOCK);
        let len = columns.len();
        old[0][..len].copy_from_slice(&hidden[columns.clone()]);
        for (old, other) in old[1..num_streams].iter_mut().zip(others.iter()) {
            old[..len].copy_from_slice(&other[columns.clone()]);
        }
        let mix = |stream: usize, out: &mut [f32]| {
            let coefs = &coefs[stream * num_streams..][..num_streams];
            for (coef, old) in coefs.iter().zip(&old) {
                for (x, old) in out.iter_mut().zip(old) {
                    *x += coef * old;
                }
            }
        };
        mix(0, &mut hidden[columns.clone()]);
        for (stream, other) in (1..num_streams).zip(others.iter_mut()) {
            mix(stream, &mut other[columns.clone()]);
        }
        predicted[columns.clone()].copy_from_slice(&hidden[columns]);
    }
}

#[inline(always)]
fn correct(
    call: &StreamCall<'_>,
    row: usize,
    predicted: &[f32],
    hidden: &mut [f32],
    others: &mut [&mut [f32]; MAX_STREAMS],
) {
    let coefs = call.coefs(row);
    for (x, predicted) in hidden.iter_mut().zip(predicted) {
        *x -= predicted;
    }
    let others = others.iter_mut().zip(&coefs[1..call.num_streams]);
    for (other, coef) in others {
        for (x, difference) in other.iter_mut().zip(&*hidden) {
            *x += (coef + 1.0) * difference;
        }
    }
    for (x, predicted) in hidden.iter_mut().zip(predicted) {
        *x = predicted + (coefs[0] + 1.0) * *x;
    }
}

/// The least mean square of what is scaled.
const LEAST_SQUARE: f32 = 1e-5;

#[inline(always)]
fn match_magnitude(like: &[f32], x: &mut [f32]) {
    let own = inverse_rms(x, 0.0).min(LEAST_SQUARE.sqrt().recip());
    let factor = own / inverse_rms(like, 0.0);
    x.iter_mut().for_each(|x| *x *= factor);
}

#[inline(always)]
fn scale_columns(x: &[f32], weight: &[f32], out: &mut [u16]) {
    let mut scaled = [0.0; BLOCK];
    let blocks = x.chunks(BLOCK).zip(weight.chunks(BLOCK));
    for ((x, weight), out) in blocks.zip(out.chunks_mut(BLOCK)) {
        let scaled = &mut scaled[..x.len()];
        for ((scaled, x), weight) in scaled.iter_mut().zip(x).zip(weight) {
            *scaled = x * weight;
        }
        round_to_bf16(scaled, out);
    }
}

/// The operands that all tokens of a call share.
struct SparseCall {
    activation: Activation,
    fuses: bool,
    num_deviations: f32,
}

#[inline(always)]
fn gate_sparsely(call: &SparseCall, gate_up: &mut [f32], out: &mut [u16]) {
    let (gates, ups) = gate_up.split_at_mut(out.len());
    let (mean, scale) = mean_and_scale(gates, 0.0);
    let cutoff = mean + call.num_deviations / scale;
    for gate in gates.iter_mut() {
        *gate = (*gate - cutoff).max(0.0);
    }
    activate(gates, call.activation, call.fuses);
    for (gate, up) in gates.iter_mut().zip(ups) {
        *gate *= *up;
    }
    round_to_bf16(gates, out);
}

/// The operands that all tokens of a call share.
struct CombineCall<'a> {
    embedding_scale: f32,
    projection_scale: f32,
    norm: &'a [f32],
    eps: f32,
    scale: f32,
}

#[inline(always)]
fn combine(call: &CombineCall<'_>, embedding: &[u16], inputs: &mut [f32]) {
    let width = call.norm.len();
    let layers = inputs.chunks_exact_mut(width);
    for (inputs, embedding) in layers.zip(embedding.chunks_exact(width)) {
        for input in inputs.iter_mut() {
            *input *= call.projection_scale;
        }
        let factor = inverse_rms(inputs, call.eps);
        for ((input, weight), bits) in inputs.iter_mut().zip(call.norm).zip(embedding) {
            let projected = *input * factor * weight;
            *input = (projected + from_bf16_bits(*bits) * call.embedding_scale) * call.scale;
        }
    }
}

#[inline(always)]
fn gate(
    (activation, fuses): (Activation, bool),
    gates: &mut [f32],
    inputs: &[f32],
    out: &mut [u16],
) {
    activate(gates, activation, fuses);
    for (gate, input) in gates.iter_mut().zip(inputs) {
        *gate *= input;
    }
    round_to_bf16(gates, out);
}
