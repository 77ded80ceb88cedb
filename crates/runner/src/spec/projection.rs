//! Matrix products of a layer.

use inflight_checkpoint::{RowOrder, RowRuns, RowSelection};
use inflight_numbers::Stacking;

/// One matrix product of a layer: linear layers that share their input, packed into one matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Projection {
    /// The linear layers, in the order in which they are packed.
    pub parts: Vec<Linear>,
    /// Inputs of each part.
    pub num_inputs: usize,
    /// Whether the parts have biases.
    pub has_bias: bool,
    /// How the outputs of the parts are ordered.
    pub stacking: Stacking,
}

/// A linear layer of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Linear {
    /// Its name in transformers, below the layer.
    pub module: &'static str,
    /// Its outputs: the rows of its weights.
    pub num_outputs: usize,
    /// Where they are, if the module holds several linear layers.
    pub fused: Option<FusedOutputs>,
    /// How the checkpoint orders them.
    pub row_order: RowOrder,
    /// Whether the checkpoint stores the weights as `[inputs, outputs]`.
    pub is_transposed: bool,
}

/// The outputs of a linear layer among the outputs of the module that it is a part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FusedOutputs {
    /// The first one.
    pub first: usize,
    /// Outputs of the whole module.
    pub num_outputs: usize,
    /// Where they are, if outputs of other layers are between them.
    pub runs: Option<RowRuns>,
}

impl Linear {
    /// A linear layer that is a module of its own, in the order of transformers' Llama.
    pub const fn whole(module: &'static str, num_outputs: usize) -> Self {
        Self {
            module,
            num_outputs,
            fused: None,
            row_order: RowOrder::Same,
            is_transposed: false,
        }
    }

    /// Outputs of its module.
    pub fn num_module_outputs(&self) -> usize {
        self.fused
            .map_or(self.num_outputs, |fused| fused.num_outputs)
    }

    /// Its rows in its module; `None` if it has all of them in their order.
    pub fn selected_rows(&self) -> Option<RowSelection> {
        if self.fused.is_none() && self.row_order == RowOrder::Same {
            return None;
        }
        Some(RowSelection {
            first: self.fused.map_or(0, |fused| fused.first),
            len: self.num_outputs,
            order: self.row_order,
            runs: self.fused.and_then(|fused| fused.runs),
        })
    }
}

impl Projection {
    /// A projection with one part and without a bias.
    pub fn single(module: &'static str, num_outputs: usize, num_inputs: usize) -> Self {
        Self::stacked(&[(module, num_outputs)], num_inputs, Stacking::Concatenated)
    }

    /// A projection of several linear layers, each with its number of outputs, without biases.
    pub fn stacked(parts: &[(&'static str, usize)], num_inputs: usize, stacking: Stacking) -> Self {
        let linear = |&(module, num_outputs)| Linear::whole(module, num_outputs);
        Self {
            parts: parts.iter().map(linear).collect(),
            num_inputs,
            has_bias: false,
            stacking,
        }
    }

    /// A projection whose parts follow one another in a single module, each with this number of outputs.
    pub fn fused(
        module: &'static str,
        parts: &[usize],
        num_inputs: usize,
        stacking: Stacking,
    ) -> Self {
        let mut first = 0;
        let num_module_outputs = parts.iter().sum();
        let linear = |&num_outputs| {
            let fused = FusedOutputs {
                first,
                num_outputs: num_module_outputs,
                runs: None,
            };
            first += num_outputs;
            Linear {
                fused: Some(fused),
                ..Linear::whole(module, num_outputs)
            }
        };
        Self {
            parts: parts.iter().map(linear).collect(),
            num_inputs,
            has_bias: false,
            stacking,
        }
    }

    /// A projection whose parts take turns in a single module: each has `num_runs` runs of this many outputs.
    pub fn fused_in_runs(
        module: &'static str,
        parts: &[usize],
        num_runs: usize,
        num_inputs: usize,
        stacking: Stacking,
    ) -> Self {
        let mut fused = Self::fused(module, parts, num_inputs, stacking);
        let stride = parts.iter().sum();
        for (linear, &len) in fused.parts.iter_mut().zip(parts) {
            linear.num_outputs = len * num_runs;
            if let Some(fused) = &mut linear.fused {
                fused.num_outputs *= num_runs;
                fused.runs = Some(RowRuns::new(len, stride));
            }
        }
        fused
    }

    /// Has the parts of a module follow one another, each as a whole.
    pub fn join_runs(&mut self) {
        let mut first = 0;
        for linear in &mut self.parts {
            if let Some(fused) = &mut linear.fused {
                (fused.first, fused.runs) = (first, None);
            }
            first += linear.num_outputs;
        }
    }

    /// The same, stored as `[inputs, outputs]`.
    #[must_use]
    pub fn transposed(mut self) -> Self {
        for linear in &mut self.parts {
            linear.is_transposed = true;
        }
        self
    }

    /// The same with or without biases.
    #[must_use]
    pub fn with_bias(self, has_bias: bool) -> Self {
        Self { has_bias, ..self }
    }

    /// Outputs of all parts.
    pub fn num_outputs(&self) -> usize {
        self.parts.iter().map(|part| part.num_outputs).sum()
    }

    /// Gives its only part another number of outputs.
    pub fn set_num_outputs(&mut self, num_outputs: usize) {
        self.parts[0].num_outputs = num_outputs;
    }

    /// Its weights, biases not counted.
    pub fn num_weights(&self) -> u64 {
        self.num_outputs() as u64 * self.num_inputs as u64
    }
}
