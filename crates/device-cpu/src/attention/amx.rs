//! The kernel for AMX: scores, and weighted values, as products of tiles of bf16 (`tdpbf16ps`) for 16 rows at a time.
//! The softmax between them is the AVX-512 kernel's.
//!
//! ```text
//!                       16 pairs of keys: tile 5                                8 pairs of values: tile 7
//!                       of 16 positions each                                    of 16 elements each
//! queries: tile 4       | scores 0 | scores 1 | scores 2 | scores 3 |
//! probabilities: tile 6                                                         | sums 0 | sums 1 | sums 2 | sums 3 |
//! ```
//!
//! Keys and values are read as they are stored: a row of a tile is a pair of elements of 16 positions, or 16 elements
//! of a pair of positions. A row's result does not depend on the other rows of its tile, so there may be any number.

use crate::kv_cache::GroupedLayout;
use std::arch::asm;
use std::arch::x86_64::*;

use super::super::amx::{TILE_ROWS, Tiles};
use super::super::kv_cache::GROUP;
use super::avx512::{add_biases, softmax};
use super::softmax::bound;
use super::{AttentionTile, TILE, TILE_GROUPS};
use inflight_device::KvDtype;

/// Pairs of elements that are multiplied at once.
const STEP: usize = 16;
/// Pairs of positions of a group, and elements that are multiplied at once behind the whole steps.
const HALF_STEP: usize = GROUP / 2;
/// Bytes from a pair of keys to the next.
const KEY_BYTES: usize = 2 * GROUP * 2;
/// Bytes of a row of scores.
const SCORE_BYTES: usize = TILE * 4;
/// Bytes of a row of probabilities.
const PROBABILITY_BYTES: usize = TILE * 2;

/// See [`super::AttentionKernel`].
///
/// # Safety
///
/// The pointers and sizes of the tile are valid, and the machine supports AMX with bf16.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")]
pub(super) unsafe fn tile(tile: &AttentionTile) {
    let num_whole = tile.rows / TILE_ROWS;
    if num_whole > 0 {
        let _tiles = Tiles::of_queries(TILE_ROWS);
        for block in 0..num_whole {
            // SAFETY: the caller's promises; the tile has these rows.
            unsafe { some_rows(tile, block * TILE_ROWS, TILE_ROWS) };
        }
    }
    let num_left = tile.rows % TILE_ROWS;
    if num_left > 0 {
        let _tiles = Tiles::of_queries(num_left);
        // SAFETY: as above.
        unsafe { some_rows(tile, num_whole * TILE_ROWS, num_left) };
    }
}

/// The next tile's groups, for the first rows of a tile to prefetch while they compute: all lines at once would keep
/// the products waiting, and then the memory. Null if there is nothing to prefetch.
fn ahead_of(
    here: &[*const u16; TILE_GROUPS],
    ahead: &[*const u16; TILE_GROUPS],
    first: usize,
) -> *const *const u16 {
    match first == 0 && ahead[0] != here[0] {
        true => ahead.as_ptr(),
        false => std::ptr::null(),
    }
}

/// # Safety
///
/// As for [`tile`], which has these rows, with tiles that are configured for so many queries.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")]
unsafe fn some_rows(tile: &AttentionTile, first: usize, rows: usize) {
    // SAFETY: the caller's promises.
    unsafe {
        score(tile, first, rows);
        let scores = std::slice::from_raw_parts_mut(tile.scores, rows * TILE);
        if tile.layout.dtype != KvDtype::Bf16 {
            for row in scores.as_chunks_mut::<TILE>().0 {
                for (score, scale) in row.iter_mut().zip(&(*tile.scales).keys) {
                    *score *= scale;
                }
            }
        }
        if let Some(cap) = tile.soft_cap {
            bound(scores, tile.scale, cap);
        }
        add_biases(tile, first, rows);
        let padded_dim = tile.layout.padded_dim();
        for row in 0..rows {
            let rescale = softmax(tile, first + row, row);
            let acc = tile.acc.add((first + row) * padded_dim);
            for d in (0..padded_dim).step_by(16) {
                let sums = _mm512_mul_ps(_mm512_loadu_ps(acc.add(d)), rescale);
                _mm512_storeu_ps(acc.add(d), sums);
            }
        }
        let ahead = ahead_of(&tile.values, &tile.values_ahead, first);
        for d in (0..padded_dim).step_by(64) {
            let acc = tile.acc.add(first * padded_dim + d);
            match (padded_dim - d) / 16 {
                1 => accumulate_1(tile, acc, d, ahead),
                2 => accumulate_2(tile, acc, d, ahead),
                3 => accumulate_3(tile, acc, d, ahead),
                _ => accumulate_4(tile, acc, d, ahead),
            }
        }
    }
}

