//! FP8 checkpoints: a fixture whose projections are rounded to e4m3 codes, against the same with these weights in f32.

use std::fs;

use half::bf16;
use inflight_numbers::CodeBits;
use inflight_runner::WeightPrecision;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use serde_json::{Value, json};

use crate::copy::Copy;
use crate::devices::requests;
use crate::support::{Setup, serve};

/// Which weights share a scale.
#[derive(Clone, Copy, Debug)]
pub enum Scales {
    Tensor,
    Channels,
    Blocks([usize; 2]),
}

/// All values of e4m3, by code: IEEE's interpretation with a bias of 7, but no infinities.
fn values() -> Vec<f64> {
    let magnitude = |code: i32| match (code >> 3, f64::from(code & 7) / 8.0) {
        (0, fraction) => fraction * 2.0_f64.powi(-6),
        (exponent, fraction) => (1.0 + fraction) * 2.0_f64.powi(exponent - 7),
    };
    (0..0x7f).map(magnitude).collect()
}

/// The code whose value is nearest.
fn nearest(values: &[f64], weight: f64) -> u8 {
    let distance = |code: &usize| (values[*code] - weight.abs()).abs();
    let codes = 0..values.len();
    let nearest = codes.min_by(|a, b| distance(a).total_cmp(&distance(b)));
    nearest.expect("codes") as u8 | if weight < 0.0 { 0x80 } else { 0 }
}

/// [`copies_of`] a fixture with its weights in f32.
pub fn copies(scales: Scales, scale_name: &str, config: Value) -> [Copy; 2] {
    copies_of("stored-f32", scales, scale_name, config)
}

/// Two copies of a fixture: with projections in FP8 under these names and this config, and with the same weights in
/// f32.
pub fn copies_of(name: &str, scales: Scales, scale_name: &str, config: Value) -> [Copy; 2] {
    rounded([(); 2].map(|()| Copy::of(name)), scales, scale_name, config)
}

/// Two copies with the blocks of DeepSeek-V3 and Qwen 3, of a model whose matrices have up to three of them each way,
/// the last of which are narrower.
pub fn copies_with_blocks_of_128() -> [Copy; 2] {
    let config = json!({"quant_method": "fp8", "weight_block_size": [128, 128]});
    let copies = [(); 2].map(|()| widened());
    rounded(
        copies,
        Scales::Blocks([128, 128]),
        "weight_scale_inv",
        config,
    )
}

/// stored-f32 in other sizes: its rows and columns again and again.
fn widened() -> Copy {
    let copy = Copy::of("stored-f32")
        .config(json!({"hidden_size": 160, "head_dim": 40, "intermediate_size": 300}));
    let wider = |size: &usize| match size {
        // Heads, all key heads, all query heads or the hidden size, and the width of feed-forward blocks.
        8 => 40,
        16 => 80,
        32 => 160,
        64 => 300,
        vocab_size => *vocab_size,
    };
    let path = copy.path("model.safetensors");
    let bytes = fs::read(&path).expect("the file");
    let stored = SafeTensors::deserialize(&bytes).expect("whole");
    let tensors = stored.tensors().into_iter().map(|(name, view)| {
        let shape: Vec<_> = view.shape().iter().map(wider).collect();
        let old_columns = *view.shape().last().expect("a dimension");
        let columns = *shape.last().expect("a dimension");
        let values = view.data().as_chunks::<4>().0;
        let data = (0..shape.iter().product()).flat_map(|at: usize| {
            let (row, column) = (at / columns, at % columns);
            let old = row * old_columns + column % old_columns;
            let value = f32::from_le_bytes(values[old % values.len()]);
            // Sums have more terms.
            let factor = match shape.len() {
                1 => 1.0,
                _ => 0.3 + 0.1 * ((row * 7 + column * 3) % 5) as f32,
            };
            (value * factor).to_le_bytes()
        });
        let data: Vec<u8> = data.collect();
        (name, shape, data)
    });
    let tensors: Vec<_> = tensors.collect();
    let views = tensors.iter().map(|(name, shape, data)| {
        let view = TensorView::new(Dtype::F32, shape.clone(), data).expect("consistent");
        (name.clone(), view)
    });
    serialize_to_file(views, None, &path).expect("written");
    copy
}

