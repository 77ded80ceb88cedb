//! The vision tower of a model with images.

use super::{ModelSpec, Module, NormSpec, Projection};
use crate::rope::RopeAxes;
use inflight_device::PlainActivation;
use inflight_images::TileGrid;

/// A tower: from the patches of an image to rows of the residual stream of the language model, as data.
///
/// ```text
/// patches     [num_patches, patch_len]      of one tile
/// embedded    [class_token, patch_embedding(patches)] + positions, and the norm of embeddings if there is one
/// encoded     the encoder's layers and its final norm, in which each patch sees all patches of its tile
/// rows        projector(encoded)            [num_tokens, hidden_size of the language model]
/// deep rows   a deep projector of the patches behind an earlier layer, likewise
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct TowerSpec {
    /// The layers and the final norm, as an encoder whose tokens are patches. Its embedding embeds patches.
    pub encoder: ModelSpec,
    /// The shape of a patch.
    pub patch: PatchShape,
    /// Whether the embedding of patches has a bias.
    pub has_patch_bias: bool,
    /// The tiles that it reads.
    pub tiles: TileSizes,
    /// How the learned positions of the encoder belong to patches, if it has learned positions.
    pub learned_positions: PositionTable,
    /// The parts of a tile that do not see each other in some layers.
    pub windows: Option<TowerWindows>,
    /// The parameter in front of the embedded patches, `[hidden_size]`, if there is one. It has the first position, and
    /// becomes no row.
    pub class_token: Option<&'static str>,
    /// From encoded patches to rows.
    pub projector: ProjectorSpec,
    /// The parameter, `[hidden_size of the language model]`, that is the row for the end of a line, if rows of images
    /// have [lines](inflight_images::RowLayout).
    pub line_end: Option<&'static str>,
    /// From the patches behind earlier layers to rows that are added behind the first layers of the language model, in
    /// order (DeepStack; Meng et al., arXiv:2406.04334).
    pub deep_projectors: Vec<DeepProjector>,
    /// The positions of the tokens of an image in the language model.
    pub text_axes: RopeAxes,
}

/// The tiles that a tower reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TileSizes {
    /// Squares of one size, with patches row after row.
    Square {
        /// Rows of patches, and as many columns.
        num_patches_per_side: usize,
    },
    /// Any size that squares of [`ProjectorSpec::merge_size`] divide, with patches square after square.
    Squares {
        /// Patches of the largest tile.
        max_num_patches: usize,
    },
    /// Likewise, with patches row after row.
    Rows {
        /// Patches of the largest tile.
        max_num_patches: usize,
    },
}

/// How learned positions belong to patches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PositionTable {
    /// One row for each row of the encoder, in order.
    InOrder,
    /// Rows for a square of this many patches per side, between which the positions of a tile are interpolated:
    /// corners of the tile are at corners of the square.
    Interpolated {
        /// The side of the square.
        side: usize,
    },
}

/// Layers in which patches see only their window.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TowerWindows {
    /// The side of a window in rows and columns of tokens. Windows at the end of a tile may be smaller.
    pub side: usize,
    /// Whether each layer has windows.
    pub layers: Vec<bool>,
}

/// A projector of the patches behind a layer that is not the last one.
#[derive(Clone, Debug, PartialEq)]
pub struct DeepProjector {
    /// The layer.
    pub layer: usize,
    /// From joined patches to rows. `{}` in its names stands for the index of the projector.
    pub projector: ProjectorSpec,
}

/// The shape of a patch, whose values are in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PatchShape {
    /// Channels of a pixel.
    pub num_channels: usize,
    /// Frames with equal pixels, in towers that read videos as well.
    pub num_frames: Option<usize>,
    /// Pixels of each side.
    pub num_pixels_per_side: usize,
}

