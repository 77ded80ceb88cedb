//! The decoder on the stand-in for a GPU, compared with the CPU and with itself.

use std::path::Path;
use std::sync::Arc;

use half::bf16;
use inflight_base::{BlockId, BlockSize};
use inflight_cuda_stand_in::{StandIn, count};
use inflight_device::{
    AdapterCapacity, DeviceSample, EmbeddingTable, KvDtype, KvLayout, KvLayouts, KvSpan, KvValues,
    LayerGroups, Linear, Load, LogitsTransform, Norm, Ops, StepCapacity, StepInputs, StepIo,
};
use inflight_device_cuda::{Cuda, CudaOptions, has_kernels};
use inflight_engine::{BlockReuse, OutputOptions};
use inflight_numbers::{Dtype, RawMatrix, Stacking};
use inflight_sampling::{
    ChangeLists, DeviceSampling, Owner, Sampler, SamplingInput, SamplingParams, TopPDecay,
};
use serde_json::json;

use crate::copy::Copy;
use crate::devices::{
    assert_agrees_with_reference, assert_devices_agree, assert_host_blocks_change_nothing,
    assert_same_alone, assert_same_bits, requests, setups, with_sinks_that_shift,
};
use crate::errors::largest_error;
use crate::missing::present_or_reported;
use crate::support::{Request, Setup, fixture, serve};
use crate::transformers::{all_as_prompt, prompts};

/// A key or value may be rounded to the next 8-bit float where the devices' sums differ in the last bits.
pub const FP8_TOLERANCE: f32 = 0.15;

/// Runs the body of a test, whose path is given, on the stand-in, in a process of its own: for what only a stand-in can
/// show.
pub fn on_stand_in(stand_in: StandIn, test: &str, body: impl FnOnce()) {
    assert!(!has_real_gpu(), "{test} needs the stand-in: skip it");
    if present_or_reported(&"CUDA kernels (`cargo xtask kernels`)", has_kernels()) {
        stand_in.run(test, body);
    }
}

/// The same, or in this process, on the first GPU that is visible, if `INFLIGHT_TEST_GPU` says that it is a real one.
pub fn on_any_gpu(stand_in: StandIn, test: &str, body: impl FnOnce()) {
    match has_real_gpu() {
        true => body(),
        false => on_stand_in(stand_in, test, body),
    }
}

/// Whether tests run on a real GPU.
fn has_real_gpu() -> bool {
    std::env::var_os("INFLIGHT_TEST_GPU").is_some()
}

/// A test for each of some fixtures, all with one body, in a module that lists the fixtures. The body gets the path of
/// its test, which [`on_any_gpu`] needs.
macro_rules! on_fixtures {
    ($tests:ident: $body:path; $($test:ident: $fixture:literal,)*) => {
        mod $tests {
            /// The fixtures of these tests.
            pub const FIXTURES: &[&str] = &[$($fixture),*];
            $(#[test]
            fn $test() {
                let (_, module) = module_path!().split_once("::").expect("a module of the tests");
                $body(&format!("{module}::{}", stringify!($test)), $fixture);
            })*
        }
    };
}
pub(crate) use on_fixtures;

/// [`on_any_gpu`] for a test of this file.
fn on_a_gpu(stand_in: StandIn, test: &str, body: impl FnOnce(CudaOptions)) {
    on_any_gpu(stand_in, &format!("cuda::{test}"), || {
        body(CudaOptions::default());
    });
}

/// Models that are compared with the CPU.
pub const LIKE_THE_CPU: [&str; 3] = ["llama3", "qwen2", "qwen3"];

#[test]
fn the_cpu_and_a_gpu_agree() {
    on_a_gpu(StandIn::new(), "the_cpu_and_a_gpu_agree", |options| {
        for name in LIKE_THE_CPU {
            assert_devices_agree::<Cuda>(name, &options);
        }
    });
}

#[test]
fn a_request_alone_gives_the_same_bits_on_a_gpu() {
    let test = "a_request_alone_gives_the_same_bits_on_a_gpu";
    on_a_gpu(StandIn::new().set("SEED", 7), test, |options| {
        let options = CudaOptions {
            deterministic: true,
            ..options
        };
        for (what, setup) in setups() {
            assert_same_alone::<Cuda>(what, &fixture("llama3"), &options, &setup, requests());
        }
    });
}

