//! Layers with recurrent states in a model: their weights, found and packed, and their operations.
//!
//! ```text
//! x          input(normed)                      [m, input_len]
//! late       other inputs, where a rule has some: late_inputs.rs
//! convolved  of a selective scan: its values, which make late inputs             [m, num_channels]
//! mixed      the device's rule of both and the states of the step's sequences    [m, out_len]
//! ```
//!
//! A sequence has its states in a slot, or in one for each of its beams, from its first token on until it ends or is
//! paused; a beam that forks copies them. Other slots have snapshots,
//! with which sequences of an equal prefix begin and which may move to host memory, and the states behind each draft of
//! a step: if drafts are rejected, the next step goes on from one of these.

use super::late_inputs::{LateBuffers, LateSource, LateWeights};
use super::linear_weights::{NormSource, ProjectionSource, SummedLinear};
use super::model_tensors::ModelTensors;
use super::packer::Packer;
use super::probe::{Operation, Probe, Work};
use super::recurrence_share::RecurrenceShare;
use super::recurrence_spec::RecurrenceSpec;
use super::residual::Probed;
use super::share::ModelShare;
use super::spec::{LayerSpec, Module, Projection, RecurrenceBlock};
use super::state_slots::StateSlots;
use inflight_base::{LoadError, StateRow};
use inflight_checkpoint::{Matrix, Tensor};
use inflight_device::{
    Device, KvSpan, Linear, RecurrenceParams, RecurrenceShape, RecurrenceWeights, RecurrentRule,
    RuleWeights, StepInputs,
};
use inflight_engine::{StateCopy, StateMove, StateRestore, StateSnapshot};

/// The weights of a layer besides its projections, not yet read.
pub(super) struct RecurrenceSource<'a> {
    shape: RecurrenceShape,
    /// The convolution, in one part or several, each with some of the channels.
    convolutions: Vec<Matrix<'a>>,
    /// Empty, or one for each run of channels.
    convolution_biases: Vec<Tensor<'a>>,
    rule: Option<RuleSource<'a>>,
    pub(super) late: Option<LateSource<'a>>,
}

struct RuleSource<'a> {
    /// The logarithms of rates, or negated rates.
    rates: RateSource<'a>,
    has_negated_rates: bool,
    time_biases: Tensor<'a>,
    skips: Option<Tensor<'a>>,
    norm: Option<NormSource<'a>>,
}

enum RateSource<'a> {
    OfHeads(Tensor<'a>),
    /// `[num_channels, state_dim]`.
    OfStates(Matrix<'a>),
}

/// The weights of a recurrence beside attention, not yet read.
pub(super) struct RecurrenceBlockSource<'a> {
    pub(super) input: ProjectionSource<'a>,
    recurrence: RecurrenceSource<'a>,
    pub(super) output: ProjectionSource<'a>,
    scale: f32,
}

/// The weights of a recurrence beside attention.
pub(super) struct RecurrenceBlockWeights<D: Device> {
    pub(super) input: Linear<D>,
    pub(super) recurrence: LayerRecurrence<D>,
    pub(super) output: SummedLinear<D>,
    /// The factor of its result.
    pub(super) scale: f32,
}

/// The weights of a layer besides its projections.
pub(super) struct LayerRecurrence<D: Device> {
    pub(super) shape: RecurrenceShape,
    weights: RecurrenceWeights<D>,
    late: Option<LateWeights<D>>,
}

