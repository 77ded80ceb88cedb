//! The state that a forward pass of the model leaves for each of its tokens.

use super::source::{HeadSource, NUM_STATES};
use super::weights::load_linear;
use crate::limits::RunnerLimits;
use crate::packer::Packer;
use inflight_base::LoadError;
use inflight_device::{Device, Linear, Norm, Output, StateOps};

/// Reads the residual stream in front of some layers, and makes one state of the three.
pub(crate) struct StateTap<D: Device> {
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

impl<D: Device> StateTap<D> {
    pub(crate) fn new(
        source: &HeadSource,
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

    /// The residual stream is as layer `layer` finds it.
    pub(crate) fn read(&mut self, device: &mut D, layer: usize, num_rows: usize, hidden: &D::Sums) {
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

    /// Writes the states of a step's tokens, `[num_rows, head's hidden_size]`.
    pub(crate) fn states(&mut self, device: &mut D, num_rows: usize, out: &mut Vec<f32>) {
        device.norm(num_rows, &self.sums, Norm::Identity, &mut self.states);
        out.resize(num_rows * self.width, 0.0);
        self.ops.read_states(device, &self.states, num_rows, out);
    }
}
