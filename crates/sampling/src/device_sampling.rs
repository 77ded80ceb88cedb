//! How a device samples a row of logits.

use crate::{ChangeLists, LogitChanges, PlainSampling, SamplingInput};

/// What a device does with a row of logits: it changes some of them, and chooses a token from the result. That gives
/// the token of [`Sampler`](crate::Sampler).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceSampling {
    /// The changes.
    pub changes: LogitChanges,
    /// The choice.
    pub plain: PlainSampling,
}

impl DeviceSampling {
    /// How the next token of a sequence is sampled; its lists are added to `lists`. `None` if only the host can.
    pub fn of(input: SamplingInput<'_>, lists: &mut ChangeLists) -> Option<Self> {
        let plain = PlainSampling::after_changes(input)?;
        let changes = lists.add(input)?;
        Some(Self { changes, plain })
    }
}

impl From<PlainSampling> for DeviceSampling {
    /// Without changes.
    fn from(plain: PlainSampling) -> Self {
        Self {
            changes: LogitChanges::default(),
            plain,
        }
    }
}
