//! What stands for a prompt in a model that generates nothing: one of its last hidden states, or what a head for classes makes
//! of it.
//!
//! The states are those behind the last norm, which the device has in bf16. Each sequence is pooled by itself, so its result does
//! not depend on the rest of the step.

use super::class_head::ClassWeights;
use super::model_source::ModelSource;
use super::step_layout::StepLayout;
use crate::base::LoadError;
use crate::config::PoolingMode;
use crate::engine::{ExtraOutputs, Sampled, StepOutput, StepPlan};
use crate::sampling::SampleError;

/// Pools the states of steps.
pub(super) struct Pooler {
    hidden_size: usize,
    classes: Option<ClassWeights>,
}

impl Pooler {
    /// That of a model; `None` for one that generates.
    ///
    /// # Errors
    /// Each token of the model sees only those before it, so that its first state stands for nothing else; or the head for
    /// classes is missing, misshapen or not finite.
    pub fn load(source: &ModelSource) -> Result<Option<Self>, LoadError> {
        let spec = source.spec();
        let Some(pooling) = spec.pooling else {
            return Ok(None);
        };
        match pooling.mode {
            PoolingMode::Last => Ok(Some(Self {
                hidden_size: spec.hidden_size,
                classes: match &spec.classes {
                    Some(head) => Some(ClassWeights::load(head, source)?),
                    None => None,
                },
            })),
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
            let pooled = match &self.classes {
                Some(classes) => classes.of(state),
                None => state.to_vec(),
            };
            let is_finite = pooled.iter().all(|value| value.is_finite());
            let sampled = match is_finite {
                true => {
                    let extra_outputs = ExtraOutputs {
                        pooled,
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
