//! GEMM: `out = x * W^T`, activations times packed weights, with its epilogues.
//!
//! A [task](tasks) is one panel of 48 outputs for a block of rows, or a panel of gate and one of up. It walks along `k`
//! in chunks, whose weights stay in a cache while all rows of the block use them, a few rows at a time (nine with
//! AVX-512):
//!
//! ```text
//!              k: chunk 0   chunk 1   chunk 2
//! rows 0..9      tile ->     tile ->   tile      each tile: 9 x 48 sums in registers, loaded from and
//! rows 9..18     tile        tile      tile      stored to f32 scratch between chunks
//! ```
//!
//! Each element is summed over `k` in order, starting at zero; storing the sum between chunks changes no bit. So it
//! does not depend on other rows or on how the work is divided.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod panel;
mod portable;
mod segments;
mod tasks;
mod tile;
mod tiles;

use std::ops::Range;

use half::bf16;
use half::slice::HalfFloatSliceExt;

use self::panel::{At, BLOCK_UNIT, PanelInputs, PanelKernel};
use self::tasks::{MAX_ROWS, Tasks};
use super::lines::Lines;
use super::low_rank::AddedRows;
use super::math::{
    exp, from_bf16_bits, gelu_by, gelu_tanh, quick_gelu, relu, silu, squared_relu, to_bf16_bits,
    xielu,
};
use super::packed_matrix::Packed;
use super::panel_order::PANEL;
use super::simd::for_each_simd;
use super::{Cpu, PackedMatrix, Simd, quantised};
use inflight_device::{Activation, Gating, Output, PlainActivation};
use inflight_numbers::Stacking;
use inflight_threads::DisjointSlice;

pub(super) use segments::Segment;
pub(super) use tiles::TileScratch;

/// Activations that one task widens: fewer are not worth a task.
const WIDEN_LEN: usize = 16 * 1024;

impl Cpu {
    /// `out = x * W^T + bias`, or that added to `out`. `x` is `[m, k]`, `weights` was packed from
    /// `[n, k]`, `bias` is `[n]`, `out` is `[m, n]`.
    ///
    /// # Panics
    ///
    /// If the lengths do not agree, or the weights are [interleaved](Stacking::Interleaved).
    pub fn gemm(
        &mut self,
        x: &[bf16],
        m: usize,
        weights: &PackedMatrix,
        bias: Option<&[f32]>,
        output: Output,
        out: &mut [f32],
    ) {
        let n = weights.n();
        assert_eq!(weights.stacking(), Stacking::Concatenated);
        assert_eq!(out.len(), m * n, "out is [m, n] = [{m}, {n}]");
        assert!(
            bias.is_none_or(|bias| bias.len() == n),
            "bias is [n] = [{n}]"
        );
        let simd = self.simd;
        let out = &DisjointSlice::new(out);
        self.multiply(x, m, weights, |rows, outputs, [sums]: [&[f32]; 1]| {
            let bias = bias.map(|bias| &bias[outputs.clone()]);
            write_rows(
                simd,
                sums,
                bias,
                output,
                Rectangle { rows, outputs, n },
                out,
            );
        });
    }

    /// `out = gating(gate, up)`, where gate and up are the parts of `x * W^T + bias`. `x` is `[m, k]`, `weights`
    /// was packed from gate and up, each `[inter, k]`, `bias` is that of gate followed by that of up, `out` is
    /// `[m, inter]`.
    ///
    /// # Panics
    ///
    /// If the lengths do not agree, or the weights are not two parts [interleaved](Stacking::Interleaved).
    pub fn gemm_gated(
        &mut self,
        x: &[bf16],
        m: usize,
        weights: &PackedMatrix,
        bias: Option<&[f32]>,
        gating: impl Into<Gating>,
        out: &mut [bf16],
    ) {
        self.gemm_gated_with(x, m, weights, bias, (gating.into(), None), out);
    }

