//! Quantised weights on the stand-in for a GPU.

use std::path::Path;

use inflight_device_cuda::{Cuda, CudaOptions, free_memory_bytes};
use inflight_engine::OutputOptions;
use inflight_machines::{CudaRunner, load_on_gpu, num_step_bytes};
use inflight_numbers::CodeBits;
use inflight_runner::{CpuRunner, ModelSource, WeightPrecision};

use inflight_cuda_stand_in::StandIn;
use serde_json::json;

use crate::copy::Copy;
use crate::cuda::{on_any_gpu, on_stand_in};
use crate::cuda_fp8::with_fp8_activations;
use crate::devices::{assert_agrees_with_reference, assert_same_alone, requests, setups};
use crate::fp8::{Scales, copies, copies_with_blocks_of_128};
use crate::support::{Request, Setup, fixture};

const CHECKPOINTS: [&str; 14] = [
    "awq",
    "bnb-int8",
    "bnb-nf4",
    "compressed-w4a16",
    "compressed-w8a8",
    "gguf-iq4_nl",
    "gguf-mixed",
    "gguf-q3_k",
    "gguf-q4_0-split",
    "gguf-q4_k",
    "gguf-q8_0",
    "gptq",
    "gptq-8bit-v2",
    "gptq-act-order",
];

/// Logits are up to 4.7; rounding to bf16 changes those of these checkpoints by up to 0.16 (`bf16_cost` in their
/// expected.json), and each device rounds in places of its own.
pub const TOLERANCE: f32 = 0.2;

fn options(deterministic: bool) -> CudaOptions {
    CudaOptions {
        deterministic,
        ..CudaOptions::default()
    }
}

fn assert_agrees(what: &str, dir: &Path, setup: &Setup, requests: &[Request]) {
    assert_agrees_with_reference::<Cuda>(what, dir, &options(false), setup, requests, TOLERANCE);
}

/// A setup whose steps have up to this many tokens.
pub fn wide(setup: &Setup, max_num_tokens: u32) -> Setup {
    Setup {
        max_num_tokens,
        enable_chunked_context: true,
        ..setup.clone()
    }
}

/// Requests whose prompts are computed in few large steps.
pub fn long_requests() -> Vec<Request> {
    (0..3)
        .map(|index| {
            let prompt: Vec<_> = (0..60 + index)
                .map(|i| (i * 37 + 11 * index) % 60 + 3)
                .collect();
            Request {
                outputs: OutputOptions {
                    context_logits: index % 2 == 1,
                    ..OutputOptions::default()
                },
                ..Request::greedy(&prompt, 5)
            }
        })
        .collect()
}

/// On both devices weights are those of the checkpoint and activations are bf16, whether few rows are multiplied or
/// many.
#[test]
fn quantised_checkpoints_on_a_gpu_agree_with_the_reference_device() {
    let test = "cuda_quantised::quantised_checkpoints_on_a_gpu_agree_with_the_reference_device";
    on_any_gpu(StandIn::new(), test, || {
        for name in CHECKPOINTS {
            let folder = fixture("quantised").join(name);
            for (what, max_num_tokens) in [("few rows", 24), ("many rows", 256)] {
                let setup = wide(&Setup::default(), max_num_tokens);
                assert_agrees(
                    &format!("{name}, {what}"),
                    &folder,
                    &setup,
                    &long_requests(),
                );
            }
        }
    });
}

#[test]
fn weights_rounded_at_load_on_a_gpu_agree_with_the_reference_device() {
    let test = "cuda_quantised::weights_rounded_at_load_on_a_gpu_agree_with_the_reference_device";
    on_any_gpu(StandIn::new(), test, || {
        // qwen2 has biases, llama3 a tied embedding, and qwen3 norms of heads.
        for (name, bits) in [
            ("qwen2", CodeBits::Eight),
            ("llama3", CodeBits::Four),
            ("qwen2", CodeBits::Fp8),
            ("qwen3", CodeBits::Eight),
        ] {
            let setup = Setup {
                weights: Some(WeightPrecision::new(bits)),
                ..wide(&Setup::default(), 256)
            };
            let requests = [requests(), long_requests()].concat();
            assert_agrees(name, &fixture(name), &setup, &requests);
        }
    });
}

