//! Models that embed, against sentence-transformers: see tests/fixtures/make_embedding_fixtures.py.

use std::fs;
use std::num::NonZeroUsize;

use half::bf16;
use inflight_base::{SequenceId, TokenId, Tokens};
use inflight_config::PoolingMode;
use inflight_device_cpu::{Cpu, CpuOptions};
use inflight_engine::{BlockReuse, Engine, EngineConfig, Event, NewRequest, StepOutput};
use inflight_machines::load_on_cpus;
use inflight_runner::{ModelSource, Pooling, Runner};
use inflight_sampling::{FinishReason, SampleError};
use serde::Deserialize;

use crate::copy::Copy;
use crate::errors::largest_error;
use crate::support::{Setup, TestedDevice, fixture, simds};
use inflight_reference_device::{Reference, ReferenceOptions};

/// The results of sentence-transformers for a fixture.
#[derive(Deserialize)]
struct Expected {
    texts: Vec<Text>,
}

#[derive(Deserialize)]
struct Text {
    ids: Vec<TokenId>,
    embedding: Vec<f32>,
    rounded: Vec<f32>,
    bf16_cost: f32,
}

impl Expected {
    fn read(name: &str) -> Self {
        let path = fixture(name).join("expected.json");
        let text = fs::read_to_string(path).expect("expected.json");
        serde_json::from_str(&text).expect("expected.json")
    }
}

fn open(name: &str) -> ModelSource {
    ModelSource::open_embedder(&fixture(name), None, None).expect("the checkpoint opens")
}

fn load_on<D: TestedDevice>(name: &str, setup: &Setup, options: &D::Options) -> Box<dyn Runner> {
    D::load(&open(name), setup.runner_limits(), options).expect("the checkpoint loads")
}

fn load(name: &str, setup: &Setup) -> Box<dyn Runner> {
    let options = CpuOptions {
        num_threads: NonZeroUsize::new(setup.num_threads),
        simd: setup.simd,
        ..CpuOptions::default()
    };
    load_on::<Cpu>(name, setup, &options)
}

/// What each prompt got, and how many steps and reused blocks there were.
pub struct Embedded {
    pub states: Vec<Vec<f32>>,
    pub num_steps: usize,
    pub num_reused: u32,
}

/// Embeds prompts together, all of which wait from the beginning.
pub fn embed(runner: &mut dyn Runner, setup: &Setup, prompts: &[Vec<TokenId>]) -> Embedded {
    let config = EngineConfig {
        pools: true,
        ..setup.engine_config()
    };
    embed_with(runner, config, prompts)
}

/// The same with a configuration of the engine.
pub fn embed_with(
    runner: &mut dyn Runner,
    config: EngineConfig,
    prompts: &[Vec<TokenId>],
) -> Embedded {
    let requests = (0..).zip(prompts).map(|(index, prompt)| {
        let mut request = NewRequest::new(SequenceId(index), prompt.clone(), Tokens(7));
        request.outputs.kv_blocks = true;
        // There is no logit to return.
        request.outputs.generation_logits = true;
        request
    });
    embed_requests(runner, config, requests.collect())
}

/// The same of requests whose ids are their indices.
pub fn embed_requests(
    runner: &mut dyn Runner,
    config: EngineConfig,
    requests: Vec<NewRequest>,
) -> Embedded {
    let num_requests = requests.len();
    let mut engine = Engine::new(config);
    let mut embedded = Embedded {
        states: vec![Vec::new(); num_requests],
        num_steps: 0,
        num_reused: 0,
    };
    for request in requests {
        engine.add(request).expect("a valid request");
    }
    let mut output = StepOutput::default();
    let mut num_ended = 0;
    while !engine.is_idle() {
        let step = engine.schedule();
        output.clear();
        for plan in step.plans() {
            runner.run(plan, &mut output).expect("the step runs");
        }
        let mut events = Vec::new();
        engine.apply(step, &mut output, &mut events);
        for event in events {
            match event {
                Event::ExtraOutputs(id, outputs) => {
                    embedded.states[id.index()].extend(&outputs.pooled);
                    let blocks = outputs.kv_blocks.map_or(0, |it| it.num_reused.0);
                    embedded.num_reused += blocks;
                }
                Event::Finished(_, reason) => {
                    assert_eq!(reason, FinishReason::Pooled);
                    num_ended += 1;
                }
                Event::Token(..) | Event::Hypotheses(..) => unreachable!("nothing is generated"),
                Event::Admitted(..) | Event::Paused(_) => {}
            }
        }
        engine.check_integrity();
        embedded.num_steps += 1;
    }
    assert_eq!(num_ended, num_requests);
    embedded
}