/// Two copies of a model, whose projections are rounded in one, and have the same weights as floats in the other.
fn rounded([fp8, floats]: [Copy; 2], scales: Scales, scale_name: &str, config: Value) -> [Copy; 2] {
    let path = fp8.path("model.safetensors");
    let bytes = fs::read(&path).expect("the file");
    let stored = SafeTensors::deserialize(&bytes).expect("whole");
    let values = values();
    let [mut codes, mut weights] = [Vec::new(), Vec::new()];
    for (name, view) in stored.tensors() {
        let shape = view.shape().to_vec();
        let is_projection = name.contains("_proj");
        if !is_projection {
            for tensors in [&mut codes, &mut weights] {
                tensors.push((
                    name.clone(),
                    view.dtype(),
                    shape.clone(),
                    view.data().to_vec(),
                ));
            }
            continue;
        }
        let original: Vec<f32> = match view.dtype() {
            Dtype::F32 => {
                let values = view.data().as_chunks().0.iter();
                values.map(|value| f32::from_le_bytes(*value)).collect()
            }
            Dtype::BF16 => {
                let values = view.data().as_chunks().0.iter();
                values
                    .map(|value| bf16::from_le_bytes(*value).to_f32())
                    .collect()
            }
            other => panic!("{name} is {other:?}"),
        };
        let [rows, columns] = shape[..] else {
            panic!("a matrix");
        };
        let (block, scale_shape) = match scales {
            Scales::Tensor => ([rows, columns], vec![]),
            Scales::Channels => ([1, columns], vec![rows, 1]),
            Scales::Blocks(block) => {
                let shape = vec![rows.div_ceil(block[0]), columns.div_ceil(block[1])];
                (block, shape)
            }
        };
        let blocks_of_row = columns.div_ceil(block[1]);
        let block_of =
            |at: usize| at / columns / block[0] * blocks_of_row + at % columns / block[1];
        let mut scales = vec![0.0_f32; rows.div_ceil(block[0]) * blocks_of_row];
        for (at, weight) in original.iter().enumerate() {
            let scale = &mut scales[block_of(at)];
            *scale = scale.max(weight.abs() / 448.0);
        }
        let coded = original.iter().enumerate().map(|(at, weight)| {
            let scale = f64::from(scales[block_of(at)]);
            nearest(&values, f64::from(*weight) / scale)
        });
        let coded: Vec<u8> = coded.collect();
        let decoded = coded.iter().enumerate().flat_map(|(at, code)| {
            let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
            let value = (sign * values[usize::from(code & 0x7f)]) as f32;
            (value * scales[block_of(at)]).to_le_bytes()
        });
        weights.push((name.clone(), Dtype::F32, shape.clone(), decoded.collect()));
        codes.push((name.clone(), Dtype::F8_E4M3, shape, coded));
        let scales = scales.into_iter().flat_map(f32::to_le_bytes).collect();
        let scale = format!(
            "{}.{scale_name}",
            name.strip_suffix(".weight").expect("a weight")
        );
        codes.push((scale, Dtype::F32, scale_shape, scales));
    }
    for (copy, tensors) in [(&fp8, codes), (&floats, weights)] {
        let views = tensors.iter().map(|(name, dtype, shape, data)| {
            let view = TensorView::new(*dtype, shape.clone(), data).expect("consistent");
            (name.clone(), view)
        });
        serialize_to_file(views, None, &copy.path("model.safetensors")).expect("written");
    }
    [fp8.config(json!({ "quantization_config": config })), floats]
}

fn compressed(strategy: &str) -> Value {
    let weights = json!({"num_bits": 8, "type": "float", "symmetric": true, "strategy": strategy});
    json!({
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
    })
}

