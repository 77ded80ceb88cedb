//! Encoders, against sentence-transformers: see tests/fixtures/make_encoder_fixtures.py.

use std::fs;

use inflight_base::{BlockSize, SequenceId, TokenId, Tokens};
use inflight_config::{PoolingMode, Settings};
use inflight_device::KvDtype;
use inflight_device_cpu::{Cpu, CpuOptions};
use inflight_engine::{BlockReuse, Engine, EngineConfig, NewRequest};
use inflight_machines::load_on_cpus;
use inflight_manager::sizing::{ConfiguredModel, ModelDimensions};
use inflight_runner::{CpuRunner, ModelSource, Runner};
use serde::Deserialize;
use serde_json::json;

use crate::copy::Copy;
use crate::embeddings::{Embedded, cosine, embed_requests, embed_with};
use crate::errors::largest_error;
use crate::support::{Setup, TestedDevice, fixture, simds};
use inflight_reference_device::{Reference, ReferenceOptions};

const NAMES: [&str; 3] = [
    "encoders/bert",
    "encoders/xlm-roberta",
    "encoders/modernbert",
];

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

fn texts(name: &str) -> Vec<Text> {
    let path = fixture(name).join("expected.json");
    let text = fs::read_to_string(path).expect("expected.json");
    let expected: Expected = serde_json::from_str(&text).expect("expected.json");
    expected.texts
}

fn setup() -> Setup {
    Setup {
        max_seq_len: 98,
        reuse: BlockReuse::Off,
        ..Setup::default()
    }
}

fn load_on<D: TestedDevice>(name: &str, setup: &Setup, options: &D::Options) -> Box<dyn Runner> {
    let source = ModelSource::open_embedder(&fixture(name), None, None).expect("it opens");
    D::load(&source, setup.runner_limits(), options).expect("the checkpoint loads")
}

fn load(name: &str, setup: &Setup) -> Box<dyn Runner> {
    load_on::<Cpu>(name, setup, &setup.cpu_options())
}

fn engine_config(setup: &Setup) -> EngineConfig {
    EngineConfig {
        pools: true,
        whole_prompts: true,
        ..setup.engine_config()
    }
}

fn encode(runner: &mut dyn Runner, setup: &Setup, prompts: &[Vec<TokenId>]) -> Embedded {
    embed_with(runner, engine_config(setup), prompts)
}

fn agrees(name: &str, runner: &mut dyn Runner, setup: &Setup, share_of_cost: f32) {
    let texts = texts(name);
    let prompts: Vec<_> = texts.iter().map(|text| text.ids.clone()).collect();
    let cost = texts.iter().map(|text| text.bf16_cost).fold(0.0, f32::max);
    let states = encode(runner, setup, &prompts).states;
    for (state, text) in states.iter().zip(&texts) {
        let error = largest_error(state, &text.rounded);
        let len = text.ids.len();
        println!("{name}, {len} tokens: largest error {error:.6}, bf16 costs {cost}");
        assert!(
            error <= cost * share_of_cost,
            "{name}, {len} tokens: {error}"
        );
        let cosine = cosine(state, &text.embedding);
        assert!(cosine > 0.9999, "{name}: cosine {cosine}");
    }
    assert!(
        cosine(&states[0], &states[1]) < 0.995,
        "they would agree with anything"
    );
}

#[test]
fn encoders_agree_with_sentence_transformers() {
    for name in NAMES {
        for simd in simds() {
            let setup = Setup {
                simd: Some(simd),
                ..setup()
            };
            agrees(name, &mut *load(name, &setup), &setup, 0.7);
        }
        let setup = setup();
        let mut reference = load_on::<Reference>(name, &setup, &ReferenceOptions::default());
        agrees(name, &mut *reference, &setup, 0.7);
    }
}

#[test]
fn blocks_of_encoders_have_memory_for_one_layer() {
    let block_size = BlockSize::new(16).expect("not zero");
    for name in NAMES {
        let source = ModelSource::open_embedder(&fixture(name), None, None).expect("it opens");
        let spec = source.spec();
        assert!(spec.num_layers() > 1);
        let mut one = spec.clone();
        one.layers.truncate(1);
        let of_layer = <CpuRunner>::kv_bytes_per_block(&one, block_size, KvDtype::Bf16);
        let of_block = <CpuRunner>::kv_bytes_per_block(spec, block_size, KvDtype::Bf16);
        assert_eq!(of_block, of_layer, "{name}");
        let model = ConfiguredModel {
            settings: &Settings::default(),
            source: Some(&source),
            gpu: None,
        };
        let groups = model.layer_groups(Tokens(98), true);
        let configured = model.kv_bytes_per_block(block_size, &groups);
        assert_eq!(configured, of_layer as u64, "{name}");
    }
}

