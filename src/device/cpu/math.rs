//! Scalar functions without branches, calls and tables, which compilers can vectorise.
//!
//! They are plain Rust, inlined into functions that are compiled for each instruction set, and round the same
//! way in all of them: multiplications and additions are never fused.

use half::f16;

/// 1.5 * 2^23: adding it rounds a small number to an integer, which is in the low bits of the sum.
pub(super) const ROUNDER: f32 = 12_582_912.0;

/// `e^x`, within 2 units in the last place of f32. Saturates below -87.3 and above 88; NaN gives NaN.
///
/// Cody-Waite reduction to `|r| <= ln(2)/2` and the minimax polynomial of Cephes' `expf`.
#[inline(always)]
#[allow(clippy::excessive_precision, reason = "Cephes' constants as published")]
pub(super) fn exp(x: f32) -> f32 {
    // Written as comparisons, because `f32::max` would turn NaN into the bound.
    let x = if x < -87.3 { -87.3 } else { x };
    let x = if x > 88.0 { 88.0 } else { x };
    let shifted = x * std::f32::consts::LOG2_E + ROUNDER;
    let n = shifted - ROUNDER;
    let r = (x - n * 0.693_359_375) - n * -2.121_944_4e-4;
    let mut p = 1.987_569_15e-4;
    p = p * r + 1.398_199_95e-3;
    p = p * r + 8.333_451_9e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_55e-1;
    p = p * r + 5.000_000_1e-1;
    let p = p * (r * r) + r + 1.0;
    let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3f80_0000));
    p * scale
}

/// The nearest bf16, ties to even; NaN stays NaN.
#[inline(always)]
pub(super) fn to_bf16_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let quiet = (bits >> 16) | 0x40;
    (if x.is_nan() { quiet } else { rounded }) as u16
}

/// The value of a bf16.
#[inline(always)]
pub(super) fn from_bf16_bits(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// The nearest value of an f16, ties to even: infinity above 65504; NaN stays NaN.
#[inline(always)]
pub(super) fn nearest_f16(x: f32) -> f32 {
    const SIGN: u32 = 1 << 31;
    const INFINITY: u32 = f32::INFINITY.to_bits();
    const LEAST_NORMAL: u32 = f16::MIN_POSITIVE.to_f32_const().to_bits();
    let bits = x.to_bits() & !SIGN;
    let normal = (bits + 0xfff + (bits >> 13 & 1)) & !0x1fff;
    let normal = if normal < 65536.0_f32.to_bits() {
        normal
    } else {
        INFINITY
    };
    // A sum of about 0.5 has the same last place as the subnormal numbers of f16.
    let small = (f32::from_bits(bits) + 0.5 - 0.5).to_bits();
    let rounded = if bits < LEAST_NORMAL { small } else { normal };
    let rounded = if bits > INFINITY { bits } else { rounded };
    f32::from_bits(rounded | x.to_bits() & SIGN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        let mut x = -87.3_f32;
        while x < 88.0 {
            let exact = f64::from(x).exp();
            let error = (f64::from(exp(x)) - exact).abs() / exact;
            assert!(error < 2.0 * f64::from(f32::EPSILON), "exp({x}): {error:e}");
            x += 0.000_97;
        }
        assert_eq!(exp(0.0), 1.0);
    }

    #[test]
    fn exp_saturates_and_passes_nan() {
        assert!(exp(f32::NEG_INFINITY) < 1.3e-38 && exp(-1e30) >= 0.0);
        assert!(exp(f32::INFINITY).is_finite() && exp(1e30) > 1e38);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn f16_rounding_is_that_of_the_half_crate() {
        let mut bits = 0_u32;
        loop {
            let x = f32::from_bits(bits);
            let (ours, theirs) = (nearest_f16(x), f16::from_f32(x).to_f32());
            assert!(
                ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()),
                "{x:e}: {ours:e}, {theirs:e}"
            );
            let (next, wrapped) = bits.overflowing_add(4099);
            if wrapped {
                break;
            }
            bits = next;
        }
    }

    #[test]
    fn bf16_rounding_is_that_of_the_half_crate() {
        let mut bits = 0_u32;
        loop {
            let x = f32::from_bits(bits);
            let ours = half::bf16::from_bits(to_bf16_bits(x));
            let theirs = half::bf16::from_f32(x);
            assert!(
                ours == theirs || (ours.is_nan() && theirs.is_nan()),
                "{x:e}"
            );
            let (next, wrapped) = bits.overflowing_add(4099);
            if wrapped {
                break;
            }
            bits = next;
        }
    }
}
