//! Kernels that work on each row separately.

use std::path::Path;
use std::process::Command;
use std::{env, fs};

use half::bf16;
use inflight_cuda_stand_in::StandIn;
use inflight_kernels_on_cpu::{Arg, Dims};

use crate::support::{
    BF16_ROUNDING, F32_ROUNDING, Random, assert_close, bits, cases, is_on_gpu, to_f64, unwritten,
    unwritten_bf16,
};

const NUM_CASES: usize = 30;

/// Marks a row of what the step before has sampled.
const IN_FLIGHT: u32 = 1 << 31;

#[test]
fn embed_widens_and_scales_rows_of_the_table() {
    let random = &mut Random::new();
    for _ in cases(NUM_CASES) {
        let (num_rows, width) = (random.between(1, 5), random.width());
        let vocab_size = random.between(1, 20);
        let table = random.bf16s(vocab_size * width, 2.0);
        let mut token_ids = random.indices(num_rows, vocab_size);
        let mut words = token_ids.clone();
        let mut sampled = vec![0; num_rows];
        for row in 0..num_rows {
            let at = random.between(0, num_rows - 1);
            match random.between(0, 3) {
                // Sampled by the step before, and so are the others that name the place.
                0 => {
                    words[row] = IN_FLIGHT + at as u32;
                    sampled[at] = token_ids[row];
                }
                // Nothing was sampled there.
                1 => {
                    words[row] = IN_FLIGHT + at as u32;
                    sampled[at] = u32::MAX - random.between(0, 2) as u32;
                }
                _ => {}
            }
        }
        for (token, &word) in token_ids.iter_mut().zip(&words) {
            if word >= IN_FLIGHT {
                let sampled = sampled[(word - IN_FLIGHT) as usize];
                *token = if sampled < IN_FLIGHT { sampled } else { 0 };
            }
        }
        let mut out = unwritten(num_rows * width);
        let dims = Dims::new(num_rows, random.between(1, 3), random.block(4));
        let scale = random.one_of(&[1.0, 0.5, 45.25]);
        let ids = [&words[..], &sampled];
        embed(random, dims, &mut out, &table, ids, scale, width);
        let rows = token_ids.iter().map(|id| *id as usize * width);
        let expected: Vec<f32> = rows
            .flat_map(|at| table[at..][..width].iter().map(|x| x.to_f32() * scale))
            .collect();
        assert_eq!(bits(&out), bits(&expected));
    }
}

#[test]
fn a_part_of_the_table_embeds_its_tokens_and_minus_zero_for_others() {
    let random = &mut Random::new();
    for _ in cases(NUM_CASES) {
        let (num_rows, width) = (random.between(1, 5), random.width());
        let (first, num_tokens) = (random.between(0, 9), random.between(1, 9));
        let part = random.bf16s(num_tokens * width, 2.0);
        let token_ids = random.indices(num_rows, first + num_tokens + 9);
        let scale = random.one_of(&[1.0, 45.25]);
        let mut out = unwritten(num_rows * width);
        let mut args = [
            Arg::from(&mut out[..]),
            Arg::from(&part[..]),
            Arg::from(&token_ids[..]),
            (first as i32).into(),
            (num_tokens as i32).into(),
            scale.into(),
            (width as i32).into(),
        ];
        let dims = Dims::new(num_rows, random.between(1, 3), random.block(4));
        // SAFETY: the shapes are those of the kernel, which reads no rows but those of the part.
        unsafe { random.launch("embed_part", dims, &mut args) };
        let expected = token_ids.iter().flat_map(|&id| {
            let index = (id as usize).checked_sub(first);
            let index = index.filter(|index| *index < num_tokens);
            let row = index.map(|index| &part[index * width..][..width]);
            let element = |at: usize| row.map_or(-0.0, |row| row[at].to_f32() * scale);
            (0..width).map(element).collect::<Vec<_>>()
        });
        assert_eq!(bits(&out), bits(&expected.collect::<Vec<f32>>()));
    }
}

#[test]
fn a_row_is_normalised_by_its_root_mean_square() {
    let random = &mut Random::new();
    for _ in cases(NUM_CASES) {
        let (num_rows, width) = (random.between(1, 4), random.width());
        let x = rows_of_any_size(random, num_rows, width);
        let weight = random.floats(width, 2.0);
        let (eps, dims) = (1e-5, Dims::new(num_rows, 1, random.block(6)));
        // One row more than there are: nothing may be written there.
        let mut out = unwritten_bf16((num_rows + 1) * width);
        rms_norm(random, dims, &mut out, &x, &weight, eps);
        let expected = normalised(&to_f64(&x), &weight, eps);
        assert_bf16(&out[..x.len()], &expected);
        assert!(out[x.len()..].iter().all(|x| x.is_nan()));
        // A row alone has the same bits.
        let row = random.between(0, num_rows - 1) * width;
        let mut alone = unwritten_bf16(width);
        let dims = Dims::new(1, 1, dims.block[0] as usize);
        rms_norm(random, dims, &mut alone, &x[row..][..width], &weight, eps);
        assert_eq!(alone, out[row..][..width]);
    }
}

