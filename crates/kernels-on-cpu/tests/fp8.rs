//! Conversions between f32, e4m3 and bf16.

mod support;

use half::bf16;
use inflight_kernels_on_cpu::{Arg, Dims};

use support::{Random, cases, e4m3, is_nan_e4m3};

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
    let codes = codes_of(random, &[f32::NAN, -f32::NAN]);
    assert!(codes.into_iter().all(is_nan_e4m3));
}

#[test]
fn codes_are_widened_exactly() {
    let random = &mut Random::new();
    let codes: Vec<u8> = (0..=u8::MAX)
        .map(|code| if is_nan_e4m3(code) { 0 } else { code })
        .collect();
    let words: Vec<u32> = codes
        .as_chunks()
        .0
        .iter()
        .map(|bytes| u32::from_le_bytes(*bytes))
        .collect();
    let mut widened = vec![u64::MAX; words.len()];
    let mut args = [
        Arg::from(&mut widened[..]),
        Arg::from(&words[..]),
        Arg::from(codes.len() as i32),
    ];
    // SAFETY: the arrays have as many elements, a multiple of four.
    unsafe { random.launch("test_widen_e4m3", Dims::new(1, 1, 32), &mut args) };
    let widened: &[bf16] = bytemuck::cast_slice(&widened);
    for (code, widened) in codes.iter().zip(widened) {
        assert_eq!(widened.to_f64(), e4m3(*code), "{code:#x}");
        assert_eq!(widened.is_sign_negative(), code & 0x80 != 0, "{code:#x}");
    }
}
