//! Mixtures of experts on several GPUs, each of which has a part of the inside of every expert, and latent attention.

use half::bf16;
use inflight_cuda_stand_in::StandIn;
use inflight_device_cuda::Cuda;
use inflight_numbers::CodeBits;
use inflight_runner::WeightPrecision;
use safetensors::tensor::TensorView;
use serde_json::json;

use crate::copy::Copy;
use crate::cuda::on_stand_in;
use crate::cuda_experts::with_all_experts;
use crate::cuda_quantised::{TOLERANCE, wide};
use crate::cuda_ranks::{load, options, serve_dir_on};
use crate::devices::{assert_near, requests, setups};
use crate::fp8::{Scales, copies_of};
use crate::ranks::{PATIENT, assert_same, on_ranks};
use crate::support::{Setup, fixture, serve};

/// qwen2-moe, with two elements inside its shared expert.
fn with_narrow_shared_expert() -> Copy {
    const WIDTH: usize = 2;
    let mut copy =
        with_all_experts("qwen2-moe").config(json!({"shared_expert_intermediate_size": WIDTH}));
    // The first elements of each row.
    let narrow = |old: TensorView<'_>, shape: [usize; 2]| {
        let rows = old.data().chunks(2 * old.shape()[1]);
        let kept = rows
            .take(shape[0])
            .flat_map(|row| row[..2 * shape[1]].to_vec());
        (old.dtype(), shape.to_vec(), kept.collect())
    };
    for layer in [0, 2] {
        for (name, shape) in [
            ("gate_proj", [WIDTH, 32]),
            ("up_proj", [WIDTH, 32]),
            ("down_proj", [32, WIDTH]),
        ] {
            let name = format!("model.layers.{layer}.mlp.shared_expert.{name}.weight");
            copy = copy.tensor(&name, |old| Some(narrow(old, shape)));
        }
    }
    copy
}

/// qwen2-moe, with so many elements inside its experts: the rows and columns of the fixture again and again, in other
/// sizes.
fn with_wide_experts(width: usize) -> Copy {
    const NUM_EXPERTS: usize = 7;
    let mut copy = with_all_experts("qwen2-moe").config(json!({"moe_intermediate_size": width}));
    let wider = |old: TensorView<'_>, [rows, columns]: [usize; 2]| {
        let (old_rows, old_columns) = (old.shape()[0], old.shape()[1]);
        let value = |row: usize, column: usize| {
            let at = 2 * (row % old_rows * old_columns + column % old_columns);
            let value = bf16::from_le_bytes([old.data()[at], old.data()[at + 1]]).to_f32();
            bf16::from_f32(value * (0.3 + 0.1 * ((row * 7 + column * 3) % 5) as f32))
        };
        let values = (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column)));
        let bytes = values.flat_map(|(row, column)| value(row, column).to_le_bytes());
        (old.dtype(), vec![rows, columns], bytes.collect())
    };
    for (layer, expert) in [0, 2]
        .into_iter()
        .flat_map(|layer| (0..NUM_EXPERTS).map(move |expert| (layer, expert)))
    {
        for (name, shape) in [
            ("gate_proj", [width, 32]),
            ("up_proj", [width, 32]),
            ("down_proj", [32, width]),
        ] {
            let name = format!("model.layers.{layer}.mlp.experts.{expert}.{name}.weight");
            copy = copy.tensor(&name, |old| Some(wider(old, shape)));
        }
    }
    copy
}

/// phimoe, with two experts that weigh 1 each: whatever the router says, a row has the same.
fn with_two_equal_experts() -> Copy {
    let config = json!({"num_local_experts": 2, "router_jitter_noise": 0.0});
    let mut copy = Copy::of("phimoe").config(config);
    for layer in [0, 1] {
        let name = format!("model.layers.{layer}.block_sparse_moe.gate.weight");
        copy = copy.tensor(&name, |old| {
            let row_bytes = 2 * old.shape()[1];
            let rows = old.data()[..2 * row_bytes].to_vec();
            Some((old.dtype(), vec![2, old.shape()[1]], rows))
        });
    }
    copy
}

