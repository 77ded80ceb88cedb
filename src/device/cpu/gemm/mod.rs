//! `out = x * W^T`: the activations of a step times a packed weight matrix.
//!
//! A task is one panel of 48 outputs for a block of rows. It walks along `k` in chunks whose weights
//! stay in the first-level cache while all rows of the block pass over them, a few rows at a time:
//!
//! ```text
//!              k: chunk 0   chunk 1   chunk 2
//! rows 0..9      tile ->     tile ->   tile      each tile: 9 x 48 sums in registers, loaded from and
//! rows 9..18     tile        tile      tile      stored to f32 scratch between chunks
//! ```
//!
//! An element's sum is one chain over `k` in order, starting at zero; storing it between chunks changes
//! no bit. So it depends neither on the rows beside it nor on how the work was cut.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

use half::bf16;
use half::slice::HalfFloatSliceExt;

use super::memory::Shared;
use super::pack::PANEL;
use super::{Cpu, PackedMatrix, Simd};

/// What becomes of the product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// It replaces what is in `out`.
    Store,
    /// It is added to what is in `out`: a residual connection.
    Add,
}

/// Rows of one tile, at most.
const MAX_TILE_ROWS: usize = 9;
/// Pairs of inputs of one chunk: 24 KiB of weights.
const CHUNK_PAIRS: usize = 128;
/// Elements of a cache line.
const LINE: usize = 32;
/// Cache lines of a pair of inputs of a panel.
const PAIR_LINES: usize = PANEL * 2 / LINE;
/// Rows of one task: their activations for a chunk, and their sums, stay in the second-level cache.
const BLOCK_ROWS: usize = 256;

/// One step of a tile: some rows of `x` times one chunk of a panel.
struct Tile {
    /// The chunk's activations, `[rows, 2 * num_pairs]`.
    x: *const u16,
    /// Elements from one row of `x` to the next.
    x_stride: usize,
    /// 1 to `MAX_TILE_ROWS`.
    rows: usize,
    /// The chunk's weights, `[num_pairs, 48, 2]`.
    weights: *const u16,
    num_pairs: usize,
    /// Weights that will be wanted soon, to be brought into the second-level cache.
    ahead: *const u16,
    /// How many cache lines of them to ask for during each pair.
    ahead_lines: usize,
    /// The sums, `[rows, 48]`.
    sums: *mut f32,
    /// Whether the sums start at zero instead of at what is in `sums`.
    first: bool,
}

/// Adds a tile's products to its sums. Unsafe: the pointers and sizes of the tile must be right, and
/// the machine must have the kernel's instruction set.
type Kernel = unsafe fn(&Tile);

fn kernel(simd: Simd) -> Kernel {
    match simd {
        #[cfg(target_arch = "x86_64")]
        Simd::Avx512Bf16 => avx512::tile,
        #[cfg(target_arch = "x86_64")]
        Simd::Avx2 => avx2::tile,
        _ => portable::tile,
    }
}

impl Cpu {
    /// `out = x * W^T + bias`, or that added to `out`. `x` is `[m, k]`, `weights` was packed from
    /// `[n, k]`, `bias` is `[n]`, `out` is `[m, n]`.
    ///
    /// # Panics
    ///
    /// The lengths do not agree.
    pub fn gemm(
        &mut self,
        x: &[bf16],
        m: usize,
        weights: &PackedMatrix,
        bias: Option<&[f32]>,
        output: Output,
        out: &mut [f32],
    ) {
        let (n, k) = (weights.n(), weights.k());
        assert_eq!(x.len(), m * k, "x is [m, k] = [{m}, {k}]");
        assert_eq!(out.len(), m * n, "out is [m, n] = [{m}, {n}]");
        assert!(
            bias.is_none_or(|bias| bias.len() == n),
            "bias is [n] = [{n}]"
        );

        let num_pairs = weights.num_pairs();
        let x_stride = 2 * num_pairs;
        let mut padded = std::mem::take(&mut self.padded_x);
        let x = if k == x_stride {
            x
        } else {
            pad_rows(x, k, x_stride, &mut padded);
            &padded
        };

        let kernel = kernel(self.simd);
        let num_blocks = m.div_ceil(BLOCK_ROWS);
        let num_tasks = n.div_ceil(PANEL) * num_blocks;
        let out = Shared::new(out);
        self.pool
            .for_each(&mut self.workers, num_tasks, |worker, task| {
                let panel = task / num_blocks;
                let first_row = task % num_blocks * BLOCK_ROWS;
                let rows = BLOCK_ROWS.min(m - first_row);
                let x = &x[first_row * x_stride..][..rows * x_stride];
                worker.gemm.resize(BLOCK_ROWS * PANEL, 0.0);
                let sums = &mut worker.gemm[..rows * PANEL];
                multiply_panel(kernel, x, weights, panel, sums);

                let first = panel * PANEL;
                let columns = PANEL.min(n - first);
                for (row, sums) in sums.as_chunks::<PANEL>().0.iter().enumerate() {
                    // SAFETY: every rectangle of rows and outputs is one task's.
                    let out = unsafe { out.slice((first_row + row) * n + first, columns) };
                    let bias = bias.map(|bias| &bias[first..][..columns]);
                    write_row(sums, bias, output, out);
                }
            });
        self.padded_x = padded;
    }
}

