//! The sampler against transformers, against the plain reference, and against its own promises.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::reference;
use crate::{Owner, SamplingParams, TopPDecay};

impl Sampler {
    /// The probability of each token to be drawn, read off the cut that a draw would use.
    fn distribution(
        &mut self,
        logits: &[f32],
        input: SamplingInput<'_>,
    ) -> Result<Vec<f64>, SampleError> {
        let mut logits = logits.to_vec();
        let mut probabilities = vec![0.0; logits.len()];
        let params = input.params;
        if params.is_greedy() {
            probabilities[self.sample(&mut logits, input)? as usize] = 1.0;
            return Ok(probabilities);
        }
        process(&mut logits, input, &mut self.history);
        self.peaks.find(&logits)?;
        let (max, temperature) = (self.peaks.max(), params.temperature);
        let softmax = Softmax { max, temperature };
        let cut = self.cut(&logits, softmax, input);
        for (id, &logit) in logits.iter().enumerate() {
            if cut.is_none_or(|cut| cut.keeps(logit, id as TokenId)) {
                probabilities[id] = f64::from(softmax.weight(logit));
            }
        }
        let total: f64 = probabilities.iter().sum();
        probabilities.iter_mut().for_each(|p| *p /= total);
        Ok(probabilities)
    }
}

fn input(params: &SamplingParams) -> SamplingInput<'_> {
    SamplingInput {
        params,
        tokens: &[1],
        num_prompt_tokens: 1,
        beam: 0,
        owner: Owner::default(),
    }
}

/// Numbers that look like logits: normally distributed, by the sum of twelve uniform ones.
fn random_logits(seed: u64, len: usize, spread: f64) -> Vec<f32> {
    (0..len as u64)
        .map(|token| {
            let sum: f64 = (0..12).map(|i| uniform(seed, token * 12 + i)).sum();
            ((sum - 6.0) * spread) as f32
        })
        .collect()
}

/// Alike but for what `f32` does to logits that a small temperature divides: about 1e-5.
#[track_caller]
fn assert_alike(actual: &[f64], expected: &[f64], what: &str) {
    assert_eq!(actual.len(), expected.len());
    for (token, (a, e)) in actual.iter().zip(expected).enumerate() {
        assert!(
            (a - e).abs() <= 1e-4 * e + 1e-30 && (*a == 0.0) <= (*e < 1e-30),
            "{what}: token {token} has {a}, not {e}"
        );
    }
}

#[test]
fn distributions_are_those_of_transformers() {
    let fixtures: serde_json::Value =
        serde_json::from_str(include_str!("../../../../tests/fixtures/sampling.json"))
            .expect("the fixture is JSON");
    let cases = fixtures["cases"].as_array().expect("a list of cases");
    assert!(cases.len() > 40);
    let read = |value: &serde_json::Value| serde_json::from_value(value.clone());
    for case in cases {
        let given = &case["params"];
        let number = |name: &str, default: f64| given[name].as_f64().unwrap_or(default);
        let ids = |name: &str| -> Vec<TokenId> {
            serde_json::from_value(given[name].clone()).unwrap_or_default()
        };
        let allowed = ids("allowed_token_ids");
        let mut logit_bias: Vec<(TokenId, f32)> = read(&given["logit_bias"]).unwrap_or_default();
        logit_bias.sort_by_key(|&(token, _)| token);
        let params = SamplingParams {
            temperature: number("temperature", 1.0) as f32,
            top_k: number("top_k", 0.0) as u32,
            top_p: number("top_p", 1.0) as f32,
            min_p: number("min_p", 0.0) as f32,
            typical_p: number("typical_p", 1.0) as f32,
            repetition_penalty: number("repetition_penalty", 1.0) as f32,
            no_repeat_ngram_size: number("no_repeat_ngram_size", 0.0) as u32,
            min_tokens: number("min_tokens", 0.0) as u32,
            end_ids: ids("end_ids"),
            stop_token_ids: ids("stop_token_ids"),
            allowed_token_ids: (!allowed.is_empty()).then(|| allowed.into()),
            bad_words: serde_json::from_value::<Vec<_>>(given["bad_words"].clone())
                .unwrap_or_default()
                .into(),
            logit_bias: logit_bias.into(),
            ..SamplingParams::default()
        };
        let tokens: Vec<TokenId> = serde_json::from_value(case["tokens"].clone()).expect("tokens");
        let logits: Vec<f32> = serde_json::from_value(case["logits"].clone()).expect("logits");
        let mut expected = vec![0.0; logits.len()];
        for (token, probability) in case["probabilities"].as_object().expect("a map") {
            expected[token.parse::<usize>().expect("a token")] =
                probability.as_f64().expect("a number");
        }
        let input = SamplingInput {
            params: &params,
            tokens: &tokens,
            num_prompt_tokens: case["num_prompt_tokens"].as_u64().expect("a number") as usize,
            beam: 0,
            owner: Owner::default(),
        };
        let name = case["name"].as_str().expect("a name");
        let ours = Sampler::new(logits.len()).distribution(&logits, input);
        assert_alike(&ours.expect("finite logits"), &expected, name);
        assert_alike(&reference::distribution(&logits, input), &expected, name);
    }
}

