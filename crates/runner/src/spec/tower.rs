//! The vision tower of a model with images.

use super::{ModelSpec, Module, NormSpec, Projection};
use inflight_device::PlainActivation;

/// A tower: from the patches of an image to rows of the residual stream of the language model, as data.
///
/// ```text
/// patches     [num_patches, patch_len]      of one tile
/// embedded    [class_token, patch_embedding(patches)] + positions, and the norm of embeddings if there is one
/// encoded     the encoder's layers and its final norm, in which each patch sees all patches of its tile
/// rows        projector(encoded)            [num_tokens, hidden_size of the language model]
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct TowerSpec {
    /// The layers and the final norm, as an encoder whose tokens are patches. Its embedding embeds patches.
    pub encoder: ModelSpec,
    /// The shape of a patch.
    pub patch: PatchShape,
    /// Whether the embedding of patches has a bias.
    pub has_patch_bias: bool,
    /// Rows of patches of a tile, and as many columns.
    pub num_patches_per_side: usize,
    /// The parameter in front of the embedded patches, `[hidden_size]`, if there is one. It has the first position, and
    /// becomes no row.
    pub class_token: Option<&'static str>,
    /// From encoded patches to rows.
    pub projector: ProjectorSpec,
}

/// The shape of a patch, whose values are in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PatchShape {
    /// Channels of a pixel.
    pub num_channels: usize,
    /// Pixels of each side.
    pub num_pixels_per_side: usize,
}

/// How encoded patches become rows: squares of neighbours are joined, perhaps normalised, and projected by one layer or
/// two.
#[derive(Clone, Debug, PartialEq)]
pub struct ProjectorSpec {
    /// Patches of each side of a square. Its patches are joined row by row.
    pub merge_size: usize,
    /// Whether the patches of a square are joined by their mean, `[hidden_size]`.
    pub has_means: bool,
    /// The norm of joined patches: its module, as wide as these.
    pub norm: Option<(&'static str, NormSpec)>,
    /// The layer in front of the last one, if there are two.
    pub inner: Option<InnerProjection>,
    /// The last layer, `[hidden_size of the language model, num_inputs]`. It reads the inner layer, or joined patches.
    pub projection: Projection,
}

/// A layer of a projector: `activation(projection(joined patches))`.
#[derive(Clone, Debug, PartialEq)]
pub struct InnerProjection {
    /// `[num_inputs of the last layer, merge_size^2 * hidden_size]`.
    pub projection: Projection,
    /// The activation behind it.
    pub activation: PlainActivation,
}

impl TowerSpec {
    /// The module that embeds patches: a convolution whose stride is its size.
    pub const fn patch_embedding(&self) -> Module {
        Module::of_model(self.encoder.modules.embedding)
    }

    /// Patches of a tile.
    pub const fn num_patches(&self) -> usize {
        self.num_patches_per_side.pow(2)
    }

    /// Rows of the encoder for a tile: the class token, and the patches.
    pub const fn num_encoded(&self) -> usize {
        self.class_token.is_some() as usize + self.num_patches()
    }

    /// Rows that a tile becomes.
    pub const fn num_tokens(&self) -> usize {
        (self.num_patches_per_side / self.projector.merge_size).pow(2)
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
    pub const fn dimensions(self) -> [usize; 3] {
        let side = self.num_pixels_per_side;
        [self.num_channels, side, side]
    }

    /// Values of a patch.
    pub const fn num_values(self) -> usize {
        self.num_channels * self.num_pixels_per_side.pow(2)
    }
}
