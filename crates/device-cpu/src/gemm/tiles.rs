//! Sums of the products of tiles of the inputs: what a rank of several computes, and one alone in the same order.
//!
//! A task computes its panel of every tile, each from zero, and adds them in pairs. So all tiles are one run of the
//! threads, and no sum but the last one leaves the cache:
//!
//! ```text
//! inputs       | tile 0 | tile 1 | tile 2 | tile 3 |
//! weights      panel p of the matrix of each tile
//! scratch      sum 0    sum 1    sum 2    sum 3          [rows, 48] each, with the bias of the tile
//! out          (0 + 1)     +     (2 + 3)
//! ```

use half::bf16;
use half::slice::HalfFloatSliceExt;

use super::super::packed_matrix::Packed;
use super::super::panel_order::PANEL;
use super::super::{Cpu, Simd, quantised};
use super::panel::{At, PanelInputs, PanelKernel};
use super::tasks::{MAX_ROWS, Tasks};
use inflight_device::Tile;
use inflight_numbers::Stacking;
use inflight_threads::DisjointSlice;

/// Scratch memory of [`Cpu::gemm_tiles`].
#[derive(Default)]
pub(crate) struct TileScratch {
    /// All rows, each with the inputs of every tile at an even place.
    even_x: Vec<bf16>,
    /// The rounded rows of each tile with quantised weights.
    rounded: Vec<quantised::RoundedActivations>,
}

impl Cpu {
    /// `out` becomes the sum over tiles of `x[inputs] * W^T + bias`, in pairs; -0 if no tile has inputs, which changes
    /// no sum. `x` is `[m, width]`, `out` is `[m, n]`. There are a power of two of tiles.
    ///
    /// # Panics
    ///
    /// If the lengths do not agree, or weights are [interleaved](Stacking::Interleaved).
    pub fn gemm_tiles(
        &mut self,
        x: &[bf16],
        width: usize,
        tiles: &[Option<Tile<Self>>],
        out: &mut [f32],
    ) {
        let Some(n) = tiles
            .iter()
            .flatten()
            .map(|tile| tile.linear.matrix.n())
            .next()
        else {
            return out.fill(-0.0);
        };
        let m = x.len() / width;
        assert!(tiles.len().is_power_of_two(), "tiles are added in pairs");
        assert_eq!(out.len(), m * n, "out is [m, n] = [{m}, {n}]");
        for Tile { inputs, linear } in tiles.iter().flatten() {
            assert_eq!(linear.matrix.stacking(), Stacking::Concatenated);
            assert_eq!([linear.matrix.n(), linear.matrix.k()], [n, inputs.len()]);
        }
        let mut scratch = std::mem::take(&mut self.tile_scratch);
        let mut wide = std::mem::take(&mut self.wide_x);
        let TileScratch { even_x, rounded } = &mut scratch;
        self.round_tiles(x, width, tiles, rounded);
        let is_even = |tile: &Tile<Self>| {
            tile.inputs.start.is_multiple_of(2) && tile.inputs.len().is_multiple_of(2)
        };
        let float_tiles = || tiles.iter().flatten().filter(|tile| is_float(tile));
        let is_moved = !float_tiles().all(is_even);
        let (x, stride) = match is_moved {
            false => (x, width),
            true => move_to_even(x, width, tiles, even_x),
        };
        let x: &[u16] = x.reinterpret_cast();
        let (simd, wants_f32) = (
            self.simd,
            self.simd == Simd::Avx2 && float_tiles().next().is_some(),
        );
        if wants_f32 {
            self.widen(x, &mut wide);
        }
        let wide_x = wants_f32.then_some(&wide[..]);

        let (rounded, out) = (&*rounded, DisjointSlice::new(out));
        let tasks = Tasks::new(n.div_ceil(PANEL), m, self.num_threads());
        self.pool
            .for_each(&mut self.workers, tasks.num_tasks(), |worker, task| {
                let (panel, rows) = tasks.task(task);
                if rows.is_empty() {
                    return;
                }
                let outputs = panel * PANEL..n.min((panel + 1) * PANEL);
                let len = rows.len() * PANEL;
                let max_len = tiles.len() * MAX_ROWS * PANEL;
                if worker.gemm.len() < max_len {
                    worker.gemm.resize(max_len);
                }
                let mut first_even = 0;
                let parts = worker.gemm.chunks_exact_mut(len);
                for (index, (tile, sums)) in tiles.iter().zip(parts).enumerate() {
                    let Some(Tile { inputs, linear }) = tile else {
                        continue;
                    };
                    let first_column = if is_moved { first_even } else { inputs.start };
                    match linear.matrix.weights() {
                        Packed::Bf16(panels) => {
                            let first = rows.start * stride + first_column;
                            let x = PanelInputs {
                                bf16: &x[first..],
                                f32: wide_x.map(|x| &x[first..]),
                                stride,
                            };
                            let at = At {
                                panel,
                                reads_ahead: true,
                            };
                            let kernel = PanelKernel::new(simd, rows.len());
                            kernel.multiply(x, panels, at, sums);
                        }
                        Packed::Quantised(panels) => {
                            let x = &rounded[index];
                            quantised::multiply_panel(simd, x, rows.start, panels, panel, sums);
                        }
                    }
                    if let Some(bias) = &linear.bias {
                        add_bias(sums, &bias[outputs.clone()]);
                    }
                    first_even += inputs.len().next_multiple_of(2);
                }
                add_pairs(tiles, &mut worker.gemm, len);
                for (row, sums) in rows.zip(worker.gemm.chunks_exact(PANEL)) {
                    // SAFETY: each rectangle of rows and outputs belongs to one task.
                    let out = unsafe { out.slice(row * n + outputs.start, outputs.len()) };
                    out.copy_from_slice(&sums[..outputs.len()]);
                }
            });
        self.wide_x = wide;
        self.tile_scratch = scratch;
    }