prop_compose! {
    fn any_decay()(
        factor in 0.1f32..=1.0,
        min in 0.0f32..1.0,
        reset_ids in prop::collection::vec(0u32..12, 0..3),
    ) -> TopPDecay {
        TopPDecay { factor, min, reset_ids }
    }
}

/// A token's bias; minus infinity forbids it.
fn any_bias() -> impl Strategy<Value = f32> {
    prop_oneof![4 => -5.0f32..5.0, 1 => Just(f32::NEG_INFINITY)]
}

prop_compose! {
    fn any_params()(
        temperature in prop_oneof![Just(0.0f32), 0.05f32..3.0],
        top_k in prop_oneof![Just(0u32), 1u32..600],
        top_p in prop_oneof![Just(1.0f32), 0.001f32..1.0],
        top_p_decay in prop::option::of(any_decay()),
        min_p in prop_oneof![Just(0.0f32), 0.0001f32..1.0],
        typical_p in prop_oneof![2 => Just(1.0f32), 1 => 0.001f32..1.0],
        repetition_penalty in prop_oneof![Just(1.0f32), 0.5f32..2.0],
        presence_penalty in prop_oneof![Just(0.0f32), -2.0f32..2.0],
        frequency_penalty in prop_oneof![Just(0.0f32), -2.0f32..2.0],
        prompt_ignore_length in prop_oneof![Just(u32::MAX), 0u32..12],
        no_repeat_ngram_size in prop_oneof![Just(0u32), 1u32..5],
        min_tokens in 0u32..8,
        end_ids in prop::collection::vec(0u32..10, 0..3),
        stop_token_ids in prop::collection::vec(0u32..10, 0..3),
        // Some that no other option forbids are among them.
        allowed_token_ids in prop::option::weighted(0.3, prop::collection::btree_set(0u32..20, 1..9)),
        bad_words in prop::collection::vec(prop::collection::vec(0u32..10, 1..3), 0..4),
        logit_bias in prop::collection::btree_map(0u32..10, any_bias(), 0..4),
        seed in any::<u64>(),
    ) -> SamplingParams {
        SamplingParams {
            temperature, top_k, top_p, top_p_decay, min_p, typical_p, seed, repetition_penalty,
            presence_penalty, frequency_penalty, prompt_ignore_length, no_repeat_ngram_size,
            min_tokens, end_ids, stop_token_ids, bad_words: bad_words.into(),
            allowed_token_ids: allowed_token_ids.map(|ids| ids.into_iter().chain([15, 19]).collect::<BTreeSet<_>>().into_iter().collect()),
            logit_bias: logit_bias.into_iter().collect(),
            guide: None,
            logits_processor: None,
            beam_search: None,
            stop_text: None,
        }
    }
}

