//! Layers with recurrent states, by their definition.

use inflight_base::LoadError;
use inflight_device::{
    DeltaForm, DeltaShape, GateFunction, LateInputs, RecurrenceParams, RecurrenceShape,
    RecurrentOps, RecurrentRule, RuleWeights, ScanShape, SpaceNorm, StateSpaceShape,
};

use super::{Reference, Rows, Step, exact};

/// The states of each layer, by slot: the last inputs of the convolution of each channel, and the matrices of heads.
pub struct States(Vec<Vec<State>>);

#[derive(Clone, Default)]
struct State {
    inputs: Vec<Vec<f64>>,
    heads: Vec<Vec<f64>>,
}

impl State {
    /// All zeros.
    fn new(shape: &RecurrenceShape) -> Self {
        let heads = |num: usize, len: usize| vec![vec![0.0; len]; num];
        Self {
            inputs: heads(shape.num_channels(), shape.kernel_len),
            heads: match shape.rule {
                RecurrentRule::GatedConvolution { .. } => Vec::new(),
                RecurrentRule::GatedDelta(delta) => {
                    heads(delta.num_value_heads, delta.matrix_len())
                }
                RecurrentRule::StateSpace(space) => heads(space.num_heads, space.matrix_len()),
                RecurrentRule::SelectiveScan(scan) => heads(scan.num_channels, scan.state_dim),
            },
        }
    }
}

impl States {
    fn copy_to(&self, source: u32, other: &mut Self, target: u32) {
        for (layer, other) in self.0.iter().zip(&mut other.0) {
            other[target as usize] = layer[source as usize].clone();
        }
    }
}

impl RecurrentOps for Reference {
    type RecurrentStates = States;
    type HostStates = States;

    fn alloc_recurrent_states(
        &mut self,
        layers: &[RecurrenceShape],
        num_slots: usize,
    ) -> Result<States, LoadError> {
        let of_layers = layers.iter().map(|_| vec![State::default(); num_slots]);
        Ok(States(of_layers.collect()))
    }

    fn copy_recurrent_states(&mut self, states: &mut States, from: u32, to: u32) {
        for layer in &mut states.0 {
            layer[to as usize] = layer[from as usize].clone();
        }
    }

    fn alloc_host_states(
        &mut self,
        states: &States,
        num_slots: usize,
    ) -> Result<States, LoadError> {
        let of_layers = states.0.iter().map(|_| vec![State::default(); num_slots]);
        Ok(States(of_layers.collect()))
    }

    fn offload_states(&mut self, states: &States, source: u32, host: &mut States, target: u32) {
        states.copy_to(source, host, target);
    }

    fn onboard_states(&mut self, host: &States, source: u32, states: &mut States, target: u32) {
        host.copy_to(source, states, target);
    }

    fn convolve(
        &mut self,
        step: &Step<'_>,
        params: RecurrenceParams<'_, Self>,
        x: &mut Rows,
        states: &mut States,
        out: &mut Rows,
    ) {
        let num_channels = params.shape.num_channels();
        let spans = step.batch.spans().iter().zip(step.inputs.state_slots);
        for ((span, &slot), &is_repeated) in spans.zip(step.inputs.is_repeated) {
            let layer = &mut states.0[params.layer];
            if span.tokens.len() == span.kv_len as usize {
                layer[slot as usize] = State::new(params.shape);
            }
            for token in span.tokens.clone() {
                let row = token as usize;
                let values = &x.row(row)[..num_channels];
                let values: Vec<_> = values.iter().map(|&x| exact(x)).collect();
                let inputs = &mut layer[slot as usize].inputs;
                let sums = convolved(&params, &values, inputs, is_repeated);
                for (column, sum) in sums.into_iter().enumerate() {
                    x.set(row, column, silu(sum));
                    out.set(row, column, silu(sum));
                }
                let inputs = layer[slot as usize].inputs.clone();
                let saved = step.inputs.saved_states.iter();
                for saved in saved.filter(|saved| saved.token == token) {
                    layer[saved.slot as usize].inputs = inputs.clone();
                }
            }
        }
    }