/// Writes the scores of some rows with the groups that the tile has.
///
/// # Safety
///
/// As for [`some_rows`].
unsafe fn score(tile: &AttentionTile, first: usize, rows: usize) {
    let head_dim = tile.layout.head_dim;
    let num_left = head_dim / 2 % HALF_STEP;
    // SAFETY: the caller's promises; the last pairs are those behind the half steps.
    unsafe {
        let q = tile.q.add(first * head_dim);
        let last = (num_left > 0).then(|| LastPairs::new(tile, q, rows, num_left));
        let ahead = ahead_of(&tile.keys, &tile.keys_ahead, first);
        match tile.num_groups {
            1 => score_1(tile, q, last.as_ref(), ahead),
            2 => score_2(tile, q, last.as_ref(), ahead),
            3 => score_3(tile, q, last.as_ref(), ahead),
            _ => score_4(tile, q, last.as_ref(), ahead),
        }
    }
}

/// The last pairs of elements, fewer than a half step, padded with zeros.
#[repr(C, align(64))]
struct LastPairs {
    keys: [[[u16; 2 * GROUP]; HALF_STEP]; TILE_GROUPS],
    queries: [[u16; 2 * HALF_STEP]; TILE_ROWS],
}

impl LastPairs {
    /// # Safety
    ///
    /// `q` are so many rows of the tile's.
    #[cold]
    unsafe fn new(tile: &AttentionTile, q: *const u16, rows: usize, num_pairs: usize) -> Self {
        let head_dim = tile.layout.head_dim;
        let before = head_dim / 2 - num_pairs;
        let mut last = Self {
            keys: [[[0; _]; _]; _],
            queries: [[0; _]; _],
        };
        for (row, last) in last.queries[..rows].iter_mut().enumerate() {
            // SAFETY: each row has these elements.
            let from = unsafe {
                let from = q.add(row * head_dim + 2 * before);
                std::slice::from_raw_parts(from, 2 * num_pairs)
            };
            last[..2 * num_pairs].copy_from_slice(from);
        }
        let groups = tile.keys.iter().zip(&mut last.keys);
        for (keys, last) in groups.take(tile.num_groups) {
            for (pair, last) in last[..num_pairs].iter_mut().enumerate() {
                // SAFETY: each group has these pairs.
                *last = unsafe {
                    keys.add((before + pair) * 2 * GROUP)
                        .cast::<[u16; _]>()
                        .read()
                };
            }
        }
        last
    }
}

/// Prefetches the keys of a half step behind `group`.
macro_rules! prefetch_half_step {
    ($offset:literal) => {
        concat!(
            prefetch_half_step!(@line $offset, "0"),
            prefetch_half_step!(@line $offset, "64"),
            prefetch_half_step!(@line $offset, "128"),
            prefetch_half_step!(@line $offset, "192"),
            prefetch_half_step!(@line $offset, "256"),
            prefetch_half_step!(@line $offset, "320"),
            prefetch_half_step!(@line $offset, "384"),
            prefetch_half_step!(@line $offset, "448"),
        )
    };
    (@line $offset:literal, $line:literal) => {
        concat!("prefetcht1 [{group} + ", $offset, " + ", $line, "]\n")
    };
}

