//! Quantised weights on a GPU.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use cudarc::driver::CudaStream;
use half::f16;

use super::memory::DeviceMemory;
use inflight_base::LoadError;
use inflight_device::{PackedReader, PackedShape};
use inflight_numbers::{
    CodeBits, NotFinite, QuantFormat, QuantisedRow, QuantisedRows, QuantisedShape, TWICE_E2M1,
    can_be_packed_together,
};
use inflight_threads::DisjointSlice;
use inflight_threads::Pool;

/// Bytes of codes that are packed at a time, by all threads.
const PIECE_BYTES: usize = 32 << 20;
/// Rows of a tile.
pub(super) const TILE_ROWS: usize = 16;
/// 32-bit words of a tile.
const TILE_WORDS: usize = 128;
/// The unit of stored scales and offsets.
const UNIT: f32 = 1.0 / 4096.0;

/// By twice a float of 4 bits without a sign, its bits.
const E2M1_OF_TWICE: [Option<u32>; 13] = {
    let mut all = [None; 13];
    let mut bits = 0;
    while bits < 8 {
        all[TWICE_E2M1[bits] as usize] = Some(bits as u32);
        bits += 1;
    }
    all
};

/// What codes are in GPU memory: `kernels/quantised.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CodeKind {
    Int4,
    Int8,
    /// e4m3.
    Fp8,
    /// Twice an e2m1 number, in 4 bits.
    E2m1,
}

/// The version of the layout of codes and scales: in [`QuantisedWeights`], and in
/// [`Fp8Weights`](super::fp8_gemm::Fp8Weights). To be raised when one of them changes.
pub(super) const LAYOUT_VERSION: u32 = 1;

/// Codes, scales and offsets as `kernels/quantised.cuh` describes them.
pub(super) struct QuantisedWeights {
    pub(super) kind: CodeKind,
    format: QuantFormat,
    codes: DeviceMemory,
    scales: DeviceMemory,
    /// Empty if the format has none.
    offsets: DeviceMemory,
    /// The input of each column, if it is not the one with the same index.
    input_order: Option<DeviceMemory>,
}

/// Where the weights of some rows are.
pub(super) struct QuantisedAddresses {
    pub(super) codes: u64,
    pub(super) scales: u64,
    /// 0 if there are no offsets.
    pub(super) offsets: u64,
}

/// Where the matrices of some weights begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PartPlaces {
    /// With the row after the last one of the matrix before.
    Packed,
    /// With a row tile: rows that only fill the last one of the matrix before have the code 0.
    OwnTiles,
}

impl PartPlaces {
    /// Rows that a matrix takes.
    fn rows_of(self, part: &dyn QuantisedRows) -> usize {
        match self {
            Self::Packed => part.rows(),
            Self::OwnTiles => part.rows().next_multiple_of(TILE_ROWS),
        }
    }

    fn num_rows(self, parts: &[&dyn QuantisedRows]) -> usize {
        parts.iter().map(|part| self.rows_of(*part)).sum()
    }

    /// The part that a row belongs to, and its index in that part. `None` if it only fills a tile.
    pub(super) fn locate(
        self,
        parts: &[&dyn QuantisedRows],
        mut row: usize,
    ) -> Option<(usize, usize)> {
        for (part, rows) in parts.iter().enumerate() {
            let num_rows = self.rows_of(*rows);
            if row < num_rows {
                return (row < rows.rows()).then_some((part, row));
            }
            row -= num_rows;
        }
        unreachable!("a row of the parts")
    }
}

impl CodeKind {
    /// Stored as they are read.
    fn of_bits(bits: CodeBits) -> Self {
        match bits {
            CodeBits::Four => Self::Int4,
            CodeBits::Eight => Self::Int8,
            CodeBits::Fp8 => Self::Fp8,
        }
    }

    /// Of codes that may all be twice floats of 4 bits.
    fn of_codes(bits: CodeBits, are_twice_e2m1: bool) -> Self {
        match are_twice_e2m1 {
            true => Self::E2m1,
            false => Self::of_bits(bits),
        }
    }

