//! Adapters: `out += scale * (x * A^T) * B^T` for the rows that have one.
//!
//! ```text
//! shrink   x * A^T, scaled   a task is some rows of a run and a panel of 16 ranks
//! expand   that * B^T        a task is some rows of a run and some panels of 64 outputs
//! ```
//!
//! A sum over inputs is four sums, of every fourth input each, that are added at the end; a sum over ranks goes in
//! their order. So a row has the same bits whatever else is in the step. Several rows share the reading of weights.

use std::ops::Range;

use half::bf16;
use half::slice::HalfFloatSliceExt;

use super::Cpu;
use super::math::from_bf16_bits;
use super::simd::for_each_simd;
use crate::device::disjoint_slice::DisjointSlice;
use crate::device::low_rank::{OUTPUT_PANEL, RANK_PANEL};
use crate::device::{AdaptedRows, LowRank};

/// Rows of a task.
const MAX_ROWS: usize = 16;
/// Panels of outputs of a task.
const MAX_OUTPUT_PANELS: usize = 8;
/// Sums over inputs that one element is divided into.
const CHAINS: usize = 4;

/// Memory for the products of a step with adapters.
#[derive(Default)]
pub(super) struct AdapterScratch {
    parts: Vec<Part>,
    tasks: Vec<Task>,
    /// `x * A^T`, scaled: for each part and each of its rows, all its panels of ranks.
    shrunk: Vec<f32>,
    /// What is added to the rows of a gated projection, `[num_adapted_rows, num_outputs]`.
    added: Vec<f32>,
    /// For each row of the step, its index among the adapted ones, or [`NOT_ADAPTED`].
    indices: Vec<u32>,
}

/// Stands for the index of a row without an adapter.
const NOT_ADAPTED: u32 = u32::MAX;

/// What one adapter adds to one run at one linear layer.
struct Part {
    /// The run, and which of the things that the adapter adds there.
    run: usize,
    index: usize,
    /// The first row of the run in the output.
    first_output_row: usize,
    /// Where its rows begin in [`AdapterScratch::shrunk`], and how long each is.
    shrunk: usize,
    shrunk_width: usize,
}

/// Rows of a part, and some of its panels.
struct Task {
    part: usize,
    rows: Range<usize>,
    panels: Range<usize>,
}

/// What is added to rows of a gated projection in front of its activation.
#[derive(Clone, Copy)]
pub(super) struct AddedRows<'a> {
    values: &'a [f32],
    indices: &'a [u32],
    num_outputs: usize,
}

impl<'a> AddedRows<'a> {
    /// What is added to a row: all outputs of gate, then those of up.
    pub fn row(self, row: usize) -> Option<&'a [f32]> {
        let index = self.indices[row];
        (index != NOT_ADAPTED).then(|| {
            let start = index as usize * self.num_outputs;
            &self.values[start..start + self.num_outputs]
        })
    }
}

impl Cpu {
    /// Adds what adapters make of their rows of `x` to those rows of `out`. `x` is `[m, k]`, `out` is `[m, n]`.
    ///
    /// # Panics
    ///
    /// If the rows or the widths do not agree.
    pub fn add_adapters(
        &mut self,
        x: &[bf16],
        adapted: AdaptedRows<'_>,
        out: &mut [f32],
        n: usize,
    ) {
        let mut scratch = std::mem::take(&mut self.adapters);
        let first_row = |rows: &Range<u32>| rows.start as usize;
        self.add_low_rank(&mut scratch, x, adapted, first_row, out, n);
        self.adapters = scratch;
    }

