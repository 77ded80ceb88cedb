//! The weights of a tower in a checkpoint.

use crate::linear_weights::{NormSource, ProjectionSource};
use crate::model_tensors::ModelTensors;
use crate::spec::{Module, TowerSpec};
use crate::weight_sources::LayerSource;
use inflight_base::LoadError;
use inflight_checkpoint::{Matrix, Store, Tensor};
use inflight_device::{Device, PlainActivation};

/// The weights of a tower, not yet read. None of them is rounded.
pub(crate) struct TowerSource<'a> {
    pub(super) tensors: ModelTensors<'a>,
    pub(super) layers: Vec<LayerSource<'a>>,
    pub(super) final_norm: Option<NormSource<'a>>,
    pub(super) patch_embedding: ProjectionSource<'a>,
    pub(super) positions: Option<Matrix<'a>>,
    pub(super) class_token: Option<Tensor<'a>>,
    pub(super) embedding_norm: Option<NormSource<'a>>,
    pub(super) projector_norm: Option<NormSource<'a>>,
    pub(super) inner: Option<(ProjectionSource<'a>, PlainActivation)>,
    pub(super) projector: ProjectionSource<'a>,
}

impl<'a> TowerSource<'a> {
    /// Finds and checks all weights.
    ///
    /// # Errors
    /// A tensor is missing, or has the wrong shape or type.
    pub(crate) fn find(spec: &'a TowerSpec, store: Store<'a>) -> Result<Self, LoadError> {
        let encoder = &spec.encoder;
        let tensors = ModelTensors::new(encoder, store, None);
        let hidden = encoder.hidden_size;
        let layers = encoder.layers.iter().enumerate();
        let layers =
            layers.map(|(index, layer)| LayerSource::find(&tensors, encoder, index, layer));
        let norm = |name| {
            let module = Module::of_model(name);
            NormSource::find(&tensors, &encoder.norm, module, hidden)
        };
        let final_norm = encoder.modules.final_norm.map(norm).transpose()?;
        let embedding_norm = encoder.embedding_norm.map(norm).transpose()?;
        let class_token = spec.class_token.map(Module::of_model);
        let class_token = class_token.map(|name| tensors.parameter(name, hidden));
        let projector_norm = spec.projector.norm.as_ref().map(|(name, norm)| {
            let module = Module::of_model(name);
            NormSource::find(&tensors, norm, module, spec.merged_width())
        });
        let inner = match &spec.projector.inner {
            Some(inner) => {
                let projection = ProjectionSource::find(&tensors, None, &inner.projection)?;
                Some((projection, inner.activation))
            }
            None => None,
        };
        let positions = match encoder.learned_positions {
            Some(positions) => {
                let module = Module::of_model(positions.module);
                Some(tensors.matrix(module, positions.num_rows, hidden)?)
            }
            None => None,
        };
        Ok(Self {
            layers: layers.collect::<Result<_, _>>()?,
            final_norm,
            embedding_norm,
            class_token: class_token.transpose()?,
            projector_norm: projector_norm.transpose()?,
            inner,
            patch_embedding: patch_embedding(&tensors, spec)?,
            positions,
            projector: ProjectionSource::find(&tensors, None, &spec.projector.projection)?,
            tensors,
        })
    }

    /// Bytes of the weights in memory, without padding.
    pub(crate) fn num_bytes<D: Device>(&self) -> u64 {
        let layers = self.layers.iter().map(|it| it.num_bytes::<D>(None));
        let inner = self.inner.as_ref().map(|(projection, _)| projection);
        let outside = [&self.patch_embedding, &self.projector].into_iter();
        let outside = outside.chain(inner);
        let outside = outside.map(|it| it.form(None, D::HAS_FP8).num_bytes::<D>(&it.matrices));
        let positions = self.positions.as_ref();
        let positions = positions.map_or(0, |rows| 2 * (rows.rows() * rows.columns()) as u64);
        layers.chain(outside).sum::<u64>() + positions
    }
}

/// The kernels of a convolution whose stride is its size, as a matrix.
fn patch_embedding<'a>(
    tensors: &ModelTensors<'a>,
    spec: &TowerSpec,
) -> Result<ProjectionSource<'a>, LoadError> {
    let module = spec.patch_embedding();
    let hidden = spec.encoder.hidden_size;
    let kernels = tensors.kernels(module, hidden, &spec.patch.dimensions())?;
    Ok(ProjectionSource {
        biases: match spec.has_patch_bias {
            true => vec![tensors.bias(module, hidden)?],
            false => Vec::new(),
        },
        ..ProjectionSource::of_matrix(kernels, None)
    })
}