    /// The kind of matrices of one format.
    fn of_parts(parts: &[&dyn QuantisedRows]) -> Self {
        let are_twice_e2m1 = parts.iter().all(|part| part.are_twice_e2m1());
        Self::of_codes(parts[0].format().bits, are_twice_e2m1)
    }

    /// Columns of a tile.
    pub(super) const fn tile_columns(self) -> usize {
        match self {
            Self::Int4 | Self::E2m1 => 64,
            Self::Int8 | Self::Fp8 => 32,
        }
    }

    /// A word whose codes are all 0.
    const fn zeros(self) -> u32 {
        match self {
            Self::Int4 => 0x8888_8888,
            Self::Int8 | Self::Fp8 | Self::E2m1 => 0,
        }
    }
}

/// The lengths of what 16 rows have.
#[derive(Clone, Copy)]
struct RowTile {
    kind: CodeKind,
    format: QuantFormat,
    /// Words of codes.
    num_words: usize,
    /// Scales, and offsets if there are any.
    num_scales: usize,
}

impl RowTile {
    fn new(kind: CodeKind, format: QuantFormat, k: usize) -> Self {
        Self {
            kind,
            format,
            num_words: k.div_ceil(kind.tile_columns()) * TILE_WORDS,
            num_scales: format.num_groups(k) * TILE_ROWS,
        }
    }

    fn num_bytes(&self) -> usize {
        4 * self.num_words + 2 * (self.num_scales + self.num_offsets())
    }

    fn num_offsets(&self) -> usize {
        match self.format.has_offsets {
            true => self.num_scales,
            false => 0,
        }
    }
}

/// Bytes of one of the matrices of experts, whose codes may all be twice floats of 4 bits.
pub(super) fn num_expert_bytes(shape: QuantisedShape, are_twice_e2m1: bool) -> usize {
    let kind = CodeKind::of_codes(shape.format.bits, are_twice_e2m1);
    let tile = RowTile::new(kind, shape.format, shape.columns);
    shape.rows.div_ceil(TILE_ROWS) * tile.num_bytes()
}

impl QuantisedWeights {
    /// Uploads matrices that can be packed together, one after the other. The inner error is the first row with a scale
    /// or an offset that is not finite, or above 16, or with a code that is NaN.
    ///
    /// # Errors
    ///
    /// There is not enough memory, or the driver refuses.
    ///
    /// # Panics
    ///
    /// There is no part, they cannot be packed together, a group is neither a multiple of 32 columns nor a whole row,
    /// or an input order has invalid inputs.
    pub(super) fn upload(
        stream: &Arc<CudaStream>,
        pool: &mut Pool,
        parts: &[&dyn QuantisedRows],
        places: PartPlaces,
    ) -> Result<Result<Self, NotFinite>, LoadError> {
        let first = *parts.first().expect("at least one part");
        assert!(can_be_packed_together(parts), "parts of one kind");
        let (k, format) = (first.columns(), first.format());
        let group_size = format.group_size;
        assert!(
            group_size > 0 && (group_size.is_multiple_of(32) || group_size >= k),
            "groups of {group_size}: a multiple of 32, or whole rows of {k}"
        );
        let input_order = match first.input_order() {
            Some(order) => {
                assert!(order.len() == k && order.iter().all(|&input| (input as usize) < k));
                Some(DeviceMemory::upload(stream, order)?)
            }
            None => None,
        };
        let num_tiles = places.num_rows(parts).div_ceil(TILE_ROWS);
        let kind = CodeKind::of_parts(parts);
        let tile = RowTile::new(kind, format, k);
        let reserve = |num_bytes: usize| {
            let num_bytes = num_tiles.saturating_mul(num_bytes);
            DeviceMemory::new(stream, num_bytes)
        };
        let mut weights = Self {
            kind,
            format,
            codes: reserve(4 * tile.num_words)?,
            scales: reserve(2 * tile.num_scales)?,
            offsets: reserve(2 * tile.num_offsets())?,
            input_order,
        };
        let tiles_per_piece =
            (PIECE_BYTES / (4 * tile.num_words).max(1)).clamp(1, num_tiles.max(1));
        let mut piece = Piece::new(tile, tiles_per_piece);
        let mut states = vec![QuantisedRow::default(); pool.num_threads()];
        for start in (0..num_tiles).step_by(tiles_per_piece) {
            let tiles = start..num_tiles.min(start + tiles_per_piece);
            let bad_row = piece.pack(pool, &mut states, (parts, places), tiles.clone());
            if let Some((part, row)) = bad_row.and_then(|row| places.locate(parts, row)) {
                return Ok(Err(NotFinite { part, row }));
            }
            let len = tiles.len();
            for (memory, bytes, tile_bytes) in [
                (
                    &mut weights.codes,
                    bytemuck::cast_slice(&piece.codes),
                    4 * tile.num_words,
                ),
                (
                    &mut weights.scales,
                    bytemuck::cast_slice(&piece.scales),
                    2 * tile.num_scales,
                ),
                (
                    &mut weights.offsets,
                    bytemuck::cast_slice(&piece.offsets),
                    2 * tile.num_offsets(),
                ),
            ] {
                let bytes: &[u8] = bytes;
                memory.write(stream, start * tile_bytes, &bytes[..len * tile_bytes])?;
            }
        }
        Ok(Ok(weights))
    }

