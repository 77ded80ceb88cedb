//! The kernel for AMX: 16 rows of 16 outputs per tile of sums, 32 inputs per instruction (`tdpbf16ps`).
//!
//! The tiles of two blocks of rows and of the 48 outputs of a panel are six, which leaves one for weights and one for
//! activations:
//!
//! ```text
//!                  weights, 16 pairs of inputs: | tile 7 | tile 7 | tile 7 |
//! rows 0..16       activations: tile 6          | sums 0 | sums 1 | sums 2 |
//! rows 16..32      activations: tile 6          | sums 3 | sums 4 | sums 5 |
//! ```
//!
//! Weights are read as they are packed: a row of a tile is 16 of the 48 outputs of a pair.
//!
//! The instruction sums the products of the first and those of the second elements of 16 pairs apart, adds both, and adds
//! that to the sum. A single row, which waits for weights anyway, needs no tiles: AVX-512 sums it in the same order, bit for
//! bit.

use std::arch::asm;
use std::arch::x86_64::*;

use super::super::amx::TILE_ROWS;
use super::super::avx512::load;
use super::super::panel_order::PANEL;
use super::tile::{GemmKernel, GemmTile, LINE};

/// Pairs of inputs of a tile.
const STEP: usize = 16;
/// Registers of AVX-512 per row of sums.
const REGISTERS: usize = PANEL / 16;
/// Bytes from a pair of weights to the next, and from a row of sums to the next.
const PANEL_BYTES: usize = PANEL * 4;

/// The most rows that are computed without tiles.
pub(super) const MAX_ROWS_WITHOUT_TILES: usize = 1;

/// See [`GemmKernel`]. A chunk of weights is 192 KiB of the L2 cache.
pub(super) const KERNEL: GemmKernel = GemmKernel {
    tile,
    max_rows: 2 * TILE_ROWS,
    row_unit: TILE_ROWS,
    chunk_pairs: 1024,
};

/// # Safety
///
/// The pointers and sizes of the tile are valid, the machine supports AMX with bf16, and for more rows than one
/// [tiles](super::super::amx::Tiles) are configured: for blocks of so many rows, or of 16 if there are more.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn tile(tile: &GemmTile) {
    const { assert!(KERNEL.chunk_pairs.is_multiple_of(STEP)) };
    // SAFETY: the caller's promises.
    unsafe {
        match tile.rows {
            ..=MAX_ROWS_WITHOUT_TILES => without_tiles::<MAX_ROWS_WITHOUT_TILES>(tile),
            _ => with_tiles(tile),
        }
    }
}

/// As the instruction on tiles does: two sums for each element, of 16 pairs at a time.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn without_tiles<const ROWS: usize>(tile: &GemmTile) {
    let mut sums = [[_mm512_setzero_ps(); REGISTERS]; ROWS];
    if !tile.first {
        for (row, sums) in sums.iter_mut().enumerate() {
            for (i, sum) in sums.iter_mut().enumerate() {
                // SAFETY: the tile has `ROWS` rows of 48 sums.
                *sum = unsafe { _mm512_loadu_ps(tile.sums.add(row * PANEL + i * 16)) };
            }
        }
    }
    let (mut weights, mut ahead) = (tile.weights, tile.ahead);
    for first_pair in (0..tile.num_pairs).step_by(STEP) {
        let mut halves = [[[_mm512_setzero_ps(); REGISTERS]; ROWS]; 2];
        for pair in first_pair..tile.num_pairs.min(first_pair + STEP) {
            for _ in 0..tile.ahead_lines {
                _mm_prefetch::<_MM_HINT_T1>(ahead.cast());
                ahead = ahead.wrapping_add(LINE);
            }
            // SAFETY: the tile has `num_pairs` pairs of 48 outputs.
            let pairs =
                unsafe { std::array::from_fn::<_, REGISTERS, _>(|i| load(weights.add(i * 32))) };
            weights = weights.wrapping_add(PANEL * 2);
            let [first, second] = &mut halves;
            for (row, (first, second)) in first.iter_mut().zip(second).enumerate() {
                // SAFETY: the tile has `ROWS` rows of `num_pairs` pairs of activations.
                let x = unsafe {
                    let x = tile.x.add(row * tile.x_stride + 2 * pair);
                    x.cast::<u32>().read_unaligned()
                };
                let (x_first, x_second) = (of_pair(x & 0xffff), of_pair(x & 0xffff_0000));
                for ((first, second), pairs) in first.iter_mut().zip(second).zip(pairs) {
                    *first = _mm512_dpbf16_ps(*first, x_first, pairs);
                    *second = _mm512_dpbf16_ps(*second, x_second, pairs);
                }
            }
        }
        let [first, second] = halves;
        for ((sums, first), second) in sums.iter_mut().zip(first).zip(second) {
            for ((sum, first), second) in sums.iter_mut().zip(first).zip(second) {
                *sum = _mm512_add_ps(*sum, _mm512_add_ps(first, second));
            }
        }
    }
    for (row, sums) in sums.iter().enumerate() {
        for (i, sum) in sums.iter().enumerate() {
            // SAFETY: the tile has `ROWS` rows of 48 sums.
            unsafe { _mm512_storeu_ps(tile.sums.add(row * PANEL + i * 16), *sum) };
        }
    }
}

