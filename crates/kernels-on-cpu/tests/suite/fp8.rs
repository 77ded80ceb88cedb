//! Conversions between f32, e4m3 and bf16, and what products of FP8 with FP8 need besides cuBLASLt.

use half::bf16;
use inflight_kernels_on_cpu::{Arg, Dims};

use crate::support::{F32_ROUNDING, Random, assert_close, cases, e4m3, is_nan_e4m3, unwritten};

fn codes_of(random: &mut Random, x: &[f32]) -> Vec<u8> {
    let mut codes = vec![0x7f7f_u16; x.len() / 2];
    let mut args = [
        Arg::from(&mut codes[..]),
        Arg::from(x),
        Arg::from(x.len() as i32),
    ];
    // SAFETY: the arrays have as many elements, an even number.
    unsafe { random.launch("test_to_e4m3", Dims::new(1, 1, 32), &mut args) };
    codes.into_iter().flat_map(u16::to_le_bytes).collect()
}

/// The finite code with the nearest value, or the largest; of two of them the even one.
fn nearest(x: f32) -> u8 {
    let size = f64::from(x.abs().min(448.0));
    let distance = |code: &u8| (e4m3(*code) - size).abs();
    let magnitude = (0..0x7f).min_by(|a, b| {
        let by_distance = distance(a).total_cmp(&distance(b));
        by_distance.then((a & 1).cmp(&(b & 1)))
    });
    magnitude.expect("codes") | if x.is_sign_negative() { 0x80 } else { 0 }
}

#[test]
fn floats_become_the_nearest_codes() {
    let random = &mut Random::new();
    let mut x = vec![
        0.0,
        f32::MIN_POSITIVE,
        1e-45,
        f32::MAX,
        f32::INFINITY,
        464.0,
    ];
    // All values, the middles between two, and their neighbours.
    for code in 0..0x7e {
        let [low, high] = [code, code + 1].map(|code| e4m3(code) as f32);
        let middle = (low + high) / 2.0;
        x.extend([low, high, middle, middle.next_up(), middle.next_down()]);
    }
    for _ in cases(2000) {
        let exponent = random.between(0, 40) as i32 - 25;
        x.push(random.float(2.0_f32.powi(exponent)));
    }
    x.extend(x.clone().iter().map(|x| -x));
    let codes = codes_of(random, &x);
    assert_eq!(codes.len(), x.len());
    for (x, code) in x.iter().zip(codes) {
        assert_eq!(code, nearest(*x), "{x}: {code:#x}");
    }
    let nans = [f32::NAN, -f32::NAN].to_vec();
    let codes = codes_of(random, &nans);
    assert!(codes.into_iter().all(is_nan_e4m3));
}

#[test]
fn codes_are_widened_exactly() {
    let random = &mut Random::new();
    let codes: Vec<u8> = (0..=u8::MAX)
        .map(|code| if is_nan_e4m3(code) { 0 } else { code })
        .collect();
    let pairs: Vec<u16> = codes
        .as_chunks()
        .0
        .iter()
        .map(|bytes| u16::from_le_bytes(*bytes))
        .collect();
    let mut widened = vec![u32::MAX; pairs.len()];
    let mut args = [
        Arg::from(&mut widened[..]),
        Arg::from(&pairs[..]),
        Arg::from(codes.len() as i32),
    ];
    // SAFETY: the arrays have as many elements, an even number.
    unsafe { random.launch("test_widen_e4m3", Dims::new(1, 1, 32), &mut args) };
    let widened: &[bf16] = bytemuck::cast_slice(&widened);
    for (code, widened) in codes.iter().zip(widened) {
        assert_eq!(widened.to_f64(), e4m3(*code), "{code:#x}");
        assert_eq!(widened.is_sign_negative(), code & 0x80 != 0, "{code:#x}");
    }
}

/// Rounds rows of `width` elements; the codes, and a scale for each row.
fn round_to_fp8(
    random: &mut Random,
    x: &[bf16],
    width: usize,
    block: usize,
) -> (Vec<u8>, Vec<f32>) {
    let num_rows = x.len() / width;
    // One row more than there are: nothing may be written there.
    let mut codes = vec![0xff_u8; x.len() + width];
    let mut scales = unwritten(num_rows + 1);
    let mut args = [
        Arg::from(&mut codes[..]),
        Arg::from(&mut scales[..]),
        Arg::from(x),
        Arg::from(width as i32),
    ];
    // SAFETY: all rows have this width, a multiple of 8, and there are as many as blocks.
    unsafe { random.launch("round_to_fp8", Dims::new(num_rows, 1, block), &mut args) };
    assert!(codes.drain(x.len()..).all(|code| code == 0xff));
    assert!(scales.drain(num_rows..).all(f32::is_nan));
    (codes, scales)
}

