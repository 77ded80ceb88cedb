//! Layers with recurrent states on a GPU: see [`RecurrenceShape`].
//!
//! ```text
//! x        scale_inputs, convolve_channels, then the rule, whose results take the place of the values
//! out      gate_results of x; or gated_convolution of x, where a layer has no more
//! ```

use cudarc::driver::{CudaFunction, LaunchConfig, PushKernelArg};
use half::bf16;

use super::Cuda;
use super::host_copies::HostCopies;
use super::kernels::{Kernels, launch, row_grid, shared_row_grid};
use super::memory::{self, DeviceMemory, DeviceSpan};
use super::rows::Rows;
use super::step::CudaStep;
use super::uploads::Vector;
use inflight_base::LoadError;
use inflight_device::{
    DeltaForm, DeltaShape, GateFunction, LateInputs, RecurrenceParams, RecurrenceShape,
    RecurrentOps, RecurrentRule, RuleWeights, ScanShape, SpaceNorm, StateSpaceShape,
};

/// The longest convolution of the kernels.
const MAX_KERNEL_LEN: usize = 8;
/// The kernels of a rule, by the largest key that they compute.
const RULE_SIZES: [usize; 3] = [64, 128, 256];
/// The largest keys of the kernels of the delta rule by channels.
const CHANNEL_RULE_SIZES: [usize; 2] = [64, 128];
/// The kernels of a selective scan, by the largest state of a channel that they compute.
const SCAN_SIZES: [usize; 2] = [16, 64];
/// Where the states of a layer begin, in bytes.
const ALIGNMENT: usize = 256;
/// Threads of a block of convolutions, each with a channel.
const CHANNEL_THREADS: usize = 128;
/// Columns of a matrix that a block of a rule has.
const RULE_COLUMNS: usize = 32;
/// Threads of a block of a rule.
const RULE_THREADS: u32 = 256;
/// Threads of a block that normalises a group of results.
const MAX_GATE_THREADS: usize = 256;

/// The states of all slots.
///
/// ```text
/// layer    [num_slots, state_len] f32, one layer behind the other
/// ```
pub struct CudaStates {
    _memory: DeviceMemory,
    layers: Vec<Layer>,
    num_slots: usize,
    kernels: StateKernels,
}

/// The states of a layer.
struct Layer {
    address: u64,
    state_len: usize,
    /// Computes the rule, if there is one.
    rule: Option<CudaFunction>,
}

/// The operands that the kernels of a convolution share.
struct Convolution {
    config: LaunchConfig,
    weights: u64,
    bias: u64,
    slot_len: u64,
    num_channels: i32,
    kernel_len: i32,
}

struct StateKernels {
    convolve_channels: CudaFunction,
    convolve_values: CudaFunction,
    gated_convolution: CudaFunction,
    scale_inputs: CudaFunction,
    gate_results: CudaFunction,
}

impl RecurrentOps for Cuda {
    type RecurrentStates = CudaStates;
    type HostStates = HostCopies;

    fn alloc_recurrent_states(
        &mut self,
        layers: &[RecurrenceShape],
        num_slots: usize,
    ) -> Result<CudaStates, LoadError> {
        let mut num_bytes = Some(0_usize);
        let mut places = Vec::with_capacity(layers.len());
        for shape in layers {
            places.push((num_bytes.unwrap_or(0), shape));
            let own = shape.state_len().checked_mul(4 * num_slots);
            let own = own.and_then(|own| own.checked_next_multiple_of(ALIGNMENT));
            num_bytes = num_bytes.and_then(|sum| sum.checked_add(own?));
        }
        let num_bytes = num_bytes.ok_or_else(|| {
            LoadError::Resource(format!(
                "no memory for {num_slots} recurrent states; lower max_num_requests, max_batch_size, \
                 max_state_snapshots or max_draft_tokens"
            ))
        })?;
        let memory = DeviceMemory::new(&self.stream, num_bytes)?;
        let layers = places.into_iter().map(|(offset, shape)| {
            Ok(Layer {
                address: memory.address() + offset as u64,
                state_len: shape.state_len(),
                rule: rule_kernel(&self.kernels, shape)?,
            })
        });
        let layers = layers.collect::<Result<_, LoadError>>()?;
        self.num_state_slots = num_slots;
        Ok(CudaStates {
            layers,
            _memory: memory,
            num_slots,
            kernels: StateKernels::load(&self.kernels)?,
        })
    }

