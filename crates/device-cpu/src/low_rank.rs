//! Adapters: `out += scale * (x * A^T) * B^T` for the rows that have one.
//!
//! ```text
//! shrink   x * A^T, scaled   a task is some rows of an adapter and a panel of 16 ranks
//! expand   that * B^T        a task is some rows of an adapter and some panels of 64 outputs
//! finish   factors (DoRA), and biases
//! ```
//!
//! A sum over inputs has the order of `shrink.rs`; a sum over ranks goes in their order. So a row has the same bits
//! whatever else is in the step. The rows of an adapter share the reading of its weights, wherever they are in the
//! step.
//!
//! With factors, a row of the residual stream is put aside first, and added in the end.

use std::ops::Range;
use std::sync::Arc;

use half::bf16;
use half::slice::HalfFloatSliceExt;

use super::expand::expand;
use super::math::from_bf16_bits;
use super::shrink::shrink;
use super::simd::for_each_simd;
use super::{Cpu, PackedMatrix};
use inflight_base::TokenId;
use inflight_device::{AdaptedPlace, AdaptedRows, AdapterRun, DenseRows, LowRank, Output};
use inflight_device::{OUTPUT_PANEL, RANK_PANEL};
use inflight_threads::DisjointSlice;

/// Rows of a task.
const MAX_ROWS: usize = 16;
/// Panels of outputs of a task.
const MAX_OUTPUT_PANELS: usize = 8;

/// Memory for the products of a step with adapters.
#[derive(Default)]
pub(super) struct AdapterScratch {
    /// The runs, those with the same adapter beside each other.
    order: Vec<usize>,
    /// The rows of each adapter, one adapter after the other.
    rows: Vec<RowPlace>,
    parts: Vec<Part>,
    tasks: Vec<Task>,
    /// `x * A^T`, scaled: for each part and each of its rows, all its panels of ranks.
    shrunk: Vec<f32>,
    /// What is added to the rows of a gated projection, `[num_adapted_rows, num_outputs]`.
    added: Vec<f32>,
    /// Rows of the residual stream that are added in the end.
    put_aside: Vec<f32>,
    /// Sums of earlier tiles.
    earlier: Vec<f32>,
    /// For each row of the step, its index among the adapted ones, or [`NOT_ADAPTED`].
    indices: Vec<u32>,
}

/// Stands for the index of a row without an adapter.
const NOT_ADAPTED: u32 = u32::MAX;

/// Where a row is.
#[derive(Clone, Copy)]
struct RowPlace {
    input: usize,
    output: usize,
}

/// What one adapter adds to its rows at one linear layer.
struct Part {
    /// One of its runs, and which of the things that the adapter adds there.
    run: usize,
    index: usize,
    /// Its rows among [`AdapterScratch::rows`].
    rows: Range<usize>,
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

/// What changes rows of a projection in front of its activation.
#[derive(Clone, Copy)]
pub(super) struct AddedRows<'a> {
    values: &'a [f32],
    indices: &'a [u32],
    num_outputs: usize,
    adapted: AdaptedRows<'a>,
}

/// What changes one of them.
#[derive(Clone, Copy)]
pub(super) struct AddedRow<'a> {
    /// Of all outputs.
    values: &'a [f32],
    place: &'a AdaptedPlace,
}

impl<'a> AddedRows<'a> {
    /// What changes a row.
    pub fn row(self, row: usize) -> Option<AddedRow<'a>> {
        let index = self.indices[row];
        if index == NOT_ADAPTED {
            return None;
        }
        let runs = self.adapted.runs;
        let run = &runs[runs.partition_point(|run| run.rows.end as usize <= row)];
        let start = index as usize * self.num_outputs;
        Some(AddedRow {
            values: &self.values[start..start + self.num_outputs],
            place: run.weights.at(self.adapted.place),
        })
    }
}

impl AddedRow<'_> {
    /// Changes the sums of some outputs. `bias` is that of all of them.
    pub fn apply(self, outputs: &Range<usize>, bias: Option<&[f32]>, sums: &mut [f32]) {
        add_to(sums, &self.values[outputs.clone()]);
        if let Some(factors) = self.place.factors() {
            for (sum, factor) in sums.iter_mut().zip(&factors[outputs.clone()]) {
                *sum *= factor;
            }
        }
        for bias in bias.into_iter().chain(self.place.bias()) {
            add_to(sums, &bias[outputs.clone()]);
        }
    }
}

