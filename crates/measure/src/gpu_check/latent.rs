//! The time of latent attention of the size of DeepSeek-V3, beside what the machine can do.

use inflight_device::{
    AttentionParams, LatentHeads, LatentParams, LatentShape, Linear, Load, Ops, RopeTable, StepIo,
};

use super::bench::{Bench, ROTATED_BYTES, Work, attention_params};
use super::machine::{open, random_matrix};
use super::one_step::OneStep;
use super::report::Report;
use crate::Result;

/// DeepSeek-V3's.
const SHAPE: LatentShape = LatentShape {
    num_heads: 128,
    content_dim: 128,
    rotary_dim: 64,
    latent_dim: 512,
    value_dim: 128,
};

/// The same in small.
const QUICK_SHAPE: LatentShape = LatentShape {
    num_heads: 4,
    content_dim: 16,
    rotary_dim: 8,
    latent_dim: 32,
    value_dim: 16,
};

/// Storing the latents of some rows, and their attention: each the last token of a sequence.
pub fn generation(bench: &Bench<'_>, num_rows: usize, report: &mut Report) -> Result<()> {
    let step = OneStep::generation(num_rows, bench.context_len);
    let seen = num_rows * bench.context_len;
    measure(bench, &step, seen, &format!("batch of {num_rows}"), report)
}

/// The same for the tokens of one prompt.
pub fn prompt(bench: &Bench<'_>, len: usize, report: &mut Report) -> Result<()> {
    let step = OneStep::prompt(len);
    let seen = len * (len + 1) / 2;
    measure(bench, &step, seen, &format!("prompt of {len}"), report)
}

/// `seen`: the positions that all rows see together.
fn measure(
    bench: &Bench<'_>,
    step: &OneStep,
    seen: usize,
    rows: &str,
    report: &mut Report,
) -> Result<()> {
    let shape = match bench.check.options.quick {
        true => QUICK_SHAPE,
        false => SHAPE,
    };
    let LatentShape {
        num_heads,
        content_dim,
        latent_dim,
        value_dim,
        ..
    } = shape;
    let num_rows = step.token_ids.len();
    let mut device = open(bench.check.options.gpu)?;
    device.reserve_latents(num_rows, &shape)?;
    let mut cache = step.cache_of(&mut device, shape.head_shape(), shape.kv_values())?;
    let num_weights = num_heads * latent_dim * (content_dim + value_dim);
    let weight_bytes = 2 * num_weights;
    let num_copies = match bench.check.options.quick {
        true => 2,
        false => ROTATED_BYTES.div_ceil(weight_bytes),
    };
    let mut all_heads = Vec::new();
    for _ in 0..num_copies {
        let mut linear = |outputs: usize, inputs: usize| {
            Ok::<_, Box<dyn std::error::Error>>(Linear {
                matrix: random_matrix(&mut device, num_heads * outputs, inputs)?,
                bias: None,
                place: None,
            })
        };
        all_heads.push(LatentHeads {
            keys: vec![linear(latent_dim, content_dim)?],
            values: vec![linear(value_dim, latent_dim)?],
        });
    }
    let norm = device.upload_vector(vec![1.0; latent_dim])?;
    let frequencies = vec![1e-3; shape.rotary_dim / 2];
    let angles = RopeTable::new(&frequencies, 1.0, step.max_seq_len())?;
    let angles = device.upload_angles(angles)?;
    let kv = device.alloc_sums(num_rows, shape.key_dim())?;
    let q = device.alloc_sums(num_rows, shape.q_len())?;
    let mut out = device.alloc_inputs(num_rows, shape.out_len())?;
    let begun = device.begin_step(&cache, step.inputs());
    let attention = AttentionParams {
        scale: 1.0 / (shape.query_dim() as f32).sqrt(),
        ..attention_params(shape.head_shape())
    };
    let params = |call: usize| LatentParams {
        shape,
        norm: &norm,
        norm_eps: 1e-6,
        angles: &angles,
        heads: &all_heads[call % num_copies],
        attention,
    };
    let stored = Work {
        num_bytes: num_rows * shape.key_dim() * 6,
        num_operations: 0,
        rows: rows.to_owned(),
    };
    bench.time("store_latents", stored, &mut device, report, |device, _| {
        device.store_latents(&begun, &params(0), &kv, &mut cache, 0);
    })?;
    let attended = Work {
        // A prompt's positions are read once, as by a sequence that generates.
        num_bytes: weight_bytes
            + 2 * step.num_positions() * shape.key_dim()
            + num_rows * (4 * shape.q_len() + 2 * shape.out_len()),
        num_operations: 2 * num_rows * num_weights
            + 2 * seen * num_heads * (shape.key_dim() + latent_dim),
        rows: rows.to_owned(),
    };
    bench.time(
        "latent_attention",
        attended,
        &mut device,
        report,
        |device, call| {
            device.latent_attention(&begun, &params(call), &q, &cache, 0, &mut out);
        },
    )
}
