//! Which outputs the panels of a packed matrix have.

use std::ops::Range;

use crate::device::Stacking;

/// Outputs of one panel: three 512-bit registers of f32.
pub(super) const PANEL: usize = 48;

/// Which outputs the panels of a matrix have.
#[derive(Clone, Copy)]
pub(super) struct PanelOrder {
    pub(super) stacking: Stacking,
    num_parts: usize,
    /// Outputs of a part.
    part_len: usize,
}

impl PanelOrder {
    /// That of parts with these numbers of rows.
    ///
    /// # Panics
    ///
    /// The parts are stacked in turn and differ.
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
                    "parts of one shape"
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

    /// The outputs of a panel, as rows of all parts one below the other.
    pub(super) fn rows(self, panel: usize) -> Range<usize> {
        let first = panel / self.num_parts * PANEL;
        let start = panel % self.num_parts * self.part_len;
        start + first..start + self.part_len.min(first + PANEL)
    }
}

/// Which part a row of the stack belongs to, and which row of it that is. `num_rows` has those of each part.
pub(super) fn locate(num_rows: impl Iterator<Item = usize>, mut row: usize) -> (usize, usize) {
    for (part, num_rows) in num_rows.enumerate() {
        if row < num_rows {
            return (part, row);
        }
        row -= num_rows;
    }
    unreachable!("a row of the stack")
}