impl Cpu {
    /// As [`Cpu::gemm`], with what adapters make of their rows.
    ///
    /// # Panics
    ///
    /// If the rows or the widths do not agree.
    #[allow(clippy::too_many_arguments, reason = "each is an operand")]
    pub fn gemm_adapted(
        &mut self,
        x: &[bf16],
        m: usize,
        weights: &PackedMatrix,
        bias: Option<&[f32]>,
        adapted: AdaptedRows<'_>,
        output: Output,
        out: &mut [f32],
    ) {
        let n = weights.n();
        let mut put_aside = std::mem::take(&mut self.adapters.put_aside);
        put_aside.clear();
        if output == Output::Add {
            for (run, _) in adapted
                .changed()
                .filter(|(_, place)| place.factors().is_some())
            {
                let rows = &mut out[elements(run, n)];
                put_aside.extend_from_slice(rows);
                rows.fill(-0.0);
            }
        }
        self.gemm(x, m, weights, bias, output, out);
        for (run, place) in adapted.changed() {
            if let Some(replacement) = place.replacement() {
                let x = &x[elements(run, weights.k())];
                self.multiply_dense(x, replacement, &mut out[elements(run, n)]);
            }
        }
        self.add_adapters(x, adapted, out, n);
        let mut put_aside_rows = &put_aside[..];
        for (run, place) in adapted.changed() {
            let rows = &mut out[elements(run, n)];
            let mut before = None;
            if output == Output::Add && place.factors().is_some() {
                let own;
                (own, put_aside_rows) = put_aside_rows.split_at(rows.len());
                before = Some(own);
            }
            self.finish_rows(place, bias, before, rows, n);
        }
        self.adapters.put_aside = put_aside;
    }

    /// As [`Cpu::gemm_adapted`]. What is added to `out` is a sum by itself, as it is where it is stored: that of a
    /// tile, which may be computed on another rank.
    #[allow(clippy::too_many_arguments, reason = "each is an operand")]
    pub(super) fn gemm_adapted_apart(
        &mut self,
        x: &[bf16],
        m: usize,
        weights: &PackedMatrix,
        bias: Option<&[f32]>,
        adapted: AdaptedRows<'_>,
        output: Output,
        out: &mut [f32],
    ) {
        let n = weights.n();
        let mut earlier = std::mem::take(&mut self.adapters.earlier);
        earlier.clear();
        if output == Output::Add {
            for (run, _) in adapted.changed() {
                let rows = &mut out[elements(run, n)];
                earlier.extend_from_slice(rows);
                // What changes no sum.
                rows.fill(-0.0);
            }
        }
        self.gemm_adapted(x, m, weights, bias, adapted, output, out);
        if output == Output::Add {
            let mut rest = &earlier[..];
            for (run, _) in adapted.changed() {
                let rows = &mut out[elements(run, n)];
                let own;
                (own, rest) = rest.split_at(rows.len());
                add_to(rows, own);
            }
        }
        self.adapters.earlier = earlier;
    }

    /// Changes embedded tokens, `[m, n]`, which have been multiplied by `scale`. Those that the adapters have no
    /// weights for, which begin with `first_token`, stay as they are.
    ///
    /// # Panics
    ///
    /// If the widths do not agree.
    pub fn adapt_embeddings(
        &mut self,
        token_ids: &[TokenId],
        first_token: usize,
        adapted: AdaptedRows<'_>,
        scale: f32,
        out: &mut [f32],
        n: usize,
    ) {
        assert!(adapted.are_ascending(), "ascending rows");
        for (run, place) in adapted.changed() {
            let token_ids = &token_ids[run.rows.start as usize..run.rows.end as usize];
            let simd = self.simd;
            self.for_each_row_block(
                token_ids.len(),
                n,
                &mut out[elements(run, n)],
                |first, rows| {
                    let mut shrunk = Vec::new();
                    for (&id, row) in token_ids[first..].iter().zip(rows.chunks_exact_mut(n)) {
                        let Some(index) = (id as usize).checked_sub(first_token) else {
                            continue;
                        };
                        if let Some(table) = place.replacement().filter(|it| index < it.rows()) {
                            for (out, weight) in row.iter_mut().zip(table.row(index)) {
                                *out = weight.to_f32() * scale;
                            }
                        }
                        let parts = place.parts().iter();
                        for part in parts.filter(|part| index < part.num_inputs()) {
                            shrunk.clear();
                            let factor = part.scale() * scale;
                            shrunk.extend(
                                (0..part.rank()).map(|rank| part.a(rank, index).to_f32() * factor),
                            );
                            for (b, out) in part.output_panels().zip(row.chunks_mut(OUTPUT_PANEL)) {
                                expand(
                                    simd,
                                    &shrunk,
                                    shrunk.len(),
                                    b.reinterpret_cast(),
                                    |_, sums| add_to(out, sums),
                                );
                            }
                        }
                    }
                },
            );
        }
    }

