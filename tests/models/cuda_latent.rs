//! Latent attention on the stand-in for a GPU; `cuda.rs` compares it with transformers.

use half::bf16;
use inflight_cuda_stand_in::StandIn;
use inflight_device::KvDtype;
use inflight_device_cuda::{Cuda, CudaOptions};
use inflight_machines::load_on_gpu;
use inflight_numbers::CodeBits;
use inflight_runner::{ModelSource, WeightPrecision};
use serde_json::json;

use crate::copy::Copy;
use crate::cuda::on_any_gpu;
use crate::cuda_experts::with_all_experts;
use crate::cuda_quantised::{TOLERANCE, long_requests, wide};
use crate::devices::{
    assert_agrees_with_reference, assert_devices_agree, assert_host_blocks_change_nothing,
    assert_same_alone, assert_same_bits, requests, setups,
};
use crate::support::{Request, Setup, fixture, serve};

const NAMES: [&str; 3] = ["deepseek-v2", "deepseek-v2-lite", "deepseek-v3"];

fn deterministic() -> CudaOptions {
    CudaOptions {
        deterministic: true,
        ..CudaOptions::default()
    }
}

/// Those with a cache that latents can be in.
fn latent_setups() -> impl Iterator<Item = (&'static str, Setup)> {
    let all = setups().into_iter();
    all.filter(|(_, setup)| setup.kv_dtype == KvDtype::Bf16)
}

/// A model of 32 heads, which are two groups.
fn with_many_heads() -> Copy {
    const NUM_HEADS: usize = 32;
    let mut state = 7_u32;
    let mut random = move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 24) as f32 - 0.5
    };
    let sizes = json!({"num_attention_heads": NUM_HEADS, "num_key_value_heads": NUM_HEADS});
    let mut copy = with_all_experts("deepseek-v2-lite").config(sizes);
    for layer in 0..2 {
        for (name, shape) in [
            ("q_proj", [NUM_HEADS * 12, 40]),
            ("kv_b_proj", [NUM_HEADS * 14, 26]),
            ("o_proj", [40, NUM_HEADS * 6]),
        ] {
            let scale = 2.0 / (shape[1] as f32).sqrt();
            let weights = (0..shape[0] * shape[1]).map(|_| bf16::from_f32(random() * scale));
            let bytes = weights.flat_map(bf16::to_le_bytes).collect();
            let name = format!("model.layers.{layer}.self_attn.{name}.weight");
            copy = copy.tensor(&name, |old| Some((old.dtype(), shape.to_vec(), bytes)));
        }
    }
    copy
}

/// In chunks; with blocks that are copied, and drafts; with windows and sinks, of which some blocks are given back.
#[test]
fn latent_attention_agrees_with_the_reference_device() {
    let test = "cuda_latent::latent_attention_agrees_with_the_reference_device";
    on_any_gpu(StandIn::new(), test, || {
        let options = CudaOptions::default();
        for name in NAMES {
            let copy = with_all_experts(name);
            for (what, setup) in latent_setups() {
                let what = format!("{name}, {what}");
                let requests = [requests(), long_requests()].concat();
                assert_agrees_with_reference::<Cuda>(
                    &what,
                    copy.dir(),
                    &options,
                    &setup,
                    &requests,
                    0.1,
                );
            }
        }
    });
}

#[test]
fn a_request_has_the_same_bits_alone_with_latent_attention() {
    let test = "cuda_latent::a_request_has_the_same_bits_alone_with_latent_attention";
    on_any_gpu(StandIn::new().set("SEED", 13), test, || {
        for (name, (what, setup)) in NAMES.into_iter().zip(latent_setups()) {
            let what = format!("{name}, {what}");
            let options = deterministic();
            assert_same_alone::<Cuda>(&what, &fixture(name), &options, &setup, requests());
        }
    });
}