    fn mix_recurrence(
        &mut self,
        step: &Step<'_>,
        params: RecurrenceParams<'_, Self>,
        x: &mut Rows,
        states: &mut States,
        out: &mut Rows,
    ) {
        let shape = params.shape;
        let spans = step.batch.spans().iter().zip(step.inputs.state_slots);
        for ((span, &slot), &is_repeated) in spans.zip(step.inputs.is_repeated) {
            let layer = &mut states.0[params.layer];
            let state = &mut layer[slot as usize];
            // Of a selective scan, the convolution's operation begins it.
            let is_convolved = matches!(shape.rule, RecurrentRule::SelectiveScan(_));
            if span.tokens.len() == span.kv_len as usize && !is_convolved {
                *state = State::new(shape);
            }
            for token in span.tokens.clone() {
                let row = token as usize;
                let x: Vec<_> = x.row(row).iter().map(|&x| exact(x)).collect();
                let x = scaled_inputs(shape, x);
                let late = params.late.as_ref().map(|late| {
                    let both = match late {
                        LateInputs::LowRank { gates, decays } => [gates, decays],
                        LateInputs::Selected { times, keys } => [times, keys],
                    };
                    both.map(|rows| rows.row(row).iter().map(|&x| exact(x)).collect())
                });
                let state = &mut layer[slot as usize];
                let results = mix_token(&params, (&x, late), state, is_repeated);
                for (column, result) in results.into_iter().enumerate() {
                    out.set(row, column, result);
                }
                let saved = step.inputs.saved_states.iter();
                for saved in saved.filter(|saved| saved.token == token) {
                    match is_convolved {
                        true => {
                            let heads = layer[slot as usize].heads.clone();
                            layer[saved.slot as usize].heads = heads;
                        }
                        false => layer[saved.slot as usize] = layer[slot as usize].clone(),
                    }
                }
            }
        }
    }

    fn gate_attention(
        &mut self,
        num_rows: usize,
        function: GateFunction,
        gates: &Rows,
        attended: &mut Rows,
    ) {
        let run_len = attended.width / gates.width;
        for row in 0..num_rows {
            for column in 0..attended.width {
                let gate = exact(gates.row(row)[column / run_len]);
                let gate = match function {
                    GateFunction::Sigmoid => sigmoid(gate),
                    GateFunction::Softplus => gate.exp().ln_1p(),
                };
                attended.set(row, column, exact(attended.row(row)[column]) * gate);
            }
        }
    }
}

fn mix_token(
    params: &RecurrenceParams<'_, Reference>,
    (x, late): (&[f64], Option<[Vec<f64>; 2]>),
    state: &mut State,
    is_repeated: bool,
) -> Vec<f64> {
    let shape = params.shape;
    let num_channels = shape.num_channels();
    let input = |channel: usize| match shape.rule {
        RecurrentRule::GatedConvolution { .. } => x[channel] * x[2 * num_channels + channel],
        RecurrentRule::GatedDelta(_)
        | RecurrentRule::StateSpace(_)
        | RecurrentRule::SelectiveScan(_) => x[channel],
    };
    if let (RecurrentRule::SelectiveScan(scan), Some(weights)) = (&shape.rule, &params.weights.rule)
    {
        let [times, keys] = late.expect("its late inputs are there");
        let inputs = [x, &times, &keys];
        return selective_scan(scan, weights, inputs, &mut state.heads, is_repeated);
    }
    let inputs: Vec<_> = (0..num_channels).map(input).collect();
    let convolved = convolved(params, &inputs, &mut state.inputs, is_repeated);
    match (&shape.rule, &params.weights.rule) {
        (RecurrentRule::GatedConvolution { .. }, _) => {
            let c = &x[num_channels..2 * num_channels];
            c.iter().zip(convolved).map(|(c, sum)| c * sum).collect()
        }
        (RecurrentRule::GatedDelta(delta), Some(weights)) => {
            let convolved: Vec<_> = convolved.into_iter().map(silu).collect();
            let heads = &mut state.heads;
            let behind = &x[num_channels..];
            let (gates, strengths, decays) = match late {
                Some([gates, decays]) => (gates, behind.to_vec(), decays),
                None => {
                    let (gates, rest) = behind.split_at(delta.value_len());
                    let (strengths, decays) = rest.split_at(delta.num_value_heads);
                    (gates.to_vec(), strengths.to_vec(), decays.to_vec())
                }
            };
            let inputs = [&gates[..], &strengths, &decays];
            delta_rule(delta, weights, inputs, &convolved, heads, is_repeated)
        }
        (RecurrentRule::StateSpace(space), Some(weights)) => {
            let convolved: Vec<_> = convolved.into_iter().map(silu).collect();
            let heads = &mut state.heads;
            state_space(space, weights, x, &convolved, heads, is_repeated)
        }
        (RecurrentRule::SelectiveScan(_), _)
        | (RecurrentRule::GatedDelta(_) | RecurrentRule::StateSpace(_), None) => {
            unreachable!("its weights are there")
        }
    }
}