/// The states of sequences, and activations, each `[max_num_tokens, width]`.
pub(super) struct RecurrenceBuffers<D: Device> {
    states: D::RecurrentStates,
    /// The snapshots that the device gave up.
    host_states: D::HostStates,
    slots: StateSlots,
    /// The tokens that the states of each sequence sum up.
    num_tokens: Vec<u32>,
    /// The drafts of each sequence in its last step.
    num_drafts: Vec<u32>,
    /// Memory of [`StepInputs::is_repeated`].
    is_repeated: Vec<bool>,
    x: D::Sums,
    late: Option<LateBuffers<D>>,
    /// The inputs of the output projection.
    pub(super) mixed: D::Inputs,
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
        let parameter = |name, len| tensors.parameter(module(name), len);
        let (num_heads, num_biases, norm_len) = match rule {
            RecurrentRule::GatedConvolution { .. } => (None, 0, 0),
            RecurrentRule::GatedDelta(delta) => {
                let num_heads = Some(delta.num_value_heads);
                (num_heads, delta.num_decays(), delta.value_dim)
            }
            RecurrentRule::StateSpace(space) => {
                (Some(space.num_heads), space.num_heads, space.value_len())
            }
            RecurrentRule::SelectiveScan(scan) => {
                (Some(scan.num_channels), scan.num_channels, scan.state_dim)
            }
        };
        let norm = |name| match rule {
            RecurrentRule::StateSpace(space) => {
                tensors.grouped_norm(module(name), norm_len, space.num_groups)
            }
            _ => tensors.norm(module(name), norm_len),
        };
        let rates = |name, num_heads| match rule {
            RecurrentRule::SelectiveScan(scan) => {
                let rates = tensors.parameters(module(name), [num_heads, scan.state_dim])?;
                Ok(RateSource::OfStates(rates))
            }
            _ => Ok::<_, LoadError>(RateSource::OfHeads(parameter(name, num_heads)?)),
        };
        Ok(Self {
            shape: spec.shape,
            convolutions: match (spec.convolution_parts, rule) {
                (Some(parts), RecurrentRule::GatedDelta(delta))
                    if !tensors.has_weight(convolution) =>
                {
                    let lens = [delta.key_len(), delta.key_len(), delta.value_len()];
                    let parts = parts.into_iter().zip(lens);
                    let parts =
                        parts.map(|(name, len)| tensors.convolution(module(name), len, kernel_len));
                    parts.collect::<Result<_, _>>()?
                }
                _ => vec![tensors.convolution(convolution, num_channels, kernel_len)?],
            },
            convolution_biases: match spec.has_convolution_bias {
                true => vec![tensors.bias(convolution, num_channels)?],
                false => Vec::new(),
            },
            rule: match (spec.modules, num_heads) {
                (Some(modules), Some(num_heads)) => Some(RuleSource {
                    rates: rates(modules.log_rates, num_heads)?,
                    has_negated_rates: tensors.has_negated_rates(),
                    time_biases: parameter(modules.time_biases, num_biases)?,
                    skips: match modules.skips {
                        Some(skips) => Some(parameter(skips, num_heads)?),
                        None => None,
                    },
                    norm: match (modules.norm, modules.key_norms) {
                        (Some(name), _) => Some(NormSource::of_weights(vec![norm(name)?])),
                        (None, Some([keys, queries])) => {
                            let parts = vec![norm(keys)?, norm(queries)?];
                            Some(NormSource::of_weights(parts))
                        }
                        (None, None) => match rule {
                            RecurrentRule::SelectiveScan(scan) if scan.norm_eps.is_some() => {
                                Some(NormSource::of_ones(2 * scan.state_dim))
                            }
                            _ => None,
                        },
                    },
                }),
                _ => None,
            },
            late: None,
        })
    }

    /// The sizes.
    pub(super) fn shape(&self) -> &RecurrenceShape {
        &self.shape
    }

    /// The weights of a rank: for its heads and channels.
    pub(super) fn share(self, share: &ModelShare) -> Self {
        let own = share.recurrence(&self.shape);
        let lens = self.convolutions.iter().map(Matrix::rows);
        let channels = own.channels(lens);
        let all_channels = own.channels([self.shape.num_channels()].into_iter());
        let convolutions = self.convolutions.iter().zip(&channels);
        Self {
            convolutions: convolutions
                .flat_map(|(matrix, channels)| {
                    let part = |channels| matrix.part(channels, 0..matrix.columns());
                    channels.iter().cloned().map(part)
                })
                .collect(),
            convolution_biases: self
                .convolution_biases
                .iter()
                .flat_map(|bias| {
                    let channels = all_channels.iter().flatten().cloned();
                    channels.map(|channels| bias.elements(channels))
                })
                .collect(),
            rule: self.rule.map(|rule| rule.share(&own)),
            late: self.late.map(|late| late.share(share, &own)),
            shape: own.shape(),
        }
    }

    /// Bytes of the weights that no product reads, in f32: of a selective scan a rate for each number of a state.
    pub(super) fn num_vector_bytes(&self) -> u64 {
        let num_channels = self.shape.num_channels();
        let of_rule = match self.shape.rule {
            RecurrentRule::GatedConvolution { .. } => 0,
            RecurrentRule::GatedDelta(delta) => {
                delta.num_value_heads + delta.num_decays() + delta.value_dim
            }
            RecurrentRule::StateSpace(space) => 3 * space.num_heads + space.value_len(),
            RecurrentRule::SelectiveScan(scan) => {
                (scan.state_dim + 2) * scan.num_channels + 2 * scan.state_dim
            }
        };
        let num_weights = (self.shape.kernel_len + 1) * num_channels + of_rule;
        (num_weights * size_of::<f32>()) as u64
    }

    /// The late inputs that are made of its channels.
    pub(super) fn late_of_channels(&self) -> impl Iterator<Item = &ProjectionSource<'a>> {
        self.late.iter().flat_map(LateSource::of_channels)
    }

    /// The projections of late inputs.
    pub(super) fn projections(&self) -> impl Iterator<Item = &ProjectionSource<'a>> {
        self.late.iter().flat_map(LateSource::projections)
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
            late: match &self.late {
                Some(late) => Some(late.load(packer)?),
                None => None,
            },
            weights: RecurrenceWeights {
                convolution: packer.upload_transposed(&self.convolutions)?,
                convolution_bias: match self.convolution_biases.is_empty() {
                    true => None,
                    false => Some(packer.upload_bias(&self.convolution_biases)?),
                },
                rule: match &self.rule {
                    Some(rule) => Some(RuleWeights {
                        rates: {
                            let of_stored = match rule.has_negated_rates {
                                true => |rate: f32| -rate,
                                false => f32::exp,
                            };
                            match &rule.rates {
                                RateSource::OfHeads(rates) => {
                                    packer.upload_mapped(rates, of_stored)?
                                }
                                RateSource::OfStates(rates) => {
                                    let rates = std::slice::from_ref(rates);
                                    packer.upload_transposed_mapped(rates, of_stored)?
                                }
                            }
                        },
                        time_biases: packer.upload(&rule.time_biases)?,
                        skips: match &rule.skips {
                            Some(skips) => Some(packer.upload(skips)?),
                            None => None,
                        },
                        norm: match &rule.norm {
                            Some(norm) => Some(norm.load(packer)?.weight),
                            None => None,
                        },
                    }),
                    None => None,
                },
            },
        })
    }
}

