//! Adapters: against PEFT over transformers, see tests/fixtures/make_adapter_fixtures.py, and beside each other.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;
use triton_inflight::base::TokenId;
use triton_inflight::checkpoint::PeftAdapter;
use triton_inflight::device::cpu::CpuOptions;
use triton_inflight::device::{CodeBits, Device, KvDtype};
use triton_inflight::engine::{Adapter, BlockReuse, CapacityPolicy, OutputOptions};
use triton_inflight::runner::{
    CpuRunner, ModelRunner, ModelSource, PreparedAdapter, UsedAdapter, WeightPrecision,
};

use crate::batching::{assert_same_bits, requests};
use crate::reference_device::{Reference, ReferenceOptions};
use crate::support::{Request, Setup, fixture, serve, serve_alone, simds};

#[derive(Deserialize)]
struct Expected {
    base: String,
    prompts: Vec<Prompt>,
}

#[derive(Deserialize)]
struct Prompt {
    prompt: Vec<TokenId>,
    greedy: Vec<TokenId>,
    logits: Vec<Vec<f32>>,
    bf16_cost: f32,
}

/// An adapter fixture, for the model in a folder.
fn adapter(name: &str, base: &Path) -> Adapter {
    let source = ModelSource::open(base).expect("the checkpoint opens");
    let files = PeftAdapter::open(&fixture("adapters").join(name), 64).expect("the adapter opens");
    let prepared = PreparedAdapter::new(&files, source.spec()).expect("it is for this model");
    let weights = Arc::new(prepared.load().expect("it is read"));
    Adapter::new(Arc::new(UsedAdapter::new(weights, || {})))
}

fn agrees_on<D: Device>(name: &str, share_of_cost: f32, options: &D::Options) {
    let text = fs::read_to_string(fixture("adapters").join(name).join("expected.json"));
    let expected: Expected =
        serde_json::from_str(&text.expect("a fixture")).expect("as it was written");
    let base = fixture(&expected.base);
    let setup = Setup::default();
    let mut runner: ModelRunner<D> = setup.load_on(&base, options);
    let adapter = adapter(name, &base);
    let requests = expected.prompts.iter().map(|prompt| Request {
        adapter: Some(adapter.clone()),
        outputs: OutputOptions {
            context_logits: true,
            ..OutputOptions::default()
        },
        ..Request::greedy(&prompt.prompt, prompt.greedy.len() as u32)
    });
    let (served, _) = serve(&mut runner, &setup, &requests.collect::<Vec<_>>());
    for (served, expected) in served.iter().zip(&expected.prompts) {
        let what = format!("{name} on {}", runner.description());
        assert_eq!(served.tokens, expected.greedy, "{what}: greedy tokens");
        let ours = served.logits.iter().flatten();
        let differences = ours.zip(expected.logits.iter().flatten());
        let error = differences.fold(0.0_f32, |max, (a, b)| max.max((a - b).abs()));
        println!(
            "{what}: largest error {error:.6}, bf16 costs {}",
            expected.bf16_cost
        );
        assert!(
            error <= expected.bf16_cost * share_of_cost,
            "{what}: {error}"
        );
        // The first logits are those of the last token of the prompt, too.
        let last = &served.context_logits[served.context_logits.len() - served.logits[0].len()..];
        assert_eq!(last, served.logits[0], "{what}");
    }
}

fn agrees_with_peft(name: &str) {
    for simd in simds() {
        let options = CpuOptions {
            num_threads: std::num::NonZeroUsize::new(2),
            simd: Some(simd),
        };
        agrees_on::<triton_inflight::device::cpu::Cpu>(name, 0.5, &options);
    }
    for has_whole_sums in [true, false] {
        agrees_on::<Reference>(name, 0.5, &ReferenceOptions { has_whole_sums });
    }
}

macro_rules! agree_with_peft {
    ($($test:ident: $name:literal,)*) => {$(
        #[test]
        fn $test() {
            agrees_with_peft($name);
        }
    )*};
}

agree_with_peft! {
    an_adapter_of_all_modules: "all-modules",
    an_adapter_of_rank_33: "rank-33",
    an_adapter_of_rank_1_with_rslora: "rank-1",
    an_adapter_with_patterns_of_ranks_and_alphas: "patterns",
    an_adapter_over_biases: "biases",
    an_adapter_of_fused_modules: "fused",
    an_adapter_of_heads_that_are_reordered: "reordered-heads",
}

