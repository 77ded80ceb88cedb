//! Weights in the layout that the GEMM kernels stream.

use super::math::from_bf16_bits;
use super::panel_order::{PANEL, PanelOrder};
use super::quantised::Panels;
use inflight_device::memory::Buffer;
use inflight_numbers::Stacking;

/// Packed weights `[n, k]`: bf16 in panels of 48 outputs and pairs of inputs, or
/// [quantised](inflight_numbers::QuantFormat).
///
/// ```text
/// panel 0 (outputs 0..48)                                            panel 1 (48..96)
/// | inputs 0, 1                      | inputs 2, 3        | ...    | ...
/// | w00 w01  w10 w11  ...  w470 w471 | w02 w03  w12 w13   |
/// ```
///
/// A kernel reads them from front to back. Outputs are padded with zeros to whole panels, inputs to pairs.
pub struct PackedMatrix {
    order: PanelOrder,
    k: usize,
    weights: Packed,
}

/// The weights of a [`PackedMatrix`].
pub(super) enum Packed {
    Bf16(Bf16Panels),
    Quantised(Panels),
}

/// Panels of bf16: `[n / 48][k / 2][48][2]`, rounded up.
pub(super) struct Bf16Panels {
    pub(super) num_pairs: usize,
    pub(super) buffer: Buffer,
}

impl Bf16Panels {
    /// The weights of a panel, starting at a pair of inputs.
    pub(super) fn weights(&self, panel: usize, pair: usize) -> *const u16 {
        let start = (panel * self.num_pairs + pair) * PANEL * 2;
        assert!(start < self.buffer.len(), "panel {panel} of the matrix");
        self.buffer.as_ptr().wrapping_add(start)
    }

    /// Collects a row of the original matrix from its panel.
    fn row_to_f32(&self, row: usize, out: &mut [f32]) {
        let panel_len = self.num_pairs * PANEL * 2;
        let panel = &self.buffer.as_slice()[row / PANEL * panel_len..][..panel_len];
        let lane = row % PANEL;
        for (out, pairs) in out.chunks_mut(2).zip(panel.as_chunks::<{ PANEL * 2 }>().0) {
            for (out, &bits) in out.iter_mut().zip(&pairs[2 * lane..]) {
                *out = from_bf16_bits(bits);
            }
        }
    }
}

impl PackedMatrix {
    /// Outputs: rows of the original matrix.
    pub fn n(&self) -> usize {
        self.order.n()
    }

    /// Inputs: columns of the original matrix.
    pub fn k(&self) -> usize {
        self.k
    }

    /// How its parts were combined.
    pub fn stacking(&self) -> Stacking {
        self.order.stacking
    }

    /// Bytes of memory, padding included.
    pub fn num_bytes(&self) -> usize {
        match &self.weights {
            Packed::Bf16(panels) => panels.buffer.len() * 2,
            Packed::Quantised(panels) => panels.num_bytes(),
        }
    }

    /// Whether its rows can be [looked up](super::Cpu::embed_packed): they are bf16, and consecutive.
    pub fn has_rows(&self) -> bool {
        matches!(self.weights, Packed::Bf16(_)) && self.stacking() == Stacking::Concatenated
    }

    /// Writes a row of the original matrix to `out`.
    ///
    /// # Panics
    ///
    /// If it [has no rows](PackedMatrix::has_rows), or not this one, or `out` is not one row long.
    pub(super) fn row_to_f32(&self, row: usize, out: &mut [f32]) {
        assert!(
            row < self.n() && out.len() == self.k && self.has_rows(),
            "row {row} of {}",
            self.n()
        );
        match &self.weights {
            Packed::Bf16(panels) => panels.row_to_f32(row, out),
            Packed::Quantised(_) => panic!("rows of a quantised matrix"),
        }
    }

    pub(super) fn bf16(order: PanelOrder, k: usize, panels: Bf16Panels) -> Self {
        let weights = Packed::Bf16(panels);
        Self { order, k, weights }
    }

    pub(super) fn quantised(order: PanelOrder, k: usize, panels: Panels) -> Self {
        let weights = Packed::Quantised(panels);
        Self { order, k, weights }
    }

    pub(super) fn weights(&self) -> &Packed {
        &self.weights
    }
}
