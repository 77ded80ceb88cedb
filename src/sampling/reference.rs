//! The sampler once more, for tests: in `f64`, with a full sort, one step after the other as the
//! sources define them.

use crate::sampling::SamplingInput;

/// The probability of each token to be the next one.
pub(super) fn distribution(logits: &[f32], input: SamplingInput<'_>) -> Vec<f64> {
    let params = input.params;
    let mut scores: Vec<f64> = logits.iter().map(|&logit| f64::from(logit)).collect();
    for &(token, bias) in &params.logit_bias {
        scores[token as usize] += f64::from(bias);
    }
    for word in &params.bad_words {
        let (last, prefix) = word.split_last().expect("a bad word has a token");
        if input.tokens.ends_with(prefix) {
            scores[*last as usize] = f64::NEG_INFINITY;
        }
    }
    if input.generated().len() < params.min_tokens as usize {
        for &id in &params.end_ids {
            scores[id as usize] = f64::NEG_INFINITY;
        }
    }
    for (token, score) in scores.iter_mut().enumerate() {
        let count = |tokens: &[u32]| tokens.iter().filter(|&&t| t as usize == token).count();
        if count(input.tokens) > 0 {
            let penalty = f64::from(params.repetition_penalty);
            *score = if *score > 0.0 {
                *score / penalty
            } else {
                *score * penalty
            };
        }
        let generated = count(input.generated());
        *score -= f64::from(params.frequency_penalty) * generated as f64;
        if generated > 0 {
            *score -= f64::from(params.presence_penalty);
        }
    }
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]).then(a.cmp(&b)));
    if params.temperature == 0.0 {
        order.truncate(1);
    }
    let temperature = match params.temperature {
        0.0 => 1.0,
        temperature => f64::from(temperature),
    };
    if params.top_k > 0 {
        order.truncate(params.top_k as usize);
    }
    let max = scores[order[0]];
    let weight = |token: usize| ((scores[token] - max) / temperature).exp();
    let total: f64 = order.iter().map(|&token| weight(token)).sum();
    let mut before = 0.0;
    let nucleus = order.iter().take_while(|&&token| {
        let inside = params.top_p == 1.0 || before < f64::from(params.top_p) * total;
        before += weight(token);
        inside
    });
    let kept: Vec<usize> = nucleus
        .copied()
        .filter(|&token| weight(token) >= f64::from(params.min_p))
        .collect();
    let total: f64 = kept.iter().map(|&token| weight(token)).sum();
    let mut probabilities = vec![0.0; scores.len()];
    for token in kept {
        probabilities[token] = weight(token) / total;
    }
    probabilities
}