/// With norms of heads, attention-sink logits and every type of cache; in chunks, alone, and without graphs.
#[test]
fn sinks_shift_on_a_gpu() {
    on_a_gpu(StandIn::new(), "sinks_shift_on_a_gpu", |options| {
        for (name, kv_dtype, tolerance) in [
            ("qwen3", KvDtype::Bf16, 0.1),
            ("llama3", KvDtype::Int8, 0.25),
            ("gpt-oss", KvDtype::Int8, 0.25),
            ("llama3", KvDtype::Fp8, FP8_TOLERANCE),
        ] {
            let setup = Setup {
                kv_dtype,
                ..with_sinks_that_shift()
            };
            let (dir, requests) = (fixture(name), requests());
            // Rounding chooses other experts of gpt-oss, so only bits are compared.
            if name != "gpt-oss" {
                assert_agrees_with_reference::<Cuda>(
                    name, &dir, &options, &setup, &requests, tolerance,
                );
            }
            let setup = Setup {
                block_size: 8,
                max_num_tokens: 24,
                enable_chunked_context: true,
                ..setup
            };
            let options = CudaOptions {
                deterministic: true,
                ..options.clone()
            };
            assert_same_alone::<Cuda>(name, &dir, &options, &setup, requests.clone());
            let launched = CudaOptions {
                max_graphs: 0,
                ..options.clone()
            };
            let [recorded, launched] = [options, launched].map(|options| {
                serve(
                    &mut setup.load_on::<Cuda>(&dir, &options),
                    &setup,
                    &requests,
                )
                .0
            });
            for (recorded, launched) in recorded.iter().zip(&launched) {
                assert_same_bits(name, recorded, launched);
            }
        }
    });
}

/// Steps of 16 in which rounding may decide between two experts that are equally good.
pub const MAX_FAR: usize = 2;

/// Compares every step of a model with transformers: the texts of its fixture are given as they are.
pub fn assert_logits_of_transformers(name: &str, options: &CudaOptions, max_far: usize) {
    /// How far logits may be from transformers', in costs of rounding to bf16: a GPU rounds activations in more places.
    const MAX_ERROR: f32 = 2.0;
    /// How far they may be where another expert was chosen.
    const MAX_FAR_ERROR: f32 = 40.0;
    let mut errors = Vec::new();
    for prompt in prompts(name) {
        let setup = in_chunks();
        let mut runner = setup.load_on::<Cuda>(&fixture(name), options);
        let request = all_as_prompt(&prompt);
        let served = &serve(&mut runner, &setup, &[request]).0[0];
        let rows = served.context_logits.chunks(prompt.logits[0].len());
        let generated = rows.skip(prompt.prompt.len() - 1).zip(&prompt.logits);
        let errors_of_prompt =
            generated.map(|(ours, theirs)| largest_error(ours, theirs) / prompt.bf16_cost);
        errors.extend(errors_of_prompt);
    }
    println!("{name}: errors in costs of rounding: {errors:.2?}");
    assert_eq!(errors.len(), 16, "{name}");
    let num_near = errors.iter().filter(|error| **error <= MAX_ERROR).count();
    assert!(num_near + max_far >= errors.len(), "{name}: {errors:?}");
    let are_bounded = errors.iter().all(|error| *error <= MAX_FAR_ERROR);
    assert!(are_bounded, "{name}: {errors:?}");
}

/// Compares a model's requests together and alone.
pub fn is_the_same_alone(name: &str, dir: &Path, options: &CudaOptions) {
    let options = CudaOptions {
        deterministic: true,
        ..options.clone()
    };
    assert_same_alone::<Cuda>(name, dir, &options, &reusing_in_windows(), requests());
}

/// Windows larger and smaller than the windows of models, of which blocks are given back, and prompts whose beginnings
/// were computed.
pub fn reusing_in_windows() -> Setup {
    Setup {
        windows: &[30, 18],
        num_sinks: 3,
        gives_back: true,
        reuse: BlockReuse::PartialBlocks,
        ..in_chunks()
    }
}

/// Prompts are computed in chunks.
pub fn in_chunks() -> Setup {
    Setup {
        block_size: 8,
        max_num_tokens: 24,
        enable_chunked_context: true,
        ..Setup::default()
    }
}

