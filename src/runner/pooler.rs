//! What stands for a prompt in a model that generates nothing: one of its last hidden states.
//!
//! The states are those behind the last norm, which the device has in bf16. Each sequence is pooled by itself, so its result does
//! not depend on the rest of the step.

use super::spec::Pooling;
use super::step_layout::StepLayout;
use crate::base::LoadError;
use crate::config::PoolingMode;
use crate::engine::{ExtraOutputs, Sampled, StepOutput, StepPlan};
use crate::sampling::SampleError;

/// Pools the states of steps.
pub(super) struct Pooler {
    hidden_size: usize,
}

impl Pooler {
    /// For states `[num_rows, hidden_size]`.
    ///
    /// # Errors
    /// Each token of the model sees only those before it, so that its first state stands for nothing else.
    pub fn new(pooling: Pooling, hidden_size: usize) -> Result<Self, LoadError> {
        match pooling.mode {
            PoolingMode::Last => Ok(Self { hidden_size }),
            mode @ (PoolingMode::Mean | PoolingMode::Cls) => Err(LoadError::Config {
                problem: format!(
                    "pooling is {}, and the tokens of a decoder see only those before them: only the last one has seen the \
                     whole prompt",
                    mode.name()
                ),
                remedy: "set pooling to last, if the model was trained for that".to_owned(),
            }),
        }
    }

    /// Appends the results of a step, whose sampled rows are `states`.
    pub fn append(
        &self,
        plan: &StepPlan<'_>,
        layout: &StepLayout,
        states: &[f32],
        output: &mut StepOutput,
    ) {
        let states = states.chunks_exact(self.hidden_size);
        for (&index, state) in layout.sequences().iter().zip(states) {
            let slot = plan.sequences[index].slot;
            let is_finite = state.iter().all(|value| value.is_finite());
            let sampled = match is_finite {
                true => {
                    let extra_outputs = ExtraOutputs {
                        pooled: state.to_vec(),
                        ..ExtraOutputs::default()
                    };
                    output.extra_outputs.push((slot, extra_outputs));
                    Sampled::Pooled
                }
                false => Sampled::Failed(SampleError::NotFinite),
            };
            output.sampled.push((slot, sampled));
        }
    }
}
