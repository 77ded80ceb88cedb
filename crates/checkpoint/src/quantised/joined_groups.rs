//! Codes whose groups are smaller than those that kernels have.
//!
//! Kernels have one scale for 32 weights, or for a multiple of that. Where 32 weights have several, of 8 or 16 each,
//! they become codes of 8 bits with one scale: the largest of theirs, divided by a whole number. So weights with that
//! scale stay as they are, and others are rounded. The largest divisor with which codes fit into 8 bits, and all
//! divisors above its half, are tried, and the one with the least sum of squared errors is taken. Normally distributed
//! weights in NVFP4 change by 0.3 % (root mean square); with the largest weight as 127, by 0.6 %.

use std::ops::Range;
use std::sync::Arc;

use crate::matrix::{InOrderOfInputs, Matrix};
use crate::row_order::part_of;
use crate::stored_rows::StoredQuantisedRows;
use crate::tensor::TensorLocation;
use inflight_base::LoadError;
use inflight_numbers::{
    CodeBits, GROUP_UNIT, QuantFormat, QuantisedRow, QuantisedRows, QuantisedShape,
};

/// The largest code of 8 bits that is used.
const MAX_CODE: f32 = 127.0;
/// Lanes of a sum of errors.
const LANES: usize = 8;

/// A matrix of codes: as they are, if kernels have groups of their size, and else rounded to 8 bits in groups of 32.
pub fn matrix_of_codes<'a>(
    location: TensorLocation<'a>,
    codes: Box<dyn StoredQuantisedRows<'a> + 'a>,
) -> Matrix<'a> {
    let QuantisedShape {
        format,
        rows,
        columns,
    } = codes.shape();
    let size = format.group_size;
    if size >= columns || size.is_multiple_of(GROUP_UNIT) {
        Matrix::Quantised(location, codes)
    } else if GROUP_UNIT.is_multiple_of(size) {
        Matrix::Quantised(location, Box::new(JoinedGroups::new(codes)))
    } else {
        Matrix::Dequantised {
            location,
            rows,
            columns,
            read: Arc::new(InOrderOfInputs(codes)),
        }
    }
}

/// Rows in groups of 32, made of smaller ones.
struct JoinedGroups<'a> {
    /// From a multiple of 32 columns on.
    stored: Box<dyn StoredQuantisedRows<'a> + 'a>,
    /// The columns of `stored` that are read: whole groups of 32, or some columns of one.
    columns: Range<usize>,
}

impl<'a> JoinedGroups<'a> {
    /// The size of groups divides 32.
    fn new(stored: Box<dyn StoredQuantisedRows<'a> + 'a>) -> Self {
        let columns = 0..stored.columns();
        Self { stored, columns }
    }
}

impl<'a> StoredQuantisedRows<'a> for JoinedGroups<'a> {
    fn preload(&self) -> Result<(), LoadError> {
        self.stored.preload()
    }

    fn part(
        &self,
        rows: Range<usize>,
        columns: Range<usize>,
    ) -> Box<dyn StoredQuantisedRows<'a> + 'a> {
        let Range { start, end } = part_of(&self.columns, columns);
        // A part of a group has the codes that it has in the whole one.
        let first = start / GROUP_UNIT * GROUP_UNIT;
        let last = end.next_multiple_of(GROUP_UNIT).min(self.stored.columns());
        assert!(
            start == first || last - first <= GROUP_UNIT,
            "columns {start}..{end} cut a group of 32 and reach into another"
        );
        Box::new(Self {
            stored: self.stored.part(rows, first..last),
            columns: start - first..end - first,
        })
    }
}

impl QuantisedRows for JoinedGroups<'_> {
    fn shape(&self) -> QuantisedShape {
        QuantisedShape {
            format: QuantFormat {
                bits: CodeBits::Eight,
                group_size: GROUP_UNIT,
                has_offsets: false,
            },
            rows: self.stored.rows(),
            columns: self.columns.len(),
        }
    }

    fn input_order(&self) -> Option<&[u32]> {
        self.stored.input_order()
    }

    fn read_row(&self, index: usize, row: &mut QuantisedRow) {
        let stored_format = self.stored.format();
        let mut stored = QuantisedRow::default();
        self.stored.read_row(index, &mut stored);
        let mut values = vec![0.0; self.stored.columns()];
        stored.dequantise(stored_format, &mut values);
        row.resize(self.format(), values.len());
        let scales = stored.scales.chunks(GROUP_UNIT / stored_format.group_size);
        let groups = values.chunks(GROUP_UNIT).zip(scales);
        let joined = row.codes.chunks_mut(GROUP_UNIT).zip(&mut row.scales);
        for ((values, scales), (codes, scale)) in groups.zip(joined) {
            *scale = join(values, scales, stored_format.group_size, codes);
        }
        row.codes.copy_within(self.columns.clone(), 0);
        row.resize(self.format(), self.columns.len());
    }
}

