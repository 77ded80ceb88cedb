//! The weights of a tower, packed.

use super::tower_source::TowerSource;
use crate::embedding_rows::load_embedding;
use crate::linear_weights::{NormSource, NormWeights};
use crate::packer::Packer;
use crate::weights::{Head, Layer, Weights};
use inflight_base::LoadError;
use inflight_checkpoint::Tensor;
use inflight_device::{Device, InnerActivation, Linear};

/// The weights outside of the layers.
pub(super) struct OuterWeights<D: Device> {
    /// `[hidden_size, patch_len]`.
    pub(super) patch_embedding: Linear<D>,
    /// `[hidden_size]`.
    pub(super) class_token: Option<Vec<f32>>,
    /// `[num_encoded, hidden_size]`.
    pub(super) positions: Option<D::Embedding>,
    /// Behind the sum of both.
    pub(super) embedding_norm: Option<NormWeights<D>>,
    /// Of joined patches.
    pub(super) projector_norm: Option<NormWeights<D>>,
    /// `[num_inputs of the projector, width of joined patches]`.
    pub(super) inner: Option<(Linear<D>, InnerActivation)>,
    /// `[row_width, num_inputs]`.
    pub(super) projector: Linear<D>,
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
        let mut norm = |norm: &Option<NormSource<'_>>| match norm {
            Some(norm) => norm.load(&mut packer).map(Some),
            None => Ok(None),
        };
        let embedding_norm = norm(&self.embedding_norm)?;
        let projector_norm = norm(&self.projector_norm)?;
        let inner = match self.inner {
            Some((projection, activation)) => {
                let activation = InnerActivation::Plain(activation);
                Some((projection.load(&mut packer)?, activation))
            }
            None => None,
        };
        let projector = self.projector.load(&mut packer)?;
        let outer = OuterWeights {
            patch_embedding,
            class_token: self.class_token.map(Tensor::to_f32).transpose()?,
            embedding_norm,
            projector_norm,
            inner,
            positions: match &self.positions {
                Some(rows) => Some(load_embedding(device, rows)?),
                None => None,
            },
            projector,
        };
        self.tensors.store().check()?;
        Ok((Weights::of_layers(layers, head), outer))
    }
}