    /// `out = x * weights^T`. `x` is `[m, k]`, `out` is `[m, n]`.
    fn multiply_dense(&mut self, x: &[bf16], weights: &DenseRows, out: &mut [f32]) {
        let (n, k) = (weights.rows(), weights.columns());
        let x: &[u16] = x.reinterpret_cast();
        let m = x.len() / k;
        assert_eq!(out.len(), m * n, "out is [m, n] = [{m}, {n}]");
        let simd = self.simd;
        let out = DisjointSlice::new(out);
        let num_tasks = n.div_ceil(OUTPUT_PANEL);
        self.pool.for_each(&mut self.workers, num_tasks, |_, task| {
            let first = task * OUTPUT_PANEL;
            for (row, x) in x.chunks_exact(k).enumerate() {
                // SAFETY: each panel of outputs belongs to one task.
                let out = unsafe { out.slice(row * n + first, OUTPUT_PANEL.min(n - first)) };
                for (output, out) in (first..).zip(out) {
                    let w: &[u16] = weights.row(output).reinterpret_cast();
                    for_each_simd!(simd, dot, (x: &[u16], w: &[u16], out: &mut f32));
                }
            }
        });
    }

    /// Ends the rows of a run, `[_, n]`: factors and biases, and what was put aside is added.
    fn finish_rows(
        &mut self,
        place: &AdaptedPlace,
        bias: Option<&[f32]>,
        put_aside: Option<&[f32]>,
        rows: &mut [f32],
        n: usize,
    ) {
        if place.factors().is_none() && place.bias().is_none() {
            return;
        }
        self.for_each_row_block(rows.len() / n, n, rows, |first, rows| {
            for (row, out) in (first..).zip(rows.chunks_exact_mut(n)) {
                match (place.factors(), bias) {
                    (None, _) => {}
                    (Some(factors), None) => {
                        for (out, factor) in out.iter_mut().zip(factors) {
                            *out *= factor;
                        }
                    }
                    (Some(factors), Some(bias)) => {
                        for ((out, factor), bias) in out.iter_mut().zip(factors).zip(bias) {
                            *out = (*out - bias) * factor + bias;
                        }
                    }
                }
                let put_aside = put_aside.map(|rows| &rows[row * n..][..n]);
                for added in place.bias().into_iter().chain(put_aside) {
                    add_to(out, added);
                }
            }
        });
    }

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

