//! Weights on a GPU.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use cudarc::driver::CudaStream;
use half::{bf16, f16};

use super::fp8_gemm::Fp8Weights;
use super::memory::DeviceMemory;
use super::quantised::{PartPlaces, QuantisedWeights};
use inflight_base::LoadError;
use inflight_device::{PackedReader, PackedShape, PackedWeights};
use inflight_numbers::convert_elements;
use inflight_numbers::{Dtype, FloatRows, NotFinite, QuantisedRows};
use inflight_threads::Pool;

/// Bytes that are read and converted at a time, by all threads.
const PIECE_BYTES: usize = 32 << 20;

/// Weights `[n, k]`. Several matrices of the same width are concatenated.
pub struct Matrix {
    pub(super) weights: Weights,
    n: usize,
    k: usize,
}

/// The weights of a [`Matrix`].
pub(super) enum Weights {
    /// bf16, row by row.
    Bf16(DeviceMemory),
    Quantised(Box<QuantisedWeights>),
    /// For activations that are rounded to FP8 too.
    Fp8(Fp8Weights),
}

impl PackedWeights for Matrix {
    fn n(&self) -> usize {
        self.n
    }

    fn k(&self) -> usize {
        self.k
    }

    fn num_bytes(&self) -> usize {
        match &self.weights {
            Weights::Bf16(memory) => memory.num_bytes(),
            Weights::Quantised(weights) => weights.num_bytes(),
            Weights::Fp8(weights) => weights.num_bytes(),
        }
    }

    fn has_rows(&self) -> bool {
        matches!(self.weights, Weights::Bf16(_))
    }
}

impl Matrix {
    /// Uploads matrices of equal width, one after the other. The inner error is the first row that is not finite in
    /// bf16.
    ///
    /// # Errors
    ///
    /// There is not enough memory, or the driver refuses.
    ///
    /// # Panics
    ///
    /// There is no part, or their widths differ.
    pub(super) fn upload<M: FloatRows>(
        stream: &Arc<CudaStream>,
        pool: &mut Pool,
        parts: &[M],
    ) -> Result<Result<Self, NotFinite>, LoadError> {
        let k = parts.first().expect("at least one part").columns();
        assert!(
            parts.iter().all(|part| part.columns() == k),
            "parts of the same width"
        );
        let n = parts.iter().map(FloatRows::rows).sum::<usize>();
        let num_bytes = n.saturating_mul(k).saturating_mul(2);
        let mut memory = DeviceMemory::new(stream, num_bytes)?;
        let rows_per_piece = (PIECE_BYTES / (2 * k).max(1)).max(1);
        let mut states = vec![Vec::new(); pool.num_threads()];
        let mut piece = vec![0_u16; rows_per_piece.min(n) * k];
        let mut offset = 0;
        for (index, part) in parts.iter().enumerate() {
            for start in (0..part.rows()).step_by(rows_per_piece) {
                let num_rows = rows_per_piece.min(part.rows() - start);
                let rows = &mut piece[..num_rows * k];
                let bad_row = AtomicUsize::new(usize::MAX);
                pool.for_each_row(&mut states, rows, k, |bytes, row, out| {
                    read_bf16(part, start + row, bytes, out);
                    if out.iter().any(|bits| bits & 0x7f80 == 0x7f80) {
                        bad_row.fetch_min(start + row, Ordering::Relaxed);
                    }
                });
                let row = bad_row.into_inner();
                if row != usize::MAX {
                    return Ok(Err(NotFinite { part: index, row }));
                }
                let bytes = bytemuck::cast_slice(rows);
                memory.write(stream, offset, bytes)?;
                offset += bytes.len();
            }
        }
        Ok(Ok(Self {
            weights: Weights::Bf16(memory),
            n,
            k,
        }))
    }

