//! The element types of ggml, and how their blocks are decoded.
//!
//! ```text
//! type   block  bytes              weight
//! Q8_0      32  d q*32             d q                    q signed
//! Q4_0      32  d q*16             d (q - 8)              low nibbles: first half of the block
//! Q4_1      32  d m q*16           d q + m
//! Q5_0      32  d h*4 q*16         d (q - 16)             h: the fifth bits
//! Q5_1      32  d m h*4 q*16       d q + m
//! Q4_K     256  d m s*12 q*128     d s q - m t            s, t: 6 bits for each 32 weights
//! Q5_K     256  d m s*12 h*32 q*128
//! Q6_K     256  q*128 h*64 s*16 d  d s (q - 32)           s: 8 bits for each 16 weights
//! ```
//!
//! d and m are f16. All types but Q6_K have one scale (and one offset) for each 32 weights, which is what the kernels
//! compute with: their codes are used as they are. Q6_K has one for each 16 weights and is dequantised.

use half::f16;

use crate::device::{CodeBits, Dtype, QuantFormat, QuantisedRow};

/// Weights that share a scale.
const GROUP: usize = 32;
/// Weights of a block of the K types.
const SUPER: usize = 256;

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
    Q4_K,
    Q5_K,
    Q6_K,
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
            "Q4_K" => Self::Q4_K,
            "Q5_K" => Self::Q5_K,
            "Q6_K" => Self::Q6_K,
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
            Self::Q5_0 | Self::Q8_0 => (CodeBits::Eight, false),
            Self::Q5_1 | Self::Q5_K => (CodeBits::Eight, true),
            Self::Q6_K | Self::F32 | Self::F16 | Self::BF16 => return None,
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
            Self::Q4_K | Self::Q5_K | Self::Q6_K => SUPER,
        }
    }

    /// Bytes of a block.
    const fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q4_K => 144,
            Self::Q5_K => 176,
            Self::Q6_K => 210,
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

    /// Decodes the codes of a row.
    ///
    /// # Panics
    ///
    /// The type has no [format](TensorType::format), or `row` does not have the size for it and for `bytes`.
    pub fn read_codes(self, bytes: &[u8], row: &mut QuantisedRow) {
        let blocks = bytes.chunks_exact(self.block_bytes());
        let codes = row.codes.chunks_exact_mut(self.block_len());
        let groups_per_block = self.block_len() / GROUP;
        for (index, (block, codes)) in blocks.zip(codes).enumerate() {
            let groups = index * groups_per_block..(index + 1) * groups_per_block;
            let scales = &mut row.scales[groups.clone()];
            let offsets = row.offsets.get_mut(groups).unwrap_or_default();
            match self {
                Self::Q8_0 => {
                    scales[0] = f16_at(block, 0);
                    codes.copy_from_slice(bytemuck::cast_slice(&block[2..]));
                }
                Self::Q4_0 => {
                    scales[0] = f16_at(block, 0);
                    nibbles(&block[2..], codes, |q, _| q as i8 - 8);
                }
                Self::Q4_1 => {
                    scales[0] = f16_at(block, 0);
                    offsets[0] = f16_at(block, 2) + 8.0 * scales[0];
                    nibbles(&block[4..], codes, |q, _| q as i8 - 8);
                }
                Self::Q5_0 => {
                    scales[0] = f16_at(block, 0);
                    let high = u32_at(block, 2);
                    nibbles(&block[6..], codes, |q, i| five_bits(q, high, i) - 16);
                }
                Self::Q5_1 => {
                    scales[0] = f16_at(block, 0);
                    offsets[0] = f16_at(block, 2);
                    let high = u32_at(block, 4);
                    nibbles(&block[8..], codes, |q, i| five_bits(q, high, i));
                }
                Self::Q4_K => {
                    super_scales(block, scales, offsets);
                    for (scale, offset) in scales.iter().zip(offsets) {
                        *offset += 8.0 * scale;
                    }
                    super_codes(&block[16..], codes, |q, _, _| q as i8 - 8);
                }
                Self::Q5_K => {
                    super_scales(block, scales, offsets);
                    let high = &block[16..48];
                    super_codes(&block[48..], codes, |q, group, i| {
                        (q | ((high[i] >> group) & 1) << 4) as i8
                    });
                }
                Self::Q6_K | Self::F32 | Self::F16 | Self::BF16 => {
                    unreachable!("{self:?} is not decoded to codes")
                }
            }
        }
    }
}