/// cuBLASLt's algorithms for few and for many rows add up in different orders.
#[test]
fn deterministic_products_of_a_row_are_the_same_for_any_number_of_rows() {
    let test = "deterministic_products_of_a_row_are_the_same_for_any_number_of_rows";
    on_a_gpu(StandIn::new(), test, |options| {
        const NUM_OUTPUTS: usize = 32;
        const WIDTH: usize = 400;
        const MANY_ROWS: usize = 100;
        let first_row = |deterministic, num_rows: usize| -> Vec<f32> {
            let options = CudaOptions {
                deterministic,
                max_graphs: 0,
                ..options.clone()
            };
            let mut gpu = Cuda::open(&options).expect("a GPU");
            let number = |index: usize| bf16::from_f32((index * 37 % 101) as f32 / 50.0 - 1.0);
            let weights = (0..NUM_OUTPUTS * WIDTH).map(number);
            let bytes: Vec<_> = weights.flat_map(bf16::to_le_bytes).collect();
            let matrix = RawMatrix::new(Dtype::Bf16, NUM_OUTPUTS, WIDTH, &bytes);
            let matrix = gpu.pack(&[matrix], Stacking::Concatenated).expect("memory");
            let lm_head = Linear {
                matrix: matrix.expect("finite weights"),
                bias: None,
                place: None,
            };
            let weight = gpu.upload_vector(vec![1.0; WIDTH]).expect("memory");
            let mut sums = gpu.alloc_sums(MANY_ROWS, WIDTH).expect("memory");
            let mut states = gpu.alloc_inputs(MANY_ROWS, WIDTH).expect("memory");
            let mut logits = gpu.alloc_logits(MANY_ROWS, NUM_OUTPUTS).expect("memory");
            let layout = KvLayout {
                num_kv_heads: 1,
                head_dim: 64,
                values: KvValues::OfTheirOwn(64),
                indexer_dim: 0,
                block_size: BlockSize::new(128).expect("not zero"),
                dtype: KvDtype::Bf16,
            };
            let cache = gpu
                .alloc_kv_cache(&KvLayouts::alike(layout, 1), &LayerGroups::one(1), 1)
                .expect("memory");
            let capacity = StepCapacity {
                max_num_tokens: MANY_ROWS,
                max_num_sequences: 1,
                max_seq_len: 128,
                max_blocks_per_sequence: 1,
                num_layer_groups: 1,
                num_q_heads: 1,
                has_slopes: false,
                adapters: AdapterCapacity::default(),
            };
            gpu.reserve(&cache, &capacity).expect("memory");
            let rows: Vec<_> = (0..num_rows as u32).collect();
            let tokens: Vec<_> = (0..num_rows).map(|row| (row % NUM_OUTPUTS) as _).collect();
            let inputs = StepInputs {
                token_ids: &tokens,
                spans: &[KvSpan {
                    tokens: 0..num_rows as u32,
                    kv_len: num_rows as u32,
                    block_table: 0..1,
                }],
                block_tables: &[BlockId(0)],
                kept_rows: &rows,
                sampled_rows: &rows,
                sampling: &vec![None; num_rows],
                ..StepInputs::default()
            };
            let step = gpu.begin_step(&cache, inputs);
            gpu.embed(&step, EmbeddingTable::Tied(&lm_head.matrix), 1.0, &mut sums);
            let norm = Norm::Rms {
                weight: &weight,
                eps: 1e-5,
            };
            gpu.norm(num_rows, &sums, norm, &mut states);
            gpu.logits(
                num_rows,
                &states,
                &lm_head,
                LogitsTransform::IDENTITY,
                None,
                &mut logits,
            );
            gpu.end_step(step);
            let all = gpu.host_logits(&mut logits, num_rows);
            all.expect("the step runs")[..NUM_OUTPUTS].to_vec()
        };
        let is_same = |deterministic| {
            let alone = first_row(deterministic, 1);
            [2, 20, MANY_ROWS]
                .iter()
                .all(|&num_rows| first_row(deterministic, num_rows) == alone)
        };
        assert!(is_same(true));
        if !has_real_gpu() {
            assert!(!is_same(false), "all algorithms add up alike");
        }
    });
}

