//! Adapters: against PEFT over transformers, see tests/fixtures/make_adapter_fixtures.py, and beside each other.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use inflight_base::TokenId;
use inflight_checkpoint::{AdapterArrays, AdapterFiles};
use inflight_collective::Grid;
use inflight_device::{AdapterWeights, KvDtype, Tiling};
use inflight_device_cpu::CpuOptions;
use inflight_engine::{Adapter, BlockReuse, CapacityPolicy, OutputOptions};
use inflight_numbers::{CodeBits, Dtype};
use inflight_runner::{
    AdapterParts, ModelSource, PreparedAdapter, Runner, UsedAdapter, WeightPrecision,
};
use safetensors::tensor::{TensorView, serialize_to_file};
use serde::Deserialize;

use crate::batching::{assert_same_bits, requests};
use crate::errors::largest_error;
use crate::support::{Request, Setup, TestedDevice, fixture, serve, serve_alone, simds};
use inflight_reference_device::{Reference, ReferenceOptions};

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
pub fn adapter(name: &str, base: &Path) -> Adapter {
    let source = ModelSource::open(base).expect("the checkpoint opens");
    used(load(name, &source).into())
}

/// What a rank has of it, to be given requests itself.
pub fn adapter_of_rank(name: &str, base: &Path, rank: usize, num_ranks: usize) -> Adapter {
    let source = ModelSource::open(base).expect("the checkpoint opens");
    let part = source.adapter_of_rank(&load(name, &source), num_ranks, rank, Tiling::OfRanks);
    used(part.expect("it can be cut"))
}

/// All of it, for one process with the tiles of several ranks.
pub fn cut_adapter(name: &str, base: &Path) -> Adapter {
    let source = ModelSource::open(base).expect("the checkpoint opens");
    let parts = source.adapter_parts(load(name, &source), 1, Tiling::Always);
    used(parts.expect("it can be cut"))
}

/// What processes with a GPU each have of it.
pub fn adapter_of_gpus(name: &str, base: &Path, grid: Grid) -> Adapter {
    let source = ModelSource::open(base).expect("the checkpoint opens");
    let parts = source.adapter_parts(load(name, &source), grid, Tiling::Never);
    used(parts.expect("it can be cut"))
}

/// What processes have of it.
pub fn adapter_of_processes(name: &str, base: &Path, grid: Grid) -> Adapter {
    let source = ModelSource::open(base).expect("the checkpoint opens");
    let parts = source.adapter_parts(load(name, &source), grid, Tiling::OfRanks);
    used(parts.expect("it can be cut"))
}

fn load(name: &str, source: &ModelSource) -> AdapterWeights {
    let files = AdapterFiles::open(&fixture("adapters").join(name), 64).expect("the adapter opens");
    let prepared = PreparedAdapter::new(&files, source).expect("it is for this model");
    prepared.load().expect("it is read")
}

fn used(parts: AdapterParts) -> Adapter {
    Adapter::new(Arc::new(UsedAdapter::new(Arc::new(parts), || {})), 1)
}

/// Bytes of the packed weights of an adapter.
pub fn num_bytes(name: &str, base: &Path) -> u64 {
    let source = ModelSource::open(base).expect("the checkpoint opens");
    let files = AdapterFiles::open(&fixture("adapters").join(name), 64).expect("the adapter opens");
    let prepared = PreparedAdapter::new(&files, &source).expect("it is for this model");
    prepared.num_bytes()
}

