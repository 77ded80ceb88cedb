//! The kernel for AVX2: up to four rows of 16 outputs at a time. A single row takes the whole panel at once,
//! because it is limited by memory.
//!
//! ```text
//! 8 bits   codes, zero-extended to 16 bits, times 16-bit activations: sums of two in 32 bits (vpmaddwd)
//! 4 bits   codes times 8-bit activations: sums of two in 16 bits (vpmaddubsw). The eight of a block are at
//!          most 8 * 2 * 15 * 127 < 2^15 together, and are added in 16 bits.
//! ```

use std::arch::x86_64::*;

use super::super::avx2::{load, store};
use super::super::panel_order::PANEL;
use super::BLOCK;
use super::tile::{LINE, QuantisedTile, ROW_LINES};

/// How far ahead the 4-bit codes of a single row are prefetched, in bytes. The hardware prefetcher stops at each page.
/// It is good enough for 8-bit codes, which are more bytes.
const AHEAD: usize = 3072;

/// Bytes that are loaded at a time for all 48 outputs.
const ROW_BYTES: usize = 4 * PANEL;

/// The sums of a block, 8 outputs per register.
type Dots<const ROWS: usize, const REGISTERS: usize> = [[__m256i; REGISTERS]; ROWS];

/// See [`super::tile::QuantisedKernel`].
///
/// # Safety
///
/// The pointers and sizes of the tile are valid, and the machine supports AVX2, FMA and F16C.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn tile<const FOUR_BITS: bool>(tile: &QuantisedTile) {
    let mut row = 0;
    while row < tile.rows {
        // SAFETY: the caller's promises; there are that many rows from this one on.
        unsafe {
            match tile.rows - row {
                1 => rows::<FOUR_BITS, 1, 6>(tile, row),
                2 => rows::<FOUR_BITS, 2, 2>(tile, row),
                3 => rows::<FOUR_BITS, 3, 2>(tile, row),
                _ => rows::<FOUR_BITS, 4, 2>(tile, row),
            }
        }
        row += 4;
    }
}

/// Some rows of the tile, `8 * REGISTERS` outputs at a time.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn rows<const FOUR_BITS: bool, const ROWS: usize, const REGISTERS: usize>(
    tile: &QuantisedTile,
    first: usize,
) {
    const { assert!(PANEL.is_multiple_of(8 * REGISTERS)) };
    let rows_per_block = if FOUR_BITS { BLOCK / 8 } else { BLOCK / 4 };
    for column in (0..PANEL).step_by(8 * REGISTERS) {
        // The number of the pass over the weights: each pass prefetches one line per row of the panel.
        let pass = first / 4 * (PANEL / (8 * REGISTERS)) + column / (8 * REGISTERS);
        let mut ahead = tile
            .ahead
            .wrapping_add(pass * tile.num_blocks * rows_per_block * LINE);
        // SAFETY: the tile has `ROWS` rows of sums and of activations from `first` on, its blocks of
        // weights and their groups.
        unsafe {
            let place = tile.sums.add(first * PANEL + column);
            let mut sums = [[_mm256_setzero_ps(); REGISTERS]; ROWS];
            if !tile.first {
                sums = load(place, PANEL);
            }
            for block in 0..tile.num_blocks {
                if pass < tile.ahead_lines {
                    for _ in 0..rows_per_block {
                        // A prefetch never faults, so it may point beyond the matrix.
                        _mm_prefetch::<_MM_HINT_T1>(ahead.cast());
                        ahead = ahead.wrapping_add(LINE);
                    }
                }
                let codes = tile
                    .codes
                    .add(block * rows_per_block * ROW_BYTES + 4 * column);
                if FOUR_BITS && ROWS == 1 {
                    for line in 0..rows_per_block * ROW_LINES {
                        let soon = codes.wrapping_add(AHEAD + line * LINE);
                        _mm_prefetch::<_MM_HINT_T0>(soon.cast());
                    }
                }
                let x = (first * tile.stride + block) * BLOCK;
                let x_stride = tile.stride * BLOCK;
                let dots = if FOUR_BITS {
                    four_bits::<ROWS, REGISTERS>(tile.x.add(x), x_stride, codes)
                } else {
                    eight_bits::<ROWS, REGISTERS>(tile.x_pairs.add(x), x_stride, codes)
                };
                add_block(tile, first, block, column, &dots, &mut sums);
            }
            store(&sums, place, PANEL);
        }
    }
}