    /// The same, with what is added to gate and up, whose outputs are one after the other.
    pub(super) fn gemm_gated_with(
        &mut self,
        x: &[bf16],
        m: usize,
        weights: &PackedMatrix,
        bias: Option<&[f32]>,
        (gating, added): (Gating, Option<AddedRows<'_>>),
        out: &mut [bf16],
    ) {
        let inter = weights.n() / 2;
        assert_eq!(weights.stacking(), Stacking::Interleaved);
        assert_eq!(out.len(), m * inter, "out is [m, inter] = [{m}, {inter}]");
        assert!(
            bias.is_none_or(|bias| bias.len() == 2 * inter),
            "bias is [2 * inter] = [{}]",
            2 * inter
        );
        let (simd, fuses) = (self.simd, self.simd.fuses());
        let out = DisjointSlice::new(out.reinterpret_cast_mut());
        self.multiply(x, m, weights, |rows, outputs, [gate, up]: [&[f32]; 2]| {
            let sums = gate.as_chunks::<PANEL>().0.iter().zip(up.as_chunks().0);
            for (row, (gate, up)) in rows.zip(sums) {
                // SAFETY: each rectangle of rows and outputs belongs to one task.
                let out: &mut [u16] =
                    unsafe { out.slice(row * inter + outputs.start, outputs.len()) };
                type Row = [f32; PANEL];
                type Bias<'a> = Option<[&'a [f32]; 2]>;
                let added = added.and_then(|added| added.row(row));
                let (mut gate_added, mut up_added);
                let (gate, up, bias) = match added {
                    None => (gate, up, bias.map(|bias| of_outputs(bias, &outputs))),
                    Some(added) => {
                        (gate_added, up_added) = (*gate, *up);
                        added.apply(&outputs, bias, &mut gate_added);
                        let of_up = inter + outputs.start..inter + outputs.end;
                        added.apply(&of_up, bias, &mut up_added);
                        (&gate_added, &up_added, None)
                    }
                };
                for_each_simd!(simd, write_gated, (
                    gate: &Row,
                    up: &Row,
                    bias: Bias<'_>,
                    gating: Gating,
                    fuses: bool,
                    out: &mut [u16],
                ));
            }
        });
    }

