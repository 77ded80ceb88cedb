//! Weights that are rounded while they are read.

use super::super::Simd;
use super::super::math::ROUNDER;
use super::super::simd::for_each_simd;
use super::panels::stored_number;
use inflight_numbers::{
    CodeBits, MAX_E4M3, QuantFormat, QuantisedRow, QuantisedRows, QuantisedShape, to_e4m3,
};

/// A matrix that is rounded to codes row by row: weights of a float checkpoint, or of a quantised one whose format no
/// kernel supports. Groups have no offsets.
///
/// With eight bits, the largest weight of a group gets the code 127 or -127, or the float 448 or -448. With four bits,
/// the scale is one that gives the largest weight a code near -8: the one with the least squared error, weighted by the
/// square of each weight. Unweighted, the largest weights would be clipped, which costs models more than the errors of
/// all others (docs/src/results-quality.md). All instruction sets give the same bits.
pub struct Rounded<'a> {
    simd: Simd,
    shape: QuantisedShape,
    read: &'a ReadRow<'a>,
}

/// Writes a row of weights.
type ReadRow<'a> = dyn Fn(usize, &mut [f32]) + Sync + 'a;

impl<'a> Rounded<'a> {
    /// `read(row, out)` writes a row of weights. It is called from many threads.
    ///
    /// # Panics
    ///
    /// If the machine does not support `simd`.
    pub fn new(
        simd: Simd,
        rows: usize,
        columns: usize,
        bits: CodeBits,
        group_size: usize,
        read: &'a ReadRow<'a>,
    ) -> Self {
        assert!(simd.is_supported(), "no {simd}");
        let format = QuantFormat {
            bits,
            group_size,
            has_offsets: false,
        };
        Self {
            simd,
            shape: QuantisedShape {
                format,
                rows,
                columns,
            },
            read,
        }
    }
}

impl QuantisedRows for Rounded<'_> {
    fn shape(&self) -> QuantisedShape {
        self.shape
    }

    fn read_row(&self, index: usize, row: &mut QuantisedRow) {
        let mut values = vec![0.0; self.shape.columns];
        (self.read)(index, &mut values);
        let format = self.shape.format;
        row.resize(format, values.len());
        let (values, codes, scales) = (&values[..], &mut row.codes[..], &mut row.scales[..]);
        for_each_simd!(self.simd, round_row, (
            format: QuantFormat,
            values: &[f32],
            codes: &mut [i8],
            scales: &mut [f32],
        ));
    }
}

#[inline(always)]
fn round_row(format: QuantFormat, values: &[f32], codes: &mut [i8], scales: &mut [f32]) {
    let groups = values
        .chunks(format.group_size)
        .zip(codes.chunks_mut(format.group_size));
    for ((values, codes), scale) in groups.zip(scales) {
        *scale = match format.bits {
            CodeBits::Eight => round_to_eight_bits(values, codes),
            CodeBits::Four => round_to_four_bits(values, codes),
            CodeBits::Fp8 => round_to_fp8(values, codes),
        };
    }
}

/// The number with the largest magnitude; the first of several, and NaN if there is one.
#[inline(always)]
fn extreme(values: &[f32]) -> f32 {
    const SIGN: u32 = 1 << 31;
    // Without their sign, bits have the order of the magnitudes, with NaNs at the end.
    let bits = values.iter().map(|value| value.to_bits());
    let largest = bits
        .clone()
        .fold(0, |largest: u32, bits| largest.max(bits & !SIGN));
    let (mut is_positive, mut is_negative) = (false, false);
    for bits in bits.clone() {
        is_positive |= bits == largest;
        is_negative |= bits == largest | SIGN;
    }
    let sign = match (is_positive, is_negative) {
        (true, true) => bits.clone().find(|bits| bits & !SIGN == largest),
        (_, is_negative) => is_negative.then_some(SIGN),
    };
    f32::from_bits(largest | sign.unwrap_or(0))
}

#[inline(always)]
fn round_to_eight_bits(values: &[f32], codes: &mut [i8]) -> f32 {
    let scale = stored_number(extreme(values).abs() / 127.0);
    round(values, scale, (-127.0, 127.0), codes);
    scale
}

/// The largest weight becomes the largest of these floats.
#[inline(always)]
fn round_to_fp8(values: &[f32], codes: &mut [i8]) -> f32 {
    let scale = stored_number(extreme(values).abs() / MAX_E4M3);
    let inverse = inverse(scale);
    for (value, code) in values.iter().zip(codes) {
        *code = to_e4m3(value * inverse).cast_signed();
    }
    scale
}

/// The divisors that turn the largest weight of a group into a 4-bit scale. Below 8 the largest weight is clipped a
/// little, and the others are finer.
const DIVISORS: [f32; 9] = [-8.0, -7.0, -7.25, -7.5, -7.75, -8.25, -8.5, -8.75, -9.0];
/// Lanes of a sum of errors, with any instruction set.
const LANES: usize = 8;

#[inline(always)]
fn round_to_four_bits(values: &[f32], codes: &mut [i8]) -> f32 {
    let extreme = extreme(values);
    // As they will be stored, because codes are for the stored scales. A loop, because `map` might not be inlined, and
    // would be compiled without the target features.
    let mut scales = [0.0; DIVISORS.len()];
    for (scale, divisor) in scales.iter_mut().zip(DIVISORS) {
        *scale = stored_number(extreme / divisor);
    }
    let errors = squared_errors(values, &scales);
    let least = errors.iter().fold(
        f32::INFINITY,
        |least, &error| if error < least { error } else { least },
    );
    // The first one with that error. Selections instead of branches, which would be mispredicted.
    let mut best = scales[0];
    for (&scale, &error) in scales.iter().zip(&errors).rev() {
        best = if error == least { scale } else { best };
    }
    round(values, best, (-8.0, 7.0), codes);
    best
}

