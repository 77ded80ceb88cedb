//! Several residual streams (AltUp), low-rank blocks beside attention (LAuReL), and gates that are mostly 0.
//!
//! ```text
//! step    others[i] = magnitudes of hidden(input[i](hidden))
//! layer   predict hidden and others;    normed = norm(hidden);    attention;    the blocks of end_layer
//! step    hidden = mean of hidden and magnitudes of hidden(output[i](others[i]))
//! ```

use super::feed_forward_weights::{DenseWeights, FeedForwardWeights};
use super::layer_inputs::LayerInputs;
use super::linear_weights::NormWeights;
use super::probe::{Operation, Probe, Work};
use super::residual::{Probed, ResidualStream};
use super::spec::{ModelSpec, Norms};
use super::stream_weights::{LayerStreams, StreamsWeights};
use super::weights::Layer;
use inflight_base::LoadError;
use inflight_device::{Device, InnerActivation, LayerInputOps, Norm, PackedWeights, StreamCoefs};

/// Memory for the streams of a step, and the operations.
pub(super) struct Streams<D: Device> {
    ops: D::LayerInputs,
    /// All but the first one, `[max_num_tokens, hidden_size]` each.
    others: Vec<D::Sums>,
    /// The prediction of the first one, likewise.
    predicted: D::Sums,
    /// A stream as a projection reads it, likewise.
    rounded: D::Inputs,
    /// `[max_num_tokens, num]`.
    routed: D::Sums,
    /// `[max_num_tokens, rank]`.
    left: D::Sums,
    /// The same, as a projection reads it.
    rounded_left: D::Inputs,
    /// Gates and ups of layers with a cutoff, `[max_num_tokens, 2 * width]`, by widths of blocks.
    gate_up: Vec<(usize, D::Sums)>,
}

/// The widths of a row of all sums, and of all inputs, that streams take.
pub(super) fn stream_widths(model: &ModelSpec) -> [usize; 2] {
    let Some(spec) = &model.streams else {
        return [0; 2];
    };
    let rank = spec.right.num_inputs;
    let gate_up: usize = sparse_widths(model).iter().map(|width| 2 * width).sum();
    [
        spec.num * (model.hidden_size + 1) + rank + gate_up,
        model.hidden_size + rank,
    ]
}

/// The widths of blocks with a cutoff, each once.
fn sparse_widths(model: &ModelSpec) -> Vec<usize> {
    let sparse = model.layers.iter().filter(|it| it.gate_cutoff.is_some());
    let mut widths: Vec<_> = sparse.map(|layer| layer.feed_forward.width()).collect();
    widths.sort_unstable();
    widths.dedup();
    widths
}

impl<D: Device> Streams<D> {
    /// Reserves memory for `max_rows` tokens. `None` if the model has one stream, or the device has no operations for
    /// several, which [`LayerInputs`] has refused.
    ///
    /// # Errors
    /// Memory is short.
    pub(super) fn new(
        device: &mut D,
        model: &ModelSpec,
        max_rows: usize,
    ) -> Result<Option<Self>, LoadError> {
        let Some((spec, ops)) = model.streams.as_ref().zip(D::LAYER_INPUTS) else {
            return Ok(None);
        };
        let (hidden, rank) = (model.hidden_size, spec.right.num_inputs);
        let others = (1..spec.num).map(|_| device.alloc_sums(max_rows, hidden));
        let others = others.collect::<Result<_, _>>()?;
        let gate_up = sparse_widths(model).into_iter().map(|width| {
            let sums = device.alloc_sums(max_rows, 2 * width)?;
            Ok::<_, LoadError>((width, sums))
        });
        Ok(Some(Self {
            ops,
            others,
            gate_up: gate_up.collect::<Result<_, _>>()?,
            predicted: device.alloc_sums(max_rows, hidden)?,
            rounded: device.alloc_inputs(max_rows, hidden)?,
            routed: device.alloc_sums(max_rows, spec.num)?,
            left: device.alloc_sums(max_rows, rank)?,
            rounded_left: device.alloc_inputs(max_rows, rank)?,
        }))
    }

