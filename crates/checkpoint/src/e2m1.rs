//! The scales of floats of 4 bits, which are powers of two (OCP Microscaling Formats, 1.0).

/// `2^(exponent - 128)`: half of the scale that the exponent stands for, for codes of twice the weight.
pub fn half_power_of_two(exponent: u8) -> f32 {
    match exponent {
        // Below the normal numbers.
        0 | 1 => f32::from_bits(0x0020_0000 << exponent),
        _ => f32::from_bits(u32::from(exponent - 1) << 23),
    }
}