/// The sums of a block with unsigned 8-bit codes.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn eight_bits<const ROWS: usize, const REGISTERS: usize>(
    x: *const i16,
    x_stride: usize,
    codes: *const u8,
) -> Dots<ROWS, REGISTERS> {
    let mut dots = [[_mm256_setzero_si256(); REGISTERS]; ROWS];
    for quad in 0..BLOCK / 4 {
        let codes: [_; REGISTERS] = std::array::from_fn(|i| {
            // SAFETY: the caller's promise: a row of the panel.
            let codes = unsafe { _mm256_loadu_si256(codes.add(quad * ROW_BYTES + 32 * i).cast()) };
            // The first and third of each four, then the second and fourth.
            (
                _mm256_and_si256(codes, _mm256_set1_epi16(0xff)),
                _mm256_srli_epi16::<8>(codes),
            )
        });
        for (row, dots) in dots.iter_mut().enumerate() {
            // SAFETY: the caller's promise: a row of activations.
            let (even, odd) = unsafe {
                let x = x.add(row * x_stride + 4 * quad).cast::<i32>();
                (x.read_unaligned(), x.add(1).read_unaligned())
            };
            let (even, odd) = (_mm256_set1_epi32(even), _mm256_set1_epi32(odd));
            for (dot, codes) in dots.iter_mut().zip(codes) {
                *dot = _mm256_add_epi32(*dot, _mm256_madd_epi16(codes.0, even));
                *dot = _mm256_add_epi32(*dot, _mm256_madd_epi16(codes.1, odd));
            }
        }
    }
    dots
}

/// The sums of a block with unsigned 4-bit codes.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn four_bits<const ROWS: usize, const REGISTERS: usize>(
    x: *const i8,
    x_stride: usize,
    codes: *const u8,
) -> Dots<ROWS, REGISTERS> {
    let mut dots = [[_mm256_setzero_si256(); REGISTERS]; ROWS];
    let nibble = _mm256_set1_epi8(0xf);
    for octet in 0..BLOCK / 8 {
        let codes: [_; REGISTERS] = std::array::from_fn(|i| {
            // SAFETY: the caller's promise: a row of the panel.
            let codes = unsafe { _mm256_loadu_si256(codes.add(octet * ROW_BYTES + 32 * i).cast()) };
            (
                _mm256_and_si256(codes, nibble),
                _mm256_and_si256(_mm256_srli_epi16::<4>(codes), nibble),
            )
        });
        for (row, dots) in dots.iter_mut().enumerate() {
            // SAFETY: the caller's promise: a row of activations.
            let (lower, upper) = unsafe {
                let x = x.add(row * x_stride + 8 * octet).cast::<i32>();
                (x.read_unaligned(), x.add(1).read_unaligned())
            };
            let (lower, upper) = (_mm256_set1_epi32(lower), _mm256_set1_epi32(upper));
            for (dot, codes) in dots.iter_mut().zip(codes) {
                *dot = _mm256_add_epi16(*dot, _mm256_maddubs_epi16(codes.0, lower));
                *dot = _mm256_add_epi16(*dot, _mm256_maddubs_epi16(codes.1, upper));
            }
        }
    }
    // Loops, because closures with target features are not inlined into `map`.
    for dots in &mut dots {
        for dot in dots {
            *dot = _mm256_madd_epi16(*dot, _mm256_set1_epi16(1));
        }
    }
    dots
}

/// Adds the products of a block to the sums: corrects for the unsigned codes, and applies the scales.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn add_block<const ROWS: usize, const REGISTERS: usize>(
    tile: &QuantisedTile,
    first: usize,
    block: usize,
    column: usize,
    dots: &Dots<ROWS, REGISTERS>,
    sums: &mut [[__m256; REGISTERS]; ROWS],
) {
    let group_len = if tile.has_offsets { 2 * PANEL } else { PANEL };
    // SAFETY: the tile has this group, and this block of activations.
    let (scales, x_blocks) = unsafe {
        (
            tile.scales.add(tile.group(block) * group_len + column),
            tile.x_blocks.add(first * tile.stride + block),
        )
    };
    // SAFETY: there are 48 scales, or 48 scales and 48 offsets; these begin at `column`.
    let load_f16 =
        |place: usize| unsafe { _mm256_cvtph_ps(_mm_loadu_si128(scales.add(place).cast())) };
    for i in 0..REGISTERS {
        let weight_scale = load_f16(8 * i);
        for (row, (sums, dots)) in sums.iter_mut().zip(dots).enumerate() {
            // SAFETY: `ROWS` rows of activations.
            let x = unsafe { *x_blocks.add(row * tile.stride) };
            let missing = _mm256_set1_epi32(-tile.code_bias * x.sum);
            let dot = _mm256_cvtepi32_ps(_mm256_add_epi32(dots[i], missing));
            let scale = _mm256_mul_ps(weight_scale, _mm256_set1_ps(x.scale));
            sums[i] = _mm256_fmadd_ps(dot, scale, sums[i]);
        }
        if tile.has_offsets {
            let offset = load_f16(PANEL + 8 * i);
            for (row, sums) in sums.iter_mut().enumerate() {
                // SAFETY: as above.
                let x = unsafe { *x_blocks.add(row * tile.stride) };
                let weighted_sum = _mm256_set1_ps(x.sum as f32 * x.scale);
                sums[i] = _mm256_fmadd_ps(weighted_sum, offset, sums[i]);
            }
        }
    }
}
