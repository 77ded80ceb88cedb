//! Top-p decay: a nucleus that shrinks as the output grows.

use inflight_base::TokenId;

/// How `top_p` changes with each token (Lee et al., "Factuality enhanced language models", NeurIPS 2022). Each token
/// multiplies it by `factor`, down to `min`; one of `reset_ids`, such as the end of a sentence, restores the first
/// value.
///
/// ```text
/// top_p  |0.9 0.81 0.73|0.9 0.81 ...       factor 0.9
/// token  | The  sun  .  | It   is
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct TopPDecay {
    /// Above 0, at most 1.
    pub factor: f32,
    /// 0 to 1.
    pub min: f32,
    /// Tokens that restore the first value.
    pub reset_ids: Vec<TokenId>,
}

impl TopPDecay {
    /// The minimum unless the request gives one; TensorRT-LLM's.
    pub const DEFAULT_MIN: f32 = 1e-6;

    /// The value for the token that follows `generated`, if it is `top_p` for the first.
    ///
    /// A function of the tokens alone: nothing is kept between steps, so a pause changes nothing.
    pub(super) fn top_p(&self, top_p: f32, generated: &[TokenId]) -> f32 {
        let reset = |token: &TokenId| self.reset_ids.contains(token);
        let num_decays = generated
            .iter()
            .rev()
            .take_while(|token| !reset(token))
            .count();
        if num_decays == 0 {
            return top_p;
        }
        // Whether the minimum is taken after each multiplication or once makes no difference.
        let decayed = f64::from(top_p) * power(f64::from(self.factor), num_decays);
        (decayed as f32).max(self.min)
    }
}

/// `base` to the `exponent`-th, by squaring: multiplications only, so the same bits everywhere.
fn power(mut base: f64, mut exponent: usize) -> f64 {
    let mut product = 1.0;
    while exponent > 0 {
        if exponent & 1 == 1 {
            product *= base;
        }
        base *= base;
        exponent >>= 1;
    }
    product
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// TensorRT-LLM's definition, as a state that each token changes.
    fn step_by_step(decay: &TopPDecay, first: f32, generated: &[TokenId]) -> f64 {
        let mut top_p = f64::from(first);
        for token in generated {
            top_p = if decay.reset_ids.contains(token) {
                f64::from(first)
            } else {
                (top_p * f64::from(decay.factor)).max(f64::from(decay.min))
            };
        }
        top_p
    }

    #[test]
    fn it_falls_to_the_minimum_and_a_reset_id_undoes_it() {
        let decay = TopPDecay {
            factor: 0.5,
            min: 0.2,
            reset_ids: vec![9, 10],
        };
        let shares = [&[][..], &[1], &[1, 2], &[1, 2, 3], &[1, 2, 9], &[10, 2]]
            .map(|generated| decay.top_p(0.8, generated));
        assert_eq!(shares, [0.8, 0.4, 0.2, 0.2, 0.8, 0.4]);
    }

    #[test]
    fn a_minimum_above_the_first_share_holds_from_the_second_token_on() {
        let decay = TopPDecay {
            factor: 1.0,
            min: 0.7,
            reset_ids: Vec::new(),
        };
        assert_eq!(
            [0, 1, 2].map(|n| decay.top_p(0.3, &vec![5; n])),
            [0.3, 0.7, 0.7]
        );
    }

    proptest! {
        #[test]
        fn it_is_what_a_state_that_each_token_changes_would_be(
            factor in 0.01f32..=1.0,
            min in 0.0f32..=1.0,
            first in 0.001f32..=1.0,
            reset_ids in prop::collection::vec(0u32..20, 0..3),
            generated in prop::collection::vec(0u32..20, 0..200),
        ) {
            let decay = TopPDecay { factor, min, reset_ids };
            let share = f64::from(decay.top_p(first, &generated));
            let expected = step_by_step(&decay, first, &generated);
            prop_assert!((share - expected).abs() <= 1e-6 * expected, "{share}, not {expected}");
        }
    }
}