/// A pair of bf16 in all lanes.
#[inline]
#[target_feature(enable = "avx512f")]
fn of_pair(bits: u32) -> __m512bh {
    // SAFETY: both types are 32 lanes of 16 bits.
    unsafe { std::mem::transmute(_mm512_set1_epi32(bits as i32)) }
}

/// # Safety
///
/// As for [`tile`], with configured tiles.
unsafe fn with_tiles(tile: &GemmTile) {
    let num_steps = tile.num_pairs / STEP;
    let steps = Steps {
        x: tile.x,
        x_stride: tile.x_stride,
        rows: tile.rows,
        weights: tile.weights,
        num_steps,
        ahead: tile.ahead,
        ahead_lines: tile.ahead_lines * STEP,
        sums: tile.sums,
        first: tile.first,
    };
    // SAFETY: the steps are whole ones of the tile.
    unsafe { steps.run() };
    let num_left = tile.num_pairs % STEP;
    if num_left > 0 {
        // SAFETY: there are so many pairs behind the whole steps.
        unsafe { last_pairs(tile, num_steps * STEP, num_left) };
    }
}

/// Adds the last pairs, fewer than a step, padded with zeros.
///
/// # Safety
///
/// As for [`with_tiles`], and the tile has these pairs.
#[cold]
unsafe fn last_pairs(tile: &GemmTile, first_pair: usize, num_pairs: usize) {
    let mut x = [[0_u16; 2 * STEP]; KERNEL.max_rows];
    let mut weights = [[0_u16; 2 * PANEL]; STEP];
    for (row, x) in x[..tile.rows].iter_mut().enumerate() {
        // SAFETY: each row has these pairs.
        let from = unsafe {
            let from = tile.x.add(row * tile.x_stride + 2 * first_pair);
            std::slice::from_raw_parts(from, 2 * num_pairs)
        };
        x[..2 * num_pairs].copy_from_slice(from);
    }
    for (pair, weights) in weights[..num_pairs].iter_mut().enumerate() {
        // SAFETY: the panel has these pairs.
        let from = unsafe {
            let from = tile.weights.add((first_pair + pair) * 2 * PANEL);
            std::slice::from_raw_parts(from, 2 * PANEL)
        };
        weights.copy_from_slice(from);
    }
    let steps = Steps {
        x: x.as_ptr().cast(),
        x_stride: 2 * STEP,
        rows: tile.rows,
        weights: weights.as_ptr().cast(),
        num_steps: 1,
        ahead: weights.as_ptr().cast(),
        ahead_lines: 0,
        sums: tile.sums,
        first: false,
    };
    // SAFETY: both copies are a whole step. The sums have begun, with zeros if there was no step before.
    unsafe { steps.run() };
}

/// Whole steps of some rows: the operands as in [`GemmTile`].
struct Steps {
    x: *const u16,
    x_stride: usize,
    rows: usize,
    weights: *const u16,
    num_steps: usize,
    ahead: *const u16,
    /// Cache lines to prefetch during each step.
    ahead_lines: usize,
    sums: *mut f32,
    first: bool,
}

impl Steps {
    /// # Safety
    ///
    /// All is valid, and tiles are configured for these rows.
    unsafe fn run(&self) {
        // SAFETY: the caller's promises.
        unsafe {
            match self.rows {
                ..=TILE_ROWS => self.one_block(),
                _ => self.two_blocks(),
            }
        }
    }

