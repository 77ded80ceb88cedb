//! The input of a vision tower.

use crate::normalisation::Normalisation;
use crate::pixels::{NUM_CHANNELS, Pixels};
use crate::row_layout::RowLayout;

/// An image as a vision tower reads it.
#[derive(Clone, Debug, PartialEq)]
pub struct ImagePatches {
    /// Normalised values, patch after patch in the order that the checkpoint's processor gives:
    /// `[num_patches][channels * temporal * patch_height * patch_width]`.
    pub values: Vec<f32>,
    /// The tiles that the image was cut into, in order, or the one image.
    pub tiles: Vec<TileGrid>,
    /// The number of tokens that stand for the image in the prompt: only the rows of embeddings.
    pub num_tokens: usize,
    /// Which rows they are.
    pub row_layout: RowLayout,
}

/// The patches of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileGrid {
    /// The rows of patches.
    pub rows: usize,
    /// The columns of patches.
    pub columns: usize,
}

impl ImagePatches {
    /// The number of patches of all tiles.
    pub fn num_patches(&self) -> usize {
        self.tiles.iter().map(|tile| tile.rows * tile.columns).sum()
    }
}

/// How a tile is cut into patches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PatchLayout {
    /// The rows and the columns of pixels of a patch.
    pub side: usize,
    /// The order of patches and of their values.
    pub order: PatchOrder,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PatchOrder {
    /// Row after row of patches; in a patch channels, rows, columns.
    Rows,
    /// Row after row of squares of `merge` x `merge` patches; in a patch channels, `temporal` equal frames, rows,
    /// columns.
    Squares { merge: usize, temporal: usize },
    /// Row after row of patches; in a patch rows, columns, channels.
    ChannelsLast,
}

impl PatchLayout {
    /// Patches of this side, row after row.
    pub fn rows(side: usize) -> Self {
        let order = PatchOrder::Rows;
        Self { side, order }
    }

    /// The values of all tiles and the patches of each. Pixels beyond the last whole patch are left out.
    pub fn cut(
        &self,
        tiles: &[Pixels],
        normalisation: &Normalisation,
    ) -> (Vec<f32>, Vec<TileGrid>) {
        let tables = normalisation.tables();
        let grid = |tile: &Pixels| TileGrid {
            rows: tile.height() / self.side,
            columns: tile.width() / self.side,
        };
        let grids: Vec<TileGrid> = tiles.iter().map(grid).collect();
        let num_patches: usize = grids.iter().map(|grid| grid.rows * grid.columns).sum();
        let mut values = Vec::with_capacity(num_patches * self.num_values());
        for (tile, &grid) in tiles.iter().zip(&grids) {
            for (row, column) in self.places(grid) {
                self.write(
                    tile,
                    (row * self.side, column * self.side),
                    &tables,
                    &mut values,
                );
            }
        }
        (values, grids)
    }

    /// The values of a patch.
    fn num_values(&self) -> usize {
        let num_frames = match self.order {
            PatchOrder::Squares { temporal, .. } => temporal,
            PatchOrder::Rows | PatchOrder::ChannelsLast => 1,
        };
        self.side * self.side * NUM_CHANNELS * num_frames
    }

    /// The rows and columns of the patches of a tile, in order.
    fn places(&self, grid: TileGrid) -> impl Iterator<Item = (usize, usize)> {
        let merge = match self.order {
            PatchOrder::Squares { merge, .. } => merge,
            PatchOrder::Rows | PatchOrder::ChannelsLast => 1,
        };
        (0..grid.rows / merge * merge * grid.columns).map(move |patch| {
            let (square, inner) = (patch / (merge * merge), patch % (merge * merge));
            let num_squares = (grid.columns / merge).max(1);
            let (row, column) = (square / num_squares, square % num_squares);
            (row * merge + inner / merge, column * merge + inner % merge)
        })
    }

    /// Appends the values of a patch, given its first row and column of pixels.
    fn write(
        &self,
        tile: &Pixels,
        (top, left): (usize, usize),
        tables: &[[f32; 256]; NUM_CHANNELS],
        values: &mut Vec<f32>,
    ) {
        let rows = (top..top + self.side)
            .map(|y| &tile.row(y)[left * NUM_CHANNELS..][..self.side * NUM_CHANNELS]);
        if self.order == PatchOrder::ChannelsLast {
            for pixel in rows.flat_map(|row| row.as_chunks::<NUM_CHANNELS>().0) {
                values.extend(
                    (0..NUM_CHANNELS).map(|channel| tables[channel][usize::from(pixel[channel])]),
                );
            }
            return;
        }
        let num_frames = self.num_values() / (self.side * self.side * NUM_CHANNELS);
        for (channel, table) in tables.iter().enumerate() {
            for _ in 0..num_frames {
                for row in rows.clone() {
                    let pixels = row.as_chunks::<NUM_CHANNELS>().0;
                    values.extend(
                        pixels
                            .iter()
                            .map(|pixel| table[usize::from(pixel[channel])]),
                    );
                }
            }
        }
    }
}
