//! Batch invariance: a request's tokens and logits are the same bits, whatever else is in the batch.
//!
//! The oracle of every test is the same request alone, on a runner with room for everything.

use inflight_base::TokenId;
use inflight_device::KvDtype;
use inflight_engine::{
    BlockReuse, CapacityPolicy, DraftOptions, OutputOptions, PromptImages, PromptLookup,
    Speculation, StepCost,
};
use inflight_numbers::CodeBits;
use inflight_runner::WeightPrecision;
use inflight_sampling::{BeamSearch, EarlyStopping, Hypothesis, SamplingParams, TokenLogProbs};

use crate::families::{Family, all_families, on_shares};
use crate::support::{Happened, Request, Served, Setup, serve, serve_alone, simds};

/// Grouped heads with scaled RoPE; biases; head norms; experts; latent attention.
const MODELS: [&str; 5] = ["llama3", "qwen2", "qwen3", "qwen2-moe", "deepseek-v3"];

/// Requests of many lengths, some greedy and some sampled, that arrive over a few steps.
pub fn requests() -> Vec<Request> {
    let prompt_lens = [1, 17, 40, 3, 64, 16, 33, 5, 15, 50];
    prompt_lens
        .into_iter()
        .enumerate()
        .map(|(index, len)| Request {
            prompt: prompt(index, len),
            max_new_tokens: 12 + 5 * index as u32 % 17,
            sampling: match index % 3 {
                0 => SamplingParams::default(),
                1 => SamplingParams {
                    temperature: 0.9,
                    seed: index as u64,
                    ..SamplingParams::default()
                },
                _ => SamplingParams {
                    temperature: 1.3,
                    top_k: 40,
                    top_p: 0.9,
                    repetition_penalty: 1.2,
                    seed: index as u64,
                    ..SamplingParams::default()
                },
            },
            // Some have no extra outputs, some log-probabilities, some also the most likely tokens.
            outputs: OutputOptions {
                log_probs: [None, Some(0), Some(5), Some(20)][index % 4],
                context_logits: index % 3 == 1,
                prompt_log_probs: [None, Some(0), None, None, Some(5)][index % 5],
                generation_logits: index % 5 < 2,
                kv_blocks: index % 2 == 1,
                pooled: false,
                drafts: index % 2 == 0,
                beams: None,
            },
            drafts: DraftOptions::default(),
            adapter: None,
            images: PromptImages::default(),
            arrival: index / 2,
            cancelled_at: None,
        })
        .collect()
}

/// Token ids without shared n-grams between two requests.
pub fn prompt(seed: usize, len: usize) -> Vec<TokenId> {
    (0..len)
        .map(|i| 3 + ((seed * 7919 + i * 104_729 + i * i * 31) % 150) as TokenId)
        .collect()
}

/// The same requests, with shared prompt prefixes.
pub fn requests_that_share() -> Vec<Request> {
    let mut requests = requests();
    for (index, request) in requests.iter_mut().enumerate() {
        let shared = prompt(100 + index % 2, 45);
        let num_shared = (11 + 9 * index) % shared.len();
        let own = request.prompt.len().min(20);
        request.prompt.truncate(own);
        request.prompt.splice(0..0, shared[..num_shared].to_vec());
    }
    requests
}

/// Serves all requests together and compares each with its run alone.
pub fn serves_as_alone(name: &str, setup: &Setup) -> Happened {
    each_as_alone(name, setup, &requests())
}

/// Models that compute at the same time only share the cores.
#[test]
fn each_model_serves_as_alone_while_others_compute() {
    let num_threads = std::thread::available_parallelism().map_or(2, |n| n.get().max(2));
    let setup = |num_threads| Setup {
        max_num_tokens: 48,
        enable_chunked_context: true,
        num_threads,
        ..Setup::default()
    };
    // One model twice, another one, and one that leaves a core to others.
    let models = [
        ("llama3", num_threads),
        ("llama3", num_threads),
        ("qwen3", num_threads),
        ("qwen2", 1),
    ];
    std::thread::scope(|scope| {
        for (name, num_threads) in models {
            scope.spawn(move || serves_as_alone(name, &setup(num_threads)));
        }
    });
}