pub fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| {
        let products = a.iter().zip(b).map(|(a, b)| f64::from(a * b));
        products.sum::<f64>()
    };
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

fn agrees(name: &str, runner: &mut dyn Runner, setup: &Setup, share_of_cost: f32) {
    let expected = Expected::read(name);
    let prompts: Vec<_> = expected.texts.iter().map(|text| text.ids.clone()).collect();
    let embedded = embed(runner, setup, &prompts);
    for (state, text) in embedded.states.iter().zip(&expected.texts) {
        let error = largest_error(state, &text.rounded);
        let (len, cost) = (text.ids.len(), text.bf16_cost);
        println!("{name}, {len} tokens: largest error {error:.6}, bf16 costs {cost}");
        assert!(error <= cost * share_of_cost, "{name}: {error}");
        let cosine = cosine(state, &text.embedding);
        assert!(cosine > 0.9999, "{name}: cosine {cosine}");
    }
    // Which would not be, if they were alike.
    let [first, second] = [0, 1].map(|index| &embedded.states[index]);
    assert!(cosine(first, second) < 0.9);
}

#[test]
fn embeddings_agree_with_sentence_transformers() {
    for name in ["embeddings/qwen3", "embeddings/mistral"] {
        for simd in simds() {
            let setup = Setup {
                simd: Some(simd),
                ..Setup::default()
            };
            agrees(name, &mut *load(name, &setup), &setup, 0.6);
        }
        let setup = Setup::default();
        let mut reference = load_on::<Reference>(name, &setup, &ReferenceOptions::default());
        agrees(name, &mut *reference, &setup, 0.3);
    }
}

#[test]
fn an_embedding_has_the_same_bits_alone_in_chunks_and_after_reuse() {
    let name = "embeddings/qwen3";
    let texts = Expected::read(name).texts;
    let mut prompts: Vec<_> = texts.into_iter().map(|text| text.ids).collect();
    // A whole prompt again, its beginning, and a copy of that.
    let longest = prompts.last().expect("a prompt").clone();
    prompts.push(longest.clone());
    prompts.push(longest[..20].to_vec());
    prompts.push(longest[..20].to_vec());
    let whole = Setup::default();
    let alone: Vec<_> = prompts
        .iter()
        .map(|prompt| {
            let prompt = std::slice::from_ref(prompt);
            embed(&mut *load(name, &whole), &whole, prompt)
                .states
                .remove(0)
        })
        .collect();
    let together = embed(&mut *load(name, &whole), &whole, &prompts);
    assert_eq!(together.num_steps, 1, "one step for all");
    assert_eq!(together.states, alone);
    let in_chunks = Setup {
        max_num_tokens: 12,
        block_size: 4,
        max_num_requests: 2,
        enable_chunked_context: true,
        reuse: BlockReuse::PartialBlocks,
        num_threads: 2,
        ..Setup::default()
    };
    let chunked = embed(&mut *load(name, &in_chunks), &in_chunks, &prompts);
    assert!(chunked.num_steps > 5, "{}", chunked.num_steps);
    assert!(chunked.num_reused > 0, "prompts begin alike");
    assert_eq!(chunked.states, alone);
}