    /// Rounds the inputs of each tile that has quantised weights.
    fn round_tiles(
        &mut self,
        x: &[bf16],
        width: usize,
        tiles: &[Option<Tile<Self>>],
        rounded: &mut Vec<quantised::RoundedActivations>,
    ) {
        for (index, tile) in tiles.iter().enumerate() {
            let Some(Tile { inputs, linear }) = tile else {
                continue;
            };
            let Packed::Quantised(panels) = linear.matrix.weights() else {
                continue;
            };
            if rounded.len() <= index {
                rounded.resize_with(tiles.len(), Default::default);
            }
            let rounded = &mut rounded[index];
            self.with_part(x, width, inputs.clone(), |cpu, part| {
                cpu.round_activations(part, inputs.len(), panels, rounded);
            });
        }
    }
}

fn is_float(tile: &Tile<Cpu>) -> bool {
    matches!(tile.linear.matrix.weights(), Packed::Bf16(_))
}

/// The inputs of tiles, each at an even place and padded to an even number, and the width of these rows.
fn move_to_even<'m>(
    x: &[bf16],
    width: usize,
    tiles: &[Option<Tile<Cpu>>],
    moved: &'m mut Vec<bf16>,
) -> (&'m [bf16], usize) {
    moved.clear();
    for row in x.chunks_exact(width) {
        for Tile { inputs, .. } in tiles.iter().flatten() {
            moved.extend_from_slice(&row[inputs.clone()]);
            moved.resize(moved.len().next_multiple_of(2), bf16::ZERO);
        }
    }
    let lens = tiles.iter().flatten().map(|tile| tile.inputs.len());
    let moved_width = lens.map(|len| len.next_multiple_of(2)).sum();
    (moved, moved_width)
}

fn add_bias(sums: &mut [f32], bias: &[f32]) {
    for row in sums.chunks_exact_mut(PANEL) {
        for (sum, bias) in row.iter_mut().zip(bias) {
            *sum += bias;
        }
    }
}

/// Adds the sums of tiles, `len` each, in pairs to the first one. Those of a tile without inputs are not added. `false`
/// if there are none.
fn add_pairs<T>(tiles: &[Option<T>], sums: &mut [f32], len: usize) -> bool {
    if let [tile] = tiles {
        return tile.is_some();
    }
    let half = tiles.len() / 2;
    let (first, second) = sums.split_at_mut(half * len);
    let has_first = add_pairs(&tiles[..half], first, len);
    let has_second = add_pairs(&tiles[half..], second, len);
    let pairs = first[..len].iter_mut().zip(&second[..len]);
    match (has_first, has_second) {
        (true, true) => pairs.for_each(|(first, second)| *first += second),
        (false, true) => pairs.for_each(|(first, second)| *first = *second),
        (_, false) => {}
    }
    has_first || has_second
}