/// What of a setup may change an answer, with enough memory for all.
pub fn roomy(setup: &Setup) -> Setup {
    Setup {
        max_beam_width: setup.max_beam_width,
        windows: setup.windows,
        num_sinks: setup.num_sinks,
        shifts_sinks: setup.shifts_sinks,
        kv_dtype: setup.kv_dtype,
        weights: setup.weights,
        simd: setup.simd,
        ..Setup::default()
    }
}

pub fn each_as_alone(name: &str, setup: &Setup, requests: &[Request]) -> Happened {
    let alone_setup = roomy(setup);
    let mut alone = alone_setup.load(name);
    let (served, happened) = serve(&mut setup.load(name), setup, requests);
    for (index, (served, request)) in served.iter().zip(requests).enumerate() {
        let expected = serve_alone(&mut alone, &alone_setup, request);
        assert_same_bits(
            served,
            &expected,
            &format!("{name}, request {index}, {setup:?}"),
        );
    }
    happened
}

pub fn assert_same_bits(served: &Served, expected: &Served, what: &str) {
    assert_eq!(served.tokens, expected.tokens, "{what}: tokens");
    assert_eq!(served.hypotheses, expected.hypotheses, "{what}: hypotheses");
    for (served, expected) in served.hypotheses.iter().zip(&expected.hypotheses) {
        let bits = |of: &Hypothesis| -> Vec<_> {
            let scores = of.log_probs.iter().chain([&of.cum_log_prob]);
            let logits = of.generation_logits.iter().flat_map(|row| row.iter());
            scores.chain(logits).map(|it| it.to_bits()).collect()
        };
        assert!(bits(served) == bits(expected), "{what}: scores, logits");
    }
    assert_eq!(served.log_probs.len(), expected.log_probs.len(), "{what}");
    for (served, expected) in served.log_probs.iter().zip(&expected.log_probs) {
        assert_eq!(
            bits_of(served),
            bits_of(expected),
            "{what}: log-probabilities"
        );
    }
    let of_prompt = |it: &Served| it.prompt_log_probs.iter().map(bits_of).collect::<Vec<_>>();
    assert_eq!(
        of_prompt(served),
        of_prompt(expected),
        "{what}: log-probabilities of the prompt"
    );
    for (kind, served, expected) in [
        ("context", &served.context_logits, &expected.context_logits),
        (
            "generation",
            &served.generation_logits,
            &expected.generation_logits,
        ),
    ] {
        let is_same = served.len() == expected.len()
            && served
                .iter()
                .zip(expected)
                .all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(is_same, "{what}: {kind} logits");
    }
    for (step, (served, expected)) in served.logits.iter().zip(&expected.logits).enumerate() {
        let differs = served
            .iter()
            .zip(expected)
            .any(|(a, b)| a.to_bits() != b.to_bits());
        assert!(!differs, "{what}: logits of its token {step}");
    }
}

/// Tokens, ranks, and the bits of their log-probabilities.
fn bits_of(token: &TokenLogProbs) -> Vec<(TokenId, u32, u32)> {
    let all = std::iter::once(&token.chosen).chain(&token.top);
    all.map(|it| (it.token, it.rank, it.log_prob.to_bits()))
        .collect()
}

#[test]
fn extra_outputs_do_not_change_a_requests_tokens() {
    let setup = Setup::default();
    let mut runner = setup.load("qwen3");
    for request in requests() {
        let asked = serve_alone(&mut runner, &setup, &request);
        let nothing = Request {
            outputs: OutputOptions::default(),
            ..request.clone()
        };
        let silent = serve_alone(&mut runner, &setup, &nothing);
        assert_eq!(
            (&asked.tokens, &asked.logits),
            (&silent.tokens, &silent.logits)
        );
        assert_eq!(
            (silent.log_probs, silent.prompt_log_probs),
            (vec![], vec![])
        );
        let of_prompt = request.outputs.prompt_log_probs;
        let num_of_prompt = of_prompt.map_or(0, |_| request.prompt.len() - 1);
        assert_eq!(asked.prompt_log_probs.len(), num_of_prompt);
        for (token, log_probs) in request.prompt[1..].iter().zip(&asked.prompt_log_probs) {
            assert_eq!(log_probs.chosen.token, *token);
            assert_eq!(Some(log_probs.top.len() as u32), of_prompt);
        }
        assert_eq!(
            (silent.context_logits.len(), silent.generation_logits.len()),
            (0, 0)
        );
        let num_rows = |wanted, num_tokens| if wanted { num_tokens } else { 0 };
        let num_context = num_rows(request.outputs.context_logits, request.prompt.len());
        let num_generation = num_rows(request.outputs.generation_logits, asked.tokens.len());
        assert_eq!(
            asked.context_logits.len(),
            num_context * runner.vocab_size() as usize
        );
        assert_eq!(
            asked.generation_logits.len(),
            num_generation * runner.vocab_size() as usize
        );
        if num_context * num_generation > 0 {
            let last = asked.context_logits.len() - runner.vocab_size() as usize;
            let first = &asked.generation_logits[..runner.vocab_size() as usize];
            assert_eq!(&asked.context_logits[last..], first, "one and the same row");
        }
        let num_asked = request.outputs.log_probs.map_or(0, |_| asked.tokens.len());
        assert_eq!(asked.log_probs.len(), num_asked);
        for (token, log_probs) in asked.tokens.iter().zip(&asked.log_probs) {
            assert_eq!(log_probs.chosen.token, *token);
            assert_eq!(Some(log_probs.top.len() as u32), request.outputs.log_probs);
        }
    }
}