/// Checkpoints of 8-bit floats, and how their scales are named and described.
pub fn fp8_checkpoint(scales: Scales) -> Copy {
    let (scale_name, config) = match scales {
        Scales::Blocks(size) => (
            "weight_scale_inv",
            json!({"quant_method": "fp8", "weight_block_size": size}),
        ),
        Scales::Tensor | Scales::Channels => ("weight_scale", json!({"quant_method": "fp8"})),
    };
    let [checkpoint, _] = copies(scales, scale_name, config);
    checkpoint
}

#[test]
fn fp8_checkpoints_stay_fp8_on_a_gpu() {
    let test = "cuda_quantised::fp8_checkpoints_stay_fp8_on_a_gpu";
    on_any_gpu(StandIn::new(), test, || {
        // Groups of 40 inputs are no multiple of 32: these are bf16.
        let kinds = [
            (Scales::Tensor, true),
            (Scales::Channels, true),
            (Scales::Blocks([24, 32]), true),
            (Scales::Blocks([24, 40]), false),
        ];
        let [large_blocks, _] = copies_with_blocks_of_128();
        let large_blocks = ("blocks of 128".to_owned(), large_blocks, true);
        let checkpoints = kinds.map(|(scales, stays_fp8)| {
            let checkpoint = fp8_checkpoint(scales);
            (format!("{scales:?}"), checkpoint, stays_fp8)
        });
        for (scales, checkpoint, stays_fp8) in checkpoints.into_iter().chain([large_blocks]) {
            let source = ModelSource::open(checkpoint.dir()).expect("the checkpoint opens");
            let on_gpu = CudaRunner::num_weight_bytes(&source, None).expect("all tensors");
            let in_bf16 = source.num_weight_bytes(None).expect("all tensors");
            assert_eq!(4 * on_gpu < 3 * in_bf16, stays_fp8, "{on_gpu}, {in_bf16}");
            for (what, max_num_tokens) in [("few rows", 24), ("many rows", 256)] {
                let setup = wide(&Setup::default(), max_num_tokens);
                let what = format!("{scales}, {what}");
                assert_agrees(&what, checkpoint.dir(), &setup, &long_requests());
            }
        }
    });
}

#[test]
fn fp8_codes_that_are_not_numbers_are_found_on_a_gpu() {
    let test = "cuda_quantised::fp8_codes_that_are_not_numbers_are_found_on_a_gpu";
    on_any_gpu(StandIn::new(), test, || {
        let weight = "model.layers.0.mlp.up_proj.weight";
        let copy = fp8_checkpoint(Scales::Channels).tensor(weight, |view| {
            let mut data = view.data().to_vec();
            data[3 * view.shape()[1]] = 0xff;
            Some((view.dtype(), view.shape().to_vec(), data))
        });
        let source = ModelSource::open(copy.dir()).expect("the checkpoint opens");
        for options in [options(false), with_fp8_activations()] {
            let limits = Setup::default().runner_limits();
            let Err(error) = load_on_gpu(&source, limits, &options) else {
                panic!("it loads");
            };
            let error = error.to_string();
            for part in [weight, "row 3", "NaN"] {
                assert!(error.contains(part), "'{part}' is not in: {error}");
            }
        }
    });
}

#[test]
fn a_request_alone_gives_the_same_bits_with_quantised_weights() {
    let test = "cuda_quantised::a_request_alone_gives_the_same_bits_with_quantised_weights";
    on_any_gpu(StandIn::new().set("SEED", 3), test, || {
        let [(_, tight), ..] = &setups()[..] else {
            unreachable!("there are setups");
        };
        for name in ["gptq-act-order", "gguf-mixed", "compressed-w8a8"] {
            let folder = fixture("quantised").join(name);
            for (what, setup) in [
                ("chunks", tight.clone()),
                ("many rows", wide(&Setup::default(), 256)),
            ] {
                let what = format!("{name}, {what}");
                assert_same_alone::<Cuda>(&what, &folder, &options(true), &setup, long_requests());
            }
        }
    });
}

