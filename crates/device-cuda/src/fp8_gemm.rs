//! Products of FP8 weights with FP8 activations.
//!
//! ```text
//! round_to_fp8    rows of activations become e4m3 codes, each with a scale of its own
//! cuBLASLt      codes times codes, added up in f32
//! scale_sums    the scales of the row and of the output
//! ```
//!
//! cuBLASLt of CUDA 12.4 knows one scale for a whole matrix, so the scales are applied afterwards. Weights have one
//! scale for each output: with one for each group of inputs, every group would be a product of its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use cudarc::driver::{CudaFunction, CudaStream, PushKernelArg};

use super::Cuda;
use super::gemm::{self, Elements, Operands};
use super::kernels::{Kernels, launch, row_grid, shared_row_grid};
use super::memory::DeviceMemory;
use super::quantised::{PartPlaces, has_nan};
use inflight_base::LoadError;
use inflight_device::{Output, PackedReader, PackedShape, QuantisedWidths};
use inflight_numbers::{
    CodeBits, NotFinite, QuantFormat, QuantisedRow, QuantisedRows, can_be_packed_together,
};
use inflight_threads::DisjointSlice;
use inflight_threads::Pool;

/// Outputs and inputs of a product come in multiples of it.
const UNIT: usize = 16;
/// Bytes of codes that are read at a time, by all threads.
const PIECE_BYTES: usize = 32 << 20;
/// Bytes of the sums that are not scaled where they are wanted: the L2 cache of a large GPU still has them.
const SUM_BYTES: usize = 32 << 20;
/// Rows of such sums come in multiples of it: no product is rounded up beyond.
const ROW_UNIT: usize = gemm::MAX_ROUNDING;
/// Elements that a thread of these kernels computes at a time.
const VECTOR: usize = 8;
/// Threads of the kernel that rounds rows.
const ROW_THREADS: u32 = 256;
const WIDE_ROW_THREADS: u32 = 1024;
/// Elements that 256 of these threads keep in registers.
const MAX_ROW_THREADS_WIDTH: usize = 8192;

/// Weights `[n, k]`, row by row.
pub(super) struct Fp8Weights {
    codes: DeviceMemory,
    /// f32, one for each output.
    scales: DeviceMemory,
}

/// The kernels, and their scratch memory.
pub(super) struct Fp8Products {
    round_to_fp8: CudaFunction,
    scale_sums: CudaFunction,
    widths: QuantisedWidths,
    scratch: Scratch,
}

/// Memory of one product after the other.
struct Scratch {
    codes: DeviceMemory,
    /// f32, one for each row.
    scales: DeviceMemory,
    /// f32, where a product is added to its output.
    sums: DeviceMemory,
}

/// The bytes of [`Scratch`].
struct ScratchBytes {
    codes: usize,
    scales: usize,
    sums: usize,
}

/// Whether matrices that can be packed together are multiplied in FP8.
pub(super) fn is_supported(parts: &[&dyn QuantisedRows]) -> bool {
    let n: usize = parts.iter().map(|part| part.rows()).sum();
    parts.first().is_some_and(|part| {
        part.input_order().is_none() && has_products(part.format(), n, part.columns())
    })
}

/// Whether matrices of a format, with `n` outputs and `k` inputs, are.
pub(super) fn has_products(format: QuantFormat, n: usize, k: usize) -> bool {
    format.bits == CodeBits::Fp8
        && !format.has_offsets
        && format.group_size >= k
        && n.is_multiple_of(UNIT)
        && k.is_multiple_of(UNIT)
}