proptest! {
    #[test]
    fn every_mix_of_options_has_the_distribution_of_the_plain_reference(
        params in any_params(),
        tokens in prop::collection::vec(0u32..12, 1..16),
        prompt in 0.0f64..1.0,
        (vocab_size, seed) in (20usize..1000, any::<u64>()),
        spread in 0.3f64..6.0,
    ) {
        let input = SamplingInput {
            params: &params,
            tokens: &tokens,
            num_prompt_tokens: (prompt * tokens.len() as f64) as usize, beam: 0,
                owner: Owner::default(),
        };
        let logits = random_logits(seed, vocab_size, spread);
        let mut sampler = Sampler::new(vocab_size);
        let ours = sampler.distribution(&logits, input).expect("finite");
        let expected = reference::distribution(&logits, input);
        assert_alike(&ours, &expected, "distribution");
        let token = sampler.sample(&mut logits.clone(), input).expect("finite");
        prop_assert!(expected[token as usize] > 0.0, "{token} cannot be drawn");
    }

    #[test]
    fn a_used_sampler_chooses_like_a_new_one(
        mix in prop::collection::vec((any_params(), any::<u64>()), 2..8),
        tokens in prop::collection::vec(0u32..12, 1..16),
    ) {
        let mut used = Sampler::new(300);
        for (params, seed) in &mix {
            let input = SamplingInput { params, tokens: &tokens, num_prompt_tokens: 1, beam: 0, owner: Owner::default(), };
            let logits = random_logits(*seed, 300, 2.0);
            let token = used.sample(&mut logits.clone(), input);
            prop_assert_eq!(token, Sampler::new(300).sample(&mut logits.clone(), input));
        }
    }
}

#[test]
fn the_most_likely_token_can_be_too_likely_to_be_typical() {
    // One token of probability 0.3 and 70 of 0.01: an entropy of 3.6 nats, from which the information
    // of the one is 2.4 away and the others' 1.
    let logits: Vec<f32> = (0..71)
        .map(|token| if token == 5 { 30.0f32.ln() } else { 0.0 })
        .collect();
    let kept = |typical_p: f32, top_k: u32| -> Vec<usize> {
        let params = SamplingParams {
            temperature: 1.0,
            typical_p,
            top_k,
            ..SamplingParams::default()
        };
        let probabilities = Sampler::new(71).distribution(&logits, input(&params));
        let probabilities = probabilities.expect("finite");
        (0..71)
            .filter(|&token| probabilities[token] > 0.0)
            .collect()
    };
    let others: Vec<usize> = (0..71).filter(|&token| token != 5).collect();
    assert_eq!(kept(0.1, 0), others, "all that are as near as the last");
    assert_eq!(kept(0.69, 0), others);
    assert_eq!(kept(0.71, 0).len(), 71);
    // Of the top 41 it has 0.43 of the probability.
    assert_eq!(kept(0.4, 41).len(), 40);
    assert_eq!(kept(0.6, 41).len(), 41);
}

#[test]
fn a_run_of_tokens_is_forbidden_where_it_has_occurred_also_in_the_prompt() {
    let choose = |size: u32, tokens: &[TokenId]| {
        let params = SamplingParams {
            no_repeat_ngram_size: size,
            ..SamplingParams::default()
        };
        // The most likely first: 0, 1, 2, ...
        let mut logits: Vec<f32> = (0..8).map(|token| -(token as f32)).collect();
        let input = SamplingInput {
            params: &params,
            tokens,
            num_prompt_tokens: 1,
            beam: 0,
            owner: Owner::default(),
        };
        Sampler::new(8).sample(&mut logits, input)
    };
    assert_eq!(choose(1, &[0, 2, 1]), Ok(3));
    assert_eq!(choose(2, &[5, 0, 5, 1, 5]), Ok(2));
    assert_eq!(choose(3, &[6, 5, 0, 6, 5]), Ok(1));
    assert_eq!(choose(3, &[5, 0, 6, 5]), Ok(0), "6 5 has no sequel yet");
    assert_eq!(choose(2, &[0, 0]), Ok(1), "runs may overlap");
    assert_eq!(
        choose(5, &[0, 0]),
        Ok(0),
        "a sequence that is shorter has none"
    );
}