#[test]
fn floats_of_four_bits_are_counted_with_four_bits_on_a_gpu() {
    // Its `o`, gate and up projections are in MXFP4, which a CPU keeps in 8 bits.
    let source = ModelSource::open(&fixture("quantised/gguf-iq4_nl")).expect("the file opens");
    let spec = source.spec();
    let inner = spec.max_intermediate_size();
    let in_layer = spec.hidden_size * (spec.num_heads * spec.head_dim + 2 * inner);
    let on_cpu = CpuRunner::num_weight_bytes(&source, None).expect("all tensors");
    let on_gpu = CudaRunner::num_weight_bytes(&source, None).expect("all tensors");
    assert_eq!(on_cpu - on_gpu, (spec.layers.len() * in_layer / 2) as u64);
}

/// The KV cache gets what is left, so that no less may be counted than is reserved.
#[test]
fn the_memory_of_quantised_products_is_counted() {
    let test = "cuda_quantised::the_memory_of_quantised_products_is_counted";
    on_stand_in(StandIn::new(), test, || {
        let memory = |folder: &Path, setup: &Setup, options: &CudaOptions| {
            let source = ModelSource::open(folder).expect("the checkpoint opens");
            let limits = setup.runner_limits();
            let counted = num_step_bytes(&source, &limits, options).expect("all tensors");
            let free = || free_memory_bytes(0).expect("a GPU");
            let before = free();
            let runner = load_on_gpu(&source, limits, options);
            let runner = runner.expect("the checkpoint loads");
            let taken = before - free();
            drop(runner);
            (counted, taken)
        };
        let setup = wide(&Setup::default(), 256);
        let bf16 = options(false);
        let (floats_counted, floats_taken) = memory(&fixture("llama2"), &setup, &bf16);
        let fp8 = fp8_checkpoint(Scales::Channels);
        let quantised = ["gptq", "gptq-act-order"].map(|name| fixture("quantised").join(name));
        for (folder, options) in [
            (quantised[0].as_path(), &bf16),
            (quantised[1].as_path(), &bf16),
            (fp8.dir(), &with_fp8_activations()),
        ] {
            let (counted, taken) = memory(folder, &setup, options);
            let (counted, taken) = (counted - floats_counted, taken - floats_taken);
            println!(
                "{}: {counted} bytes counted, {taken} taken",
                folder.display()
            );
            // Weights of all are smaller than this.
            let weights = 1 << 20;
            assert!(
                taken > 16 << 20 && taken <= counted + weights,
                "{taken} of {counted}"
            );
        }
    });
}

#[test]
fn damaged_scales_are_found_on_a_gpu() {
    let test = "cuda_quantised::damaged_scales_are_found_on_a_gpu";
    on_any_gpu(StandIn::new(), test, || {
        let module = "model.layers.1.mlp.up_proj";
        let copy = Copy::of("quantised/gptq").tensor(&format!("{module}.scales"), |view| {
            let mut data = view.data().to_vec();
            data[2 * 17..][..2].copy_from_slice(&0x7e00_u16.to_le_bytes());
            Some((view.dtype(), view.shape().to_vec(), data))
        });
        let source = ModelSource::open(copy.dir()).expect("the checkpoint opens");
        let limits = Setup::default().runner_limits();
        let Err(error) = load_on_gpu(&source, limits, &options(false)) else {
            panic!("it loads");
        };
        let error = error.to_string();
        for part in [module, "output 17", "a scale or an offset that is NaN"] {
            assert!(error.contains(part), "'{part}' is not in: {error}");
        }
    });
}