/// The sums of the convolution, whose last inputs a state has.
fn convolved(
    params: &RecurrenceParams<'_, Reference>,
    inputs: &[f64],
    windows: &mut [Vec<f64>],
    is_repeated: bool,
) -> Vec<f64> {
    let num_channels = inputs.len();
    let channels = windows.iter_mut().zip(inputs).enumerate();
    let sums = channels.map(|(channel, (window, input))| {
        if !is_repeated {
            window.remove(0);
            window.push(*input);
        }
        let weights = params.weights.convolution.iter();
        let weights = weights.skip(channel).step_by(num_channels);
        let products = weights.zip(&*window).map(|(&w, input)| exact(w) * input);
        let bias = params.weights.convolution_bias.as_ref();
        let bias = bias.map_or(0.0, |bias| exact(bias[channel]));
        products.sum::<f64>() + bias
    });
    sums.collect()
}

/// `x` has convolved values, then gates.
fn selective_scan(
    shape: &ScanShape,
    weights: &RuleWeights<Reference>,
    [x, times, keys]: [&[f64]; 3],
    states: &mut [Vec<f64>],
    is_repeated: bool,
) -> Vec<f64> {
    let num_channels = shape.num_channels;
    let (values, gates) = x.split_at(num_channels);
    let parts = keys.chunks(shape.state_dim).enumerate();
    let parts = parts.map(|(index, part)| match (shape.norm_eps, &weights.norm) {
        (Some(eps), Some(norm)) => {
            let rms = root_mean_square(part, eps);
            let weights = norm[index * shape.state_dim..].iter();
            let pairs = part.iter().zip(weights);
            pairs.map(|(x, &weight)| x / rms * exact(weight)).collect()
        }
        _ => part.to_vec(),
    });
    let parts: Vec<Vec<f64>> = parts.collect();
    let skips = weights.skips.as_ref().expect("a selective scan has them");
    let channels = states.iter_mut().enumerate().map(|(channel, state)| {
        let time = softplus(times[channel] + exact(weights.time_biases[channel]));
        let mut sum = exact(skips[channel]) * values[channel];
        for (row, element) in state.iter_mut().enumerate() {
            if !is_repeated {
                let rate = exact(weights.rates[row * num_channels + channel]);
                *element = *element * (-rate * time).exp() + parts[0][row] * time * values[channel];
            }
            sum += *element * parts[1][row];
        }
        sum * silu(gates[channel])
    });
    channels.collect()
}

/// The outputs of the input projection, scaled.
fn scaled_inputs(shape: &RecurrenceShape, mut x: Vec<f64>) -> Vec<f64> {
    if let RecurrentRule::StateSpace(space) = &shape.rule {
        let (values, keys) = (space.value_len(), space.key_len());
        let lens = [values, keys, keys, values, space.num_heads];
        let scales = lens.into_iter().zip(space.input_scales);
        let scales = scales.flat_map(|(len, scale)| std::iter::repeat_n(exact(scale), len));
        x.iter_mut().zip(scales).for_each(|(x, scale)| *x *= scale);
    }
    x
}