#[test]
fn a_residual_is_added_before_the_norm() {
    let random = &mut Random::new();
    for _ in cases(NUM_CASES) {
        let (num_rows, width) = (random.between(1, 4), random.width());
        let x = rows_of_any_size(random, num_rows, width);
        let before = rows_of_any_size(random, num_rows, width);
        let weight = random.floats(width, 2.0);
        let (eps, block) = (1e-6, random.block(6));
        let mut hidden = before.clone();
        let mut out = unwritten_bf16(x.len());
        let mut args = [
            Arg::from(&mut out[..]),
            Arg::from(&mut hidden[..]),
            Arg::from(&x[..]),
            Arg::from(&weight[..]),
            eps.into(),
            (width as i32).into(),
        ];
        // SAFETY: all rows have this width, and there are as many as blocks.
        unsafe { random.launch("add_rms_norm", Dims::new(num_rows, 1, block), &mut args) };
        let sums: Vec<f32> = x.iter().zip(&before).map(|(x, y)| x + y).collect();
        assert_eq!(hidden, sums);
        assert_bf16(&out, &normalised(&to_f64(&sums), &weight, eps));
        // The norm without an addition gives the same bits.
        let mut again = unwritten_bf16(x.len());
        let dims = Dims::new(num_rows, 1, block);
        rms_norm(random, dims, &mut again, &sums, &weight, eps);
        assert_eq!(out, again);
    }
}

#[test]
fn a_bias_is_added_to_each_row() {
    let random = &mut Random::new();
    for _ in cases(NUM_CASES) {
        let (num_rows, width) = (random.between(1, 5), random.width());
        let x = random.floats(num_rows * width, 2.0);
        let bias = random.floats(width, 2.0);
        let mut out = x.clone();
        let mut args = [
            Arg::from(&mut out[..]),
            Arg::from(&bias[..]),
            (width as i32).into(),
        ];
        let dims = Dims::new(num_rows, random.between(1, 3), random.block(4));
        // SAFETY: `out` has as many rows of this width as there are blocks.
        unsafe { random.launch("add_bias", dims, &mut args) };
        let expected: Vec<f32> = x
            .chunks(width)
            .flat_map(|row| row.iter().zip(&bias).map(|(x, bias)| x + bias))
            .collect();
        assert_eq!(out, expected);
    }
}

#[test]
fn rows_are_rounded_added_and_given_positions() {
    let random = &mut Random::new();
    for _ in cases(NUM_CASES) {
        let (num_rows, width) = (random.between(1, 4), random.width());
        let x = rows_of_any_size(random, num_rows, width);
        let before = rows_of_any_size(random, num_rows, width);
        let dims = Dims::new(num_rows, random.between(1, 3), random.block(4));

        let mut rounded = unwritten_bf16(x.len());
        let mut args = [
            Arg::from(&mut rounded[..]),
            Arg::from(&x[..]),
            (width as i32).into(),
        ];
        // SAFETY: both have as many rows of this width as there are blocks.
        unsafe { random.launch("round_rows", dims, &mut args) };
        let expected: Vec<bf16> = x.iter().map(|x| bf16::from_f32(*x)).collect();
        assert_eq!(rounded, expected);

        let mut sums = before.clone();
        let mut args = [
            Arg::from(&mut sums[..]),
            Arg::from(&x[..]),
            (width as i32).into(),
        ];
        // SAFETY: as above.
        unsafe { random.launch("add_rows", dims, &mut args) };
        let expected: Vec<f32> = before.iter().zip(&x).map(|(a, b)| a + b).collect();
        assert_eq!(sums, expected);

        let num_positions = random.between(1, 9);
        let table = random.bf16s(num_positions * width, 2.0);
        let positions = random.indices(num_rows, num_positions);
        let mut sums = before.clone();
        let mut args = [
            Arg::from(&mut sums[..]),
            Arg::from(&table[..]),
            Arg::from(&positions[..]),
            (width as i32).into(),
        ];
        // SAFETY: as above, and the positions are rows of the table.
        unsafe { random.launch("add_positions", dims, &mut args) };
        let added = positions
            .iter()
            .flat_map(|at| &table[*at as usize * width..][..width]);
        let expected: Vec<f32> = before
            .iter()
            .zip(added)
            .map(|(a, b)| a + b.to_f32())
            .collect();
        assert_eq!(sums, expected);
    }
}