impl RuleSource<'_> {
    /// The weights of a rank.
    fn share(self, own: &RecurrenceShare) -> Self {
        let rule = own.shape().rule;
        let num_biases = match rule {
            RecurrentRule::GatedDelta(delta) => delta.num_decays() / delta.num_value_heads,
            _ => 1,
        };
        Self {
            rates: match self.rates {
                RateSource::OfHeads(rates) => RateSource::OfHeads(rates.elements(own.values(1))),
                RateSource::OfStates(rates) => {
                    RateSource::OfStates(rates.part(own.values(1), 0..rates.columns()))
                }
            },
            time_biases: self.time_biases.elements(own.values(num_biases)),
            skips: self.skips.map(|skips| skips.elements(own.values(1))),
            norm: match rule {
                RecurrentRule::StateSpace(space) => self
                    .norm
                    .map(|norm| norm.elements(&[own.values(space.head_dim)])),
                _ => self.norm,
            },
            ..self
        }
    }
}

/// A rank's part of the projection that a recurrence reads.
pub(super) fn own_inputs<'a>(
    input: &ProjectionSource<'a>,
    own: &RecurrenceShare,
) -> ProjectionSource<'a> {
    let lens = input.matrices.iter().map(Matrix::rows);
    input.outputs(&own.inputs(lens))
}

