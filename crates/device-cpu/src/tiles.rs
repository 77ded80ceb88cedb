//! Products with some of the inputs of a rank, which are summed by themselves.

use std::ops::Range;

use half::bf16;

use super::Cpu;
use super::rows::Rows;
use inflight_device::{AdaptedRows, Linear, Output, RankHost, Tile, TileOps};

/// How a CPU cuts sums into tiles.
#[derive(Clone, Copy, Debug)]
pub struct CpuTiles;

impl TileOps<Cpu> for CpuTiles {
    fn sum(
        self,
        cpu: &mut Cpu,
        host: &mut RankHost,
        num_rows: usize,
        x: &Rows<bf16>,
        tiles: &[Option<Tile<Cpu>>],
        out: &mut Rows<f32>,
    ) {
        let (width, x) = (x.width(), x.first(num_rows));
        // The tiles of this rank are written where the others read them.
        host.all_reduce_of(out.first_mut(num_rows), |part| {
            cpu.gemm_tiles(x, width, tiles, part);
        });
    }

    fn project(
        self,
        cpu: &mut Cpu,
        num_rows: usize,
        x: &Rows<bf16>,
        inputs: Range<usize>,
        linear: &Linear<Cpu>,
        adapted: Option<AdaptedRows<'_>>,
        output: Output,
        out: &mut Rows<f32>,
    ) {
        let (width, x, out) = (x.width(), x.first(num_rows), out.first_mut(num_rows));
        let (matrix, bias) = (&linear.matrix, linear.bias.as_deref());
        cpu.with_part(x, width, inputs, |cpu, x| match adapted {
            None => cpu.gemm(x, num_rows, matrix, bias, output, out),
            Some(adapted) => {
                cpu.gemm_adapted_apart(x, num_rows, matrix, bias, adapted, output, out);
            }
        });
    }

    fn clear(self, _: &mut Cpu, num_rows: usize, rows: &mut Rows<f32>) {
        rows.first_mut(num_rows).fill(-0.0);
    }
}

impl Cpu {
    /// Calls `multiply` with some columns of `x`, which has rows of `width`.
    pub(super) fn with_part(
        &mut self,
        x: &[bf16],
        width: usize,
        columns: Range<usize>,
        multiply: impl FnOnce(&mut Self, &[bf16]),
    ) {
        if columns == (0..width) {
            return multiply(self, x);
        }
        let mut part = std::mem::take(&mut self.part_x);
        part.clear();
        let rows = x.chunks_exact(width);
        part.extend(rows.flat_map(|row| &row[columns.clone()]));
        multiply(self, &part);
        self.part_x = part;
    }
}
