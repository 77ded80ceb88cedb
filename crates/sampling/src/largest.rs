//! The largest logit of a part of a vocabulary.

use crate::SampleError;
use crate::peaks::{BLOCK, block_peak};
use inflight_base::TokenId;

/// The largest of some logits and its token: all that greedy sampling needs if no option changes logits. The largest
/// logits of the parts of a vocabulary give the largest of the whole, and with it the token of
/// [`Sampler`](crate::Sampler).
#[derive(Clone, Copy, Debug)]
pub struct Largest {
    /// NaN if one of the logits is NaN or `+inf`.
    value: f32,
    /// The lowest one with this logit.
    token: TokenId,
}

impl Largest {
    /// The largest of no logits.
    pub const NONE: Self = Self {
        value: f32::NEG_INFINITY,
        token: 0,
    };

    /// The largest of `logits`, the first of which is `first_token`'s.
    pub fn of(logits: &[f32], first_token: TokenId) -> Self {
        let (mut value, mut best) = (f32::NEG_INFINITY, 0);
        let mut all_numbers = true;
        for (index, block) in logits.chunks(BLOCK).enumerate() {
            let (peak, numbers) = block_peak(block);
            all_numbers &= numbers;
            if peak > value {
                (value, best) = (peak, index * BLOCK);
            }
        }
        let within = logits[best..].iter().position(|&logit| logit == value);
        Self {
            value: if all_numbers { value } else { f32::NAN },
            token: first_token + (best + within.unwrap_or(0)) as TokenId,
        }
    }

    /// The larger of both; the tokens of `behind` are higher.
    pub fn or(self, behind: Self) -> Self {
        match behind.value > self.value || behind.value.is_nan() {
            true => behind,
            false => self,
        }
    }

    /// The token of greedy sampling.
    ///
    /// # Errors
    /// A logit is NaN or `+inf`, or all are `-inf`.
    pub fn token(self) -> Result<TokenId, SampleError> {
        match self.value {
            value if value.is_nan() => Err(SampleError::NotFinite),
            f32::NEG_INFINITY => Err(SampleError::NoneAllowed),
            _ => Ok(self.token),
        }
    }

    /// As two numbers of a message.
    pub fn to_values(self) -> [f32; 2] {
        [self.value, f32::from_bits(self.token)]
    }

    /// From the numbers of a message.
    pub fn from_values([value, token]: [f32; 2]) -> Self {
        Self {
            value,
            token: token.to_bits(),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{Owner, Sampler, SamplingInput, SamplingParams};

    /// What the sampler chooses from these logits.
    fn sampled(logits: &[f32]) -> Result<TokenId, SampleError> {
        let params = SamplingParams {
            temperature: 0.0,
            ..SamplingParams::default()
        };
        let input = SamplingInput {
            params: &params,
            tokens: &[1],
            num_prompt_tokens: 1,
            beam: 0,
            owner: Owner::default(),
        };
        Sampler::new(logits.len()).sample(&mut logits.to_vec(), input)
    }

    fn of_parts(logits: &[f32], width: usize) -> Result<TokenId, SampleError> {
        let parts = logits.chunks(width).enumerate();
        let largest = parts.map(|(part, logits)| Largest::of(logits, (part * width) as TokenId));
        let sent = largest.map(|one| Largest::from_values(one.to_values()));
        sent.fold(Largest::NONE, Largest::or).token()
    }

    /// Few values, so that there are ties within parts and between them.
    fn logit() -> impl Strategy<Value = f32> {
        prop_oneof![
            400 => (-3..3_i8).prop_map(f32::from),
            40 => Just(f32::NEG_INFINITY),
            8 => Just(-0.0),
            1 => Just(f32::NAN),
            1 => Just(f32::INFINITY),
        ]
    }

    proptest! {
        #[test]
        fn parts_give_the_token_of_the_sampler(
            logits in prop::collection::vec(logit(), 1..300),
            width in 1..300_usize,
        ) {
            prop_assert_eq!(of_parts(&logits, width), sampled(&logits));
        }
    }

    #[test]
    fn logits_that_forbid_all_tokens_have_none() {
        let forbidden = [f32::NEG_INFINITY; 100];
        assert_eq!(of_parts(&forbidden, 30), Err(SampleError::NoneAllowed));
    }
}