/// How encoded patches become rows: squares of neighbours are joined, perhaps normalised, perhaps merged, and projected
/// by one layer or two.
#[derive(Clone, Debug, PartialEq)]
pub struct ProjectorSpec {
    /// Patches of each side of a square. Its patches are joined row by row.
    pub merge_size: usize,
    /// Whether the patches of a square are joined by their mean, `[hidden_size]`.
    pub has_means: bool,
    /// The norm of joined patches: its module, as wide as these.
    pub norm: Option<(&'static str, NormSpec)>,
    /// A layer of joined patches in front of the others, `[hidden_size, hidden_size * merge_size^2]`, without an
    /// activation. It has the values of all patches of a square side by side, one column of the residual stream after
    /// the other, as PyTorch's `unfold` does.
    pub merging: Option<Projection>,
    /// The layer in front of the last one, if there are two.
    pub inner: Option<InnerProjection>,
    /// The last layer, `[hidden_size of the language model, num_inputs]`. It reads the inner layer, or joined patches.
    pub projection: Projection,
}

/// A layer of a projector: `activation(projection(joined or merged patches))`.
#[derive(Clone, Debug, PartialEq)]
pub struct InnerProjection {
    /// `[num_inputs of the last layer, merge_size^2 * hidden_size]`, or `[.., hidden_size]` behind a merging layer.
    pub projection: Projection,
    /// The activation behind it.
    pub activation: PlainActivation,
}

impl TowerSpec {
    /// The module that embeds patches: a convolution whose stride is its size.
    pub const fn patch_embedding(&self) -> Module {
        Module::of_model(self.encoder.modules.embedding)
    }

    /// Patches of the largest tile.
    pub const fn max_num_patches(&self) -> usize {
        match self.tiles {
            TileSizes::Square {
                num_patches_per_side,
            } => num_patches_per_side.pow(2),
            TileSizes::Squares { max_num_patches } | TileSizes::Rows { max_num_patches } => {
                max_num_patches
            }
        }
    }

    /// Rows of the encoder for the largest tile: the class token, and the patches.
    pub const fn max_num_encoded(&self) -> usize {
        self.class_token.is_some() as usize + self.max_num_patches()
    }

    /// Patches that become a row.
    pub const fn num_patches_per_token(&self) -> usize {
        self.projector.merge_size.pow(2)
    }

    /// Rows that the largest tile becomes.
    pub const fn max_num_tokens(&self) -> usize {
        self.max_num_patches() / self.num_patches_per_token()
    }

    /// Rows that a square tile becomes, on each side; 0 for tiles of any size.
    pub const fn num_tokens_per_side(&self) -> usize {
        match self.tiles {
            TileSizes::Square {
                num_patches_per_side,
            } => num_patches_per_side / self.projector.merge_size,
            TileSizes::Squares { .. } | TileSizes::Rows { .. } => 0,
        }
    }

    /// The rows that a tile becomes, and their columns.
    pub const fn token_grid(&self, tile: TileGrid) -> TileGrid {
        TileGrid {
            rows: tile.rows / self.projector.merge_size,
            columns: tile.columns / self.projector.merge_size,
        }
    }

    /// This tower for images of at most so many tokens, if it reads tiles of any size.
    pub fn with_max_tokens(mut self, max_num_tokens: usize) -> Self {
        let num_patches = max_num_tokens.saturating_mul(self.num_patches_per_token());
        if let TileSizes::Squares { max_num_patches } | TileSizes::Rows { max_num_patches } =
            &mut self.tiles
        {
            *max_num_patches = num_patches.min(*max_num_patches);
        }
        self
    }

    /// Values of joined patches, which become a row.
    pub const fn merged_width(&self) -> usize {
        match self.projector.has_means {
            true => self.encoder.hidden_size,
            false => self.projector.merge_size.pow(2) * self.encoder.hidden_size,
        }
    }

    /// The width of a row.
    pub fn row_width(&self) -> usize {
        self.projector.projection.num_outputs()
    }
}

impl PatchShape {
    /// Its dimensions.
    pub fn dimensions(self) -> Vec<usize> {
        let side = self.num_pixels_per_side;
        let frames = self.num_frames.into_iter();
        let first = [self.num_channels].into_iter();
        first.chain(frames).chain([side, side]).collect()
    }

    /// Values of a patch.
    pub fn num_values(self) -> usize {
        self.dimensions().into_iter().product()
    }
}