    fn copy_recurrent_states(&mut self, states: &mut CudaStates, from: u32, to: u32) {
        assert!(from != to, "slot {from} is copied to another one");
        for (from, to) in states.spans(from).zip(states.spans(to)) {
            if self.failure.is_none() {
                let copied = memory::copy(&self.stream, to.address, from.address, from.num_bytes);
                self.record("copying recurrent states", copied);
            }
        }
    }

    fn alloc_host_states(
        &mut self,
        states: &CudaStates,
        num_slots: usize,
    ) -> Result<HostCopies, LoadError> {
        let bytes_per_slot = states.spans(0).map(|span| span.num_bytes).sum();
        HostCopies::new(&self.stream, bytes_per_slot, num_slots)
    }

    fn offload_states(
        &mut self,
        states: &CudaStates,
        source: u32,
        host: &mut HostCopies,
        target: u32,
    ) {
        if self.failure.is_none() {
            let copied = host.offload(states.spans(source), target as usize);
            self.record("copying recurrent states to the host", copied);
        }
    }

    fn onboard_states(
        &mut self,
        host: &HostCopies,
        source: u32,
        states: &mut CudaStates,
        target: u32,
    ) {
        if self.failure.is_none() {
            let copied = host.onboard(source as usize, states.spans(target));
            self.record("copying recurrent states from the host", copied);
        }
    }

    fn convolve(
        &mut self,
        step: &CudaStep,
        params: RecurrenceParams<'_, Self>,
        x: &mut Rows<f32>,
        states: &mut CudaStates,
        out: &mut Rows<bf16>,
    ) {
        assert_eq!(
            out.width(),
            params.shape.num_channels(),
            "out is [m, channels]"
        );
        let layer = &states.layers[params.layer];
        let Some(convolution) = Convolution::new(step, &params, x, layer) else {
            return;
        };
        launch!(
            self,
            states.kernels.convolve_values,
            "convolve_values",
            convolution.config,
            out.address(),
            x.address(),
            layer.address,
            convolution.weights,
            convolution.bias,
            step.recurrent_spans,
            step.words,
            convolution.slot_len,
            x.width() as i32,
            convolution.num_channels,
            convolution.kernel_len
        );
    }

    fn mix_recurrence(
        &mut self,
        step: &CudaStep,
        params: RecurrenceParams<'_, Self>,
        x: &mut Rows<f32>,
        states: &mut CudaStates,
        out: &mut Rows<bf16>,
    ) {
        let (shape, weights) = (params.shape, params.weights);
        assert_eq!(out.width(), shape.out_len(), "out is [m, out_len]");
        let layer = &states.layers[params.layer];
        let Some(convolution) = Convolution::new(step, &params, x, layer) else {
            return;
        };
        let late = params.late.as_ref();
        match shape.rule {
            RecurrentRule::GatedConvolution { .. } => {
                launch!(
                    self,
                    states.kernels.gated_convolution,
                    "gated_convolution",
                    convolution.config,
                    out.address(),
                    x.address(),
                    layer.address,
                    convolution.weights,
                    convolution.bias,
                    step.recurrent_spans,
                    step.words,
                    convolution.slot_len,
                    convolution.num_channels,
                    convolution.kernel_len
                );
                return;
            }
            RecurrentRule::SelectiveScan(scan) => {
                let (Some(rule), Some(kernel)) = (&weights.rule, &layer.rule) else {
                    panic!("the rule's weights");
                };
                return self.scan(step, shape, &scan, rule, (kernel, layer), x, late, out);
            }
            RecurrentRule::StateSpace(space) => {
                self.scale_inputs(step.num_rows, &space, x, &states.kernels);
            }
            RecurrentRule::GatedDelta(_) => {}
        }
        launch!(
            self,
            states.kernels.convolve_channels,
            "convolve_channels",
            convolution.config,
            x.address(),
            layer.address,
            convolution.weights,
            convolution.bias,
            step.recurrent_spans,
            step.words,
            convolution.slot_len,
            x.width() as i32,
            convolution.num_channels,
            convolution.kernel_len
        );
        let (Some(rule), Some(kernel)) = (&weights.rule, &layer.rule) else {
            panic!("the rule's weights");
        };
        self.apply_rule(step, shape, rule, (kernel, layer), x, late);
        self.gate_results(step.num_rows, shape, rule, &states.kernels, x, late, out);
    }