/// The results of transformers for a fixture with classes.
#[derive(Deserialize)]
struct ExpectedClasses {
    texts: Vec<Classified>,
}

#[derive(Deserialize)]
struct Classified {
    ids: Vec<TokenId>,
    second_text: Option<u32>,
    rounded: Vec<f32>,
    bf16_cost: f32,
}

#[test]
fn numbers_of_classes_agree_with_transformers() {
    for name in ["classes/bert", "classes/xlm-roberta", "classes/modernbert"] {
        let path = fixture(name).join("expected.json");
        let text = fs::read_to_string(path).expect("expected.json");
        let expected: ExpectedClasses = serde_json::from_str(&text).expect("expected.json");
        let texts = expected.texts;
        let cost = texts.iter().map(|text| text.bf16_cost).fold(0.0, f32::max);
        let requests: Vec<_> = (0..)
            .zip(&texts)
            .map(|(index, text)| NewRequest {
                second_text: text.second_text.map(Tokens),
                ..NewRequest::new(SequenceId(index), text.ids.clone(), Tokens(1))
            })
            .collect();
        let source = ModelSource::open_classifier(&fixture(name), None).expect("it opens");
        let setup = setup();
        let limits = setup.runner_limits();
        let check = |found: Vec<Vec<f32>>| {
            for (numbers, text) in found.iter().zip(&texts) {
                let error = largest_error(numbers, &text.rounded);
                let len = text.ids.len();
                println!("{name}, {len} tokens: largest error {error:.6}, bf16 costs {cost}");
                assert!(error <= cost, "{name}, {len} tokens: {error}");
            }
        };
        let config = engine_config(&setup);
        let options = ReferenceOptions::default();
        let mut reference = Reference::load(&source, limits.clone(), &options).expect("it loads");
        check(embed_requests(&mut *reference, config.clone(), requests.clone()).states);
        let mut runner = load_on_cpus(&source, limits, &CpuOptions::default()).expect("it loads");
        let found = embed_requests(&mut *runner, config.clone(), requests.clone()).states;
        check(found.clone());
        for (index, request) in requests.iter().enumerate() {
            let alone = NewRequest {
                id: SequenceId(0),
                ..request.clone()
            };
            let alone = embed_requests(&mut *runner, config.clone(), vec![alone]);
            assert_eq!(alone.states[0], found[index]);
            if request.second_text.is_some() {
                let without = NewRequest {
                    id: SequenceId(0),
                    second_text: None,
                    ..request.clone()
                };
                let without = embed_requests(&mut *runner, config.clone(), vec![without]);
                assert_ne!(without.states[0], found[index], "the types of tokens count");
            }
        }
    }
}

#[test]
fn a_text_has_the_same_bits_alone_and_in_any_batch() {
    for name in NAMES {
        let mut prompts: Vec<_> = texts(name).into_iter().map(|text| text.ids).collect();
        let first = prompts.len();
        // More than a tile of positions, and the beginning of that.
        let longest: Vec<_> = (0..98).map(|index| 5 + index * 7 % 50).collect();
        prompts.extend([longest.clone(), longest[..70].to_vec(), longest, vec![7]]);
        let whole = setup();
        let mut runner = load(name, &whole);
        let alone: Vec<_> = prompts
            .iter()
            .map(|prompt| {
                let prompt = std::slice::from_ref(prompt);
                encode(&mut *runner, &whole, prompt).states.remove(0)
            })
            .collect();
        assert_eq!(alone[first], alone[first + 2]);
        assert!(
            cosine(&alone[first], &alone[first + 1]) < 0.99999,
            "the tokens behind it are seen"
        );
        let together = encode(&mut *runner, &whole, &prompts);
        assert_eq!(together.states, alone);
        let in_steps = Setup {
            max_num_tokens: 100,
            block_size: 4,
            max_num_requests: 3,
            num_threads: 2,
            // They have no ranks whose bits they could give.
            deterministic: true,
            ..setup()
        };
        let in_steps = encode(&mut *load(name, &in_steps), &in_steps, &prompts);
        assert!(in_steps.num_steps >= 4, "{}", in_steps.num_steps);
        assert_eq!(in_steps.states, alone);
    }
}