/// Chosen by each rule, with shared experts, of which a GPU may have nothing, with biases, which one GPU adds, and with
/// latents, which each GPU has for its heads.
#[test]
fn several_gpus_have_parts_of_experts() {
    let test = "cuda_rank_experts::several_gpus_have_parts_of_experts";
    on_stand_in(StandIn::new().set("DEVICES", 4), test, || {
        let setups = setups();
        for (name, copy, num_ranks, (what, setup), deterministic) in [
            ("mixtral", with_all_experts("mixtral"), 2, &setups[0], false),
            (
                "qwen2-moe",
                with_all_experts("qwen2-moe"),
                3,
                &setups[1],
                true,
            ),
            (
                "narrow shared expert",
                with_narrow_shared_expert(),
                2,
                &setups[0],
                true,
            ),
            ("gpt-oss", with_all_experts("gpt-oss"), 2, &setups[2], false),
            (
                "deepseek-v2",
                with_all_experts("deepseek-v2"),
                2,
                &setups[1],
                true,
            ),
            (
                "deepseek-v2-lite",
                with_all_experts("deepseek-v2-lite"),
                3,
                &setups[0],
                false,
            ),
            (
                "deepseek-v3",
                with_all_experts("deepseek-v3"),
                2,
                &setups[2],
                true,
            ),
            ("phimoe", with_two_equal_experts(), 4, &setups[0], true),
        ] {
            let dir = copy.dir();
            let (ours, _) = serve(&mut setup.load_from(dir), setup, &requests());
            let how = (deterministic, 64);
            let theirs = serve_dir_on(dir, setup, &requests(), num_ranks, how);
            let what = format!("{name}, {what}, {num_ranks} GPUs");
            assert_near(&what, &ours, &theirs, 0.1);
        }
    });
}

#[test]
fn a_request_has_the_same_bits_alone_with_parts_of_experts() {
    let test = "cuda_rank_experts::a_request_has_the_same_bits_alone_with_parts_of_experts";
    on_stand_in(
        StandIn::new().set("DEVICES", 3).set("SEED", 13),
        test,
        || {
            for (name, num_ranks) in [("qwen2-moe", 2), ("gpt-oss-mxfp4", 3), ("deepseek-v3", 2)] {
                let dir = fixture(name);
                let (_, setup) = setups().swap_remove(0);
                let together = serve_dir_on(&dir, &setup, &requests(), num_ranks, (true, 64));
                let launched = serve_dir_on(&dir, &setup, &requests(), num_ranks, (true, 0));
                assert_same(&format!("{name} without graphs"), &together, &launched);
                let alone = Setup {
                    max_num_requests: 1,
                    enable_chunked_context: false,
                    max_num_tokens: 256,
                    ..setup
                };
                for (request, together) in requests().iter().zip(together).take(2) {
                    let request = std::slice::from_ref(request);
                    let alone = serve_dir_on(&dir, &alone, request, num_ranks, (true, 64));
                    assert_same(&format!("{name} alone"), &alone, &[together]);
                }
            }
        },
    );
}

/// Of a checkpoint in FP8 blocks and one in MXFP4, and rounded to 8 bits.
#[test]
fn several_gpus_have_parts_of_quantised_experts() {
    let test = "cuda_rank_experts::several_gpus_have_parts_of_quantised_experts";
    on_stand_in(StandIn::new().set("DEVICES", 3), test, || {
        let stored = wide(&Setup::default(), 256);
        let rounded = Setup {
            weights: Some(WeightPrecision {
                bits: CodeBits::Eight,
                group_size: 32,
            }),
            ..stored.clone()
        };
        let blocks = json!({"quant_method": "fp8", "weight_block_size": [24, 8]});
        let config = json!({"quantization_config": blocks, "num_experts_per_tok": 6});
        let [fp8, _] = copies_of("olmoe", Scales::Blocks([24, 8]), "weight_scale_inv", blocks);
        for (name, copy, setup, num_ranks) in [
            (
                "gpt-oss-mxfp4",
                with_all_experts("gpt-oss-mxfp4"),
                &stored,
                3,
            ),
            ("FP8 blocks", fp8.config(config), &stored, 2),
            ("mixtral", with_all_experts("mixtral"), &rounded, 2),
        ] {
            let dir = copy.dir();
            let what = format!("{name}, {:?}, {num_ranks} GPUs", setup.weights);
            let mut one = setup.load_on::<Cuda>(dir, &options(0, true, 64));
            let (expected, _) = serve(&mut one, setup, &requests());
            let together = serve_dir_on(dir, setup, &requests(), num_ranks, (true, 64));
            assert_near(&what, &expected, &together, TOLERANCE);
            let alone = serve_dir_on(dir, setup, &requests()[1..2], num_ranks, (true, 0));
            assert_same(&what, &alone, &together[1..2]);
        }
    });
}

