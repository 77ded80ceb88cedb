//! Inputs of each layer's own, factors of the residual stream, and several residual streams, by their definition.

use half::bf16;
use inflight_device::{Activation, LayerInputOps, LayerInputParams, RopeTable, StreamCoefs};

use super::{ExpertRows, Reference, Rows, Step, activated, exact, normalise};

/// Operations of models whose layers have inputs of their own.
#[derive(Clone, Copy, Debug)]
pub struct ReferenceLayerInputs;

impl LayerInputOps<Reference> for ReferenceLayerInputs {
    fn combine(
        self,
        _: &mut Reference,
        step: &Step<'_>,
        params: LayerInputParams<'_, Reference>,
        inputs: &mut Rows,
    ) {
        let width = params.norm.len();
        for (row, &token) in step.inputs.token_ids.iter().enumerate() {
            let token = token as usize;
            let is_known = token < params.table.values.len() / params.table.width;
            let embeddings = params.table.row(if is_known { token } else { 0 }).to_vec();
            let projected = inputs.row(row).to_vec();
            for layer in 0..inputs.width / width {
                let of_layer = layer * width..(layer + 1) * width;
                let projected: Vec<_> = projected[of_layer.clone()]
                    .iter()
                    .map(|x| x * params.projection_scale)
                    .collect();
                let normed = normalise(&projected, params.norm, params.eps);
                for (column, x) in of_layer.zip(normed) {
                    let embedding = exact(embeddings[column]) * exact(params.embedding_scale);
                    inputs.set(row, column, (x + embedding) * exact(params.scale));
                }
            }
        }
    }

    fn gate(
        self,
        _: &mut Reference,
        num_rows: usize,
        activation: Activation,
        gates: &mut Rows,
        inputs: &Rows,
        layer: usize,
        out: &mut Rows,
    ) {
        let width = gates.width;
        for row in 0..num_rows {
            for column in 0..width {
                let input = exact(inputs.row(row)[layer * width + column]);
                let gate = activated(activation, exact(gates.row(row)[column]));
                out.set(row, column, gate * input);
            }
        }
    }

    fn keep_rows(self, _: &mut Reference, step: &Step<'_>, inputs: &mut Rows) {
        inputs.keep(step.inputs.kept_rows);
    }

    fn clear(self, _: &mut Reference, num_rows: usize, out: &mut Rows) {
        for row in 0..num_rows {
            for column in 0..out.width {
                out.set(row, column, 0.0);
            }
        }
    }

    fn scale_experts(
        self,
        _: &mut Reference,
        num_rows: usize,
        scales: &Vec<f32>,
        rows: &mut ExpertRows,
    ) {
        for (chosen, _) in &mut rows.0[..num_rows] {
            for (expert, weight) in chosen {
                *weight *= exact(scales[*expert]);
            }
        }
    }

    fn scale_queries(self, _: &mut Reference, step: &Step<'_>, angles: &RopeTable, q: &mut Rows) {
        for row in 0..step.inputs.token_ids.len() {
            let (_, position) = step.batch.place(row);
            let factor = angles.query_factor(position).map_or(1.0, exact);
            for column in 0..q.width {
                q.set(row, column, exact(q.row(row)[column]) * factor);
            }
        }
    }

    fn scale_columns(
        self,
        _: &mut Reference,
        num_rows: usize,
        x: &Rows,
        weight: &Vec<f32>,
        out: &mut Rows,
    ) {
        for row in 0..num_rows {
            for (column, weight) in weight.iter().enumerate() {
                out.set(row, column, exact(x.row(row)[column]) * exact(*weight));
            }
        }
    }

    fn scale_columns_in_place(
        self,
        _: &mut Reference,
        num_rows: usize,
        weight: &Vec<f32>,
        x: &mut Rows,
    ) {
        for row in 0..num_rows {
            for (column, weight) in weight.iter().enumerate() {
                x.set(row, column, exact(x.row(row)[column]) * exact(*weight));
            }
        }
    }

