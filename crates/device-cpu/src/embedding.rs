//! The rows of a token embedding.

use half::bf16;

use inflight_numbers::{Dtype, RawMatrix};

/// The rows of a token embedding.
pub struct Embedding {
    rows: Vec<bf16>,
    hidden_size: usize,
}

impl Embedding {
    /// `rows` are `[num_rows, hidden_size]`.
    pub(super) fn new(rows: Vec<bf16>, hidden_size: usize) -> Self {
        Self { rows, hidden_size }
    }

    /// All rows, one after the other.
    pub(super) fn rows(&self) -> &[bf16] {
        &self.rows
    }

    /// The width of a row.
    pub(super) fn hidden_size(&self) -> usize {
        self.hidden_size
    }

    /// How many there are.
    pub(super) fn num_rows(&self) -> usize {
        self.rows.len() / self.hidden_size
    }

    /// `[num_rows, hidden_size]`.
    pub(super) fn table(&self) -> RawMatrix<'_> {
        let bytes = bytemuck::cast_slice(&self.rows);
        RawMatrix::new(Dtype::Bf16, self.num_rows(), self.hidden_size, bytes)
    }
}
