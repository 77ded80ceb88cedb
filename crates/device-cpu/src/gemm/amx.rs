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
//! The instruction sums the products of the first and those of the second elements of 16 pairs apart, adds both, and
//! adds that to the sum. A single row has tiles of one row: what AVX-512 sums in this order has two sums for each, and
//! waits for them.

use std::arch::asm;

use super::super::amx::TILE_ROWS;
use super::super::panel_order::PANEL;
use super::tile::{GemmKernel, GemmTile};

/// Pairs of inputs of a tile.
const STEP: usize = 16;
/// Bytes from a pair of weights to the next, and from a row of sums to the next.
const PANEL_BYTES: usize = PANEL * 4;

/// See [`GemmKernel`]. A chunk of weights is 192 KiB of the L2 cache.
pub(super) const KERNEL: GemmKernel = GemmKernel {
    tile,
    max_rows: 2 * TILE_ROWS,
    row_unit: TILE_ROWS,
    chunk_pairs: 1024,
};

/// # Safety
///
/// The pointers and sizes of the tile are valid, the machine supports AMX with bf16, and
/// [tiles](super::super::amx::Tiles) are configured: for blocks of so many rows, or of 16 if there are more.
unsafe fn tile(tile: &GemmTile) {
    const { assert!(KERNEL.chunk_pairs.is_multiple_of(STEP)) };
    // SAFETY: the caller's promises.
    unsafe { whole_steps(tile) };
    let num_left = tile.num_pairs % STEP;
    if num_left > 0 {
        // SAFETY: there are so many pairs behind the whole steps.
        unsafe { last_pairs(tile, tile.num_pairs - num_left, num_left) };
    }
}

/// Adds the last pairs, fewer than a step, padded with zeros.
///
/// # Safety
///
/// As for [`tile`], and the tile has these pairs.
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
    let weights = weights.as_ptr().cast();
    let last = GemmTile {
        x: x.as_ptr().cast(),
        x_stride: 2 * STEP,
        weights,
        num_pairs: STEP,
        ahead: weights,
        ahead_lines: 0,
        first: false,
        ..*tile
    };
    // SAFETY: both copies are a whole step. The sums have begun, with zeros if there was no step before.
    unsafe { whole_steps(&last) };
}

/// The pairs of a tile but the last ones, which are fewer than a step.
///
/// # Safety
///
/// As for [`tile`].
unsafe fn whole_steps(tile: &GemmTile) {
    // SAFETY: the caller's promises.
    unsafe {
        match tile.rows {
            ..=TILE_ROWS => one_block(tile),
            _ => two_blocks(tile),
        }
    }
}

unsafe fn one_block(tile: &GemmTile) {
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
            first = in(reg) u32::from(tile.first),
            sums = in(reg) tile.sums,
            stride = in(reg) PANEL_BYTES,
            steps = inout(reg) tile.num_pairs / STEP => _,
            x = inout(reg) tile.x => _,
            x_stride = in(reg) 2 * tile.x_stride,
            weights = inout(reg) tile.weights => _,
            ahead = inout(reg) tile.ahead => _,
            lines = in(reg) STEP * tile.ahead_lines,
            count = out(reg) _,
            step_bytes = const STEP * PANEL_BYTES,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm4") _, out("tmm5") _,
            out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// The second block ends with the last row, and may have rows of the first: both compute the same for them.
unsafe fn two_blocks(tile: &GemmTile) {
    let before = tile.rows - TILE_ROWS;
    let second_x = tile.x.wrapping_add(before * tile.x_stride);
    let second_sums = tile.sums.wrapping_add(before * PANEL);
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
            count = inout(reg) u64::from(tile.first) => _,
            sums = in(reg) tile.sums,
            second_sums = in(reg) second_sums,
            stride = in(reg) PANEL_BYTES,
            steps = inout(reg) tile.num_pairs / STEP => _,
            x = inout(reg) tile.x => _,
            second_x = inout(reg) second_x => _,
            x_stride = in(reg) 2 * tile.x_stride,
            weights = inout(reg) tile.weights => _,
            ahead = inout(reg) tile.ahead => _,
            lines = in(reg) STEP * tile.ahead_lines,
            step_bytes = const STEP * PANEL_BYTES,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _,
            out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}
