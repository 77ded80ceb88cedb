//! How a tile is computed: the order of its tokens, the positions of its patches, and which patches see each other.

use std::ops::Range;

use crate::spec::{TileSizes, TowerSpec, TowerWindows};
use inflight_base::{BlockId, BlockSize, Tokens};
use inflight_device::{AxisPositions, KvSpan};
use inflight_images::TileGrid;

/// The layout of a tile. Its rows in the encoder are the class token and the patches, token after token.
pub(super) struct TileLayout {
    tokens: TileGrid,
    num_encoded: usize,
    num_patches_per_token: usize,
    /// The token at each place, as its number in the tile; empty if all are at their own.
    order: Vec<u32>,
    /// The positions of each row of the encoder.
    positions: Vec<AxisPositions>,
    whole: Vec<KvSpan>,
    /// One for each window; empty without windows.
    windows: Vec<KvSpan>,
    block_table: Vec<BlockId>,
}

/// Consecutive layers that are computed in one go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LayerRun {
    pub layers: Range<usize>,
    /// Whether patches see only their window.
    pub has_windows: bool,
    /// The deep projector that reads its result.
    pub deep_projector: Option<usize>,
}

impl TileLayout {
    /// The layout of a tile in a tower, whose cache has blocks of this size.
    pub fn new(spec: &TowerSpec, tile: TileGrid, block_size: BlockSize) -> Self {
        let tokens = spec.token_grid(tile);
        let order = match &spec.windows {
            Some(windows) => window_order(tokens, windows.side),
            None => Vec::new(),
        };
        let lens: Vec<usize> = order.iter().map(Vec::len).collect();
        let order: Vec<u32> = order.into_iter().flatten().collect();
        let has_class_token = spec.class_token.is_some();
        let num_encoded = usize::from(has_class_token) + tile.rows * tile.columns;
        let num_patches_per_token = spec.num_patches_per_token();
        let mut layout = Self {
            tokens,
            num_encoded,
            num_patches_per_token,
            positions: positions(spec, tile, &order),
            order,
            whole: Vec::new(),
            windows: Vec::new(),
            block_table: Vec::new(),
        };
        let lens = lens.into_iter().map(|len| len * num_patches_per_token);
        let (windows, num_in_windows) = spans(lens, block_size);
        let (whole, num_in_whole) = spans([num_encoded], block_size);
        (layout.whole, layout.windows) = (whole, windows);
        let num_blocks = num_in_windows.max(num_in_whole);
        layout.block_table = (0..num_blocks).map(BlockId).collect();
        layout
    }

    /// The tokens that the tile becomes.
    pub fn tokens(&self) -> TileGrid {
        self.tokens
    }

    /// Rows of the encoder.
    pub fn num_encoded(&self) -> usize {
        self.num_encoded
    }

    /// The positions of all rows.
    pub fn positions(&self) -> &[AxisPositions] {
        &self.positions
    }

    /// The sequences of a run of layers: windows, or the whole tile.
    pub fn spans(&self, run: &LayerRun) -> &[KvSpan] {
        match run.has_windows {
            true => &self.windows,
            false => &self.whole,
        }
    }

    /// Their block tables.
    pub fn block_table(&self) -> &[BlockId] {
        &self.block_table
    }

    /// Appends the values of patches, `[num_patches, width]`, in the order in which they are computed.
    pub fn arrange(&self, patches: &[f32], width: usize, out: &mut Vec<f32>) {
        if self.order.is_empty() {
            return out.extend_from_slice(patches);
        }
        let width = width * self.num_patches_per_token;
        for &token in &self.order {
            out.extend_from_slice(&patches[token as usize * width..][..width]);
        }
    }

    /// Appends the rows of tokens, `[num_tokens, width]`, in the order of the tile.
    pub fn restore(&self, rows: &[f32], width: usize, out: &mut Vec<f32>) {
        if self.order.is_empty() {
            return out.extend_from_slice(rows);
        }
        let start = out.len();
        out.resize(start + rows.len(), 0.0);
        for (row, &token) in rows.chunks_exact(width).zip(&self.order) {
            out[start + token as usize * width..][..width].copy_from_slice(row);
        }
    }
}

impl TowerSpec {
    /// The layers in the runs that compute a tile.
    ///
    /// ```text
    /// layers             0  1  2  3  4  5  6     windows in all but 3, deep projector behind 1
    /// runs              |----||-||-||-------|
    /// ```
    pub(super) fn layer_runs(&self) -> Vec<LayerRun> {
        let has_windows = |layer: usize| self.windows.as_ref().is_some_and(|it| it.layers[layer]);
        let mut runs: Vec<LayerRun> = Vec::new();
        for layer in 0..self.encoder.num_layers() {
            let mut deep = self.deep_projectors.iter();
            let deep_projector = deep.position(|deep| deep.layer == layer);
            match runs.last_mut() {
                Some(run)
                    if run.has_windows == has_windows(layer) && run.deep_projector.is_none() =>
                {
                    run.layers.end = layer + 1;
                    run.deep_projector = deep_projector;
                }
                _ => runs.push(LayerRun {
                    layers: layer..layer + 1,
                    has_windows: has_windows(layer),
                    deep_projector,
                }),
            }
        }
        runs
    }