    /// `out = activation(x * W^T + bias)`. `x` is `[m, k]`, `weights` was packed from `[n, k]`, `bias` is `[n]`, `out`
    /// is `[m, n]`.
    ///
    /// # Panics
    ///
    /// If the lengths do not agree, or the weights are [interleaved](Stacking::Interleaved).
    pub(super) fn gemm_activated(
        &mut self,
        x: &[bf16],
        m: usize,
        weights: &PackedMatrix,
        bias: Option<&[f32]>,
        (activation, added): (PlainActivation, Option<AddedRows<'_>>),
        out: &mut [bf16],
    ) {
        let n = weights.n();
        assert_eq!(weights.stacking(), Stacking::Concatenated);
        assert_eq!(out.len(), m * n, "out is [m, n] = [{m}, {n}]");
        assert!(
            bias.is_none_or(|bias| bias.len() == n),
            "bias is [n] = [{n}]"
        );
        let (simd, fuses) = (self.simd, self.simd.fuses());
        let out = DisjointSlice::new(out.reinterpret_cast_mut());
        self.multiply(x, m, weights, |rows, outputs, [sums]: [&[f32]; 1]| {
            for (row, sums) in rows.zip(sums.as_chunks::<PANEL>().0) {
                // SAFETY: each rectangle of rows and outputs belongs to one task.
                let out: &mut [u16] = unsafe { out.slice(row * n + outputs.start, outputs.len()) };
                type Row = [f32; PANEL];
                type Bias<'a> = Option<&'a [f32]>;
                let added = added.and_then(|added| added.row(row));
                let mut with_added;
                let (sums, bias) = match added {
                    None => (sums, bias.map(|bias| &bias[outputs.clone()])),
                    Some(added) => {
                        with_added = *sums;
                        added.apply(&outputs, bias, &mut with_added);
                        (&with_added, None)
                    }
                };
                for_each_simd!(simd, write_activated, (
                    sums: &Row,
                    bias: Bias<'_>,
                    activation: PlainActivation,
                    fuses: bool,
                    out: &mut [u16],
                ));
            }
        });
    }

    /// Calls `finish(rows, outputs, sums)` for blocks of rows and panels of outputs of `x * W^T`, on all threads.
    /// `sums` has one panel of each part of the weights, `[rows, 48]`, and `outputs` are its indices in the part.
    fn multiply<const PARTS: usize>(
        &mut self,
        x: &[bf16],
        m: usize,
        weights: &PackedMatrix,
        finish: impl Fn(Range<usize>, Range<usize>, [&[f32]; PARTS]) + Sync,
    ) {
        let k = weights.k();
        assert_eq!(x.len(), m * k, "x is [m, k] = [{m}, {k}]");
        let part_len = weights.n() / PARTS;
        match weights.weights() {
            Packed::Bf16(panels) => {
                let x_stride = 2 * panels.num_pairs;
                let mut padded = std::mem::take(&mut self.padded_x);
                let x = if k == x_stride {
                    x
                } else {
                    pad_rows(x, k, x_stride, &mut padded);
                    &padded
                };
                let x: &[u16] = x.reinterpret_cast();
                let mut wide = std::mem::take(&mut self.wide_x);
                let (simd, wants_f32) = (self.simd, self.simd == Simd::Avx2);
                if wants_f32 {
                    self.widen(x, &mut wide);
                }
                let wide_x = wants_f32.then(|| &wide[..x.len()]);
                let prepare = |num_rows| PanelKernel::new(simd, num_rows);
                let multiply = |kernel: &PanelKernel, first_row, at: At, sums: &mut [f32]| {
                    let x = PanelInputs {
                        bf16: &x[first_row * x_stride..],
                        f32: wide_x.map(|x| &x[first_row * x_stride..]),
                        stride: x_stride,
                    };
                    kernel.multiply(x, panels, at, sums);
                };
                let block_len = panel::block_len(simd);
                self.for_each_task(m, part_len, block_len, prepare, multiply, finish);
                self.wide_x = wide;
                self.padded_x = padded;
            }
            Packed::Quantised(panels) => {
                let mut rounded = std::mem::take(&mut self.rounded_x);
                self.round_activations(x, k, panels, &mut rounded);
                let simd = self.simd;
                let multiply = |(): &(), first_row, at: At, sums: &mut [f32]| {
                    quantised::multiply_panel(simd, &rounded, first_row, panels, at.panel, sums);
                };
                self.for_each_task(m, part_len, MAX_ROWS, |_| (), multiply, finish);
                self.rounded_x = rounded;
            }
        }
    }

    /// Widens activations to f32, on all threads. `out` grows to the longest: each time it did, the zeros took as long
    /// as the widening.
    fn widen(&mut self, x: &[u16], out: &mut Vec<f32>) {
        if out.len() < x.len() {
            out.resize(x.len(), 0.0);
        }
        let simd = self.simd;
        let out = DisjointSlice::new(&mut out[..x.len()]);
        let num_tasks = x.len().div_ceil(WIDEN_LEN);
        self.pool.for_each(&mut self.workers, num_tasks, |_, task| {
            let start = task * WIDEN_LEN;
            let x = &x[start..x.len().min(start + WIDEN_LEN)];
            // SAFETY: each piece belongs to one task.
            let out = unsafe { out.slice(start, x.len()) };
            for_each_simd!(simd, widen, (x: &[u16], out: &mut [f32]));
        });
    }

    /// Calls `multiply(kernel, first_row, at, sums)` for all panels and blocks of rows, on all threads, and
    /// [`finish`](Self::multiply) with the sums of all parts. `prepare(num_rows)` makes the kernel of a task, whose
    /// blocks have up to `block_len` of its rows.
    fn for_each_task<K, const PARTS: usize>(
        &mut self,
        m: usize,
        part_len: usize,
        block_len: usize,
        prepare: impl Fn(usize) -> K + Sync,
        multiply: impl Fn(&K, usize, At, &mut [f32]) + Sync,
        finish: impl Fn(Range<usize>, Range<usize>, [&[f32]; PARTS]) + Sync,
    ) {
        let tasks = Tasks::new(part_len.div_ceil(PANEL), m, self.num_threads());
        let num_tasks = tasks.num_tasks();
        self.pool
            .for_each(&mut self.workers, num_tasks, |worker, task| {
                let (panel, rows) = tasks.task(task);
                if rows.is_empty() {
                    return;
                }
                let outputs = panel * PANEL..part_len.min((panel + 1) * PANEL);
                let kernel = prepare(rows.len());
                let num_blocks = rows.len().div_ceil(block_len);
                for block in 0..num_blocks {
                    let part = panel::part(rows.len(), BLOCK_UNIT, block, num_blocks);
                    let first_row = rows.start + part.start;
                    let sums = multiply_parts(&mut worker.gemm, part.len(), |part, sums| {
                        let at = At {
                            panel: panel * PARTS + part,
                            reads_ahead: block == 0,
                        };
                        multiply(&kernel, first_row, at, sums);
                    });
                    finish(first_row..first_row + part.len(), outputs.clone(), sums);
                }
            });
    }
}

/// Calls `multiply(part, sums)` for each part, with a place for its sums in `scratch`, `[num_rows, 48]`.
#[inline]
fn multiply_parts<const PARTS: usize>(
    scratch: &mut Lines<f32>,
    num_rows: usize,
    multiply: impl Fn(usize, &mut [f32]),
) -> [&[f32]; PARTS] {
    let max_len = PARTS * tasks::MAX_ROWS * PANEL;
    if scratch.len() < max_len {
        scratch.resize(max_len);
    }
    let mut parts = scratch.chunks_exact_mut(num_rows * PANEL);
    std::array::from_fn(|part| {
        let sums = parts.next().expect("one chunk per part");
        multiply(part, sums);
        &*sums
    })
}

#[inline(always)]
fn widen(x: &[u16], out: &mut [f32]) {
    for (x, out) in x.iter().zip(out) {
        *out = from_bf16_bits(*x);
    }
}

/// The values of gate and of up, of values of all outputs of both.
fn of_outputs<'a>(values: &'a [f32], outputs: &Range<usize>) -> [&'a [f32]; 2] {
    let (gate, up) = values.split_at(values.len() / 2);
    [&gate[outputs.clone()], &up[outputs.clone()]]
}