macro_rules! score {
    ($name:ident, $($group:literal)*) => {
        /// # Safety
        ///
        /// As for [`score()`]. `ahead` are the keys to prefetch, or null.
        unsafe fn $name(
            tile: &AttentionTile,
            q: *const u16,
            last: Option<&LastPairs>,
            ahead: *const *const u16,
        ) {
            let num_pairs = tile.layout.head_dim / 2;
            let last_keys = last.map_or(std::ptr::null(), |last| last.keys.as_ptr());
            let last_q = last.map_or(std::ptr::null(), |last| last.queries.as_ptr());
            // SAFETY: the queries, the groups of keys and the rows of scores are as large as the tiles, and padded
            // where they are not.
            unsafe {
                asm!(
                    $(concat!("tilezero tmm", $group),)*
                    "test {steps}, {steps}",
                    "jz 3f",
                    "2:",
                    "tileloadd tmm4, [{q} + {q_bytes}]",
                    $(
                        concat!("mov {group}, [{keys} + 8 * ", $group, "]"),
                        "add {group}, {offset}",
                        "tileloadd tmm5, [{group} + {key_bytes}]",
                        concat!("tdpbf16ps tmm", $group, ", tmm4, tmm5"),
                        "test {ahead}, {ahead}",
                        "jz 6f",
                        concat!("mov {group}, [{ahead} + 8 * ", $group, "]"),
                        "add {group}, {offset}",
                        prefetch_half_step!("0"),
                        prefetch_half_step!("512"),
                        "6:",
                    )*
                    "add {q}, 64",
                    "add {offset}, {step_bytes}",
                    "dec {steps}",
                    "jnz 2b",
                    "3:",
                    "test {half_steps}, {half_steps}",
                    "jz 4f",
                    "tileloadd tmm6, [{q} + {q_bytes}]",
                    $(
                        concat!("mov {group}, [{keys} + 8 * ", $group, "]"),
                        "add {group}, {offset}",
                        "tileloadd tmm7, [{group} + {key_bytes}]",
                        concat!("tdpbf16ps tmm", $group, ", tmm6, tmm7"),
                        "test {ahead}, {ahead}",
                        "jz 6f",
                        concat!("mov {group}, [{ahead} + 8 * ", $group, "]"),
                        "add {group}, {offset}",
                        prefetch_half_step!("0"),
                        "6:",
                    )*
                    "4:",
                    "test {last_q}, {last_q}",
                    "jz 5f",
                    "mov {q_bytes}, {last_q_bytes}",
                    "tileloadd tmm6, [{last_q} + {q_bytes}]",
                    $(
                        concat!("tileloadd tmm7, [{last_keys} + {key_bytes} + {group_bytes} * ", $group, "]"),
                        concat!("tdpbf16ps tmm", $group, ", tmm6, tmm7"),
                    )*
                    "5:",
                    "mov {q_bytes}, {score_bytes}",
                    $(concat!("tilestored [{scores} + {q_bytes} + 64 * ", $group, "], tmm", $group),)*
                    steps = inout(reg) num_pairs / STEP => _,
                    half_steps = in(reg) num_pairs % STEP / HALF_STEP,
                    q = inout(reg) q => _,
                    q_bytes = inout(reg) 2 * tile.layout.head_dim => _,
                    keys = in(reg) tile.keys.as_ptr(),
                    offset = inout(reg) 0_usize => _,
                    group = out(reg) _,
                    key_bytes = in(reg) KEY_BYTES,
                    last_q = in(reg) last_q,
                    last_keys = in(reg) last_keys,
                    scores = in(reg) tile.scores,
                    ahead = in(reg) ahead,
                    step_bytes = const STEP * KEY_BYTES,
                    group_bytes = const HALF_STEP * KEY_BYTES,
                    last_q_bytes = const 4 * HALF_STEP,
                    score_bytes = const SCORE_BYTES,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    };
}

score!(score_1, 0);
score!(score_2, 0 1);
score!(score_3, 0 1 2);
score!(score_4, 0 1 2 3);

macro_rules! accumulate {
    ($name:ident, $($column:literal)*) => {
        /// Adds the weighted values to 16 columns of the sums at a time, starting at `d`.
        ///
        /// # Safety
        ///
        /// As for [`some_rows`], and `acc` are the sums of the first row from `d` on. `ahead` are the values to
        /// prefetch, or null.
        unsafe fn $name(
            tile: &AttentionTile,
            acc: *mut f32,
            d: usize,
            ahead: *const *const u16,
        ) {
            // SAFETY: the probabilities, the groups of values and the rows of sums are as large as the tiles.
            unsafe {
                asm!(
                    $(concat!("tileloadd tmm", $column, ", [{acc} + {stride} + 64 * ", $column, "]"),)*
                    "2:",
                    "tileloadd tmm6, [{probabilities} + {probability_bytes}]",
                    "mov {group}, [{values}]",
                    "add {group}, {offset}",
                    $(
                        concat!("tileloadd tmm7, [{group} + {stride} + 64 * ", $column, "]"),
                        concat!("tdpbf16ps tmm", $column, ", tmm6, tmm7"),
                    )*
                    "test {ahead}, {ahead}",
                    "jz 4f",
                    "mov {group}, [{ahead}]",
                    "add {group}, {offset}",
                    "mov {pairs:e}, {half_step}",
                    "3:",
                    $(concat!("prefetcht1 [{group} + 64 * ", $column, "]"),)*
                    "add {group}, {stride}",
                    "dec {pairs:e}",
                    "jnz 3b",
                    "add {ahead}, 8",
                    "4:",
                    "add {probabilities}, 32",
                    "add {values}, 8",
                    "dec {groups}",
                    "jnz 2b",
                    $(concat!("tilestored [{acc} + {stride} + 64 * ", $column, "], tmm", $column),)*
                    acc = in(reg) acc,
                    // As many for a row of sums in f32 as for two rows of values in bf16.
                    stride = in(reg) 4 * tile.layout.padded_dim(),
                    probabilities = inout(reg) tile.probabilities => _,
                    probability_bytes = in(reg) PROBABILITY_BYTES,
                    values = inout(reg) tile.values.as_ptr() => _,
                    offset = in(reg) 4 * d,
                    groups = inout(reg) tile.num_groups => _,
                    group = out(reg) _,
                    ahead = inout(reg) ahead => _,
                    pairs = out(reg) _,
                    half_step = const HALF_STEP,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    };
}

accumulate!(accumulate_1, 0);
accumulate!(accumulate_2, 0 1);
accumulate!(accumulate_3, 0 1 2);
accumulate!(accumulate_4, 0 1 2 3);