/// The sums of all rows of `x` with one panel.
fn multiply_panel(
    kernel: Kernel,
    x: &[bf16],
    weights: &PackedMatrix,
    panel: usize,
    sums: &mut [f32],
) {
    let num_pairs = weights.num_pairs();
    let x_stride = 2 * num_pairs;
    let num_rows = sums.len() / PANEL;
    assert!(x.len() == num_rows * x_stride && panel < weights.n().div_ceil(PANEL));
    let x: &[u16] = x.reinterpret_cast();
    let num_tiles = num_rows.div_ceil(MAX_TILE_ROWS);
    // A chunk of weights comes from memory while the one before is multiplied, so that neither
    // waits for the other. What follows the panel's last chunk is the next panel, which
    // as a rule is this thread's next task.
    // A single row reads without a pause, which the processor foresees by itself.
    let lines_per_pair = if num_rows > 1 {
        PAIR_LINES.div_ceil(num_tiles)
    } else {
        0
    };
    for first_pair in (0..num_pairs).step_by(CHUNK_PAIRS) {
        // SAFETY: the panel exists and the pair is below its number of pairs.
        let chunk = unsafe {
            weights
                .as_ptr()
                .add((panel * num_pairs + first_pair) * PANEL * 2)
        };
        let chunk_pairs = CHUNK_PAIRS.min(num_pairs - first_pair);
        for tile in 0..num_tiles {
            let lines_before = tile * lines_per_pair * chunk_pairs;
            let all_asked_for = lines_before >= PAIR_LINES * CHUNK_PAIRS;
            // Even shares: 10 rows are 5 + 5, because a tile of few rows waits for its sums.
            let first_row = tile * num_rows / num_tiles;
            let rows = (tile + 1) * num_rows / num_tiles - first_row;
            let tile = Tile {
                x: x[first_row * x_stride + 2 * first_pair..].as_ptr(),
                x_stride,
                rows,
                weights: chunk,
                num_pairs: chunk_pairs,
                ahead: chunk.wrapping_add(chunk_pairs * PANEL * 2 + lines_before * LINE),
                ahead_lines: if all_asked_for { 0 } else { lines_per_pair },
                sums: sums[first_row * PANEL..].as_mut_ptr(),
                first: first_pair == 0,
            };
            // SAFETY: `x` has `rows` rows of `x_stride` elements from here on, the panel has
            // `num_pairs` pairs from here on, and `sums` has 48 elements a row.
            unsafe { kernel(&tile) };
        }
    }
}

fn write_row(sums: &[f32; PANEL], bias: Option<&[f32]>, output: Output, out: &mut [f32]) {
    match (output, bias) {
        (Output::Store, None) => out.copy_from_slice(&sums[..out.len()]),
        (Output::Store, Some(bias)) => {
            for ((out, sum), bias) in out.iter_mut().zip(sums).zip(bias) {
                *out = sum + bias;
            }
        }
        (Output::Add, None) => {
            for (out, sum) in out.iter_mut().zip(sums) {
                *out += sum;
            }
        }
        (Output::Add, Some(bias)) => {
            for ((out, sum), bias) in out.iter_mut().zip(sums).zip(bias) {
                *out += sum + bias;
            }
        }
    }
}

/// Copies rows of `k` elements to rows of `stride`, the rest zero.
fn pad_rows(x: &[bf16], k: usize, stride: usize, padded: &mut Vec<bf16>) {
    padded.clear();
    for row in x.chunks_exact(k) {
        padded.extend_from_slice(row);
        padded.resize(padded.len() + stride - k, bf16::ZERO);
    }
}
