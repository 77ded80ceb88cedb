//! How rows of ggml's quantised types are decoded.
//!
//! ```text
//! type    block  bytes               weight
//! Q8_0       32  d q*32              d q                    q signed
//! Q4_0       32  d q*16              d (q - 8)              low nibbles: first half of the block
//! Q4_1       32  d m q*16            d q + m
//! Q5_0       32  d h*4 q*16          d (q - 16)             h: the fifth bits
//! Q5_1       32  d m h*4 q*16        d q + m
//! Q4_K      256  d m s*12 q*128      d s q - m t            s, t: 6 bits for each 32 weights
//! Q5_K      256  d m s*12 h*32 q*128
//! IQ4_NL     32  d q*16              d table[q]             table: 16 levels, unevenly spaced
//! IQ4_XS    256  d h*2 l*4 q*128     d (s - 32) table[q]    s: 6 bits for each 32 weights, 4 in l and 2 in h
//! MXFP4      32  e q*16              2^(e - 127) f(q)       f: floats of 4 bits, E2M1
//!
//! Q2_K      256  s*16 q*64 d m       d s q - m t            s, t: 4 bits for each 16 weights
//! Q3_K      256  h*32 q*64 s*12 d    d (s - 32) (q - 4)     s: 6 bits for each 16 weights; h: the third bits
//! Q6_K      256  q*128 h*64 s*16 d   d s (q - 32)           s: 8 bits for each 16 weights
//! ```
//!
//! d and m are f16. Above the gap, one scale (and one offset) belongs to each 32 weights, which is what the kernels
//! compute with: codes are used as they are, and codes of a table as its levels, which fit into 8 bits. Below it, one
//! belongs to each 16 weights, and the weights are dequantised. Source: `ggml-common.h` and `ggml-quants.c` of
//! llama.cpp.

use half::f16;

use super::tensor_type::{GROUP, SUPER, TensorType};
use crate::e2m1::half_power_of_two;
use inflight_numbers::{QuantisedRow, TWICE_E2M1};

/// The levels of IQ4_NL and IQ4_XS.
const LEVELS: [i8; 16] = [
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
];

/// Decodes the codes of a row.
///
/// # Panics
///
/// The type has no [format](TensorType::format), or `row` does not have the size for it and for `bytes`.
pub fn read_codes(tensor_type: TensorType, bytes: &[u8], row: &mut QuantisedRow) {
    let blocks = bytes.chunks_exact(tensor_type.block_bytes());
    let codes = row.codes.chunks_exact_mut(tensor_type.block_len());
    let groups_per_block = tensor_type.block_len() / GROUP;
    for (index, (block, codes)) in blocks.zip(codes).enumerate() {
        let groups = index * groups_per_block..(index + 1) * groups_per_block;
        let scales = &mut row.scales[groups.clone()];
        let offsets = row.offsets.get_mut(groups).unwrap_or_default();
        match tensor_type {
            TensorType::Q8_0 => {
                scales[0] = f16_at(block, 0);
                codes.copy_from_slice(bytemuck::cast_slice(&block[2..]));
            }
            TensorType::Q4_0 => {
                scales[0] = f16_at(block, 0);
                nibbles(&block[2..], codes, |q, _| q as i8 - 8);
            }
            TensorType::Q4_1 => {
                scales[0] = f16_at(block, 0);
                offsets[0] = f16_at(block, 2) + 8.0 * scales[0];
                nibbles(&block[4..], codes, |q, _| q as i8 - 8);
            }
            TensorType::Q5_0 => {
                scales[0] = f16_at(block, 0);
                let high = u32_at(block, 2);
                nibbles(&block[6..], codes, |q, i| five_bits(q, high, i) - 16);
            }
            TensorType::Q5_1 => {
                scales[0] = f16_at(block, 0);
                offsets[0] = f16_at(block, 2);
                let high = u32_at(block, 4);
                nibbles(&block[8..], codes, |q, i| five_bits(q, high, i));
            }
            TensorType::Q4_K => {
                super_scales(block, scales, offsets);
                for (scale, offset) in scales.iter().zip(offsets) {
                    *offset += 8.0 * scale;
                }
                super_codes(&block[16..], codes, |q, _, _| q as i8 - 8);
            }
            TensorType::Q5_K => {
                super_scales(block, scales, offsets);
                let high = &block[16..48];
                super_codes(&block[48..], codes, |q, group, i| {
                    (q | ((high[i] >> group) & 1) << 4) as i8
                });
            }
            TensorType::IQ4_NL => {
                scales[0] = f16_at(block, 0);
                nibbles(&block[2..], codes, |q, _| LEVELS[usize::from(q)]);
            }
            TensorType::IQ4_XS => {
                let (d, high) = (f16_at(block, 0), u16_at(block, 2));
                for (group, (scale, codes)) in scales
                    .iter_mut()
                    .zip(codes.chunks_exact_mut(GROUP))
                    .enumerate()
                {
                    let low = block[4 + group / 2] >> (group % 2 * 4) & 15;
                    let six_bits = u16::from(low) | (high >> (2 * group) & 3) << 4;
                    *scale = d * (f32::from(six_bits) - 32.0);
                    let bytes = &block[8 + group * GROUP / 2..];
                    nibbles(bytes, codes, |q, _| LEVELS[usize::from(q)]);
                }
            }
            TensorType::MXFP4 => {
                scales[0] = half_power_of_two(block[0]);
                nibbles(&block[1..], codes, |q, _| TWICE_E2M1[usize::from(q)]);
            }
            TensorType::Q2_K
            | TensorType::Q3_K
            | TensorType::Q6_K
            | TensorType::F32
            | TensorType::F16
            | TensorType::BF16 => {
                unreachable!("{tensor_type:?} is not decoded to codes")
            }
        }
    }
}