#[test]
fn rows_become_codes_with_a_scale_each() {
    let random = &mut Random::new();
    for _ in cases(30) {
        let num_rows = random.between(1, 4);
        // Wider ones are not kept in registers.
        let width = 8 * random.one_of(&[1, 2, 31, 64, 200]);
        let block = random.block(2);
        let mut x = Vec::new();
        for _ in 0..num_rows {
            let exponent = random.between(0, 60) as i32 - 30;
            x.extend(random.bf16s(width, 2.0_f32.powi(exponent)));
        }
        let (codes, scales) = round_to_fp8(random, &x, width, block);
        for ((x, codes), scale) in x.chunks(width).zip(codes.chunks(width)).zip(&scales) {
            let x: Vec<f64> = x.iter().map(|x| x.to_f64()).collect();
            let largest = x.iter().fold(0.0_f64, |largest, x| largest.max(x.abs()));
            assert_close(&[*scale], &[largest / 448.0], F32_ROUNDING, 0.0);
            let scale = f64::from(*scale);
            for (x, code) in x.iter().zip(codes) {
                // Half of the last place, of normal numbers and of smaller ones.
                let bound = (x.abs() / 16.0).max(scale / 1024.0);
                let error = (scale * e4m3(*code) - x).abs();
                assert!(error <= bound * (1.0 + 1e-5), "{x}: {code:#x} with {scale}");
            }
            assert!(codes.iter().any(|code| code & 0x7f == 0x7e));
        }
        // A row alone has the same bits, with any number of threads.
        let row = random.between(0, num_rows - 1);
        let block = random.block(4);
        let (codes_alone, scales_alone) =
            round_to_fp8(random, &x[row * width..][..width], width, block);
        assert_eq!(codes_alone, codes[row * width..][..width]);
        assert_eq!(scales_alone, scales[row..=row]);
    }
}

#[test]
fn rows_that_cannot_be_scaled_are_zero_or_not_a_number() {
    let random = &mut Random::new();
    const WIDTH: usize = 16;
    for (value, is_nan) in [
        (bf16::ZERO, false),
        (bf16::MIN_POSITIVE_SUBNORMAL, false),
        (bf16::NAN, true),
        (bf16::NEG_INFINITY, true),
    ] {
        let mut x = vec![bf16::ZERO; WIDTH];
        x[random.between(0, WIDTH - 1)] = value;
        // The row beside it does not notice.
        x.extend(random.bf16s(WIDTH, 1.0));
        let (codes, scales) = round_to_fp8(random, &x, WIDTH, 32);
        match is_nan {
            true => assert!(scales[0].is_nan()),
            false => {
                assert_eq!(scales[0], 0.0);
                assert!(codes[..WIDTH].iter().all(|code| code & 0x7f == 0));
            }
        }
        assert!(scales[1] > 0.0);
    }
}

#[test]
fn sums_are_scaled_by_row_and_output() {
    let random = &mut Random::new();
    for _ in cases(30) {
        let (m, n) = (random.between(1, 4), 8 * random.between(1, 60));
        let sums = random.floats(m * n, 1e5);
        let (row_scales, scales) = (random.floats(m, 0.01), random.floats(n, 0.01));
        let is_added = random.coin();
        let mut out = match is_added {
            true => random.floats(m * n, 1.0),
            false => sums.clone(),
        };
        let before = out.clone();
        let dims = Dims::new(m, random.between(1, 3), random.block(3));
        let sums_address = match is_added {
            true => Arg::from(&sums[..]),
            // In its place.
            false => Arg::pointer(out.as_ptr()),
        };
        let mut args = [
            Arg::from(&mut out[..]),
            sums_address,
            Arg::from(&row_scales[..]),
            Arg::from(&scales[..]),
            Arg::from(n as i32),
            Arg::from(i32::from(is_added)),
        ];
        // SAFETY: `out` and `sums` are [m, n], with a scale for each row and each output.
        unsafe { random.launch("scale_sums", dims, &mut args) };
        let expected = (0..m * n).map(|at| {
            let [sum, row_scale, scale] =
                [sums[at], row_scales[at / n], scales[at % n]].map(f64::from);
            let before = if is_added { before[at] } else { 0.0 };
            f64::from(before) + sum * row_scale * scale
        });
        let expected: Vec<f64> = expected.collect();
        assert_close(&out, &expected, F32_ROUNDING, 1.0);
    }
}