#[test]
fn norms_may_have_the_names_of_the_first_checkpoints_of_bert() {
    let name = "encoders/bert";
    let older = Copy::of(name).renamed(|name| {
        name.replace("LayerNorm.weight", "LayerNorm.gamma")
            .replace("LayerNorm.bias", "LayerNorm.beta")
    });
    let prompts: Vec<_> = texts(name).into_iter().map(|text| text.ids).collect();
    let setup = setup();
    let source = ModelSource::open_embedder(older.dir(), None, None).expect("it opens");
    let runner = load_on_cpus(&source, setup.runner_limits(), &CpuOptions::default());
    let of_older = encode(&mut *runner.expect("it loads"), &setup, &prompts);
    let expected = encode(&mut *load(name, &setup), &setup, &prompts);
    assert_eq!(of_older.states, expected.states);
}

#[test]
fn a_prompt_is_never_computed_in_parts() {
    let setup = Setup {
        max_num_tokens: 64,
        enable_chunked_context: true,
        ..setup()
    };
    let mut engine = Engine::new(engine_config(&setup));
    for id in 0..3 {
        let request = NewRequest::new(SequenceId(id), vec![5; 40], Tokens(1));
        engine.add(request).expect("valid");
    }
    let step = engine.schedule();
    let lengths: Vec<_> = step.plans().map(|plan| plan.token_ids.len()).collect();
    assert_eq!(lengths, [40], "not 64");
    let too_long = NewRequest::new(SequenceId(9), vec![5; 65], Tokens(1));
    let error = engine.add(too_long).expect_err("too long").to_string();
    assert!(
        error.contains("65 tokens") && error.contains("max_num_tokens = 64"),
        "{error}"
    );
    let longer = NewRequest::new(SequenceId(9), vec![5; 99], Tokens(1));
    let error = engine.add(longer).expect_err("too long").to_string();
    assert!(
        error.contains("99 tokens") && error.contains("max_seq_len = 98"),
        "{error}"
    );
    for config in [
        EngineConfig {
            pools: false,
            ..engine_config(&setup)
        },
        EngineConfig {
            reuse: BlockReuse::WholeBlocks,
            ..engine_config(&setup)
        },
    ] {
        let error = config.check().expect_err("refused").to_string();
        assert!(error.contains("sees all others"), "{error}");
    }
}

#[test]
fn any_state_may_stand_for_a_text() {
    let dir = fixture("encoders/bert");
    let prompt = vec![2, 9, 8, 7, 3];
    let pooled = |mode| {
        let source = ModelSource::open_embedder(&dir, mode, None).expect("it opens");
        let setup = setup();
        let options = CpuOptions::default();
        let mut runner = load_on_cpus(&source, setup.runner_limits(), &options);
        let runner = runner.as_mut().expect("it loads");
        encode(&mut **runner, &setup, std::slice::from_ref(&prompt))
            .states
            .remove(0)
    };
    let [last, mean, cls] =
        [PoolingMode::Last, PoolingMode::Mean, PoolingMode::Cls].map(|mode| pooled(Some(mode)));
    assert_eq!(pooled(None), mean);
    assert!(cosine(&last, &cls) < 0.99 && cosine(&mean, &cls) < 0.99);
}

#[test]
fn what_encoders_do_not_have_is_refused() {
    let generating = ModelSource::open(&fixture("encoders/bert")).err();
    let error = generating.expect("refused").to_string();
    assert!(error.contains("set task to embed"), "{error}");
    for (changes, part) in [
        (json!({ "is_decoder": true }), "is_decoder"),
        (
            json!({ "add_cross_attention": true }),
            "add_cross_attention",
        ),
        (
            json!({ "position_embedding_type": "relative_key" }),
            "'relative_key'",
        ),
        (json!({ "type_vocab_size": 0 }), "type_vocab_size"),
        (json!({ "hidden_act": "mish" }), "'mish'"),
    ] {
        let copy = Copy::of("encoders/bert").config(changes);
        let opened = ModelSource::open_embedder(copy.dir(), None, None).err();
        let error = opened.expect(part).to_string();
        assert!(error.contains(part), "{error}");
    }
    let copy = Copy::of("encoders/xlm-roberta").config(json!({ "max_position_embeddings": 2 }));
    let opened = ModelSource::open_embedder(copy.dir(), None, None).err();
    let error = opened.expect("refused").to_string();
    assert!(error.contains("in front of the first position"), "{error}");
}
