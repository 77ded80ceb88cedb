//! The kernel for AVX-512 VNNI: 16 outputs per register, four inputs per instruction (`vpdpbusd`: unsigned codes of
//! weights times signed codes of activations).
//!
//! Four rows of three registers at a time: their sums of a block in i32 and of all blocks in f32 take 24 registers,
//! so nothing is spilled between blocks. More than four rows read the weights again, from the L1 cache.

use std::arch::x86_64::*;
use std::hint::black_box;

use super::super::panel_order::PANEL;
use super::BLOCK;
use super::activations::Block;
use super::tile::{LINE, QuantisedTile};

/// Registers per row of sums.
const REGISTERS: usize = PANEL / 16;
/// Rows whose sums fit in registers.
const MAX_ROWS: usize = 4;
/// Bytes that are loaded at a time for all 48 outputs.
const ROW_BYTES: usize = 4 * PANEL;

/// See [`super::tile::QuantisedKernel`].
///
/// # Safety
///
/// The pointers and sizes of the tile are valid, and the machine supports AVX-512 with VNNI.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) unsafe fn tile<const FOUR_BITS: bool>(tile: &QuantisedTile) {
    const { assert!(MAX_ROWS == 4) };
    let num_chunks = tile.rows.div_ceil(MAX_ROWS);
    for chunk in 0..num_chunks {
        // Parts of equal size: 5 rows are 2 + 3.
        let start = chunk * tile.rows / num_chunks;
        let num_rows = (chunk + 1) * tile.rows / num_chunks - start;
        // SAFETY: the caller's promises; the rows are of the tile.
        unsafe {
            match num_rows {
                1 => rows::<FOUR_BITS, 1>(tile, start),
                2 => rows::<FOUR_BITS, 2>(tile, start),
                3 => rows::<FOUR_BITS, 3>(tile, start),
                _ => rows::<FOUR_BITS, 4>(tile, start),
            }
        }
    }
}

/// `ROWS` rows of the tile, from `start` on.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn rows<const FOUR_BITS: bool, const ROWS: usize>(tile: &QuantisedTile, start: usize) {
    let rows_per_block = if FOUR_BITS { BLOCK / 8 } else { BLOCK / 4 };
    let group_len = if tile.has_offsets { 2 * PANEL } else { PANEL };
    let nibble = _mm512_set1_epi8(0xf);
    let mut codes = tile.codes;
    let mut ahead = tile.ahead;
    // Only the first rows prefetch.
    let ahead_lines = if start == 0 { tile.ahead_lines } else { 0 };
    // SAFETY: the tile has these rows of everything.
    let (x, x_blocks, out) = unsafe {
        (
            tile.x.add(start * tile.stride * BLOCK),
            tile.x_blocks.add(start * tile.stride),
            tile.sums.add(start * PANEL),
        )
    };
    // Loops, because closures with target features are not inlined into `map`.
    let mut sums = [[_mm512_setzero_ps(); REGISTERS]; ROWS];
    if !tile.first {
        for (row, sums) in sums.iter_mut().enumerate() {
            for (i, sum) in sums.iter_mut().enumerate() {
                // SAFETY: 48 sums of each row.
                *sum = unsafe { _mm512_loadu_ps(out.add(row * PANEL + 16 * i)) };
            }
        }
    }
    for block in 0..tile.num_blocks {
        let mut x_of_block = [Block::default(); ROWS];
        let mut dots = [[_mm512_setzero_si512(); REGISTERS]; ROWS];
        for (row, (x, dots)) in x_of_block.iter_mut().zip(&mut dots).enumerate() {
            // SAFETY: a block of each row.
            *x = unsafe { *x_blocks.add(row * tile.stride + block) };
            // Corrects for the unsigned codes.
            *dots = [_mm512_set1_epi32(-tile.code_bias * x.sum); REGISTERS];
        }
        for _ in 0..rows_per_block * ahead_lines {
            // A prefetch never faults, so it may point beyond the matrix.
            _mm_prefetch::<_MM_HINT_T1>(ahead.cast());
            ahead = ahead.wrapping_add(LINE);
        }
        // The trip count is hidden from the compiler: it would unroll the loop and order the products of a sum
        // one after another, where each waits for the one before.
        for row_of_panel in 0..black_box(rows_per_block) {
            // SAFETY: the tile has that many rows of the panel.
            let loaded: [_; REGISTERS] =
                std::array::from_fn(|i| unsafe { _mm512_loadu_si512(codes.add(64 * i).cast()) });
            // SAFETY: the next row, or the end.
            codes = unsafe { codes.add(ROW_BYTES) };
            let mut add = |input: usize, codes: [__m512i; REGISTERS]| {
                for (row, dots) in dots.iter_mut().enumerate() {
                    let place = (row * tile.stride + block) * BLOCK + input;
                    // SAFETY: four activations of this block.
                    let x = unsafe { x.add(place).cast::<i32>().read_unaligned() };
                    let x = _mm512_set1_epi32(x);
                    for (dot, codes) in dots.iter_mut().zip(codes) {
                        *dot = _mm512_dpbusd_epi32(*dot, codes, x);
                    }
                }
            };
            if FOUR_BITS {
                let (mut lower, mut upper) = (loaded, loaded);
                for (lower, upper) in lower.iter_mut().zip(&mut upper) {
                    *lower = _mm512_and_si512(*lower, nibble);
                    *upper = _mm512_and_si512(_mm512_srli_epi16::<4>(*upper), nibble);
                }
                add(8 * row_of_panel, lower);
                add(8 * row_of_panel + 4, upper);
            } else {
                add(4 * row_of_panel, loaded);
            }
        }
        // SAFETY: the tile has this group.
        let scales = unsafe { tile.scales.add(tile.group(block) * group_len) };
        // SAFETY: 48 scales, or 48 scales and 48 offsets.
        let load_f16 =
            |place: usize| unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(scales.add(place).cast())) };
        for i in 0..REGISTERS {
            let weight_scale = load_f16(16 * i);
            let offset = tile.has_offsets.then(|| load_f16(PANEL + 16 * i));
            for (row, (x, sums)) in x_of_block.iter().zip(&mut sums).enumerate() {
                let scale = _mm512_mul_ps(weight_scale, _mm512_set1_ps(x.scale));
                sums[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[row][i]), scale, sums[i]);
                if let Some(offset) = offset {
                    let weighted_sum = _mm512_set1_ps(x.sum as f32 * x.scale);
                    sums[i] = _mm512_fmadd_ps(weighted_sum, offset, sums[i]);
                }
            }
        }
    }
    for (row, sums) in sums.iter().enumerate() {
        for (i, sum) in sums.iter().enumerate() {
            // SAFETY: 48 sums of each row.
            unsafe { _mm512_storeu_ps(out.add(row * PANEL + 16 * i), *sum) };
        }
    }
}