#[test]
fn fp8_weights_are_computed_with_as_the_floats_that_they_stand_for() {
    let blocks = Scales::Blocks([24, 40]);
    for (scales, scale_name, config) in [
        (
            Scales::Tensor,
            "weight_scale",
            json!({"quant_method": "fp8", "activation_scheme": "static"}),
        ),
        (
            Scales::Tensor,
            "weight_scale",
            json!({"quant_method": "modelopt", "quant_algo": "FP8"}),
        ),
        (Scales::Channels, "weight_scale", compressed("channel")),
        (
            blocks,
            "weight_scale_inv",
            json!({"quant_method": "fp8", "weight_block_size": [24, 40]}),
        ),
    ] {
        let copies = copies(scales, scale_name, config);
        assert_same(&format!("{scales:?}, {scale_name}"), copies);
    }
    assert_same("blocks of 128", copies_with_blocks_of_128());
    // ModelOpt has other names and shapes.
    let [fp8, floats] = copies_with_blocks_of_128();
    let path = fp8.path("model.safetensors");
    let bytes = fs::read(&path).expect("the file");
    let stored = SafeTensors::deserialize(&bytes).expect("whole");
    let views = stored.tensors().into_iter().map(|(name, view)| {
        let shape = match (name.ends_with("weight_scale_inv"), view.shape()) {
            (true, &[rows, columns]) => vec![rows, 1, columns, 1],
            (_, shape) => shape.to_vec(),
        };
        let view = TensorView::new(view.dtype(), shape, view.data()).expect("consistent");
        (name.replace("weight_scale_inv", "weight_scale"), view)
    });
    let views: Vec<_> = views.collect();
    serialize_to_file(views, None, &path).expect("written");
    let config = json!({"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"});
    let fp8 = fp8.config(json!({ "quantization_config": config }));
    assert_same("ModelOpt's blocks of 128", [fp8, floats]);
}

pub fn assert_same(what: &str, [fp8, floats]: [Copy; 2]) {
    let setup = Setup::default();
    let serve = |copy: &Copy| serve(&mut setup.load_from(copy.dir()), &setup, &requests()).0;
    assert!(serve(&fp8) == serve(&floats), "{what}");
}

/// Two copies of a model with all experts of a layer in one tensor `[experts, inputs, outputs]`: in FP8, with a scale
/// for each output, and in f32, with equal weights. `is_turned`: FP8 has them as `[experts, outputs, inputs]`.
fn copies_with_stacked_experts(
    name: &str,
    is_turned: bool,
    scale_name: &str,
    config: Value,
) -> [Copy; 2] {
    let [fp8, floats] = [(); 2].map(|()| Copy::of(name));
    let bytes = fs::read(fp8.path("model.safetensors")).expect("the file");
    let stored = SafeTensors::deserialize(&bytes).expect("whole");
    let values = values();
    let [mut codes, mut weights] = [Vec::new(), Vec::new()];
    let mut num_stacked = 0;
    for (name, view) in stored.tensors() {
        let shape = view.shape().to_vec();
        let [experts, inputs, outputs] = match shape[..] {
            [experts, inputs, outputs] if name.contains(".experts.") => [experts, inputs, outputs],
            _ => {
                let same = (name, view.dtype(), shape, view.data().to_vec());
                codes.push(same.clone());
                weights.push(same);
                continue;
            }
        };
        num_stacked += 1;
        let original = view.data().as_chunks().0.iter();
        let original: Vec<_> = original
            .map(|it| bf16::from_le_bytes(*it).to_f64())
            .collect();
        let scale_of = |at: usize| at / (inputs * outputs) * outputs + at % outputs;
        let mut scales = vec![0.0_f32; experts * outputs];
        for (at, weight) in original.iter().enumerate() {
            let scale = &mut scales[scale_of(at)];
            *scale = scale.max(weight.abs() as f32 / 448.0);
        }
        let coded = original.iter().enumerate();
        let coded =
            coded.map(|(at, weight)| nearest(&values, weight / f64::from(scales[scale_of(at)])));
        let coded: Vec<_> = coded.collect();
        let decoded = coded.iter().enumerate().flat_map(|(at, code)| {
            let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
            let value = (sign * values[usize::from(code & 0x7f)]) as f32;
            (value * scales[scale_of(at)]).to_le_bytes()
        });
        weights.push((name.clone(), Dtype::F32, shape.clone(), decoded.collect()));
        let (shape, scale_shape, coded) = match is_turned {
            false => (shape, vec![experts, 1, outputs], coded),
            true => {
                let turned = (0..coded.len()).map(|at| {
                    let (expert, at) = (at / (inputs * outputs), at % (inputs * outputs));
                    coded[expert * inputs * outputs + at % inputs * outputs + at / inputs]
                });
                let shape = vec![experts, outputs, inputs];
                (shape, vec![experts, outputs, 1], turned.collect())
            }
        };
        codes.push((name.clone(), Dtype::F8_E4M3, shape, coded));
        let scales = scales.into_iter().flat_map(f32::to_le_bytes).collect();
        codes.push((
            format!("{name}{scale_name}"),
            Dtype::F32,
            scale_shape,
            scales,
        ));
    }
    assert!(num_stacked > 0);
    for (copy, tensors) in [(&fp8, codes), (&floats, weights)] {
        let views = tensors.iter().map(|(name, dtype, shape, data)| {
            let view = TensorView::new(*dtype, shape.clone(), data).expect("consistent");
            (name.clone(), view)
        });
        serialize_to_file(views, None, &copy.path("model.safetensors")).expect("written");
    }
    [fp8.config(json!({ "quantization_config": config })), floats]
}

