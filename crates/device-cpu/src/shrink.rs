//! The first half of an adapter's product: `x * A^T` for a panel of 16 ranks.
//!
//! ```text
//! inputs        0  1  2  3 | 4  5  6  7 | ...
//! sum           0  1  2  3   0  1  2  3          of every fourth input each
//! result        (sum 0 + sum 1) + (sum 2 + sum 3)
//! ```
//!
//! Rows are computed several at a time, which share the reading of weights, and one by one, with the same bits. The
//! loops are written with intrinsics: the compiler's own vectors go across the four sums, with a gather and a scatter
//! for each weight.

use super::Simd;
use super::math::from_bf16_bits;
use inflight_device::RANK_PANEL;

/// Sums over inputs that one element is divided into.
const CHAINS: usize = 4;

/// The products of a row with the ranks of a panel.
type Ranks = [f32; RANK_PANEL];

/// Calls `store(row, scale * x(row) * a)` for so many rows, `[k]` each in bf16. `a` is `[k, 16]`.
///
/// # Panics
///
/// If the widths do not agree.
pub(super) fn shrink<'x>(
    simd: Simd,
    num_rows: usize,
    x: impl Fn(usize) -> &'x [u16],
    a: &[u16],
    scale: f32,
    mut store: impl FnMut(usize, &Ranks),
) {
    let (weights, _) = a.as_chunks::<RANK_PANEL>();
    let x = |row| {
        let x = x(row);
        assert_eq!(a.len(), x.len() * RANK_PANEL, "a panel of A");
        x
    };
    let mut store = |row, sums: &mut Ranks| {
        sums.iter_mut().for_each(|sum| *sum *= scale);
        store(row, sums);
    };
    match simd {
        #[cfg(target_arch = "x86_64")]
        Simd::AmxBf16 | Simd::Avx512Bf16 => {
            const ROWS: usize = 4;
            let num_blocks = num_rows / ROWS;
            for block in 0..num_blocks {
                let x = std::array::from_fn(|row| x(block * ROWS + row));
                // SAFETY: a `Cpu` is created only with an instruction set that the machine supports.
                let mut sums = unsafe { avx512::<ROWS>(x, weights) };
                for (row, sums) in sums.iter_mut().enumerate() {
                    store(block * ROWS + row, sums);
                }
            }
            for row in num_blocks * ROWS..num_rows {
                // SAFETY: as above.
                let [mut sums] = unsafe { avx512::<1>([x(row)], weights) };
                store(row, &mut sums);
            }
        }
        #[cfg(target_arch = "x86_64")]
        Simd::Avx2 => {
            for row in 0..num_rows {
                // SAFETY: as above.
                let mut sums = unsafe { avx2(x(row), weights) };
                store(row, &mut sums);
            }
        }
        _ => {
            for row in 0..num_rows {
                store(row, &mut portable(x(row), weights));
            }
        }
    }
}

fn portable(x: &[u16], weights: &[[u16; RANK_PANEL]]) -> Ranks {
    let mut sums = [[0.0; RANK_PANEL]; CHAINS];
    for (input, (x, weights)) in x.iter().zip(weights).enumerate() {
        let x = from_bf16_bits(*x);
        for (sum, weight) in sums[input % CHAINS].iter_mut().zip(weights) {
            *sum += x * from_bf16_bits(*weight);
        }
    }
    let [a, b, c, d] = sums;
    std::array::from_fn(|lane| (a[lane] + b[lane]) + (c[lane] + d[lane]))
}

/// # Safety
///
/// The machine has AVX-512.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn avx512<const ROWS: usize>(
    x: [&[u16]; ROWS],
    weights: &[[u16; RANK_PANEL]],
) -> [Ranks; ROWS] {
    use std::arch::x86_64::{
        _MM_HINT_T0, _mm_prefetch, _mm256_loadu_si256, _mm512_add_ps, _mm512_castsi512_ps,
        _mm512_cvtepu16_epi32, _mm512_fmadd_ps, _mm512_set1_ps, _mm512_setzero_ps,
        _mm512_slli_epi32, _mm512_storeu_ps,
    };
    /// Inputs that are widened at a time.
    const BLOCK: usize = 64;
    /// Weights ahead of those that are read: the processor itself looks no further than the end of a page.
    const AHEAD: usize = 4096 / size_of::<u16>();
    let mut sums = [[_mm512_setzero_ps(); CHAINS]; ROWS];
    let mut wide = [[0.0_f32; BLOCK]; ROWS];
    for (block, weights) in weights.chunks(BLOCK).enumerate() {
        for (wide, x) in wide.iter_mut().zip(x) {
            let x = &x[block * BLOCK..][..weights.len()];
            for (wide, x) in wide.iter_mut().zip(x) {
                *wide = from_bf16_bits(*x);
            }
        }
        let mut add = |chain: usize, input: usize, weights: &[u16; RANK_PANEL]| {
            // SAFETY: there are 16 weights.
            let weights = unsafe { _mm256_loadu_si256(weights.as_ptr().cast()) };
            let weights =
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(weights)));
            for (sums, wide) in sums.iter_mut().zip(&wide) {
                let x = _mm512_set1_ps(wide[input]);
                sums[chain] = _mm512_fmadd_ps(x, weights, sums[chain]);
            }
        };
        let (quads, rest) = weights.as_chunks::<CHAINS>();
        for (quad, weights) in quads.iter().enumerate() {
            for (chain, weights) in weights.iter().enumerate() {
                if chain % 2 == 0 {
                    _mm_prefetch::<_MM_HINT_T0>(weights.as_ptr().wrapping_add(AHEAD).cast());
                }
                add(chain, quad * CHAINS + chain, weights);
            }
        }
        for (chain, weights) in rest.iter().enumerate() {
            add(chain, quads.len() * CHAINS + chain, weights);
        }
    }
    sums.map(|[a, b, c, d]| {
        let sum = _mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d));
        let mut ranks = [0.0; RANK_PANEL];
        // SAFETY: there is room for 16.
        unsafe { _mm512_storeu_ps(ranks.as_mut_ptr(), sum) };
        ranks
    })
}

