//! Moves and rows of images in a step, as plain data.

use std::ops::Range;

use crate::image::Image;

/// A place of the rows of an image in the runner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ImageSlot(pub u32);

/// A change of the rows that the runner keeps, before anything of the step is computed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ImageMove {
    /// The rows in this slot are needed no longer.
    Evict(ImageSlot),
    /// An image to be encoded, whose rows stay in the slot until that is evicted.
    Encode {
        /// An empty slot.
        slot: ImageSlot,
        /// The image.
        image: Image,
    },
}

/// Tokens of a model call whose embeddings are rows of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageRows {
    /// The tokens, as a range of `token_ids`.
    pub tokens: Range<u32>,
    /// Where the rows of the image are.
    pub slot: ImageSlot,
    /// The row of the first token.
    pub first_row: u32,
}

/// How far the positions of a context are behind its places in the KV cache, in front of the tokens of a model call:
/// images take fewer [positions](Image::at_positions) than tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PositionShift {
    /// The context, as an index of the sequences of the call.
    pub sequence: u32,
    /// The tokens without a position of their own, of images that end in front of its tokens.
    pub num_tokens: u32,
}

impl ImageSlot {
    /// Its index.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}
