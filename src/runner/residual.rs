//! The residual stream, and what reads from it and adds to it.

use super::probe::{Operation, Probe, Work};
use super::spec::{ModelSpec, NormKind, NormSpec};
use super::weights::NormWeights;
use crate::base::LoadError;
use crate::device::{
    Activation, AdaptedRows, AdapterRun, Device, EmbeddingTable, Experts, Linear, Norm, Output,
    Routing,
};

/// The hidden states of a step, and their normalised form, which the next projection reads.
///
/// Where a projection on this rank gives the whole sum, it adds to the residual stream itself, unless its result is
/// normalised first. Otherwise its part is summed over the ranks first, and added together with the norm.
pub(super) struct ResidualStream<D: Device> {
    hidden_size: usize,
    embedding_scale: f32,
    norm: NormSpec,
    has_whole_sums: bool,
    hidden: D::Sums,
    normed: D::Inputs,
    /// The result of a block that is not added at once: this rank's part of a sum, or what is normalised first.
    result: Option<D::Sums>,
}

/// A device, the profiling probe, and the rows that have adapters.
pub(super) struct Probed<'a, D, P> {
    pub device: &'a mut D,
    pub probe: &'a mut P,
    pub adapters: &'a [AdapterRun],
}

impl<D: Device> ResidualStream<D> {
    /// Reserves `[max_rows, hidden_size]`.
    pub fn new(device: &mut D, max_rows: usize, spec: &ModelSpec) -> Result<Self, LoadError> {
        let hidden_size = spec.hidden_size;
        let has_whole_sums = device.has_whole_sums();
        let has_after = spec.layers.iter().any(|layer| layer.norms.has_after());
        let result = match has_whole_sums && !has_after {
            true => None,
            false => Some(device.alloc_sums(max_rows, hidden_size)?),
        };
        Ok(Self {
            hidden_size,
            embedding_scale: spec.embedding_scale,
            norm: spec.norm,
            has_whole_sums,
            hidden: device.alloc_sums(max_rows, hidden_size)?,
            normed: device.alloc_inputs(max_rows, hidden_size)?,
            result,
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

    /// Starts with the embeddings of a step's tokens, and of their positions.
    pub fn embed<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        step: &D::Step<'_>,
        num_rows: usize,
        table: EmbeddingTable<'_, D>,
        positions: Option<&D::Embedding>,
    ) {
        run.device
            .embed(step, table, self.embedding_scale, &mut self.hidden);
        if let Some(positions) = positions {
            run.device.add_positions(step, positions, &mut self.hidden);
        }
        run.probe.ended(Operation::Embed, || {
            Work::elements(num_rows, self.hidden_size, 6, 0)
        });
    }

    /// `normed = norm(hidden)`; without a norm, the residual stream itself.
    pub fn norm<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        num_rows: usize,
        norm: Option<&NormWeights<D>>,
    ) {
        let norm = norm_of(&self.norm, norm);
        run.device
            .norm(num_rows, &self.hidden, norm, &mut self.normed);
        self.norm_ended(run, num_rows);
    }

    /// `hidden += after(linear(x)); normed = next(hidden)`. The projection is `operation`.
    pub fn add<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        operation: Operation,
        num_rows: usize,
        (x, linear): (&D::Inputs, &Linear<D>),
        after: Option<&NormWeights<D>>,
        next: Option<&NormWeights<D>>,
    ) {
        let work = || Work::product(num_rows, &linear.matrix, true);
        let result = match &mut self.result {
            Some(result) if !self.has_whole_sums || after.is_some() => result,
            _ => {
                run.device
                    .project(num_rows, x, linear, Output::Add, &mut self.hidden);
                run.add_adapters(x, linear, &mut self.hidden);
                run.probe.ended(operation, work);
                return self.norm(run, num_rows, next);
            }
        };
        run.device
            .project(num_rows, x, linear, Output::Store, result);
        run.add_adapters(x, linear, result);
        run.device.all_reduce(num_rows, result);
        run.probe.ended(operation, work);
        self.add_result(run, num_rows, after, next);
    }