/// # Safety
///
/// The machine has AVX2 and FMA.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn avx2(x: &[u16], weights: &[[u16; RANK_PANEL]]) -> Ranks {
    use std::arch::x86_64::{
        _mm_loadu_si128, _mm256_add_ps, _mm256_castsi256_ps, _mm256_cvtepu16_epi32,
        _mm256_fmadd_ps, _mm256_set1_ps, _mm256_setzero_ps, _mm256_slli_epi32, _mm256_storeu_ps,
    };
    const LANES: usize = 8;
    // Of the lower and the upper half of the ranks.
    let mut sums = [[_mm256_setzero_ps(); 2]; CHAINS];
    let mut add = |chain: usize, x: u16, weights: &[u16; RANK_PANEL]| {
        let x = _mm256_set1_ps(from_bf16_bits(x));
        for (half, sum) in sums[chain].iter_mut().enumerate() {
            // SAFETY: there are 8 weights in each half.
            let weights = unsafe { _mm_loadu_si128(weights.as_ptr().add(half * LANES).cast()) };
            let weights =
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(weights)));
            *sum = _mm256_fmadd_ps(x, weights, *sum);
        }
    };
    let (quads, rest) = weights.as_chunks::<CHAINS>();
    let (x_quads, x_rest) = x.as_chunks::<CHAINS>();
    for (x, weights) in x_quads.iter().zip(quads) {
        for chain in 0..CHAINS {
            add(chain, x[chain], &weights[chain]);
        }
    }
    for (chain, (x, weights)) in x_rest.iter().zip(rest).enumerate() {
        add(chain, *x, weights);
    }
    let [a, b, c, d] = sums;
    let mut ranks = [0.0; RANK_PANEL];
    for half in 0..2 {
        let sum = _mm256_add_ps(
            _mm256_add_ps(a[half], b[half]),
            _mm256_add_ps(c[half], d[half]),
        );
        // SAFETY: there is room for 8 in each half.
        unsafe { _mm256_storeu_ps(ranks.as_mut_ptr().add(half * LANES), sum) };
    }
    ranks
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use half::slice::HalfFloatSliceExt;

    use super::*;

    #[test]
    fn rows_together_and_alone_have_the_bits_of_the_same_sums() {
        let mut state = 7_u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            bf16::from_f32(state as i32 as f32 / i32::MAX as f32)
        };
        for (num_rows, k) in [(1, 1), (3, 7), (4, 16), (5, 33), (16, 70), (11, 256)] {
            let x: Vec<_> = (0..num_rows * k).map(|_| next()).collect();
            let a: Vec<_> = (0..k * RANK_PANEL).map(|_| next()).collect();
            let (x, a): (&[u16], &[u16]) = (x.reinterpret_cast(), a.reinterpret_cast());
            for simd in Simd::tested() {
                let mut found = vec![None; num_rows];
                let row_of = |row: usize| &x[row * k..][..k];
                shrink(simd, num_rows, row_of, a, 0.5, |row, sums| {
                    found[row] = Some(*sums);
                });
                for (row, sums) in found.into_iter().enumerate() {
                    let sums = sums.expect("each row once");
                    let x = &x[row * k..][..k];
                    let mut alone = None;
                    shrink(simd, 1, |_| x, a, 0.5, |_, sums| alone = Some(*sums));
                    assert_eq!(alone, Some(sums), "{simd}, row {row} of {num_rows} x {k}");
                    for (rank, sum) in sums.iter().enumerate() {
                        let products = x.iter().zip(a.iter().skip(rank).step_by(RANK_PANEL));
                        let products =
                            products.map(|(x, a)| [*x, *a].map(|it| f64::from(from_bf16_bits(it))));
                        let expected: f64 = products.map(|[x, a]| x * a).sum::<f64>() * 0.5;
                        let error = (f64::from(*sum) - expected).abs();
                        assert!(error < 1e-5, "{simd}: {sum}, not {expected}");
                    }
                }
            }
        }
    }
}
