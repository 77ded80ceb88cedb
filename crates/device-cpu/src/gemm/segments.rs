//! Products of rows with several matrices: each segment of consecutive rows has its own, such as an expert's.
//!
//! The panels of all segments are one list of tasks. A thread that has finished its share takes over tasks from the end
//! of another one's, so that a segment of many rows keeps nobody waiting:
//!
//! ```text
//!            matrix 1, 3 rows    matrix 2, 1 row     matrix 6, 40 rows
//! tasks      | 0 | 1 | 2 | 3 |   | 4 | 5 | 6 | 7 |   | 8    | 9    | 10   | 11   |      a panel each
//! thread 0   0 -> 1 -> 2 -> 3 -> 4 -> 5 ................... then from the end: 11, 10
//! thread 1   6 -> 7 -> 8 ------> 9 ------>
//! ```
//!
//! An element is computed as by a product of its own.

use std::ops::Range;

use half::bf16;
use half::slice::HalfFloatSliceExt;

use super::super::packed_matrix::{Packed, PackedMatrix};
use super::super::panel_order::PANEL;
use super::super::simd::for_each_simd;
use super::super::{Cpu, Simd, quantised};
use super::panel::{At, PanelInputs, PanelKernel};
use super::tasks::MAX_ROWS;
use super::{Rectangle, multiply_parts, pad_rows, write_activated, write_gated, write_rows};
use inflight_device::{Gating, Linear, Output, PlainActivation};
use inflight_numbers::Stacking;
use inflight_threads::DisjointSlice;

/// Consecutive rows that are multiplied with the same matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    /// The index of the matrix.
    pub matrix: usize,
    /// The rows, which begin where those of the segment before end. Not empty.
    pub rows: Range<usize>,
}

