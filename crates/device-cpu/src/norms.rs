//! The norms of rows: any of them, of rows alone, of sums, or of what is added.

use half::bf16;
use half::slice::HalfFloatSliceExt;

use super::Cpu;
use super::elementwise::{inverse_rms, mean_and_scale};
use super::math::to_bf16_bits;
use super::simd::for_each_simd;
use inflight_device::Norm;

impl Cpu {
    /// `out = norm(x)`. `x` and `out` are `[m, d]`.
    ///
    /// # Panics
    ///
    /// If the lengths do not agree.
    pub fn norm(&mut self, x: &[f32], d: usize, norm: Norm<'_, [f32]>, out: &mut [bf16]) {
        if let Norm::Rms { weight, eps } = norm {
            return self.rms_norm(x, weight, eps, out);
        }
        check(x, d, norm, out.len());
        let simd = self.simd;
        self.for_each_row_block(x.len() / d, d, out.reinterpret_cast_mut(), |rows, out| {
            let x = &x[rows * d..][..out.len()];
            type Any<'a> = Norm<'a, [f32]>;
            for_each_simd!(simd, write_normed, (x: &[f32], d: usize, norm: Any<'_>, out: &mut [u16]));
        });
    }

    /// `hidden = norm(hidden)`, then `out = hidden`. Both are `[m, d]`.
    ///
    /// # Panics
    ///
    /// If the lengths do not agree.
    pub fn norm_in_place(
        &mut self,
        hidden: &mut [f32],
        d: usize,
        norm: Norm<'_, [f32]>,
        out: &mut [bf16],
    ) {
        check(hidden, d, norm, out.len());
        let simd = self.simd;
        self.for_each_row_block(hidden.len() / d, d, hidden, |_, hidden| {
            type Any<'a> = Norm<'a, [f32]>;
            for_each_simd!(simd, replace_by_normed, (hidden: &mut [f32], d: usize, norm: Any<'_>));
        });
        self.norm(hidden, d, Norm::Identity, out);
    }

    /// `hidden += norm(x)`. `x` and `hidden` are `[m, d]`.
    ///
    /// # Panics
    ///
    /// If the lengths do not agree.
    pub fn add_normed(&mut self, x: &[f32], d: usize, norm: Norm<'_, [f32]>, hidden: &mut [f32]) {
        check(x, d, norm, hidden.len());
        let simd = self.simd;
        self.for_each_row_block(x.len() / d, d, hidden, |rows, hidden| {
            let x = &x[rows * d..][..hidden.len()];
            type Any<'a> = Norm<'a, [f32]>;
            for_each_simd!(simd, add_normed, (x: &[f32], d: usize, norm: Any<'_>, hidden: &mut [f32]));
        });
    }

    /// `hidden += x`, then `out = norm(hidden)`. All are `[m, d]`.
    ///
    /// # Panics
    ///
    /// If the lengths do not agree.
    pub fn add_norm(
        &mut self,
        x: &[f32],
        d: usize,
        hidden: &mut [f32],
        norm: Norm<'_, [f32]>,
        out: &mut [bf16],
    ) {
        if let Norm::Rms { weight, eps } = norm {
            return self.add_rms_norm(x, hidden, weight, eps, out);
        }
        self.add_normed(x, d, Norm::Identity, hidden);
        self.norm(hidden, d, norm, out);
    }
}

fn check(x: &[f32], d: usize, norm: Norm<'_, [f32]>, len: usize) {
    let num_weights = match norm {
        Norm::Identity => d,
        Norm::Rms { weight, .. } | Norm::Layer { weight, .. } => weight.len(),
    };
    let num_biases = match norm {
        Norm::Layer {
            bias: Some(bias), ..
        } => bias.len(),
        _ => d,
    };
    assert!(d > 0 && x.len().is_multiple_of(d), "rows of {d} elements");
    assert_eq!([num_weights, num_biases], [d; 2], "weights of a row");
    assert_eq!(x.len(), len, "as many outputs as inputs");
}

#[inline(always)]
fn write_normed(x: &[f32], d: usize, norm: Norm<'_, [f32]>, out: &mut [u16]) {
    for (x, out) in x.chunks_exact(d).zip(out.chunks_exact_mut(d)) {
        for_each_normed(x, norm, out, |out, y| *out = to_bf16_bits(y));
    }
}

#[inline(always)]
fn replace_by_normed(hidden: &mut [f32], d: usize, norm: Norm<'_, [f32]>) {
    for hidden in hidden.chunks_exact_mut(d) {
        match norm {
            Norm::Identity => {}
            Norm::Rms { weight, eps } => {
                let scale = inverse_rms(hidden, eps);
                for (hidden, weight) in hidden.iter_mut().zip(weight) {
                    *hidden = *hidden * scale * weight;
                }
            }
            Norm::Layer { weight, bias, eps } => {
                let (mean, scale) = mean_and_scale(hidden, eps);
                for (hidden, weight) in hidden.iter_mut().zip(weight) {
                    *hidden = (*hidden - mean) * scale * weight;
                }
                for (hidden, bias) in hidden.iter_mut().zip(bias.unwrap_or_default()) {
                    *hidden += bias;
                }
            }
        }
    }
}

#[inline(always)]
fn add_normed(x: &[f32], d: usize, norm: Norm<'_, [f32]>, hidden: &mut [f32]) {
    for (x, hidden) in x.chunks_exact(d).zip(hidden.chunks_exact_mut(d)) {
        for_each_normed(x, norm, hidden, |hidden, y| *hidden += y);
    }
}

/// Calls `write` with each element of a row's norm, and where it belongs.
#[inline(always)]
fn for_each_normed<T>(
    x: &[f32],
    norm: Norm<'_, [f32]>,
    out: &mut [T],
    write: impl Fn(&mut T, f32),
) {
    match norm {
        Norm::Identity => {
            for (x, out) in x.iter().zip(out) {
                write(out, *x);
            }
        }
        Norm::Rms { weight, eps } => {
            let scale = inverse_rms(x, eps);
            for ((x, weight), out) in x.iter().zip(weight).zip(out) {
                write(out, x * scale * weight);
            }
        }
        Norm::Layer { weight, bias, eps } => {
            let (mean, scale) = mean_and_scale(x, eps);
            match bias {
                None => {
                    for ((x, weight), out) in x.iter().zip(weight).zip(out) {
                        write(out, (x - mean) * scale * weight);
                    }
                }
                Some(bias) => {
                    for (((x, weight), bias), out) in x.iter().zip(weight).zip(bias).zip(out) {
                        write(out, (x - mean) * scale * weight + bias);
                    }
                }
            }
        }
    }
}