impl<'a> RecurrenceBlockSource<'a> {
    /// Finds the weights of a layer; `find` finds a projection.
    ///
    /// # Errors
    /// As `find`, or another tensor is missing, or has another shape or a type that is not supported.
    pub(super) fn find(
        tensors: &ModelTensors<'a>,
        layer: usize,
        block: &'a RecurrenceBlock,
        find: impl Fn(&'a Projection) -> Result<ProjectionSource<'a>, LoadError>,
    ) -> Result<Self, LoadError> {
        Ok(Self {
            input: find(&block.input)?,
            recurrence: RecurrenceSource::find(tensors, layer, &block.recurrence)?,
            output: find(&block.output)?,
            scale: block.scale,
        })
    }

    /// See [`RecurrenceSource::num_vector_bytes`].
    pub(super) fn num_vector_bytes(&self) -> u64 {
        self.recurrence.num_vector_bytes()
    }

    /// The sizes, with the projection that reads the results.
    pub(super) fn mixed(&self) -> (&RecurrenceShape, &ProjectionSource<'a>) {
        (self.recurrence.shape(), &self.output)
    }

    /// The weights of a rank.
    pub(super) fn share(self, share: &ModelShare) -> Self {
        let own = share.recurrence(self.recurrence.shape());
        Self {
            input: own_inputs(&self.input, &own).placed(share),
            recurrence: self.recurrence.share(share),
            output: self.output.inputs(&own.mixed(), share).placed(share),
            scale: self.scale,
        }
    }

    /// Reads and packs them.
    ///
    /// # Errors
    /// A tensor is not finite or changed while it was read, or memory is short.
    pub(super) fn load<D: Device>(
        &self,
        packer: &mut Packer<'_, D>,
    ) -> Result<RecurrenceBlockWeights<D>, LoadError> {
        Ok(RecurrenceBlockWeights {
            input: self.input.load(packer)?,
            recurrence: self.recurrence.load(packer)?,
            output: self.output.load_summed(packer)?,
            scale: self.scale,
        })
    }
}

impl<D: Device> LayerRecurrence<D> {
    /// The projections of late inputs.
    pub(super) fn linears(&self) -> impl Iterator<Item = &Linear<D>> {
        self.late.iter().flat_map(LateWeights::linears)
    }
}

impl<D: Device> RecurrenceBuffers<D> {
    /// Reserves the states of all slots in these layers, and `max_rows` rows, for sums in so many tiles. `None` if no
    /// layer has a state.
    ///
    /// # Errors
    /// Memory is short.
    pub(super) fn new(
        device: &mut D,
        layers: &[LayerSpec],
        (max_rows, num_tiles): (usize, usize),
        slots: StateSlots,
    ) -> Result<Option<Self>, LoadError> {
        let shapes: Vec<_> = layers
            .iter()
            .filter_map(|layer| layer.recurrence().map(|it| it.shape))
            .collect();
        let Some(shape) = shapes.first() else {
            return Ok(None);
        };
        let states = device.alloc_recurrent_states(&shapes, slots.num_all())?;
        Ok(Some(Self {
            host_states: device.alloc_host_states(&states, slots.num_on_host())?,
            states,
            slots,
            num_tokens: vec![0; slots.num_rows()],
            num_drafts: vec![0; slots.num_rows()],
            is_repeated: Vec::with_capacity(slots.num_rows()),
            x: device.alloc_sums(max_rows, shape.input_len())?,
            late: match layers
                .iter()
                .find_map(|layer| layer.attention.late.as_ref())
            {
                Some(late) => Some(LateBuffers::new(device, late, max_rows, num_tiles)?),
                None => None,
            },
            mixed: device.alloc_inputs(max_rows, shape.out_len())?,
        }))
    }

    /// Moves states, one after the other, and copies the states of beams then.
    pub(super) fn move_states(
        &mut self,
        device: &mut D,
        moves: &[StateMove],
        copies: &[StateCopy],
    ) {
        for one in moves {
            match *one {
                StateMove::Restore(StateRestore {
                    snapshot,
                    row,
                    num_tokens,
                }) => {
                    match snapshot {
                        StateSnapshot::Device(id) => {
                            self.copy(device, self.slots.snapshot(id), row.0);
                        }
                        StateSnapshot::Host(id) => {
                            device.onboard_states(&self.host_states, id.0, &mut self.states, row.0);
                        }
                    }
                    self.num_tokens[row.index()] = num_tokens.0;
                    self.num_drafts[row.index()] = 0;
                }
                StateMove::Offload { source, target } => {
                    let source = self.slots.snapshot(source);
                    device.offload_states(&self.states, source, &mut self.host_states, target.0);
                }
                StateMove::Onboard { source, target } => {
                    let target = self.slots.snapshot(target);
                    device.onboard_states(&self.host_states, source.0, &mut self.states, target);
                }
            }
        }
        for &StateCopy { source, target } in copies {
            self.copy(device, source.0, target.0);
            self.num_tokens[target.index()] = self.num_tokens[source.index()];
            self.num_drafts[target.index()] = 0;
        }
    }