fn delta_rule(
    shape: &DeltaShape,
    weights: &RuleWeights<Reference>,
    [all_gates, strengths, decays]: [&[f64]; 3],
    convolved: &[f64],
    heads: &mut [Vec<f64>],
    is_repeated: bool,
) -> Vec<f64> {
    let DeltaShape {
        key_dim, value_dim, ..
    } = *shape;
    let (queries, rest) = convolved.split_at(shape.key_len());
    let (keys, values) = rest.split_at(shape.key_len());
    let mut out = Vec::new();
    for (head, matrix) in heads.iter_mut().enumerate() {
        let of_key = head / (shape.num_value_heads / shape.num_key_heads) * key_dim;
        let q = normalised(&queries[of_key..][..key_dim]);
        let k = normalised(&keys[of_key..][..key_dim]);
        let own = head * value_dim..(head + 1) * value_dim;
        let (v, gates) = (&values[own.clone()], &all_gates[own]);
        for (row, elements) in matrix.chunks_mut(value_dim).enumerate() {
            let index = match shape.form {
                DeltaForm::Heads => head,
                DeltaForm::Channels => head * key_dim + row,
            };
            let time = softplus(decays[index] + exact(weights.time_biases[index]));
            let decay = (-exact(weights.rates[head]) * time).exp();
            let decay = if is_repeated { 1.0 } else { decay };
            elements.iter_mut().for_each(|element| *element *= decay);
        }
        let read = |matrix: &[f64], at: &[f64], column: usize| -> f64 {
            let rows = matrix.chunks(value_dim).zip(at);
            rows.map(|(row, at)| row[column] * at).sum()
        };
        for column in 0..value_dim {
            let known = read(matrix, &k, column);
            let written = match is_repeated {
                true => 0.0,
                false => {
                    exact(shape.strength_scale) * sigmoid(strengths[head]) * (v[column] - known)
                }
            };
            for (row, k) in matrix.chunks_mut(value_dim).zip(&k) {
                row[column] += k * written;
            }
        }
        let scale = 1.0 / (key_dim as f64).sqrt();
        let sums = (0..value_dim).map(|column| read(matrix, &q, column) * scale);
        let sums: Vec<_> = sums.collect();
        let rms = root_mean_square(&sums, shape.norm_eps);
        let norm = weights.norm.as_ref().expect("the rule has a norm");
        let of_columns = sums.iter().zip(norm).zip(gates);
        out.extend(of_columns.map(|((sum, &weight), &gate)| {
            let gate = match shape.form {
                DeltaForm::Heads => silu(gate),
                DeltaForm::Channels => sigmoid(gate),
            };
            sum / rms * exact(weight) * gate
        }));
    }
    out
}

fn state_space(
    shape: &StateSpaceShape,
    weights: &RuleWeights<Reference>,
    x: &[f64],
    convolved: &[f64],
    heads: &mut [Vec<f64>],
    is_repeated: bool,
) -> Vec<f64> {
    let StateSpaceShape {
        head_dim,
        state_dim,
        ..
    } = *shape;
    let (values, rest) = convolved.split_at(shape.value_len());
    let (keys, queries) = rest.split_at(shape.key_len());
    let (gates, times) = x[convolved.len()..].split_at(shape.value_len());
    let skips = weights.skips.as_ref().expect("a state space has them");
    let mut results = Vec::new();
    for (head, matrix) in heads.iter_mut().enumerate() {
        let of_group = head / (shape.num_heads / shape.num_groups) * state_dim;
        let (key, query) = (
            &keys[of_group..][..state_dim],
            &queries[of_group..][..state_dim],
        );
        let time = softplus(times[head] + exact(weights.time_biases[head]));
        let [least, most] = shape.times.map(exact);
        let time = time.max(least).min(most);
        let decay = (-exact(weights.rates[head]) * time).exp();
        for column in 0..head_dim {
            let value = values[head * head_dim + column];
            let mut sum = exact(skips[head]) * value;
            for (row, element) in matrix.iter_mut().skip(column).step_by(head_dim).enumerate() {
                if !is_repeated {
                    *element = *element * decay + key[row] * time * value;
                }
                sum += *element * query[row];
            }
            results.push(sum);
        }
    }
    let gated = |results: Vec<f64>| -> Vec<f64> {
        let pairs = results.iter().zip(gates);
        pairs.map(|(x, &gate)| x * silu(gate)).collect()
    };
    let normed = |results: Vec<f64>| -> Vec<f64> {
        let norm = weights.norm.as_ref().expect("it has a norm");
        let len = results.len() / shape.num_norm_groups;
        let groups = results.chunks(len).zip(norm.chunks(len));
        let normed = groups.flat_map(|(results, norm)| {
            let rms = root_mean_square(results, shape.norm_eps);
            let pairs = results.iter().zip(norm);
            pairs.map(move |(x, &weight)| x / rms * exact(weight))
        });
        normed.collect()
    };
    match shape.norm {
        SpaceNorm::Gated => normed(gated(results)),
        SpaceNorm::Ungated => gated(normed(results)),
        SpaceNorm::Absent => gated(results),
    }
}

fn normalised(x: &[f64]) -> Vec<f64> {
    let squares: f64 = x.iter().map(|x| x * x).sum();
    let len = (squares + 1e-6).sqrt();
    x.iter().map(|x| x / len).collect()
}

fn root_mean_square(x: &[f64], eps: f32) -> f64 {
    let squares: f64 = x.iter().map(|x| x * x).sum();
    (squares / x.len() as f64 + exact(eps)).sqrt()
}

fn softplus(x: f64) -> f64 {
    x.exp().ln_1p()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn silu(x: f64) -> f64 {
    x * sigmoid(x)
}
