//! The tokens that may follow an output: what a guide has worked out.

use inflight_base::TokenId;
use inflight_sampling::SampleError;

/// One bit per token, `[ceil((vocab_size + 1) / 32)]`; the last bit is the end of the output.
pub(super) type Mask = Vec<u32>;

/// Which tokens may follow an output, and the first of its tokens.
pub(super) struct Masks {
    tokens: Vec<TokenId>,
    /// What may follow the first tokens of `tokens`, the last for all of them.
    masks: Vec<Result<Mask, SampleError>>,
}

impl Masks {
    /// Of an output without tokens.
    pub(super) fn new(first: Mask) -> Self {
        Self {
            tokens: Vec::new(),
            masks: vec![Ok(first)],
        }
    }

    /// What may follow `generated`, if that is known.
    pub(super) fn get(&self, generated: &[TokenId]) -> Option<&Result<Mask, SampleError>> {
        let num_behind = self.tokens.len().checked_sub(generated.len())?;
        let index = (self.masks.len() - 1).checked_sub(num_behind)?;
        let mask = &self.masks[index];
        self.tokens.starts_with(generated).then_some(mask)
    }

    /// How many tokens `generated` has in common with those that the masks are of.
    pub(super) fn num_common(&self, generated: &[TokenId]) -> usize {
        let pairs = self.tokens.iter().zip(generated);
        pairs.take_while(|(known, token)| known == token).count()
    }

    /// Begins with what may follow `generated`.
    pub(super) fn begin(&mut self, generated: &[TokenId], mask: Result<Mask, SampleError>) {
        self.tokens.clear();
        self.tokens.extend_from_slice(generated);
        self.masks.clear();
        self.masks.push(mask);
    }

    /// Adds what may follow one token more.
    pub(super) fn push(&mut self, token: TokenId, mask: Result<Mask, SampleError>) {
        self.tokens.push(token);
        self.masks.push(mask);
    }
}

/// Masks the tokens whose bits are not set. Like every processor, keeps NaN and `+inf`, so that the sampler detects
/// them.
pub(super) fn forbid_others(logits: &mut [f32], mask: &[u32]) {
    for (logits, &word) in logits.chunks_mut(32).zip(mask) {
        if word == u32::MAX {
            continue;
        }
        for (bit, logit) in logits.iter_mut().enumerate() {
            if word >> bit & 1 == 0 && *logit < f32::INFINITY {
                *logit = f32::NEG_INFINITY;
            }
        }
    }
}

pub(super) fn is_set(mask: &[u32], bit: usize) -> bool {
    mask[bit / 32] >> (bit % 32) & 1 == 1
}

pub(super) fn set(mask: &mut [u32], bit: usize, value: bool) {
    let word = &mut mask[bit / 32];
    *word = *word & !(1 << (bit % 32)) | u32::from(value) << (bit % 32);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_is_found_by_all_tokens_before_it() {
        let mut masks = Masks::new(vec![0]);
        assert_eq!(masks.get(&[]), Some(&Ok(vec![0])));
        assert_eq!(masks.get(&[7]), None);
        masks.begin(&[7, 8], Ok(vec![2]));
        masks.push(9, Ok(vec![3]));
        masks.push(4, Err(SampleError::GuideFailed));
        assert_eq!(masks.get(&[7, 8]), Some(&Ok(vec![2])));
        assert_eq!(masks.get(&[7, 8, 9]), Some(&Ok(vec![3])));
        assert_eq!(
            masks.get(&[7, 8, 9, 4]),
            Some(&Err(SampleError::GuideFailed))
        );
        for other in [&[][..], &[7], &[7, 9], &[7, 8, 4], &[7, 8, 9, 4, 1]] {
            assert_eq!(masks.get(other), None, "{other:?}");
        }
    }
}
