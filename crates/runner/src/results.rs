//! The part of a rank in the results of a step.

use super::pooler::Pooler;
use super::stage::Stage;

/// The part of a rank in the results of a step.
pub(super) enum Results {
    /// Samples from its logits: it has the only stage.
    Sampled,
    /// Pools its states: it is alone, with a pooling model.
    Pooled(Pooler),
    /// Receives logits from the last stage, and samples from them: it has the first stage of several.
    Received,
    /// Sends its logits to the first stage: it has the last one.
    Sent,
    /// Nothing: it is not the first rank of its stage, or the stage has no results.
    Elsewhere,
}

impl Results {
    /// Of a rank with this stage, and with the pooler of its model if that is a pooling model.
    pub(super) fn of(stage: &Stage, pooler: Option<Pooler>) -> Self {
        if let Some(pooler) = pooler {
            return Self::Pooled(pooler);
        }
        match stage.is_leading() {
            true if stage.is_only() => Self::Sampled,
            true if stage.is_first() => Self::Received,
            true if stage.is_last() => Self::Sent,
            _ => Self::Elsewhere,
        }
    }
}
