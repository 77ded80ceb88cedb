//! The cache file of rounded weights, on the stand-in for a GPU.

use std::fs;

use inflight_cuda_stand_in::{StandIn, count, set};
use inflight_device_cuda::CudaOptions;
use inflight_machines::load_on_gpu;
use inflight_numbers::CodeBits;
use inflight_runner::{ModelSource, WeightPrecision};
use log::Level;

use crate::copy::Copy;
use crate::cuda::on_stand_in;
use crate::cuda_fp8::with_fp8_activations;
use crate::log_lines;
use crate::support::{Request, Served, Setup, fixture, serve};
use crate::weight_cache::{Cache, answer, made_from, with_made_from};

/// The tokens and logits of a model loaded with or without a cache.
fn answer_on_gpu(
    name: &str,
    setup: &Setup,
    options: &CudaOptions,
    cache: Option<&Cache>,
) -> Served {
    let mut source = ModelSource::open(&fixture(name)).expect("the checkpoint opens");
    if let Some(cache) = cache {
        source = source.with_weight_cache(cache.setting().to_owned(), 0o600);
    }
    let runner = load_on_gpu(&source, setup.runner_limits(), options);
    let mut runner = runner.expect("it loads");
    let request = Request::greedy(&[3, 14, 15, 9, 26], 12);
    serve(&mut runner, setup, &[request]).0.remove(0)
}

fn rounded(bits: CodeBits, group_size: usize) -> Setup {
    Setup {
        weights: Some(WeightPrecision { bits, group_size }),
        ..Setup::default()
    }
}

#[test]
fn a_gpu_reads_the_weights_that_it_has_rounded_before() {
    let test = "cuda_weight_cache::a_gpu_reads_the_weights_that_it_has_rounded_before";
    on_stand_in(StandIn::new(), test, || {
        let bf16 = CudaOptions::default();
        for (name, bits, group_size, options) in [
            ("llama3", CodeBits::Four, 32, &bf16),
            ("qwen2", CodeBits::Eight, 64, &bf16),
            ("qwen2", CodeBits::Fp8, 32, &bf16),
            (
                "qwen2",
                CodeBits::Fp8,
                WeightPrecision::WHOLE_ROWS,
                &with_fp8_activations(),
            ),
        ] {
            let cache = Cache::of_gpu(&format!("gpu-{name}-{bits:?}-{group_size}"));
            let setup = rounded(bits, group_size);
            let answer = |cache| answer_on_gpu(name, &setup, options, cache);
            let expected = answer(None);
            assert_eq!(answer(Some(&cache)), expected);
            cache.was_written();
            assert_eq!(answer(Some(&cache)), expected);
            cache.was_read();
        }
    });
}

#[test]
fn a_gpu_replaces_a_foreign_or_damaged_file() {
    let test = "cuda_weight_cache::a_gpu_replaces_a_foreign_or_damaged_file";
    on_stand_in(StandIn::new(), test, || {
        let cache = Cache::of_gpu("gpu-damaged");
        let setup = rounded(CodeBits::Four, 32);
        let options = CudaOptions::default();
        let answer = || answer_on_gpu("llama3", &setup, &options, Some(&cache));
        let expected = answer();
        cache.was_written();
        let whole = fs::read(cache.path()).expect("the file");
        let mut damaged = whole.clone();
        *damaged.last_mut().expect("not empty") ^= 0x40;
        let foreign = fs::read(fixture("llama3").join("model.safetensors")).expect("the file");
        for (bytes, level, reason) in [
            (&damaged[..], Level::Warn, "is damaged"),
            (&whole[..whole.len() - 5], Level::Warn, "is not a whole"),
            (&foreign, Level::Info, "was made from another"),
        ] {
            fs::write(cache.path(), bytes).expect("written");
            assert_eq!(answer(), expected);
            cache.was_replaced(level, reason);
            assert_eq!(answer(), expected);
            cache.was_read();
        }
    });
}