#[test]
fn a_request_is_the_same_in_a_batch() {
    for name in MODELS {
        let happened = serves_as_alone(name, &Setup::default());
        assert_eq!(happened.max_sequences, 8, "{happened:?}");
    }
}

#[test]
fn a_request_is_the_same_when_its_context_is_chunked() {
    for name in MODELS {
        for (max_num_tokens, block_size) in [(16, 16), (24, 8), (40, 4)] {
            let happened = serves_as_alone(
                name,
                &Setup {
                    max_num_tokens,
                    block_size,
                    num_blocks: 1024 / block_size,
                    enable_chunked_context: true,
                    ..Setup::default()
                },
            );
            assert!(happened.num_chunks > 3, "{happened:?}");
        }
    }
}

#[test]
fn a_request_is_the_same_when_it_is_paused_and_resumed() {
    for name in MODELS {
        for enable_chunked_context in [false, true] {
            let happened = serves_as_alone(
                name,
                &Setup {
                    block_size: 8,
                    // One sequence of the maximum length and a little more.
                    num_blocks: 14,
                    policy: CapacityPolicy::MaxUtilization,
                    enable_chunked_context,
                    max_num_tokens: if enable_chunked_context { 16 } else { 1024 },
                    ..Setup::default()
                },
            );
            assert!(happened.num_pauses > 0, "{happened:?}");
        }
    }
}

#[test]
fn a_request_is_the_same_with_any_block_size() {
    // Up to a contiguous cache: one block per sequence, much larger than needed.
    for block_size in [1, 3, 16, 64, 96, 97, 8192] {
        let setup = Setup {
            block_size,
            num_blocks: 1024_u32.div_ceil(block_size).max(8),
            ..Setup::default()
        };
        serves_as_alone("llama3", &setup);
    }
}

#[test]
fn a_request_is_the_same_when_its_blocks_are_copied_elsewhere() {
    for (name, block_size) in [("llama3", 16), ("qwen2", 5), ("qwen3", 64), ("qwen3", 50)] {
        let setup = Setup {
            block_size,
            num_blocks: 1024_u32.div_ceil(block_size),
            max_num_tokens: 64,
            enable_chunked_context: true,
            moves_blocks: true,
            num_runner_blocks: Some(2048_u32.div_ceil(block_size)),
            ..Setup::default()
        };
        let happened = serves_as_alone(name, &setup);
        assert!(happened.num_moves > 50, "{happened:?}");
    }
}

#[test]
fn a_request_is_the_same_when_blocks_outside_its_windows_are_taken_away() {
    for (name, block_size, windows, num_sinks) in [
        ("llama3", 16, &[20][..], 0),
        ("llama3", 8, &[7, 33], 5),
        ("qwen2-windows", 5, &[25, 18], 3),
        ("qwen3-windows", 1, &[16], 1),
        ("mistral-window", 4, &[1, 24], 20),
    ] {
        let setup = Setup {
            block_size,
            num_blocks: 1024_u32.div_ceil(block_size),
            max_num_tokens: 40,
            enable_chunked_context: true,
            windows,
            num_sinks,
            moves_blocks: true,
            ..Setup::default()
        };
        let happened = serves_as_alone(name, &setup);
        assert!(happened.num_taken >= 10, "{happened:?}");
    }
}

