//! Rows of activations that the host reads and writes.

use std::ops::Range;

use half::bf16;

use super::lacking::Lacking;
use super::load::Load;
use super::operands::Norm;

/// Extra operations of pooling models, draft heads and vision towers, whose states go to the host and come from there.
pub trait StateOps<D: Load>: Copy {
    /// `out[rows] += row`. `out` is `[max_rows, width]`, `row` is `[width]`.
    fn add_to_rows(self, device: &mut D, rows: Range<usize>, row: &D::Vector, out: &mut D::Sums);

    /// `out[row] += table[rows[row]]`. `out` is `[rows.len(), width]`, and the table is `width` wide.
    fn add_table_rows(self, device: &mut D, table: &D::Embedding, rows: &[u32], out: &mut D::Sums);

    /// `hidden = norm(hidden); out = hidden`, with any norm. Both are `[num_rows, width]`.
    fn norm_in_place(
        self,
        device: &mut D,
        num_rows: usize,
        hidden: &mut D::Sums,
        norm: Norm<'_, D::Vector>,
        out: &mut D::Inputs,
    );

    /// `out = rows`, from memory of the host. Both are `[num_rows, width]`, and `out` gives `width`.
    fn write_sums(self, device: &mut D, rows: &[f32], out: &mut D::Sums);

    /// `out[first..] = rows`, from memory of the host, `[num_rows, width]`.
    fn replace_rows(self, device: &mut D, first: usize, rows: &[bf16], out: &mut D::Sums);

    /// `out[first..] += rows`, from memory of the host, `[num_rows, width]`.
    fn add_rows(self, device: &mut D, first: usize, rows: &[bf16], out: &mut D::Sums);

    /// `out = sums`, in memory of the host. Both are `[num_rows, width]`.
    fn read_sums(self, device: &mut D, sums: &D::Sums, num_rows: usize, out: &mut [f32]);

    /// `out = states`, in memory of the host. Both are `[num_rows, width]`.
    fn read_states(self, device: &mut D, states: &D::Inputs, num_rows: usize, out: &mut [f32]);
}

impl<D: Load> StateOps<D> for Lacking {
    fn add_to_rows(self, _: &mut D, _: Range<usize>, _: &D::Vector, _: &mut D::Sums) {
        match self {}
    }

    fn add_table_rows(self, _: &mut D, _: &D::Embedding, _: &[u32], _: &mut D::Sums) {
        match self {}
    }

    fn norm_in_place(
        self,
        _: &mut D,
        _: usize,
        _: &mut D::Sums,
        _: Norm<'_, D::Vector>,
        _: &mut D::Inputs,
    ) {
        match self {}
    }

    fn write_sums(self, _: &mut D, _: &[f32], _: &mut D::Sums) {
        match self {}
    }

    fn replace_rows(self, _: &mut D, _: usize, _: &[bf16], _: &mut D::Sums) {
        match self {}
    }

    fn add_rows(self, _: &mut D, _: usize, _: &[bf16], _: &mut D::Sums) {
        match self {}
    }

    fn read_sums(self, _: &mut D, _: &D::Sums, _: usize, _: &mut [f32]) {
        match self {}
    }

    fn read_states(self, _: &mut D, _: &D::Inputs, _: usize, _: &mut [f32]) {
        match self {}
    }
}
