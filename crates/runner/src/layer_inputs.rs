//! Inputs of each layer's own (per-layer embeddings), and factors of the residual stream (layer scalars).
//!
//! ```text
//! inputs   combine(projection(embedded), table[tokens])        once a step, for all layers
//! layer    hidden += after(down(activation(gate(hidden)) * inputs of the layer));    hidden *= scale
//! ```

use super::embedding_rows::load_embedding;
use super::linear_weights::{NormSource, NormWeights, ProjectionSource, SummedLinear, linears_of};
use super::model_tensors::ModelTensors;
use super::packer::Packer;
use super::probe::{Operation, Probe, Work};
use super::residual::{Probed, ResidualStream};
use super::spec::{InputBlock, LayerInputsSpec, ModelSpec, Module, Projection};
use inflight_base::LoadError;
use inflight_checkpoint::Matrix;
use inflight_device::{Activation, Device, LayerInputOps, LayerInputParams, Linear, PackedWeights};

/// The weights that make the inputs of all layers, not yet read.
pub(super) struct LayerInputsSource<'a> {
    pub(super) embedding: Matrix<'a>,
    pub(super) projection: ProjectionSource<'a>,
    norm: NormSource<'a>,
}

/// The weights of a block that reads them, not yet read.
pub(super) struct InputBlockSource<'a> {
    pub(super) gate: ProjectionSource<'a>,
    activation: Activation,
    pub(super) down: ProjectionSource<'a>,
    after: NormSource<'a>,
}

/// The weights that make the inputs of all layers.
pub(super) struct LayerInputsWeights<D: Device> {
    table: D::Embedding,
    pub(super) projection: Linear<D>,
    norm: D::Vector,
}

/// The weights of a block that reads them.
pub(super) struct InputBlockWeights<D: Device> {
    pub(super) gate: Linear<D>,
    activation: Activation,
    pub(super) down: SummedLinear<D>,
    after: NormWeights<D>,
}

/// Memory for the inputs of a step, and the operations.
pub(super) struct LayerInputs<D: Device> {
    ops: D::LayerInputs,
    /// Of the model's norms.
    eps: f32,
    /// `None` if layers have only factors.
    buffers: Option<Buffers<D>>,
}

struct Buffers<D: Device> {
    spec: LayerInputsSpec,
    /// `[max_num_tokens, num_layers * width]`.
    inputs: D::Sums,
    /// `[max_num_tokens, width]`.
    gates: D::Sums,
    /// `[max_num_tokens, width]`.
    gated: D::Inputs,
}

impl<'a> LayerInputsSource<'a> {
    /// Finds the weights.
    ///
    /// # Errors
    /// A tensor is missing, or has another shape or a type that is not supported.
    pub(super) fn find(
        tensors: &ModelTensors<'a>,
        model: &ModelSpec,
        spec: &LayerInputsSpec,
    ) -> Result<Self, LoadError> {
        let num_inputs = spec.width * model.num_layers();
        let embedding = Module::of_model(spec.embedding);
        let norm = Module::of_model(spec.norm);
        Ok(Self {
            embedding: tensors.matrix(embedding, spec.num_rows, num_inputs)?,
            projection: ProjectionSource::find(tensors, None, &spec.projection)?,
            norm: NormSource::find(tensors, &model.norm, norm, spec.width)?,
        })
    }

    /// Reads and packs the projection and the norm.
    ///
    /// # Errors
    /// A tensor is not finite or changed while it was read, or memory is short.
    pub(super) fn pack<D: Device>(
        &self,
        packer: &mut Packer<'_, D>,
    ) -> Result<(Linear<D>, D::Vector), LoadError> {
        Ok((
            self.projection.load(packer)?,
            self.norm.load(packer)?.weight,
        ))
    }

    /// Reads the embeddings besides.
    ///
    /// # Errors
    /// As [`LayerInputsSource::pack`].
    pub(super) fn load<D: Device>(
        &self,
        device: &mut D,
        (projection, norm): (Linear<D>, D::Vector),
    ) -> Result<LayerInputsWeights<D>, LoadError> {
        Ok(LayerInputsWeights {
            table: load_embedding(device, &self.embedding)?,
            projection,
            norm,
        })
    }
}

