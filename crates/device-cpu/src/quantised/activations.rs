//! Activations as 8-bit codes.

use half::bf16;
use half::slice::HalfFloatSliceExt;

use super::super::elementwise::MIN_TASK_LEN;
use super::super::math::{ROUNDER, from_bf16_bits};
use super::super::simd::for_each_simd;
use super::super::{Cpu, Simd};
use super::BLOCK;
use super::panel_format::PanelBits;
use super::panels::{Panels, UNIT};
use inflight_threads::DisjointSlice;

/// Rows of activations rounded to 8 bits: each block of 32 elements is `scale * codes`, with 127 as the largest code.
#[derive(Default)]
pub(crate) struct RoundedActivations {
    num_blocks: usize,
    /// `[m, num_blocks, 32]`.
    codes: Vec<i8>,
    /// The codes in 16 bits, with the second and third of each four swapped, for the kernel that multiplies
    /// pairs.
    pairs: Vec<i16>,
    /// `[m, num_blocks]`.
    blocks: Vec<Block>,
}

/// The scale and sum of a block.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct Block {
    /// In the unit of the stored scales of weights, so that those need no conversion.
    pub scale: f32,
    /// The sum of the codes.
    pub sum: i32,
}

impl RoundedActivations {
    pub(super) fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// The codes of a row, starting at a block.
    pub(super) fn codes(&self, row: usize, block: usize) -> *const i8 {
        self.codes[(row * self.num_blocks + block) * BLOCK..].as_ptr()
    }

    /// The same as pairs; null if the kernel does not need them.
    pub(super) fn pairs(&self, row: usize, block: usize) -> *const i16 {
        self.pairs
            .get((row * self.num_blocks + block) * BLOCK..)
            .map_or(std::ptr::null(), <[i16]>::as_ptr)
    }

    /// The blocks of a row, starting at one.
    pub(super) fn blocks(&self, row: usize, block: usize) -> *const Block {
        self.blocks[row * self.num_blocks + block..].as_ptr()
    }
}

impl Cpu {
    /// Rounds `x`, `[m, k]`, for a product with `panels`.
    pub(crate) fn round_activations(
        &mut self,
        x: &[bf16],
        k: usize,
        panels: &Panels,
        out: &mut RoundedActivations,
    ) {
        let has_eight_bits = panels.format.bits == PanelBits::Eight;
        let order = panels.input_order.as_deref();
        self.round_rows(x, k, panels.num_blocks, has_eight_bits, out, |_| order);
    }

    /// Rounds `x`, `[m, k]`, to rows of `num_blocks` blocks, each in the order of columns that `order(row)` gives.
    /// `has_eight_bits` tells whether any of the weights have 8 bits.
    pub(crate) fn round_rows<'o>(
        &mut self,
        x: &[bf16],
        k: usize,
        num_blocks: usize,
        has_eight_bits: bool,
        out: &mut RoundedActivations,
        order: impl Fn(usize) -> Option<&'o [u32]> + Sync,
    ) {
        let m = x.len() / k;
        let padded_k = num_blocks * BLOCK;
        let wants_pairs = self.simd == Simd::Avx2 && has_eight_bits;
        out.num_blocks = num_blocks;
        out.codes.resize(m * padded_k, 0);
        out.pairs
            .resize(if wants_pairs { m * padded_k } else { 0 }, 0);
        out.blocks.resize(m * num_blocks, Block::default());

        let simd = self.simd;
        let max_rows = MIN_TASK_LEN.div_ceil(padded_k);
        let codes = DisjointSlice::new(&mut out.codes);
        let pairs = DisjointSlice::new(&mut out.pairs);
        let blocks = DisjointSlice::new(&mut out.blocks);
        self.pool
            .for_each(&mut self.workers, m.div_ceil(max_rows), |worker, task| {
                let end = m.min((task + 1) * max_rows);
                for row in task * max_rows..end {
                    let x: &[u16] = x[row * k..][..k].reinterpret_cast();
                    let x = in_order(x, order(row), padded_k, &mut worker.ordered_x);
                    // SAFETY: each row belongs to one task.
                    let (codes, blocks) = unsafe {
                        (
                            codes.slice(row * padded_k, padded_k),
                            blocks.slice(row * num_blocks, num_blocks),
                        )
                    };
                    for_each_simd!(simd, round_row, (x: &[u16], codes: &mut [i8], blocks: &mut [Block]));
                    if wants_pairs {
                        // SAFETY: each row belongs to one task.
                        let pairs = unsafe { pairs.slice(row * padded_k, padded_k) };
                        let codes = &*codes;
                        for_each_simd!(simd, widen_to_pairs, (codes: &[i8], pairs: &mut [i16]));
                    }
                }
            });
    }
}