#[test]
fn a_request_is_the_same_where_sinks_shift_however_it_is_scheduled() {
    let chunked = Setup {
        max_num_tokens: 32,
        block_size: 4,
        num_blocks: 80,
        enable_chunked_context: true,
        windows: &[25, 12],
        num_sinks: 5,
        shifts_sinks: true,
        gives_back: true,
        reuse: BlockReuse::PartialBlocks,
        num_threads: 2,
        ..Setup::default()
    };
    let paused = Setup {
        num_blocks: 30,
        policy: CapacityPolicy::MaxUtilization,
        gives_back: false,
        ..chunked.clone()
    };
    let int8 = Setup {
        kv_dtype: KvDtype::Int8,
        ..paused.clone()
    };
    let (mut num_copies, mut num_pauses) = (0, 0);
    for (name, setup) in [
        ("llama3", &chunked),
        ("qwen3-windows", &paused),
        ("smollm3", &int8),
    ] {
        let happened = each_as_alone(name, setup, &requests_that_share());
        num_copies += happened.num_copies;
        num_pauses += happened.num_pauses;
        let gives_back = happened.num_holes > 20;
        assert_eq!(gives_back, setup.gives_back, "{happened:?}");
    }
    assert!(
        num_copies > 5 && num_pauses > 0,
        "{num_copies}, {num_pauses}"
    );
}

#[test]
fn a_request_is_the_same_with_an_int8_cache_however_it_is_scheduled() {
    for (name, block_size) in [("llama3", 16), ("qwen2-windows", 5), ("qwen3", 96)] {
        let setup = Setup {
            block_size,
            num_blocks: 1024_u32.div_ceil(block_size),
            kv_dtype: KvDtype::Int8,
            num_threads: 2,
            moves_blocks: true,
            num_runner_blocks: Some(2048_u32.div_ceil(block_size)),
            ..Setup::default()
        };
        serves_as_alone(name, &setup);
        let chunked = Setup {
            max_num_tokens: 96,
            enable_chunked_context: true,
            windows: &[30, 17],
            num_sinks: 4,
            ..setup
        };
        serves_as_alone(name, &chunked);
    }
}

#[test]
fn a_request_is_the_same_with_rounded_weights_however_it_is_scheduled() {
    for (name, weights) in [
        ("llama3", WeightPrecision::new(CodeBits::Eight)),
        ("qwen2", WeightPrecision::new(CodeBits::Four)),
        ("qwen3", WeightPrecision::new(CodeBits::Four)),
        ("gpt-neox", WeightPrecision::new(CodeBits::Eight)),
        ("gpt2", WeightPrecision::new(CodeBits::Four)),
        ("mixtral-stacked", WeightPrecision::new(CodeBits::Eight)),
        ("qwen2-moe", WeightPrecision::new(CodeBits::Four)),
        ("phimoe", WeightPrecision::new(CodeBits::Eight)),
        ("gpt-oss", WeightPrecision::new(CodeBits::Four)),
        ("deepseek-v2", WeightPrecision::new(CodeBits::Eight)),
        ("deepseek-v3", WeightPrecision::new(CodeBits::Four)),
    ] {
        for simd in simds() {
            let setup = Setup {
                weights: Some(weights),
                max_num_tokens: 96,
                enable_chunked_context: true,
                num_threads: 2,
                simd: Some(simd),
                ..Setup::default()
            };
            serves_as_alone(name, &setup);
        }
    }
}

#[test]
fn a_request_is_the_same_when_contexts_and_generations_are_separate_calls() {
    for name in MODELS {
        let setup = Setup {
            max_num_tokens: 24,
            enable_chunked_context: true,
            moves_blocks: true,
            num_runner_blocks: Some(100),
            separate_calls: true,
            ..Setup::default()
        };
        serves_as_alone(name, &setup);
    }
}

#[test]
fn a_request_is_the_same_on_any_number_of_threads() {
    for name in MODELS {
        for num_threads in [2, 5] {
            let setup = Setup {
                num_threads,
                ..Setup::default()
            };
            serves_as_alone(name, &setup);
        }
    }
}

on_shares! { everything_at_once: 8 of all_families(), is_the_same_under_everything_at_once }