    fn gate_attention(
        &mut self,
        num_rows: usize,
        function: GateFunction,
        gates: &Rows<f32>,
        attended: &mut Rows<bf16>,
    ) {
        let (num_gates, width) = (gates.width(), attended.width());
        assert!(
            width.is_multiple_of(num_gates),
            "a gate for each run of elements"
        );
        launch!(
            self,
            self.kernels.gate_attention,
            "gate_attention",
            shared_row_grid(self.padded(num_rows), width),
            attended.address(),
            gates.address(),
            width as i32,
            (width / num_gates) as i32,
            i32::from(function == GateFunction::Softplus)
        );
    }
}

impl CudaStates {
    /// Where the states of a slot are, layer by layer.
    ///
    /// # Panics
    ///
    /// There is no such slot.
    fn spans(&self, slot: u32) -> impl Iterator<Item = DeviceSpan> + '_ {
        let slot = slot as usize;
        assert!(slot < self.num_slots, "slot {slot} of {}", self.num_slots);
        self.layers.iter().map(move |layer| {
            let num_bytes = 4 * layer.state_len;
            DeviceSpan {
                address: layer.address + (slot * num_bytes) as u64,
                num_bytes,
            }
        })
    }
}

impl Convolution {
    /// Checks the operands of a layer. `None` if the step has no sequences.
    fn new(
        step: &CudaStep,
        params: &RecurrenceParams<'_, Cuda>,
        x: &Rows<f32>,
        layer: &Layer,
    ) -> Option<Self> {
        let (shape, weights) = (params.shape, params.weights);
        let (num_channels, kernel_len) = (shape.num_channels(), shape.kernel_len);
        assert_eq!(x.width(), shape.input_len(), "x is [m, input_len]");
        assert_len(&weights.convolution, kernel_len * num_channels);
        let bias = weights.convolution_bias.as_ref().map_or(0, |bias| {
            assert_len(bias, num_channels);
            bias.memory.address()
        });
        assert_eq!(layer.state_len, shape.state_len(), "the layer's states");
        let num_spans = step.num_recurrent_spans;
        (num_spans > 0).then(|| Self {
            config: by_channels(num_channels, num_spans),
            weights: weights.convolution.memory.address(),
            bias,
            slot_len: layer.state_len as u64,
            num_channels: num_channels as i32,
            kernel_len: kernel_len as i32,
        })
    }
}

/// A thread for each channel of each sequence.
fn by_channels(num_channels: usize, num_spans: usize) -> LaunchConfig {
    let num_blocks = num_channels.div_ceil(CHANNEL_THREADS);
    LaunchConfig {
        grid_dim: (num_blocks as u32, num_spans as u32, 1),
        block_dim: (CHANNEL_THREADS as u32, 1, 1),
        shared_mem_bytes: 0,
    }
}

impl Cuda {
    /// Computes a selective scan, whose values have been convolved.
    #[allow(clippy::too_many_arguments, reason = "each is an operand")]
    fn scan(
        &mut self,
        step: &CudaStep,
        shape: &RecurrenceShape,
        scan: &ScanShape,
        weights: &RuleWeights<Self>,
        (kernel, layer): (&CudaFunction, &Layer),
        x: &Rows<f32>,
        late: Option<&LateInputs<'_, Self>>,
        out: &mut Rows<bf16>,
    ) {
        let (num_channels, state_dim) = (scan.num_channels, scan.state_dim);
        let Some(LateInputs::Selected { times, keys }) = late else {
            panic!("late inputs");
        };
        let widths = [num_channels, 2 * state_dim];
        assert_eq!([times.width(), keys.width()], widths, "late inputs");
        let skips = weights.skips.as_ref().expect("the rule's weights");
        assert_len(&weights.rates, num_channels * state_dim);
        assert_len(&weights.time_biases, num_channels);
        assert_len(skips, num_channels);
        let norm = weights.norm.as_ref().map_or(0, |norm| {
            assert_len(norm, 2 * state_dim);
            norm.memory.address()
        });
        assert_eq!(norm != 0, scan.norm_eps.is_some(), "the norm's weights");
        launch!(
            self,
            kernel,
            "selective_scan",
            by_channels(num_channels, step.num_recurrent_spans),
            out.address(),
            x.address(),
            times.address(),
            keys.address(),
            layer.address,
            weights.rates.memory.address(),
            weights.time_biases.memory.address(),
            skips.memory.address(),
            norm,
            step.recurrent_spans,
            step.words,
            layer.state_len as u64,
            num_channels as i32,
            state_dim as i32,
            shape.convolution_len() as i32,
            scan.norm_eps.unwrap_or(0.0)
        );
    }

