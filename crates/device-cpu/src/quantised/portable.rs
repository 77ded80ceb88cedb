//! The kernel in plain Rust.

use half::f16;

use super::super::panel_order::PANEL;
use super::BLOCK;
use super::activations::Block;
use super::panel_format::PanelBits;
use super::tile::QuantisedTile;

/// See [`super::tile::QuantisedKernel`].
///
/// # Safety
///
/// The pointers and sizes of the tile are valid.
pub(super) unsafe fn tile_of_eight_bits(tile: &QuantisedTile) {
    // SAFETY: the caller's promise.
    unsafe {
        rows(tile, PanelBits::Eight, |x, codes, dots| {
            let quads = x.as_chunks::<4>().0;
            for (x, codes) in quads.iter().zip(codes.as_chunks::<{ 4 * PANEL }>().0) {
                for (dot, codes) in dots.iter_mut().zip(codes.as_chunks::<4>().0) {
                    for (x, code) in x.iter().zip(codes) {
                        *dot += i32::from(*x) * i32::from(*code);
                    }
                }
            }
        });
    }
}

/// The same for 4-bit codes.
///
/// # Safety
///
/// As above.
pub(super) unsafe fn tile_of_four_bits(tile: &QuantisedTile) {
    // SAFETY: the caller's promise.
    unsafe {
        rows(tile, PanelBits::Four, |x, codes, dots| {
            let octets = x.as_chunks::<8>().0;
            for (x, codes) in octets.iter().zip(codes.as_chunks::<{ 4 * PANEL }>().0) {
                let (lower, upper) = x.split_at(4);
                for (dot, codes) in dots.iter_mut().zip(codes.as_chunks::<4>().0) {
                    for ((lower, upper), code) in lower.iter().zip(upper).zip(codes) {
                        *dot += i32::from(*lower) * i32::from(code & 0xf);
                        *dot += i32::from(*upper) * i32::from(code >> 4);
                    }
                }
            }
        });
    }
}

/// Calls `add_dots(x, codes, dots)` for each block of each row, and adds the results to the sums.
unsafe fn rows(
    tile: &QuantisedTile,
    bits: PanelBits,
    add_dots: impl Fn(&[i8], &[u8], &mut [i32; PANEL]),
) {
    let code_bytes = bits.code_bytes(BLOCK);
    for row in 0..tile.rows {
        // SAFETY: the tile has this row of sums.
        let sums = unsafe { &mut *tile.sums.add(row * PANEL).cast::<[f32; PANEL]>() };
        if tile.first {
            sums.fill(0.0);
        }
        for block in 0..tile.num_blocks {
            let place = row * tile.stride + block;
            let group_len = if tile.has_offsets { 2 * PANEL } else { PANEL };
            // SAFETY: the tile has this block of activations and of weights, and its group.
            let (x, Block { scale, sum }, codes, group) = unsafe {
                (
                    std::slice::from_raw_parts(tile.x.add(place * BLOCK), BLOCK),
                    *tile.x_blocks.add(place),
                    std::slice::from_raw_parts(tile.codes.add(block * code_bytes), code_bytes),
                    std::slice::from_raw_parts(
                        tile.scales.add(tile.group(block) * group_len),
                        group_len,
                    ),
                )
            };
            let mut dots = [-tile.code_bias * sum; PANEL];
            add_dots(x, codes, &mut dots);
            let (scales, offsets) = group.split_at(PANEL);
            for ((total, dot), bits) in sums.iter_mut().zip(dots).zip(scales) {
                *total = (dot as f32).mul_add(f16::from_bits(*bits).to_f32() * scale, *total);
            }
            let weighted_sum = sum as f32 * scale;
            for (total, bits) in sums.iter_mut().zip(offsets) {
                *total = weighted_sum.mul_add(f16::from_bits(*bits).to_f32(), *total);
            }
        }
    }
}