/// Setups with a cache of 8-bit floats.
fn fp8_setups() -> impl Iterator<Item = (&'static str, Setup)> {
    let others = setups()
        .into_iter()
        .filter(|(_, setup)| setup.kv_dtype == KvDtype::Bf16);
    others.map(|(what, setup)| {
        let kv_dtype = KvDtype::Fp8;
        (what, Setup { kv_dtype, ..setup })
    })
}

#[test]
fn an_fp8_cache_on_a_gpu_agrees_with_the_reference_device() {
    let test = "an_fp8_cache_on_a_gpu_agrees_with_the_reference_device";
    on_a_gpu(StandIn::new(), test, |options| {
        for name in ["llama3", "qwen3"] {
            for (what, setup) in fp8_setups() {
                assert_agrees_with_reference::<Cuda>(
                    &format!("{name}, {what}"),
                    &fixture(name),
                    &options,
                    &setup,
                    &requests(),
                    FP8_TOLERANCE,
                );
            }
        }
    });
}

#[test]
fn a_request_alone_gives_the_same_bits_with_an_fp8_cache() {
    let test = "a_request_alone_gives_the_same_bits_with_an_fp8_cache";
    on_a_gpu(StandIn::new().set("SEED", 5), test, |options| {
        let options = CudaOptions {
            deterministic: true,
            ..options
        };
        for (what, setup) in fp8_setups() {
            assert_same_alone::<Cuda>(what, &fixture("llama3"), &options, &setup, requests());
        }
    });
}

#[test]
fn what_comes_back_from_pinned_memory_gives_the_same_bits() {
    let test = "cuda::what_comes_back_from_pinned_memory_gives_the_same_bits";
    on_any_gpu(StandIn::new().set("SEED", 11), test, || {
        let options = CudaOptions {
            deterministic: true,
            ..CudaOptions::default()
        };
        assert_host_blocks_change_nothing::<Cuda>("llama3", &options, &KvDtype::ALL);
    });
}

/// Requests that are sampled in different ways: on a GPU, and with options that only the host knows.
pub fn sampled_requests() -> Vec<Request> {
    let changes: [fn(&mut SamplingParams); 12] = [
        |params| params.temperature = 0.0,
        |_| {},
        |params| params.top_k = 5,
        |params| params.top_p = 0.9,
        |params| (params.min_p, params.top_k) = (0.05, 40),
        |params| {
            params.top_p_decay = Some(TopPDecay {
                factor: 0.9,
                min: 0.1,
                reset_ids: Vec::new(),
            });
        },
        |params| params.repetition_penalty = 1.3,
        |params| params.logit_bias = Arc::from([(7, 2.0)]),
        |params| {
            (params.presence_penalty, params.frequency_penalty) = (0.5, 0.25);
            params.prompt_ignore_length = 1;
        },
        |params| params.bad_words = Arc::from([vec![3], vec![5, 6], vec![9]]),
        |params| (params.min_tokens, params.stop_token_ids) = (4, vec![1, 2, 3]),
        // The host's.
        |params| params.no_repeat_ngram_size = 2,
    ];
    let requests = requests().into_iter().cycle().zip(changes).enumerate();
    requests
        .map(|(index, (request, change))| {
            let mut sampling = SamplingParams {
                temperature: 0.8,
                seed: 100 + index as u64,
                ..SamplingParams::default()
            };
            change(&mut sampling);
            Request {
                sampling,
                outputs: OutputOptions::default(),
                ..request
            }
        })
        .collect()
}

#[test]
fn a_gpu_samples_the_tokens_that_the_host_samples() {
    let test = "a_gpu_samples_the_tokens_that_the_host_samples";
    on_a_gpu(StandIn::new().set("SEED", 3), test, |options| {
        let on_gpu = sampled_requests();
        // The host has to see the logits of a token whose log-probabilities are wanted.
        let on_host: Vec<_> = on_gpu
            .iter()
            .cloned()
            .map(|request| Request {
                outputs: OutputOptions {
                    log_probs: Some(0),
                    ..OutputOptions::default()
                },
                ..request
            })
            .collect();
        for (what, setup) in setups() {
            let load = || setup.load_on::<Cuda>(&fixture("llama3"), &options);
            let (on_gpu, _) = serve(&mut load(), &setup, &on_gpu);
            let (on_host, _) = serve(&mut load(), &setup, &on_host);
            for (on_gpu, on_host) in on_gpu.iter().zip(&on_host) {
                assert_eq!(on_host.log_probs.len(), on_host.tokens.len());
                assert_same_bits(what, on_host, on_gpu);
            }
        }
    });
}