/// Where each GPU chooses experts by itself, all have to compute the same.
#[test]
fn gpus_of_two_kinds_are_refused_where_each_chooses_experts() {
    let test = "cuda_rank_experts::gpus_of_two_kinds_are_refused_where_each_chooses_experts";
    let two_kinds = StandIn::new().set("DEVICES", 2).set("OTHER_CAPABILITY", 80);
    on_stand_in(two_kinds, test, || {
        let setup = Setup::default();
        let results = |name: &str| {
            on_ranks(2, |rank| {
                let options = options(rank.rank, false, 0);
                let loaded = load(&fixture(name), &setup, &options, rank, PATIENT);
                loaded.map(drop).map_err(|error| error.to_string())
            })
        };
        let [first, second] = results("mixtral").try_into().expect("two ranks");
        let (first, second) = (first.expect_err("refused"), second.expect_err("refused"));
        let kinds = "rank 1 has a GPU of compute capability 8.0 with 132 multiprocessors, and rank 0 a GPU of compute \
                     capability 9.0 with 132 multiprocessors";
        for error in [&first, &second] {
            assert!(error.contains(kinds), "{error}");
        }
        assert!(
            second.contains("set gpu_device_ids to GPUs of one kind"),
            "{second}"
        );
        assert_eq!(results("llama3"), [Ok(()), Ok(())], "without experts");
    });
}

/// Whole groups, parts of groups, and parts of rows that have one scale each.
#[test]
fn parts_of_rounded_experts_have_the_codes_of_the_whole() {
    let test = "cuda_rank_experts::parts_of_rounded_experts_have_the_codes_of_the_whole";
    on_stand_in(StandIn::new().set("DEVICES", 4), test, || {
        let (narrow, wide_experts) = (with_all_experts("qwen2-moe"), with_wide_experts(192));
        for (copy, bits, group_size, num_ranks) in [
            (&narrow, CodeBits::Four, 32, 2),
            (&wide_experts, CodeBits::Four, 32, 2),
            (&wide_experts, CodeBits::Four, 128, 4),
            (&wide_experts, CodeBits::Eight, 128, 2),
            (&wide_experts, CodeBits::Fp8, WeightPrecision::WHOLE_ROWS, 3),
        ] {
            let setup = Setup {
                weights: Some(WeightPrecision { bits, group_size }),
                ..wide(&Setup::default(), 256)
            };
            let what = format!("{:?} on {num_ranks} GPUs", setup.weights);
            let mut one = setup.load_on::<Cuda>(copy.dir(), &options(0, true, 0));
            let (expected, _) = serve(&mut one, &setup, &requests());
            let together = serve_dir_on(copy.dir(), &setup, &requests(), num_ranks, (true, 0));
            assert_near(&what, &expected, &together, 0.1);
        }
    });
}

/// 96 inputs in three groups.
#[test]
fn gpus_have_some_of_each_expert() {
    let test = "cuda_rank_experts::gpus_have_some_of_each_expert";
    on_stand_in(StandIn::new().set("DEVICES", 4), test, || {
        let errors = on_ranks(4, |rank| {
            let (setup, options) = (Setup::default(), options(rank.rank, false, 0));
            let dir = fixture("gpt-oss-mxfp4");
            let loaded = load(&dir, &setup, &options, rank, PATIENT);
            loaded.err().expect("it is refused").to_string()
        });
        for error in errors {
            assert!(error.contains("has only 3 times 32 inputs"), "{error}");
        }
    });
}