#[test]
fn a_prompt_may_have_all_positions() {
    let setup = Setup {
        max_seq_len: 24,
        ..Setup::default()
    };
    let mut runner = load("embeddings/qwen3", &setup);
    let prompt = vec![5; 24];
    let embedded = embed(&mut *runner, &setup, std::slice::from_ref(&prompt));
    assert_eq!(embedded.states[0].len(), 32);
    let mut engine = Engine::new(EngineConfig {
        pools: true,
        ..setup.engine_config()
    });
    let too_long = NewRequest::new(SequenceId(1), vec![5; 25], Tokens(1));
    let error = engine.add(too_long).expect_err("too long").to_string();
    assert!(
        error.contains("25 tokens") && error.contains("24"),
        "{error}"
    );
}

#[test]
fn the_form_comes_from_the_files_unless_it_is_given() {
    let pooling = |name: &str, mode, normalize| {
        let source = ModelSource::open_embedder(&fixture(name), mode, normalize);
        source.map(|it| it.spec().pooling).expect("it opens")
    };
    let last = |normalize| {
        Some(Pooling {
            mode: PoolingMode::Last,
            normalize,
        })
    };
    assert_eq!(pooling("embeddings/qwen3", None, None), last(true));
    assert_eq!(pooling("embeddings/mistral", None, None), last(false));
    assert_eq!(pooling("embeddings/mistral", None, Some(true)), last(true));
    // A model that was not saved by sentence-transformers.
    assert_eq!(pooling("qwen3", None, None), last(true));
    let mean = pooling("embeddings/qwen3", Some(PoolingMode::Mean), None);
    assert_eq!(mean.map(|it| it.mode), Some(PoolingMode::Mean));
    assert!(
        ModelSource::open(&fixture("embeddings/mistral")).is_err(),
        "no output layer"
    );
}

#[test]
fn a_decoder_without_its_output_layer_takes_no_memory_for_one() {
    let num_bytes = |source: ModelSource| source.num_weight_bytes(None).expect("its tensors");
    let dir = fixture("llama2");
    let generating = num_bytes(ModelSource::open(&dir).expect("it opens"));
    let embedding = ModelSource::open_embedder(&dir, None, None).expect("it opens");
    let spec = embedding.spec();
    let output_layer = 2 * (spec.vocab_size * spec.hidden_size) as u64;
    assert_eq!(num_bytes(embedding) + output_layer, generating);
}

#[test]
fn what_is_pooled_from_a_prompt_that_was_not_seen_is_refused() {
    for mode in [PoolingMode::Mean, PoolingMode::Cls] {
        let dir = fixture("embeddings/qwen3");
        let source = ModelSource::open_embedder(&dir, Some(mode), None).expect("it opens");
        let setup = Setup::default();
        let loaded = load_on_cpus(&source, setup.runner_limits(), &CpuOptions::default());
        let error = loaded.err().expect("refused").to_string();
        assert!(
            error.contains("pooling") && error.contains("last"),
            "{error}"
        );
    }
}

#[test]
fn a_state_that_is_not_finite_fails_its_request() {
    // Weights of the last norm with which states are too large.
    let damaged = Copy::of("qwen3").tensor("model.norm.weight", |norm| {
        let weights = [bf16::from_f32(3e38).to_le_bytes()].repeat(norm.shape()[0]);
        Some((norm.dtype(), norm.shape().to_vec(), weights.concat()))
    });
    let source = ModelSource::open_embedder(damaged.dir(), None, None).expect("it opens");
    let setup = Setup::default();
    let mut runner =
        load_on_cpus(&source, setup.runner_limits(), &CpuOptions::default()).expect("it loads");
    let mut engine = Engine::new(EngineConfig {
        pools: true,
        ..setup.engine_config()
    });
    let request = NewRequest::new(SequenceId(0), vec![9, 8], Tokens(1));
    engine.add(request).expect("valid");
    let (mut output, mut events) = (StepOutput::default(), Vec::new());
    let step = engine.schedule();
    for plan in step.plans() {
        runner.run(plan, &mut output).expect("the step runs");
    }
    engine.apply(step, &mut output, &mut events);
    let failed = FinishReason::Error(SampleError::NotFinite);
    assert_eq!(events.last(), Some(&Event::Finished(SequenceId(0), failed)));
}