    unsafe fn one_block(&self) {
        // SAFETY: the tiles have as many rows as there are, which are valid, and registers of the block are its own.
        unsafe {
            asm!(
                "test {first:e}, {first:e}",
                "jnz 2f",
                "tileloadd tmm0, [{sums} + {stride}]",
                "tileloadd tmm1, [{sums} + {stride} + 64]",
                "tileloadd tmm2, [{sums} + {stride} + 128]",
                "jmp 3f",
                "2:",
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "3:",
                "test {steps}, {steps}",
                "jz 7f",
                "4:",
                "tileloadd tmm6, [{x} + {x_stride}]",
                "tileloadd tmm7, [{weights} + {stride}]",
                "tdpbf16ps tmm0, tmm6, tmm7",
                "tileloadd tmm5, [{weights} + {stride} + 64]",
                "tdpbf16ps tmm1, tmm6, tmm5",
                "tileloadd tmm4, [{weights} + {stride} + 128]",
                "tdpbf16ps tmm2, tmm6, tmm4",
                "mov {count}, {lines}",
                "test {count}, {count}",
                "jz 6f",
                "5:",
                "prefetcht1 [{ahead}]",
                "add {ahead}, 64",
                "dec {count}",
                "jnz 5b",
                "6:",
                "add {x}, 64",
                "add {weights}, {step_bytes}",
                "dec {steps}",
                "jnz 4b",
                "7:",
                "tilestored [{sums} + {stride}], tmm0",
                "tilestored [{sums} + {stride} + 64], tmm1",
                "tilestored [{sums} + {stride} + 128], tmm2",
                first = in(reg) u32::from(self.first),
                sums = in(reg) self.sums,
                stride = in(reg) PANEL_BYTES,
                steps = inout(reg) self.num_steps => _,
                x = inout(reg) self.x => _,
                x_stride = in(reg) 2 * self.x_stride,
                weights = inout(reg) self.weights => _,
                ahead = inout(reg) self.ahead => _,
                lines = in(reg) self.ahead_lines,
                count = out(reg) _,
                step_bytes = const STEP * PANEL_BYTES,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm4") _, out("tmm5") _,
                out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }

    /// The second block ends with the last row, and may have rows of the first: both compute the same for them.
    unsafe fn two_blocks(&self) {
        let before = self.rows - TILE_ROWS;
        let second_x = self.x.wrapping_add(before * self.x_stride);
        let second_sums = self.sums.wrapping_add(before * PANEL);
        // SAFETY: both blocks are 16 rows of those that there are, which are valid.
        unsafe {
            asm!(
                "test {count:e}, {count:e}",
                "jnz 2f",
                "tileloadd tmm0, [{sums} + {stride}]",
                "tileloadd tmm1, [{sums} + {stride} + 64]",
                "tileloadd tmm2, [{sums} + {stride} + 128]",
                "tileloadd tmm3, [{second_sums} + {stride}]",
                "tileloadd tmm4, [{second_sums} + {stride} + 64]",
                "tileloadd tmm5, [{second_sums} + {stride} + 128]",
                "jmp 3f",
                "2:",
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "tilezero tmm4",
                "tilezero tmm5",
                "3:",
                "test {steps}, {steps}",
                "jz 7f",
                "4:",
                "tileloadd tmm7, [{weights} + {stride}]",
                "tileloadd tmm6, [{x} + {x_stride}]",
                "tdpbf16ps tmm0, tmm6, tmm7",
                "tileloadd tmm6, [{second_x} + {x_stride}]",
                "tdpbf16ps tmm3, tmm6, tmm7",
                "tileloadd tmm7, [{weights} + {stride} + 64]",
                "tdpbf16ps tmm4, tmm6, tmm7",
                "tileloadd tmm6, [{x} + {x_stride}]",
                "tdpbf16ps tmm1, tmm6, tmm7",
                "tileloadd tmm7, [{weights} + {stride} + 128]",
                "tdpbf16ps tmm2, tmm6, tmm7",
                "tileloadd tmm6, [{second_x} + {x_stride}]",
                "tdpbf16ps tmm5, tmm6, tmm7",
                "mov {count}, {lines}",
                "test {count}, {count}",
                "jz 6f",
                "5:",
                "prefetcht1 [{ahead}]",
                "add {ahead}, 64",
                "dec {count}",
                "jnz 5b",
                "6:",
                "add {x}, 64",
                "add {second_x}, 64",
                "add {weights}, {step_bytes}",
                "dec {steps}",
                "jnz 4b",
                "7:",
                "tilestored [{sums} + {stride}], tmm0",
                "tilestored [{sums} + {stride} + 64], tmm1",
                "tilestored [{sums} + {stride} + 128], tmm2",
                "tilestored [{second_sums} + {stride}], tmm3",
                "tilestored [{second_sums} + {stride} + 64], tmm4",
                "tilestored [{second_sums} + {stride} + 128], tmm5",
                count = inout(reg) u64::from(self.first) => _,
                sums = in(reg) self.sums,
                second_sums = in(reg) second_sums,
                stride = in(reg) PANEL_BYTES,
                steps = inout(reg) self.num_steps => _,
                x = inout(reg) self.x => _,
                second_x = inout(reg) second_x => _,
                x_stride = in(reg) 2 * self.x_stride,
                weights = inout(reg) self.weights => _,
                ahead = inout(reg) self.ahead => _,
                lines = in(reg) self.ahead_lines,
                step_bytes = const STEP * PANEL_BYTES,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _,
                out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }
}