#[test]
fn only_allowed_tokens_are_chosen() {
    let params = SamplingParams {
        allowed_token_ids: Some([63, 64, 299, 9999].into()),
        ..SamplingParams::default()
    };
    let mut logits = vec![1.0; 300];
    (logits[64], logits[299]) = (0.5, 0.7);
    logits[63] = 0.2;
    assert_eq!(
        Sampler::new(300).sample(&mut logits, input(&params)),
        Ok(299)
    );
    let mut logits = vec![f32::NAN; 300];
    let result = Sampler::new(300).sample(&mut logits, input(&params));
    assert_eq!(result, Err(SampleError::NotFinite), "it hides no damage");
}

#[test]
fn the_prompt_counts_for_penalties_from_where_the_request_says() {
    let choose = |prompt_ignore_length: u32| {
        let params = SamplingParams {
            frequency_penalty: 1.0,
            prompt_ignore_length,
            ..SamplingParams::default()
        };
        let mut logits = vec![4.5, 3.0, 2.5, 0.0];
        let input = SamplingInput {
            params: &params,
            tokens: &[0, 1, 0, 0, 0],
            num_prompt_tokens: 4,
            beam: 0,
            owner: Owner::default(),
        };
        Sampler::new(4).sample(&mut logits, input)
    };
    // Token 0 has 4.5 less one for each time that it counts, and 1 has 3.
    assert_eq!(choose(u32::MAX), Ok(0));
    assert_eq!(choose(4), Ok(0));
    assert_eq!(choose(3), Ok(1), "0 counts twice");
    assert_eq!(choose(0), Ok(2), "0 counts four times and 1 once");
}

#[test]
fn draws_follow_the_distribution() {
    let options = [
        SamplingParams {
            temperature: 1.0,
            ..SamplingParams::default()
        },
        SamplingParams {
            temperature: 1.5,
            top_k: 40,
            top_p: 0.9,
            min_p: 0.02,
            ..SamplingParams::default()
        },
    ];
    for (params, vocab_size) in options.iter().zip([200, 1000]) {
        let logits = random_logits(7, vocab_size, 1.5);
        let mut sampler = Sampler::new(vocab_size);
        let expected = reference::distribution(&logits, input(params));
        let (mut by_counter, mut by_seed) = (vec![0; vocab_size], vec![0; vocab_size]);
        let tokens = vec![0; 50_000];
        for i in 0..tokens.len() {
            let input = SamplingInput {
                params,
                tokens: &tokens[..=i],
                num_prompt_tokens: 1,
                beam: 0,
                owner: Owner::default(),
            };
            let token = sampler.sample(&mut logits.clone(), input).expect("finite");
            by_counter[token as usize] += 1;
            let params = SamplingParams {
                seed: i as u64,
                ..params.clone()
            };
            let input = SamplingInput {
                params: &params,
                tokens: &[1],
                num_prompt_tokens: 1,
                beam: 0,
                owner: Owner::default(),
            };
            let token = sampler.sample(&mut logits.clone(), input).expect("finite");
            by_seed[token as usize] += 1;
        }
        assert_chi_square(&by_counter, &expected);
        assert_chi_square(&by_seed, &expected);
    }
}

/// Passes 999 of 1000 fair sets of draws; rare tokens are counted together.
#[track_caller]
fn assert_chi_square(draws: &[u32], probabilities: &[f64]) {
    let num_draws = f64::from(draws.iter().sum::<u32>());
    let (mut statistic, mut cells) = (0.0, 0.0);
    let (mut rare, mut rare_expected) = (0.0, 0.0);
    for (&count, &probability) in draws.iter().zip(probabilities) {
        let expected = probability * num_draws;
        if expected == 0.0 {
            assert_eq!(count, 0, "an impossible token was drawn");
        } else if expected < 10.0 {
            rare += f64::from(count);
            rare_expected += expected;
        } else {
            statistic += (f64::from(count) - expected).powi(2) / expected;
            cells += 1.0;
        }
    }
    if rare_expected > 0.0 {
        statistic += (rare - rare_expected).powi(2) / rare_expected;
        cells += 1.0;
    }
    // Wilson and Hilferty's approximation of the 99.9 % quantile.
    let freedom: f64 = cells - 1.0;
    let spread = 2.0 / (9.0 * freedom);
    let limit = freedom * (1.0 - spread + 3.09 * spread.sqrt()).powi(3);
    assert!(statistic < limit, "chi-square {statistic} over {limit}");
}

