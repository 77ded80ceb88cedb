//! Divergence of logits from reference logits of the same text.

/// Comparison of one token's logits with the reference.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Divergence {
    /// Kullback-Leibler divergence from the reference's probabilities, in nats.
    pub nats: f64,
    /// Whether the most likely token is the same as in the reference.
    pub same_top: bool,
}

impl Divergence {
    /// Divergence of `got` from `expected`, `[vocab_size]` each.
    ///
    /// # Panics
    /// If they are empty or differ in length.
    pub fn of(expected: &[f32], got: &[f32]) -> Self {
        assert_eq!(expected.len(), got.len(), "logits of one vocabulary");
        let (from, to) = (Normalizer::of(expected), Normalizer::of(got));
        let terms = expected.iter().zip(got).map(|(&expected, &got)| {
            let log_prob = from.log_prob(expected);
            log_prob.exp() * (log_prob - to.log_prob(got))
        });
        Self {
            // Rounding can leave a value slightly below zero.
            nats: terms.sum::<f64>().max(0.0),
            same_top: argmax(expected) == argmax(got),
        }
    }
}

/// Natural logarithm of the probability that `logits` give to `token`.
///
/// # Panics
/// If the token is not in the vocabulary.
pub fn log_prob(logits: &[f32], token: u32) -> f64 {
    Normalizer::of(logits).log_prob(logits[token as usize])
}

/// The most likely token; the first one of equals.
///
/// # Panics
/// If there are no logits.
pub fn argmax(logits: &[f32]) -> u32 {
    let largest = (0..logits.len()).reduce(|best, i| match logits[i] > logits[best] {
        true => i,
        false => best,
    });
    largest.expect("logits") as u32
}

/// Log-sum-exp of logits: subtracting it from a logit gives a log-probability.
struct Normalizer(f64);

impl Normalizer {
    fn of(logits: &[f32]) -> Self {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|&l| f64::from(l - max).exp()).sum();
        Self(f64::from(max) + sum.ln())
    }

    fn log_prob(&self, logit: f32) -> f64 {
        f64::from(logit) - self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_constant_added_to_all_logits_does_not_diverge() {
        let moved = Divergence::of(&[1.0, 2.0, 3.0], &[101.0, 102.0, 103.0]);
        assert!(moved.nats < 1e-12 && moved.same_top, "{moved:?}");
    }

    #[test]
    fn divergence_matches_a_hand_computed_value() {
        // Probabilities 3/4 and 1/4 against 1/4 and 3/4: half of ln 3.
        let (a, b) = (3f32.ln(), 0.0);
        let got = Divergence::of(&[a, b], &[b, a]);
        assert!((got.nats - 3f64.ln() / 2.0).abs() < 1e-6 && !got.same_top);
    }

    #[test]
    fn the_log_probability_is_that_of_the_given_token() {
        assert!((log_prob(&[0.0, 3f32.ln()], 1) - 0.75f64.ln()).abs() < 1e-6);
    }
}