#[test]
fn a_gpu_leaves_rows_to_the_host() {
    on_a_gpu(StandIn::new(), "a_gpu_leaves_rows_to_the_host", |options| {
        const VOCAB_SIZE: usize = 200;
        const HIDDEN_SIZE: usize = 16;
        let mut gpu = Cuda::open(&options).expect("a GPU");
        let number = |index: usize| bf16::from_f32((index * 37 % 101) as f32 / 50.0 - 1.0);
        let rows: Vec<_> = (0..VOCAB_SIZE * HIDDEN_SIZE).map(number).collect();
        let bytes: Vec<_> = rows.iter().flat_map(|row| row.to_le_bytes()).collect();
        let matrix = RawMatrix::new(Dtype::Bf16, VOCAB_SIZE, HIDDEN_SIZE, &bytes);
        let lm_head = gpu.pack(&[matrix], Stacking::Concatenated).expect("memory");
        let lm_head = Linear {
            matrix: lm_head.expect("finite weights"),
            bias: None,
            place: None,
        };
        let weight = gpu.upload_vector(vec![1.0; HIDDEN_SIZE]).expect("memory");
        let mut sums = gpu.alloc_sums(8, HIDDEN_SIZE).expect("memory");
        let mut states = gpu.alloc_inputs(8, HIDDEN_SIZE).expect("memory");
        let mut logits = gpu.alloc_logits(8, VOCAB_SIZE).expect("memory");
        let layout = KvLayout {
            num_kv_heads: 1,
            head_dim: 64,
            values: KvValues::OfTheirOwn(64),
            indexer_dim: 0,
            block_size: BlockSize::new(16).expect("not zero"),
            dtype: KvDtype::Bf16,
        };
        let cache = gpu
            .alloc_kv_cache(&KvLayouts::alike(layout, 1), &LayerGroups::one(1), 4)
            .expect("memory");
        let capacity = StepCapacity {
            max_num_tokens: 8,
            max_num_sequences: 4,
            max_seq_len: 16,
            max_blocks_per_sequence: 1,
            num_layer_groups: 1,
            num_q_heads: 1,
            has_slopes: false,
            adapters: AdapterCapacity::default(),
        };
        gpu.reserve(&cache, &capacity).expect("memory");

        let params = |temperature| SamplingParams {
            temperature,
            seed: 5,
            top_k: 20,
            ..SamplingParams::default()
        };
        let mut params = [params(0.0), params(1.0), params(0.7), params(2.0)];
        params[3].bad_words = Arc::from([vec![5]]);
        let inputs_of = |params| SamplingInput {
            params,
            tokens: &[3, 4],
            num_prompt_tokens: 1,
            beam: 0,
            owner: Owner::default(),
        };
        for left in [vec![], vec![1], vec![0, 2, 3], vec![0, 1, 2, 3]] {
            let mut lists = ChangeLists::new(4, 16);
            let sampling: Vec<_> = (0..4)
                .map(|row| match left.contains(&row) {
                    true => None,
                    false => DeviceSampling::of(inputs_of(&params[row]), &mut lists),
                })
                .collect();
            let spans = [0, 1, 2, 3].map(|row| KvSpan {
                tokens: row..row + 1,
                kv_len: 1,
                block_table: row..row + 1,
            });
            let inputs = StepInputs {
                token_ids: &[7, 19, 101, 150],
                spans: &spans,
                block_tables: &[0, 1, 2, 3].map(BlockId),
                kept_rows: &[0, 1, 2, 3],
                sampled_rows: &[0, 1, 2, 3],
                sampling: &sampling,
                change_lists: lists.words(),
                ..StepInputs::default()
            };
            let step = gpu.begin_step(&cache, inputs);
            gpu.embed(&step, EmbeddingTable::Tied(&lm_head.matrix), 1.0, &mut sums);
            let norm = Norm::Rms {
                weight: &weight,
                eps: 1e-5,
            };
            gpu.norm(4, &sums, norm, &mut states);
            gpu.logits(
                4,
                &states,
                &lm_head,
                LogitsTransform::IDENTITY,
                None,
                &mut logits,
            );
            gpu.sample(&step, &mut logits);
            gpu.end_step(step);
            let results = gpu.results(&mut logits, 4).expect("the step runs");
            let samples = results.samples.to_vec();
            let fetched = results.logits.to_vec();
            let all = gpu.host_logits(&mut logits, 4).expect("the step runs");
            let rows = all
                .chunks_exact(VOCAB_SIZE)
                .zip(fetched.chunks_exact(VOCAB_SIZE));
            for (row, (logits, fetched)) in rows.enumerate() {
                let mut sampler = Sampler::new(VOCAB_SIZE);
                let sample = samples.get(row).copied();
                if left.contains(&row) {
                    assert!(sample.is_none_or(|sample| sample == DeviceSample::Skipped));
                    assert_eq!(fetched, logits, "row {row}");
                } else {
                    let token = sampler.sample_changed(logits, inputs_of(&params[row]));
                    assert_eq!(sample, Some(DeviceSample::Sampled(token)), "row {row}");
                    let is_forbidden = logits[5] == f32::NEG_INFINITY;
                    assert_eq!(
                        is_forbidden,
                        row == 3,
                        "row {row}: changed where it is asked for"
                    );
                }
            }
        }
    });
}