#[test]
fn a_seed_gives_these_tokens_for_ever() {
    // Users store seeds with their texts: a change of these numbers is a breaking change.
    let logits = random_logits(1, 1000, 2.0);
    let mut sampler = Sampler::new(1000);
    let mut draw = |params: SamplingParams| -> Vec<TokenId> {
        let mut tokens = vec![1];
        for _ in 0..8 {
            let input = SamplingInput {
                params: &params,
                tokens: &tokens,
                num_prompt_tokens: 1,
                beam: 0,
                owner: Owner::default(),
            };
            tokens.push(sampler.sample(&mut logits.clone(), input).expect("finite"));
        }
        tokens[1..].to_vec()
    };
    let plain = SamplingParams {
        temperature: 1.0,
        seed: 42,
        ..SamplingParams::default()
    };
    let filtered = SamplingParams {
        top_k: 100,
        top_p: 0.9,
        min_p: 0.01,
        ..plain.clone()
    };
    assert_eq!(draw(plain), [365, 255, 558, 586, 845, 255, 685, 302]);
    assert_eq!(draw(filtered), [302, 255, 521, 521, 858, 255, 610, 271]);
}

#[test]
fn greedy_takes_the_lowest_id_of_the_most_likely() {
    let params = SamplingParams::default();
    let mut sampler = Sampler::new(300);
    for (first, second) in [(0, 299), (63, 64), (130, 131), (298, 299)] {
        let mut logits = vec![-1.0; 300];
        (logits[first], logits[second]) = (2.5, 2.5);
        let token = sampler.sample(&mut logits, input(&params));
        assert_eq!(token, Ok(first as TokenId));
    }
    let mut zeros = vec![0.0; 300];
    zeros[0] = -0.0;
    assert_eq!(sampler.sample(&mut zeros, input(&params)), Ok(0));
}

#[test]
fn equal_logits_at_the_cut_keep_the_lowest_ids() {
    let logits = vec![0.0; 300];
    for (top_k, top_p) in [(3, 1.0), (0, 0.01), (50, 0.06)] {
        let params = SamplingParams {
            temperature: 1.0,
            top_k,
            top_p,
            ..SamplingParams::default()
        };
        let probabilities = Sampler::new(300).distribution(&logits, input(&params));
        let kept: Vec<usize> = probabilities
            .expect("finite")
            .iter()
            .enumerate()
            .filter(|(_, p)| **p > 0.0)
            .map(|(token, _)| token)
            .collect();
        assert_eq!(kept, [0, 1, 2], "top_k {top_k}, top_p {top_p}");
    }
}

#[test]
fn logits_that_are_not_numbers_are_an_error_wherever_they_stand() {
    let options = [
        SamplingParams::default(),
        SamplingParams {
            temperature: 1.0,
            top_k: 5,
            bad_words: [vec![0], vec![130], vec![299]].into(),
            repetition_penalty: 2.0,
            logit_bias: [(0, 1.0), (130, 1.0), (299, 1.0)].into(),
            ..SamplingParams::default()
        },
    ];
    let mut sampler = Sampler::new(300);
    for params in &options {
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY] {
            for place in [0, 130, 299] {
                let mut logits = random_logits(3, 300, 2.0);
                logits[place] = bad;
                let result = sampler.sample(&mut logits, input(params));
                assert_eq!(result, Err(SampleError::NotFinite), "{bad} at {place}");
            }
            let result = sampler.sample(&mut [bad; 300], input(params));
            assert_eq!(result, Err(SampleError::NotFinite));
        }
    }
}

#[test]
fn a_sequence_with_no_token_left_is_an_error() {
    let params = SamplingParams {
        bad_words: (0..9).map(|token| vec![token]).collect(),
        min_tokens: 1,
        end_ids: vec![9],
        ..SamplingParams::default()
    };
    let mut sampler = Sampler::new(10);
    let result = sampler.sample(&mut [1.0; 10], input(&params));
    assert_eq!(result, Err(SampleError::NoneAllowed));
    let mut logits = [f32::NEG_INFINITY; 10];
    let result = sampler.sample(&mut logits, input(&SamplingParams::default()));
    assert_eq!(result, Err(SampleError::NoneAllowed));
}

