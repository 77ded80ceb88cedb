//! Scalar functions without branches, calls and tables, which compilers can vectorise.
//!
//! They are plain Rust, inlined into functions that are compiled for each instruction set, and round the same
//! way in all of them: multiplications and additions are fused only where `FUSED` says that the instruction set can.

use half::f16;

/// 1.5 * 2^23: adding it rounds a small number to an integer, which is in the low bits of the sum.
pub(super) const ROUNDER: f32 = 12_582_912.0;

/// `e^x`, within 2 units in the last place of f32. Saturates below -87.3 and above 88; NaN gives NaN.
///
/// Cody-Waite reduction to `|r| <= ln(2)/2` and the minimax polynomial of Cephes' `expf`.
#[inline(always)]
#[allow(clippy::excessive_precision, reason = "Cephes' constants as published")]
pub(super) fn exp(x: f32) -> f32 {
    // Written as comparisons, because `f32::min` and `f32::max` would turn NaN into the bound.
    let x = if x > 88.0 { 88.0 } else { x };
    let x = if x < -87.3 { -87.3 } else { x };
    let shifted = x * std::f32::consts::LOG2_E + ROUNDER;
    let n = shifted - ROUNDER;
    let r = n * -0.693_359_375 + x;
    let r = n * 2.121_944_4e-4 + r;
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

/// `a * b + c`, in one instruction if `FUSED`: only where the instruction set has it.
#[inline(always)]
pub(super) fn mul_add<const FUSED: bool>(a: f32, b: f32, c: f32) -> f32 {
    match FUSED {
        true => a.mul_add(b, c),
        false => a * b + c,
    }
}

/// `tanh(x)`, within 1e-7. NaN gives NaN.
#[inline(always)]
pub(super) fn tanh(x: f32) -> f32 {
    let e = exp(-2.0 * x.abs());
    ((1.0 - e) / (1.0 + e)).copysign(x)
}

/// `ln(1 + e^x)`, within 4e-7 of its size, by operations that vectors have. NaN gives NaN.
///
/// `max(x, 0) + ln(1 + t)` with `t = e^-|x|`, where `ln(1 + t) = 2 * atanh(t / (2 + t))` by its series: its argument is
/// at most a third.
#[inline(always)]
pub(super) fn softplus(x: f32) -> f32 {
    let t = exp(-x.abs());
    let u = t / (2.0 + t);
    let square = u * u;
    let mut p = 1.0 / 15.0;
    for divisor in [13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0] {
        p = p * square + 1.0 / divisor;
    }
    relu(x) + 2.0 * u * p
}

/// `x * sigmoid(x)`.
#[inline(always)]
pub(super) fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// `x * sigmoid(1.702 * x)`.
#[inline(always)]
pub(super) fn quick_gelu(x: f32) -> f32 {
    x / (1.0 + exp(-1.702 * x))
}

/// `x` times the standard normal distribution function at `x`, which is within 3e-7, about as by an `erf` of f32, and 0
/// below -5.25. NaN gives NaN.
pub fn gelu(x: f32) -> f32 {
    gelu_by::<false>(x)
}

/// As [`gelu`].
#[inline(always)]
#[allow(clippy::excessive_precision, reason = "coefficients as fitted")]
pub(super) fn gelu_by<const FUSED: bool>(x: f32) -> f32 {
    // The function is 1/2 + u * polynomial(t), with u = x between the bounds and t = 2 * (u / 5.25)^2 - 1: the minimax
    // fit of its error that is 0 at -5.25. With t from -1 to 1 no coefficient is large, and so the rounding is not,
    // either.
    const BOUND: f32 = 5.25;
    let u = if x < -BOUND { -BOUND } else { x };
    let u = if u > BOUND { BOUND } else { u };
    let t = mul_add::<FUSED>(u * u, 2.0 / (BOUND * BOUND), -1.0);
    let mut p = -4.718_420_4e-4;
    p = mul_add::<FUSED>(p, t, 1.449_145_4e-3);
    p = mul_add::<FUSED>(p, t, -1.600_569_6e-3);
    p = mul_add::<FUSED>(p, t, 1.887_785_4e-3);
    p = mul_add::<FUSED>(p, t, -4.797_131_8e-3);
    p = mul_add::<FUSED>(p, t, 9.054_094_6e-3);
    p = mul_add::<FUSED>(p, t, -1.313_565_9e-2);
    p = mul_add::<FUSED>(p, t, 1.833_231_6e-2);
    p = mul_add::<FUSED>(p, t, -2.494_585_3e-2);
    p = mul_add::<FUSED>(p, t, 3.206_324_2e-2);
    p = mul_add::<FUSED>(p, t, -3.977_426_9e-2);
    p = mul_add::<FUSED>(p, t, 4.964_394_9e-2);
    p = mul_add::<FUSED>(p, t, -6.712_646_8e-2);
    p = mul_add::<FUSED>(p, t, 1.346_593_6e-1);
    let distribution = mul_add::<FUSED>(u, p, 0.5);
    x * if distribution < 0.0 {
        0.0
    } else {
        distribution
    }
}

/// `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))`: half of one plus tanh is a sigmoid of twice its argument.
#[inline(always)]
#[allow(
    clippy::excessive_precision,
    reason = "two roots of 2 / pi to 8 digits"
)]
pub(super) fn gelu_tanh(x: f32) -> f32 {
    let twice = 1.595_769_1 * (x + 0.044_715 * x * x * x);
    x / (1.0 + exp(-twice))
}

/// `max(x, 0)`. NaN stays NaN.
#[inline(always)]
pub(super) fn relu(x: f32) -> f32 {
    if x < 0.0 { 0.0 } else { x }
}

