//! The late inputs of recurrences: their projections, found, packed and computed.
//!
//! ```text
//! by channels       gates     second(first(normed))                [m, value_len]
//!                   decays    likewise                             [m, num_decays]
//! selective scan    times     second(norm(first(convolved)))       [m, num_channels]
//!                   keys      keys(convolved)                      [m, 2 * state_dim]
//! ```
//!
//! The results of a first projection, `[m, rank]`, are rounded.

use super::linear_weights::{NormSource, ProjectionSource};
use super::model_tensors::ModelTensors;
use super::packer::Packer;
use super::probe::{Operation, Probe, Work};
use super::residual::Probed;
use super::spec::{LateInputsSpec, Module, Projection, TimeNorm};
use inflight_base::LoadError;
use inflight_device::{Device, LateInputs, Linear, Norm, PackedWeights};

/// The projections of a layer, not yet read.
pub(super) struct LateSource<'a> {
    /// In the order of their spec.
    projections: Vec<ProjectionSource<'a>>,
    form: FormSource<'a>,
}

enum FormSource<'a> {
    LowRank,
    /// With the norm of times, and what is added to its mean square.
    Selected(Option<Box<(NormSource<'a>, f32)>>),
}

/// The projections of a layer.
pub(super) struct LateWeights<D: Device> {
    linears: Vec<Linear<D>>,
    form: FormWeights<D>,
}

enum FormWeights<D: Device> {
    LowRank,
    Selected(Option<(D::Vector, f32)>),
}

/// Activations, each `[max_num_tokens, width]`.
pub(super) struct LateBuffers<D: Device> {
    sums: D::Sums,
    rounded: D::Inputs,
    /// Gates or times.
    first: D::Sums,
    /// Decays or keys.
    second: D::Sums,
}

/// The widths of a row: of all sums and all inputs.
pub(super) fn late_widths(spec: &LateInputsSpec) -> [usize; 2] {
    let rank = spec.rank();
    let [first, second] = spec.widths();
    [rank + first + second, rank]
}

impl<'a> LateSource<'a> {
    /// Finds the weights of a layer; `find` finds a projection.
    ///
    /// # Errors
    /// As `find`, or another tensor is missing, or has another shape or a type that is not supported.
    pub(super) fn find(
        tensors: &ModelTensors<'a>,
        layer: usize,
        spec: &'a LateInputsSpec,
        find: impl Fn(&'a Projection) -> Result<ProjectionSource<'a>, LoadError>,
    ) -> Result<Self, LoadError> {
        let projections = spec.projections().into_iter().map(find);
        Ok(Self {
            projections: projections.collect::<Result<_, _>>()?,
            form: match *spec {
                LateInputsSpec::LowRank { .. } => FormSource::LowRank,
                LateInputsSpec::Selected { time_norm, .. } => {
                    FormSource::Selected(match time_norm {
                        Some(TimeNorm { module, eps }) => {
                            let norm = match module {
                                Some(name) => {
                                    let module = Module::of_layer(layer, name);
                                    NormSource::of_weights(vec![tensors.norm(module, spec.rank())?])
                                }
                                None => NormSource::of_ones(spec.rank()),
                            };
                            Some(Box::new((norm, eps)))
                        }
                        None => None,
                    })
                }
            },
        })
    }

    pub(super) fn projections(&self) -> impl Iterator<Item = &ProjectionSource<'a>> {
        self.projections.iter()
    }

    /// Packs the weights.
    ///
    /// # Errors
    /// They cannot be read or are not finite, or memory is short.
    pub(super) fn load<D: Device>(
        &self,
        packer: &mut Packer<'_, D>,
    ) -> Result<LateWeights<D>, LoadError> {
        let projections = self.projections.iter();
        Ok(LateWeights {
            linears: projections
                .map(|projection| projection.load(packer))
                .collect::<Result<_, _>>()?,
            form: match &self.form {
                FormSource::LowRank => FormWeights::LowRank,
                FormSource::Selected(norm) => FormWeights::Selected(match norm {
                    Some(norm) => Some((norm.0.load(packer)?.weight, norm.1)),
                    None => None,
                }),
            },
        })
    }
}

impl<D: Device> LateWeights<D> {
    /// In the order in which they were packed.
    pub(super) fn linears(&self) -> impl Iterator<Item = &Linear<D>> {
        self.linears.iter()
    }

    /// Whether they read convolved values.
    pub(super) fn are_selected(&self) -> bool {
        matches!(self.form, FormWeights::Selected(_))
    }
}

impl<D: Device> LateBuffers<D> {
    /// Reserves `max_rows` rows.
    ///
    /// # Errors
    /// Memory is short.
    pub(super) fn new(
        device: &mut D,
        spec: &LateInputsSpec,
        max_rows: usize,
    ) -> Result<Self, LoadError> {
        let [first, second] = spec.widths();
        Ok(Self {
            sums: device.alloc_sums(max_rows, spec.rank())?,
            rounded: device.alloc_inputs(max_rows, spec.rank())?,
            first: device.alloc_sums(max_rows, first)?,
            second: device.alloc_sums(max_rows, second)?,
        })
    }

    /// Projects `x`, the layer's normalised inputs or its convolved values.
    pub(super) fn project<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        num_rows: usize,
        x: &D::Inputs,
        weights: &LateWeights<D>,
    ) -> LateInputs<'_, D> {
        let Self {
            sums,
            rounded,
            first,
            second,
        } = self;
        let mut by_rank = |run: &mut Probed<'_, D, P>, pair: &[Linear<D>], norm, out| {
            run.project_qkv(num_rows, x, &pair[0], sums);
            run.device.norm(num_rows, sums, norm, rounded);
            run.probe.ended(Operation::Norm, || {
                Work::elements(num_rows, pair[1].matrix.k(), 6, 4)
            });
            run.project_qkv(num_rows, rounded, &pair[1], out);
        };
        let linears = &weights.linears[..];
        match &weights.form {
            FormWeights::LowRank => {
                by_rank(run, &linears[..2], Norm::Identity, &mut *first);
                by_rank(run, &linears[2..], Norm::Identity, &mut *second);
                LateInputs::LowRank {
                    gates: first,
                    decays: second,
                }
            }
            FormWeights::Selected(norm) => {
                let norm = match norm {
                    Some((weight, eps)) => Norm::Rms { weight, eps: *eps },
                    None => Norm::Identity,
                };
                by_rank(run, &linears[..2], norm, &mut *first);
                run.project_qkv(num_rows, x, &linears[2], second);
                LateInputs::Selected {
                    times: first,
                    keys: second,
                }
            }
        }
    }
}