/// The sums of squared errors with each of the scales, weighted by the square of each number.
#[inline(always)]
fn squared_errors<const N: usize>(values: &[f32], scales: &[f32; N]) -> [f32; N] {
    let mut inverses = [0.0; N];
    for (out, &scale) in inverses.iter_mut().zip(scales) {
        *out = inverse(scale);
    }
    let mut lanes = [[0.0; LANES]; N];
    let (chunks, rest) = values.as_chunks::<LANES>();
    for chunk in chunks {
        for ((lanes, &scale), &inverse) in lanes.iter_mut().zip(scales).zip(&inverses) {
            for (lane, &value) in lanes.iter_mut().zip(chunk) {
                *lane += squared_error(value, scale, inverse);
            }
        }
    }
    for ((lanes, &scale), &inverse) in lanes.iter_mut().zip(scales).zip(&inverses) {
        for (lane, &value) in lanes.iter_mut().zip(rest) {
            *lane += squared_error(value, scale, inverse);
        }
    }
    // In lanes, for all scales at once.
    let mut errors = [0.0; N];
    for lane in 0..LANES {
        for (error, lanes) in errors.iter_mut().zip(&lanes) {
            *error += lanes[lane];
        }
    }
    errors
}

#[inline(always)]
fn squared_error(value: f32, scale: f32, inverse: f32) -> f32 {
    let error = value * ((shifted(value * inverse, -8.0, 7.0) - ROUNDER) * scale - value);
    error * error
}

#[inline(always)]
fn round(values: &[f32], scale: f32, (least, largest): (f32, f32), codes: &mut [i8]) {
    let inverse = inverse(scale);
    for (value, code) in values.iter().zip(codes) {
        *code = shifted(value * inverse, least, largest).to_bits() as i8;
    }
}

/// The nearest integer within small bounds, plus [`ROUNDER`].
#[inline(always)]
fn shifted(value: f32, least: f32, largest: f32) -> f32 {
    value.clamp(least, largest) + ROUNDER
}

/// The inverse of a scale, or zero if it would overflow.
#[inline(always)]
fn inverse(scale: f32) -> f32 {
    let inverse = scale.recip();
    if inverse.is_finite() { inverse } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Codes and scales by their definition, one number after the other.
    fn defined(bits: CodeBits, values: &[f32], codes: &mut [i8]) -> f32 {
        let extreme = values.iter().fold(0.0_f32, |extreme, &value| {
            if value.abs() > extreme.abs() {
                value
            } else {
                extreme
            }
        });
        let code = |value: f32, scale: f32, least: f32, largest: f32| {
            (value * inverse(scale))
                .clamp(least, largest)
                .round_ties_even()
        };
        let (scale, least, largest) = match bits {
            CodeBits::Eight => (stored_number(extreme.abs() / 127.0), -127.0, 127.0),
            CodeBits::Four => {
                let mut best = (f32::INFINITY, 0.0);
                for divisor in DIVISORS {
                    let scale = stored_number(extreme / divisor);
                    let mut lanes = [0.0; LANES];
                    for (index, &value) in values.iter().enumerate() {
                        let error = value * (code(value, scale, -8.0, 7.0) * scale - value);
                        lanes[index % LANES] += error * error;
                    }
                    let error = lanes.iter().sum();
                    if error < best.0 {
                        best = (error, scale);
                    }
                }
                (best.1, -8.0, 7.0)
            }
            CodeBits::Fp8 => unreachable!("not tried here"),
        };
        for (out, &value) in codes.iter_mut().zip(values) {
            *out = code(value, scale, least, largest) as i8;
        }
        scale
    }

    #[test]
    fn every_instruction_set_gives_the_codes_of_the_definition() {
        let mut state = 1_u32;
        let mut draw = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        // Numbers of a few bits, so that the largest magnitude often occurs with both signs; sizes at which scales
        // underflow, and at which their inverse overflows.
        for size in [1.0, 1e-3, 1e-6, 1e-39] {
            let values: Vec<f32> = (0..64 * 205)
                .map(|_| (draw() * draw() * 64.0).round() / 64.0 * size)
                .collect();
            for (bits, group_size) in [
                (CodeBits::Eight, 32),
                (CodeBits::Eight, 128),
                (CodeBits::Four, 32),
                (CodeBits::Four, 256),
            ] {
                for simd in Simd::tested() {
                    let read = |row: usize, out: &mut [f32]| {
                        out.copy_from_slice(&values[row * 205..][..205]);
                    };
                    let rounded = Rounded::new(simd, 64, 205, bits, group_size, &read);
                    let mut row = QuantisedRow::default();
                    for (index, values) in values.chunks(205).enumerate() {
                        rounded.read_row(index, &mut row);
                        let mut codes = vec![0; 205];
                        let groups = values.chunks(group_size).zip(codes.chunks_mut(group_size));
                        let scales: Vec<_> = groups
                            .map(|(values, codes)| defined(bits, values, codes))
                            .collect();
                        assert_eq!(row.codes, codes, "{simd}, {bits:?}, {group_size}, {size}");
                        let of_bits = |scales: &[f32]| -> Vec<_> {
                            scales.iter().map(|scale| scale.to_bits()).collect()
                        };
                        assert_eq!(of_bits(&row.scales), of_bits(&scales), "{simd}");
                    }
                }
            }
        }
    }
}
