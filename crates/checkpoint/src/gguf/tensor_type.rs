//! The element types of ggml: their names, sizes, and the format of their codes.

use inflight_numbers::{CodeBits, Dtype, QuantFormat};

/// Weights that share a scale which the kernels compute with.
pub const GROUP: usize = 32;
/// Weights of a block of the K types.
pub const SUPER: usize = 256;

/// An element type that can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(non_camel_case_types, reason = "the names that ggml gives them")]
pub enum TensorType {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
}

/// The names of all types by number, for errors.
const NAMES: [&str; 40] = [
    "F32",
    "F16",
    "Q4_0",
    "Q4_1",
    "Q4_2",
    "Q4_3",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q8_1",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "Q8_K",
    "IQ2_XXS",
    "IQ2_XS",
    "IQ3_XXS",
    "IQ1_S",
    "IQ4_NL",
    "IQ3_S",
    "IQ2_S",
    "IQ4_XS",
    "I8",
    "I16",
    "I32",
    "I64",
    "F64",
    "IQ1_M",
    "BF16",
    "Q4_0_4_4",
    "Q4_0_4_8",
    "Q4_0_8_8",
    "TQ1_0",
    "TQ2_0",
    "IQ4_NL_4_4",
    "IQ4_NL_4_8",
    "IQ4_NL_8_8",
    "MXFP4",
];

/// The name of a type, readable or not.
pub fn name_of(number: u32) -> String {
    match NAMES.get(number as usize) {
        Some(name) => (*name).to_owned(),
        None => format!("number {number}"),
    }
}

impl TensorType {
    /// The type of this number; `None` if it cannot be read.
    pub fn from_number(number: u32) -> Option<Self> {
        Some(match *NAMES.get(number as usize)? {
            "F32" => Self::F32,
            "F16" => Self::F16,
            "BF16" => Self::BF16,
            "Q4_0" => Self::Q4_0,
            "Q4_1" => Self::Q4_1,
            "Q5_0" => Self::Q5_0,
            "Q5_1" => Self::Q5_1,
            "Q8_0" => Self::Q8_0,
            "Q2_K" => Self::Q2_K,
            "Q3_K" => Self::Q3_K,
            "Q4_K" => Self::Q4_K,
            "Q5_K" => Self::Q5_K,
            "Q6_K" => Self::Q6_K,
            "IQ4_NL" => Self::IQ4_NL,
            "IQ4_XS" => Self::IQ4_XS,
            "MXFP4" => Self::MXFP4,
            _ => return None,
        })
    }

    /// The float type, if it is one.
    pub const fn float(self) -> Option<Dtype> {
        match self {
            Self::F32 => Some(Dtype::F32),
            Self::F16 => Some(Dtype::F16),
            Self::BF16 => Some(Dtype::Bf16),
            _ => None,
        }
    }

    /// The format in which the kernels compute with its codes, if they can.
    pub const fn format(self) -> Option<QuantFormat> {
        let (bits, has_offsets) = match self {
            Self::Q4_0 => (CodeBits::Four, false),
            Self::Q4_1 | Self::Q4_K => (CodeBits::Four, true),
            Self::Q5_0 | Self::Q8_0 | Self::IQ4_NL | Self::IQ4_XS | Self::MXFP4 => {
                (CodeBits::Eight, false)
            }
            Self::Q5_1 | Self::Q5_K => (CodeBits::Eight, true),
            Self::Q2_K | Self::Q3_K | Self::Q6_K | Self::F32 | Self::F16 | Self::BF16 => {
                return None;
            }
        };
        Some(QuantFormat {
            bits,
            group_size: GROUP,
            has_offsets,
        })
    }

    /// Weights of a block.
    pub const fn block_len(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 => GROUP,
            Self::IQ4_NL | Self::MXFP4 => GROUP,
            Self::Q2_K | Self::Q3_K | Self::Q4_K | Self::Q5_K | Self::Q6_K | Self::IQ4_XS => SUPER,
        }
    }

    /// Bytes of a block.
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q2_K => 84,
            Self::Q3_K => 110,
            Self::Q4_K => 144,
            Self::Q5_K => 176,
            Self::Q6_K => 210,
            Self::IQ4_NL => 18,
            Self::IQ4_XS => 136,
            Self::MXFP4 => 17,
        }
    }

    /// Bytes of a tensor; `None` if its rows are not whole blocks, or the size overflows.
    pub fn num_bytes(self, shape: &[usize]) -> Option<usize> {
        let (columns, rows) = shape.split_last().unwrap_or((&1, &[]));
        if !columns.is_multiple_of(self.block_len()) {
            return None;
        }
        let row = (columns / self.block_len()).checked_mul(self.block_bytes())?;
        rows.iter()
            .try_fold(row, |len, &size| len.checked_mul(size))
    }

    /// Bytes of a row of so many whole blocks.
    pub const fn row_bytes(self, columns: usize) -> usize {
        columns / self.block_len() * self.block_bytes()
    }
}
