//! Packing float weights into the layout that the GEMM kernels stream.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use half::f16;

use super::Cpu;
use super::math::to_bf16_bits;
use super::packed_matrix::{Bf16Panels, PackedMatrix};
use super::panel_order::{PANEL, PanelOrder, locate};
use inflight_base::LoadError;
use inflight_numbers::convert_elements;
use inflight_numbers::{Dtype, FloatRows, NotFinite, RawMatrix, Stacking};
use inflight_threads::DisjointSlice;

/// Rows that are transposed together.
const TILE: usize = 8;
/// Pairs of inputs in one pass over the rows of a panel: its output stays in the L1 cache.
const CHUNK_PAIRS: usize = 64;
const _: () = assert!(PANEL.is_multiple_of(TILE) && CHUNK_PAIRS.is_multiple_of(TILE));

impl Cpu {
    /// Packs matrices of equal width as one.
    ///
    /// # Errors
    ///
    /// The outer error: not enough memory. The inner one: a weight is not finite in bf16.
    ///
    /// # Panics
    ///
    /// If there is no part, their widths differ, or they are interleaved and their heights differ.
    pub fn pack<M: FloatRows>(
        &mut self,
        parts: &[M],
        stacking: Stacking,
    ) -> Result<Result<PackedMatrix, NotFinite>, LoadError> {
        let k = parts.first().expect("at least one part").columns();
        assert!(
            parts.iter().all(|part| part.columns() == k),
            "parts of the same width"
        );
        let num_rows = parts.iter().map(FloatRows::rows);
        let order = PanelOrder::new(stacking, num_rows.clone());
        let num_pairs = k.div_ceil(2);
        let panel_len = num_pairs * PANEL * 2;
        let num_panels = order.num_panels();
        let mut buffer = self.weights.zeroed(num_panels * panel_len)?;

        let bad_row = AtomicUsize::new(usize::MAX);
        let panels = DisjointSlice::new(buffer.as_mut_slice());
        let mut rows_read = vec![Vec::new(); self.workers.len()];
        self.pool
            .for_each(&mut rows_read, num_panels, |bytes, index| {
                // SAFETY: each panel belongs to one task.
                let panel = unsafe { panels.slice(index * panel_len, panel_len) };
                let rows = order.rows(index);
                let read = read_rows(parts, rows.clone(), bytes);
                if let Some(row) = pack_panel(&read, panel) {
                    bad_row.fetch_min(rows.start + row, Ordering::Relaxed);
                }
            });
        Ok(match bad_row.into_inner() {
            usize::MAX => Ok(PackedMatrix::bf16(
                order,
                k,
                Bf16Panels { num_pairs, buffer },
            )),
            row => {
                let (part, row) = locate(num_rows, row);
                Err(NotFinite { part, row })
            }
        })
    }
}

/// Reads some rows of the concatenated parts into `bytes`, which grows as needed. Returns one matrix for each part
/// that has some of them.
fn read_rows<'b>(
    parts: &[impl FloatRows],
    rows: Range<usize>,
    bytes: &'b mut Vec<u8>,
) -> Vec<RawMatrix<'b>> {
    let mut pieces = Vec::new();
    let mut num_bytes = 0;
    let mut first = rows.start;
    while first < rows.end {
        let (part, row) = locate(parts.iter().map(FloatRows::rows), first);
        let part = &parts[part];
        let num_rows = (rows.end - first).min(part.rows() - row);
        let start = num_bytes;
        num_bytes += num_rows * part.columns() * part.dtype().size();
        if bytes.len() < num_bytes {
            bytes.resize(num_bytes, 0);
        }
        part.read_rows(row..row + num_rows, &mut bytes[start..num_bytes]);
        pieces.push((part.dtype(), num_rows, part.columns(), start..num_bytes));
        first += num_rows;
    }
    let bytes = &bytes[..];
    let matrix = |(dtype, num_rows, columns, range): (_, _, _, Range<usize>)| {
        RawMatrix::new(dtype, num_rows, columns, &bytes[range])
    };
    pieces.into_iter().map(matrix).collect()
}

/// Converts part of a row, starting at `column`, to the bits of bf16.
fn row_to_bf16(matrix: &RawMatrix<'_>, row: usize, column: usize, out: &mut [u16]) {
    let dtype = matrix.dtype();
    let bytes = &matrix.row(row)[column * dtype.size()..];
    match dtype {
        Dtype::Bf16 => convert_elements(bytes, out, u16::from_le_bytes),
        Dtype::F16 => {
            convert_elements(bytes, out, |b| to_bf16_bits(f16::from_le_bytes(b).to_f32()));
        }
        Dtype::F32 => convert_elements(bytes, out, |b| to_bf16_bits(f32::from_le_bytes(b))),
    }
}

/// Writes the rows of a panel into a panel of zeros. Returns the first row that is not finite.
fn pack_panel(parts: &[RawMatrix<'_>], panel: &mut [u16]) -> Option<usize> {
    let k = parts[0].columns();
    let num_rows = parts.iter().map(RawMatrix::rows).sum();
    // Pairs of inputs are moved as one element.
    let panel: &mut [u32] = bytemuck::cast_slice_mut(panel);
    let mut tile = [[0_u32; CHUNK_PAIRS]; TILE];
    let mut bad_row = None;
    for start in (0..k).step_by(2 * CHUNK_PAIRS) {
        let len = (2 * CHUNK_PAIRS).min(k - start);
        for first in (0..num_rows).step_by(TILE) {
            let num_rows = TILE.min(num_rows - first);
            for (row, chunk) in (first..).zip(&mut tile[..num_rows]) {
                let chunk: &mut [u16] = bytemuck::cast_slice_mut(chunk);
                let (part, row_in_part) = locate(parts.iter().map(RawMatrix::rows), row);
                row_to_bf16(&parts[part], row_in_part, start, &mut chunk[..len]);
                // The rest of the last pair, and leftovers of earlier chunks.
                chunk[len..].fill(0);
                // A fold instead of a search, because it is vectorised, and bad values are rare.
                let is_bad = |bits: u16| u16::from(bits & 0x7f80 == 0x7f80);
                if chunk.iter().fold(0, |bad, &bits| bad | is_bad(bits)) != 0 {
                    bad_row = Some(row.min(bad_row.unwrap_or(row)));
                }
            }
            tile[num_rows..].fill([0; CHUNK_PAIRS]);
            let lanes = &mut panel[start / 2 * PANEL + first..];
            transpose(&tile, len.div_ceil(2), lanes);
        }
    }
    bad_row
}

/// Transposes the first `num_pairs` columns of a tile into rows of `out`, which are one panel apart.
fn transpose(tile: &[[u32; CHUNK_PAIRS]; TILE], num_pairs: usize, out: &mut [u32]) {
    // Square blocks, whose loops are compiled to shuffles.
    for first in (0..num_pairs).step_by(TILE) {
        let mut square = [[0; TILE]; TILE];
        for (square, row) in square.iter_mut().zip(tile) {
            square.copy_from_slice(&row[first..][..TILE]);
        }
        for pair in 0..TILE.min(num_pairs - first) {
            let out = &mut out[(first + pair) * PANEL..][..TILE];
            for (out, row) in out.iter_mut().zip(&square) {
                *out = row[pair];
            }
        }
    }
}
