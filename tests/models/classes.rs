//! Models with classes, against transformers: see tests/fixtures/make_classifier_fixtures.py, and
//! make_reranker_fixtures.py for those that generate.

use std::fs;
use std::num::NonZeroUsize;

use inflight_base::TokenId;
use inflight_config::PoolingMode;
use inflight_device_cpu::{Cpu, CpuOptions};
use inflight_engine::BlockReuse;
use inflight_machines::load_on_cpus;
use inflight_runner::{ClassTransform, ModelSource, Runner};
use inflight_text::{LengthLimit, Tokenizer};
use serde::Deserialize;

use crate::copy::Copy;
use crate::embeddings::embed;
use crate::errors::largest_error;
use crate::support::{Request, Setup, TestedDevice, fixture, serve_alone, simds};
use inflight_reference_device::{Reference, ReferenceOptions};

/// The results of transformers for a fixture.
#[derive(Deserialize)]
struct Expected {
    /// The two that a score is made of.
    tokens: Option<[TokenId; 2]>,
    texts: Vec<Text>,
}

#[derive(Deserialize)]
struct Text {
    text: String,
    pair: Option<String>,
    max_tokens: Option<usize>,
    ids: Vec<TokenId>,
    rounded: Vec<f32>,
    bf16_cost: f32,
}

fn expected(name: &str) -> Expected {
    let path = fixture(name).join("expected.json");
    let text = fs::read_to_string(path).expect("expected.json");
    serde_json::from_str(&text).expect("expected.json")
}

fn texts(name: &str) -> Vec<Text> {
    expected(name).texts
}

/// Enough memory for all prompts; those of rerankers that generate are long.
fn whole(name: &str) -> Setup {
    match name.ends_with("reranker") {
        true => Setup {
            max_seq_len: 512,
            max_num_tokens: 2048,
            num_blocks: 160,
            ..Setup::default()
        },
        false => Setup::default(),
    }
}

fn load_on<D: TestedDevice>(name: &str, setup: &Setup, options: &D::Options) -> Box<dyn Runner> {
    let dir = fixture(name);
    let source = match expected(name).tokens {
        None => ModelSource::open_classifier(&dir, None),
        Some(tokens) => ModelSource::open_token_scorer(&dir, None, tokens),
    };
    let source = source.expect("the checkpoint opens");
    D::load(&source, setup.runner_limits(), options).expect("the checkpoint loads")
}

fn load(name: &str, setup: &Setup) -> Box<dyn Runner> {
    let options = CpuOptions {
        num_threads: NonZeroUsize::new(setup.num_threads),
        simd: setup.simd,
        ..CpuOptions::default()
    };
    load_on::<Cpu>(name, setup, &options)
}

fn agrees(name: &str, runner: &mut dyn Runner, setup: &Setup, share_of_cost: f32) {
    let texts = texts(name);
    let prompts: Vec<_> = texts.iter().map(|text| text.ids.clone()).collect();
    let found = embed(runner, setup, &prompts).states;
    let cost = texts.iter().map(|text| text.bf16_cost).fold(0.0, f32::max);
    for (numbers, text) in found.iter().zip(&texts) {
        let error = largest_error(numbers, &text.rounded);
        println!(
            "{name}, {} tokens: largest error {error:.6}, bf16 costs {cost}",
            text.ids.len()
        );
        assert!(error <= cost * share_of_cost, "{name}: {error}");
    }
    assert_ne!(found[0], found[1]);
}

#[test]
fn numbers_of_classes_agree_with_transformers() {
    for name in [
        "classes/qwen3",
        "classes/llama",
        "classes/mistral",
        "classes/qwen3-reranker",
        "classes/qwen2-reranker",
    ] {
        // Hundreds of tokens are behind the number of a reranker that generates, which is the difference of two.
        let shares = match name.ends_with("reranker") {
            true => [0.9, 0.9],
            false => [0.6, 0.3],
        };
        for simd in simds() {
            let setup = Setup {
                simd: Some(simd),
                ..whole(name)
            };
            agrees(name, &mut *load(name, &setup), &setup, shares[0]);
        }
        let setup = whole(name);
        let mut reference = load_on::<Reference>(name, &setup, &ReferenceOptions::default());
        agrees(name, &mut *reference, &setup, shares[1]);
    }
}

#[test]
fn numbers_have_the_same_bits_alone_in_chunks_and_after_reuse() {
    for name in ["classes/qwen3", "classes/qwen3-reranker"] {
        have_the_same_bits_alone_in_chunks_and_after_reuse(name);
    }
}

fn have_the_same_bits_alone_in_chunks_and_after_reuse(name: &str) {
    let mut prompts: Vec<_> = texts(name).into_iter().map(|text| text.ids).collect();
    let longest = prompts.iter().max_by_key(|prompt| prompt.len());
    let longest = longest.expect("a prompt").clone();
    prompts.push(longest[..20].to_vec());
    prompts.push(longest);
    let whole = whole(name);
    let alone = prompts.iter().map(|prompt| {
        let prompt = std::slice::from_ref(prompt);
        embed(&mut *load(name, &whole), &whole, prompt)
            .states
            .remove(0)
    });
    let alone: Vec<_> = alone.collect();
    let in_chunks = Setup {
        max_num_tokens: 12,
        block_size: 4,
        num_blocks: 4 * whole.num_blocks,
        max_num_requests: 2,
        enable_chunked_context: true,
        reuse: BlockReuse::PartialBlocks,
        num_threads: 2,
        ..whole
    };
    let chunked = embed(&mut *load(name, &in_chunks), &in_chunks, &prompts);
    assert!(chunked.num_steps > 5 && chunked.num_reused > 0);
    assert_eq!(chunked.states, alone);
}