    /// Makes the other streams of embedded tokens, which are the hidden rows of `residual`, and its normed rows,
    /// rounded.
    pub(super) fn begin<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        num_rows: usize,
        residual: &ResidualStream<D>,
        weights: &StreamsWeights<D>,
    ) {
        for (other, linear) in self.others.iter_mut().zip(&weights.inputs) {
            run.project_qkv(num_rows, residual.normed(), linear, other);
            self.ops
                .match_magnitudes(run.device, num_rows, residual.hidden(), other);
        }
        run.probe.ended(Operation::Embed, Work::default);
    }

    /// Begins a layer: predicts the streams, and leaves what attention reads.
    pub(super) fn begin_layer<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        num_rows: usize,
        residual: &mut ResidualStream<D>,
        layer: &LayerStreams<D>,
        first: Option<&NormWeights<D>>,
    ) {
        residual.norm(run, num_rows, Some(&layer.router_norm));
        run.project_qkv(num_rows, residual.normed(), &layer.router, &mut self.routed);
        let coefs = StreamCoefs {
            routed: &self.routed,
            weights: &layer.prediction,
        };
        let (others, predicted) = (&mut self.others, &mut self.predicted);
        let hidden = residual.hidden_mut();
        self.ops
            .predict_streams(run.device, num_rows, coefs, hidden, others, predicted);
        residual.norm(run, num_rows, first);
    }

    /// Keeps the rows of a step's kept rows.
    pub(super) fn keep_rows(&mut self, device: &mut D, step: &D::Step<'_>) {
        for rows in self.others.iter_mut().chain([&mut self.predicted]) {
            self.ops.keep_rows(device, step, rows);
        }
    }

    /// Ends layer `index` with what its attention has computed.
    #[allow(clippy::too_many_arguments, reason = "each is an operand")]
    pub(super) fn end_layer<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        num_rows: usize,
        residual: &mut ResidualStream<D>,
        (index, layer, cutoff): (usize, &Layer<D>, Option<f32>),
        attended: &D::Inputs,
        inner: &mut D::Inputs,
        layer_inputs: Option<&mut LayerInputs<D>>,
    ) {
        let (
            Some(streams),
            Some(o),
            Some(FeedForwardWeights::Dense(dense)),
            Norms::Sequential {
                attention,
                feed_forward,
            },
        ) = (&layer.streams, &layer.o, &layer.feed_forward, &layer.norms)
        else {
            unreachable!("layers with streams have norms around two blocks")
        };
        let (ops, rows) = (self.ops, num_rows);
        // The normalised input may have been moved.
        residual.norm(run, rows, attention.before.as_ref());
        run.project_qkv(rows, residual.normed(), &streams.left, &mut self.left);
        run.device
            .norm(rows, &self.left, Norm::Identity, &mut self.rounded_left);
        residual.add_sums(run, rows, &self.predicted, attention.before.as_ref(), None);
        let right = (&self.rounded_left, &streams.right);
        let laurel_norm = Some(&streams.laurel_norm);
        residual.add(run, Operation::O, rows, right, laurel_norm, None);
        let o = (attended, o);
        residual.add(run, Operation::O, rows, o, attention.after.as_ref(), None);
        let scale = 0.5_f32.sqrt();
        residual.scale(run, rows, scale, feed_forward.before.as_ref());
        self.feed_forward_up(run, rows, residual.normed(), (dense, cutoff), inner);
        let down = (&*inner, &dense.down);
        let after = feed_forward.after.as_ref();
        let router_norm = Some(&streams.router_norm);
        residual.add(run, Operation::Down, rows, down, after, router_norm);
        run.project_qkv(rows, residual.normed(), &streams.router, &mut self.routed);
        let coefs = StreamCoefs {
            routed: &self.routed,
            weights: &streams.correction,
        };
        let (predicted, others) = (&self.predicted, &mut self.others);
        ops.correct_streams(
            run.device,
            rows,
            coefs,
            predicted,
            residual.hidden_mut(),
            others,
        );
        match &streams.output_scale {
            Some(scale) => {
                ops.scale_columns(
                    run.device,
                    rows,
                    residual.hidden(),
                    scale,
                    &mut self.rounded,
                );
            }
            None => {
                let rounded = &mut self.rounded;
                run.device
                    .norm(rows, residual.hidden(), Norm::Identity, rounded);
            }
        }
        if let Some((layer_inputs, block)) = layer_inputs.zip(layer.input_block.as_ref()) {
            layer_inputs.add_to_streams(run, rows, (residual, others), &self.rounded, index, block);
        }
    }

    /// The input of the down projection.
    fn feed_forward_up<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        num_rows: usize,
        x: &D::Inputs,
        (weights, cutoff): (&DenseWeights<D>, Option<f32>),
        inner: &mut D::Inputs,
    ) {
        let DenseWeights { up, activation, .. } = weights;
        let (Some(num_deviations), InnerActivation::Gated(gated)) = (cutoff, *activation) else {
            return run.project_activated(num_rows, x, up, *activation, inner);
        };
        let width = up.matrix.n() / 2;
        let mut gate_up = self.gate_up.iter_mut();
        let Some((_, gate_up)) = gate_up.find(|(known, _)| *known == width) else {
            unreachable!("it was reserved for all widths")
        };
        run.project_qkv(num_rows, x, up, gate_up);
        self.ops
            .gate_sparsely(run.device, num_rows, gated, num_deviations, gate_up, inner);
        run.probe
            .ended(Operation::GateUp, || Work::elements(num_rows, width, 10, 8));
    }

    /// Ends a step: adds the other streams, and leaves what the output layer reads.
    pub(super) fn end<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        num_rows: usize,
        residual: &mut ResidualStream<D>,
        weights: &StreamsWeights<D>,
        next: Option<&NormWeights<D>>,
    ) {
        for (other, linear) in self.others.iter_mut().zip(&weights.outputs) {
            let rounded = &mut self.rounded;
            run.device.norm(num_rows, other, Norm::Identity, rounded);
            run.project_qkv(num_rows, rounded, linear, other);
            self.ops
                .match_magnitudes(run.device, num_rows, residual.hidden(), other);
        }
        for other in &self.others {
            let hidden = residual.hidden_mut();
            run.device
                .add_normed(num_rows, other, Norm::Identity, hidden);
        }
        let scale = (self.others.len() as f32 + 1.0).recip();
        residual.scale(run, num_rows, scale, next);
    }
}
