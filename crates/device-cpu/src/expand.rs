//! The second half of an adapter's product: `shrunk * B^T` for a panel of 64 outputs.
//!
//! A sum over ranks goes in their order. Rows are computed several at a time, which share the reading of weights, and
//! one by one, with the same bits.

use super::Simd;
use super::math::from_bf16_bits;
use super::simd::for_each_simd;
use inflight_device::OUTPUT_PANEL;

/// The products of a row with the outputs of a panel.
type Outputs = [f32; OUTPUT_PANEL];

/// Lanes of the widest vectors.
const LANES: usize = 16;

/// Multiplies each row of `shrunk`, `[_, width]`, by `b`, `[rank, 64]` in bf16, and calls `store` with the row's index
/// and the product. A row may be padded: only its first `rank` elements are read.
///
/// # Panics
///
/// If the widths do not agree.
pub(super) fn expand(
    simd: Simd,
    shrunk: &[f32],
    width: usize,
    b: &[u16],
    mut store: impl FnMut(usize, &Outputs),
) {
    let (weights, rest) = b.as_chunks::<OUTPUT_PANEL>();
    assert!(rest.is_empty() && weights.len() <= width, "a panel of B");
    match simd {
        #[cfg(target_arch = "x86_64")]
        Simd::AmxBf16 | Simd::Avx512Bf16 => {
            const ROWS: usize = 4;
            let blocks = shrunk.chunks_exact(ROWS * width);
            let rest = blocks.remainder();
            let num_blocks = blocks.len();
            for (block, shrunk) in blocks.enumerate() {
                // SAFETY: a `Cpu` is created only with an instruction set that the machine supports.
                let sums = unsafe { avx512::<ROWS>(shrunk, width, weights) };
                for (row, sums) in sums.iter().enumerate() {
                    store(block * ROWS + row, sums);
                }
            }
            for (row, shrunk) in rest.chunks_exact(width).enumerate() {
                // SAFETY: as above.
                let [sums] = unsafe { avx512::<1>(shrunk, width, weights) };
                store(num_blocks * ROWS + row, &sums);
            }
        }
        _ => {
            for (row, shrunk) in shrunk.chunks_exact(width).enumerate() {
                let mut sums = [0.0; OUTPUT_PANEL];
                let out = &mut sums;
                for_each_simd!(simd, plain, (shrunk: &[f32], weights: &[[u16; OUTPUT_PANEL]], out: &mut Outputs));
                store(row, &sums);
            }
        }
    }
}

#[inline(always)]
fn plain(shrunk: &[f32], weights: &[[u16; OUTPUT_PANEL]], out: &mut Outputs) {
    let mut sums = [[0.0_f32; LANES]; OUTPUT_PANEL / LANES];
    for (shrunk, weights) in shrunk.iter().zip(weights) {
        let (parts, _) = weights.as_chunks::<LANES>();
        for (sums, weights) in sums.iter_mut().zip(parts) {
            for (sum, weight) in sums.iter_mut().zip(weights) {
                *sum += *shrunk * from_bf16_bits(*weight);
            }
        }
    }
    out.copy_from_slice(sums.as_flattened());
}

/// # Safety
///
/// The machine has AVX-512.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn avx512<const ROWS: usize>(
    shrunk: &[f32],
    width: usize,
    weights: &[[u16; OUTPUT_PANEL]],
) -> [Outputs; ROWS] {
    use std::arch::x86_64::{
        _MM_HINT_T0, _mm_prefetch, _mm256_loadu_si256, _mm512_castsi512_ps, _mm512_cvtepu16_epi32,
        _mm512_fmadd_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_slli_epi32, _mm512_storeu_ps,
    };
    const PARTS: usize = OUTPUT_PANEL / LANES;
    /// Half a panel of 32 ranks: the panels follow one another.
    const AHEAD: usize = 2048 / size_of::<u16>();
    let rows: [&[f32]; ROWS] = std::array::from_fn(|row| &shrunk[row * width..][..weights.len()]);
    let mut sums = [[_mm512_setzero_ps(); PARTS]; ROWS];
    for (rank, weights) in weights.iter().enumerate() {
        let values: [_; PARTS] = std::array::from_fn(|part| {
            let place = weights.as_ptr().wrapping_add(part * LANES);
            if part % 2 == 0 {
                _mm_prefetch::<_MM_HINT_T0>(place.wrapping_add(AHEAD).cast());
            }
            // SAFETY: there are 16 weights in each part.
            let weights = unsafe { _mm256_loadu_si256(place.cast()) };
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(weights)))
        });
        for (sums, row) in sums.iter_mut().zip(rows) {
            let x = _mm512_set1_ps(row[rank]);
            for (sum, weights) in sums.iter_mut().zip(values) {
                *sum = _mm512_fmadd_ps(x, weights, *sum);
            }
        }
    }
    sums.map(|parts| {
        let mut outputs = [0.0; OUTPUT_PANEL];
        for (part, sum) in parts.into_iter().enumerate() {
            // SAFETY: there is room for 16 in each part.
            unsafe { _mm512_storeu_ps(outputs.as_mut_ptr().add(part * LANES), sum) };
        }
        outputs
    })
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use half::slice::HalfFloatSliceExt;

    use super::*;

    #[test]
    fn rows_together_and_alone_have_the_bits_of_the_same_sums() {
        let mut state = 11_u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state as i32 as f32 / i32::MAX as f32
        };
        for (num_rows, rank, width) in [
            (1, 1, 16),
            (3, 7, 16),
            (4, 16, 16),
            (6, 33, 48),
            (13, 64, 64),
        ] {
            let shrunk: Vec<_> = (0..num_rows * width).map(|_| next()).collect();
            let b: Vec<_> = (0..rank * OUTPUT_PANEL)
                .map(|_| bf16::from_f32(next()))
                .collect();
            let b: &[u16] = b.reinterpret_cast();
            for simd in Simd::tested() {
                let mut found = vec![None; num_rows];
                expand(simd, &shrunk, width, b, |row, sums| {
                    found[row] = Some(*sums)
                });
                for (row, sums) in found.into_iter().enumerate() {
                    let sums = sums.expect("each row once");
                    let shrunk = &shrunk[row * width..][..width];
                    let mut alone = None;
                    expand(simd, shrunk, width, b, |_, sums| alone = Some(*sums));
                    assert_eq!(
                        alone,
                        Some(sums),
                        "{simd}, row {row} of {num_rows}, rank {rank}"
                    );
                    for (output, sum) in sums.iter().enumerate() {
                        let weights = b.iter().skip(output).step_by(OUTPUT_PANEL);
                        let products = shrunk
                            .iter()
                            .zip(weights)
                            .map(|(x, w)| f64::from(*x) * f64::from(from_bf16_bits(*w)));
                        let error = (f64::from(*sum) - products.sum::<f64>()).abs();
                        assert!(error < 1e-5, "{simd}: {error}");
                    }
                }
            }
        }
    }
}
