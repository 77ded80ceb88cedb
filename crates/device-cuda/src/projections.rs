//! Projections, and what adapters make of their rows.

use cudarc::driver::PushKernelArg;
use half::bf16;

use super::Cuda;
use super::adapters::ProductRows;
use super::kernels::VECTOR;
use super::kernels::{launch, shared_row_grid};
use super::rows::Rows;
use inflight_device::{
    AdaptedRows, InnerActivation, Linear, Output, PackedWeights, PlainActivation,
};

impl Cuda {
    /// `out = x * W^T + bias`, or that added to `out`.
    pub(super) fn project_rows(
        &mut self,
        num_rows: usize,
        x: &Rows<bf16>,
        linear: &Linear<Self>,
        output: Output,
        adapted: Option<AdaptedRows<'_>>,
        out: &mut Rows<f32>,
    ) {
        self.multiply_adapted(num_rows, x, linear, output, adapted, out.address());
        self.add_bias(num_rows, linear, out.address());
    }

    /// `out += bias`, if there is one.
    pub(super) fn add_bias(&mut self, num_rows: usize, linear: &Linear<Self>, out: u64) {
        let Some(bias) = linear.bias.as_ref().filter(|_| num_rows > 0) else {
            return;
        };
        let n = linear.matrix.n();
        launch!(
            self,
            self.kernels.add_bias,
            "add_bias",
            shared_row_grid(self.padded(num_rows), n.div_ceil(VECTOR)),
            out,
            bias.memory.address(),
            n as i32
        );
    }

    /// `out = activation(gate) * up`, where gate and up are the halves of `x * W^T + bias`; without a gate, `out =
    /// activation(x * W^T + bias)`.
    pub(super) fn project_rows_activated(
        &mut self,
        num_rows: usize,
        x: &Rows<bf16>,
        linear: &Linear<Self>,
        activation: InnerActivation,
        adapted: Option<AdaptedRows<'_>>,
        out: &mut Rows<bf16>,
    ) {
        let scratch = self.scratch.address();
        self.multiply_adapted(num_rows, x, linear, Output::Store, adapted, scratch);
        self.activate(num_rows, linear, activation, out.address());
    }

    /// `out = activation(gate) * up`, or `activation(..)`, of the products in the scratch memory and their bias.
    pub(super) fn activate(
        &mut self,
        num_rows: usize,
        linear: &Linear<Self>,
        activation: InnerActivation,
        out: u64,
    ) {
        let n = linear.matrix.n();
        let bias = linear.bias.as_ref().map_or(0, |bias| bias.memory.address());
        let (activation, factor) = match activation {
            InnerActivation::Gated(activation) => (activation, 1.0),
            InnerActivation::ScaledGate(activation, factor) => (activation, factor),
            InnerActivation::Plain(activation) => {
                let grid = shared_row_grid(self.padded(num_rows), n.div_ceil(VECTOR));
                let kernel = match activation {
                    PlainActivation::Of(activation) => self.kernels.plain.of(activation),
                    PlainActivation::QuickGelu => &self.kernels.quick_gelu,
                    PlainActivation::Xielu { positive, negative } => {
                        launch!(
                            self,
                            self.kernels.xielu,
                            "xielu",
                            grid,
                            out,
                            self.scratch.address(),
                            bias,
                            n as i32,
                            positive,
                            negative
                        );
                        return;
                    }
                };
                launch!(
                    self,
                    kernel,
                    "an activation",
                    grid,
                    out,
                    self.scratch.address(),
                    bias,
                    n as i32
                );
                return;
            }
        };
        let width = n / 2;
        launch!(
            self,
            self.kernels.gated.of(activation),
            "a gated activation",
            shared_row_grid(self.padded(num_rows), width.div_ceil(VECTOR)),
            out,
            self.scratch.address(),
            bias,
            width as i32,
            factor
        );
    }

    /// A product, with what adapters make of it. Biases of the model come afterwards: factors do not apply to them.
    fn multiply_adapted(
        &mut self,
        num_rows: usize,
        x: &Rows<bf16>,
        linear: &Linear<Self>,
        output: Output,
        adapted: Option<AdaptedRows<'_>>,
        out: u64,
    ) {
        let tiles = self.adapters.as_ref().map(|it| it.projected(num_rows));
        let rows = ProductRows {
            tiles: tiles.unwrap_or_default(),
            x: x.address(),
            out,
            width: linear.matrix.n(),
        };
        let saved = match (output, adapted) {
            (Output::Add, Some(adapted)) => self.take_adapted(rows, adapted),
            _ => 0,
        };
        self.multiply(num_rows, rows.x, &linear.matrix, output, out);
        if let Some(adapted) = adapted {
            self.add_adapted(rows, adapted, saved);
        }
    }
}
