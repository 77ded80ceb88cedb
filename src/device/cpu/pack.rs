//! Weights in the layout that the GEMM kernels stream.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use half::f16;

use super::Cpu;
use super::math::{from_bf16_bits, to_bf16_bits};
use super::memory::Buffer;
use super::quantised::Panels;
use crate::base::LoadError;
use crate::device::disjoint_slice::DisjointSlice;
use crate::device::matrix::convert_elements;
use crate::device::{Dtype, FloatRows, NotFinite, RawMatrix, Stacking};

/// Outputs of one panel: three 512-bit registers of f32.
pub(super) const PANEL: usize = 48;

/// Rows that are transposed at a time.
const TILE: usize = 8;
/// Pairs of inputs of one pass over the rows of a panel: what it writes stays in the first-level cache.
const CHUNK_PAIRS: usize = 64;
const _: () = assert!(PANEL.is_multiple_of(TILE) && CHUNK_PAIRS.is_multiple_of(TILE));

/// Which outputs the panels of a matrix have.
#[derive(Clone, Copy)]
pub(super) struct PanelOrder {
    pub(super) stacking: Stacking,
    num_parts: usize,
    /// Outputs of a part.
    part_len: usize,
}

impl PanelOrder {
    /// That of parts with these numbers of rows.
    ///
    /// # Panics
    ///
    /// The parts are stacked in turn and differ.
    pub(super) fn new(stacking: Stacking, num_rows: impl Iterator<Item = usize> + Clone) -> Self {
        let n = num_rows.clone().sum();
        match stacking {
            Stacking::Concatenated => Self {
                stacking,
                num_parts: 1,
                part_len: n,
            },
            Stacking::Interleaved => {
                let num_parts = num_rows.clone().count();
                let part_len = n / num_parts;
                assert!(
                    num_rows.into_iter().all(|rows| rows == part_len),
                    "parts of one shape"
                );
                Self {
                    stacking,
                    num_parts,
                    part_len,
                }
            }
        }
    }

    /// Outputs of all parts.
    pub(super) fn n(self) -> usize {
        self.num_parts * self.part_len
    }

    pub(super) fn num_panels(self) -> usize {
        self.num_parts * self.part_len.div_ceil(PANEL)
    }

    /// The outputs of a panel, as rows of all parts one below the other.
    pub(super) fn rows(self, panel: usize) -> Range<usize> {
        let first = panel / self.num_parts * PANEL;
        let start = panel % self.num_parts * self.part_len;
        start + first..start + self.part_len.min(first + PANEL)
    }
}

/// Weights `[n, k]`, packed: as bf16 in panels of 48 outputs and pairs of inputs, or [quantised](super::QuantFormat).
///
/// ```text
/// panel 0 (outputs 0..48)                                            panel 1 (48..96)
/// | inputs 0, 1                      | inputs 2, 3        | ...    | ...
/// | w00 w01  w10 w11  ...  w470 w471 | w02 w03  w12 w13   |
/// ```
///
/// A kernel reads it from front to end. Outputs are padded with zeros to whole panels, inputs to pairs.
pub struct PackedMatrix {
    order: PanelOrder,
    k: usize,
    weights: Packed,
}

/// The weights of a [`PackedMatrix`].
pub(super) enum Packed {
    Bf16(Bf16Panels),
    Quantised(Panels),
}

/// Weights as bf16: the panels, `[n / 48][k / 2][48][2]` rounded up.
pub(super) struct Bf16Panels {
    pub(super) num_pairs: usize,
    buffer: Buffer,
}

impl Bf16Panels {
    /// The weights of a panel from a pair of inputs on.
    pub(super) fn weights(&self, panel: usize, pair: usize) -> *const u16 {
        let start = (panel * self.num_pairs + pair) * PANEL * 2;
        assert!(start < self.buffer.len(), "panel {panel} of the matrix");
        self.buffer.as_ptr().wrapping_add(start)
    }

    /// Writes a row of the matrix that was packed, from where it is scattered over its panel.
    fn row_to_f32(&self, row: usize, out: &mut [f32]) {
        let panel_len = self.num_pairs * PANEL * 2;
        let panel = &self.buffer.as_slice()[row / PANEL * panel_len..][..panel_len];
        let lane = row % PANEL;
        for (out, pairs) in out.chunks_mut(2).zip(panel.as_chunks::<{ PANEL * 2 }>().0) {
            for (out, &bits) in out.iter_mut().zip(&pairs[2 * lane..]) {
                *out = from_bf16_bits(bits);
            }
        }
    }
}

impl PackedMatrix {
    /// Outputs: rows of the matrix that was packed.
    pub fn n(&self) -> usize {
        self.order.n()
    }

    /// Inputs: columns of the matrix that was packed.
    pub fn k(&self) -> usize {
        self.k
    }

