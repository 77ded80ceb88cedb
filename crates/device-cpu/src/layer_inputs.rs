//! Inputs of each layer's own, and factors of the residual stream.

use half::bf16;
use half::slice::HalfFloatSliceExt;

use super::Cpu;
use super::elementwise::{inverse_rms, round_to_bf16};
use super::experts::ExpertRows;
use super::gemm::activate;
use super::math::from_bf16_bits;
use super::rows::Rows;
use super::simd::for_each_simd;
use super::step::CpuStep;
use inflight_device::{Activation, LayerInputOps, LayerInputParams};
use inflight_threads::DisjointSlice;

/// Operations of models whose layers have inputs of their own, on a CPU.
#[derive(Clone, Copy, Debug)]
pub struct CpuLayerInputs;

impl LayerInputOps<Cpu> for CpuLayerInputs {
    fn combine(
        self,
        cpu: &mut Cpu,
        step: &CpuStep<'_>,
        params: LayerInputParams<'_, Cpu>,
        inputs: &mut Rows<f32>,
    ) {
        let row_len = inputs.width();
        let table = params.table;
        assert_eq!(table.hidden_size(), row_len, "embeddings of all layers");
        assert!(
            !params.norm.is_empty() && row_len.is_multiple_of(params.norm.len()),
            "whole layers"
        );
        let (simd, num_rows) = (cpu.simd, step.token_ids.len());
        let call = &CombineCall {
            embedding_scale: params.embedding_scale,
            projection_scale: params.projection_scale,
            norm: params.norm,
            eps: params.eps,
            scale: params.scale,
        };
        let rows: &[u16] = table.rows().reinterpret_cast();
        let inputs = inputs.first_mut(num_rows);
        cpu.for_each_row_block(num_rows, row_len, inputs, |first, inputs| {
            for (row, inputs) in (first..).zip(inputs.chunks_exact_mut(row_len)) {
                let embedding = &rows[step.token_ids[row] as usize * row_len..][..row_len];
                for_each_simd!(simd, combine, (
                    call: &CombineCall<'_>,
                    embedding: &[u16],
                    inputs: &mut [f32],
                ));
            }
        });
    }

    fn gate(
        self,
        cpu: &mut Cpu,
        num_rows: usize,
        activation: Activation,
        gates: &mut Rows<f32>,
        inputs: &Rows<f32>,
        layer: usize,
        out: &mut Rows<bf16>,
    ) {
        let (width, row_len) = (gates.width(), inputs.width());
        assert_eq!(width, out.width(), "one gate for each input");
        assert!((layer + 1) * width <= row_len, "inputs of the layer");
        let (simd, inputs) = (cpu.simd, inputs.first(num_rows));
        let kind = (activation, simd.fuses());
        let gates = DisjointSlice::new(gates.first_mut(num_rows));
        let out = out.first_mut(num_rows).reinterpret_cast_mut();
        cpu.for_each_row_block(num_rows, width, out, |first, out| {
            for (row, out) in (first..).zip(out.chunks_exact_mut(width)) {
                // SAFETY: each row belongs to one task.
                let gates = unsafe { gates.slice(row * width, width) };
                let inputs = &inputs[row * row_len + layer * width..][..width];
                for_each_simd!(simd, gate, (
                    kind: (Activation, bool),
                    gates: &mut [f32],
                    inputs: &[f32],
                    out: &mut [u16],
                ));
            }
        });
    }

    fn keep_rows(self, _: &mut Cpu, step: &CpuStep<'_>, inputs: &mut Rows<f32>) {
        inputs.keep(step.kept_rows);
    }

    fn clear(self, _: &mut Cpu, num_rows: usize, out: &mut Rows<f32>) {
        out.first_mut(num_rows).fill(0.0);
    }

    fn scale_experts(self, _: &mut Cpu, num_rows: usize, scales: &Vec<f32>, rows: &mut ExpertRows) {
        rows.scale(num_rows, scales);
    }
}

/// The operands that all tokens of a call share.
struct CombineCall<'a> {
    embedding_scale: f32,
    projection_scale: f32,
    norm: &'a [f32],
    eps: f32,
    scale: f32,
}

#[inline(always)]
fn combine(call: &CombineCall<'_>, embedding: &[u16], inputs: &mut [f32]) {
    let width = call.norm.len();
    let layers = inputs.chunks_exact_mut(width);
    for (inputs, embedding) in layers.zip(embedding.chunks_exact(width)) {
        for input in inputs.iter_mut() {
            *input *= call.projection_scale;
        }
        let factor = inverse_rms(inputs, call.eps);
        for ((input, weight), bits) in inputs.iter_mut().zip(call.norm).zip(embedding) {
            let projected = *input * factor * weight;
            *input = (projected + from_bf16_bits(*bits) * call.embedding_scale) * call.scale;
        }
    }
}

#[inline(always)]
fn gate(
    (activation, fuses): (Activation, bool),
    gates: &mut [f32],
    inputs: &[f32],
    out: &mut [u16],
) {
    activate(gates, activation, fuses);
    for (gate, input) in gates.iter_mut().zip(inputs) {
        *gate *= input;
    }
    round_to_bf16(gates, out);
}