impl Fp8Weights {
    /// Uploads matrices, one after the other. The inner error is the first row with a scale that is not finite, or with
    /// a code that is NaN.
    ///
    /// # Errors
    ///
    /// There is not enough memory, or the driver refuses.
    ///
    /// # Panics
    ///
    /// They are [not supported](is_supported), or cannot be packed together.
    pub(super) fn upload(
        stream: &Arc<CudaStream>,
        pool: &mut Pool,
        parts: &[&dyn QuantisedRows],
    ) -> Result<Result<Self, NotFinite>, LoadError> {
        assert!(is_supported(parts) && can_be_packed_together(parts));
        let n = parts.iter().map(|part| part.rows()).sum::<usize>();
        let k = parts[0].columns();
        let mut weights = Self {
            codes: DeviceMemory::new(stream, n.saturating_mul(k))?,
            scales: DeviceMemory::new(stream, 4 * n)?,
        };
        let rows_per_piece = (PIECE_BYTES / k).clamp(1, n);
        let mut codes = vec![0_u8; rows_per_piece * k];
        let mut scales = vec![0.0_f32; rows_per_piece];
        let mut states = vec![QuantisedRow::default(); pool.num_threads()];
        for start in (0..n).step_by(rows_per_piece) {
            let num_rows = rows_per_piece.min(n - start);
            let bad_row = AtomicUsize::new(usize::MAX);
            let (to_codes, to_scales) = (
                DisjointSlice::new(&mut codes),
                DisjointSlice::new(&mut scales),
            );
            pool.for_each(&mut states, num_rows, |row, index| {
                // SAFETY: each row belongs to one task.
                let (codes, scale) =
                    unsafe { (to_codes.slice(index * k, k), to_scales.slice(index, 1)) };
                let at = start + index;
                let Some((part, row_in_part)) = PartPlaces::Packed.locate(parts, at) else {
                    return;
                };
                parts[part].read_row(row_in_part, row);
                codes.copy_from_slice(bytemuck::cast_slice(&row.codes));
                scale[0] = row.scales[0];
                if has_nan(&row.codes) || !scale[0].is_finite() {
                    bad_row.fetch_min(at, Ordering::Relaxed);
                }
            });
            let bad_row = Some(bad_row.into_inner()).filter(|&row| row != usize::MAX);
            if let Some((part, row)) = bad_row.and_then(|row| PartPlaces::Packed.locate(parts, row))
            {
                return Ok(Err(NotFinite { part, row }));
            }
            weights
                .codes
                .write(stream, start * k, &codes[..num_rows * k])?;
            let scales = bytemuck::cast_slice(&scales[..num_rows]);
            weights.scales.write(stream, 4 * start, scales)?;
        }
        Ok(Ok(weights))
    }

    /// Reads matrices from bytes that [`Fp8Weights::parts`] had. `None` if their number is wrong.
    ///
    /// # Errors
    ///
    /// There is not enough memory, or the driver refuses.
    pub(super) fn read(
        stream: &Arc<CudaStream>,
        pool: &mut Pool,
        shape: PackedShape<'_>,
        codes: PackedReader<'_>,
        scales: PackedReader<'_>,
    ) -> Result<Option<Self>, LoadError> {
        let n = shape.num_rows.iter().sum::<usize>();
        if [codes.num_bytes, scales.num_bytes] != [n * shape.columns, 4 * n] {
            return Ok(None);
        }
        Ok(Some(Self {
            codes: DeviceMemory::read_from(stream, pool, codes)?,
            scales: DeviceMemory::read_from(stream, pool, scales)?,
        }))
    }

    /// Codes and scales.
    pub(super) fn parts(&self) -> [&DeviceMemory; 2] {
        [&self.codes, &self.scales]
    }

    /// Bytes of all of it.
    pub(super) fn num_bytes(&self) -> usize {
        self.codes.num_bytes() + self.scales.num_bytes()
    }
}

impl Fp8Products {
    /// Loads the kernels.
    ///
    /// # Errors
    ///
    /// None of them runs on this GPU.
    pub(super) fn new(stream: &Arc<CudaStream>, kernels: &Kernels) -> Result<Self, LoadError> {
        let empty = || DeviceMemory::new(stream, 0);
        Ok(Self {
            round_to_fp8: kernels.function("round_to_fp8", "round_to_fp8", 0)?,
            scale_sums: kernels.function("scale_sums", "scale_sums", 0)?,
            widths: QuantisedWidths::default(),
            scratch: Scratch {
                codes: empty()?,
                scales: empty()?,
                sums: empty()?,
            },
        })
    }

    /// Takes note of a matrix.
    pub(super) fn add(&mut self, n: usize, k: usize) {
        self.widths.add(n, k, false);
    }

    /// Reserves the scratch memory for all matrices so far.
    ///
    /// # Errors
    ///
    /// There is not enough.
    pub(super) fn reserve(
        &mut self,
        stream: &Arc<CudaStream>,
        max_rows: usize,
    ) -> Result<(), LoadError> {
        let bytes = ScratchBytes::new(&self.widths, max_rows);
        self.scratch = Scratch {
            codes: DeviceMemory::new(stream, bytes.codes)?,
            scales: DeviceMemory::new(stream, bytes.scales)?,
            sums: DeviceMemory::new(stream, bytes.sums)?,
        };
        Ok(())
    }
}