    /// Reads matrices of `n` outputs and `k` inputs from bytes that [`QuantisedWeights::parts`] had. `None` if their
    /// number is wrong.
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
        let num_tiles = shape.num_rows.iter().sum::<usize>().div_ceil(TILE_ROWS);
        let kind = CodeKind::of_bits(shape.format.bits);
        let tile = RowTile::new(kind, shape.format, shape.columns);
        let expected = [4 * tile.num_words, 2 * tile.num_scales].map(|bytes| num_tiles * bytes);
        if shape.format.has_offsets || expected != [codes.num_bytes, scales.num_bytes] {
            return Ok(None);
        }
        Ok(Some(Self {
            kind,
            format: shape.format,
            codes: DeviceMemory::read_from(stream, pool, codes)?,
            scales: DeviceMemory::read_from(stream, pool, scales)?,
            offsets: DeviceMemory::new(stream, 0)?,
            input_order: None,
        }))
    }

    /// Codes and scales, if these are all that there is.
    pub(super) fn parts(&self) -> Option<[&DeviceMemory; 2]> {
        let is_all = !self.format.has_offsets && self.input_order.is_none();
        is_all.then_some([&self.codes, &self.scales])
    }

    /// Bytes of all of it.
    pub(super) fn num_bytes(&self) -> usize {
        let order = self.input_order.as_ref();
        let order = order.map_or(0, DeviceMemory::num_bytes);
        self.codes.num_bytes() + self.scales.num_bytes() + self.offsets.num_bytes() + order
    }

    /// The weights from `row` on, a multiple of 16, of rows of `k` weights.
    pub(super) fn addresses(&self, row: usize, k: usize) -> QuantisedAddresses {
        let tile = RowTile::new(self.kind, self.format, k);
        let index = row / TILE_ROWS;
        let scales = (2 * tile.num_scales * index) as u64;
        QuantisedAddresses {
            codes: self.codes.address() + (4 * tile.num_words * index) as u64,
            scales: self.scales.address() + scales,
            offsets: match self.format.has_offsets {
                true => self.offsets.address() + scales,
                false => 0,
            },
        }
    }

    /// Columns of a group, as the kernels take them: a whole row of `k` is one of a multiple of 32.
    pub(super) fn group_size(&self, k: usize) -> usize {
        self.format.group_size.min(k.next_multiple_of(32))
    }

    /// The address of the input of each column, if it is not the one with the same index.
    pub(super) fn input_order(&self) -> Option<u64> {
        self.input_order.as_ref().map(DeviceMemory::address)
    }
}

/// Some row tiles on the host.
struct Piece {
    tile: RowTile,
    codes: Vec<u32>,
    scales: Vec<u16>,
    offsets: Vec<u16>,
}