    /// `hidden += o(attended) + down(inner); normed = next(hidden)`, of blocks side by side.
    pub fn add_both<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        num_rows: usize,
        (attended, o): (&D::Inputs, &Linear<D>),
        (inner, down): (&D::Inputs, &Linear<D>),
        next: Option<&NormWeights<D>>,
    ) {
        let work = |linear: &Linear<D>| Work::product(num_rows, &linear.matrix, true);
        let (sums, first) = match &mut self.result {
            Some(result) if !self.has_whole_sums => (result, Output::Store),
            _ => (&mut self.hidden, Output::Add),
        };
        run.device.project(num_rows, attended, o, first, sums);
        run.add_adapters(attended, o, sums);
        run.probe.ended(Operation::O, || work(o));
        run.device.project(num_rows, inner, down, Output::Add, sums);
        run.add_adapters(inner, down, sums);
        if self.has_whole_sums {
            run.probe.ended(Operation::Down, || work(down));
            return self.norm(run, num_rows, next);
        }
        run.device.all_reduce(num_rows, sums);
        run.probe.ended(Operation::Down, || work(down));
        self.add_result(run, num_rows, None, next);
    }

    /// `hidden += after(experts(normed)); normed = next(hidden)`. The experts of each row were chosen.
    #[allow(clippy::too_many_arguments, reason = "each is an operand")]
    pub fn add_experts<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        num_rows: usize,
        experts: &Experts<D>,
        rows: &mut D::ExpertRows,
        num_chosen: usize,
        after: Option<&NormWeights<D>>,
        next: Option<&NormWeights<D>>,
    ) {
        let normed = &self.normed;
        let is_added = match &mut self.result {
            Some(result) if !self.has_whole_sums || after.is_some() => {
                run.device
                    .mix_experts(num_rows, normed, experts, rows, Output::Store, result);
                run.device.all_reduce(num_rows, result);
                false
            }
            _ => {
                let hidden = &mut self.hidden;
                run.device
                    .mix_experts(num_rows, normed, experts, rows, Output::Add, hidden);
                true
            }
        };
        let device = &*run.device;
        run.probe.ended(Operation::Experts, || {
            let num_touched = device.num_touched_experts(rows);
            Work::experts(num_rows, experts, num_touched, num_chosen)
        });
        if is_added {
            return self.norm(run, num_rows, next);
        }
        self.add_result(run, num_rows, after, next);
    }

    /// `hidden += after(result); normed = next(hidden)`, for a block that was not added at once.
    fn add_result<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        num_rows: usize,
        after: Option<&NormWeights<D>>,
        next: Option<&NormWeights<D>>,
    ) {
        let Some(result) = &self.result else {
            return self.norm(run, num_rows, next);
        };
        if after.is_some() {
            let after = norm_of(&self.norm, after);
            run.device
                .add_normed(num_rows, result, after, &mut self.hidden);
            return self.norm(run, num_rows, next);
        }
        let next = norm_of(&self.norm, next);
        run.device
            .add_norm(num_rows, result, &mut self.hidden, next, &mut self.normed);
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

impl<'a, D: Device, P: Probe> Probed<'a, D, P> {
    /// Queries, keys and values: `out = linear(x)`.
    pub fn project_qkv(
        &mut self,
        num_rows: usize,
        x: &D::Inputs,
        linear: &Linear<D>,
        out: &mut D::Sums,
    ) {
        self.device.project(num_rows, x, linear, Output::Store, out);
        self.add_adapters(x, linear, out);
        self.probe.ended(Operation::Qkv, || {
            Work::product(num_rows, &linear.matrix, false)
        });
    }

    /// Chooses the experts of rows: `rows = route(router(x))`.
    pub fn route(
        &mut self,
        num_rows: usize,
        x: &D::Inputs,
        router: &Linear<D>,
        routing: &Routing,
        logits: &mut D::Sums,
        rows: &mut D::ExpertRows,
    ) {
        self.device
            .project(num_rows, x, router, Output::Store, logits);
        self.device.route(num_rows, logits, routing, rows);
        self.probe.ended(Operation::Router, || {
            Work::product(num_rows, &router.matrix, false)
        });
    }

    /// The input of the down projection: `out = activation(gate) * up`.
    pub fn project_gated(
        &mut self,
        num_rows: usize,
        x: &D::Inputs,
        linear: &Linear<D>,
        activation: Activation,
        out: &mut D::Inputs,
    ) {
        match self.adapted_rows(linear) {
            None => self
                .device
                .project_gated(num_rows, x, linear, activation, out),
            Some(adapted) => self
                .device
                .project_gated_adapted(num_rows, x, linear, activation, adapted, out),
        }
        self.probe.ended(Operation::GateUp, || {
            Work::gated_product(num_rows, &linear.matrix)
        });
    }

    /// The input of the down projection: `out = activation(linear(x))`.
    pub fn project_activated(
        &mut self,
        num_rows: usize,
        x: &D::Inputs,
        linear: &Linear<D>,
        activation: Activation,
        out: &mut D::Inputs,
    ) {
        match self.adapted_rows(linear) {
            None => self
                .device
                .project_activated(num_rows, x, linear, activation, out),
            Some(adapted) => self
                .device
                .project_activated_adapted(num_rows, x, linear, activation, adapted, out),
        }
        self.probe.ended(Operation::GateUp, || {
            Work::product(num_rows, &linear.matrix, false)
        });
    }

    /// Adds what the adapters of some rows make of `x` to a projection of it.
    fn add_adapters(&mut self, x: &D::Inputs, linear: &Linear<D>, out: &mut D::Sums) {
        if let Some(adapted) = self.adapted_rows(linear) {
            self.device.add_adapters(x, adapted, out);
        }
    }

    /// The rows of a projection that have adapters, if there are any.
    fn adapted_rows(&self, linear: &Linear<D>) -> Option<AdaptedRows<'a>> {
        let runs = self.adapters;
        let place = linear.place.filter(|_| !runs.is_empty())?;
        Some(AdaptedRows { runs, place })
    }
}

/// A norm of the residual stream.
fn norm_of<'a, D: Device>(
    spec: &NormSpec,
    weights: Option<&'a NormWeights<D>>,
) -> Norm<'a, D::Vector> {
    let Some(NormWeights { weight, bias }) = weights else {
        return Norm::Identity;
    };
    match spec.kind {
        NormKind::Rms => Norm::Rms {
            weight,
            eps: spec.eps,
        },
        NormKind::Layer { .. } => Norm::Layer {
            weight,
            bias: bias.as_ref(),
            eps: spec.eps,
        },
    }
}
