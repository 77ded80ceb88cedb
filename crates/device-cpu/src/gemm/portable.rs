//! The kernel in plain Rust.

use super::super::math::from_bf16_bits;
use super::super::panel_order::PANEL;
use super::tile::{GemmKernel, GemmTile};

/// See [`GemmKernel`].
pub(super) const KERNEL: GemmKernel = GemmKernel {
    tile,
    max_rows: 8,
    row_unit: 1,
    chunk_pairs: 128,
};

/// # Safety
///
/// The pointers and sizes of the tile are valid.
unsafe fn tile(tile: &GemmTile) {
    for row in 0..tile.rows {
        // SAFETY: the tile has this row of sums and of activations, and that many weights.
        let (sums, x, weights) = unsafe {
            (
                &mut *tile.sums.add(row * PANEL).cast::<[f32; PANEL]>(),
                std::slice::from_raw_parts(tile.x.add(row * tile.x_stride), 2 * tile.num_pairs),
                std::slice::from_raw_parts(tile.weights, tile.num_pairs * PANEL * 2),
            )
        };
        let mut row_sums = if tile.first { [0.0; PANEL] } else { *sums };
        for (x, weights) in x
            .as_chunks::<2>()
            .0
            .iter()
            .zip(weights.as_chunks::<{ 2 * PANEL }>().0)
        {
            let [x0, x1] = x.map(from_bf16_bits);
            for (sum, [w0, w1]) in row_sums.iter_mut().zip(weights.as_chunks::<2>().0) {
                *sum += x0 * from_bf16_bits(*w0);
                *sum += x1 * from_bf16_bits(*w1);
            }
        }
        *sums = row_sums;
    }
}
