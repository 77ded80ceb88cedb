//! Online softmax of one tile, in plain Rust that is compiled for each instruction set.

use super::super::kv_cache::GROUP;
use super::super::math::{exp, from_bf16_bits, tanh, to_bf16_bits};
use super::{Scales, TILE};

/// The state of the online softmax of one row.
#[derive(Clone, Copy)]
pub(super) struct RowState {
    /// The largest unscaled score so far.
    pub max: f32,
    /// The sums of the probabilities so far, relative to `max`, in lanes.
    pub sums: [f32; GROUP],
}

impl RowState {
    /// Before the first tile.
    pub const EMPTY: Self = Self {
        max: f32::NEG_INFINITY,
        sums: [0.0; GROUP],
    };

    /// The sum of all probabilities.
    pub fn sum(&self) -> f32 {
        tree(self.sums, |a, b| a + b)
    }
}

/// A polynomial for `2^x` in -0.5..0.5, exact at 0: `(2^x - 1) / x` interpolated at Chebyshev nodes.
#[cfg(target_arch = "x86_64")]
pub(super) const EXP2: [f32; 6] = [
    0.001_338_130_2,
    0.009_666_368,
    0.055_503_81,
    0.240_223_5,
    std::f32::consts::LN_2,
    1.0,
];

/// The linear biases of a row's scores with a tile.
#[derive(Clone, Copy)]
pub(super) struct RowBias {
    /// What a score loses for each position, before it is scaled.
    pub slope: f32,
    /// From the query to the first position of the tile; negative if that is in front of it.
    pub distance: f32,
}

impl RowBias {
    /// No bias.
    pub const NONE: Self = Self {
        slope: 0.0,
        distance: 0.0,
    };

    /// Adds the biases to the scores of the tile from its first position on. Those of distances up to 2^24 are rounded
    /// once.
    #[inline(always)]
    pub fn add_to(self, scores: &mut [f32]) {
        for (score, place) in scores.iter_mut().zip(0_u8..) {
            *score += self.slope * (self.distance + f32::from(place));
        }
    }

    /// The same for scores with another scale: the usual one times this.
    #[inline(always)]
    pub fn at_scale(self, factor: f32) -> Self {
        Self {
            slope: self.slope / factor,
            ..self
        }
    }
}

/// Bounds scores `s` whose scale is still to be applied: `scale * s` becomes `cap * tanh(scale * s / cap)`.
#[inline(always)]
pub(super) fn bound(scores: &mut [f32], scale: f32, cap: f32) {
    let (shrink, grow) = (scale / cap, cap / scale);
    // The scores of queries that are zero have a scale of zero.
    if !grow.is_finite() {
        return;
    }
    for score in scores {
        *score = grow * tanh(*score * shrink);
    }
}

/// Adds a row of scores to its running maximum and sums, writes the probabilities relative to the new maximum, times
/// the scales of the values, and returns the factor of earlier sums. Positions that are not in the mask `seen` have
/// probability zero; the mask is not empty.
///
/// The summed probabilities are rounded to bf16, like the weights of the values.
#[inline(always)]
pub(super) fn softmax(
    scores: &mut [f32; TILE],
    seen: u64,
    (scale, soft_cap, bias): (f32, Option<f32>, Option<RowBias>),
    scales: &Scales,
    state: &mut RowState,
    probabilities: &mut [u16; TILE],
) -> f32 {
    for (score, scale) in scores.iter_mut().zip(&scales.keys) {
        *score *= scale;
    }
    if let Some(cap) = soft_cap {
        bound(scores, scale, cap);
    }
    if let Some(bias) = bias {
        bias.add_to(scores);
    }
    let scores = scores.as_chunks::<GROUP>().0;
    let seen = |group: usize, lane: usize| (seen >> (group * GROUP)) as u32 & (1 << lane) != 0;
    let mut maxima = [f32::NEG_INFINITY; GROUP];
    for (group, scores) in scores.iter().enumerate() {
        for lane in 0..GROUP {
            let larger = seen(group, lane) & (scores[lane] > maxima[lane]);
            maxima[lane] = if larger { scores[lane] } else { maxima[lane] };
        }
    }
    let max = tree(maxima, |a, b| if b > a { b } else { a });
    let max = if max > state.max { max } else { state.max };
    let rescale = exp((state.max - max) * scale);
    let mut sums = state.sums.map(|sum| sum * rescale);
    let probabilities = probabilities.as_chunks_mut::<GROUP>().0;
    let value_scales = scales.values.as_chunks::<GROUP>().0;
    for group in 0..scores.len() {
        for lane in 0..GROUP {
            let p = exp((scores[group][lane] - max) * scale);
            let seen = |p: f32| if seen(group, lane) { p } else { 0.0 };
            sums[lane] += from_bf16_bits(to_bf16_bits(seen(p)));
            probabilities[group][lane] = to_bf16_bits(seen(p * value_scales[group][lane]));
        }
    }
    *state = RowState { max, sums };
    rescale
}

/// Reduces lanes as a tree: one half onto the other.
#[inline(always)]
fn tree(mut lanes: [f32; GROUP], fold: impl Fn(f32, f32) -> f32) -> f32 {
    let mut width = GROUP / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] = fold(lanes[i], lanes[i + width]);
        }
        width /= 2;
    }
    lanes[0]
}

/// Checks the `2^x` of a kernel from `lowest` to zero.
#[cfg(all(test, target_arch = "x86_64"))]
pub(super) fn check_exp2(lowest: f32, exp2: impl Fn(f32) -> f32) {
    let mut x = lowest;
    while x <= 0.0 {
        let exact = f64::from(x).exp2();
        let error = (f64::from(exp2(x)) - exact).abs() / exact;
        assert!(error < 3.0 * f64::from(f32::EPSILON), "2^{x}: {error:e}");
        x += 0.001_7;
    }
    assert_eq!(exp2(0.0), 1.0);
    assert!(exp2(f32::NAN).is_nan());
}
