//! The exponential of the softmax.
//!
//! It is our own because libm's differs between machines (glibc selects a fused variant at run time) and does not
//! vectorise. This one uses multiplications and additions in a fixed order, without tables: it gives the same bits
//! everywhere, and the compiler vectorises it.

use std::f32::consts::LOG2_E;

/// Below this the result would be subnormal, a probability of less than 1 in 10^37: it is taken as zero.
const SMALLEST: f32 = -87.0;

/// Adding it moves a float's integer part, rounded to nearest, into its lowest bits.
const ROUNDER: f32 = 12_582_912.0; // 1.5 * 2^23

/// `ln 2` in two parts; `n * LN2_HIGH` is exact for every `n` that occurs.
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;

/// `e^x` for `x <= 0`, within two units in the last place; zero below -87 and for `-inf`.
///
/// ```text
/// x = n ln 2 + r,  |r| <= ln 2 / 2       e^x = 2^n (1 + r + r^2/2! + ... + r^7/7!)
/// ```
#[inline(always)]
pub(super) fn exp_nonpositive(x: f32) -> f32 {
    let shifted = x * LOG2_E + ROUNDER;
    let n = shifted - ROUNDER;
    let r = (x - n * LN2_HIGH) - n * LN2_LOW;
    let mut series = 1.0 / 5040.0;
    for term in [
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
        1.0,
        1.0,
    ] {
        series = series * r + term;
    }
    let exponent = shifted
        .to_bits()
        .wrapping_sub(ROUNDER.to_bits())
        .wrapping_add(127);
    let power = f32::from_bits(exponent.wrapping_shl(23));
    if x < SMALLEST { 0.0 } else { series * power }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_within_two_units_in_the_last_place_of_the_true_value() {
        let mut worst = 0.0f64;
        for i in 0..=870_000 {
            let x = -(i as f32) * 1e-4;
            let truth = f64::from(x).exp();
            let error = (f64::from(exp_nonpositive(x)) - truth).abs() / truth;
            worst = worst.max(error);
        }
        assert!(worst < 2.0 * f64::from(f32::EPSILON), "worst {worst:e}");
    }

    #[test]
    fn its_ends_are_exact() {
        assert_eq!(exp_nonpositive(0.0), 1.0);
        assert_eq!(exp_nonpositive(-0.0), 1.0);
        assert_eq!(exp_nonpositive(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp_nonpositive(f32::MIN), 0.0);
        assert_eq!(exp_nonpositive(-87.5), 0.0);
    }
}