#[test]
fn a_reranker_that_generates_is_asked_as_its_card_says() {
    let name = "classes/qwen3-reranker";
    let tokenizer = Tokenizer::load(&fixture(name)).expect("a tokenizer");
    let tokens = ["no", "yes"].map(|token| tokenizer.id_of(token));
    assert_eq!(expected(name).tokens.map(|ids| ids.map(Some)), Some(tokens));
    for text in texts(name) {
        let pair = text.pair.expect("a document");
        let limit = text.max_tokens.map_or(LengthLimit::None, LengthLimit::Cut);
        let found = tokenizer.encode_judgement(&text.text, &pair, limit);
        assert_eq!(found.expect("encoded").ids, text.ids);
    }
    let error = tokenizer
        .encode_judgement("a", "b", LengthLimit::Cut(20))
        .err();
    let error = error.expect("no room").to_string();
    assert!(error.contains("20 tokens"), "{error}");
}

/// Pooled states have the width of the embeddings. A score is a product with the difference of two rows of the output
/// layer, so it is the difference of two logits.
#[test]
fn narrow_embeddings_have_states_of_their_width() {
    let (name, setup, prompt) = ("opt-350m", Setup::default(), vec![9, 80, 31, 7, 120]);
    let state_of = |source: ModelSource| {
        let limits = setup.runner_limits();
        let mut runner =
            load_on_cpus(&source, limits, &CpuOptions::default()).expect("the checkpoint loads");
        embed(&mut *runner, &setup, std::slice::from_ref(&prompt))
            .states
            .remove(0)
    };
    let scorer = ModelSource::open_token_scorer(&fixture(name), None, [33, 65]);
    let score = state_of(scorer.expect("it opens"));
    let logits =
        &serve_alone(&mut setup.load(name), &setup, &Request::greedy(&prompt, 1)).logits[0];
    let expected = logits[65] - logits[33];
    assert!((score[0] - expected).abs() < 1e-4, "{score:?}, {expected}");
    let embedder = ModelSource::open_embedder(&fixture(name), None, None).expect("it opens");
    let width = embedder.spec().embedding_width();
    assert_eq!((state_of(embedder).len(), width), (20, 20));
}

#[test]
fn the_head_comes_from_the_config() {
    let head = |name: &str| {
        let source = ModelSource::open_classifier(&fixture(name), None).expect("it opens");
        source.spec().classes.clone().expect("a head")
    };
    let qwen3 = head("classes/qwen3");
    assert_eq!(qwen3.labels, ["neutral", "glad", "sad"]);
    assert_eq!(qwen3.transform, ClassTransform::Softmax);
    let llama = head("classes/llama");
    assert_eq!(llama.transform, ClassTransform::Sigmoid);
    let scorer = ModelSource::open_scorer(&fixture("classes/mistral"), None).expect("it opens");
    let head = scorer.spec().classes.as_ref().expect("a head");
    assert_eq!(
        (head.labels.len(), head.transform),
        (1, ClassTransform::Sigmoid)
    );
}

#[test]
fn what_has_no_classes_or_too_many_is_refused() {
    let refused = |source: Result<ModelSource, _>| {
        let source = source.and_then(|source| {
            let limits = Setup::default().runner_limits();
            load_on_cpus(&source, limits, &CpuOptions::default())
        });
        source.err().expect("refused").to_string()
    };
    let open = |name: &str| ModelSource::open_classifier(&fixture(name), None);
    let error = refused(open("qwen3"));
    assert!(
        error.contains("Qwen3ForCausalLM") && error.contains("Qwen3ForSequenceClassification"),
        "{error}"
    );
    let error = refused(open("mixtral-gguf"));
    assert!(error.contains("GGUF"), "{error}");
    let error = refused(ModelSource::open_scorer(&fixture("classes/qwen3"), None));
    assert!(error.contains("3 classes"), "{error}");
    let mean = ModelSource::open_classifier(&fixture("classes/qwen3"), Some(PoolingMode::Mean));
    assert!(refused(mean).contains("pooling is mean"));
    // The head has other classes than the config says.
    let other = Copy::of("classes/qwen3").tensor("score.weight", |weight| {
        let (dtype, columns) = (weight.dtype(), weight.shape()[1]);
        Some((
            dtype,
            vec![2, columns],
            weight.data()[..4 * columns].to_vec(),
        ))
    });
    let error = refused(ModelSource::open_classifier(other.dir(), None));
    assert!(
        error.contains("score.weight") && error.contains("[2, 32]"),
        "{error}"
    );
    // Scores by tokens that there are not, of a family whose logits are more than products, and of a model with
    // classes.
    let by_tokens =
        |name: &str, tokens| ModelSource::open_token_scorer(&fixture(name), None, tokens);
    for (name, tokens, part) in [
        ("qwen3", [5, 1 << 20], "token 1048576"),
        ("gemma2", [5, 6], "Gemma2ForCausalLM are scaled or bounded"),
        ("classes/qwen3", [5, 6], "Qwen3ForSequenceClassification"),
        ("mixtral-gguf", [5, 6], "GGUF"),
    ] {
        let error = refused(by_tokens(name, tokens));
        assert!(error.contains(part), "{error}");
    }
    let not_finite = Copy::of("classes/qwen3").tensor("score.weight", |weight| {
        let mut data = weight.data().to_vec();
        data[..2].copy_from_slice(&half::bf16::NAN.to_le_bytes());
        Some((weight.dtype(), weight.shape().to_vec(), data))
    });
    let error = refused(ModelSource::open_classifier(not_finite.dir(), None));
    assert!(error.contains("score.weight"), "{error}");
}
