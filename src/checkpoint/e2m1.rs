//! Floats of 4 bits, E2M1, with powers of two as scales (OCP Microscaling Formats, 1.0).

/// Twice the floats of 4 bits: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and their negatives.
pub const TWICE_E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// `2^(exponent - 128)`: half of the scale that the exponent stands for, for codes of twice the weight.
pub fn half_power_of_two(exponent: u8) -> f32 {
    match exponent {
        // Below the normal numbers.
        0 | 1 => f32::from_bits(0x0020_0000 << exponent),
        _ => f32::from_bits(u32::from(exponent - 1) << 23),
    }
}