    /// Calls `multiply` with what adapters add to a projection of `x`, which has `num_outputs`.
    ///
    /// # Panics
    ///
    /// If the rows or the widths do not agree.
    pub(super) fn with_added_rows(
        &mut self,
        x: &[bf16],
        num_rows: usize,
        adapted: AdaptedRows<'_>,
        num_outputs: usize,
        multiply: impl FnOnce(&mut Self, AddedRows<'_>),
    ) {
        let mut scratch = std::mem::take(&mut self.adapters);
        let mut added = std::mem::take(&mut scratch.added);
        let mut indices = std::mem::take(&mut scratch.indices);
        indices.clear();
        indices.resize(num_rows, NOT_ADAPTED);
        let mut num_adapted = 0;
        for run in adapted.runs {
            for row in run.rows.clone() {
                indices[row as usize] = num_adapted;
                num_adapted += 1;
            }
        }
        added.clear();
        added.resize(num_adapted as usize * num_outputs, 0.0);
        let first_row = |rows: &Range<u32>| indices[rows.start as usize] as usize;
        self.add_low_rank(&mut scratch, x, adapted, first_row, &mut added, num_outputs);
        let rows = AddedRows {
            values: &added,
            indices: &indices,
            num_outputs,
        };
        multiply(self, rows);
        (scratch.added, scratch.indices) = (added, indices);
        self.adapters = scratch;
    }

    /// Adds to rows of `out`, `[_, n]`. A run begins there at `first_output_row(rows)`.
    fn add_low_rank(
        &mut self,
        scratch: &mut AdapterScratch,
        x: &[bf16],
        adapted: AdaptedRows<'_>,
        first_output_row: impl Fn(&Range<u32>) -> usize,
        out: &mut [f32],
        n: usize,
    ) {
        let AdapterScratch {
            parts,
            tasks,
            shrunk,
            ..
        } = scratch;
        assert!(adapted.are_ascending(), "ascending rows");
        parts.clear();
        tasks.clear();
        let mut num_shrunk = 0;
        for (index, run) in adapted.runs.iter().enumerate() {
            for (which, weights) in run.weights.at(adapted.place).iter().enumerate() {
                let num_panels = weights.rank().div_ceil(RANK_PANEL);
                parts.push(Part {
                    run: index,
                    index: which,
                    first_output_row: first_output_row(&run.rows),
                    shrunk: num_shrunk,
                    shrunk_width: num_panels * RANK_PANEL,
                });
                num_shrunk += run.rows.len() * num_panels * RANK_PANEL;
                push_tasks(tasks, parts.len() - 1, run.rows.len(), num_panels, 1);
            }
        }
        if parts.is_empty() {
            return;
        }
        shrunk.resize(num_shrunk.max(shrunk.len()), 0.0);
        let x: &[u16] = x.reinterpret_cast();
        let simd = self.simd;
        let weights_of = |part: &Part| {
            let run = &adapted.runs[part.run];
            let weights: &LowRank = &run.weights.at(adapted.place)[part.index];
            (run.rows.start as usize, weights)
        };
        let rows_of_shrunk = DisjointSlice::new(shrunk);
        self.pool.for_each(&mut self.workers, tasks.len(), |_, task| {
            let Task { part, rows, panels } = &tasks[task];
            let part = &parts[*part];
            let (first_row, weights) = weights_of(part);
            let k = weights.num_inputs();
            let panel = panels.start;
            let a = weights.rank_panels().nth(panel).expect("a panel of A");
            let a: &[u16] = a.reinterpret_cast();
            let scale = weights.scale();
            for row in rows.clone() {
                let x = &x[(first_row + row) * k..][..k];
                let start = part.shrunk + row * part.shrunk_width + panel * RANK_PANEL;
                // SAFETY: each row and panel of ranks belongs to one task.
                let out = unsafe { rows_of_shrunk.slice(start, RANK_PANEL) };
                for_each_simd!(simd, shrink, (x: &[u16], a: &[u16], scale: f32, out: &mut [f32]));
            }
        });

        tasks.clear();
        for (index, part) in parts.iter().enumerate() {
            let num_rows = adapted.runs[part.run].rows.len();
            let (_, weights) = weights_of(part);
            assert!(weights.outputs().end <= n, "outputs of the projection");
            let num_panels = weights.outputs().len().div_ceil(OUTPUT_PANEL);
            push_tasks(tasks, index, num_rows, num_panels, MAX_OUTPUT_PANELS);
        }
        let shrunk = &*shrunk;
        let out = DisjointSlice::new(out);
        self.pool
            .for_each(&mut self.workers, tasks.len(), |_, task| {
                let Task { part, rows, panels } = &tasks[task];
                let part = &parts[*part];
                let (_, weights) = weights_of(part);
                let outputs = weights.outputs();
                for (panel, b) in panels
                    .clone()
                    .zip(weights.output_panels().skip(panels.start))
                {
                    let b: &[u16] = b.reinterpret_cast();
                    let first = outputs.start + panel * OUTPUT_PANEL;
                    let len = OUTPUT_PANEL.min(outputs.end - first);
                    for row in rows.clone() {
                        let shrunk =
                            &shrunk[part.shrunk + row * part.shrunk_width..][..weights.rank()];
                        // SAFETY: parts of a run have outputs of their own, and each row and panel of them belongs to one task.
                        let out =
                            unsafe { out.slice((part.first_output_row + row) * n + first, len) };
                        for_each_simd!(simd, expand, (shrunk: &[f32], b: &[u16], out: &mut [f32]));
                    }
                }
            });
    }
}

/// Appends the tasks of a part: blocks of its rows and of its panels.
fn push_tasks(
    tasks: &mut Vec<Task>,
    part: usize,
    num_rows: usize,
    num_panels: usize,
    max_panels: usize,
) {
    for row in (0..num_rows).step_by(MAX_ROWS) {
        for panel in (0..num_panels).step_by(max_panels) {
            tasks.push(Task {
                part,
                rows: row..num_rows.min(row + MAX_ROWS),
                panels: panel..num_panels.min(panel + max_panels),
            });
        }
    }
}

/// `out = scale * x * a`. `x` is `[k]`, `a` is `[k, 16]`, `out` is `[16]`.
#[inline(always)]
fn shrink(x: &[u16], a: &[u16], scale: f32, out: &mut [f32]) {
    let mut sums = [[0.0_f32; RANK_PANEL]; CHAINS];
    let (rows, _) = a.as_chunks::<RANK_PANEL>();
    let (x_chunks, x_rest) = x.as_chunks::<CHAINS>();
    let (row_chunks, row_rest) = rows.as_chunks::<CHAINS>();
    for (x, rows) in x_chunks.iter().zip(row_chunks) {
        for ((sums, x), row) in sums.iter_mut().zip(x).zip(rows) {
            add_product(sums, from_bf16_bits(*x), row);
        }
    }
    for ((sums, x), row) in sums.iter_mut().zip(x_rest).zip(row_rest) {
        add_product(sums, from_bf16_bits(*x), row);
    }
    let [a, b, c, d] = &sums;
    for (lane, out) in out.iter_mut().enumerate() {
        *out = ((a[lane] + b[lane]) + (c[lane] + d[lane])) * scale;
    }
}

/// `out += shrunk * b`. `shrunk` is `[rank]`, `b` is `[rank, 64]`, and `out` is `[n]` with `n <= 64`: the columns of `b` beyond `n` are
/// padding.
#[inline(always)]
fn expand(shrunk: &[f32], b: &[u16], out: &mut [f32]) {
    let mut sums = [[0.0_f32; RANK_PANEL]; OUTPUT_PANEL / RANK_PANEL];
    for (shrunk, row) in shrunk.iter().zip(b.as_chunks::<OUTPUT_PANEL>().0) {
        let (quarters, _) = row.as_chunks::<RANK_PANEL>();
        for (sums, weights) in sums.iter_mut().zip(quarters) {
            add_product(sums, *shrunk, weights);
        }
    }
    for (out, sum) in out.iter_mut().zip(sums.as_flattened()) {
        *out += sum;
    }
}

#[inline(always)]
fn add_product(sums: &mut [f32; RANK_PANEL], x: f32, weights: &[u16; RANK_PANEL]) {
    for (sum, weight) in sums.iter_mut().zip(weights) {
        *sum += x * from_bf16_bits(*weight);
    }
}
