//! The late inputs of recurrences: their projections, found, packed and computed.
//!
//! ```text
//! gates     second(first(normed))      [m, value_len]
//! decays    likewise                   [m, num_decays]
//! ```
//!
//! The results of the first projection, `[m, rank]`, are rounded.

use super::linear_weights::ProjectionSource;
use super::packer::Packer;
use super::probe::{Operation, Probe, Work};
use super::residual::Probed;
use super::spec::{LateInputsSpec, Projection};
use inflight_base::LoadError;
use inflight_device::{Device, LateInputs, Linear, Norm, PackedWeights};

/// The projections of a layer, not yet read.
pub(super) struct LateSource<'a> {
    gates: [ProjectionSource<'a>; 2],
    decays: [ProjectionSource<'a>; 2],
}

/// The projections of a layer.
pub(super) struct LateWeights<D: Device> {
    gates: [Linear<D>; 2],
    decays: [Linear<D>; 2],
}

/// Activations, each `[max_num_tokens, width]`.
pub(super) struct LateBuffers<D: Device> {
    sums: D::Sums,
    rounded: D::Inputs,
    gates: D::Sums,
    decays: D::Sums,
}

/// The widths of a row: of all sums and all inputs.
pub(super) fn late_widths(spec: &LateInputsSpec) -> [usize; 2] {
    let rank = spec.rank();
    let [gates, decays] = [&spec.gates, &spec.decays].map(|[_, second]| second.num_outputs());
    [rank + gates + decays, rank]
}

impl<'a> LateSource<'a> {
    /// Finds the projections; `find` finds one.
    ///
    /// # Errors
    /// As `find`.
    pub(super) fn find(
        spec: &'a LateInputsSpec,
        find: impl Fn(&'a Projection) -> Result<ProjectionSource<'a>, LoadError>,
    ) -> Result<Self, LoadError> {
        let both = |[first, second]: &'a [Projection; 2]| Ok([find(first)?, find(second)?]);
        Ok(Self {
            gates: both(&spec.gates)?,
            decays: both(&spec.decays)?,
        })
    }

    pub(super) fn projections(&self) -> impl Iterator<Item = &ProjectionSource<'a>> {
        self.gates.iter().chain(&self.decays)
    }

    /// Packs the weights.
    ///
    /// # Errors
    /// They cannot be read or are not finite, or memory is short.
    pub(super) fn load<D: Device>(
        &self,
        packer: &mut Packer<'_, D>,
    ) -> Result<LateWeights<D>, LoadError> {
        let mut both = |[first, second]: &[ProjectionSource<'a>; 2]| {
            Ok::<_, LoadError>([first.load(packer)?, second.load(packer)?])
        };
        Ok(LateWeights {
            gates: both(&self.gates)?,
            decays: both(&self.decays)?,
        })
    }
}

impl<D: Device> LateWeights<D> {
    /// In the order in which they were packed.
    pub(super) fn linears(&self) -> impl Iterator<Item = &Linear<D>> {
        self.gates.iter().chain(&self.decays)
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
        let width = |[_, second]: &[Projection; 2]| second.num_outputs();
        Ok(Self {
            sums: device.alloc_sums(max_rows, spec.rank())?,
            rounded: device.alloc_inputs(max_rows, spec.rank())?,
            gates: device.alloc_sums(max_rows, width(&spec.gates))?,
            decays: device.alloc_sums(max_rows, width(&spec.decays))?,
        })
    }

    /// Projects `normed`.
    pub(super) fn project<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        num_rows: usize,
        normed: &D::Inputs,
        weights: &LateWeights<D>,
    ) -> LateInputs<'_, D> {
        let Self {
            sums,
            rounded,
            gates,
            decays,
        } = self;
        for ([first, second], out) in [
            (&weights.gates, &mut *gates),
            (&weights.decays, &mut *decays),
        ] {
            run.project_qkv(num_rows, normed, first, sums);
            run.device.norm(num_rows, sums, Norm::Identity, rounded);
            run.probe.ended(Operation::Norm, || {
                Work::elements(num_rows, second.matrix.k(), 6, 0)
            });
            run.project_qkv(num_rows, rounded, second, out);
        }
        LateInputs { gates, decays }
    }
}
