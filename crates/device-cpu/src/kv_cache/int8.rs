//! Vectors with 8-bit elements.
//!
//! A vector is `scale * elements`, where the largest element is 127 or -127. The scale depends only on the vector
//! itself, so what is stored for a position does not depend on other positions.

use super::GROUP;
use crate::math::ROUNDER;
use crate::prefetch::prefetch;

/// Quantises `x`, and returns the scale as the bits of a bf16. If an element of `x` is not finite, the scale is
/// not finite either.
#[inline(always)]
pub(super) fn quantise(x: &[f32], out: &mut [u8]) -> u16 {
    const INFINITY: u32 = f32::INFINITY.to_bits();
    // The bits of positive floats have the order of their values, with NaNs above infinity.
    let largest = x
        .iter()
        .fold(0, |largest, x| x.abs().to_bits().max(largest));
    if largest >= INFINITY {
        out.fill(0);
        return half::bf16::NAN.to_bits();
    }
    // Rounded up, so that no element is above 127.
    let bits = ((f32::from_bits(largest) / 127.0).to_bits() + 0xffff) & 0xffff_0000;
    let scale = f32::from_bits(bits);
    // Numbers whose inverse would overflow become zero.
    let inverse = if scale > f32::MIN_POSITIVE {
        scale.recip()
    } else {
        0.0
    };
    for (x, out) in x.iter().zip(out) {
        *out = (x * inverse + ROUNDER).to_bits() as u8;
    }
    if inverse == 0.0 {
        0
    } else {
        (bits >> 16) as u16
    }
}

/// Widens the elements of a group to bf16, which represents them exactly. `out` is twice as long as `words`.
/// Prefetches `ahead` meanwhile.
#[inline(always)]
pub(crate) fn widen(words: &[u16], ahead: &[u16], out: &mut [u16]) {
    let (words, out) = (
        words.as_chunks::<GROUP>().0,
        out.as_chunks_mut::<{ 2 * GROUP }>().0,
    );
    for (index, (words, out)) in words.iter().zip(out).enumerate() {
        // Two of these are one cache line.
        if index % 2 == 0 {
            prefetch(ahead.as_ptr().wrapping_add(index * GROUP));
        }
        let bytes: &[i8; 2 * GROUP] = bytemuck::cast_ref(words);
        for (byte, out) in bytes.iter().zip(out) {
            *out = (f32::from(*byte).to_bits() >> 16) as u16;
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    fn encoded(x: &[f32]) -> (Vec<i8>, f32) {
        let mut bytes = vec![77; x.len()];
        let scale = bf16::from_bits(quantise(x, &mut bytes)).to_f32();
        (bytemuck::cast_vec(bytes), scale)
    }

    #[test]
    fn an_element_is_off_by_half_a_step_at_most() {
        for size in [1e-30_f32, 1e-3, 0.7, 1.0, 42.0, 3e38] {
            let x: Vec<_> = (-500..=500).map(|i| i as f32 / 500.0 * size).collect();
            let (elements, scale) = encoded(&x);
            // The smallest step of a bf16.
            assert!((1.0..1.01).contains(&(scale / (size / 127.0))));
            for (x, element) in x.iter().zip(elements) {
                let error = (x - f32::from(element) * scale).abs();
                assert!(error <= 0.501 * scale, "{x} as {element} * {scale}");
            }
        }
    }

    #[test]
    fn nothing_is_above_127() {
        for bits in (1.0_f32.to_bits()..2.0_f32.to_bits()).step_by(9973) {
            let x = f32::from_bits(bits);
            let (elements, _) = encoded(&[x, -x, 0.0]);
            assert!((126..=127).contains(&elements[0]), "{x}: {elements:?}");
            assert_eq!([elements[1], elements[2]], [-elements[0], 0]);
        }
    }

    #[test]
    fn a_vector_of_zeros_or_almost_is_zero() {
        for x in [0.0, -0.0, f32::from_bits(1), f32::MIN_POSITIVE] {
            assert_eq!(encoded(&[x, -x]), (vec![0, 0], 0.0));
        }
    }

    #[test]
    fn a_vector_that_is_not_a_number_stays_none() {
        for x in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let (elements, scale) = encoded(&[1.0, x, 2.0]);
            assert!(elements == [0, 0, 0] && scale.is_nan());
        }
    }

    #[test]
    fn bf16_has_every_element() {
        let bytes: Vec<_> = (i8::MIN..=i8::MAX).collect();
        let mut out = vec![0; 256];
        widen(bytemuck::cast_slice(&bytes), &[], &mut out);
        for (byte, bits) in bytes.iter().zip(out) {
            assert_eq!(bf16::from_bits(bits).to_f32(), f32::from(*byte));
        }
    }
}