    fn predict_streams(
        self,
        _: &mut Reference,
        num_rows: usize,
        of: StreamCoefs<'_, Reference>,
        hidden: &mut Rows,
        others: &mut [Rows],
        predicted: &mut Rows,
    ) {
        let num_streams = others.len() + 1;
        for row in 0..num_rows {
            let coefs = coefs(&of, row);
            for column in 0..hidden.width {
                let others_of = others.iter().map(|it| it.row(row)[column]);
                let old: Vec<_> = std::iter::once(hidden.row(row)[column])
                    .chain(others_of)
                    .map(exact)
                    .collect();
                let mix = |stream: usize| {
                    let coefs = &coefs[stream * num_streams..][..num_streams];
                    let terms = coefs.iter().zip(&old).map(|(coef, old)| coef * old);
                    old[stream] + terms.sum::<f64>()
                };
                hidden.set(row, column, mix(0));
                predicted.set(row, column, mix(0));
                for (index, other) in others.iter_mut().enumerate() {
                    other.set(row, column, mix(index + 1));
                }
            }
        }
    }

    fn correct_streams(
        self,
        _: &mut Reference,
        num_rows: usize,
        of: StreamCoefs<'_, Reference>,
        predicted: &Rows,
        hidden: &mut Rows,
        others: &mut [Rows],
    ) {
        for row in 0..num_rows {
            let coefs = coefs(&of, row);
            for column in 0..hidden.width {
                let predicted = exact(predicted.row(row)[column]);
                let difference = exact(hidden.row(row)[column]) - predicted;
                hidden.set(row, column, predicted + (coefs[0] + 1.0) * difference);
                for (other, coef) in others.iter_mut().zip(&coefs[1..]) {
                    let value = exact(other.row(row)[column]) + (coef + 1.0) * difference;
                    other.set(row, column, value);
                }
            }
        }
    }

    fn match_magnitudes(self, _: &mut Reference, num_rows: usize, like: &Rows, x: &mut Rows) {
        for row in 0..num_rows {
            let [of_like, of_x] = [like.row(row), x.row(row)].map(|row| {
                let squares = row.iter().map(|x| exact(*x).powi(2));
                squares.sum::<f64>() / row.len() as f64
            });
            let factor = (of_like / of_x.max(1e-5)).sqrt();
            for column in 0..x.width {
                x.set(row, column, exact(x.row(row)[column]) * factor);
            }
        }
    }

    fn gate_sparsely(
        self,
        _: &mut Reference,
        num_rows: usize,
        activation: Activation,
        num_deviations: f32,
        gate_up: &mut Rows,
        out: &mut Rows,
    ) {
        let width = out.width;
        for row in 0..num_rows {
            let values: Vec<_> = gate_up.row(row).iter().map(|x| exact(*x)).collect();
            let (gates, ups) = values.split_at(width);
            let mean = gates.iter().sum::<f64>() / width as f64;
            let squares = gates.iter().map(|gate| (gate - mean).powi(2));
            let deviation = (squares.sum::<f64>() / width as f64).sqrt();
            let cutoff = mean + deviation * exact(num_deviations);
            for (column, (gate, up)) in gates.iter().zip(ups).enumerate() {
                let gate = activated(activation, (gate - cutoff).max(0.0));
                out.set(row, column, gate * up);
            }
        }
    }

    fn norm_inputs(
        self,
        _: &mut Reference,
        num_rows: usize,
        weight: &Vec<f32>,
        eps: f32,
        x: &mut Rows,
    ) {
        for row in 0..num_rows {
            for (column, value) in normalise(x.row(row), weight, eps).into_iter().enumerate() {
                x.set(row, column, value);
            }
        }
    }

    fn clip(self, _: &mut Reference, num_rows: usize, bound: f32, x: &mut Rows) {
        for row in 0..num_rows {
            for column in 0..x.width {
                let value = exact(x.row(row)[column]);
                x.set(row, column, value.clamp(-exact(bound), exact(bound)));
            }
        }
    }
}

/// The coefficients of a row.
fn coefs(of: &StreamCoefs<'_, Reference>, row: usize) -> Vec<f64> {
    let routed = of.routed.row(row);
    let num_coefs = of.weights.len() / routed.len();
    let mut coefs = vec![0.0; num_coefs];
    for (routed, weights) in routed.iter().zip(of.weights.chunks_exact(num_coefs)) {
        let share = bf16::from_f64(exact(*routed).tanh());
        for (coef, weight) in coefs.iter_mut().zip(weights) {
            *coef += share.to_f64() * exact(*weight);
        }
    }
    coefs
}