#[test]
fn graphs_do_not_change_bits() {
    let test = "graphs_do_not_change_bits";
    on_a_gpu(StandIn::new().set("SEED", 11), test, |options| {
        for (what, setup) in setups() {
            // Without graphs, with fewer than there are shapes, and with all.
            let [without, few, all] = [0, 2, 64].map(|max_graphs| {
                let options = CudaOptions {
                    max_graphs,
                    ..options.clone()
                };
                let mut runner = setup.load_on::<Cuda>(&fixture("llama3"), &options);
                serve(&mut runner, &setup, &sampled_requests()).0
            });
            for (without, with) in without.iter().zip(&few).chain(without.iter().zip(&all)) {
                assert_same_bits(what, without, with);
            }
        }
    });
}

#[test]
fn a_generation_step_is_one_launch() {
    let test = "cuda::a_generation_step_is_one_launch";
    on_stand_in(StandIn::new(), test, || {
        let num_launches = |max_graphs, num_tokens| {
            let options = CudaOptions {
                max_graphs,
                ..CudaOptions::default()
            };
            let setup = Setup::default();
            let mut runner = setup.load_on::<Cuda>(&fixture("llama3"), &options);
            let before = count("FAIL_LAUNCH");
            let (served, _) = serve(
                &mut runner,
                &setup,
                &[Request::greedy(&[3, 4, 5], num_tokens)],
            );
            assert_eq!(served[0].tokens.len(), num_tokens as usize);
            count("FAIL_LAUNCH") - before
        };
        assert_eq!(num_launches(8, 40) - num_launches(8, 20), 20);
        assert!(num_launches(0, 40) - num_launches(0, 20) > 10 * 20);
        // Graphs are recorded when the model is loaded: no step pays for it, not even the first one. The step of the
        // prompt is launched operation by operation.
        let first = num_launches(8, 2) - num_launches(8, 1);
        assert_eq!(first, 1, "launches of the first generation step");
    });
}

/// Requests for several numbers of rows, in sequences of one split and of two, find their graphs.
#[test]
fn graphs_of_all_shapes_are_recorded_at_load() {
    let test = "cuda::graphs_of_all_shapes_are_recorded_at_load";
    on_stand_in(StandIn::new(), test, || {
        let model = Copy::of("llama3").config(json!({ "max_position_embeddings": 512 }));
        let setup = Setup {
            max_num_requests: 3,
            max_seq_len: 300,
            ..Setup::default()
        };
        let mut runner = setup.load_on::<Cuda>(model.dir(), &CudaOptions::default());
        for num_requests in [1, 3] {
            for prompt_len in [4, 260] {
                let prompt: Vec<_> = (0..prompt_len).map(|i| i % 60 + 3).collect();
                let mut num_launches = |num_tokens| {
                    let requests = vec![Request::greedy(&prompt, num_tokens); num_requests];
                    let before = count("FAIL_LAUNCH");
                    serve(&mut runner, &setup, &requests);
                    count("FAIL_LAUNCH") - before
                };
                let num_steps = num_launches(3) - num_launches(1);
                assert_eq!(
                    num_steps, 2,
                    "{num_requests} requests of {prompt_len} tokens"
                );
            }
        }
    });
}