/// Compares an adapter on a device with PEFT; logits differ by this share of what rounding to bf16 costs.
pub fn agrees_on<D: TestedDevice>(name: &str, share_of_cost: f32, options: &D::Options) {
    let text = fs::read_to_string(fixture("adapters").join(name).join("expected.json"));
    let expected: Expected =
        serde_json::from_str(&text.expect("a fixture")).expect("as it was written");
    let base = fixture(&expected.base);
    let setup = Setup::default();
    let mut runner: Box<dyn Runner> = setup.load_on::<D>(&base, options);
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
        let error = largest_error(&served.logits.concat(), &expected.logits.concat());
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
            ..CpuOptions::default()
        };
        agrees_on::<inflight_device_cpu::Cpu>(name, 0.5, &options);
    }
    for has_whole_sums in [true, false] {
        agrees_on::<Reference>(
            name,
            0.5,
            &ReferenceOptions {
                has_whole_sums,
                ..ReferenceOptions::default()
            },
        );
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
    an_adapter_of_a_module_that_is_fused_head_by_head: "head-by-head",
    dora_of_weights_that_are_stored_by_columns: "stored-by-columns",
    dora_over_biases: "dora",
    dora_of_fused_modules: "dora-fused",
    dora_in_front_of_norms: "dora-norms-after",
    an_adapter_with_biases_of_its_own: "trained-biases",
    an_adapter_of_the_embedding_and_the_output_layer: "outside-layers",
    an_adapter_of_scaled_embeddings_and_capped_logits: "soft-cap",
    an_adapter_with_an_embedding_and_an_output_layer_of_its_own: "saved-modules",
    dora_of_the_output_layer: "dora-output-layer",
    an_adapter_of_the_gated_delta_rule: "delta-rule",
    dora_of_a_state_space: "state-space",
    rows_of_fused_modules: "rows",
    rows_with_dora: "rows-dora",
}

/// Requests with two adapters, and with none, in turns.
pub fn mixed(base: &Path, names: [&str; 2]) -> Vec<Request> {
    in_turns(&names.map(|name| adapter(name, base)))
}

/// The same with these adapters.
pub fn in_turns(adapters: &[Adapter; 2]) -> Vec<Request> {
    let mut requests = requests();
    for (index, request) in requests.iter_mut().enumerate() {
        request.adapter = adapters.get(index % 3).cloned();
    }
    requests
}

/// Serves requests with different adapters in the same steps, and compares each with its run alone. Those without an
/// adapter are compared with a model that has never seen one.
fn each_as_alone(setup: &Setup) {
    each_of_as_alone("llama3", ["all-modules", "rank-33"], setup);
}

fn each_of_as_alone(base: &str, names: [&str; 2], setup: &Setup) {
    let base = fixture(base);
    each_request_as_alone(&base, &mixed(&base, names), setup);
}

