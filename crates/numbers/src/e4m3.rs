//! Floats of 8 bits: a sign, 4 bits of exponent and 3 of mantissa (Micikevicius et al., arXiv:2209.05433).

/// The largest of them.
pub const MAX_E4M3: f32 = 448.0;

/// The value of a code: `(-1)^s * 2^(e - 7) * 1.m`, or `(-1)^s * 2^-6 * 0.m` if `e` is 0. If all bits but the sign are
/// set, NaN.
pub fn from_e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (code >> 3 & 0xf, code & 7);
    let magnitude = match (exponent, mantissa) {
        (15, 7) => f32::NAN,
        (0, _) => f32::from(mantissa) / 512.0,
        _ => f32::from_bits((u32::from(exponent) + 120) << 23 | u32::from(mantissa) << 20),
    };
    match code & 0x80 {
        0 => magnitude,
        _ => -magnitude,
    }
}

/// The code of the nearest value, ties to even; beyond [`MAX_E4M3`] it is that, and for NaN NaN.
pub fn to_e4m3(value: f32) -> u8 {
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    if value.is_nan() {
        return 0x7f;
    }
    let magnitude = value.abs().min(MAX_E4M3);
    // Below 2^-6, codes count steps of 2^-9.
    let code = match magnitude < 2.0_f32.powi(-6) {
        true => (magnitude * 512.0).round_ties_even() as u32,
        false => {
            let bits = magnitude.to_bits();
            ((bits + 0x7_ffff + (bits >> 20 & 1)) >> 20) - (120 << 3)
        }
    };
    sign | code as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_have_the_values_of_the_paper() {
        // Table 1: the largest number, the smallest normal one, and the largest and smallest below that.
        for (code, expected) in [
            (0x00, 0.0),
            (0x38, 1.0),
            (0x7e, 448.0),
            (0x08, 2.0_f32.powi(-6)),
            (0x07, 0.875 * 2.0_f32.powi(-6)),
            (0x01, 2.0_f32.powi(-9)),
            (0xb9, -1.125),
        ] {
            assert_eq!(from_e4m3(code), expected, "{code:#x}");
        }
        assert!(from_e4m3(0x7f).is_nan() && from_e4m3(0xff).is_nan());
        let ascending: Vec<_> = (0..0x7f).map(from_e4m3).collect();
        assert!(ascending.is_sorted_by(|a, b| a < b));
    }

    #[test]
    fn values_become_the_nearest_codes() {
        for code in 0..0x7e_u8 {
            let [low, high] = [code, code + 1].map(from_e4m3);
            let middle = (low + high) / 2.0;
            let even = code + (code & 1);
            let expected = [
                (low, code),
                (middle.next_down(), code),
                (middle, even),
                (middle.next_up(), code + 1),
            ];
            for (value, expected) in expected {
                assert_eq!(to_e4m3(value), expected, "{value}");
                assert_eq!(to_e4m3(-value), expected | 0x80, "-{value}");
            }
        }
        for value in [448.0, 1e9, f32::INFINITY] {
            assert_eq!([to_e4m3(value), to_e4m3(-value)], [0x7e, 0xfe]);
        }
        assert!(from_e4m3(to_e4m3(f32::NAN)).is_nan());
    }
}