/// The elements of a matrix that one task writes.
struct Rectangle {
    rows: Range<usize>,
    outputs: Range<usize>,
    /// Elements of a row of the matrix.
    n: usize,
}

/// Writes the sums of a task, `[rows, 48]`.
fn write_rows(
    simd: Simd,
    sums: &[f32],
    bias: Option<&[f32]>,
    output: Output,
    place: Rectangle,
    out: &DisjointSlice<f32>,
) {
    type Bias<'a> = Option<&'a [f32]>;
    type Out<'a> = &'a DisjointSlice<f32>;
    for_each_simd!(simd, write_rows_by, (
        sums: &[f32],
        bias: Bias<'_>,
        output: Output,
        place: Rectangle,
        out: Out<'_>,
    ));
}

#[inline(always)]
fn write_rows_by(
    sums: &[f32],
    bias: Option<&[f32]>,
    output: Output,
    place: Rectangle,
    out: &DisjointSlice<f32>,
) {
    let Rectangle { rows, outputs, n } = place;
    let bias = bias.map(|bias| {
        let mut panel = [0.0; PANEL];
        panel[..bias.len()].copy_from_slice(bias);
        panel
    });
    for (row, sums) in rows.zip(sums.as_chunks::<PANEL>().0) {
        // SAFETY: each rectangle of rows and outputs belongs to one task.
        let out = unsafe { out.slice(row * n + outputs.start, outputs.len()) };
        let mut sums = *sums;
        if let Some(bias) = &bias {
            add(&mut sums, bias);
        }
        if output == Output::Add {
            match <&[f32; PANEL]>::try_from(&*out) {
                Ok(out) => add(&mut sums, out),
                Err(_) => add(&mut sums, out),
            }
        }
        copy_panel(&sums, out);
    }
}

#[inline(always)]
fn add(sums: &mut [f32; PANEL], values: &[f32]) {
    for (sum, value) in sums.iter_mut().zip(values) {
        *sum += value;
    }
}

/// Copies a panel to its outputs, without the call that a copy of unknown length is where all are there.
#[inline(always)]
fn copy_panel<T: Copy>(panel: &[T; PANEL], out: &mut [T]) {
    match <&mut [T; PANEL]>::try_from(&mut *out) {
        Ok(out) => *out = *panel,
        Err(_) => out.copy_from_slice(&panel[..out.len()]),
    }
}

