//! Inputs of each layer's own, and factors of the residual stream, by their definition.

use inflight_device::{Activation, LayerInputOps, LayerInputParams};

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
            let embeddings = params.table.row(token as usize).to_vec();
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
}