impl Cpu {
    /// [`Cpu::gemm`] of each segment of `x`, `[m, k]`, with the linear layer of its index. `out` is `[m, n]`.
    ///
    /// # Panics
    ///
    /// If the lengths do not agree, or the matrices of segments differ in shape.
    pub(crate) fn gemm_segments<'w>(
        &mut self,
        x: &[bf16],
        segments: &[Segment],
        linear: impl Fn(usize) -> &'w Linear<Self> + Sync,
        out: &mut [f32],
    ) {
        let num_rows = num_rows(segments);
        if num_rows == 0 {
            return;
        }
        let n = out.len() / num_rows;
        let linear = |segment: &Segment| {
            let linear = linear(segment.matrix);
            assert_eq!(linear.matrix.stacking(), Stacking::Concatenated);
            assert_eq!(linear.matrix.n(), n, "out is [{num_rows}, n]");
            linear
        };
        let simd = self.simd;
        let out = &DisjointSlice::new(out);
        self.multiply_segments(
            x,
            segments,
            |segment| &linear(segment).matrix,
            |segment, rows, outputs, [sums]: [&[f32]; 1]| {
                let bias = linear(segment).bias.as_ref();
                let bias = bias.map(|bias| &bias[outputs.clone()]);
                let place = Rectangle { rows, outputs, n };
                write_rows(simd, sums, bias, Output::Store, place, out);
            },
        );
    }

    /// [`Cpu::gemm_gated`] of each segment of `x`, `[m, k]`, with the linear layer of its index. `out` is `[m, inter]`.
    ///
    /// # Panics
    ///
    /// If the lengths do not agree, or the matrices of segments differ in shape.
    pub(crate) fn gemm_gated_segments<'w>(
        &mut self,
        x: &[bf16],
        segments: &[Segment],
        linear: impl Fn(usize) -> &'w Linear<Self> + Sync,
        gating: Gating,
        out: &mut [bf16],
    ) {
        let num_rows = num_rows(segments);
        if num_rows == 0 {
            return;
        }
        let inter = out.len() / num_rows;
        let linear = |segment: &Segment| {
            let linear = linear(segment.matrix);
            assert_eq!(linear.matrix.stacking(), Stacking::Interleaved);
            assert_eq!(linear.matrix.n(), 2 * inter, "out is [{num_rows}, inter]");
            linear
        };
        let (simd, fuses) = (self.simd, self.simd.fuses());
        let out = DisjointSlice::new(out.reinterpret_cast_mut());
        self.multiply_segments(
            x,
            segments,
            |segment| &linear(segment).matrix,
            |segment, rows, outputs, [gate, up]: [&[f32]; 2]| {
                let bias = linear(segment).bias.as_ref().map(|bias| {
                    let (gate, up) = bias.split_at(inter);
                    [&gate[outputs.clone()], &up[outputs.clone()]]
                });
                let sums = gate.as_chunks::<PANEL>().0.iter().zip(up.as_chunks().0);
                for (row, (gate, up)) in rows.zip(sums) {
                    // SAFETY: each rectangle of rows and outputs belongs to one task.
                    let out: &mut [u16] =
                        unsafe { out.slice(row * inter + outputs.start, outputs.len()) };
                    type Row = [f32; PANEL];
                    type Bias<'a> = Option<[&'a [f32]; 2]>;
                    for_each_simd!(simd, write_gated, (
                        gate: &Row,
                        up: &Row,
                        bias: Bias<'_>,
                        gating: Gating,
                        fuses: bool,
                        out: &mut [u16],
                    ));
                }
            },
        );
    }

    /// [`Cpu::gemm_activated`] of each segment of `x`, `[m, k]`, with the linear layer of its index. `out` is `[m, n]`.
    ///
    /// # Panics
    ///
    /// If the lengths do not agree, or the matrices of segments differ in shape.
    pub(crate) fn gemm_activated_segments<'w>(
        &mut self,
        x: &[bf16],
        segments: &[Segment],
        linear: impl Fn(usize) -> &'w Linear<Self> + Sync,
        activation: PlainActivation,
        out: &mut [bf16],
    ) {
        let num_rows = num_rows(segments);
        if num_rows == 0 {
            return;
        }
        let n = out.len() / num_rows;
        let linear = |segment: &Segment| {
            let linear = linear(segment.matrix);
            assert_eq!(linear.matrix.stacking(), Stacking::Concatenated);
            assert_eq!(linear.matrix.n(), n, "out is [{num_rows}, n]");
            linear
        };
        let (simd, fuses) = (self.simd, self.simd.fuses());
        let out = DisjointSlice::new(out.reinterpret_cast_mut());
        self.multiply_segments(
            x,
            segments,
            |segment| &linear(segment).matrix,
            |segment, rows, outputs, [sums]: [&[f32]; 1]| {
                let bias = linear(segment).bias.as_ref();
                let bias = bias.map(|bias| &bias[outputs.clone()]);
                for (row, sums) in rows.zip(sums.as_chunks::<PANEL>().0) {
                    // SAFETY: each rectangle of rows and outputs belongs to one task.
                    let out: &mut [u16] =
                        unsafe { out.slice(row * n + outputs.start, outputs.len()) };
                    type Row = [f32; PANEL];
                    type Bias<'a> = Option<&'a [f32]>;
                    for_each_simd!(simd, write_activated, (
                        sums: &Row,
                        bias: Bias<'_>,
                        activation: PlainActivation,
                        fuses: bool,
                        out: &mut [u16],
                    ));
                }
            },
        );
    }

    /// As [`Cpu::multiply`] for each segment; `finish` gets the segment first.
    fn multiply_segments<'w, const PARTS: usize>(
        &mut self,
        x: &[bf16],
        segments: &[Segment],
        matrix: impl Fn(&Segment) -> &'w PackedMatrix + Sync,
        finish: impl Fn(&Segment, Range<usize>, Range<usize>, [&[f32]; PARTS]) + Sync,
    ) {
        let k = matrix(&segments[0]).k();
        let part_len = matrix(&segments[0]).n() / PARTS;
        assert_eq!(x.len(), num_rows(segments) * k, "x is [m, {k}]");
        for segment in segments {
            assert_eq!(matrix(segment).k(), k, "matrices of the same shape");
        }
        let mut padded = std::mem::take(&mut self.padded_x);
        let mut wide = std::mem::take(&mut self.wide_x);
        let mut rounded = std::mem::take(&mut self.rounded_x);
        self.round_segments(x, k, segments, &matrix, &mut rounded);

        let is_float = |segment| matches!(matrix(segment).weights(), Packed::Bf16(_));
        let has_floats = segments.iter().any(is_float);
        let x_stride = k.next_multiple_of(2);
        let x = match has_floats && k != x_stride {
            true => {
                pad_rows(x, k, x_stride, &mut padded);
                &padded
            }
            false => x,
        };
        let x: &[u16] = x.reinterpret_cast();
        let (simd, wants_f32) = (self.simd, has_floats && self.simd == Simd::Avx2);
        if wants_f32 {
            self.widen(x, &mut wide);
        }
        let wide_x = wants_f32.then_some(&wide[..]);
        let multiply =
            |segment: &Segment, first_row: usize, panel, sums: &mut [f32]| match matrix(segment)
                .weights()
            {
                Packed::Bf16(panels) => {
                    let x = PanelInputs {
                        bf16: &x[first_row * x_stride..],
                        f32: wide_x.map(|x| &x[first_row * x_stride..]),
                        stride: x_stride,
                    };
                    let at = At {
                        panel,
                        reads_ahead: true,
                    };
                    PanelKernel::new(simd, sums.len() / PANEL).multiply(x, panels, at, sums);
                }
                Packed::Quantised(panels) => {
                    quantised::multiply_panel(simd, &rounded, first_row, panels, panel, sums);
                }
            };
        self.for_each_task_of_segments(segments, part_len, multiply, finish);
        self.rounded_x = rounded;
        self.wide_x = wide;
        self.padded_x = padded;
    }

    /// Rounds the rows of `x` if any segment has quantised weights, each in the order of the columns of its matrix.
    fn round_segments<'w>(
        &mut self,
        x: &[bf16],
        k: usize,
        segments: &[Segment],
        matrix: &(impl Fn(&Segment) -> &'w PackedMatrix + Sync),
        out: &mut quantised::RoundedActivations,
    ) {
        let panels = |segment| match matrix(segment).weights() {
            Packed::Quantised(panels) => Some(panels),
            Packed::Bf16(_) => None,
        };
        let mut all = segments.iter().filter_map(panels);
        let Some(first) = all.clone().next() else {
            return;
        };
        let has_eight_bits = all.any(|panels| panels.bits() == quantised::PanelBits::Eight);
        self.round_rows(x, k, first.num_blocks(), has_eight_bits, out, |row| {
            let segment = segments.partition_point(|segment| segment.rows.end <= row);
            panels(&segments[segment]).and_then(|panels| panels.input_order())
        });
    }

    /// Calls `multiply(segment, first_row, panel, sums)` for all panels and rows of all segments, on all threads, and
    /// `finish` with the sums of all parts.
    fn for_each_task_of_segments<const PARTS: usize>(
        &mut self,
        segments: &[Segment],
        part_len: usize,
        multiply: impl Fn(&Segment, usize, usize, &mut [f32]) + Sync,
        finish: impl Fn(&Segment, Range<usize>, Range<usize>, [&[f32]; PARTS]) + Sync,
    ) {
        let num_panels = part_len.div_ceil(PANEL);
        let num_blocks = |segment: &Segment| segment.rows.len().div_ceil(MAX_ROWS);
        let mut starts = std::mem::take(&mut self.segment_starts);
        starts.clear();
        let mut num_tasks = 0;
        for segment in segments {
            starts.push(num_tasks);
            num_tasks += num_panels * num_blocks(segment);
        }
        self.pool
            .for_each(&mut self.workers, num_tasks, |worker, task| {
                let index = starts.partition_point(|&start| start <= task) - 1;
                let (segment, task) = (&segments[index], task - starts[index]);
                let num_blocks = num_blocks(segment);
                let (panel, block) = (task / num_blocks, task % num_blocks);
                let bound = |block| segment.rows.start + block * segment.rows.len() / num_blocks;
                let rows = bound(block)..bound(block + 1);
                let sums = multiply_parts(&mut worker.gemm, rows.len(), |part, sums| {
                    multiply(segment, rows.start, panel * PARTS + part, sums);
                });
                let outputs = panel * PANEL..part_len.min((panel + 1) * PANEL);
                finish(segment, rows, outputs, sums);
            });
        self.segment_starts = starts;
    }
}

/// Rows of all segments.
fn num_rows(segments: &[Segment]) -> usize {
    segments.last().map_or(0, |segment| segment.rows.end)
}