/// A row in the order of the columns of the weights, padded with zeros to whole blocks.
fn in_order<'a>(
    x: &'a [u16],
    order: Option<&[u32]>,
    padded_k: usize,
    ordered: &'a mut Vec<u16>,
) -> &'a [u16] {
    if order.is_none() && x.len() == padded_k {
        return x;
    }
    ordered.clear();
    match order {
        Some(order) => ordered.extend(order.iter().map(|&input| x[input as usize])),
        None => ordered.extend_from_slice(x),
    }
    ordered.resize(padded_k, 0);
    ordered
}

#[inline(always)]
fn round_row(x: &[u16], codes: &mut [i8], blocks: &mut [Block]) {
    let chunks = x
        .as_chunks::<BLOCK>()
        .0
        .iter()
        .zip(codes.as_chunks_mut::<BLOCK>().0);
    for ((x, codes), block) in chunks.zip(blocks) {
        // The bits of positive floats have the order of their values, with infinity and NaNs at the end.
        let largest = x
            .iter()
            .fold(0, |largest: u16, bits| largest.max(bits & 0x7fff));
        let is_number = largest < bf16::INFINITY.to_bits();
        let largest = from_bf16_bits(largest);
        // Numbers whose inverse would overflow become zero.
        let (scale, inverse) = if largest > 1e-35 && is_number {
            (largest / 127.0, 127.0 / largest)
        } else {
            (0.0, 0.0)
        };
        let mut sum = 0;
        for (bits, code) in x.iter().zip(codes) {
            let rounded = (from_bf16_bits(*bits) * inverse + ROUNDER).to_bits() as i8;
            let rounded = if is_number { rounded } else { 0 };
            *code = rounded;
            sum += i32::from(rounded);
        }
        *block = Block {
            scale: if is_number { scale * UNIT } else { f32::NAN },
            sum,
        };
    }
}

#[inline(always)]
fn widen_to_pairs(codes: &[i8], pairs: &mut [i16]) {
    let quads = codes.as_chunks::<4>().0;
    for (codes, pairs) in quads.iter().zip(pairs.as_chunks_mut::<4>().0) {
        let [a, b, c, d] = codes.map(i16::from);
        *pairs = [a, c, b, d];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounded(x: &[f32]) -> ([i8; BLOCK], Block) {
        let mut bits = [0; BLOCK];
        for (bits, x) in bits.iter_mut().zip(x) {
            *bits = bf16::from_f32(*x).to_bits();
        }
        let (mut codes, mut block) = ([99; BLOCK], [Block::default()]);
        round_row(&bits, &mut codes, &mut block);
        (codes, block[0])
    }

    #[test]
    fn the_largest_element_is_127_and_none_is_off_by_more_than_half_a_step() {
        for size in [1e-30_f32, 1e-3, 1.0, 42.0, 3e38] {
            let x: Vec<_> = (0..BLOCK)
                .map(|i| bf16::from_f32(size * (i as f32 / 15.5 - 1.0)).to_f32())
                .collect();
            let (codes, block) = rounded(&x);
            assert_eq!(codes[0], -127);
            assert_eq!(
                block.sum,
                codes.iter().map(|&code| i32::from(code)).sum::<i32>()
            );
            let scale = f64::from(block.scale) / f64::from(UNIT);
            for (x, code) in x.iter().zip(codes) {
                let error = (f64::from(*x) - scale * f64::from(code)).abs();
                assert!(error < 0.5001 * scale, "{x} as {scale} * {code}");
            }
        }
    }

    #[test]
    fn zeros_stay_zeros_and_what_is_no_number_spoils_its_block() {
        let (codes, block) = rounded(&[0.0, -0.0, f32::MIN_POSITIVE]);
        assert_eq!((codes, block.scale, block.sum), ([0; BLOCK], 0.0, 0));
        for x in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let (codes, block) = rounded(&[1.0, x]);
            assert!(codes == [0; BLOCK] && block.sum == 0 && block.scale.is_nan());
        }
    }
}
