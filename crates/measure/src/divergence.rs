//! How far logits are from others of the same text.

/// What a token's logits say, beside those that they should be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Divergence {
    /// The Kullback-Leibler divergence of their probabilities from those expected, in nats.
    pub nats: f64,
    /// Whether the most likely token is the one expected.
    pub same_top: bool,
}

impl Divergence {
    /// Of `got` from `expected`, `[vocab_size]` each.
    ///
    /// # Panics
    /// There are none, or not equally many.
    pub fn of(expected: &[f32], got: &[f32]) -> Self {
        assert_eq!(expected.len(), got.len(), "logits of one vocabulary");
        let (from, to) = (Normalizer::of(expected), Normalizer::of(got));
        let terms = expected.iter().zip(got).map(|(&expected, &got)| {
            let log_prob = from.log_prob(expected);
            log_prob.exp() * (log_prob - to.log_prob(got))
        });
        Self {
            // Rounding may leave a little less than nothing.
            nats: terms.sum::<f64>().max(0.0),
            same_top: argmax(expected) == argmax(got),
        }
    }
}

/// The natural logarithm of the probability that logits give a token.
///
/// # Panics
/// The token is not among them.
pub fn log_prob(logits: &[f32], token: u32) -> f64 {
    Normalizer::of(logits).log_prob(logits[token as usize])
}

/// The most likely token; the first one of several.
///
/// # Panics
/// There are no logits.
pub fn argmax(logits: &[f32]) -> u32 {
    let largest = (0..logits.len()).reduce(|best, i| match logits[i] > logits[best] {
        true => i,
        false => best,
    });
    largest.expect("logits") as u32
}

/// What makes logarithms of probabilities of logits: the logarithm of the sum of their exponentials.
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
    fn equal_probabilities_diverge_by_nothing_whatever_the_logits_are() {
        let moved = Divergence::of(&[1.0, 2.0, 3.0], &[101.0, 102.0, 103.0]);
        assert!(moved.nats < 1e-12 && moved.same_top, "{moved:?}");
    }

    #[test]
    fn divergence_is_that_of_the_definition() {
        // 3/4 and 1/4 from 1/4 and 3/4: half of ln 3.
        let (a, b) = (3f32.ln(), 0.0);
        let got = Divergence::of(&[a, b], &[b, a]);
        assert!((got.nats - 3f64.ln() / 2.0).abs() < 1e-6 && !got.same_top);
    }

    #[test]
    fn log_probabilities_are_of_the_token() {
        assert!((log_prob(&[0.0, 3f32.ln()], 1) - 0.75f64.ln()).abs() < 1e-6);
    }
}