/// Bytes of scratch memory of the products of a model, in steps of at most `max_rows` rows.
pub(super) fn num_scratch_bytes(widths: &QuantisedWidths, max_rows: usize) -> usize {
    let ScratchBytes {
        codes,
        scales,
        sums,
    } = ScratchBytes::new(widths, max_rows);
    codes + scales + sums
}

impl ScratchBytes {
    fn new(widths: &QuantisedWidths, max_rows: usize) -> Self {
        // Context logits take as many rows at once, however few a step has.
        let max_rows = max_rows.max(ROW_UNIT) + gemm::MAX_ROUNDING;
        Self {
            codes: max_rows * widths.inputs,
            scales: 4 * max_rows,
            sums: SUM_BYTES.max(4 * ROW_UNIT * widths.outputs),
        }
    }
}

/// Rows whose sums are computed at a time before they are added to the output.
fn rows_at_once(n: usize) -> usize {
    (SUM_BYTES / (4 * n) / ROW_UNIT).max(1) * ROW_UNIT
}

/// A product with FP8 weights: the addresses of `x` and `out`, and the shape.
#[derive(Clone, Copy)]
pub(super) struct Fp8Product<'a> {
    pub(super) num_rows: usize,
    pub(super) x: u64,
    pub(super) weights: &'a Fp8Weights,
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) output: Output,
    pub(super) out: u64,
}

impl Cuda {
    /// `out = x * W^T`, or that added to `out`, with `x` rounded to FP8.
    pub(super) fn multiply_fp8(&mut self, product: Fp8Product<'_>) {
        let Some(products) = self.fp8.take() else {
            unreachable!("FP8 weights have been packed");
        };
        self.multiply_rounded(&products, product);
        self.fp8 = Some(products);
    }

    fn multiply_rounded(&mut self, products: &Fp8Products, product: Fp8Product<'_>) {
        let Fp8Product {
            num_rows,
            x,
            weights,
            n,
            k,
            output,
            out,
        } = product;
        let Scratch {
            codes,
            scales,
            sums,
        } = &products.scratch;
        let threads = match k <= MAX_ROW_THREADS_WIDTH {
            true => ROW_THREADS,
            false => WIDE_ROW_THREADS,
        };
        launch!(
            self,
            products.round_to_fp8,
            "round_to_fp8",
            row_grid(num_rows, threads),
            codes.address(),
            scales.address(),
            x,
            k as i32
        );
        let is_added = output == Output::Add;
        // What is not added is scaled where it is.
        let rows_at_once = if is_added { rows_at_once(n) } else { num_rows };
        for first in (0..num_rows).step_by(rows_at_once) {
            let num_rows = rows_at_once.min(num_rows - first);
            let out = out + (4 * first * n) as u64;
            let sums = if is_added { sums.address() } else { out };
            self.multiply_elements(
                num_rows,
                Operands {
                    x: codes.address() + (first * k) as u64,
                    weights: weights.codes.address(),
                    elements: Elements::E4m3,
                    n,
                    k,
                    output: Output::Store,
                    out: sums,
                    out_width: n,
                },
            );
            launch!(
                self,
                products.scale_sums,
                "scale_sums",
                shared_row_grid(num_rows, n / VECTOR),
                out,
                sums,
                scales.address() + 4 * first as u64,
                weights.scales.address(),
                n as i32,
                i32::from(is_added)
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_of_all_rows_at_once_fit_the_scratch_memory() {
        for n in [16, 64, 4096, 28672, 128_256, 1 << 20] {
            let mut widths = QuantisedWidths::default();
            widths.add(n, 64, false);
            let num_rows = rows_at_once(n);
            let rounded = gemm::rounded_rows(num_rows);
            assert_eq!(rounded, num_rows, "rounded up beyond the memory");
            let bytes = ScratchBytes::new(&widths, 8192);
            assert!(4 * num_rows * n <= bytes.sums, "{n}");
        }
        assert_eq!(rows_at_once(4096), 2048);
    }
}