impl<'a> InputBlockSource<'a> {
    /// Finds the weights of a layer; `find` finds a projection.
    ///
    /// # Errors
    /// As `find`, or the norm is missing, or has another shape or a type that is not supported.
    pub(super) fn find(
        tensors: &ModelTensors<'a>,
        layer: usize,
        model: &ModelSpec,
        block: &'a InputBlock,
        find: impl Fn(&'a Projection) -> Result<ProjectionSource<'a>, LoadError>,
    ) -> Result<Self, LoadError> {
        let after = Module::of_layer(layer, block.after);
        Ok(Self {
            gate: find(&block.gate)?,
            activation: block.activation,
            down: find(&block.down)?,
            after: NormSource::find(tensors, &model.norm, after, model.hidden_size)?,
        })
    }

    /// Reads and packs them.
    ///
    /// # Errors
    /// As [`LayerInputsSource::pack`].
    pub(super) fn load<D: Device>(
        &self,
        packer: &mut Packer<'_, D>,
    ) -> Result<InputBlockWeights<D>, LoadError> {
        Ok(InputBlockWeights {
            gate: self.gate.load(packer)?,
            activation: self.activation,
            down: self.down.load_summed(packer)?,
            after: self.after.load(packer)?,
        })
    }
}

impl<D: Device> LayerInputs<D> {
    /// Reserves memory for `max_rows` tokens. `None` if no layer has inputs or factors of its own.
    ///
    /// # Errors
    /// Memory is short, or the device has no such layers.
    pub(super) fn new(
        device: &mut D,
        spec: &ModelSpec,
        max_rows: usize,
    ) -> Result<Option<Self>, LoadError> {
        let parts = spec.parts_for_layer_input_ops();
        if parts.is_empty() {
            return Ok(None);
        }
        let ops = D::LAYER_INPUTS.ok_or_else(|| {
            LoadError::Resource(format!(
                "{} has {}, which are computed on the CPU only: use an instance_group of kind KIND_CPU",
                spec.family,
                parts.join(", ")
            ))
        })?;
        let buffers = match &spec.layer_inputs {
            Some(inputs) => Some(Buffers {
                spec: inputs.clone(),
                inputs: device.alloc_sums(max_rows, inputs.width * spec.num_layers())?,
                gates: device.alloc_sums(max_rows, inputs.width)?,
                gated: device.alloc_inputs(max_rows, inputs.width)?,
            }),
            None => None,
        };
        let eps = spec.norm.eps;
        Ok(Some(Self { ops, eps, buffers }))
    }

    /// Makes the inputs of a step's tokens; `embedded` has their embeddings.
    pub(super) fn begin<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        step: &D::Step<'_>,
        num_rows: usize,
        embedded: &D::Inputs,
        weights: &LayerInputsWeights<D>,
    ) {
        let Some(buffers) = &mut self.buffers else {
            return;
        };
        let Buffers { spec, inputs, .. } = buffers;
        run.project_qkv(num_rows, embedded, &weights.projection, inputs);
        let params = LayerInputParams {
            table: &weights.table,
            embedding_scale: spec.embedding_scale,
            projection_scale: spec.projection_scale,
            norm: &weights.norm,
            eps: self.eps,
            scale: spec.scale,
        };
        self.ops.combine(run.device, step, params, inputs);
        run.probe.ended(Operation::Embed, || {
            Work::elements(num_rows, weights.projection.matrix.n(), 10, 6)
        });
    }

    /// Keeps the inputs of the step's kept rows.
    pub(super) fn keep_rows(&mut self, device: &mut D, step: &D::Step<'_>) {
        if let Some(buffers) = &mut self.buffers {
            self.ops.keep_rows(device, step, &mut buffers.inputs);
        }
    }

    /// Clips queries, keys and values.
    pub(super) fn clip(&self, device: &mut D, num_rows: usize, bound: f32, qkv: &mut D::Sums) {
        self.ops.clip(device, num_rows, bound, qkv);
    }

    /// Normalises what a block has made, which `next` reads.
    pub(super) fn norm_inside<P: Probe>(
        &self,
        run: &mut Probed<'_, D, P>,
        num_rows: usize,
        weight: &D::Vector,
        x: &mut D::Inputs,
        next: &SummedLinear<D>,
    ) {
        let (ops, eps) = (self.ops, self.eps);
        ops.norm_inputs(run.device, num_rows, weight, eps, x);
        run.probe.ended(Operation::Norm, || {
            let width = linears_of(next).map(|linear| linear.matrix.k()).sum();
            // bf16 in and out.
            Work::elements(num_rows, width, 4, 4)
        });
    }

    /// Adds what the block of layer `index` makes of `x` to other streams than the first one.
    pub(super) fn add_to_streams<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        num_rows: usize,
        (residual, others): (&mut ResidualStream<D>, &mut [D::Sums]),
        x: &D::Inputs,
        index: usize,
        block: &InputBlockWeights<D>,
    ) {
        if let Some(gated) = self.gated(run, num_rows, x, index, block) {
            let down = (gated, &block.down);
            let after = Some(&block.after);
            residual.sum_to_each(run, Operation::Down, num_rows, down, after, others);
        }
    }

    /// The products of gates of `x` and the inputs of a layer.
    fn gated<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        num_rows: usize,
        x: &D::Inputs,
        index: usize,
        block: &InputBlockWeights<D>,
    ) -> Option<&D::Inputs> {
        let ops = self.ops;
        let Buffers {
            inputs,
            gates,
            gated,
            ..
        } = self.buffers.as_mut()?;
        run.project_qkv(num_rows, x, &block.gate, gates);
        let activation = block.activation;
        ops.gate(
            run.device, num_rows, activation, gates, inputs, index, gated,
        );
        Some(gated)
    }

    /// Ends layer `index`. The normed rows of `residual` are its hidden rows, rounded.
    #[allow(clippy::too_many_arguments, reason = "each is an operand")]
    pub(super) fn end_layer<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        num_rows: usize,
        residual: &mut ResidualStream<D>,
        index: usize,
        block: Option<&InputBlockWeights<D>>,
        scale: Option<f32>,
        next: Option<&NormWeights<D>>,
    ) {
        if let Some(block) = block
            && let Some(gated) = self.gated(run, num_rows, residual.normed(), index, block)
        {
            let after = Some(&block.after);
            let then = next.filter(|_| scale.is_none());
            let down = (gated, &block.down);
            residual.add(run, Operation::Down, num_rows, down, after, then);
        }
        if let Some(scale) = scale {
            residual.scale(run, num_rows, scale, next);
        }
    }
}
