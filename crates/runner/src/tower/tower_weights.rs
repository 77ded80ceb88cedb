//! The weights of a tower, packed.

use half::bf16;

use super::patch_positions::PositionSquare;
use super::projector::ProjectorWeights;
use super::tower_source::TowerSource;
use crate::embedding_rows::load_embedding;
use crate::linear_weights::NormWeights;
use crate::packer::Packer;
use crate::spec::PositionTable;
use crate::weights::{Head, Layer, Weights};
use inflight_base::LoadError;
use inflight_checkpoint::Tensor;
use inflight_device::{Device, Linear};

/// The weights outside of the layers.
pub(super) struct OuterWeights<D: Device> {
    /// `[hidden_size, patch_len]`.
    pub(super) patch_embedding: Linear<D>,
    /// `[hidden_size]`.
    pub(super) class_token: Option<Vec<f32>>,
    pub(super) positions: Option<PatchPositions<D>>,
    /// Behind the sum of both.
    pub(super) embedding_norm: Option<NormWeights<D>>,
    pub(super) projector: ProjectorWeights<D>,
    pub(super) deep_projectors: Vec<ProjectorWeights<D>>,
    /// `[row_width]`; empty if lines have no end.
    pub(super) line_end: Vec<bf16>,
}

/// Learned positions.
pub(super) enum PatchPositions<D: Device> {
    /// One for each row of the encoder, `[num_encoded, hidden_size]`.
    InOrder(D::Embedding),
    Interpolated(PositionSquare),
}

impl TowerSource<'_> {
    /// Reads and packs all weights.
    ///
    /// # Errors
    /// A tensor is not finite or changed while it was read, or memory is short.
    pub(super) fn load<D: Device>(
        self,
        device: &mut D,
    ) -> Result<(Weights<D>, OuterWeights<D>), LoadError> {
        let mut packer = Packer::new(device, None, None);
        let layers = self.layers.into_iter().map(|layer| layer.load(&mut packer));
        let layers: Vec<Layer<D>> = layers.collect::<Result<_, _>>()?;
        let head = Head {
            final_norm: match &self.final_norm {
                Some(norm) => Some(norm.load(&mut packer)?),
                None => None,
            },
            projection: None,
            lm_head: None,
        };
        let patch_embedding = self.patch_embedding.load(&mut packer)?;
        let embedding_norm = match &self.embedding_norm {
            Some(norm) => Some(norm.load(&mut packer)?),
            None => None,
        };
        let projector = self.projector.load(&mut packer)?;
        let deep = self.deep_projectors.iter();
        let deep = deep.map(|projector| projector.load(&mut packer));
        let deep_projectors = deep.collect::<Result<_, _>>()?;
        let outer = OuterWeights {
            patch_embedding,
            class_token: self.class_token.map(Tensor::to_f32).transpose()?,
            embedding_norm,
            positions: match (&self.positions, self.position_table) {
                (None, _) => None,
                (Some(rows), PositionTable::InOrder) => {
                    Some(PatchPositions::InOrder(load_embedding(device, rows)?))
                }
                (Some(rows), PositionTable::Interpolated { side }) => {
                    let square = PositionSquare::load(side, rows)?;
                    Some(PatchPositions::Interpolated(square))
                }
            },
            projector,
            deep_projectors,
            line_end: match self.line_end {
                Some(line_end) => line_end.to_f32()?.into_iter().map(bf16::from_f32).collect(),
                None => Vec::new(),
            },
        };
        self.tensors.store().check()?;
        Ok((Weights::of_layers(layers, head), outer))
    }
}