/// Requests with two adapters, and with none, in turns.
fn mixed(base: &Path) -> Vec<Request> {
    let adapters = ["all-modules", "rank-33"].map(|name| adapter(name, base));
    let mut requests = requests();
    for (index, request) in requests.iter_mut().enumerate() {
        request.adapter = adapters.get(index % 3).cloned();
    }
    requests
}

/// Serves requests with different adapters in the same steps, and compares each with its run alone. Those without an
/// adapter are compared with a model that has never seen one.
fn each_as_alone(setup: &Setup) {
    let base = fixture("llama3");
    let requests = mixed(&base);
    let alone_setup = Setup {
        kv_dtype: setup.kv_dtype,
        weights: setup.weights,
        max_beam_width: setup.max_beam_width,
        ..Setup::default()
    };
    let mut alone = alone_setup.load_from(&base);
    let mut without = alone_setup.load_from(&base);
    let (served, happened) = serve(&mut setup.load_from(&base), setup, &requests);
    assert!(happened.max_sequences > 2, "{happened:?}");
    let mut num_changed = 0;
    for (index, (served, request)) in served.iter().zip(&requests).enumerate() {
        let what = format!("request {index}, {setup:?}");
        let runner: &mut CpuRunner = match request.adapter {
            Some(_) => &mut alone,
            None => &mut without,
        };
        let expected = serve_alone(runner, &alone_setup, request);
        assert_same_bits(served, &expected, &what);
        if request.adapter.is_some() {
            let plain = Request {
                adapter: None,
                ..request.clone()
            };
            let plain = serve_alone(&mut alone, &alone_setup, &plain);
            num_changed += usize::from(plain.logits != expected.logits);
        }
    }
    assert_eq!(num_changed, 7, "adapters change answers");
}

#[test]
fn a_request_has_the_same_bits_whatever_adapters_are_beside_it() {
    each_as_alone(&Setup::default());
    each_as_alone(&Setup {
        num_threads: 3,
        separate_calls: true,
        ..Setup::default()
    });
}

#[test]
fn adapters_stay_with_their_requests_through_chunks_pauses_and_reused_blocks() {
    each_as_alone(&Setup {
        max_num_tokens: 24,
        enable_chunked_context: true,
        block_size: 4,
        num_blocks: 48,
        policy: CapacityPolicy::MaxUtilization,
        reuse: BlockReuse::PartialBlocks,
        num_threads: 2,
        ..Setup::default()
    });
}

#[test]
fn adapters_are_added_to_rounded_weights() {
    for bits in [CodeBits::Eight, CodeBits::Four] {
        each_as_alone(&Setup {
            weights: Some(WeightPrecision {
                bits,
                group_size: 32,
            }),
            kv_dtype: KvDtype::Int8,
            num_threads: 2,
            ..Setup::default()
        });
    }
}

#[test]
fn an_adapter_for_another_model_is_refused_by_its_tensors() {
    let refusal = |name: &str, base: &str, max_rank| {
        let source = ModelSource::open(&fixture(base)).expect("the checkpoint opens");
        let folder = fixture("adapters").join(name);
        let files = match PeftAdapter::open(&folder, max_rank) {
            Ok(files) => files,
            Err(error) => return error.to_string(),
        };
        match PreparedAdapter::new(&files, source.spec()) {
            Ok(_) => panic!("{name} over {base} is accepted"),
            Err(error) => error.to_string(),
        }
    };
    for (name, base, max_rank, words) in [
        (
            "all-modules",
            "qwen2",
            64,
            &["lora_A", "[5, 64]", "[5, 32]"][..],
        ),
        (
            "patterns",
            "phi4-mini",
            64,
            &["gate_proj", "does not have", "Phi3ForCausalLM"],
        ),
        (
            "rank-33",
            "llama3",
            32,
            &["rank 33", "lora_cache_max_adapter_size is 32"],
        ),
    ] {
        let error = refusal(name, base, max_rank);
        for word in words {
            assert!(error.contains(word), "{name}: {error}");
        }
    }
}
