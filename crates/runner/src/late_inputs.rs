//! The late inputs of recurrences: their projections, found, packed and computed.
//!
//! ```text
//! by channels       gates     second(first(normed))                [m, value_len]
//!                   decays    likewise                             [m, num_decays]
//! selective scan    times     second(norm(first(convolved)))       [m, num_channels]
//!                   keys      keys(convolved)                      [m, 2 * state_dim]
//! ```
//!
//! The results of a first projection, `[m, rank]`, are rounded. On several ranks, what is made of convolved values is a
//! sum over the channels of all.

use super::linear_weights::{NormSource, ProjectionSource, SummedLinear, linears_of};
use super::model_tensors::ModelTensors;
use super::packer::Packer;
use super::probe::{Operation, Probe, Work};
use super::recurrence_share::{LateCut, RecurrenceShare};
use super::residual::{Probed, num_tile_sums};
use super::share::ModelShare;
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
pub(super) enum LateWeights<D: Device> {
    /// Of gates, then of decays, two each.
    LowRank(Vec<Linear<D>>),
    Selected(Box<SelectedWeights<D>>),
}

/// The projections of what a selective scan reads, from all channels of all ranks.
pub(super) struct SelectedWeights<D: Device> {
    /// `[rank, num_channels]`.
    rank: SummedLinear<D>,
    /// The norm of its results, and what is added to the mean square.
    norm: Option<(D::Vector, f32)>,
    /// `[num_channels, rank]`.
    times: Linear<D>,
    /// `[2 * state_dim, num_channels]`.
    keys: SummedLinear<D>,
}

/// Activations, each `[max_num_tokens, width]`.
pub(super) struct LateBuffers<D: Device> {
    sums: D::Sums,
    rounded: D::Inputs,
    /// Gates or times.
    first: D::Sums,
    /// Decays or keys.
    second: D::Sums,
    /// Of a selective scan: the sums of later tiles of its ranks, and of its keys.
    tile_sums: [Vec<D::Sums>; 2],
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

    /// The weights of a rank.
    pub(super) fn share(self, share: &ModelShare, own: &RecurrenceShare) -> Self {
        let projections = self.projections.iter().zip(own.late_cuts());
        Self {
            projections: projections
                .map(|(projection, cut)| {
                    let part = match cut {
                        LateCut::Whole => projection.same_outputs(0..projection.matrices[0].rows()),
                        LateCut::Outputs(len) => projection.same_outputs(own.values(len)),
                        LateCut::Inputs => projection.inputs(&own.mixed(), share),
                    };
                    part.placed(share)
                })
                .collect(),
            form: self.form,
        }
    }

    /// The projections whose inputs are the channels of the recurrence.
    pub(super) fn of_channels(&self) -> impl Iterator<Item = &ProjectionSource<'a>> {
        let selected = match &self.form {
            FormSource::LowRank => None,
            FormSource::Selected(_) => Some([&self.projections[0], &self.projections[2]]),
        };
        selected.into_iter().flatten()
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
        let projections = &self.projections;
        Ok(match &self.form {
            FormSource::LowRank => {
                let linears = projections.iter().map(|it| it.load(packer));
                LateWeights::LowRank(linears.collect::<Result<_, _>>()?)
            }
            FormSource::Selected(norm) => LateWeights::Selected(Box::new(SelectedWeights {
                rank: projections[0].load_summed(packer)?,
                norm: match norm {
                    Some(norm) => Some((norm.0.load(packer)?.weight, norm.1)),
                    None => None,
                },
                times: projections[1].load(packer)?,
                keys: projections[2].load_summed(packer)?,
            })),
        })
    }
}

impl<D: Device> LateWeights<D> {
    /// In the order in which they were packed.
    pub(super) fn linears(&self) -> impl Iterator<Item = &Linear<D>> {
        let linears: Vec<_> = match self {
            Self::LowRank(linears) => linears.iter().collect(),
            Self::Selected(of) => linears_of(&of.rank)
                .chain([&of.times])
                .chain(linears_of(&of.keys))
                .collect(),
        };
        linears.into_iter()
    }

    /// Whether they read convolved values.
    pub(super) fn are_selected(&self) -> bool {
        matches!(self, Self::Selected(_))
    }
}

impl<D: Device> LateBuffers<D> {
    /// Reserves `max_rows` rows, for sums over channels in so many tiles.
    ///
    /// # Errors
    /// Memory is short.
    pub(super) fn new(
        device: &mut D,
        spec: &LateInputsSpec,
        max_rows: usize,
        num_tiles: usize,
    ) -> Result<Self, LoadError> {
        let [first, second] = spec.widths();
        let mut tile_sums = [Vec::new(), Vec::new()];
        if let LateInputsSpec::Selected { .. } = spec {
            for _ in 0..num_tile_sums(num_tiles) {
                tile_sums[0].push(device.alloc_sums(max_rows, spec.rank())?);
                tile_sums[1].push(device.alloc_sums(max_rows, second)?);
            }
        }
        Ok(Self {
            sums: device.alloc_sums(max_rows, spec.rank())?,
            rounded: device.alloc_inputs(max_rows, spec.rank())?,
            first: device.alloc_sums(max_rows, first)?,
            second: device.alloc_sums(max_rows, second)?,
            tile_sums,
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
            tile_sums: [of_rank, of_keys],
        } = self;
        let mut widen =
            |run: &mut Probed<'_, D, P>, sums: &D::Sums, norm, linear: &Linear<D>, out| {
                run.device.norm(num_rows, sums, norm, rounded);
                run.probe.ended(Operation::Norm, || {
                    Work::elements(num_rows, linear.matrix.k(), 6, 4)
                });
                run.project_qkv(num_rows, rounded, linear, out);
            };
        match weights {
            LateWeights::LowRank(linears) => {
                for (pair, out) in linears.chunks_exact(2).zip([&mut *first, &mut *second]) {
                    run.project_qkv(num_rows, x, &pair[0], sums);
                    widen(run, sums, Norm::Identity, &pair[1], out);
                }
                LateInputs::LowRank {
                    gates: first,
                    decays: second,
                }
            }
            LateWeights::Selected(of) => {
                let norm = match &of.norm {
                    Some((weight, eps)) => Norm::Rms { weight, eps: *eps },
                    None => Norm::Identity,
                };
                run.sum_late(num_rows, x, &of.rank, sums, of_rank);
                widen(run, sums, norm, &of.times, &mut *first);
                run.sum_late(num_rows, x, &of.keys, second, of_keys);
                LateInputs::Selected {
                    times: first,
                    keys: second,
                }
            }
        }
    }
}