    /// Multiplies the parts of a state space's rows with their factors.
    fn scale_inputs(
        &mut self,
        num_rows: usize,
        space: &StateSpaceShape,
        x: &mut Rows<f32>,
        kernels: &StateKernels,
    ) {
        if space.input_scales == [1.0; 5] {
            return;
        }
        let [of_values, of_keys, of_queries, of_gates, of_times] = space.input_scales;
        launch!(
            self,
            kernels.scale_inputs,
            "scale_inputs",
            shared_row_grid(num_rows, x.width()),
            x.address(),
            space.value_len() as i32,
            space.key_len() as i32,
            space.num_heads as i32,
            of_values,
            of_keys,
            of_queries,
            of_gates,
            of_times
        );
    }

    /// Puts the results of a rule in the place of the values.
    fn apply_rule(
        &mut self,
        step: &CudaStep,
        shape: &RecurrenceShape,
        weights: &RuleWeights<Self>,
        (kernel, layer): (&CudaFunction, &Layer),
        x: &mut Rows<f32>,
        late: Option<&LateInputs<'_, Self>>,
    ) {
        let (rates, biases) = (&weights.rates, &weights.time_biases);
        let (slot_len, convolution_len) = (layer.state_len as u64, shape.convolution_len() as i32);
        let config = |num_heads: usize, num_biases: usize, num_columns: usize| {
            assert_len(rates, num_heads);
            assert_len(biases, num_biases);
            let num_blocks = num_heads * num_columns.div_ceil(RULE_COLUMNS);
            LaunchConfig {
                grid_dim: (num_blocks as u32, step.num_recurrent_spans as u32, 1),
                block_dim: (RULE_THREADS, 1, 1),
                shared_mem_bytes: 0,
            }
        };
        match &shape.rule {
            RecurrentRule::GatedConvolution { .. } | RecurrentRule::SelectiveScan(_) => {
                unreachable!("it has no rule")
            }
            RecurrentRule::GatedDelta(delta) if delta.form == DeltaForm::Channels => {
                let Some(LateInputs::LowRank { decays, .. }) = late else {
                    panic!("late inputs");
                };
                assert_eq!(decays.width(), delta.num_decays(), "late inputs");
                launch!(
                    self,
                    kernel,
                    "channel_delta_rule",
                    config(delta.num_value_heads, delta.num_decays(), delta.value_dim),
                    x.address(),
                    decays.address(),
                    layer.address,
                    rates.memory.address(),
                    biases.memory.address(),
                    step.recurrent_spans,
                    step.words,
                    slot_len,
                    delta.num_key_heads as i32,
                    delta.num_value_heads as i32,
                    delta.key_dim as i32,
                    delta.value_dim as i32,
                    convolution_len,
                    delta.strength_scale
                );
            }
            RecurrentRule::GatedDelta(delta) => launch!(
                self,
                kernel,
                "delta_rule",
                config(
                    delta.num_value_heads,
                    delta.num_value_heads,
                    delta.value_dim
                ),
                x.address(),
                layer.address,
                rates.memory.address(),
                biases.memory.address(),
                step.recurrent_spans,
                step.words,
                slot_len,
                delta.num_key_heads as i32,
                delta.num_value_heads as i32,
                delta.key_dim as i32,
                delta.value_dim as i32,
                convolution_len,
                delta.strength_scale
            ),
            RecurrentRule::StateSpace(space) => {
                let skips = weights.skips.as_ref().expect("the rule's weights");
                assert_len(skips, space.num_heads);
                let [least, most] = space.times;
                launch!(
                    self,
                    kernel,
                    "state_space",
                    config(space.num_heads, space.num_heads, space.head_dim),
                    x.address(),
                    layer.address,
                    rates.memory.address(),
                    biases.memory.address(),
                    skips.memory.address(),
                    step.recurrent_spans,
                    step.words,
                    slot_len,
                    space.num_groups as i32,
                    space.num_heads as i32,
                    space.state_dim as i32,
                    space.head_dim as i32,
                    convolution_len,
                    least,
                    most
                );
            }
        }
    }