#[test]
fn a_bias_of_minus_infinity_forbids_as_any_other_option_does() {
    let biased = |tokens: std::ops::Range<u32>| SamplingParams {
        temperature: 1.0,
        logit_bias: tokens.map(|token| (token, f32::NEG_INFINITY)).collect(),
        // A forbidden token stays forbidden, whatever is applied later.
        repetition_penalty: 0.5,
        frequency_penalty: -100.0,
        ..SamplingParams::default()
    };
    let mut sampler = Sampler::new(10);
    let most = biased(0..9);
    for seed in 0..20 {
        let logits = random_logits(seed, 10, 5.0);
        let params = SamplingParams {
            seed,
            ..most.clone()
        };
        let token = sampler.sample(&mut logits.clone(), input(&params));
        assert_eq!(token, Ok(9));
        let named = sampler.candidates(&mut logits.clone(), input(&params), 4);
        let named = named.expect("one is left");
        let tokens: Vec<_> = named.iter().map(|it| it.token).collect();
        assert_eq!(tokens, [9], "a beam does not continue the others");
    }
    let all = biased(0..10);
    let none = Err(SampleError::NoneAllowed);
    assert_eq!(sampler.sample(&mut [1.0; 10], input(&all)), none);
    let named = sampler.candidates(&mut [1.0; 10], input(&all), 4);
    assert_eq!(named.map(drop), none.map(drop));
    let result = sampler.sample(&mut [f32::NAN; 10], input(&all));
    assert_eq!(result, Err(SampleError::NotFinite), "it hides nothing");
}

#[test]
fn a_sequence_that_could_only_repeat_itself_has_not_failed() {
    let repeats = SamplingParams {
        no_repeat_ngram_size: 1,
        ..SamplingParams::default()
    };
    let choose = |params: &SamplingParams, tokens: &[TokenId]| {
        let input = SamplingInput {
            params,
            tokens,
            num_prompt_tokens: 1,
            beam: 0,
            owner: Owner::default(),
        };
        let mut sampler = Sampler::new(4);
        let token = sampler.sample(&mut [1.0; 4], input);
        let named = sampler.candidates(&mut [1.0; 4], input, 2);
        assert_eq!(token.err(), named.err());
        token
    };
    assert_eq!(choose(&repeats, &[2, 0, 3]), Ok(1));
    let only_repeats = Err(SampleError::OnlyRepeats);
    assert_eq!(choose(&repeats, &[2, 0, 3, 1]), only_repeats);
    let of_two = SamplingParams {
        allowed_token_ids: Some(vec![0, 1].into()),
        ..repeats.clone()
    };
    assert_eq!(choose(&of_two, &[2, 0, 1]), only_repeats);
    assert_eq!(choose(&of_two, &[2, 3]), Ok(0));
    // Where the others leave nothing, repeats have nothing to do with it.
    let of_none = SamplingParams {
        bad_words: vec![vec![0], vec![1]].into(),
        ..of_two
    };
    assert_eq!(choose(&of_none, &[2, 0, 1]), Err(SampleError::NoneAllowed));
}

#[test]
fn logits_that_have_been_changed_are_not_changed_again() {
    let params = SamplingParams {
        temperature: 1.0,
        logit_bias: [(3, 2.0), (5, f32::NEG_INFINITY)].into(),
        ..SamplingParams::default()
    };
    let mut sampler = Sampler::new(300);
    for seed in 0..20 {
        let mut logits = random_logits(seed, 300, 2.0);
        let token = sampler.sample(&mut logits, input(&params));
        assert_eq!(sampler.sample_changed(&logits, input(&params)), token);
    }
    let result = sampler.sample_changed(&[f32::NAN; 300], input(&params));
    assert_eq!(result, Err(SampleError::NotFinite));
}