fn each_request_as_alone(base: &Path, requests: &[Request], setup: &Setup) {
    let alone_setup = Setup {
        kv_dtype: setup.kv_dtype,
        weights: setup.weights,
        max_beam_width: setup.max_beam_width,
        ..Setup::default()
    };
    let mut alone = alone_setup.load_from(base);
    let mut without = alone_setup.load_from(base);
    let (served, happened) = serve(&mut setup.load_from(base), setup, requests);
    assert!(happened.max_sequences > 2, "{happened:?}");
    let mut num_changed = 0;
    for (index, (served, request)) in served.iter().zip(requests).enumerate() {
        let what = format!("{}, request {index}, {setup:?}", base.display());
        let runner: &mut Box<dyn Runner> = match request.adapter {
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
fn whatever_an_adapter_changes_others_keep_their_bits() {
    let setup = Setup {
        max_num_tokens: 24,
        enable_chunked_context: true,
        block_size: 4,
        num_threads: 3,
        ..Setup::default()
    };
    for (base, names) in [
        ("llama-biases", ["dora", "trained-biases"]),
        ("llama2", ["dora-output-layer", "saved-modules"]),
        ("llama3", ["outside-layers", "rank-33"]),
        ("gemma2", ["soft-cap", "dora-norms-after"]),
    ] {
        each_of_as_alone(base, names, &setup);
    }
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

/// An adapter of every linear layer of a model, with random weights.
pub fn random_adapter(base: &Path, rank: usize, seed: u32) -> Adapter {
    let source = ModelSource::open(base).expect("the checkpoint opens");
    let num_layers = source.spec().num_layers();
    let config: Vec<_> = (0..num_layers as i32)
        .flat_map(|layer| (1..8).flat_map(move |module| [module, layer, rank as i32]))
        .collect();
    let num_rows = config.len() / 3;
    // More than the widest module has.
    let width = rank * 512;
    let mut state = seed;
    let weights = (0..num_rows * width).flat_map(|_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state as i32 as f32 / i32::MAX as f32 / 3.0).to_le_bytes()
    });
    let weights: Vec<_> = weights.collect();
    let arrays = AdapterArrays::new(
        (config, vec![num_rows, 3]),
        (weights, vec![num_rows, width]),
        Dtype::F32,
    );
    let files = AdapterFiles::of_arrays(&Arc::new(arrays), 64).expect("good rows");
    let prepared = PreparedAdapter::new(&files, &source).expect("it is for this model");
    used(prepared.load().expect("it is read").into())
}

#[test]
fn adapters_are_added_to_weights_that_a_checkpoint_has_quantised() {
    for base in [
        "gptq",
        "gptq-act-order",
        "gptq-8bit-v2",
        "awq",
        "compressed-w8a8",
        "compressed-w4a16",
        "bnb-int8",
        "bnb-nf4",
        "gguf-q8_0",
        "gguf-q4_k",
        "gguf-iq4_nl",
        "gguf-mixed",
    ] {
        let base = fixture("quantised").join(base);
        let adapters = [(5, 1), (17, 2)].map(|(rank, seed)| random_adapter(&base, rank, seed));
        let mut requests = in_turns(&adapters);
        let source = ModelSource::open(&base).expect("the checkpoint opens");
        let vocab_size = source.spec().vocab_size as TokenId;
        for request in &mut requests {
            request.prompt.iter_mut().for_each(|id| *id %= vocab_size);
        }
        let setup = Setup {
            max_num_tokens: 24,
            enable_chunked_context: true,
            block_size: 4,
            num_threads: 2,
            ..Setup::default()
        };
        each_request_as_alone(&base, &requests, &setup);
    }
}

#[test]
fn an_adapter_for_another_model_is_refused_by_its_tensors() {
    let refusal = |name: &str, base: &str, max_rank| {
        let source = ModelSource::open(&fixture(base)).expect("the checkpoint opens");
        let folder = fixture("adapters").join(name);
        let files = match AdapterFiles::open(&folder, max_rank) {
            Ok(files) => files,
            Err(error) => return error.to_string(),
        };
        match PreparedAdapter::new(&files, &source) {
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
        (
            "trained-biases",
            "llama2",
            64,
            &[
                "q_proj.base_layer.bias",
                "is a bias",
                "q_proj of the model has none",
            ],
        ),
    ] {
        let error = refusal(name, base, max_rank);
        for word in words {
            assert!(error.contains(word), "{name}: {error}");
        }
    }
}

/// Opens a copy of an adapter whose modules have other names.
fn renamed(test: &str, name: impl Fn(&str) -> String) -> Result<(), String> {
    let folder =
        std::env::temp_dir().join(format!("inflight-adapter-{}-{test}", std::process::id()));
    fs::create_dir_all(&folder).expect("a folder");
    let original = fixture("adapters").join("rank-1");
    fs::copy(
        original.join("adapter_config.json"),
        folder.join("adapter_config.json"),
    )
    .expect("a copy");
    let bytes = fs::read(original.join("adapter_model.safetensors")).expect("the weights");
    let old = safetensors::SafeTensors::deserialize(&bytes).expect("whole");
    let tensors = old.tensors().into_iter();
    let tensors: Vec<_> = tensors.map(|(old, view)| (name(&old), view)).collect();
    let path = folder.join("adapter_model.safetensors");
    safetensors::tensor::serialize_to_file(tensors, None, &path).expect("written");
    let source = ModelSource::open(&fixture("llama2")).expect("the checkpoint opens");
    let outcome = AdapterFiles::open(&folder, 64)
        .and_then(|files| PreparedAdapter::new(&files, &source).map(|_| ()));
    fs::remove_dir_all(&folder).expect("removed");
    outcome.map_err(|error| error.to_string())
}

#[test]
fn adapters_of_models_with_images_are_those_of_their_decoder() {
    for (index, inner) in [
        "model.",
        "model.language_model.",
        "language_model.model.",
        "",
    ]
    .into_iter()
    .enumerate()
    {
        let outcome = renamed(&format!("names-{index}"), |name| {
            name.replacen(
                "base_model.model.model.",
                &format!("base_model.model.{inner}"),
                1,
            )
        });
        assert_eq!(outcome, Ok(()), "{inner}");
    }
}

#[test]
fn modules_that_adapters_cannot_change_are_refused_for_what_they_are() {
    for (module, what) in [
        ("mlp.experts.0.up_proj", "of the experts"),
        ("mlp.shared_expert.up_proj", "a shared expert"),
        ("self_attn.kv_b_proj", "what heads make of latents"),
        ("mlp.gate", "the router of experts"),
    ] {
        let error = renamed(&module.replace('.', "-"), |name| {
            match name.find("layers.0.") {
                Some(at) if name.contains("self_attn.q_proj") => {
                    let end = name.find(".lora_").expect("a factor");
                    format!("{}layers.0.{module}{}", &name[..at], &name[end..])
                }
                _ => name.to_owned(),
            }
        });
        let error = error.expect_err("refused");
        for words in [module, what, "merge"] {
            assert!(error.contains(words), "{error}");
        }
    }
}

/// An array as NumPy writes it.
fn npy(descr: &str, shape: [usize; 2], data: &[u8]) -> Vec<u8> {
    let [rows, columns] = shape;
    let header =
        format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({rows}, {columns}), }}\n");
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    bytes
}

#[test]
fn rows_that_are_not_for_the_model_are_refused_by_their_numbers() {
    let source = ModelSource::open(&fixture("llama3")).expect("the checkpoint opens");
    let folder = std::env::temp_dir().join(format!("inflight-rows-{}", std::process::id()));
    fs::create_dir_all(&folder).expect("a folder");
    let refusal = |config: &[&[i32]], num_rows: usize, width: usize| {
        let columns = config[0].len();
        let numbers: Vec<u8> = config
            .iter()
            .copied()
            .flatten()
            .flat_map(|it| it.to_le_bytes())
            .collect();
        let config = npy("<i4", [config.len(), columns], &numbers);
        fs::write(folder.join("model.lora_config.npy"), config).expect("written");
        let weights = npy("<f2", [num_rows, width], &vec![0; 2 * num_rows * width]);
        fs::write(folder.join("model.lora_weights.npy"), weights).expect("written");
        let files = match AdapterFiles::open(&folder, 8) {
            Ok(files) => files,
            Err(error) => return Some(error.to_string()),
        };
        let refused = PreparedAdapter::new(&files, &source).err();
        refused.map(|error| error.to_string())
    };
    // The model has two layers, and its queries have 64 inputs and as many outputs.
    assert_eq!(refusal(&[&[1, 0, 3], &[4, 1, 2]], 2, 3 * 128), None);
    assert_eq!(refusal(&[&[1, 0, 3, 1]], 1, 3 * 128 + 64), None);
    for (config, num_rows, width, words) in [
        (
            &[&[1, 0, 3][..]][..],
            1,
            3 * 128 - 1,
            &[
                "lora_weights.npy",
                "attn_q of layer 0",
                "383 values",
                "has 384",
            ][..],
        ),
        (&[&[1, 0, 3, 1]], 1, 3 * 128, &["384 values", "has 448"]),
        (&[&[1, 2, 3]], 1, 384, &["attn_q of layer 2", "2 layers"]),
        (
            &[&[1, 0, 9]],
            1,
            4096,
            &["lora_config.npy", "rank 9", "is 8"],
        ),
        (&[&[8, 0, 1]], 1, 4096, &["module id 8", "0 to 7"]),
        (&[&[1, 0, 0]], 1, 4096, &["[1, 0, 0]", "a rank from 1"]),
        (&[&[-1, 0, 1]], 1, 4096, &["[-1, 0, 1]"]),
        (&[&[1, 0, 1, 2]], 1, 4096, &["fourth column"]),
        (
            &[&[1, 0, 1], &[0, 0, 1]],
            2,
            4096,
            &["attn_qkv of layer 0", "a row before"],
        ),
        (
            &[&[1, 0, 1]],
            2,
            256,
            &["lora_weights.npy", "[2, 256]", "1 modules"],
        ),
        (&[&[1, 0]], 1, 256, &["[1, 2]", "[n, 3] or [n, 4]"]),
    ] {
        let error = refusal(config, num_rows, width).expect("it is refused");
        for word in words {
            assert!(error.contains(word), "{config:?}: {error}");
        }
    }
    fs::remove_dir_all(&folder).expect("removed");
}

#[test]
fn a_configuration_that_does_not_fit_its_tensors_is_refused() {
    for (name, key, value, words) in [
        (
            "dora",
            "use_dora",
            "false",
            &["has a lora_magnitude_vector of", "use_dora is false"][..],
        ),
        (
            "all-modules",
            "use_dora",
            "true",
            &["has no lora_magnitude_vector of", "use_dora is true"],
        ),
        (
            "all-modules",
            "lora_bias",
            "true",
            &["has no bias of lora_B of", "lora_bias is true"],
        ),
        (
            "all-modules",
            "bias",
            "\"some\"",
            &["bias", "\"lora_only\""],
        ),
        (
            "all-modules",
            "r",
            "4",
            &["lora_A", "[5, 64]", "calls for rank 4"],
        ),
    ] {
        let folder =
            std::env::temp_dir().join(format!("inflight-{name}-{key}-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder");
        let from = fixture("adapters").join(name);
        let weights = "adapter_model.safetensors";
        fs::copy(from.join(weights), folder.join(weights)).expect("copied");
        let config = fs::read_to_string(from.join("adapter_config.json")).expect("a fixture");
        let mut config: serde_json::Value = serde_json::from_str(&config).expect("JSON");
        config[key] = serde_json::from_str(value).expect("JSON");
        fs::write(folder.join("adapter_config.json"), config.to_string()).expect("written");
        let opened = AdapterFiles::open(&folder, 64);
        fs::remove_dir_all(&folder).expect("removed");
        let error = opened.err().expect("it is refused").to_string();
        for word in words {
            assert!(error.contains(word), "{name} with {key} {value}: {error}");
        }
    }
}

#[test]
fn dora_of_an_embedding_is_refused() {
    let folder = std::env::temp_dir().join(format!("inflight-embedding-{}", std::process::id()));
    fs::create_dir_all(&folder).expect("a folder");
    let zeros = [0; 4 * 4 * 160];
    let tensors = [("A", [4, 160]), ("B", [32, 4])].map(|(end, shape)| {
        let bytes = &zeros[..4 * shape[0] * shape[1]];
        let view = TensorView::new(safetensors::Dtype::F32, shape.to_vec(), bytes);
        let name = format!("base_model.model.model.embed_tokens.lora_embedding_{end}");
        (name, view.expect("as many bytes"))
    });
    serialize_to_file(tensors, None, &folder.join("adapter_model.safetensors")).expect("written");
    let config = r#"{"peft_type": "LORA", "r": 4, "lora_alpha": 4, "use_dora": true}"#;
    fs::write(folder.join("adapter_config.json"), config).expect("written");
    let opened = AdapterFiles::open(&folder, 64);
    fs::remove_dir_all(&folder).expect("removed");
    let error = opened.err().expect("it is refused").to_string();
    assert!(
        error.contains("has DoRA for the embedding model.embed_tokens"),
        "{error}"
    );
}

/// An adapter of rank 4, as PEFT saves it, of modules with these outputs and inputs.
fn random_peft_adapter(test: &str, modules: &[(&str, usize, usize)]) -> AdapterFiles {
    let folder = std::env::temp_dir().join(format!("inflight-{test}-{}", std::process::id()));
    fs::create_dir_all(&folder).expect("a folder");
    let rank = 4;
    let values: Vec<Vec<u8>> = modules
        .iter()
        .flat_map(|(_, outputs, inputs)| [rank * inputs, outputs * rank])
        .enumerate()
        .map(|(seed, len)| {
            let value = |i: usize| ((i * 7919 + seed * 104_729) % 2003) as f32 / 4000.0 - 0.25;
            (0..len).flat_map(|i| value(i).to_le_bytes()).collect()
        })
        .collect();
    let tensors = modules.iter().zip(values.chunks(2));
    let tensors = tensors.flat_map(|((module, outputs, inputs), values)| {
        let shapes = [("A", vec![rank, *inputs]), ("B", vec![*outputs, rank])];
        let tensors = shapes.into_iter().zip(values);
        tensors.map(move |((end, shape), bytes)| {
            let view = TensorView::new(safetensors::Dtype::F32, shape, bytes);
            let name = format!("base_model.model.{module}.lora_{end}.weight");
            (name, view.expect("as many bytes"))
        })
    });
    let tensors: Vec<_> = tensors.collect();
    serialize_to_file(tensors, None, &folder.join("adapter_model.safetensors")).expect("written");
    let config = r#"{"peft_type": "LORA", "r": 4, "lora_alpha": 4}"#;
    fs::write(folder.join("adapter_config.json"), config).expect("written");
    let files = AdapterFiles::open(&folder, 64).expect("the adapter opens");
    fs::remove_dir_all(&folder).expect("removed");
    files
}

/// The projection that selects has two parts, between which another module is.
#[test]
fn an_unknown_module_beside_those_of_a_selective_scan_is_refused() {
    let scan = [
        ("model.layers.0.mamba.x_proj", 32, 120),
        ("model.layers.0.mamba.dt_proj", 120, 14),
    ];
    let source = ModelSource::open(&fixture("jamba")).expect("the checkpoint opens");
    let opened = |test: &str, modules: &[(&str, usize, usize)]| {
        let files = random_peft_adapter(test, modules);
        let prepared = PreparedAdapter::new(&files, &source);
        prepared.map(drop).map_err(|error| error.to_string())
    };
    opened("scan", &scan).expect("it is for this model");
    let unknown = ("model.layers.0.mamba.z_proj", 60, 60);
    let error = opened("unknown", &[&scan[..], &[unknown]].concat());
    let error = error.expect_err("the model has no such module");
    assert!(error.contains("z_proj"), "{error}");
}

/// One process with the tiles of several ranks cuts an adapter as it cuts the model.
#[test]
fn an_adapter_of_gates_is_cut_with_the_model() {
    let files = random_peft_adapter(
        "gates",
        &[
            ("model.layers.0.self_attn.q_proj", 72, 60),
            ("model.layers.0.self_attn.gate_proj", 72, 60),
            ("model.layers.1.self_attn.o_proj", 60, 72),
            ("model.layers.3.self_attn.gate_proj", 72, 60),
            ("lm_head", 160, 60),
        ],
    );
    let dir = fixture("afmoe");
    let source = ModelSource::open(&dir).expect("the checkpoint opens");
    let weights = || {
        let prepared = PreparedAdapter::new(&files, &source).expect("it is for this model");
        prepared.load().expect("it loads")
    };
    let whole: Adapter = used(weights().into());
    let parts = source.adapter_parts(weights(), 1, Tiling::Always);
    let cut = used(parts.expect("it can be cut"));
    let served = |adapter: Option<&Adapter>, deterministic| {
        let setup = Setup {
            deterministic,
            ..Setup::default()
        };
        let request = Request {
            adapter: adapter.cloned(),
            outputs: OutputOptions {
                generation_logits: true,
                ..OutputOptions::default()
            },
            ..Request::greedy(&[5, 60, 7, 31, 12], 1)
        };
        serve_alone(&mut setup.load_from(&dir), &setup, &request)
            .logits
            .concat()
    };
    let expected = served(Some(&whole), false);
    let moved = largest_error(&expected, &served(None, false));
    let error = largest_error(&expected, &served(Some(&cut), true));
    assert!(error < 0.05 * moved, "{error} of {moved}");
}
