//! Which rows stand for an image.

/// How the rows that a tower makes of tiles become the rows that stand for an image in a prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RowLayout {
    /// Tile after tile, as they are.
    #[default]
    Tiles,
    /// Tile after tile, and one for the end of a line behind them.
    Line,
    /// The first tile, and then the others as one picture, each line of which has one for its end behind it.
    Picture(Picture),
}

/// Tiles side by side, whose rows are the elements of a picture.
///
/// ```text
/// tiles (1, 2)     a b  e f      kept (2, 2)   b e      rows, with | for the end of a line   b e | d g |
///                  c d  g h                    d g
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Picture {
    /// Lines and columns of tiles.
    pub tiles: (usize, usize),
    /// Lines and columns of elements that are kept, in the middle: the others show padding.
    pub kept: (usize, usize),
    /// Lines and columns that these are resampled to, bilinearly.
    pub resampled: (usize, usize),
}

impl RowLayout {
    /// Rows for an image of so many tiles, each of which has as many rows.
    pub fn num_rows(&self, num_tiles: usize, rows_per_tile: usize) -> usize {
        match self {
            Self::Tiles => num_tiles * rows_per_tile,
            Self::Line => num_tiles * rows_per_tile + 1,
            Self::Picture(picture) => rows_per_tile + picture.num_rows(),
        }
    }
}

impl Picture {
    /// Its elements, and the ends of its lines.
    pub fn num_rows(&self) -> usize {
        let (lines, columns) = self.resampled;
        lines * (columns + 1)
    }
}
