//! Products with some of the inputs, for a CPU that is one of several ranks.

use std::ops::Range;

use half::bf16;

use super::{Cpu, PackedMatrix};
use crate::device::Output;
use crate::device::ranks::Ranks;

impl Cpu {
    /// The other ranks. Only for a device that has joined some.
    pub(super) fn ranks_mut(&mut self) -> &mut Ranks {
        self.ranks.as_mut().expect("it has joined ranks")
    }

    /// As [`Cpu::gemm`], with some columns of `x`, which has rows of `width`.
    #[allow(clippy::too_many_arguments, reason = "each is an operand")]
    pub(super) fn gemm_part(
        &mut self,
        x: &[bf16],
        width: usize,
        columns: Range<usize>,
        weights: &PackedMatrix,
        bias: Option<&[f32]>,
        output: Output,
        out: &mut [f32],
    ) {
        let m = x.len() / width;
        if columns == (0..width) {
            return self.gemm(x, m, weights, bias, output, out);
        }
        let mut part = std::mem::take(&mut self.part_x);
        part.clear();
        let rows = x.chunks_exact(width);
        part.extend(rows.flat_map(|row| &row[columns.clone()]));
        self.gemm(&part, m, weights, bias, output, out);
        self.part_x = part;
    }
}