    /// How its parts were stacked.
    pub fn stacking(&self) -> Stacking {
        self.order.stacking
    }

    /// Memory that it takes, padding included.
    pub fn num_bytes(&self) -> usize {
        match &self.weights {
            Packed::Bf16(panels) => panels.buffer.len() * 2,
            Packed::Quantised(panels) => panels.num_bytes(),
        }
    }

    /// Whether its rows can be [looked up](Cpu::embed_packed): they are bf16, and follow each other.
    pub fn has_rows(&self) -> bool {
        matches!(self.weights, Packed::Bf16(_)) && self.stacking() == Stacking::Concatenated
    }

    /// Writes a row of the matrix that was packed.
    ///
    /// # Panics
    ///
    /// It [has no rows](PackedMatrix::has_rows) or not this one, or `out` has not the length of one.
    pub(super) fn row_to_f32(&self, row: usize, out: &mut [f32]) {
        assert!(
            row < self.n() && out.len() == self.k && self.has_rows(),
            "row {row} of {}",
            self.n()
        );
        match &self.weights {
            Packed::Bf16(panels) => panels.row_to_f32(row, out),
            Packed::Quantised(_) => panic!("rows of a quantised matrix"),
        }
    }

    pub(super) fn quantised(order: PanelOrder, k: usize, panels: Panels) -> Self {
        let weights = Packed::Quantised(panels);
        Self { order, k, weights }
    }

    pub(super) fn weights(&self) -> &Packed {
        &self.weights
    }
}

impl Cpu {
    /// Packs matrices of equal width as one.
    ///
    /// # Errors
    ///
    /// The outer error: no memory. The inner one: a weight is not finite, or too large for bf16.
    ///
    /// # Panics
    ///
    /// There is no part, or their widths differ, or the parts are stacked in turn and their heights differ.
    pub fn pack<M: FloatRows>(
        &mut self,
        parts: &[M],
        stacking: Stacking,
    ) -> Result<Result<PackedMatrix, NotFinite>, LoadError> {
        let k = parts.first().expect("at least one part").columns();
        assert!(
            parts.iter().all(|part| part.columns() == k),
            "parts of one width"
        );
        let num_rows = parts.iter().map(FloatRows::rows);
        let order = PanelOrder::new(stacking, num_rows.clone());
        let num_pairs = k.div_ceil(2);
        let panel_len = num_pairs * PANEL * 2;
        let num_panels = order.num_panels();
        let mut buffer = Buffer::zeroed(num_panels * panel_len)?;

        let bad_row = AtomicUsize::new(usize::MAX);
        let panels = DisjointSlice::new(buffer.as_mut_slice());
        let mut rows_read = vec![Vec::new(); self.workers.len()];
        self.pool
            .for_each(&mut rows_read, num_panels, |bytes, index| {
                // SAFETY: every panel is one task's.
                let panel = unsafe { panels.slice(index * panel_len, panel_len) };
                let rows = order.rows(index);
                let read = read_rows(parts, rows.clone(), bytes);
                if let Some(row) = pack_panel(&read, panel) {
                    bad_row.fetch_min(rows.start + row, Ordering::Relaxed);
                }
            });
        Ok(match bad_row.into_inner() {
            usize::MAX => Ok(PackedMatrix {
                order,
                k,
                weights: Packed::Bf16(Bf16Panels { num_pairs, buffer }),
            }),
            row => {
                let (part, row) = locate(num_rows, row);
                Err(NotFinite { part, row })
            }
        })
    }
}

/// Which part a row of the stack belongs to, and which row of it that is. `num_rows` has those of each part.
pub(super) fn locate(num_rows: impl Iterator<Item = usize>, mut row: usize) -> (usize, usize) {
    for (part, num_rows) in num_rows.enumerate() {
        if row < num_rows {
            return (part, row);
        }
        row -= num_rows;
    }
    unreachable!("a row of the stack")
}

/// Reads some rows of the stack into `bytes`, which grows as needed: a matrix for each part that has some of them.
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

/// Writes the rows of a panel into a panel of zeros; returns the first that is not finite.
fn pack_panel(parts: &[RawMatrix<'_>], panel: &mut [u16]) -> Option<usize> {
    let k = parts[0].columns();
    let num_rows = parts.iter().map(RawMatrix::rows).sum();
    // Pairs of inputs move as one.
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
                // Of the last pair, or of chunks before.
                chunk[len..].fill(0);
                // A fold and not a search: it is vectorised, and bad values are the exception.
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

/// Writes the first `num_pairs` columns of a tile as rows of `out`, one a panel's width from the next.
fn transpose(tile: &[[u32; CHUNK_PAIRS]; TILE], num_pairs: usize, out: &mut [u32]) {
    // Squares, whose loops the compiler turns into shuffles.
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