#[test]
fn the_weights_in_the_file_are_those_that_a_gpu_computes_with() {
    let test = "cuda_weight_cache::the_weights_in_the_file_are_those_that_a_gpu_computes_with";
    on_stand_in(StandIn::new(), test, || {
        let setup = rounded(CodeBits::Eight, 32);
        let options = CudaOptions::default();
        let [ours, theirs] = ["gpu-ours", "gpu-theirs"].map(Cache::of_gpu);
        let expected = answer_on_gpu("qwen2", &setup, &options, Some(&ours));
        // Another model's file, relabelled as this one's.
        let zeroed = Copy::of("qwen2").tensor("model.layers.0.self_attn.o_proj.weight", |view| {
            let zeros = vec![0; view.data().len()];
            Some((view.dtype(), view.shape().to_vec(), zeros))
        });
        let source = ModelSource::open(zeroed.dir()).expect("the checkpoint opens");
        let source = source.with_weight_cache(theirs.setting().to_owned(), 0o600);
        load_on_gpu(&source, setup.runner_limits(), &options).expect("it loads");
        with_made_from(theirs.path(), &made_from(ours.path()));
        fs::rename(theirs.path(), ours.path()).expect("renamed");
        let with_theirs = answer_on_gpu("qwen2", &setup, &options, Some(&ours));
        assert_ne!(with_theirs.logits, expected.logits);
    });
}

#[test]
fn cpus_and_gpus_have_files_of_their_own() {
    let test = "cuda_weight_cache::cpus_and_gpus_have_files_of_their_own";
    on_stand_in(StandIn::new(), test, || {
        let on_gpu = Cache::of_gpu("both");
        let on_cpu = on_gpu.of_cpu();
        let setup = rounded(CodeBits::Eight, WeightPrecision::WHOLE_ROWS);
        let options = CudaOptions::default();
        for was_kept in [false, true] {
            answer(&fixture("qwen2"), &setup, Some(on_gpu.setting()));
            answer_on_gpu("qwen2", &setup, &options, Some(&on_gpu));
            for cache in [&on_cpu, &on_gpu] {
                match was_kept {
                    false => cache.was_written(),
                    true => cache.was_read(),
                }
            }
        }
    });
}

/// Weights for FP8 activations lie in another order.
#[test]
fn fp8_activations_replace_the_file() {
    let test = "cuda_weight_cache::fp8_activations_replace_the_file";
    on_stand_in(StandIn::new(), test, || {
        let cache = Cache::of_gpu("gpu-fp8");
        let setup = rounded(CodeBits::Fp8, WeightPrecision::WHOLE_ROWS);
        let options = [CudaOptions::default(), with_fp8_activations()];
        for (index, options) in options.iter().cycle().take(3).enumerate() {
            let expected = answer_on_gpu("qwen2", &setup, options, None);
            let served = answer_on_gpu("qwen2", &setup, options, Some(&cache));
            assert_eq!(served, expected);
            match index {
                0 => cache.was_written(),
                _ => cache.was_replaced(Level::Info, "another precision"),
            }
        }
    });
}

#[test]
fn a_gpu_that_is_lost_leaves_a_whole_file_or_none() {
    let test = "cuda_weight_cache::a_gpu_that_is_lost_leaves_a_whole_file_or_none";
    on_stand_in(StandIn::new(), test, || {
        let cache = Cache::of_gpu("gpu-lost");
        let setup = rounded(CodeBits::Eight, 32);
        let options = CudaOptions {
            max_graphs: 0,
            ..CudaOptions::default()
        };
        let load = || {
            let source = ModelSource::open(&fixture("qwen2")).expect("the checkpoint opens");
            let source = source.with_weight_cache(cache.setting().to_owned(), 0o600);
            load_on_gpu(&source, setup.runner_limits(), &options)
        };
        const STEP: usize = 5;
        drop(load().expect("it loads"));
        fs::remove_file(cache.path()).expect("the file");
        let before = count("LOSE_DEVICE");
        let loaded = load().expect("it loads");
        let num_operations = count("LOSE_DEVICE") - before;
        drop(loaded);
        let mut num_unwritten = 0;
        for failing in (1..=num_operations).step_by(STEP) {
            let _ = fs::remove_file(cache.path());
            set("LOSE_DEVICE", failing);
            assert!(load().is_err(), "operation {failing} of {num_operations}");
            drop(load().expect("it loads"));
            let lines = log_lines::take(&cache.path().display().to_string());
            let num = |part| lines.iter().filter(|(_, line)| line.contains(part)).count();
            assert_eq!(num("is damaged"), 0, "operation {failing}: {lines:?}");
            num_unwritten += num("cannot be written");
        }
        assert!(
            num_unwritten > 0,
            "the GPU was never lost while its weights were read"
        );
    });
}