    /// Uploads quantised matrices, one after the other; `is_fp8`: to be multiplied in FP8.
    ///
    /// # Errors
    ///
    /// As [`QuantisedWeights::upload`] and [`Fp8Weights::upload`].
    pub(super) fn upload_quantised(
        stream: &Arc<CudaStream>,
        pool: &mut Pool,
        parts: &[&dyn QuantisedRows],
        is_fp8: bool,
    ) -> Result<Result<Self, NotFinite>, LoadError> {
        let n = parts.iter().map(|part| part.rows()).sum();
        let k = parts.first().map_or(0, |part| part.columns());
        let weights = match is_fp8 {
            true => Fp8Weights::upload(stream, pool, parts)?.map(Weights::Fp8),
            false => QuantisedWeights::upload(stream, pool, parts, PartPlaces::Packed)?
                .map(|weights| Weights::Quantised(Box::new(weights))),
        };
        Ok(weights.map(|weights| Self { weights, n, k }))
    }

    /// Uploads quantised matrices of experts, each of which begins with a row tile of its own.
    ///
    /// # Errors
    ///
    /// As [`QuantisedWeights::upload`].
    pub(super) fn upload_experts(
        stream: &Arc<CudaStream>,
        pool: &mut Pool,
        parts: &[&dyn QuantisedRows],
    ) -> Result<Result<Self, NotFinite>, LoadError> {
        let n = parts.iter().map(|part| part.rows()).sum();
        let k = parts.first().map_or(0, |part| part.columns());
        let weights = QuantisedWeights::upload(stream, pool, parts, PartPlaces::OwnTiles)?;
        Ok(weights.map(|weights| Self {
            weights: Weights::Quantised(Box::new(weights)),
            n,
            k,
        }))
    }

    /// Reads quantised matrices from bytes that [`Matrix::packed_parts`] had. `None` if their number is wrong.
    ///
    /// # Errors
    ///
    /// There is not enough memory, or the driver refuses.
    pub(super) fn read(
        stream: &Arc<CudaStream>,
        pool: &mut Pool,
        shape: PackedShape<'_>,
        parts: [PackedReader<'_>; 2],
        is_fp8: bool,
    ) -> Result<Option<Self>, LoadError> {
        let [codes, scales] = parts;
        let weights = match is_fp8 {
            true => Fp8Weights::read(stream, pool, shape, codes, scales)?.map(Weights::Fp8),
            false => QuantisedWeights::read(stream, pool, shape, codes, scales)?
                .map(|weights| Weights::Quantised(Box::new(weights))),
        };
        Ok(weights.map(|weights| Self {
            weights,
            n: shape.num_rows.iter().sum(),
            k: shape.columns,
        }))
    }

    /// Codes and scales, if these are all that there is.
    pub(super) fn packed_parts(&self) -> Option<[&DeviceMemory; 2]> {
        match &self.weights {
            Weights::Bf16(_) => None,
            Weights::Quantised(weights) => weights.parts(),
            Weights::Fp8(weights) => Some(weights.parts()),
        }
    }

    /// The address of its rows.
    ///
    /// # Panics
    ///
    /// If it [has no rows](PackedWeights::has_rows).
    pub(super) fn rows_address(&self) -> u64 {
        match &self.weights {
            Weights::Bf16(memory) => memory.address(),
            Weights::Quantised(_) | Weights::Fp8(_) => panic!("rows of a quantised matrix"),
        }
    }
}

/// Reads a row, and converts it to the bits of bf16. `bytes` is scratch memory.
fn read_bf16(part: &impl FloatRows, row: usize, bytes: &mut Vec<u8>, out: &mut [u16]) {
    let dtype = part.dtype();
    bytes.resize(part.columns() * dtype.size(), 0);
    part.read_rows(row..row + 1, bytes);
    match dtype {
        Dtype::Bf16 => convert_elements(bytes, out, u16::from_le_bytes),
        Dtype::F16 => convert_elements(bytes, out, |bytes| {
            bf16::from_f32(f16::from_le_bytes(bytes).to_f32()).to_bits()
        }),
        Dtype::F32 => convert_elements(bytes, out, |bytes| {
            bf16::from_f32(f32::from_le_bytes(bytes)).to_bits()
        }),
    }
}
