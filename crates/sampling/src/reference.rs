//! The sampler once more, for tests: in `f64`, with a full sort, one step after the other as the
//! sources define them.

use crate::SamplingInput;

/// The probability of each token to be the next one.
pub(super) fn distribution(logits: &[f32], input: SamplingInput<'_>) -> Vec<f64> {
    let params = input.params;
    let mut scores: Vec<f64> = logits.iter().map(|&logit| f64::from(logit)).collect();
    for &(token, bias) in params.logit_bias.iter() {
        scores[token as usize] += f64::from(bias);
    }
    for word in params.bad_words.iter() {
        let (last, prefix) = word.split_last().expect("a bad word has a token");
        if input.tokens.ends_with(prefix) {
            scores[*last as usize] = f64::NEG_INFINITY;
        }
    }
    let size = params.no_repeat_ngram_size as usize;
    if size > 0 && input.tokens.len() >= size {
        let ends_with = &input.tokens[input.tokens.len() - (size - 1)..];
        for start in 0..=input.tokens.len() - size {
            if input.tokens[start..start + size - 1] == *ends_with {
                scores[input.tokens[start + size - 1] as usize] = f64::NEG_INFINITY;
            }
        }
    }
    if let Some(allowed) = &params.allowed_token_ids {
        for (token, score) in scores.iter_mut().enumerate() {
            if !allowed.contains(&(token as u32)) {
                *score = f64::NEG_INFINITY;
            }
        }
    }
    if input.generated().len() < params.min_tokens as usize {
        for &id in params.end_ids.iter().chain(&params.stop_token_ids) {
            scores[id as usize] = f64::NEG_INFINITY;
        }
    }
    let num_ignored = input
        .num_prompt_tokens
        .min(params.prompt_ignore_length as usize);
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
        let counted = count(&input.tokens[num_ignored..]);
        *score -= f64::from(params.frequency_penalty) * counted as f64;
        if counted > 0 {
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
    let top_p = top_p(input);
    let mut before = 0.0;
    let nucleus = order.iter().take_while(|&&token| {
        let inside = top_p == 1.0 || before < top_p * total;
        before += weight(token);
        inside
    });
    let mut kept: Vec<usize> = nucleus
        .copied()
        .filter(|&token| weight(token) >= f64::from(params.min_p))
        .collect();
    if params.typical_p < 1.0 {
        keep_typical(&mut kept, weight, f64::from(params.typical_p));
    }
    let total: f64 = kept.iter().map(|&token| weight(token)).sum();
    let mut probabilities = vec![0.0; scores.len()];
    for token in kept {
        probabilities[token] = weight(token) / total;
    }
    probabilities
}

/// The share of the nucleus, which each generated token changes.
fn top_p(input: SamplingInput<'_>) -> f64 {
    let first = f64::from(input.params.top_p);
    let mut top_p = first;
    if let Some(decay) = &input.params.top_p_decay {
        for token in input.generated() {
            top_p = if decay.reset_ids.contains(token) {
                first
            } else {
                (top_p * f64::from(decay.factor)).max(f64::from(decay.min))
            };
        }
    }
    top_p
}

/// Leaves the tokens whose `-ln p` is nearest to the entropy, up to the share `mass` of probability.
fn keep_typical(kept: &mut Vec<usize>, weight: impl Fn(usize) -> f64, mass: f64) {
    let total: f64 = kept.iter().map(|&token| weight(token)).sum();
    let p = |token: usize| weight(token) / total;
    kept.retain(|&token| p(token) > 0.0);
    let entropy: f64 = kept.iter().map(|&token| -p(token) * p(token).ln()).sum();
    let distance = |token: usize| (-p(token).ln() - entropy).abs();
    kept.sort_by(|&a, &b| distance(a).total_cmp(&distance(b)));
    let mut sum = 0.0;
    let last = kept.iter().position(|&token| {
        sum += p(token);
        sum >= mass
    });
    if let Some(last) = last {
        let farthest = distance(kept[last]);
        kept.retain(|&token| distance(token) <= farthest);
    }
}