impl Piece {
    fn new(tile: RowTile, num_tiles: usize) -> Self {
        Self {
            tile,
            codes: vec![0; num_tiles * tile.num_words],
            scales: vec![0; num_tiles * tile.num_scales],
            offsets: vec![0; num_tiles * tile.num_offsets()],
        }
    }

    /// Packs the rows of some tiles. Returns the first row, of the concatenated parts, whose scales or offsets cannot
    /// be stored.
    fn pack(
        &mut self,
        pool: &mut Pool,
        states: &mut [QuantisedRow],
        (parts, places): (&[&dyn QuantisedRows], PartPlaces),
        tiles: Range<usize>,
    ) -> Option<usize> {
        let tile = self.tile;
        let num_rows = places.num_rows(parts);
        let bad_row = AtomicUsize::new(usize::MAX);
        let codes = DisjointSlice::new(&mut self.codes);
        let scales = DisjointSlice::new(&mut self.scales);
        let offsets = DisjointSlice::new(&mut self.offsets);
        pool.for_each(states, tiles.len(), |row, index| {
            // SAFETY: each tile belongs to one task.
            let (codes, scales, offsets) = unsafe {
                (
                    codes.slice(index * tile.num_words, tile.num_words),
                    scales.slice(index * tile.num_scales, tile.num_scales),
                    offsets.slice(index * tile.num_offsets(), tile.num_offsets()),
                )
            };
            codes.fill(tile.kind.zeros());
            scales.fill(0);
            offsets.fill(0);
            let first = (tiles.start + index) * TILE_ROWS;
            for at in first..num_rows.min(first + TILE_ROWS) {
                let Some((part, row_in_part)) = places.locate(parts, at) else {
                    continue;
                };
                parts[part].read_row(row_in_part, row);
                let lane = at - first;
                write_codes(tile.kind, &row.codes, lane, codes);
                let is_finite = write_numbers(&row.scales, lane, scales)
                    & write_numbers(&row.offsets, lane, offsets)
                    & (tile.kind != CodeKind::Fp8 || !has_nan(&row.codes));
                if !is_finite {
                    bad_row.fetch_min(at, Ordering::Relaxed);
                }
            }
        });
        Some(bad_row.into_inner()).filter(|&row| row != usize::MAX)
    }
}

/// Writes the codes of row `row` of a tile row, whose words have the code 0 in its places.
fn write_codes(kind: CodeKind, codes: &[i8], row: usize, words: &mut [u32]) {
    let (group, is_second) = (row % 8, row / 8);
    for (half, codes) in codes.chunks(32).enumerate() {
        let halves_of_tile = kind.tile_columns() / 32;
        let (tile, half_of_tile) = (half / halves_of_tile, half % halves_of_tile);
        for (quad, codes) in codes.chunks(4).enumerate() {
            let (thread, step) = (quad / 2, quad % 2);
            let lane = tile * TILE_WORDS + 4 * (4 * group + thread);
            for (index, &code) in codes.iter().enumerate() {
                let (pair, element) = (index / 2, index % 2);
                let code = match kind {
                    CodeKind::E2m1 => e2m1_of(code),
                    CodeKind::Int4 | CodeKind::Int8 | CodeKind::Fp8 => {
                        u32::from(code.cast_unsigned())
                    }
                };
                match kind {
                    // Adding 8 flips the sign bit of integers.
                    CodeKind::Int4 | CodeKind::E2m1 => {
                        let shift = 4 * (is_second + 2 * pair) + 16 * element;
                        words[lane + 2 * half_of_tile + step] ^= (code & 0xf) << shift;
                    }
                    CodeKind::Int8 | CodeKind::Fp8 => {
                        let shift = 8 * (is_second + 2 * element);
                        words[lane + 2 * step + pair] |= code << shift;
                    }
                }
            }
        }
    }
}

/// The bits of the e2m1 number that is half of a code.
fn e2m1_of(code: i8) -> u32 {
    let bits = E2M1_OF_TWICE.get(usize::from(code.unsigned_abs()));
    let sign = if code < 0 { 8 } else { 0 };
    sign | bits.copied().flatten().expect("twice a float of 4 bits")
}

