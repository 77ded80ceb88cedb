//! Weights of 8 or 4 bits.
//!
//! A weight is `scale * code + offset`; neighbouring inputs of an output share scale and offset. A row of
//! activations is rounded to 8 bits when it is multiplied, each 32 elements with a scale of their own:
//!
//! ```text
//! k           0        32        64        96        128
//! codes       | block   | block   | block   | block   |  exact sums of products in i32
//! activations | scale   | scale   | scale   | scale   |
//! weights     | scale, offset of group 0    | group 1 |  a group is a whole number of blocks
//! out = sum over blocks in order: f32(sum) * (scale * scale) + offset * sum of activations
//! ```
//!
//! The sums of a block are exact, and blocks are added in one order with one rounding each, so every
//! instruction set gives the same bits, whatever rows are multiplied together.

mod activations;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod multiply;
mod panel_bytes;
mod panels;
mod portable;
mod rounded;

pub(super) use activations::Activations;
pub(super) use multiply::multiply_panel;
pub(super) use panels::Panels;

pub use panel_bytes::{PANELS_VERSION, PanelBytes, PanelReader, PanelShape};
pub use panels::can_be_packed_together;
pub use rounded::Rounded;

/// Inputs of a block: those that one scale of the activations is for.
pub const BLOCK: usize = 32;

/// Bits of a code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CodeBits {
    /// Codes from -8 to 7.
    Four,
    /// Codes from -128 to 127.
    Eight,
}

impl CodeBits {
    /// How many they are.
    pub const fn count(self) -> usize {
        match self {
            Self::Four => 4,
            Self::Eight => 8,
        }
    }

    /// What is added to a code to have it without a sign.
    pub const fn bias(self) -> i32 {
        1 << (self.count() - 1)
    }
}

/// How a matrix is quantised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QuantFormat {
    /// Bits of a code.
    pub bits: CodeBits,
    /// Neighbouring columns that share a scale and an offset: a multiple of 32, or all columns of a row.
    /// The last group of a row may be shorter.
    pub group_size: usize,
    /// Whether groups have offsets.
    pub has_offsets: bool,
}

impl QuantFormat {
    /// Groups of a row.
    pub const fn num_groups(&self, columns: usize) -> usize {
        columns.div_ceil(self.group_size)
    }
}

/// A row as it is read: `weight = scale * code + offset`, group by group.
#[derive(Clone, Debug, Default)]
pub struct QuantisedRow {
    /// One for each column.
    pub codes: Vec<i8>,
    /// One for each group.
    pub scales: Vec<f32>,
    /// One for each group; none where the format has none.
    pub offsets: Vec<f32>,
}

impl QuantisedRow {
    /// Makes room for the row of a matrix; what is in it is open.
    pub fn resize(&mut self, format: QuantFormat, columns: usize) {
        let num_groups = format.num_groups(columns);
        self.codes.resize(columns, 0);
        self.scales.resize(num_groups, 0.0);
        let num_offsets = if format.has_offsets { num_groups } else { 0 };
        self.offsets.resize(num_offsets, 0.0);
    }

    /// The weights that it stands for.
    ///
    /// # Panics
    ///
    /// `out` is not as long as the row.
    pub fn dequantise(&self, format: QuantFormat, out: &mut [f32]) {
        assert_eq!(out.len(), self.codes.len(), "length of the row");
        let groups = out
            .chunks_mut(format.group_size)
            .zip(self.codes.chunks(format.group_size));
        for (group, (out, codes)) in groups.enumerate() {
            let scale = self.scales[group];
            let offset = self.offsets.get(group).copied().unwrap_or(0.0);
            for (out, code) in out.iter_mut().zip(codes) {
                *out = scale * f32::from(*code) + offset;
            }
        }
    }
}

/// A quantised matrix as a checkpoint has it, row by row; a row is an output.
pub trait QuantisedRows: Sync {
    /// How it is quantised.
    fn format(&self) -> QuantFormat;

    /// Number of rows.
    fn rows(&self) -> usize;

    /// Elements of a row.
    fn columns(&self) -> usize;

    /// Which input each column belongs to, a permutation (GPTQ's act order). `None`: to that of its own
    /// number.
    fn input_order(&self) -> Option<&[u32]> {
        None
    }

    /// Reads a row below [`QuantisedRows::rows`], and sizes `row` for it. Called from many threads.
    fn read_row(&self, index: usize, row: &mut QuantisedRow);
}