#[test]
fn logits_are_scaled_and_bounded() {
    let random = &mut Random::new();
    for _ in cases(NUM_CASES) {
        let (num_rows, width) = (random.between(1, 4), random.width());
        let x = rows_of_any_size(random, num_rows, width);
        let (scale, cap) = (
            random.one_of(&[1.0_f32, 0.0625]),
            random.one_of(&[0.0_f32, 30.0]),
        );
        let mut logits = x.clone();
        let mut args = [
            Arg::from(&mut logits[..]),
            scale.into(),
            cap.into(),
            (width as i32).into(),
        ];
        let dims = Dims::new(num_rows, random.between(1, 3), random.block(4));
        // SAFETY: there are as many rows of this width as blocks.
        unsafe { random.launch("transform_logits", dims, &mut args) };
        let bounded = |x: f64| match cap {
            0.0 => x,
            _ => f64::from(cap) * (x / f64::from(cap)).tanh(),
        };
        let expected: Vec<f64> = x.iter().map(|x| bounded(f64::from(scale * x))).collect();
        assert_close(&logits, &expected, F32_ROUNDING, 1e-30);
    }
}

/// The bundle for GPU machines runs this program there, each module by itself.
#[test]
fn the_same_tests_run_on_a_gpu() {
    if is_on_gpu() || cfg!(kernel_sanitizer) {
        return;
    }
    let images = Path::new(env!("CARGO_TARGET_TMPDIR")).join("images");
    fs::create_dir_all(&images).expect("a folder");
    // The stand-in takes any image for all kernels.
    fs::write(images.join("embed.sm_90.cubin"), "an image").expect("a file");
    let mut command = Command::new(env::current_exe().expect("a test has a path"));
    command
        .args(["elementwise::", "recurrence::", "--test-threads=1"])
        .env("KERNEL_GPU", "0")
        .env("KERNEL_IMAGES", &images);
    let output = StandIn::new().apply(&mut command).output();
    let output = output.expect("a test can be started");
    assert!(output.status.success(), "{output:?}");
    fs::remove_file(images.join("embed.sm_90.cubin")).expect("there");
    let output = StandIn::new().apply(&mut command).output();
    let output = output.expect("a test can be started");
    assert!(
        !output.status.success(),
        "kernels were launched without images: {output:?}"
    );
}

fn embed(
    random: &mut Random,
    dims: Dims,
    out: &mut [f32],
    table: &[bf16],
    [token_ids, sampled]: [&[u32]; 2],
    scale: f32,
    width: usize,
) {
    let mut args = [
        out.into(),
        table.into(),
        token_ids.into(),
        sampled.into(),
        scale.into(),
        (width as i32).into(),
    ] as [Arg<'_>; 6];
    // SAFETY: the shapes are those of the kernel, and the tokens are rows of the table or of what was sampled.
    unsafe { random.launch("embed", dims, &mut args) };
}

fn rms_norm(
    random: &mut Random,
    dims: Dims,
    out: &mut [bf16],
    x: &[f32],
    weight: &[f32],
    eps: f32,
) {
    let mut args = [
        out.into(),
        x.into(),
        weight.into(),
        eps.into(),
        (weight.len() as i32).into(),
    ] as [Arg<'_>; 5];
    // SAFETY: `x` and `out` have as many rows of the weight's width as there are blocks.
    unsafe { random.launch("rms_norm", dims, &mut args) };
}

/// The norm of rows of the weight's width.
fn normalised(x: &[f64], weight: &[f32], eps: f32) -> Vec<f64> {
    let rows = x.chunks(weight.len());
    rows.flat_map(|row| {
        let mean = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
        let scale = 1.0 / (mean + f64::from(eps)).sqrt();
        let scaled = row.iter().zip(weight);
        scaled.map(move |(x, weight)| x * scale * f64::from(*weight))
    })
    .collect()
}

/// Rows whose elements have one size each, from tiny to large.
fn rows_of_any_size(random: &mut Random, num_rows: usize, width: usize) -> Vec<f32> {
    let sizes: Vec<f32> = (0..num_rows)
        .map(|_| random.one_of(&[1e-3, 1.0, 50.0]))
        .collect();
    sizes
        .into_iter()
        .flat_map(|size| random.floats(width, size))
        .collect()
}

/// Checks elements that are rounded to bf16 once.
#[track_caller]
fn assert_bf16(actual: &[bf16], expected: &[f64]) {
    assert_close(actual, expected, BF16_ROUNDING + 2.0 * F32_ROUNDING, 1e-30);
}
