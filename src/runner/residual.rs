//! The residual stream, and what reads from it and adds to it.

use super::probe::{Operation, Probe, Work};
use crate::base::LoadError;
use crate::device::{Device, EmbeddingTable, Linear, Norm, Output};

/// The hidden states of a step, and their normalised form, which the next projection reads.
///
/// Where a projection on this rank gives the whole sum, it adds to the residual stream itself. Otherwise its
/// part is summed over the ranks first, and added together with the norm.
pub(super) struct ResidualStream<D: Device> {
    hidden_size: usize,
    rms_norm_eps: f32,
    hidden: D::Sums,
    normed: D::Inputs,
    /// This rank's part of a sum, if it is not the whole.
    partial: Option<D::Sums>,
}

/// A device and the profiling probe.
pub(super) struct Probed<'a, D, P> {
    pub device: &'a mut D,
    pub probe: &'a mut P,
}

impl<D: Device> ResidualStream<D> {
    /// Reserves `[max_rows, hidden_size]`.
    pub fn new(
        device: &mut D,
        max_rows: usize,
        hidden_size: usize,
        rms_norm_eps: f32,
    ) -> Result<Self, LoadError> {
        let partial = match device.has_whole_sums() {
            true => None,
            false => Some(device.alloc_sums(max_rows, hidden_size)?),
        };
        Ok(Self {
            hidden_size,
            rms_norm_eps,
            hidden: device.alloc_sums(max_rows, hidden_size)?,
            normed: device.alloc_inputs(max_rows, hidden_size)?,
            partial,
        })
    }

    /// The rows as they were normalised last.
    pub fn normed(&self) -> &D::Inputs {
        &self.normed
    }

    /// The rows as they were normalised last, mutably.
    pub fn normed_mut(&mut self) -> &mut D::Inputs {
        &mut self.normed
    }

    /// Starts with the embeddings of a step's tokens.
    pub fn embed<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        step: &D::Step<'_>,
        num_rows: usize,
        table: EmbeddingTable<'_, D>,
    ) {
        run.device.embed(step, table, &mut self.hidden);
        run.probe.ended(Operation::Embed, || {
            Work::elements(num_rows, self.hidden_size, 6, 0)
        });
    }

    /// `normed = norm(hidden)`.
    pub fn norm<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        num_rows: usize,
        weight: &D::Vector,
    ) {
        let norm = Norm {
            weight,
            eps: self.rms_norm_eps,
        };
        run.device
            .rms_norm(num_rows, &self.hidden, norm, &mut self.normed);
        self.norm_ended(run, num_rows);
    }

    /// `hidden += linear(x); normed = norm(hidden)`. The projection is `operation`.
    pub fn add<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        operation: Operation,
        num_rows: usize,
        x: &D::Inputs,
        linear: &Linear<D>,
        weight: &D::Vector,
    ) {
        let work = || Work::product(num_rows, &linear.matrix, true);
        let Some(partial) = &mut self.partial else {
            run.device
                .project(num_rows, x, linear, Output::Add, &mut self.hidden);
            run.probe.ended(operation, work);
            return self.norm(run, num_rows, weight);
        };
        run.device
            .project(num_rows, x, linear, Output::Store, partial);
        run.device.all_reduce(num_rows, partial);
        run.probe.ended(operation, work);
        let norm = Norm {
            weight,
            eps: self.rms_norm_eps,
        };
        run.device
            .add_rms_norm(num_rows, partial, &mut self.hidden, norm, &mut self.normed);
        self.norm_ended(run, num_rows);
    }

    /// Keeps a step's kept rows, and those of `attended`.
    pub fn keep_rows(&mut self, device: &mut D, step: &D::Step<'_>, attended: &mut D::Inputs) {
        device.keep_rows(step, &mut self.hidden, attended);
    }

    fn norm_ended<P: Probe>(&self, run: &mut Probed<'_, D, P>, num_rows: usize) {
        // f32 in, bf16 out.
        run.probe.ended(Operation::Norm, || {
            Work::elements(num_rows, self.hidden_size, 6, 4)
        });
    }
}

impl<D: Device, P: Probe> Probed<'_, D, P> {
    /// Queries, keys and values: `out = linear(x)`.
    pub fn project_qkv(
        &mut self,
        num_rows: usize,
        x: &D::Inputs,
        linear: &Linear<D>,
        out: &mut D::Sums,
    ) {
        self.device.project(num_rows, x, linear, Output::Store, out);
        self.probe.ended(Operation::Qkv, || {
            Work::product(num_rows, &linear.matrix, false)
        });
    }

    /// The input of the down projection: `out = silu(gate) * up`.
    pub fn project_gated(
        &mut self,
        num_rows: usize,
        x: &D::Inputs,
        linear: &Linear<D>,
        out: &mut D::Inputs,
    ) {
        self.device.project_gated(num_rows, x, linear, out);
        self.probe.ended(Operation::GateUp, || {
            Work::gated_product(num_rows, &linear.matrix)
        });
    }
}
