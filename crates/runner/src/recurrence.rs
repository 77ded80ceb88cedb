//! Layers with recurrent states in a model: their description, their weights, found and packed, and their operations.
//!
//! ```text
//! x          input(normed)                      [m, input_len]
//! mixed      the device's rule of x and the states of the step's sequences      [m, out_len]
//! ```
//!
//! A sequence has its states in a slot, from its first token on until it ends or is paused.

use super::linear_weights::NormSource;
use super::model_tensors::ModelTensors;
use super::packer::Packer;
use super::probe::{Operation, Probe, Work};
use super::residual::Probed;
use super::spec::{ModelSpec, Module};
use inflight_base::LoadError;
use inflight_checkpoint::{Matrix, Tensor};
use inflight_device::{
    DeltaWeights, Device, Linear, RecurrenceParams, RecurrenceShape, RecurrenceWeights,
    RecurrentOps, RecurrentRule, StepInputs,
};

/// What a layer keeps instead of keys and values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RecurrenceSpec {
    /// The sizes.
    pub shape: RecurrenceShape,
    /// The convolution, whose weights are `[num_channels, 1, kernel_len]`.
    pub convolution: &'static str,
    /// Whether that has a bias, `[num_channels]`.
    pub has_convolution_bias: bool,
    /// The modules of the gated delta rule.
    pub delta: Option<DeltaModules>,
}

/// The modules and parameters of the gated delta rule, below the layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaModules {
    /// The logarithms of the rates, `[num_value_heads]`: a parameter.
    pub log_rates: &'static str,
    /// The biases of the decays, `[num_value_heads]`: a parameter.
    pub time_biases: &'static str,
    /// The RMS norm of the results, `[value_dim]`.
    pub norm: &'static str,
}

/// The weights of a layer besides its projections, not yet read.
pub(super) struct RecurrenceSource<'a> {
    shape: RecurrenceShape,
    convolution: Matrix<'a>,
    convolution_bias: Option<Tensor<'a>>,
    delta: Option<DeltaSource<'a>>,
}

struct DeltaSource<'a> {
    log_rates: Tensor<'a>,
    time_biases: Tensor<'a>,
    norm: NormSource<'a>,
}

/// The weights of a layer besides its projections.
pub(super) struct LayerRecurrence<D: Device> {
    pub(super) shape: RecurrenceShape,
    weights: RecurrenceWeights<D>,
}

/// The states of sequences, and activations, each `[max_num_tokens, width]`.
pub(super) struct RecurrenceBuffers<D: Device> {
    ops: D::Recurrences,
    states: <D::Recurrences as RecurrentOps<D>>::States,
    x: D::Sums,
    /// What the output projection reads.
    pub(super) mixed: D::Inputs,
}

impl ModelSpec {
    /// The first of its layers that keep a recurrent state: all have the same sizes.
    pub fn recurrence(&self) -> Option<&RecurrenceSpec> {
        let mut layers = self.layers.iter();
        layers.find_map(|layer| layer.attention.recurrence.as_ref())
    }

    /// Layers that keep keys and values.
    pub fn num_cached_layers(&self) -> usize {
        let layers = self.layers.iter();
        layers.filter(|layer| layer.has_cache()).count()
    }

    /// Bytes of the recurrent states of a sequence, in all layers.
    pub fn state_bytes(&self) -> u64 {
        let states = self.layers.iter().filter_map(|it| it.attention.recurrence);
        states.map(|it| 4 * it.shape.state_len() as u64).sum()
    }
}

impl<'a> RecurrenceSource<'a> {
    /// Finds the weights.
    ///
    /// # Errors
    /// A tensor is missing, or has another shape or a type that is not supported.
    pub(super) fn find(
        tensors: &ModelTensors<'a>,
        layer: usize,
        spec: &RecurrenceSpec,
    ) -> Result<Self, LoadError> {
        let RecurrenceShape { kernel_len, rule } = spec.shape;
        let module = |name| Module::of_layer(layer, name);
        let convolution = module(spec.convolution);
        let num_channels = spec.shape.num_channels();
        Ok(Self {
            shape: spec.shape,
            convolution: tensors.convolution(convolution, num_channels, kernel_len)?,
            convolution_bias: match spec.has_convolution_bias {
                true => Some(tensors.bias(convolution, num_channels)?),
                false => None,
            },
            delta: match (spec.delta, rule) {
                (Some(modules), RecurrentRule::GatedDelta(delta)) => {
                    let num_heads = delta.num_value_heads;
                    Some(DeltaSource {
                        log_rates: tensors.parameter(module(modules.log_rates), num_heads)?,
                        time_biases: tensors.parameter(module(modules.time_biases), num_heads)?,
                        norm: NormSource {
                            weight: vec![tensors.norm(module(modules.norm), delta.value_dim)?],
                            weight_offset: 0.0,
                            bias: None,
                        },
                    })
                }
                _ => None,
            },
        })
    }