    /// The most windows of a tile: a strip of one token has most.
    pub(crate) fn max_num_windows(&self) -> usize {
        let of_strip = |windows: &TowerWindows| self.max_num_tokens().div_ceil(windows.side);
        self.windows.as_ref().map_or(1, of_strip)
    }

    /// The most blocks that a tile needs: each window has its own.
    pub(crate) fn max_num_blocks(&self, block_size: BlockSize) -> u32 {
        let whole = Tokens(self.max_num_encoded() as u32).blocks_ceil(block_size);
        match self.windows {
            Some(_) => whole.0 + self.max_num_windows() as u32,
            None => whole.0,
        }
    }
}

/// The tokens of each window, row after row of windows.
///
/// ```text
/// side 2      a b | c      windows     a b d e
///             d e | f                  c f
///             ----+--                  g h
///             g h | i                  i
/// ```
fn window_order(tokens: TileGrid, side: usize) -> Vec<Vec<u32>> {
    let starts = |len: usize| (0..len).step_by(side);
    let windows = starts(tokens.rows).flat_map(|row| {
        let columns = starts(tokens.columns);
        columns.map(move |column| (row, column))
    });
    let tokens_of = |(row, column): (usize, usize)| {
        let rows = row..tokens.rows.min(row + side);
        let columns = column..tokens.columns.min(column + side);
        let of_row = |row: usize| {
            let columns = columns.clone();
            columns.map(move |column| (row * tokens.columns + column) as u32)
        };
        rows.flat_map(of_row).collect()
    };
    windows.map(tokens_of).collect()
}

/// The row and the column of each row of the encoder. Empty if the tower has one size of tiles, whose positions are
/// learned.
fn positions(spec: &TowerSpec, tile: TileGrid, order: &[u32]) -> Vec<AxisPositions> {
    if matches!(spec.tiles, TileSizes::Square { .. }) {
        return Vec::new();
    }
    if matches!(spec.tiles, TileSizes::Rows { .. }) {
        let patches = (0..tile.rows as u32).flat_map(|row| {
            let columns = 0..tile.columns as u32;
            columns.map(move |column| [0, row, column])
        });
        return patches.collect();
    }
    let (merge, tokens) = (spec.projector.merge_size, spec.token_grid(tile));
    let in_order: Vec<u32>;
    let order = match order.is_empty() {
        true => {
            in_order = (0..(tokens.rows * tokens.columns) as u32).collect();
            &in_order
        }
        false => order,
    };
    let of_token = |&token: &u32| {
        let (row, column) = (
            token as usize / tokens.columns,
            token as usize % tokens.columns,
        );
        let patches = 0..merge * merge;
        patches.map(move |patch| {
            let (row, column) = (row * merge + patch / merge, column * merge + patch % merge);
            [0, row as u32, column as u32]
        })
    };
    order.iter().flat_map(of_token).collect()
}

/// Sequences of these lengths, one behind the other, each with blocks of its own, and how many blocks these are.
fn spans(lens: impl IntoIterator<Item = usize>, block_size: BlockSize) -> (Vec<KvSpan>, u32) {
    let (mut first_token, mut first_block) = (0, 0);
    let spans = lens.into_iter().map(|len| {
        let len = len as u32;
        let num_blocks = Tokens(len).blocks_ceil(block_size).0;
        let span = KvSpan {
            tokens: first_token..first_token + len,
            kv_len: len,
            block_table: first_block..first_block + num_blocks,
        };
        (first_token, first_block) = (span.tokens.end, span.block_table.end);
        span
    });
    (spans.collect(), first_block)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_in_order_and_have_all_tokens() {
        let tokens = TileGrid {
            rows: 3,
            columns: 3,
        };
        let expected = [vec![0, 1, 3, 4], vec![2, 5], vec![6, 7], vec![8]];
        assert_eq!(window_order(tokens, 2), expected);
        assert_eq!(window_order(tokens, 5), [Vec::from_iter(0..9)]);
    }

    #[test]
    fn each_sequence_has_blocks_of_its_own() {
        let block_size = BlockSize::new(4).expect("a power of two");
        let (spans, num_blocks) = spans([5, 4, 1], block_size);
        let tables = spans.iter().map(|span| span.block_table.clone());
        assert_eq!(Vec::from_iter(tables), [0..2, 2..3, 3..4]);
        assert_eq!(num_blocks, 4);
        assert_eq!(spans[2].tokens, 9..10);
    }
}