/// Writes the codes of at most 32 weights, and returns their scale: NaN if a weight is not finite. `scales` has one for
/// each `size` weights.
fn join(values: &[f32], scales: &[f32], size: usize, codes: &mut [i8]) -> f32 {
    if !values.iter().all(|value| value.is_finite()) {
        codes.fill(0);
        return f32::NAN;
    }
    let magnitude = |value: &f32| value.abs();
    let largest = values.iter().map(magnitude).fold(0.0, f32::max);
    if largest == 0.0 {
        codes.fill(0);
        return 0.0;
    }
    // Of groups with weights that are not 0. Weights are multiples of it, so the divisor is at most 127.
    let with_weights = values.chunks(size).zip(scales);
    let with_weights = with_weights.filter(|(values, _)| values.iter().any(|&value| value != 0.0));
    let step = with_weights
        .map(|(_, scale)| scale.abs())
        .fold(0.0, f32::max);
    // The weights have been rounded to f32, so their quotients are not quite whole.
    let most = (MAX_CODE * step / largest * 1.000_001)
        .floor()
        .min(MAX_CODE);
    let mut padded = [0.0; GROUP_UNIT];
    padded[..values.len()].copy_from_slice(values);
    // Codes of 8 bits with a zero point have up to 255 steps.
    let mut best = largest / MAX_CODE;
    let mut least = f32::INFINITY;
    let mut divisor = most;
    // The half of a divisor is no better than itself.
    while divisor > most / 2.0 {
        let scale = step / divisor;
        let error = squared_error(&padded, scale);
        if error < least {
            (best, least) = (scale, error);
        }
        divisor -= 1.0;
    }
    for (code, value) in codes.iter_mut().zip(values) {
        *code = nearest(value / best).clamp(-MAX_CODE, MAX_CODE) as i8;
    }
    best
}

fn squared_error(values: &[f32; GROUP_UNIT], scale: f32) -> f32 {
    let inverse = 1.0 / scale;
    let mut sums = [0.0; LANES];
    for values in values.as_chunks::<LANES>().0 {
        for (sum, value) in sums.iter_mut().zip(values) {
            let error = value - nearest(value * inverse) * scale;
            *sum += error * error;
        }
    }
    sums.iter().sum()
}

