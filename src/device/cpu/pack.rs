//! Weights in the layout that the GEMM kernels stream.

use half::{bf16, f16};

use super::Cpu;
use super::math::to_bf16_bits;
use super::memory::{Buffer, Shared};
use crate::base::LoadError;

/// Outputs of one panel: three 512-bit registers of f32.
pub(super) const PANEL: usize = 48;

/// The element type of a matrix in a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
    /// IEEE single precision.
    F32,
}

impl Dtype {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }
}

/// A matrix as a checkpoint stores it: row-major, little-endian, at any address.
#[derive(Clone, Copy)]
pub struct RawMatrix<'a> {
    dtype: Dtype,
    rows: usize,
    columns: usize,
    bytes: &'a [u8],
}

impl<'a> RawMatrix<'a> {
    /// A view of `rows * columns` elements.
    ///
    /// # Panics
    ///
    /// `bytes` is not that long: the checkpoint's reader has compared it with the shape.
    pub fn new(dtype: Dtype, rows: usize, columns: usize, bytes: &'a [u8]) -> Self {
        let expected = rows
            .checked_mul(columns)
            .and_then(|len| len.checked_mul(dtype.size()));
        assert_eq!(
            Some(bytes.len()),
            expected,
            "{rows} x {columns} of {dtype:?}"
        );
        Self {
            dtype,
            rows,
            columns,
            bytes,
        }
    }

    /// Number of rows: outputs of a linear layer, tokens of an embedding.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Elements of a row.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Writes a row as f32.
    ///
    /// # Panics
    ///
    /// There is no such row, or `out` has not the length of one.
    pub fn row_to_f32(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.columns, "length of a row");
        let bytes = self.row(row);
        match self.dtype {
            Dtype::Bf16 => convert(bytes, out, |b| bf16::from_le_bytes(b).to_f32()),
            Dtype::F16 => convert(bytes, out, |b| f16::from_le_bytes(b).to_f32()),
            Dtype::F32 => convert(bytes, out, f32::from_le_bytes),
        }
    }

    fn row(&self, row: usize) -> &'a [u8] {
        let len = self.columns * self.dtype.size();
        &self.bytes[row * len..][..len]
    }

    /// Writes part of a row, from `column` on, as the bits of bf16.
    fn row_to_bf16(&self, row: usize, column: usize, out: &mut [u16]) {
        let bytes = &self.row(row)[column * self.dtype.size()..];
        match self.dtype {
            Dtype::Bf16 => convert(bytes, out, u16::from_le_bytes),
            Dtype::F16 => convert(bytes, out, |b| to_bf16_bits(f16::from_le_bytes(b).to_f32())),
            Dtype::F32 => convert(bytes, out, |b| to_bf16_bits(f32::from_le_bytes(b))),
        }
    }
}

fn convert<const N: usize, T>(bytes: &[u8], out: &mut [T], element: impl Fn([u8; N]) -> T) {
    for (bytes, out) in bytes.as_chunks::<N>().0.iter().zip(out) {
        *out = element(*bytes);
    }
}

/// A weight that is not a number, or too large for bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotFinite {
    /// Which of the parts that were packed together.
    pub part: usize,
    /// Its row.
    pub row: usize,
}

/// Weights `[n, k]` as bf16, in panels of 48 outputs and pairs of inputs:
///
/// ```text
/// panel 0 (outputs 0..48)                                            panel 1 (48..96)
/// | inputs 0, 1                      | inputs 2, 3        | ...    | ...
/// | w00 w01  w10 w11  ...  w470 w471 | w02 w03  w12 w13   |
/// ```
///
/// A kernel reads it from front to end. Outputs are padded with zeros to whole panels, inputs to pairs.
pub struct PackedMatrix {
    n: usize,
    k: usize,
    buffer: Buffer,
}

impl PackedMatrix {
    /// Outputs: rows of the matrix that was packed.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Inputs: columns of the matrix that was packed.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Memory that it takes, padding included.
    pub fn num_bytes(&self) -> usize {
        self.buffer.len() * 2
    }

    /// Pairs of inputs.
    pub(super) fn num_pairs(&self) -> usize {
        self.k.div_ceil(2)
    }

    /// The panels, `[n / 48][k / 2][48][2]` rounded up.
    pub(super) fn as_ptr(&self) -> *const u16 {
        self.buffer.as_ptr()
    }
}

impl Cpu {
    /// Packs matrices of equal width, one below the other: query, key and value, or gate and up,
    /// become one matrix whose outputs come in that order.
    ///
    /// # Errors
    ///
    /// The outer error: no memory. The inner one: a weight is not finite, or too large for bf16.
    ///
    /// # Panics
    ///
    /// There is no part, or their widths differ.
    pub fn pack(
        &mut self,
        parts: &[RawMatrix<'_>],
    ) -> Result<Result<PackedMatrix, NotFinite>, LoadError> {
        let k = parts.first().expect("at least one part").columns;
        assert!(
            parts.iter().all(|part| part.columns == k),
            "parts of one width"
        );
        let n = parts.iter().map(|part| part.rows).sum::<usize>();
        let num_pairs = k.div_ceil(2);
        let panel_len = num_pairs * PANEL * 2;
        let num_panels = n.div_ceil(PANEL);
        let mut buffer = Buffer::zeroed(num_panels * panel_len)?;

        let bad_row = std::sync::atomic::AtomicUsize::new(usize::MAX);
        // SAFETY: the buffer has that many elements, zeroed, and is borrowed until the end of the run.
        let all = unsafe { std::slice::from_raw_parts_mut(buffer.as_mut_ptr(), buffer.len()) };
        let panels = Shared::new(all);
        self.pool
            .for_each(&mut self.workers, num_panels, |_, index| {
                // SAFETY: every panel is one task's.
                let panel = unsafe { panels.slice(index * panel_len, panel_len) };
                let first = index * PANEL;
                for row in first..n.min(first + PANEL) {
                    let (part, row_in_part) = locate(parts, row);
                    if !pack_row(&parts[part], row_in_part, row - first, panel) {
                        bad_row.fetch_min(row, std::sync::atomic::Ordering::Relaxed);
                    }
                }
            });
        Ok(match bad_row.into_inner() {
            usize::MAX => Ok(PackedMatrix { n, k, buffer }),
            row => {
                let (part, row) = locate(parts, row);
                Err(NotFinite { part, row })
            }
        })
    }
}

/// Which part a row of the stack belongs to, and which row of it that is.
fn locate(parts: &[RawMatrix<'_>], mut row: usize) -> (usize, usize) {
    for (index, part) in parts.iter().enumerate() {
        if row < part.rows {
            return (index, row);
        }
        row -= part.rows;
    }
    unreachable!("a row of the stack")
}

/// Writes one row into its lane of a panel; whether all of it was finite.
fn pack_row(part: &RawMatrix<'_>, row: usize, lane: usize, panel: &mut [u16]) -> bool {
    const CHUNK: usize = 256;
    let mut chunk = [0; CHUNK];
    let mut finite = true;
    for start in (0..part.columns).step_by(CHUNK) {
        let len = CHUNK.min(part.columns - start);
        part.row_to_bf16(row, start, &mut chunk[..len]);
        for (i, &bits) in chunk[..len].iter().enumerate() {
            let column = start + i;
            panel[(column / 2 * PANEL + lane) * 2 + column % 2] = bits;
            finite &= bits & 0x7f80 != 0x7f80;
        }
    }
    finite
}
