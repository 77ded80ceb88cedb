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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Owner, SamplingParams};

    #[test]
    fn a_device_gets_the_changes_and_how_the_token_is_chosen_after_them() {
        let biased = SamplingParams {
            temperature: 0.5,
            logit_bias: [(3, 1.0)].into(),
            ..SamplingParams::default()
        };
        let typical = SamplingParams {
            typical_p: 0.9,
            ..biased.clone()
        };
        let [biased, typical] = [&biased, &typical].map(|params| SamplingInput {
            params,
            tokens: &[5, 6],
            num_prompt_tokens: 1,
            beam: 0,
            owner: Owner::default(),
        });
        let mut lists = ChangeLists::new(1, 16);
        let sampling = DeviceSampling::of(biased, &mut lists).expect("a device can");
        assert_eq!(Some(sampling.plain), PlainSampling::after_changes(biased));
        assert_eq!(sampling.changes.num_biases, 1);
        assert_eq!(lists.words(), [3, 1.0_f32.to_bits()]);
        assert_eq!(DeviceSampling::of(typical, &mut lists), None);
        assert_eq!(lists.words().len(), 2, "nothing is added for the host");
    }
}
