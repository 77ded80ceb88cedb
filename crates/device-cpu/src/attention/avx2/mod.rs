//! The kernels for AVX2: up to six rows at a time, as many as there are registers for sums.
//!
//! Keys and values are widened in registers, once for all these rows. One or two rows take several groups of 16
//! columns at a time, so that there are enough independent sums.

mod bf16;
mod int8;
mod softmax;

use super::super::kv_cache::GROUP;
use super::super::prefetch::prefetch;
use super::{AttentionTile, TILE};

pub(super) use self::bf16::tile as bf16_tile;
pub(super) use self::int8::tile as int8_tile;

/// Calls `$some_rows::<ROWS, GROUPS>(tile, first)` for all rows of a tile: for `ROWS` rows starting at `first`, with
/// registers for the sums of `GROUPS` times 16 columns.
macro_rules! for_some_rows {
    ($tile:ident, $some_rows:ident) => {{
        const { assert!(super::super::MAX_ROWS == 6) };
        let num_chunks = $tile.rows.div_ceil(super::super::MAX_ROWS);
        for chunk in 0..num_chunks {
            let first = chunk * $tile.rows / num_chunks;
            let rows = (chunk + 1) * $tile.rows / num_chunks - first;
            match rows {
                1 => $some_rows::<1, 4>($tile, first),
                2 => $some_rows::<2, 2>($tile, first),
                3 => $some_rows::<3, 1>($tile, first),
                4 => $some_rows::<4, 1>($tile, first),
                5 => $some_rows::<5, 1>($tile, first),
                _ => $some_rows::<6, 1>($tile, first),
            }
        }
    }};
}
use for_some_rows;

/// Calls `$block::<ROWS, _>($arguments, start)` for `$end` groups of columns: `$GROUPS` at a time, then the rest.
macro_rules! for_blocks {
    ($end:expr, $GROUPS:ident, $block:ident::<$ROWS:ident>($($argument:expr),*)) => {{
        let end = $end;
        let mut start = 0;
        while start < end {
            match (end - start).min($GROUPS) {
                1 => $block::<$ROWS, 1>($($argument),*, start),
                2 => $block::<$ROWS, 2>($($argument),*, start),
                3 => $block::<$ROWS, 3>($($argument),*, start),
                _ => $block::<$ROWS, 4>($($argument),*, start),
            }
            start += $GROUPS;
        }
    }};
}
use for_blocks;

/// Registers per group of columns.
const REGISTERS: usize = GROUP / 8;

/// The end of the positions of a tile that any of some rows sees.
///
/// # Safety
///
/// The tile has these rows.
unsafe fn end_of_seen<const ROWS: usize>(tile: &AttentionTile, first: usize) -> usize {
    let mut seen = 0;
    for row in first..first + ROWS {
        // SAFETY: the caller's promise.
        seen |= unsafe { *tile.seen.add(row) };
    }
    TILE - seen.leading_zeros() as usize
}

/// Prefetches a line of each of some groups.
#[inline(always)]
fn ask<const GROUPS: usize>(groups: &[*const u16; GROUPS], offset: usize) {
    for group in groups {
        prefetch(group.wrapping_add(offset));
    }
}