/// The whole number nearest to a value below 2^22: the sum has no bits below 1. Without SSE 4.1, rounding is a call.
fn nearest(value: f32) -> f32 {
    const SHIFT: f32 = 1.5 * (1 << 23) as f32;
    (value + SHIFT) - SHIFT
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows in memory.
    struct Stored {
        format: QuantFormat,
        rows: Vec<QuantisedRow>,
    }

    impl QuantisedRows for Stored {
        fn shape(&self) -> QuantisedShape {
            QuantisedShape {
                format: self.format,
                rows: self.rows.len(),
                columns: self.rows[0].codes.len(),
            }
        }

        fn read_row(&self, index: usize, row: &mut QuantisedRow) {
            row.clone_from(&self.rows[index]);
        }
    }

    impl<'a> StoredQuantisedRows<'a> for Stored {
        fn preload(&self) -> Result<(), LoadError> {
            Ok(())
        }

        fn part(
            &self,
            rows: Range<usize>,
            columns: Range<usize>,
        ) -> Box<dyn StoredQuantisedRows<'a> + 'a> {
            let size = self.format.group_size;
            assert!(columns.start.is_multiple_of(size), "whole groups");
            let groups = columns.start / size..columns.end.div_ceil(size);
            let rows = self.rows[rows].iter().map(|row| QuantisedRow {
                codes: row.codes[columns.clone()].to_vec(),
                scales: row.scales[groups.clone()].to_vec(),
                offsets: match self.format.has_offsets {
                    true => row.offsets[groups.clone()].to_vec(),
                    false => Vec::new(),
                },
            });
            Box::new(Self {
                format: self.format,
                rows: rows.collect(),
            })
        }
    }

    fn format(bits: CodeBits, group_size: usize, has_offsets: bool) -> QuantFormat {
        QuantFormat {
            bits,
            group_size,
            has_offsets,
        }
    }

    fn joined(format: QuantFormat, row: QuantisedRow) -> JoinedGroups<'static> {
        let rows = vec![row];
        JoinedGroups::new(Box::new(Stored { format, rows }))
    }

    fn weights(rows: &dyn QuantisedRows) -> Vec<f32> {
        let mut row = QuantisedRow::default();
        rows.read_row(0, &mut row);
        let mut weights = vec![0.0; rows.columns()];
        row.dequantise(rows.format(), &mut weights);
        weights
    }

    /// Codes from -12 to 12 that no small number divides.
    fn codes(len: usize) -> Vec<i8> {
        let codes = (0..len as i32).map(|index| (index * index * 7 + index * 3) % 25 - 12);
        codes.map(|code| code as i8).collect()
    }

    #[test]
    fn weights_with_the_largest_scale_are_kept_and_others_are_near() {
        let row = QuantisedRow {
            codes: codes(48),
            scales: vec![0.5, 0.41, 0.3],
            offsets: Vec::new(),
        };
        let stored = format(CodeBits::Eight, 16, false);
        let mut exact = vec![0.0; 48];
        row.dequantise(stored, &mut exact);
        let joined = weights(&joined(stored, row));
        assert_eq!(joined[..16], exact[..16]);
        // The last group is alone.
        for (joined, exact) in joined[32..].iter().zip(&exact[32..]) {
            assert!((joined - exact).abs() <= 1e-6, "{joined} for {exact}");
        }
        // The largest weight is 12 times 0.5, of 12 times 10 or fewer steps.
        let largest_error = 0.5 / 6.0 / 2.0;
        for (joined, exact) in joined[16..32].iter().zip(&exact[16..32]) {
            assert!(
                (joined - exact).abs() <= largest_error,
                "{joined} for {exact}"
            );
        }
        assert_ne!(joined[16..32], exact[16..32]);
    }

    #[test]
    fn scales_with_a_common_step_are_exact() {
        // Of 12 : 8 as of 3 : 2; and of 9 : 5.
        for scales in [[12.0, 8.0], [9.0, 5.0], [8.0, 13.0], [1.0, 1.0], [0.0, 2.0]] {
            let mut row = QuantisedRow {
                codes: codes(32),
                scales: scales.to_vec(),
                offsets: Vec::new(),
            };
            row.codes.iter_mut().for_each(|code| *code /= 2);
            let stored = format(CodeBits::Eight, 16, false);
            let mut exact = vec![0.0; 32];
            row.dequantise(stored, &mut exact);
            for (joined, exact) in weights(&joined(stored, row)).iter().zip(&exact) {
                assert!(
                    (joined - exact).abs() <= 1e-5,
                    "{joined} for {exact} of {scales:?}"
                );
            }
        }
    }

    #[test]
    fn groups_of_8_with_offsets_and_wide_codes_are_near() {
        for bits in [CodeBits::Four, CodeBits::Eight] {
            let codes =
                (0..64_i32).map(|index| (index * 37 + 11) % (2 * bits.bias()) - bits.bias());
            let scales: Vec<_> = (0..8).map(|group| 0.01 + 0.003 * group as f32).collect();
            let row = QuantisedRow {
                codes: codes.map(|code| code as i8).collect(),
                offsets: scales.iter().map(|scale| scale * 5.0).collect(),
                scales,
            };
            let stored = format(bits, 8, true);
            let mut exact = vec![0.0; 64];
            row.dequantise(stored, &mut exact);
            let joined = weights(&joined(stored, row));
            for (joined, exact) in joined.chunks(32).zip(exact.chunks(32)) {
                let largest = exact
                    .iter()
                    .fold(0.0, |largest: f32, value| largest.max(value.abs()));
                for (joined, exact) in joined.iter().zip(exact) {
                    // Half of a step of the coarsest divisor, half of the finest one.
                    assert!(
                        (joined - exact).abs() <= largest / 127.0,
                        "{joined} for {exact}"
                    );
                }
            }
        }
    }

    #[test]
    fn parts_have_the_weights_that_they_have_in_the_whole_row() {
        let row = QuantisedRow {
            codes: codes(112),
            scales: vec![0.5, 0.41, 0.3, 0.7, 0.2, 0.9, 0.1],
            offsets: Vec::new(),
        };
        let whole = joined(format(CodeBits::Eight, 16, false), row);
        let all = weights(&whole);
        for columns in [0..32, 32..96, 32..112, 96..112, 40..56, 8..16, 96..104] {
            let part = whole.part(0..1, columns.clone());
            assert_eq!(weights(&*part), all[columns.clone()], "{columns:?}");
            let again = part.part(0..1, 0..8);
            assert_eq!(weights(&*again), all[columns.start..columns.start + 8]);
        }
    }

    #[test]
    fn zeros_stay_and_what_is_no_number_is_found() {
        let of = |scales: [f32; 2], code| {
            let row = QuantisedRow {
                codes: vec![code; 32],
                scales: scales.to_vec(),
                offsets: Vec::new(),
            };
            let mut out = QuantisedRow::default();
            joined(format(CodeBits::Eight, 16, false), row).read_row(0, &mut out);
            out.scales[0]
        };
        assert_eq!(of([0.0, 0.0], 3), 0.0);
        assert_eq!(of([1.0, 2.0], 0), 0.0);
        assert!(of([f32::NAN, 1.0], 3).is_nan());
        assert!(of([1.0, f32::INFINITY], 3).is_nan());
    }
}
