//! The input of a vision tower.

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