/// `max(x, 0)^2`. NaN stays NaN.
#[inline(always)]
pub(super) fn squared_relu(x: f32) -> f32 {
    relu(x) * relu(x)
}

/// `x / 2 + positive * x^2` above 0, else `x / 2 + negative * (expm1(min(x, -1e-6)) - x)`. NaN gives NaN.
#[inline(always)]
pub(super) fn xielu(x: f32, positive: f32, negative: f32) -> f32 {
    let below = if x < -1e-6 { x } else { -1e-6 };
    let curved = match x > 0.0 {
        true => positive * x * x,
        false => negative * (exp_beyond_linear(below) + (below - x)),
    };
    curved + 0.5 * x
}

/// `e^x - 1 - x` for `x` up to 0: near 0 by its series, whose terms do not cancel.
#[inline(always)]
fn exp_beyond_linear(x: f32) -> f32 {
    let mut series = 1.0 / 5040.0;
    for factor in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5] {
        series = series * x + factor;
    }
    match x > -0.5 {
        true => series * x * x,
        false => exp(x) - 1.0 - x,
    }
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

    /// Calls `check` for numbers from -30 to 30, and for all powers of two.
    fn for_numbers(check: impl Fn(f32)) {
        let mut x = -30.0_f32;
        while x < 30.0 {
            check(x);
            x += 0.000_97;
        }
        for exponent in -126..=127 {
            let x = (exponent as f32).exp2();
            check(x);
            check(-x);
        }
        check(0.0);
    }

    #[test]
    fn xielu_is_within_a_millionth_of_its_parts() {
        for (positive, negative) in [(0.8, 0.8), (3.1, 0.52), (0.01, 7.0)] {
            for_numbers(|x| {
                let exact = f64::from(x);
                let curved = match exact > 0.0 {
                    true => f64::from(positive) * exact * exact,
                    false => f64::from(negative) * (exact.min(-1e-6).exp_m1() - exact),
                };
                let bound = 1e-6 * (curved.abs() + exact.abs()) + 1e-12;
                let error =
                    (f64::from(xielu(x, positive, negative)) - (curved + exact / 2.0)).abs();
                // Squares beyond f32 are infinite.
                let is_finite = curved.abs() < f64::from(f32::MAX) / 8.0;
                assert!(!is_finite || error < bound, "xielu({x}): {error:e}");
            });
        }
        assert!(xielu(f32::NAN, 1.0, 1.0).is_nan());
    }

    #[test]
    fn softplus_is_within_a_few_units_in_the_last_place() {
        for_numbers(|x| {
            let exact = f64::from(x).max(0.0) + (-f64::from(x.abs())).exp().ln_1p();
            let error = (f64::from(softplus(x)) - exact).abs();
            // Exponentials saturate.
            let bound = 4e-7 * exact + 2e-38;
            assert!(error < bound, "softplus({x}): {error:e}");
        });
        assert!(softplus(f32::NAN).is_nan());
    }

    include!("../../../tests/support/normal_distribution.rs");

    #[test]
    fn tanh_is_within_its_bound() {
        for_numbers(|x| {
            let error = (f64::from(tanh(x)) - f64::from(x).tanh()).abs();
            assert!(
                error < 1e-7 + 2e-7 * f64::from(x.abs().min(1.0)),
                "tanh({x}): {error:e}"
            );
        });
        assert!(tanh(f32::NAN).is_nan());
        assert_eq!([tanh(f32::INFINITY), tanh(f32::NEG_INFINITY)], [1.0, -1.0]);
    }

    #[test]
    fn activations_are_within_a_bf16_rounding_of_their_formulas() {
        assert!((normal_distribution(-1.0) - 0.158_655_253_931_457_05).abs() < 1e-15);
        let close = |name: &str, x: f32, ours: f32, exact: f64| {
            let error = (f64::from(ours) - exact).abs();
            // Where the exponential saturates, an element becomes that small, and not 0.
            let saturated = 1.3e-38 * f64::from(x.abs()).max(1.0);
            assert!(
                error < 2e-5 * exact.abs() + saturated,
                "{name}({x}): {ours:e}, {exact:e}"
            );
        };
        for_numbers(|x| {
            let wide = f64::from(x);
            close("silu", x, silu(x), wide / (1.0 + (-wide).exp()));
            for (name, ours) in [("gelu", gelu(x)), ("fused", gelu_by::<true>(x))] {
                let error = (f64::from(ours) - wide * normal_distribution(wide)).abs();
                assert!(error <= 3e-7 * wide.abs(), "{name}({x}): {ours:e}");
                assert!(x > -5.25 || ours == 0.0, "{name}({x}): {ours:e}");
            }
            let u = (2.0 / std::f64::consts::PI).sqrt() * (wide + 0.044_715 * wide.powi(3));
            if x > -6.0 {
                close(
                    "gelu_tanh",
                    x,
                    gelu_tanh(x),
                    wide / (1.0 + (-2.0 * u).exp()),
                );
            } else {
                assert!(gelu_tanh(x).abs() < f32::max(1e-8, 1.3e-38 * x.abs()));
            }
            close("relu", x, relu(x), wide.max(0.0));
            if x < 1e18 {
                close("squared_relu", x, squared_relu(x), wide.max(0.0).powi(2));
            }
        });
        for activation in [silu, gelu, gelu_by::<true>, gelu_tanh, relu, squared_relu] {
            assert!(activation(f32::NAN).is_nan());
            assert_eq!(activation(0.0), 0.0);
        }
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