#[test]
fn absurd_options_choose_a_token_and_never_panic() {
    let logits = [3.0, -2.0, f32::MAX, f32::MIN, f32::NEG_INFINITY, 0.0];
    let absurd = [
        SamplingParams {
            temperature: f32::MIN_POSITIVE / 2.0,
            top_p: f32::MIN_POSITIVE,
            ..SamplingParams::default()
        },
        SamplingParams {
            temperature: 100.0,
            min_p: 1.0,
            top_k: u32::MAX,
            ..SamplingParams::default()
        },
        SamplingParams {
            temperature: 1.0,
            top_p: 0.999_999_9,
            repetition_penalty: f32::MIN_POSITIVE,
            end_ids: vec![u32::MAX],
            bad_words: [vec![], vec![u32::MAX]].into(),
            logit_bias: [(2, f32::MAX), (u32::MAX, 1.0)].into(),
            min_tokens: u32::MAX,
            ..SamplingParams::default()
        },
    ];
    let mut sampler = Sampler::new(logits.len());
    for params in &absurd {
        let tokens = [2, 0, u32::MAX, 5];
        let input = SamplingInput {
            params,
            tokens: &tokens,
            num_prompt_tokens: 2,
            beam: 0,
            owner: Owner::default(),
        };
        assert_eq!(sampler.sample(&mut logits.clone(), input), Ok(2));
    }
}

#[test]
fn a_bad_word_is_forbidden_only_where_it_would_be_completed() {
    let params = SamplingParams {
        bad_words: [vec![4, 5, 6]].into(),
        ..SamplingParams::default()
    };
    let mut sampler = Sampler::new(10);
    let mut choose = |tokens: &[TokenId]| {
        let mut logits = [0.0; 10];
        logits[6] = 1.0;
        let input = SamplingInput {
            params: &params,
            tokens,
            num_prompt_tokens: 1,
            beam: 0,
            owner: Owner::default(),
        };
        sampler.sample(&mut logits, input)
    };
    assert_eq!(choose(&[4, 5]), Ok(0));
    assert_eq!(choose(&[4, 5, 5]), Ok(6));
    assert_eq!(choose(&[5]), Ok(6));
}

#[test]
fn a_beam_names_its_likeliest_tokens_and_penalties_are_of_their_log_probabilities() {
    let logits = [1.0, 3.0, 2.0, f32::NEG_INFINITY, 2.0];
    let total: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
    let log_prob = |logit: f64| logit - total.ln();
    let name = |params: &SamplingParams, num| {
        let input = SamplingInput {
            params,
            tokens: &[1],
            num_prompt_tokens: 1,
            beam: 0,
            owner: Owner::default(),
        };
        let named = Sampler::new(5).candidates(&mut logits.clone(), input, num);
        let named = named.expect("numbers").into_iter();
        named
            .map(|it| (it.token, f64::from(it.log_prob)))
            .collect::<Vec<_>>()
    };
    let assert_alike = |named: Vec<(TokenId, f64)>, expected: &[(TokenId, f64)]| {
        assert_eq!(named.len(), expected.len(), "{named:?}");
        for ((token, ours), (id, expected)) in named.into_iter().zip(expected) {
            assert!(
                token == *id && (ours - expected).abs() < 1e-6,
                "{token}: {ours}"
            );
        }
    };
    let plain = SamplingParams {
        // Nothing is drawn or cut.
        temperature: 0.5,
        top_k: 1,
        ..SamplingParams::default()
    };
    let [first, second, third] = [3.0, 2.0, 1.0].map(log_prob);
    assert_alike(name(&plain, 2), &[(1, first), (2, second)]);
    let all = [(1, first), (2, second), (4, second), (0, third)];
    assert_alike(name(&plain, 9), &all);
    let penalised = SamplingParams {
        repetition_penalty: 4.0,
        ..plain.clone()
    };
    assert_alike(name(&penalised, 2), &[(2, second), (4, second)]);
    let only = SamplingParams {
        allowed_token_ids: Some([0].into()),
        ..plain.clone()
    };
    assert_alike(name(&only, 2), &[(0, third)]);
    let none = SamplingParams {
        allowed_token_ids: Some([3].into()),
        ..plain
    };
    for (logits, params, error) in [
        (logits, none, SampleError::NoneAllowed),
        ([f32::NAN; 5], penalised, SampleError::NotFinite),
    ] {
        let named = Sampler::new(5).candidates(&mut logits.clone(), input(&params), 2);
        assert_eq!(named, Err(error));
    }
}