#[test]
fn experts_in_one_tensor_of_fp8_are_computed_with_as_the_floats_that_they_stand_for() {
    for (name, is_turned, scale_name, config) in [
        (
            "llama4",
            false,
            "_weight_scale",
            json!({"quant_method": "modelopt", "quant_algo": "FP8"}),
        ),
        (
            "qwen3-vl-moe",
            true,
            "_scale_inv",
            json!({"quant_method": "fp8"}),
        ),
    ] {
        let copies = copies_with_stacked_experts(name, is_turned, scale_name, config);
        assert_same(name, copies);
    }
}

/// The weights of each head's keys are transposed, and begin within a block.
#[test]
fn latent_attention_computes_with_fp8_blocks_as_with_the_floats_that_they_stand_for() {
    let config = json!({"quant_method": "fp8", "weight_block_size": [16, 8]});
    let blocks = Scales::Blocks([16, 8]);
    let [fp8, floats] = copies_of("deepseek-v3", blocks, "weight_scale_inv", config);
    for weights in [None, Some(WeightPrecision::new(CodeBits::Four))] {
        let setup = Setup {
            weights,
            ..Setup::default()
        };
        let serve = |copy: &Copy| serve(&mut setup.load_from(copy.dir()), &setup, &requests()).0;
        assert!(serve(&fp8) == serve(&floats), "{weights:?}");
    }
}

#[test]
fn fp8_weights_without_their_scales_are_refused() {
    let config = || json!({"quant_method": "fp8"});
    let scale = "model.layers.0.mlp.up_proj.weight_scale";
    let [fp8, _] = copies(Scales::Channels, "weight_scale", config());
    fp8.tensor(scale, |_| None)
        .refused(&["up_proj.weight", "is quantised", scale, "is missing"]);
    let [fp8, _] = copies(Scales::Blocks([32, 32]), "weight_scale", config());
    fp8.refused(&["weight_scale", "has shape", "supported for"]);
    let [fp8, _] = copies(Scales::Tensor, "weight_scale", config());
    let weight = "model.layers.0.mlp.up_proj.weight";
    let damaged = fp8.tensor(weight, |view| {
        let mut data = view.data().to_vec();
        data[3 * view.shape()[1]] = 0x7f;
        Some((view.dtype(), view.shape().to_vec(), data))
    });
    damaged.refused(&[weight, "row 3", "NaN"]);
}
