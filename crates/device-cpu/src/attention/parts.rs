//! Parts of a sequence's positions with separate sums.
//!
//! A row has new sums in each part, which are combined in the order of the parts. So idle threads can compute parts of
//! a long sequence in parallel with the same bits (flash-decoding; Dao, Haziza, Massa, Sizov, 2023).
//!
//! ```text
//! positions   0              1024            2048       kv_len
//!             |    part 0    |    part 1     |   part 2 . |
//! one task    thread 0 ------------------------------------>
//! or split    thread 0 ----> | thread 1 ---> | thread 2 --->   each with its own totals, which are then combined
//! ```

use super::super::math::exp;
use super::TILE;
use crate::kv_cache::GroupedLayout;
use inflight_device::KvLayout;

/// Positions per part.
pub(super) const PART: usize = 16 * TILE;

/// The elements before the weighted values of a row: its largest scaled score, and the sum of its probabilities.
const HEAD: usize = 2;

/// The totals of a row that has not seen anything.
const EMPTY: [f32; HEAD] = [f32::NEG_INFINITY, 0.0];

/// Elements of the totals per row.
pub(super) fn row_len(layout: &KvLayout) -> usize {
    HEAD + layout.padded_dim()
}

/// Resets the totals of rows.
pub(super) fn clear(totals: &mut [f32], row_len: usize) {
    for row in totals.chunks_exact_mut(row_len) {
        row[..HEAD].copy_from_slice(&EMPTY);
    }
}

/// The weighted values of a row, their factor, and the sum to divide them by, which includes the probability of the
/// sink, if there is one: all relative to the largest score.
pub(super) fn result(row: &[f32], sink_logit: Option<f32>) -> (f32, f32, &[f32]) {
    let (head, values) = row.split_at(HEAD);
    let Some(sink_logit) = sink_logit else {
        return (1.0, head[1], values);
    };
    let max = if sink_logit > head[0] {
        sink_logit
    } else {
        head[0]
    };
    let scale = exp(head[0] - max);
    (scale, head[1] * scale + exp(sink_logit - max), values)
}

/// Adds the totals of later positions to the totals of a row.
#[inline(always)]
pub(super) fn add(row: &mut [f32], later: &[f32]) {
    let (head, values) = later.split_at(HEAD);
    fold(row, head[0], head[1], values);
}

/// Adds a part to the totals of a row: its largest score, the sum of its probabilities relative to that score, and
/// its weighted values.
#[inline(always)]
pub(super) fn fold(row: &mut [f32], max: f32, sum: f32, values: &[f32]) {
    let (head, total) = row.split_at_mut(HEAD);
    // A row that has seen a NaN has a sum of NaN.
    if [max, sum] == EMPTY {
        return;
    }
    if *head == EMPTY {
        head.copy_from_slice(&[max, sum]);
        total.copy_from_slice(values);
        return;
    }
    let new_max = if max > head[0] { max } else { head[0] };
    let (before, now) = (exp(head[0] - new_max), exp(max - new_max));
    head.copy_from_slice(&[new_max, head[1] * before + sum * now]);
    for (total, value) in total.iter_mut().zip(values) {
        *total = *total * before + value * now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_sum_up_to_the_whole() {
        let scores = [0.5_f32, -3.0, 7.0, 6.5, -20.0];
        let mut row = [f32::NEG_INFINITY, 0.0, 9.0];
        clear(&mut row, 3);
        for (i, score) in scores.into_iter().enumerate() {
            fold(&mut row, score, 1.0, &[i as f32]);
        }
        let weights = scores.map(|score| f64::from(score - 7.0).exp());
        let sum: f64 = weights.iter().sum();
        let values: f64 = (0_u8..).zip(weights).map(|(i, w)| f64::from(i) * w).sum();
        assert_eq!(row[0], 7.0);
        assert!((f64::from(row[1]) - sum).abs() < 1e-6, "{row:?}");
        assert!((f64::from(row[2]) - values).abs() < 1e-5, "{row:?}");
    }

    #[test]
    fn an_unseen_part_changes_no_bit_and_a_single_part_is_kept() {
        let (nothing, part) = ([f32::NEG_INFINITY, 0.0, 5.0], [3.0, 0.1, -0.0]);
        for order in [[&nothing, &part], [&part, &nothing]] {
            let mut row = nothing;
            for later in order {
                add(&mut row, later);
            }
            assert_eq!(row.map(f32::to_bits), part.map(f32::to_bits));
        }
    }

    #[test]
    fn a_sink_is_one_more_score_whichever_is_larger() {
        let row = [2.0, 3.0, 6.0, -1.5];
        assert_eq!(result(&row, None), (1.0, 3.0, &row[HEAD..]));
        for logit in [-200.0, 1.0, 2.0, 5.0, 200.0_f32] {
            let (scale, sum, values) = result(&row, Some(logit));
            let expected = 6.0 / (3.0 + (f64::from(logit) - 2.0).exp());
            let value = f64::from(values[0] * scale / sum);
            assert!(
                (value - expected).abs() <= 1e-6 * expected + 1e-30,
                "{logit}: {value}"
            );
        }
        let (scale, sum, _) = result(&[1.0, f32::NAN, f32::NAN], Some(0.0));
        assert!((scale / sum).is_nan());
    }

    #[test]
    fn nans_stay_nans() {
        let (nan, part) = ([f32::NEG_INFINITY, f32::NAN, f32::NAN], [3.0, 0.1, 1.0]);
        for order in [[&nan, &part], [&part, &nan], [&nan, &nan]] {
            let mut row = [f32::NEG_INFINITY, 0.0, 0.0];
            for later in order {
                add(&mut row, later);
            }
            assert!(row[1].is_nan() && row[2].is_nan(), "{row:?}");
        }
    }
}