    /// Uploads the weights.
    ///
    /// # Errors
    /// They cannot be read or are not finite, or memory is short.
    pub(super) fn load<D: Device>(
        &self,
        packer: &mut Packer<'_, D>,
    ) -> Result<LayerRecurrence<D>, LoadError> {
        Ok(LayerRecurrence {
            shape: self.shape,
            weights: RecurrenceWeights {
                convolution: packer.upload_transposed(&self.convolution)?,
                convolution_bias: match &self.convolution_bias {
                    Some(bias) => Some(packer.upload(bias)?),
                    None => None,
                },
                delta: match &self.delta {
                    Some(delta) => Some(DeltaWeights {
                        rates: packer.upload_mapped(&delta.log_rates, f32::exp)?,
                        time_biases: packer.upload(&delta.time_biases)?,
                        norm: delta.norm.load(packer)?.weight,
                    }),
                    None => None,
                },
            },
        })
    }
}

impl<D: Device> RecurrenceBuffers<D> {
    /// Reserves states of `num_slots` sequences, and `max_rows` rows. `None` if no layer has a state.
    ///
    /// # Errors
    /// Memory is short, or the device has no such layers.
    pub(super) fn new(
        device: &mut D,
        spec: &ModelSpec,
        max_rows: usize,
        num_slots: usize,
    ) -> Result<Option<Self>, LoadError> {
        let layers = spec.layers.iter();
        let shapes: Vec<_> = layers
            .filter_map(|layer| layer.attention.recurrence.map(|it| it.shape))
            .collect();
        let Some(shape) = shapes.first() else {
            return Ok(None);
        };
        let ops = D::RECURRENCES.ok_or_else(|| {
            LoadError::Resource(format!(
                "{} has layers with recurrent states, which are computed on the CPU only: use an instance_group of \
                 kind KIND_CPU",
                spec.family
            ))
        })?;
        Ok(Some(Self {
            ops,
            states: ops.alloc_states(device, &shapes, num_slots)?,
            x: device.alloc_sums(max_rows, shape.input_len())?,
            mixed: device.alloc_inputs(max_rows, shape.out_len())?,
        }))
    }

    /// `mixed = rule(input(normed))`, with the states of layer `index` of those that have one.
    pub(super) fn mix<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        step: &D::Step<'_>,
        inputs: StepInputs<'_>,
        normed: &D::Inputs,
        (input, layer, index): (&Linear<D>, &LayerRecurrence<D>, usize),
    ) {
        let num_rows = inputs.token_ids.len();
        run.project_qkv(num_rows, normed, input, &mut self.x);
        let LayerRecurrence { shape, weights } = layer;
        let params = RecurrenceParams {
            shape,
            weights,
            layer: index,
        };
        let (x, states, mixed) = (&self.x, &mut self.states, &mut self.mixed);
        self.ops.mix(run.device, step, params, x, states, mixed);
        run.probe.ended(Operation::Recurrence, || {
            let x = Work::elements(num_rows, shape.input_len(), 4, 2 * shape.kernel_len);
            let mixed = Work::elements(num_rows, shape.out_len(), 2, 2);
            let num_states = shape.state_len() - shape.convolution_len();
            let states = Work::elements(inputs.spans.len(), shape.state_len(), 8, 0);
            Work {
                num_bytes: x.num_bytes + mixed.num_bytes + states.num_bytes,
                // Decay, read, write and read again.
                num_operations: x.num_operations
                    + mixed.num_operations
                    + Work::elements(num_rows, num_states, 0, 7).num_operations,
            }
        });
    }
}
