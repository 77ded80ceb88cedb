//! The result of a pooling model for a prompt: one of its last hidden states, or the logits of the classification head.
//!
//! The states are those behind the last norm, which the device has in bf16. Each sequence is pooled by itself, so its
//! result does not depend on the rest of the step.

use super::class_head::ClassWeights;
use super::model_source::ModelSource;
use super::step_layout::StepLayout;
use inflight_base::LoadError;
use inflight_config::PoolingMode;
use inflight_engine::{ExtraOutputs, Sampled, StepOutput, StepPlan};
use inflight_sampling::SampleError;

/// Pools the states of steps.
pub(super) struct Pooler {
    mode: PoolingMode,
    state_width: usize,
    classes: Option<ClassWeights>,
}

impl Pooler {
    /// The pooler of a model; `None` for a model that generates.
    ///
    /// # Errors
    /// Each token of the model sees only those before it, so that its first state stands for nothing else; or the
    /// classification head is missing, misshapen or not finite.
    pub fn load(source: &ModelSource) -> Result<Option<Self>, LoadError> {
        let spec = source.spec();
        let Some(pooling) = spec.pooling else {
            return Ok(None);
        };
        match pooling.mode {
            mode if mode == PoolingMode::Last || spec.is_bidirectional => Ok(Some(Self {
                mode,
                state_width: spec.embedding_width(),
                classes: match &spec.classes {
                    Some(head) => Some(ClassWeights::load(head, source)?),
                    None => None,
                },
            })),
            mode => Err(LoadError::Config {
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
        let mut rest = states;
        for &index in layout.sequences() {
            let sequence = &plan.sequences[index];
            let slot = sequence.slot;
            let num_rows = match self.mode {
                PoolingMode::Last | PoolingMode::Cls => 1,
                PoolingMode::Mean => sequence.tokens.len(),
            };
            let (own, others) = rest.split_at(num_rows * self.state_width);
            rest = others;
            let state = mean(own, self.state_width);
            let pooled = match &self.classes {
                Some(classes) => classes.of(&state),
                None => state,
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

/// The mean of rows.
fn mean(rows: &[f32], width: usize) -> Vec<f32> {
    let (first, others) = rows.split_at(width);
    let mut sums = first.to_vec();
    for row in others.chunks_exact(width) {
        for (sum, value) in sums.iter_mut().zip(row) {
            *sum += value;
        }
    }
    let num_rows = (rows.len() / width) as f32;
    sums.iter_mut().for_each(|sum| *sum /= num_rows);
    sums
}
