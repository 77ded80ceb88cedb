//! The projectors of a tower: from encoded patches to rows.

use crate::linear_weights::{NormSource, NormWeights, ProjectionSource};
use crate::model_tensors::ModelTensors;
use crate::packer::Packer;
use crate::residual::norm_of;
use crate::spec::{Module, NormSpec, ProjectorSpec, TowerSpec};
use inflight_base::LoadError;
use inflight_checkpoint::Matrix;
use inflight_device::{Device, InnerActivation, Linear, Norm, Output, PlainActivation, StateOps};

/// The weights of a projector in a checkpoint.
pub(super) struct ProjectorSource<'a> {
    norm: Option<(NormSpec, NormSource<'a>)>,
    merging: Option<ProjectionSource<'a>>,
    inner: Option<(ProjectionSource<'a>, PlainActivation)>,
    projection: ProjectionSource<'a>,
}

/// The weights of a projector on a device.
pub(super) struct ProjectorWeights<D: Device> {
    /// Of joined patches.
    norm: Option<(NormSpec, NormWeights<D>)>,
    /// `[hidden_size, hidden_size * merge_size^2]`.
    merging: Option<Linear<D>>,
    /// `[num_inputs of the projection, merge_size^2 * hidden_size]`, or `[.., hidden_size]` behind a merging layer.
    inner: Option<(Linear<D>, InnerActivation)>,
    /// `[row_width, num_inputs]`.
    projection: Linear<D>,
    row_width: usize,
}

/// The activations of all projectors of a tower, whose widths are equal.
pub(super) struct ProjectorBuffers<D: Device> {
    /// `[max_num_tokens, merge_size^2 * hidden_size]`.
    merged: (D::Sums, D::Inputs),
    /// `[max_num_tokens, hidden_size]`, if there is a merging layer.
    merging: Option<(D::Sums, D::Inputs)>,
    /// `[max_num_tokens, num_inputs of the projection]`, if there is an inner layer.
    inner: Option<D::Inputs>,
    /// `[max_num_tokens, row_width]`.
    rows: (D::Sums, D::Inputs),
}

impl<'a> ProjectorSource<'a> {
    /// Finds the weights of a projector: the one with this `index`, if there are several.
    ///
    /// # Errors
    /// A tensor is missing, or has the wrong shape or type.
    pub(super) fn find(
        tensors: &ModelTensors<'a>,
        spec: &ProjectorSpec,
        index: Option<usize>,
        merged_width: usize,
    ) -> Result<Self, LoadError> {
        let module_of = |name| Module {
            index,
            ..Module::of_model(name)
        };
        let find = |projection| ProjectionSource::find_in(tensors, module_of, projection);
        Ok(Self {
            norm: match &spec.norm {
                Some((name, norm)) => {
                    let module = module_of(name);
                    let source = NormSource::find(tensors, norm, module, merged_width)?;
                    Some((*norm, source))
                }
                None => None,
            },
            merging: spec.merging.as_ref().map(find).transpose()?,
            inner: match &spec.inner {
                Some(inner) => Some((find(&inner.projection)?, inner.activation)),
                None => None,
            },
            projection: find(&spec.projection)?,
        })
    }

    /// Its linear layers.
    pub(super) fn projections(&self) -> impl Iterator<Item = &ProjectionSource<'a>> {
        let inner = self.inner.as_ref().map(|(projection, _)| projection);
        let layers = self.merging.iter().chain(inner);
        layers.chain([&self.projection])
    }

    /// Reads and packs the weights.
    ///
    /// # Errors
    /// A tensor is not finite or changed while it was read, or memory is short.
    pub(super) fn load<D: Device>(
        &self,
        packer: &mut Packer<'_, D>,
    ) -> Result<ProjectorWeights<D>, LoadError> {
        Ok(ProjectorWeights {
            norm: match &self.norm {
                Some((spec, norm)) => Some((*spec, norm.load(packer)?)),
                None => None,
            },
            merging: match &self.merging {
                Some(merging) => Some(merging.load(packer)?),
                None => None,
            },
            inner: match &self.inner {
                Some((projection, activation)) => {
                    let activation = InnerActivation::Plain(*activation);
                    Some((projection.load(packer)?, activation))
                }
                None => None,
            },
            projection: self.projection.load(packer)?,
            row_width: self.projection.matrices.iter().map(Matrix::rows).sum(),
        })
    }
}

impl<D: Device> ProjectorBuffers<D> {
    /// Reserves the activations of the largest tile of a tower.
    ///
    /// # Errors
    /// Memory is short.
    pub(super) fn new(device: &mut D, spec: &TowerSpec) -> Result<Self, LoadError> {
        let num_tokens = spec.max_num_tokens();
        let mut alloc = |width: usize| {
            let sums = device.alloc_sums(num_tokens, width)?;
            Ok::<_, LoadError>((sums, device.alloc_inputs(num_tokens, width)?))
        };
        Ok(Self {
            merged: alloc(spec.merged_width())?,
            rows: alloc(spec.row_width())?,
            merging: match &spec.projector.merging {
                Some(merging) => Some(alloc(merging.num_outputs())?),
                None => None,
            },
            inner: match &spec.projector.inner {
                Some(inner) => {
                    let width = inner.projection.num_outputs();
                    Some(device.alloc_inputs(num_tokens, width)?)
                }
                None => None,
            },
        })
    }

    /// The rows of joined patches, `[num_tokens, merge_size^2 * hidden_size]`, rounded to bf16.
    pub(super) fn project(
        &mut self,
        device: &mut D,
        ops: D::States,
        weights: &ProjectorWeights<D>,
        (merged, num_tokens): (&[f32], usize),
    ) -> Vec<f32> {
        let (sums, read) = &mut self.merged;
        ops.write_sums(device, merged, sums);
        let norm = match &weights.norm {
            Some((spec, weights)) => norm_of(spec, Some(weights)),
            None => Norm::Identity,
        };
        device.norm(num_tokens, sums, norm, read);
        let read = match (&weights.merging, &mut self.merging) {
            (Some(linear), Some((sums, merged))) => {
                device.project(num_tokens, read, linear, Output::Store, None, sums);
                device.norm(num_tokens, sums, Norm::Identity, merged);
                &*merged
            }
            _ => &*read,
        };
        let read = match (&weights.inner, &mut self.inner) {
            (Some((linear, activation)), Some(inner)) => {
                device.project_activated(num_tokens, read, linear, *activation, None, inner);
                &*inner
            }
            _ => read,
        };
        let (sums, rows) = &mut self.rows;
        let linear = &weights.projection;
        device.project(num_tokens, read, linear, Output::Store, None, sums);
        device.norm(num_tokens, sums, Norm::Identity, rows);
        let mut values = vec![0.0; num_tokens * weights.row_width];
        ops.read_states(device, rows, num_tokens, &mut values);
        values
    }
}