    /// `out = norm(results) * silu(gates)`, or another [norm](SpaceNorm), or with late gates, which have a sigmoid.
    #[allow(clippy::too_many_arguments, reason = "each is an operand")]
    fn gate_results(
        &mut self,
        num_rows: usize,
        shape: &RecurrenceShape,
        weights: &RuleWeights<Self>,
        kernels: &StateKernels,
        x: &Rows<f32>,
        late: Option<&LateInputs<'_, Self>>,
        out: &mut Rows<bf16>,
    ) {
        let (first_result, group_len, norm_len, order, eps) = match &shape.rule {
            RecurrentRule::GatedConvolution { .. } | RecurrentRule::SelectiveScan(_) => {
                unreachable!("it has no results")
            }
            RecurrentRule::GatedDelta(delta) => (
                2 * delta.key_len(),
                delta.value_dim,
                delta.value_dim,
                SpaceNorm::Ungated,
                delta.norm_eps,
            ),
            RecurrentRule::StateSpace(space) => (
                0,
                space.value_len() / space.num_norm_groups,
                space.value_len(),
                space.norm,
                space.norm_eps,
            ),
        };
        let (gates, first_gate) = match late {
            Some(LateInputs::LowRank { gates, .. }) => {
                assert_eq!(gates.width(), out.width(), "late inputs");
                (*gates, 0)
            }
            Some(LateInputs::Selected { .. }) | None => (x, shape.num_channels()),
        };
        let order = match order {
            SpaceNorm::Gated => 0,
            _ if late.is_some() => 3,
            SpaceNorm::Ungated => 1,
            SpaceNorm::Absent => 2,
        };
        let norm = weights.norm.as_ref().map_or(0, |norm| {
            assert_len(norm, norm_len);
            norm.memory.address()
        });
        assert!(norm != 0 || order == 2, "the norm's weights");
        let threads = group_len.next_multiple_of(32).min(MAX_GATE_THREADS);
        let config = LaunchConfig {
            grid_dim: (num_rows as u32, (out.width() / group_len) as u32, 1),
            ..row_grid(num_rows, threads as u32)
        };
        launch!(
            self,
            kernels.gate_results,
            "gate_results",
            config,
            out.address(),
            x.address(),
            gates.address(),
            norm,
            x.width() as i32,
            gates.width() as i32,
            out.width() as i32,
            first_result as i32,
            first_gate as i32,
            group_len as i32,
            norm_len as i32,
            order,
            eps
        );
    }
}

impl StateKernels {
    fn load(kernels: &Kernels) -> Result<Self, LoadError> {
        Ok(Self {
            convolve_channels: kernels.function("convolve", "convolve_channels", 0)?,
            convolve_values: kernels.function("convolve", "convolve_values", 0)?,
            gated_convolution: kernels.function("convolve", "gated_convolution", 0)?,
            scale_inputs: kernels.function("recurrent_gates", "scale_inputs", 0)?,
            gate_results: kernels.function("recurrent_gates", "gate_results", 0)?,
        })
    }
}

/// The kernel of a layer's rule, if it has more than a convolution.
fn rule_kernel(
    kernels: &Kernels,
    shape: &RecurrenceShape,
) -> Result<Option<CudaFunction>, LoadError> {
    let too_large = |what: &str, value: usize, most: usize| {
        LoadError::Resource(format!(
            "the {what} of a layer with a recurrent state is {value}, and GPUs compute up to {most}: use an \
             instance_group of kind KIND_CPU"
        ))
    };
    if shape.kernel_len > MAX_KERNEL_LEN {
        let what = "convolution's length";
        return Err(too_large(what, shape.kernel_len, MAX_KERNEL_LEN));
    }
    let (name, what, size) = match &shape.rule {
        RecurrentRule::GatedConvolution { .. } => return Ok(None),
        RecurrentRule::GatedDelta(delta) => {
            let name = match delta.form {
                DeltaForm::Heads => "delta_rule",
                DeltaForm::Channels => "channel_delta_rule",
            };
            (name, "key's size", delta.key_dim)
        }
        RecurrentRule::StateSpace(space) => ("state_space", "state's size", space.state_dim),
        RecurrentRule::SelectiveScan(scan) => ("selective_scan", "state's size", scan.state_dim),
    };
    let (file, sizes): (_, &[usize]) = match shape.rule {
        RecurrentRule::SelectiveScan(_) => ("selective_scan", &SCAN_SIZES),
        RecurrentRule::GatedDelta(DeltaShape {
            form: DeltaForm::Channels,
            ..
        }) => ("recurrent_rules", &CHANNEL_RULE_SIZES),
        _ => ("recurrent_rules", &RULE_SIZES),
    };
    let Some(largest) = sizes.iter().find(|&&largest| size <= largest) else {
        return Err(too_large(what, size, sizes[sizes.len() - 1]));
    };
    let function = kernels.function(file, &format!("{name}_{largest}"), 0)?;
    Ok(Some(function))
}

#[track_caller]
fn assert_len(vector: &Vector, len: usize) {
    assert_eq!(vector.memory.num_bytes(), 4 * len, "a vector's length");
}