    /// Prepares states for a step. A sequence goes on behind the tokens that its states sum up, rolls back if drafts of
    /// its last step were rejected, or computes the last token again, as one whose guide was not ready does. Returns
    /// [`StepInputs::is_repeated`], until [`RecurrenceBuffers::end`].
    ///
    /// # Panics
    /// The tokens of a sequence are others, as if a prefix were reused whose states were not restored.
    pub(super) fn begin(&mut self, device: &mut D, inputs: StepInputs<'_>) -> Vec<bool> {
        let mut all_repeated = std::mem::take(&mut self.is_repeated);
        all_repeated.clear();
        for (span, &slot) in inputs.spans.iter().zip(inputs.state_slots) {
            let num_tokens = span.tokens.len() as u32;
            let first = span.kv_len - num_tokens;
            let slot = StateRow(slot);
            if first > 0 {
                self.roll_back(device, slot, first);
            }
            let num_drafts = self.num_drafts_of(inputs, span, slot);
            if num_drafts > 0 {
                self.copy(device, slot.0, self.slots.draft(slot, 0));
            }
            self.num_drafts[slot.index()] = num_drafts;
            let known = std::mem::replace(&mut self.num_tokens[slot.index()], span.kv_len);
            let is_repeated = first > 0 && num_tokens == 1 && span.kv_len == known;
            assert!(
                first == 0 || first == known || is_repeated,
                "token {first} follows the {known} tokens of {slot:?}"
            );
            all_repeated.push(is_repeated);
        }
        all_repeated
    }

    /// Ends a step: takes the memory of [`StepInputs::is_repeated`] back.
    pub(super) fn end(&mut self, is_repeated: Vec<bool>) {
        self.is_repeated = is_repeated;
    }

    /// Rolls a sequence, whose last step had drafts, back to its states behind `num_tokens`.
    ///
    /// ```text
    /// last step     known - 3 | last | draft | draft | known
    /// place                   0      1       2         its own slot
    /// ```
    fn roll_back(&mut self, device: &mut D, slot: StateRow, num_tokens: u32) {
        let known = self.num_tokens[slot.index()];
        let num_drafts = self.num_drafts[slot.index()];
        if num_drafts == 0 || num_tokens >= known {
            return;
        }
        if let Some(place) = (num_tokens + 1 + num_drafts).checked_sub(known) {
            self.copy(device, self.slots.draft(slot, place), slot.0);
            self.num_tokens[slot.index()] = num_tokens;
        }
    }

    /// The drafts of a sequence in a step: its states behind the tokens before them are saved.
    fn num_drafts_of(&self, inputs: StepInputs<'_>, span: &KvSpan, slot: StateRow) -> u32 {
        let saved = inputs.saved_states;
        let first = saved.partition_point(|saved| saved.token < span.tokens.start);
        let own = saved[first..].iter();
        let own = own.take_while(|saved| saved.token < span.tokens.end);
        let first_place = self.slots.draft(slot, 0);
        own.filter(|saved| saved.slot >= first_place).count() as u32
    }

    fn copy(&mut self, device: &mut D, from: u32, to: u32) {
        device.copy_recurrent_states(&mut self.states, from, to);
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
        let LayerRecurrence {
            shape,
            weights,
            late,
        } = layer;
        let params = |late| RecurrenceParams {
            shape,
            weights,
            layer: index,
            late,
        };
        let (x, states, mixed) = (&mut self.x, &mut self.states, &mut self.mixed);
        let convolution = || Work::elements(num_rows, shape.input_len(), 4, 2 * shape.kernel_len);
        let late = self.late.as_mut().zip(late.as_ref());
        let is_convolved = late.as_ref().is_some_and(|(_, late)| late.are_selected());
        if is_convolved {
            run.device.convolve(step, params(None), x, states, mixed);
            run.probe.ended(Operation::Recurrence, convolution);
        }
        let late = late.map(|(buffers, late)| {
            let inputs = if is_convolved { &*mixed } else { normed };
            buffers.project(run, num_rows, inputs, late)
        });
        run.device
            .mix_recurrence(step, params(late), x, states, mixed);
        run.probe.ended(Operation::Recurrence, || {
            let x = match is_convolved {
                true => Work::default(),
                false => convolution(),
            };
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