/// Dequantises a row of Q6_K.
pub fn read_q6_k(bytes: &[u8], out: &mut [f32]) {
    const LOW: usize = SUPER / 2;
    const HIGH: usize = SUPER / 4;
    let blocks = bytes.chunks_exact(TensorType::Q6_K.block_bytes());
    for (block, out) in blocks.zip(out.chunks_exact_mut(SUPER)) {
        let (low, rest) = block.split_at(LOW);
        let (high, rest) = rest.split_at(HIGH);
        let (scales, d) = rest.split_at(SUPER / 16);
        let d = f16_at(d, 0);
        // Each half of 128 weights is four rows of 32: the low bits are in 64 bytes, the high bits in 32.
        for (half, out) in out.chunks_exact_mut(SUPER / 2).enumerate() {
            let (low, high) = (&low[half * 64..], &high[half * 32..]);
            for (index, out) in out.iter_mut().enumerate() {
                let (row, i) = (index / 32, index % 32);
                let four = (low[row % 2 * 32 + i] >> (row / 2 * 4)) & 15;
                let two = (high[i] >> (2 * row)) & 3;
                let code = i32::from(four | two << 4) - 32;
                let scale = scales[half * 8 + index / 16] as i8;
                *out = d * f32::from(scale) * code as f32;
            }
        }
    }
}

fn f16_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// A code of four bits, with its fifth bit from `high`.
fn five_bits(four: u8, high: u32, index: usize) -> i8 {
    (four | (((high >> index) & 1) as u8) << 4) as i8
}

/// 32 codes in 16 bytes: the low nibbles of all, then the high nibbles. `code` also gets the index of each code.
fn nibbles(bytes: &[u8], codes: &mut [i8], code: impl Fn(u8, usize) -> i8) {
    let (lower, upper) = codes.split_at_mut(GROUP / 2);
    for (i, byte) in bytes[..GROUP / 2].iter().enumerate() {
        lower[i] = code(byte & 15, i);
        upper[i] = code(byte >> 4, i + GROUP / 2);
    }
}

/// 256 codes in 128 bytes: of each 32 bytes, the low nibbles are one group and the high nibbles the next.
fn super_codes(bytes: &[u8], codes: &mut [i8], code: impl Fn(u8, usize, usize) -> i8) {
    for (group, codes) in codes.chunks_exact_mut(GROUP).enumerate() {
        let bytes = &bytes[group / 2 * GROUP..][..GROUP];
        for (i, (byte, out)) in bytes.iter().zip(codes).enumerate() {
            *out = code((byte >> (group % 2 * 4)) & 15, group, i);
        }
    }
}

/// The scales and offsets of the 8 groups of a Q4_K or Q5_K block: 6 bits each in 12 bytes, times those of the block.
fn super_scales(block: &[u8], scales: &mut [f32], offsets: &mut [f32]) {
    let (d, m, packed) = (f16_at(block, 0), f16_at(block, 2), &block[4..16]);
    for group in 0..8 {
        let (scale, min) = match group {
            0..4 => (packed[group] & 63, packed[group + 4] & 63),
            _ => {
                let (four, high) = (packed[group + 4], group - 4);
                (
                    four & 15 | packed[high] >> 6 << 4,
                    four >> 4 | packed[high + 4] >> 6 << 4,
                )
            }
        };
        scales[group] = d * f32::from(scale);
        offsets[group] = -m * f32::from(min);
    }
}
