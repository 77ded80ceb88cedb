//! Sampling on the device, beside the sampler on the CPU.

use bytemuck::{Pod, Zeroable};
use inflight_kernels_on_cpu::{Arg, Dims};
use inflight_sampling::{
    ChangeLists, DeviceSampling, SampleError, Sampler, SamplingInput, SamplingParams,
};

use crate::support::{Random, cases};

const NOT_FINITE: u32 = u32::MAX;
const NONE_ALLOWED: u32 = u32::MAX - 1;
const ASK_HOST: u32 = u32::MAX - 2;

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Row {
    seed: u64,
    num_generated: u64,
    log_min_p: f64,
    temperature: f32,
    top_p: f32,
    top_k: u32,
    is_skipped: u32,
    lists: u32,
    num_biases: u32,
    num_forbidden: u32,
    num_ignored: u32,
    num_counted: u32,
    repetition_penalty: f32,
    presence_penalty: f32,
    frequency_penalty: f32,
}

impl Row {
    fn new(params: &SamplingParams, num_generated: usize) -> Self {
        Self {
            seed: params.seed,
            num_generated: num_generated as u64,
            log_min_p: f64::from(params.min_p).ln(),
            temperature: params.temperature,
            top_p: params.top_p,
            top_k: params.top_k,
            ..Self::zeroed()
        }
    }

    /// With changes of logits.
    fn changed(sampling: DeviceSampling) -> Self {
        let DeviceSampling { changes, plain } = sampling;
        Self {
            seed: plain.seed,
            num_generated: plain.num_generated,
            log_min_p: f64::from(plain.min_p).ln(),
            temperature: plain.temperature,
            top_p: plain.top_p,
            top_k: plain.top_k,
            is_skipped: 0,
            lists: changes.start,
            num_biases: changes.num_biases,
            num_forbidden: changes.num_forbidden,
            num_ignored: changes.num_ignored,
            num_counted: changes.num_counted,
            repetition_penalty: changes.repetition_penalty,
            presence_penalty: changes.presence_penalty,
            frequency_penalty: changes.frequency_penalty,
        }
    }
}

/// The logits after the changes of their rows, by a few blocks.
fn change(
    random: &mut Random,
    logits: &[f32],
    rows: &[Row],
    words: &[u32],
    vocab_size: usize,
) -> Vec<f32> {
    let mut logits = logits.to_vec();
    let num_blocks = random.between(1, rows.len() + 1);
    let mut counts = vec![0_u32; num_blocks * vocab_size];
    // An empty list has an address, too.
    let words = [words, &[0]].concat();
    let mut args = [
        Arg::from(&mut logits[..]),
        Arg::from(&mut counts[..]),
        Arg::from(rows),
        Arg::from(&words[..]),
        (rows.len() as i32).into(),
        (vocab_size as i32).into(),
    ];
    let dims = Dims::new(num_blocks, 1, random.block(4));
    // SAFETY: as many rows of logits as there are rows, counts for each block, and the lists of all rows.
    unsafe { random.launch("change_logits", dims, &mut args) };
    assert!(counts.iter().all(|&count| count == 0), "all are cleared");
    logits
}

/// Tokens of rows of `vocab_size` logits.
fn sample(random: &mut Random, logits: &[f32], rows: &[Row], vocab_size: usize) -> Vec<u32> {
    let mut tokens = vec![0; rows.len()];
    let mut args = [
        Arg::from(&mut tokens[..]),
        Arg::from(logits),
        Arg::from(rows),
        (vocab_size as i32).into(),
    ];
    let dims = Dims {
        shared_bytes: vocab_size.div_ceil(64) * 8,
        ..Dims::new(rows.len(), 1, random.block(4))
    };
    // SAFETY: as many rows of logits as there are rows, and shared memory for the masses.
    unsafe { random.launch("sample", dims, &mut args) };
    tokens
}

/// The token that the CPU chooses.
fn expected(
    sampler: &mut Sampler,
    logits: &[f32],
    params: &SamplingParams,
    num_generated: usize,
) -> u32 {
    let input = SamplingInput {
        params,
        tokens: &vec![0; num_generated],
        num_prompt_tokens: 0,
        beam: 0,
        owner: Default::default(),
    };
    match sampler.sample(&mut logits.to_vec(), input) {
        Ok(token) => token,
        Err(SampleError::NotFinite) => NOT_FINITE,
        Err(SampleError::NoneAllowed) => NONE_ALLOWED,
        Err(error) => panic!("{error}"),
    }
}

fn params(random: &mut Random, vocab_size: usize) -> SamplingParams {
    SamplingParams {
        temperature: random.one_of(&[0.0, 1.0, 0.7, 3.0, 1e-3, 1e-30]),
        top_k: random.one_of(&[
            0,
            0,
            1,
            2,
            5,
            40,
            vocab_size as u32 - 1,
            vocab_size as u32 + 7,
        ]),
        top_p: random.one_of(&[1.0, 1.0, 0.9, 0.5, 0.999, 1e-6]),
        min_p: random.one_of(&[0.0, 0.0, 0.05, 0.5, 1.0]),
        seed: random.seed(),
        ..SamplingParams::default()
    }
}

