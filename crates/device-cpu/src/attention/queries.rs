//! The queries of a task, in the form that its kernel takes.

use super::super::Simd;
use super::super::lines::Lines;
use super::super::math::{ROUNDER, from_bf16_bits};
use super::super::simd::for_each_simd;
use super::Operands;

/// Scratch memory for the rows of a task, `[rows, head_dim]`.
#[derive(Default)]
pub(super) struct Queries {
    /// In bf16, or as 16-bit integers with one scale per row.
    pub words: Lines<u16>,
    pub wide: Vec<f32>,
    pub scales: Vec<f32>,
}

impl Queries {
    pub fn clear(&mut self) {
        self.words.resize(0);
        self.wide.clear();
        self.scales.clear();
    }

    /// Adds rows.
    pub fn add(&mut self, simd: Simd, operands: Operands, rows: &[u16], head_dim: usize) {
        match operands {
            Operands::Bf16 | Operands::Widened => self.words.extend(rows),
            Operands::WideQueries => {
                let len = self.wide.len();
                self.wide.resize(len + rows.len(), 0.0);
                let wide = &mut self.wide[len..];
                for_each_simd!(simd, widen, (rows: &[u16], wide: &mut [f32]));
            }
            Operands::Integers => {
                for row in rows.chunks_exact(head_dim) {
                    let len = self.words.len();
                    self.words.resize(len + head_dim);
                    let out = &mut self.words[len..];
                    let mut scale = 0.0;
                    let to = &mut scale;
                    for_each_simd!(simd, quantise, (row: &[u16], out: &mut [u16], to: &mut f32));
                    self.scales.push(scale);
                }
            }
        }
    }
}

#[inline(always)]
fn widen(rows: &[u16], out: &mut [f32]) {
    for (bits, out) in rows.iter().zip(out) {
        *out = from_bf16_bits(*bits);
    }
}

/// Quantises a row to 16-bit integers whose products with as many 8-bit elements sum up within 32 bits. The scale
/// depends only on the row. If an element is not finite, the scale is NaN.
#[inline(always)]
fn quantise(row: &[u16], out: &mut [u16], scale: &mut f32) {
    let limit = (i32::MAX as f32 / 128.0 / row.len() as f32).min(i16::MAX as f32);
    // The bits of positive floats have the order of their values, with NaNs above infinity.
    let bits = row.iter().fold(0, |max, bits| (bits & 0x7fff).max(max));
    let largest = from_bf16_bits(bits);
    if !largest.is_finite() {
        out.fill(0);
        *scale = f32::NAN;
        return;
    }
    // Numbers whose inverse would overflow become zero, which have any scale: one that biases can be divided by.
    let (inverse, largest) = match largest {
        0.0..1e-33 => (0.0, limit),
        _ => (limit / largest, largest),
    };
    for (bits, out) in row.iter().zip(out) {
        *out = (from_bf16_bits(*bits) * inverse + ROUNDER).to_bits() as u16;
    }
    *scale = largest / limit;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::math::to_bf16_bits;

    fn quantised(row: &[f32]) -> (Vec<f32>, f32) {
        let row: Vec<_> = row.iter().map(|x| to_bf16_bits(*x)).collect();
        let (mut out, mut scale) = (vec![7; row.len()], 0.0);
        quantise(&row, &mut out, &mut scale);
        let out = out.into_iter().map(|bits| f32::from(bits as i16));
        (out.collect(), scale)
    }

    #[test]
    fn an_element_is_off_by_half_a_step_at_most() {
        for size in [1e-30_f32, 1.0, 42.0, 3e38] {
            let row: Vec<_> = (-256..=256).map(|i| i as f32 / 256.0 * size).collect();
            let (elements, scale) = quantised(&row);
            for (x, element) in row.iter().zip(elements) {
                let x = from_bf16_bits(to_bf16_bits(*x));
                let error = (x - element * scale).abs();
                assert!(error <= 0.51 * scale, "{x} as {element} * {scale}");
            }
        }
    }

    #[test]
    fn the_sum_of_products_has_room_however_many_there_are() {
        for len in [2, 64, 512, 514, 1024, 4096] {
            let (elements, scale) = quantised(&vec![-2.5; len]);
            let sum: i64 = elements.iter().map(|&q| q as i64 * 127).sum();
            assert!(sum >= -i64::from(i32::MAX), "{len} elements");
            assert!((elements[0] * scale + 2.5).abs() < 2e-3);
        }
    }

    #[test]
    fn a_row_that_is_not_a_number_stays_none_and_one_of_zeros_is_zero() {
        for x in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let (elements, scale) = quantised(&[1.0, x]);
            assert!(elements == [0.0, 0.0] && scale.is_nan());
        }
        assert_eq!(quantised(&[0.0, -0.0]), (vec![0.0, 0.0], 1.0));
    }
}
