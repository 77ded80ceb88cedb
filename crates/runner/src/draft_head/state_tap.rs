//! The state that a forward pass of the model leaves for each of its tokens.

use super::eagle_source::{EagleSource, NUM_STATES};
use super::eagle_weights::load_linear;
use super::source::{HeadKind, HeadSource};
use crate::limits::RunnerLimits;
use crate::packer::Packer;
use inflight_base::LoadError;
use inflight_device::{Device, Linear, Norm, Output, StateOps};

/// Reads the states of a head while the model computes.
pub(crate) enum StateTap<D: Device> {
    /// The states of an EAGLE-3 head.
    Layers(LayersTap<D>),
    /// The inputs of the output layer.
    Output {
        ops: D::States,
        width: usize,
        /// `[num_rows, width]`.
        states: Vec<f32>,
    },
}

impl<D: Device> StateTap<D> {
    pub(crate) fn new(
        source: &HeadSource,
        limits: &RunnerLimits,
        device: &mut D,
        ops: D::States,
    ) -> Result<Self, LoadError> {
        Ok(match source.kind() {
            HeadKind::Eagle(eagle) => Self::Layers(LayersTap::new(eagle, limits, device, ops)?),
            HeadKind::Mtp(mtp) => Self::Output {
                ops,
                width: mtp.spec().hidden_size,
                states: Vec::new(),
            },
        })
    }

    /// Whether it reads what the output layer reads, of all tokens: the last layer is computed for all of them then.
    pub(crate) fn reads_output(&self) -> bool {
        matches!(self, Self::Output { .. })
    }

    /// The residual stream is as layer `layer` finds it.
    pub(crate) fn read(&mut self, device: &mut D, layer: usize, num_rows: usize, hidden: &D::Sums) {
        if let Self::Layers(tap) = self {
            tap.read(device, layer, num_rows, hidden);
        }
    }

    /// All rows are as the output layer reads them.
    pub(crate) fn read_output(&mut self, device: &mut D, num_rows: usize, normed: &D::Inputs) {
        if let Self::Output { ops, width, states } = self {
            states.resize(num_rows * *width, 0.0);
            ops.read_states(device, normed, num_rows, states);
        }
    }

    /// Takes the states of a step's tokens, `[num_rows, head's hidden_size]`.
    pub(crate) fn states(&mut self, device: &mut D, num_rows: usize, out: &mut Vec<f32>) {
        match self {
            Self::Layers(tap) => tap.states(device, num_rows, out),
            Self::Output { states, .. } => std::mem::swap(out, states),
        }
    }
}

/// Reads the residual stream in front of some layers, and makes one state of the three.
pub(crate) struct LayersTap<D: Device> {
    ops: D::States,
    layers: [usize; NUM_STATES],
    /// The columns of `fc` for each of them, `[head's hidden_size, hidden_size]`.
    parts: Vec<Linear<D>>,
    /// `[max_num_tokens, hidden_size]`.
    read: D::Inputs,
    /// `[max_num_tokens, head's hidden_size]`.
    sums: D::Sums,
    /// The same, to be read.
    states: D::Inputs,
    width: usize,
}

impl<D: Device> LayersTap<D> {
    fn new(
        source: &EagleSource,
        limits: &RunnerLimits,
        device: &mut D,
        ops: D::States,
    ) -> Result<Self, LoadError> {
        let store = source.store()?;
        let fc = source.fc(&store)?;
        let target_width = source.target_width();
        let width = source.spec().hidden_size;
        let mut packer = Packer::new(device, limits.weights, None);
        let parts = (0..NUM_STATES).map(|index| {
            let columns = index * target_width..(index + 1) * target_width;
            load_linear(&mut packer, &[fc.part(0..width, columns)])
        });
        let parts = parts.collect::<Result<_, _>>()?;
        store.check()?;
        let max_rows = limits.max_num_tokens.index();
        Ok(Self {
            ops,
            layers: source.layers(),
            parts,
            read: device.alloc_inputs(max_rows, target_width)?,
            sums: device.alloc_sums(max_rows, width)?,
            states: device.alloc_inputs(max_rows, width)?,
            width,
        })
    }

    fn read(&mut self, device: &mut D, layer: usize, num_rows: usize, hidden: &D::Sums) {
        let Some(place) = self.layers.iter().position(|&it| it == layer) else {
            return;
        };
        device.norm(num_rows, hidden, Norm::Identity, &mut self.read);
        let output = match place {
            0 => Output::Store,
            _ => Output::Add,
        };
        let part = &self.parts[place];
        device.project(num_rows, &self.read, part, output, None, &mut self.sums);
    }

    fn states(&mut self, device: &mut D, num_rows: usize, out: &mut Vec<f32>) {
        device.norm(num_rows, &self.sums, Norm::Identity, &mut self.states);
        out.resize(num_rows * self.width, 0.0);
        self.ops.read_states(device, &self.states, num_rows, out);
    }
}