/// Logits with a few peaks, ties, and tokens that are ruled out.
fn logits(random: &mut Random, vocab_size: usize) -> Vec<f32> {
    let size = random.one_of(&[0.0, 1.0, 10.0, 1e4]);
    let mut logits = random.floats(vocab_size, size);
    let num_values = random.between(1, 10);
    let values = random.floats(num_values, 2.0 * size);
    let (has_ties, has_forbidden) = (random.coin(), random.coin());
    for logit in &mut logits {
        if has_ties && random.between(0, 3) == 0 {
            *logit = random.one_of(&values);
        }
        if has_forbidden && random.between(0, 2) == 0 {
            *logit = f32::NEG_INFINITY;
        }
    }
    if random.coin() {
        logits[0] = -0.0;
    }
    logits
}

#[test]
fn tokens_are_those_of_the_sampler_on_the_cpu() {
    let random = &mut Random::new();
    let (mut num_rows, mut num_asked) = (0, 0);
    for _ in cases(60) {
        let vocab_size = random.one_of(&[2, 63, 64, 65, 500, 1000]) + random.between(0, 3);
        let mut sampler = Sampler::new(vocab_size);
        let params: Vec<_> = (0..5).map(|_| params(random, vocab_size)).collect();
        let generated: Vec<_> = (0..5).map(|_| random.between(0, 100)).collect();
        let rows: Vec<Row> = params
            .iter()
            .zip(&generated)
            .map(|(params, num_generated)| Row::new(params, *num_generated))
            .collect();
        let all: Vec<_> = (0..5).map(|_| logits(random, vocab_size)).collect();
        let tokens = sample(random, &all.concat(), &rows, vocab_size);
        for (row, token) in tokens.into_iter().enumerate() {
            num_rows += 1;
            if token == ASK_HOST {
                num_asked += 1;
                assert!(params[row].top_p < 1.0, "only a nucleus can be uncertain");
                continue;
            }
            let expected = expected(&mut sampler, &all[row], &params[row], generated[row]);
            assert_eq!(token, expected, "of {vocab_size}: {:?}", params[row]);
        }
    }
    // Ties in the nucleus, and shares of a total that is a sum of ones, end exactly at a token.
    assert!(num_asked * 10 < num_rows, "{num_asked} of {num_rows} rows");
}

/// Options that change logits, some of tokens beyond the vocabulary.
fn changing_params(random: &mut Random, vocab_size: usize) -> SamplingParams {
    let token = |random: &mut Random| random.between(0, vocab_size + 1) as u32;
    let tokens = |random: &mut Random, most: usize| -> Vec<u32> {
        (0..random.between(0, most))
            .map(|_| token(random))
            .collect()
    };
    let mut biased = tokens(random, 6);
    biased.sort_unstable();
    biased.dedup();
    let bias = [1.0, -2.5, 100.0, f32::NEG_INFINITY, f32::MAX];
    let biases = biased.into_iter().map(|id| (id, random.one_of(&bias)));
    let logit_bias: Vec<_> = biases.collect();
    let bad_words = (0..random.between(0, 5))
        .map(|_| (0..random.between(1, 2)).map(|_| token(random)).collect());
    let bad_words: Vec<Vec<u32>> = bad_words.collect();
    SamplingParams {
        repetition_penalty: random.one_of(&[1.0, 1.0, 1.3, 0.7, 100.0]),
        presence_penalty: random.one_of(&[0.0, 0.0, 0.5, -1.0]),
        frequency_penalty: random.one_of(&[0.0, 0.0, 0.1, -100.0]),
        prompt_ignore_length: random.one_of(&[0, 3, u32::MAX]),
        min_tokens: random.one_of(&[0, 10, 1000]),
        end_ids: tokens(random, 3),
        stop_token_ids: tokens(random, 3),
        bad_words: bad_words.into(),
        logit_bias: logit_bias.into(),
        ..params(random, vocab_size)
    }
}