#[inline(always)]
fn write_gated(
    gate: &[f32; PANEL],
    up: &[f32; PANEL],
    bias: Option<[&[f32]; 2]>,
    gating: Gating,
    fuses: bool,
    out: &mut [u16],
) {
    let (mut gate, mut up) = (*gate, *up);
    if let Some([gate_bias, up_bias]) = bias {
        for ((gate, up), (gate_bias, up_bias)) in gate
            .iter_mut()
            .zip(&mut up)
            .zip(gate_bias.iter().zip(up_bias))
        {
            *gate += gate_bias;
            *up += up_bias;
        }
    }
    match gating {
        Gating::Product(activation) => activate(&mut gate, activation, fuses),
        Gating::Scaled(activation, factor) => {
            gate.iter_mut().for_each(|gate| *gate *= factor);
            activate(&mut gate, activation, fuses);
        }
        Gating::Clamped { alpha, limit } => {
            for (gate, up) in gate.iter_mut().zip(&mut up) {
                // What is not a number stays so.
                let bounded = if *gate > limit { limit } else { *gate };
                *gate = bounded / (1.0 + exp(-alpha * bounded));
                *up = up.clamp(-limit, limit) + 1.0;
            }
        }
        Gating::Bounded(activation, limit) => {
            activate(&mut gate, activation, fuses);
            for (gate, up) in gate.iter_mut().zip(&mut up) {
                *gate = if *gate > limit { limit } else { *gate };
                *up = up.clamp(-limit, limit);
            }
        }
        Gating::Plain(_) => unreachable!("it has one part"),
    }
    let mut products = [0; PANEL];
    for ((gate, up), product) in gate.iter().zip(up).zip(&mut products) {
        *product = to_bf16_bits(gate * up);
    }
    copy_panel(&products, out);
}

#[inline(always)]
fn write_activated(
    sums: &[f32; PANEL],
    bias: Option<&[f32]>,
    activation: PlainActivation,
    fuses: bool,
    out: &mut [u16],
) {
    let mut sums = *sums;
    if let Some(bias) = bias {
        for (sum, bias) in sums.iter_mut().zip(bias) {
            *sum += bias;
        }
    }
    match activation {
        PlainActivation::Of(activation) => activate(&mut sums, activation, fuses),
        PlainActivation::Xielu { positive, negative } => {
            sums.iter_mut()
                .for_each(|x| *x = xielu(*x, positive, negative));
        }
        PlainActivation::QuickGelu => sums.iter_mut().for_each(|x| *x = quick_gelu(*x)),
    }
    // A map of an array of this length is not inlined, and copies it.
    let mut rounded = [0; PANEL];
    for (sum, rounded) in sums.iter().zip(&mut rounded) {
        *rounded = to_bf16_bits(*sum);
    }
    copy_panel(&rounded, out);
}

/// `fuses` is [that](Simd::fuses) of the instruction set.
#[inline(always)]
pub(super) fn activate(row: &mut [f32], activation: Activation, fuses: bool) {
    match activation {
        Activation::Silu => row.iter_mut().for_each(|x| *x = silu(*x)),
        Activation::Gelu if fuses => row.iter_mut().for_each(|x| *x = gelu_by::<true>(*x)),
        Activation::Gelu => row.iter_mut().for_each(|x| *x = gelu_by::<false>(*x)),
        Activation::GeluTanh => row.iter_mut().for_each(|x| *x = gelu_tanh(*x)),
        Activation::Relu => row.iter_mut().for_each(|x| *x = relu(*x)),
        Activation::SquaredRelu => row.iter_mut().for_each(|x| *x = squared_relu(*x)),
    }
}

/// Copies rows of `k` elements to rows of `stride` elements, padded with zeros.
fn pad_rows(x: &[bf16], k: usize, stride: usize, padded: &mut Vec<bf16>) {
    padded.clear();
    for row in x.chunks_exact(k) {
        padded.extend_from_slice(row);
        padded.resize(padded.len() + stride - k, bf16::ZERO);
    }
}
