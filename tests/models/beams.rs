//! Beam search against Hugging Face transformers: see tests/fixtures/make_beam_fixtures.py.

use std::fs;

use inflight_base::TokenId;
use inflight_engine::{BlockReuse, CapacityPolicy, OutputOptions};
use inflight_sampling::{BeamSearch, EarlyStopping, SamplingParams};
use serde::Deserialize;

use crate::batching::assert_same_bits;
use crate::support::{Request, Setup, fixture, serve, serve_alone};

/// A beam search by transformers, and its results.
#[derive(Deserialize)]
struct Case {
    model: String,
    prompt: Vec<TokenId>,
    width: u32,
    end_ids: Vec<TokenId>,
    max_new_tokens: u32,
    options: Options,
    bf16_cost: f32,
    hypotheses: Vec<Expected>,
}

/// Options of `generate` by its names.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    length_penalty: Option<f32>,
    early_stopping: serde_json::Value,
    repetition_penalty: Option<f32>,
    no_repeat_ngram_size: u32,
    min_new_tokens: u32,
}

#[derive(Deserialize)]
struct Expected {
    tokens: Vec<TokenId>,
    score: f32,
}

impl Case {
    fn request(&self) -> Request {
        let options = &self.options;
        Request {
            sampling: SamplingParams {
                end_ids: self.end_ids.clone(),
                repetition_penalty: options.repetition_penalty.unwrap_or(1.0),
                no_repeat_ngram_size: options.no_repeat_ngram_size,
                min_tokens: options.min_new_tokens,
                beam_search: Some(BeamSearch {
                    width: self.width,
                    num_returned: self.width,
                    length_penalty: self.length_penalty(),
                    early_stopping: match options.early_stopping.as_str() {
                        Some(_) => EarlyStopping::Never,
                        None if options.early_stopping == true => EarlyStopping::Always,
                        None => EarlyStopping::Likely,
                    },
                    diversity_rate: 0.0,
                }),
                ..SamplingParams::default()
            },
            ..Request::greedy(&self.prompt, self.max_new_tokens)
        }
    }

    fn length_penalty(&self) -> f32 {
        self.options.length_penalty.unwrap_or(1.0)
    }
}

fn cases() -> Vec<Case> {
    let text = fs::read_to_string(fixture("beams.json")).expect("beams.json");
    serde_json::from_str(&text).expect("beams.json")
}

fn setup() -> Setup {
    Setup {
        max_beam_width: 8,
        block_size: 4,
        num_blocks: 256,
        ..Setup::default()
    }
}

#[test]
fn the_logits_of_a_beam_match_those_of_its_tokens_as_a_prompt() {
    let setup = setup();
    for case in cases().into_iter().step_by(5) {
        let mut runner = setup.load(&case.model);
        let vocab_size = runner.vocab_size() as usize;
        let asking = Request {
            outputs: OutputOptions {
                generation_logits: true,
                ..OutputOptions::default()
            },
            ..case.request()
        };
        let (asking, _) = serve(&mut runner, &setup, &[asking]);
        for found in &asking[0].hypotheses {
            let (_, known) = found.tokens.split_last().expect("tokens");
            let as_prompt = Request {
                outputs: OutputOptions {
                    context_logits: true,
                    ..OutputOptions::default()
                },
                ..Request::greedy(&[&case.prompt[..], known].concat(), 1)
            };
            let (of_prompt, _) = serve(&mut runner, &setup, &[as_prompt]);
            let rows = of_prompt[0].context_logits.chunks(vocab_size);
            let expected: Vec<_> = rows.skip(case.prompt.len() - 1).collect();
            assert_eq!(found.generation_logits.len(), expected.len());
            for (row, expected) in found.generation_logits.iter().zip(expected) {
                let bits = |row: &[f32]| -> Vec<_> { row.iter().map(|it| it.to_bits()).collect() };
                assert!(bits(row) == bits(expected), "{}", case.model);
            }
        }
        // Requesting the logits has no effect on the results.
        let (silent, _) = serve(&mut runner, &setup, &[case.request()]);
        for (asking, silent) in asking[0].hypotheses.iter().zip(&silent[0].hypotheses) {
            assert_eq!(
                (&asking.tokens, &asking.log_probs),
                (&silent.tokens, &silent.log_probs)
            );
            assert!(silent.generation_logits.is_empty());
        }
    }
}

#[test]
fn beams_and_their_scores_match_transformers() {
    let (cases, setup) = (cases(), setup());
    assert!(cases.len() > 20);
    for case in cases {
        let mut runner = setup.load(&case.model);
        let (served, _) = serve(&mut runner, &setup, &[case.request()]);
        let what = format!("{}, {} beams, {:?}", case.model, case.width, case.options);
        let tokens: Vec<_> = served[0].hypotheses.iter().map(|it| &it.tokens).collect();
        let expected: Vec<_> = case.hypotheses.iter().map(|it| &it.tokens).collect();
        assert_eq!(tokens, expected, "{what}");
        for (ours, expected) in served[0].hypotheses.iter().zip(&case.hypotheses) {
            let len = ours.tokens.len() as f32;
            let score = ours.cum_log_prob / len.powf(case.length_penalty());
            let error = (score - expected.score).abs();
            // Sums in another order sometimes fall on the other side of a rounding boundary.
            let tolerance = case.bf16_cost.max(1e-3 * expected.score.abs());
            assert!(
                error <= tolerance,
                "{what}: {score}, not {}",
                expected.score
            );
            let sum: f32 = ours.log_probs.iter().sum();
            assert!((sum - ours.cum_log_prob).abs() < 1e-3, "{what}");
        }
    }
}

#[test]
fn a_search_that_is_paused_finds_the_same_bits() {
    let roomy = Setup {
        max_seq_len: 40,
        ..setup()
    };
    // The largest search needs 21 blocks, and all together a few hundred.
    let paused = Setup {
        num_blocks: 24,
        policy: CapacityPolicy::MaxUtilization,
        ..roomy.clone()
    };
    // The rest of five beams is computed a few tokens at a time.
    let chunked = Setup {
        max_num_tokens: 24,
        enable_chunked_context: true,
        separate_calls: true,
        reuse: BlockReuse::PartialBlocks,
        ..paused.clone()
    };
    let slid = Setup {
        windows: &[9, 14],
        num_sinks: 2,
        gives_back: true,
        num_blocks: 36,
        ..chunked.clone()
    };
    let mut num_pauses = [0; 3];
    for name in ["llama3", "qwen3"] {
        let of_model = cases().into_iter().filter(|case| case.model == name);
        let requests: Vec<_> = of_model
            .map(|case| Request {
                outputs: OutputOptions {
                    generation_logits: true,
                    ..OutputOptions::default()
                },
                ..case.request()
            })
            .collect();
        for (setup, num_pauses) in [&paused, &chunked, &slid].into_iter().zip(&mut num_pauses) {
            let alone_setup = Setup {
                windows: setup.windows,
                num_sinks: setup.num_sinks,
                ..roomy.clone()
            };
            let mut alone = alone_setup.load(name);
            let (served, happened) = serve(&mut setup.load(name), setup, &requests);
            *num_pauses += happened.num_pauses;
            for (request, served) in requests.iter().zip(&served) {
                assert!(!served.hypotheses.is_empty());
                let expected = serve_alone(&mut alone, &alone_setup, request);
                assert_same_bits(served, &expected, &format!("{name}, {setup:?}"));
            }
        }
    }
    assert!(num_pauses.iter().all(|&num| num > 0), "{num_pauses:?}");
}