fn is_the_same_under_everything_at_once(families: &[Family]) {
    for &(name, windows) in families {
        let happened = serves_as_alone(
            name,
            &Setup {
                max_num_requests: 5,
                max_num_tokens: 20,
                block_size: 4,
                num_blocks: 25,
                policy: CapacityPolicy::MaxUtilization,
                enable_chunked_context: true,
                num_threads: 3,
                windows,
                num_sinks: 3,
                separate_calls: true,
                moves_blocks: true,
                num_runner_blocks: Some(40),
                ..Setup::default()
            },
        );
        assert!(
            happened.num_pauses > 0 && happened.num_chunks > 0,
            "{happened:?}"
        );
    }
}

#[test]
fn a_request_is_the_same_with_every_kind_of_cache() {
    let paged = Setup {
        max_num_requests: 6,
        max_num_tokens: 32,
        block_size: 8,
        num_blocks: 40,
        enable_chunked_context: true,
        reuse: BlockReuse::PartialBlocks,
        num_threads: 2,
        gives_back: true,
        ..Setup::default()
    };
    let paused = Setup {
        num_blocks: 16,
        policy: CapacityPolicy::MaxUtilization,
        ..paged.clone()
    };
    let contiguous = Setup {
        block_size: 96,
        num_blocks: 6,
        reuse: BlockReuse::Off,
        contiguous: true,
        ..paged.clone()
    };
    let (mut num_copies, mut num_holes) = (0, 0);
    // The cache of latents has one type.
    let models = [
        ("qwen3", KvDtype::Bf16),
        ("qwen3", KvDtype::Int8),
        ("deepseek-v2-lite", KvDtype::Bf16),
    ];
    for (cache, (name, kv_dtype), (windows, num_sinks)) in [paged, paused, contiguous]
        .iter()
        .flat_map(|cache| models.map(|model| (cache, model)))
        .flat_map(|(cache, model)| {
            [(&[][..], 0), (&[25, 12][..], 5)].map(|windows| (cache, model, windows))
        })
    {
        let setup = Setup {
            kv_dtype,
            windows,
            num_sinks,
            ..cache.clone()
        };
        let happened = each_as_alone(name, &setup, &requests_that_share());
        num_copies += happened.num_copies;
        num_holes += happened.num_holes;
    }
    assert!(
        num_copies > 10 && num_holes > 100,
        "{num_copies} copies, {num_holes} holes"
    );
}

/// The requests, each with a draft from its own answer that is right up to some token, and with n-grams that
/// repeat; and each one's answer alone.
fn requests_with_drafts(name: &str, alone_setup: &Setup) -> (Vec<Request>, Vec<Served>) {
    let mut alone = alone_setup.load(name);
    let mut requests = requests_that_share();
    let mut expected = Vec::new();
    for (index, request) in requests.iter_mut().enumerate() {
        // A prompt that repeats itself.
        let twice = request.prompt[..request.prompt.len().min(24)].repeat(2);
        request.prompt = twice;
        request.sampling.no_repeat_ngram_size = [0, 0, 5][index % 3];
        request.sampling.min_tokens = [0, 8][index % 2];
        let answer = serve_alone(&mut alone, alone_setup, request);
        let mut tokens = answer.tokens.clone();
        if let Some(wrong) = tokens.get_mut(3 + index) {
            *wrong = (*wrong + 1) % 150;
        }
        // Some have no draft.
        tokens.truncate([usize::MAX, 0, 5][index % 3]);
        request.drafts = DraftOptions {
            max_draft_tokens: [None, Some(2)][index / 2 % 2],
            expected: tokens.into(),
        };
        expected.push(answer);
    }
    (requests, expected)
}