/// Whether one of these 8-bit floats is NaN.
pub(super) fn has_nan(codes: &[i8]) -> bool {
    codes
        .iter()
        .fold(false, |has_nan, code| has_nan | (code & 0x7f == 0x7f))
}

/// Writes the scales or the offsets of a row, and returns whether all of them are finite.
fn write_numbers(values: &[f32], row: usize, out: &mut [u16]) -> bool {
    let mut is_finite = true;
    for (value, out) in values.iter().zip(out.chunks_exact_mut(TILE_ROWS)) {
        let stored = f16::from_f32(value / UNIT);
        is_finite &= stored.is_finite();
        out[row] = stored.to_bits();
    }
    is_finite
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The codes of a tile row by the drawing in quantised.cuh: lane by lane, word by word.
    fn unpack(kind: CodeKind, words: &[u32], k: usize) -> Vec<Vec<i8>> {
        let mut rows = vec![vec![0; k]; TILE_ROWS];
        for (index, &word) in words.iter().enumerate() {
            let (tile, lane, word_of_lane) = (index / 128, index % 128 / 4, index % 4);
            let (g, t) = (lane / 4, lane % 4);
            let mut put = |row: usize, column: usize, code: i8| {
                if column < k {
                    rows[row][column] = code;
                }
            };
            match kind {
                CodeKind::Int4 | CodeKind::E2m1 => {
                    let c = 64 * tile + 32 * (word_of_lane / 2) + 8 * t + 4 * (word_of_lane % 2);
                    let places = [(g, 0), (g + 8, 0), (g, 2), (g + 8, 2)];
                    let places = places
                        .into_iter()
                        .chain([(g, 1), (g + 8, 1), (g, 3), (g + 8, 3)]);
                    for (nibble, (row, column)) in places.enumerate() {
                        let bits = (word >> (4 * nibble) & 0xf) as i8;
                        let magnitude = TWICE_E2M1[bits as usize % 8];
                        let code = match kind {
                            CodeKind::Int4 => bits - 8,
                            _ if bits < 8 => magnitude,
                            _ => -magnitude,
                        };
                        put(row, c + column, code);
                    }
                }
                CodeKind::Int8 | CodeKind::Fp8 => {
                    let c = 32 * tile + 8 * t + 4 * (word_of_lane / 2) + 2 * (word_of_lane % 2);
                    let places = [(g, 0), (g + 8, 0), (g, 1), (g + 8, 1)];
                    for ((row, column), byte) in places.into_iter().zip(word.to_le_bytes()) {
                        put(row, c + column, byte.cast_signed());
                    }
                }
            }
        }
        rows
    }

    #[test]
    fn codes_lie_where_the_kernels_read_them() {
        for (kind, k) in [
            (CodeKind::Int4, 64),
            (CodeKind::Int4, 150),
            (CodeKind::Int8, 77),
            (CodeKind::E2m1, 64),
            (CodeKind::E2m1, 150),
        ] {
            let code = |row: usize, column: usize| {
                let number = row * 31 + column * 17 + row * column;
                match kind {
                    CodeKind::Int4 => (number % 16) as i8 - 8,
                    CodeKind::Int8 | CodeKind::Fp8 => (number % 256) as u8 as i8,
                    CodeKind::E2m1 => TWICE_E2M1[number % 8] * [1, -1][number / 8 % 2],
                }
            };
            let format = QuantFormat {
                bits: CodeBits::Eight,
                group_size: 32,
                has_offsets: false,
            };
            let num_words = RowTile::new(kind, format, k).num_words;
            let mut words = vec![kind.zeros(); num_words];
            let rows: Vec<Vec<i8>> = (0..TILE_ROWS)
                .map(|row| (0..k).map(|column| code(row, column)).collect())
                .collect();
            for (row, codes) in rows.iter().enumerate() {
                write_codes(kind, codes, row, &mut words);
            }
            assert_eq!(unpack(kind, &words, k), rows, "{kind:?}, {k} columns");
        }
    }
}