/// Dequantises a row of a type with a scale for each 16 weights.
///
/// # Panics
///
/// If it is another type, or `out` does not have the size for `bytes`.
pub fn read_weights(tensor_type: TensorType, bytes: &[u8], out: &mut [f32]) {
    let blocks = bytes.chunks_exact(tensor_type.block_bytes());
    for (block, out) in blocks.zip(out.chunks_exact_mut(SUPER)) {
        match tensor_type {
            TensorType::Q2_K => read_q2_k(block, out),
            TensorType::Q3_K => read_q3_k(block, out),
            TensorType::Q6_K => read_q6_k(block, out),
            _ => unreachable!("{tensor_type:?} is decoded to codes"),
        }
    }
}

fn read_q2_k(block: &[u8], out: &mut [f32]) {
    let (scales, rest) = block.split_at(SUPER / 16);
    let (codes, rest) = rest.split_at(SUPER / 4);
    let (d, m) = (f16_at(rest, 0), f16_at(rest, 2));
    for (index, out) in out.iter_mut().enumerate() {
        let scale = scales[index / 16];
        let code = two_bits(codes, index);
        *out = d * f32::from(scale & 15) * f32::from(code) - m * f32::from(scale >> 4);
    }
}

fn read_q3_k(block: &[u8], out: &mut [f32]) {
    let (high, rest) = block.split_at(SUPER / 8);
    let (codes, rest) = rest.split_at(SUPER / 4);
    let (scales, d) = rest.split_at(12);
    let d = f16_at(d, 0);
    for (index, out) in out.iter_mut().enumerate() {
        // Four bits of a scale are in the first 8 bytes, the low nibbles first, and two in the last 4.
        let group = index / 16;
        let four = scales[group % 8] >> (group / 8 * 4) & 15;
        let scale = four | (scales[8 + group % 4] >> (group / 4 * 2) & 3) << 4;
        let third = high[index % 32] >> (index / 32) & 1;
        let code = i8::from_le_bytes([two_bits(codes, index) | third << 2]) - 4;
        *out = d * (f32::from(scale) - 32.0) * f32::from(code);
    }
}

fn read_q6_k(block: &[u8], out: &mut [f32]) {
    let (low, rest) = block.split_at(SUPER / 2);
    let (high, rest) = rest.split_at(SUPER / 4);
    let (scales, d) = rest.split_at(SUPER / 16);
    let d = f16_at(d, 0);
    for (index, out) in out.iter_mut().enumerate() {
        // Each half of 128 weights is four rows of 32. The low bits of two rows share 32 bytes.
        let (half, row, i) = (index / 128, index / 32 % 4, index % 32);
        let four = low[half * 64 + row % 2 * 32 + i] >> (row / 2 * 4) & 15;
        let code = i32::from(four | two_bits(high, index) << 4) - 32;
        let scale = scales[index / 16] as i8;
        *out = d * f32::from(scale) * code as f32;
    }
}

/// Two bits of a weight: each half of 128 weights is four rows of 32, which share 32 bytes.
fn two_bits(bytes: &[u8], index: usize) -> u8 {
    let (half, row, i) = (index / 128, index / 32 % 4, index % 32);
    bytes[half * 32 + i] >> (2 * row) & 3
}

fn f16_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
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

/// The scales and offsets of the 8 groups of a Q4_K or Q5_K block: 6 bits each in 12 bytes, times the block's scale and
/// offset.
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