/// Positions from 256 on have splits of their own. With memory for many rows, the two groups are computed one after the
/// other.
#[test]
fn groups_of_heads_give_the_same_bits_one_after_the_other() {
    let test = "cuda_latent::groups_of_heads_give_the_same_bits_one_after_the_other";
    on_any_gpu(StandIn::new(), test, || {
        let copy = with_many_heads();
        let request = |len: u32| {
            let prompt: Vec<_> = (0..len).map(|i| (i * 37 + 11) % 90 + 3).collect();
            Request::greedy(&prompt, 3)
        };
        let requests = [request(262), request(30)];
        let setup = |max_num_tokens| Setup {
            max_seq_len: 320,
            num_blocks: 64,
            ..wide(&Setup::default(), max_num_tokens)
        };
        let served = |max_num_tokens, options: &CudaOptions| {
            let setup = setup(max_num_tokens);
            let mut runner = setup.load_on::<Cuda>(copy.dir(), options);
            serve(&mut runner, &setup, &requests).0
        };
        let together = served(100, &deterministic());
        for (together, apart) in together.iter().zip(&served(1 << 16, &deterministic())) {
            assert_same_bits("one after the other", together, apart);
        }
        let options = CudaOptions::default();
        let setup = setup(100);
        assert_agrees_with_reference::<Cuda>(
            "32 heads",
            copy.dir(),
            &options,
            &setup,
            &requests,
            0.1,
        );
    });
}

#[test]
fn graphs_change_no_bits_of_latent_attention() {
    let test = "cuda_latent::graphs_change_no_bits_of_latent_attention";
    on_any_gpu(StandIn::new().set("SEED", 9), test, || {
        let requests: Vec<_> = (0..12)
            .map(|index| {
                let prompt: Vec<_> = (0..5 + index).map(|i| (i * 17 + index) % 90 + 3).collect();
                Request::greedy(&prompt, 4 + index % 5)
            })
            .collect();
        let setup = Setup {
            max_num_requests: 12,
            ..Setup::default()
        };
        let served = |max_graphs| {
            let options = CudaOptions {
                max_graphs,
                ..deterministic()
            };
            let mut runner = setup.load_on::<Cuda>(&fixture("deepseek-v3"), &options);
            serve(&mut runner, &setup, &requests).0
        };
        for (with, without) in served(16).iter().zip(&served(0)) {
            assert_same_bits("with graphs", with, without);
        }
    });
}

#[test]
fn latents_that_come_back_from_pinned_memory_give_the_same_bits() {
    let test = "cuda_latent::latents_that_come_back_from_pinned_memory_give_the_same_bits";
    on_any_gpu(StandIn::new().set("SEED", 11), test, || {
        let dtypes = [KvDtype::Bf16];
        assert_host_blocks_change_nothing::<Cuda>("deepseek-v2", &deterministic(), &dtypes);
    });
}

/// The matrices of heads are rounded as those of experts, in groups that end within their inputs.
#[test]
fn quantised_heads_agree_with_the_reference_device() {
    let test = "cuda_latent::quantised_heads_agree_with_the_reference_device";
    on_any_gpu(StandIn::new(), test, || {
        let options = CudaOptions::default();
        for (name, bits) in [
            ("deepseek-v2", CodeBits::Eight),
            ("deepseek-v2-lite", CodeBits::Four),
            ("deepseek-v3", CodeBits::Fp8),
        ] {
            let group_size = 32;
            let setup = Setup {
                weights: Some(WeightPrecision { bits, group_size }),
                ..wide(&Setup::default(), 256)
            };
            let copy = with_all_experts(name);
            let requests = [requests(), long_requests()].concat();
            let what = format!("{name}, {bits:?}");
            assert_agrees_with_reference::<Cuda>(
                &what,
                copy.dir(),
                &options,
                &setup,
                &requests,
                TOLERANCE,
            );
        }
    });
}

#[test]
fn latents_are_stored_in_bf16_only_on_a_gpu() {
    let test = "cuda_latent::latents_are_stored_in_bf16_only_on_a_gpu";
    on_any_gpu(StandIn::new(), test, || {
        let options = CudaOptions::default();
        let source = ModelSource::open(&fixture("deepseek-v2")).expect("the fixture opens");
        for (name, kv_dtype) in [("int8", KvDtype::Int8), ("fp8", KvDtype::Fp8)] {
            let setup = Setup {
                kv_dtype,
                ..Setup::default()
            };
            let error = load_on_gpu(&source, setup.runner_limits(), &options).err();
            let error = error.expect("refused").to_string();
            for part in [
                &format!("kv_cache_dtype is {name}"),
                "latents",
                "write bf16",
            ] {
                assert!(error.contains(part), "{error}");
            }
        }
        // The GPU is as good as before.
        assert_devices_agree::<Cuda>("llama3", &options);
    });
}