    /// Calls `multiply` with what adapters add to a projection of `x`, which has `num_outputs`, if they change any
    /// rows.
    ///
    /// # Panics
    ///
    /// If the rows or the widths do not agree.
    pub(super) fn with_added_rows(
        &mut self,
        x: &[bf16],
        num_rows: usize,
        adapted: Option<AdaptedRows<'_>>,
        num_outputs: usize,
        multiply: impl FnOnce(&mut Self, Option<AddedRows<'_>>),
    ) {
        let Some(adapted) = adapted else {
            return multiply(self, None);
        };
        let mut scratch = std::mem::take(&mut self.adapters);
        let mut added = std::mem::take(&mut scratch.added);
        let mut indices = std::mem::take(&mut scratch.indices);
        indices.clear();
        indices.resize(num_rows, NOT_ADAPTED);
        let mut num_adapted = 0;
        for (run, _) in adapted.changed() {
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
            adapted,
        };
        multiply(self, Some(rows));
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
            order,
            rows: row_places,
            parts,
            tasks,
            shrunk,
            ..
        } = scratch;
        assert!(adapted.are_ascending(), "ascending rows");
        let adapter = |run: &usize| Arc::as_ptr(&adapted.runs[*run].weights);
        order.clear();
        order.extend(0..adapted.runs.len());
        order.sort_unstable_by_key(|run| (adapter(run), *run));
        row_places.clear();
        parts.clear();
        tasks.clear();
        let mut num_shrunk = 0;
        for runs in order.chunk_by(|a, b| adapter(a) == adapter(b)) {
            let weights = adapted.runs[runs[0]].weights.at(adapted.place).parts();
            if weights.is_empty() {
                continue;
            }
            let first = row_places.len();
            for run in runs {
                let rows = &adapted.runs[*run].rows;
                let first_output = first_output_row(rows);
                row_places.extend((0..rows.len()).map(|row| RowPlace {
                    input: rows.start as usize + row,
                    output: first_output + row,
                }));
            }
            let num_rows = row_places.len() - first;
            for (which, weights) in weights.iter().enumerate() {
                let num_panels = weights.rank().div_ceil(RANK_PANEL);
                parts.push(Part {
                    run: runs[0],
                    index: which,
                    rows: first..first + num_rows,
                    shrunk: num_shrunk,
                    shrunk_width: num_panels * RANK_PANEL,
                });
                num_shrunk += num_rows * num_panels * RANK_PANEL;
                push_tasks(tasks, parts.len() - 1, num_rows, num_panels, 1);
            }
        }
        if parts.is_empty() {
            return;
        }
        shrunk.resize(num_shrunk.max(shrunk.len()), 0.0);
        let x: &[u16] = x.reinterpret_cast();
        let simd = self.simd;
        let row_places = &*row_places;
        let weights_of = |part: &Part| -> &LowRank {
            &adapted.runs[part.run].weights.at(adapted.place).parts()[part.index]
        };
        let rows_of_shrunk = DisjointSlice::new(shrunk);
        self.pool
            .for_each(&mut self.workers, tasks.len(), |_, task| {
                let Task { part, rows, panels } = &tasks[task];
                let part = &parts[*part];
                let weights = weights_of(part);
                let k = weights.num_inputs();
                let panel = panels.start;
                let a = weights.rank_panels().nth(panel).expect("a panel of A");
                let a: &[u16] = a.reinterpret_cast();
                let scale = weights.scale();
                let places = &row_places[part.rows.clone()][rows.clone()];
                let x = |row: usize| &x[places[row].input * k..][..k];
                shrink(simd, rows.len(), x, a, scale, |row, sums| {
                    let row = part.shrunk + (rows.start + row) * part.shrunk_width;
                    // SAFETY: each row and panel of ranks belongs to one task.
                    let out = unsafe { rows_of_shrunk.slice(row + panel * RANK_PANEL, RANK_PANEL) };
                    out.copy_from_slice(sums);
                });
            });

        tasks.clear();
        for (index, part) in parts.iter().enumerate() {
            let weights = weights_of(part);
            assert!(weights.outputs().end <= n, "outputs of the projection");
            let num_panels = weights.outputs().len().div_ceil(OUTPUT_PANEL);
            push_tasks(tasks, index, part.rows.len(), num_panels, MAX_OUTPUT_PANELS);
        }
        let shrunk = &*shrunk;
        let out = DisjointSlice::new(out);
        self.pool
            .for_each(&mut self.workers, tasks.len(), |_, task| {
                let Task { part, rows, panels } = &tasks[task];
                let part = &parts[*part];
                let weights = weights_of(part);
                let outputs = weights.outputs();
                let places = &row_places[part.rows.clone()][rows.clone()];
                for (panel, b) in panels
                    .clone()
                    .zip(weights.output_panels().skip(panels.start))
                {
                    let b: &[u16] = b.reinterpret_cast();
                    let first = outputs.start + panel * OUTPUT_PANEL;
                    let len = OUTPUT_PANEL.min(outputs.end - first);
                    let width = part.shrunk_width;
                    let start = part.shrunk + rows.start * width;
                    let shrunk = &shrunk[start..start + rows.len() * width];
                    expand(simd, shrunk, width, b, |row, sums| {
                        let place = places[row].output * n + first;
                        // SAFETY: parts of an adapter have outputs of their own, and each row and panel of them belongs
                        // to one task.
                        let out = unsafe { out.slice(place, len) };
                        add_to(out, sums);
                    });
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

/// `out = x * w`, both `[k]`: 16 sums, of every sixteenth input each, which are added in their order.
#[inline(always)]
fn dot(x: &[u16], w: &[u16], out: &mut f32) {
    let mut sums = [0.0_f32; RANK_PANEL];
    let (x_chunks, x_rest) = x.as_chunks::<RANK_PANEL>();
    let (w_chunks, w_rest) = w.as_chunks::<RANK_PANEL>();
    for (x, w) in x_chunks.iter().zip(w_chunks) {
        for ((sum, x), w) in sums.iter_mut().zip(x).zip(w) {
            *sum += from_bf16_bits(*x) * from_bf16_bits(*w);
        }
    }
    for ((sum, x), w) in sums.iter_mut().zip(x_rest).zip(w_rest) {
        *sum += from_bf16_bits(*x) * from_bf16_bits(*w);
    }
    *out = sums.iter().sum();
}

fn add_to(sums: &mut [f32], added: &[f32]) {
    for (sum, added) in sums.iter_mut().zip(added) {
        *sum += added;
    }
}

/// The elements of the rows of a run, each of this length.
fn elements(run: &AdapterRun, row_len: usize) -> Range<usize> {
    run.rows.start as usize * row_len..run.rows.end as usize * row_len
}
