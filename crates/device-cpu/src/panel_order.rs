//! How the outputs of a packed matrix are divided into panels.

use std::ops::Range;

use inflight_numbers::Stacking;

/// Outputs per panel: three 512-bit registers of f32.
pub(super) const PANEL: usize = 48;

/// The outputs of each panel of a matrix.
#[derive(Clone, Copy)]
pub(super) struct PanelOrder {
    pub(super) stacking: Stacking,
    num_parts: usize,
    /// Outputs per part.
    part_len: usize,
}

impl PanelOrder {
    /// The order for parts with these numbers of rows.
    ///
    /// # Panics
    ///
    /// If parts are interleaved and differ in size.
    pub(super) fn new(stacking: Stacking, num_rows: impl Iterator<Item = usize> + Clone) -> Self {
        let n = num_rows.clone().sum();
        match stacking {
            Stacking::Concatenated => Self {
                stacking,
                num_parts: 1,
                part_len: n,
            },
            Stacking::Interleaved => {
                let num_parts = num_rows.clone().count();
                let part_len = n / num_parts;
                assert!(
                    num_rows.into_iter().all(|rows| rows == part_len),
                    "parts of the same shape"
                );
                Self {
                    stacking,
                    num_parts,
                    part_len,
                }
            }
        }
    }

    /// Outputs of all parts.
    pub(super) fn n(self) -> usize {
        self.num_parts * self.part_len
    }

    pub(super) fn num_panels(self) -> usize {
        self.num_parts * self.part_len.div_ceil(PANEL)
    }

    /// The outputs of a panel, as rows of the concatenated parts.
    pub(super) fn rows(self, panel: usize) -> Range<usize> {
        let first = panel / self.num_parts * PANEL;
        let start = panel % self.num_parts * self.part_len;
        start + first..start + self.part_len.min(first + PANEL)
    }
}

/// The part that a row of the concatenated parts belongs to, and its index in that part. `num_rows` are the rows
/// of each part.
pub(super) fn locate(num_rows: impl Iterator<Item = usize>, mut row: usize) -> (usize, usize) {
    for (part, num_rows) in num_rows.enumerate() {
        if row < num_rows {
            return (part, row);
        }
        row -= num_rows;
    }
    unreachable!("a row of the parts")
}
