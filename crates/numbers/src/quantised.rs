//! Quantised matrices as a checkpoint stores them.

use std::ops::Range;

use super::e4m3::from_e4m3;

/// Twice the floats of 4 bits, E2M1 (OCP Microscaling Formats, 1.0), by their bits: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and
/// their negatives.
pub const TWICE_E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// The size of a group is a multiple of this, or that of a row.
pub const GROUP_UNIT: usize = 32;

/// What a code is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CodeBits {
    /// Codes from -8 to 7.
    Four,
    /// Codes from -128 to 127.
    Eight,
    /// The bytes of 8-bit floats ([`from_e4m3`]); only for a device that has them.
    Fp8,
}

impl CodeBits {
    /// The number of bits.
    pub const fn count(self) -> usize {
        match self {
            Self::Four => 4,
            Self::Eight | Self::Fp8 => 8,
        }
    }

    /// Added to a signed integer, gives the unsigned one.
    pub const fn bias(self) -> i32 {
        1 << (self.count() - 1)
    }

    /// The number that a code is.
    pub fn value(self, code: i8) -> f32 {
        match self {
            Self::Four | Self::Eight => f32::from(code),
            Self::Fp8 => from_e4m3(code.cast_unsigned()),
        }
    }
}

/// How a matrix is quantised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QuantFormat {
    /// What its codes are.
    pub bits: CodeBits,
    /// Consecutive columns that share a scale and an offset: a multiple of 32, or the whole row. The last
    /// group of a row may be shorter.
    pub group_size: usize,
    /// Whether groups have offsets.
    pub has_offsets: bool,
}

impl QuantFormat {
    /// Groups per row.
    pub const fn num_groups(&self, columns: usize) -> usize {
        columns.div_ceil(self.group_size)
    }

    /// The format of some columns of a row by themselves, with the scales of the row: in the groups of the row, in
    /// smaller ones if the first column is inside of a group, or in one. `None` if these would not be multiples of 32.
    pub fn of_columns(&self, columns: &Range<usize>) -> Option<Self> {
        let before = columns.start % self.group_size;
        if before + columns.len() <= self.group_size {
            return Some(*self);
        }
        // The largest power of two times 32 that both are multiples of.
        let both = before | self.group_size;
        let group_size = match before {
            0 => self.group_size,
            _ => 1 << both.trailing_zeros(),
        };
        (before == 0 || group_size >= GROUP_UNIT).then_some(Self {
            group_size,
            ..*self
        })
    }
}

/// Format and size of a quantised matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuantisedShape {
    /// How its rows are quantised.
    pub format: QuantFormat,
    /// Number of rows.
    pub rows: usize,
    /// Elements per row.
    pub columns: usize,
}

/// One row, decoded from its storage format: `weight = scale * code + offset` in each group.
#[derive(Clone, Debug, Default)]
pub struct QuantisedRow {
    /// One per column.
    pub codes: Vec<i8>,
    /// One per group.
    pub scales: Vec<f32>,
    /// One per group, or empty if the format has no offsets.
    pub offsets: Vec<f32>,
}

impl QuantisedRow {
    /// Resizes it for a row of `columns` elements. The contents are unspecified.
    pub fn resize(&mut self, format: QuantFormat, columns: usize) {
        let num_groups = format.num_groups(columns);
        self.codes.resize(columns, 0);
        self.scales.resize(num_groups, 0.0);
        let num_offsets = if format.has_offsets { num_groups } else { 0 };
        self.offsets.resize(num_offsets, 0.0);
    }

    /// Computes the weights.
    ///
    /// # Panics
    ///
    /// If `out` is not as long as the row.
    pub fn dequantise(&self, format: QuantFormat, out: &mut [f32]) {
        assert_eq!(out.len(), self.codes.len(), "length of the row");
        let groups = out
            .chunks_mut(format.group_size)
            .zip(self.codes.chunks(format.group_size));
        for (group, (out, codes)) in groups.enumerate() {
            let scale = self.scales[group];
            let offset = self.offsets.get(group).copied().unwrap_or(0.0);
            for (out, code) in out.iter_mut().zip(codes) {
                *out = scale * format.bits.value(*code) + offset;
            }
        }
    }
}

/// A quantised matrix that is read row by row; each row is one output.
pub trait QuantisedRows: Sync {
    /// Format and size.
    fn shape(&self) -> QuantisedShape;

    /// The format of its rows.
    fn format(&self) -> QuantFormat {
        self.shape().format
    }

    /// Number of rows.
    fn rows(&self) -> usize {
        self.shape().rows
    }

    /// Elements per row.
    fn columns(&self) -> usize {
        self.shape().columns
    }

    /// The input that each column belongs to, a permutation (GPTQ's act order). `None` if column `i` is
    /// input `i`.
    fn input_order(&self) -> Option<&[u32]> {
        None
    }

    /// Whether all codes are [twice floats of 4 bits](TWICE_E2M1), which a device may keep in 4 bits.
    fn are_twice_e2m1(&self) -> bool {
        false
    }

    /// Reads row `index` into `row`, which is resized to fit. Called from many threads.
    fn read_row(&self, index: usize, row: &mut QuantisedRow);
}

/// Whether these can be packed as one matrix: format, width and input order agree.
pub fn can_be_packed_together(parts: &[&dyn QuantisedRows]) -> bool {
    parts.is_sorted_by(|a, b| {
        a.format() == b.format() && a.columns() == b.columns() && a.input_order() == b.input_order()
    })
}