#[test]
fn a_request_is_the_same_with_speculation() {
    let speculation = Some(Speculation {
        max_draft_tokens: 5,
        prompt_lookup: Some(PromptLookup { min: 1, max: 3 }),
        has_draft_model: false,
        recomputes_drafts: false,
    });
    let roomy = Setup {
        speculation,
        ..Setup::default()
    };
    let chunked = Setup {
        max_num_tokens: 24,
        block_size: 4,
        num_blocks: 200,
        enable_chunked_context: true,
        reuse: BlockReuse::PartialBlocks,
        num_threads: 2,
        ..roomy.clone()
    };
    let paused = Setup {
        num_blocks: 26,
        policy: CapacityPolicy::MaxUtilization,
        ..chunked.clone()
    };
    let everything = Setup {
        step_cost: Some(StepCost {
            fixed_ns: 3,
            per_token_ns: 1,
        }),
        reuse: BlockReuse::Off,
        windows: &[17, 30],
        num_sinks: 3,
        separate_calls: true,
        moves_blocks: true,
        num_runner_blocks: Some(60),
        num_threads: 3,
        ..paused.clone()
    };
    let slid = Setup {
        moves_blocks: false,
        gives_back: true,
        reuse: BlockReuse::PartialBlocks,
        ..everything.clone()
    };
    for (setup, name) in [
        (&roomy, "llama3"),
        (&roomy, "qwen3"),
        (&chunked, "qwen2"),
        (&paused, "qwen3"),
        (&everything, "qwen3-windows"),
        (&slid, "qwen3"),
    ] {
        for kv_dtype in KvDtype::ON_CPU {
            let setup = Setup {
                kv_dtype,
                ..setup.clone()
            };
            let alone_setup = Setup {
                windows: setup.windows,
                num_sinks: setup.num_sinks,
                kv_dtype,
                ..Setup::default()
            };
            let (requests, expected) = requests_with_drafts(name, &alone_setup);
            let (served, happened) = serve(&mut setup.load(name), &setup, &requests);
            for (index, (served, expected)) in served.iter().zip(&expected).enumerate() {
                let what = format!("{name}, request {index}, {setup:?}");
                assert_same_bits(served, expected, &what);
            }
            let drafts = happened.drafts;
            assert!(drafts.num_accepted > 20, "{happened:?}");
            assert!(drafts.num_drafted > drafts.num_accepted, "{happened:?}");
            let pauses = setup.policy == CapacityPolicy::MaxUtilization && !setup.gives_back;
            assert_eq!(happened.num_pauses > 0, pauses, "{happened:?}");
        }
    }
}

/// Some use 2 to 4 beams, and some of those end early.
pub fn requests_with_beams() -> Vec<Request> {
    let mut requests = requests_that_share();
    for (index, request) in requests.iter_mut().enumerate().filter(|(n, _)| n % 3 != 1) {
        request.outputs = OutputOptions {
            context_logits: index % 2 == 0,
            prompt_log_probs: (index % 5 < 2).then_some(2),
            generation_logits: index % 4 < 2,
            kv_blocks: true,
            ..OutputOptions::default()
        };
        request.sampling = SamplingParams {
            repetition_penalty: [1.0, 1.2][index % 2],
            end_ids: (3..20 * (index as TokenId % 2) + 3).collect(),
            beam_search: Some(BeamSearch {
                width: 2 + index as u32 % 3,
                num_returned: 2,
                length_penalty: 1.0,
                early_stopping: [EarlyStopping::Likely, EarlyStopping::Never][index % 2],
                diversity_rate: 0.0,
            }),
            ..SamplingParams::default()
        };
    }
    requests
}

#[test]
fn requests_with_and_without_beams_are_the_same_in_one_batch() {
    let roomy = Setup {
        max_beam_width: 4,
        num_blocks: 128,
        ..Setup::default()
    };
    let chunked = Setup {
        max_num_tokens: 37,
        enable_chunked_context: true,
        reuse: BlockReuse::PartialBlocks,
        num_threads: 2,
        ..roomy.clone()
    };
    for (name, setup) in [
        ("llama3", roomy.clone()),
        ("qwen3", chunked.clone()),
        (
            "qwen2",
            Setup {
                separate_calls: true,
                block_size: 5,
                num_blocks: 400,
                ..chunked.clone()
            },
        ),
        (
            "llama3",
            Setup {
                policy: CapacityPolicy::MaxUtilization,
                block_size: 8,
                num_blocks: 36,
                ..chunked.clone()
            },
        ),
        (
            "qwen3-windows",
            Setup {
                windows: &[16],
                num_sinks: 1,
                gives_back: true,
                block_size: 4,
                num_blocks: 256,
                ..chunked.clone()
            },
        ),
        (
            "qwen3",
            Setup {
                kv_dtype: KvDtype::Int8,
                ..chunked.clone()
            },
        ),
        (
            "llama3",
            Setup {
                block_size: 96,
                num_blocks: 12,
                contiguous: true,
                ..roomy
            },
        ),
    ] {
        let happened = each_as_alone(name, &setup, &requests_with_beams());
        assert!(happened.max_sequences > 4, "{happened:?}");
        assert!(happened.num_copies > 10, "{happened:?}");
        let may_pause = setup.policy == CapacityPolicy::MaxUtilization;
        assert_eq!(happened.num_pauses > 0, may_pause, "{happened:?}");
    }
}