#[test]
fn changed_logits_and_their_tokens_are_those_of_the_sampler_on_the_cpu() {
    const NUM_ROWS: usize = 5;
    let random = &mut Random::new();
    let mut num_asked = 0;
    let mut num_rows = 0;
    for _ in cases(60) {
        let vocab_size = random.one_of(&[2, 64, 300]) + random.between(0, 3);
        let mut sampler = Sampler::new(vocab_size);
        let mut lists = ChangeLists::new(NUM_ROWS, 256);
        let params: Vec<_> = (0..NUM_ROWS)
            .map(|_| changing_params(random, vocab_size))
            .collect();
        let tokens: Vec<Vec<u32>> = (0..NUM_ROWS)
            .map(|_| {
                let len = random.between(1, 200);
                (0..len)
                    .map(|_| random.between(0, vocab_size) as u32)
                    .collect()
            })
            .collect();
        let input = |row: usize| SamplingInput {
            params: &params[row],
            tokens: &tokens[row],
            num_prompt_tokens: tokens[row].len() / 2,
            beam: 0,
            owner: Default::default(),
        };
        let rows: Vec<_> = (0..NUM_ROWS)
            .map(|row| DeviceSampling::of(input(row), &mut lists).expect("there is room"))
            .map(Row::changed)
            .collect();
        let all: Vec<_> = (0..NUM_ROWS).map(|_| logits(random, vocab_size)).collect();
        let changed = change(random, &all.concat(), &rows, lists.words(), vocab_size);
        let chosen = sample(random, &changed, &rows, vocab_size);
        for (row, changed) in changed.chunks_exact(vocab_size).enumerate() {
            num_rows += 1;
            // The sampler leaves the logits as its options have changed them.
            let mut expected = all[row].clone();
            let token = match sampler.sample(&mut expected, input(row)) {
                Ok(token) => token,
                Err(SampleError::NoneAllowed) => NONE_ALLOWED,
                Err(error) => panic!("{error}"),
            };
            assert_eq!(changed, expected, "of {vocab_size}: {:?}", params[row]);
            match chosen[row] {
                ASK_HOST => {
                    num_asked += 1;
                    let changed = sampler.sample_changed(changed, input(row));
                    assert_eq!(changed, Ok(token));
                }
                chosen => assert_eq!(chosen, token, "of {vocab_size}: {:?}", params[row]),
            }
        }
    }
    assert!(num_asked * 10 < num_rows, "{num_asked} of {num_rows} rows");
}

#[test]
fn logits_that_are_not_finite_are_never_hidden() {
    let random = &mut Random::new();
    let params = SamplingParams {
        logit_bias: [(0, 5.0), (1, f32::NEG_INFINITY)].into(),
        bad_words: [vec![1], vec![0]].into(),
        repetition_penalty: 2.0,
        ..SamplingParams::default()
    };
    let mut lists = ChangeLists::new(2, 256);
    let input = SamplingInput {
        params: &params,
        tokens: &[0, 1, 2],
        num_prompt_tokens: 1,
        beam: 0,
        owner: Default::default(),
    };
    let sampling = DeviceSampling::of(input, &mut lists).expect("there is room");
    let mut skipped = Row::changed(sampling);
    skipped.is_skipped = 1;
    let rows = [Row::changed(sampling), skipped].to_vec();
    let logits = [f32::NAN, f32::INFINITY, 3.0, 1.0];
    let changed = change(random, &logits.repeat(2), &rows, lists.words(), 4);
    assert!(changed[0].is_nan() && changed[4].is_nan());
    assert_eq!(changed[1..4], [f32::INFINITY, 1.5, 1.0]);
    assert_eq!(changed[5..], logits[1..]);
}

#[test]
fn each_token_is_drawn_as_often_as_it_is_likely() {
    let random = &mut Random::new();
    let logits = [0.0_f32, 1.0, 2.0, f32::NEG_INFINITY, 0.5].to_vec();
    let params = SamplingParams {
        temperature: 1.0,
        seed: random.seed(),
        ..SamplingParams::default()
    };
    let num_draws = 2000;
    let rows: Vec<_> = (0..num_draws)
        .map(|index| Row::new(&params, index))
        .collect();
    let tokens = sample(random, &logits.repeat(num_draws), &rows, logits.len());
    let total: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
    for (token, logit) in logits.iter().enumerate() {
        let p = f64::from(*logit).exp() / total;
        let num_drawn = tokens
            .iter()
            .filter(|drawn| **drawn as usize == token)
            .count() as f64;
        let deviation = (num_draws as f64 * p * (1.0 - p)).sqrt();
        // Six standard deviations: once in half a billion runs.
        assert!(
            (num_drawn - num_draws as f64 * p).abs() <= 6.0 * deviation,
            "{token}: {num_drawn}"
        );
    }
}

#[test]
fn rows_that_cannot_be_sampled_say_why() {
    let random = &mut Random::new();
    let vocab_size = 100;
    let params = params(random, vocab_size);
    let good = random.floats(vocab_size, 1.0);
    let with = |at: usize, value: f32| {
        let mut logits = good.clone();
        logits[at] = value;
        logits
    };
    let at = random.between(0, vocab_size - 1);
    let all = [
        with(at, f32::NAN),
        with(at, f32::INFINITY),
        vec![f32::NEG_INFINITY; vocab_size],
        good.clone(),
        with(at, f32::NAN),
    ];
    let mut rows = [Row::new(&params, 3); 5].to_vec();
    rows[4].is_skipped = 1;
    let tokens = sample(random, &all.concat(), &rows, vocab_size);
    assert_eq!(tokens[..3], [NOT_FINITE, NOT_FINITE, NONE_ALLOWED]);
    assert!(tokens[3] < vocab_size as u32 || tokens[3] == ASK_HOST);
    assert_eq!(tokens[4], ASK_HOST);
}
