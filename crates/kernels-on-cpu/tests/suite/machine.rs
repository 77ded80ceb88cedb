//! The machine itself: it runs right kernels rightly, and finds what is wrong with wrong ones.

use half::bf16;
use inflight_kernels_on_cpu::{Arg, Dims, LaunchError, kernel_names, launch};

use crate::support::{Random, bits, cases, unwritten};

/// Schedules to try where one of them shows a mistake by chance.
const NUM_SCHEDULES: usize = 40;

#[test]
fn a_barrier_is_needed_and_enough() {
    let random = &mut Random::new();
    let is_right = |random: &mut Random, kernel: &str| {
        let (num_blocks, block) = (random.between(1, 3), random.block(8));
        let x = random.floats(num_blocks * block, 1.0);
        let mut out = unwritten(x.len());
        let mut args = [Arg::from(&mut out[..]), Arg::from(&x[..])];
        // SAFETY: one element of `x` and `out` for each thread.
        unsafe { random.launch(kernel, Dims::new(num_blocks, 1, block), &mut args) };
        let reversed = x
            .chunks(block)
            .flat_map(|block| block.iter().rev().copied());
        bits(&out) == bits(&reversed.collect::<Vec<_>>())
    };
    assert!(cases(NUM_SCHEDULES).all(|_| is_right(random, "test_reverse")));
    if cfg!(not(kernel_sanitizer)) {
        assert!(!cases(NUM_SCHEDULES).all(|_| is_right(random, "test_reverse_without_barrier")));
    }
}

#[test]
fn memory_may_be_written_again_only_after_a_barrier() {
    let random = &mut Random::new();
    let is_right = |random: &mut Random, kernel: &str| {
        let (num_rows, block) = (random.between(2, 4), 32 * random.between(2, 8));
        let x = random.floats(num_rows * block, 1.0);
        let mut out = unwritten(num_rows);
        let mut args = [
            Arg::from(&mut out[..]),
            Arg::from(&x[..]),
            (num_rows as i32).into(),
        ];
        // SAFETY: `x` is [num_rows, block], `out` is [num_rows].
        unsafe { random.launch(kernel, Dims::new(1, 1, block), &mut args) };
        let sum = |row: &[f32]| row.iter().map(|x| f64::from(*x)).sum::<f64>();
        out.iter()
            .zip(x.chunks(block).map(sum))
            .all(|(out, sum)| (f64::from(*out) - sum).abs() < 1e-4)
    };
    assert!(cases(NUM_SCHEDULES).all(|_| is_right(random, "test_sum_rows")));
    if cfg!(not(kernel_sanitizer)) {
        assert!(!cases(NUM_SCHEDULES).all(|_| is_right(random, "test_sum_rows_without_barrier")));
    }
}

#[test]
fn lanes_exchange_values() {
    let random = &mut Random::new();
    let block = random.block(3);
    let x = random.floats(block, 1.0);
    let mut out = unwritten(4 * block);
    let mut args = [Arg::from(&mut out[..]), Arg::from(&x[..])];
    // SAFETY: four elements of `out` for each thread.
    unsafe { random.launch("test_exchange", Dims::new(1, 1, block), &mut args) };
    for (i, own) in x.iter().enumerate() {
        let warp = &x[i / 32 * 32..][..32];
        let lane = i % 32;
        let votes = warp.iter().filter(|x| **x > 0.0).count();
        let expected = [
            *warp.get(lane + 1).unwrap_or(own),
            if lane > 0 { warp[lane - 1] } else { *own },
            warp[5],
            votes as f32,
        ];
        let actual = [0, 1, 2, 3].map(|part| out[part * block + i]);
        assert_eq!(actual, expected, "thread {i}");
    }
}

#[test]
fn tensor_cores_multiply_tiles_that_were_copied_in_the_background() {
    let random = &mut Random::new();
    for _ in 0..4 {
        assert!(multiply(random, "test_multiply"));
    }
    if cfg!(not(kernel_sanitizer)) {
        for wrong in [
            "test_multiply_without_wait",
            "test_multiply_without_barrier",
        ] {
            assert!(
                !cases(NUM_SCHEDULES).all(|_| multiply(random, wrong)),
                "{wrong}"
            );
        }
    }
}

/// Whether a kernel multiplies matrices.
fn multiply(random: &mut Random, kernel: &str) -> bool {
    let (m, n) = (64 * random.between(1, 2), 64 * random.between(1, 2));
    let k = 32 * random.between(3, 4);
    let (a, b) = (random.bf16s(m * k, 1.0), random.bf16s(n * k, 1.0));
    let mut c = unwritten(m * n);
    let mut args = [
        Arg::from(&mut c[..]),
        Arg::from(&a[..]),
        Arg::from(&b[..]),
        (n as i32).into(),
        (k as i32).into(),
    ];
    // SAFETY: `a` is [m, k], `b` is [n, k], `c` is [m, n], in tiles of 64.
    unsafe { random.launch(kernel, Dims::new(n / 64, m / 64, 128), &mut args) };
    let product = |(x, y): (&bf16, &bf16)| x.to_f64() * y.to_f64();
    let mut is_right = true;
    for (row, c) in a.chunks(k).zip(c.chunks(n)) {
        for (column, c) in b.chunks(k).zip(c) {
            let expected: f64 = row.iter().zip(column).map(product).sum();
            is_right &= (f64::from(*c) - expected).abs() < 1e-4;
        }
    }
    is_right
}

#[test]
fn matrices_are_transposed_and_padded_with_zeros() {
    let random = &mut Random::new();
    let x: Vec<u16> = random
        .indices(8 * 32, 1 << 16)
        .iter()
        .map(|x| *x as u16)
        .collect();
    let mut out = vec![0xffff_u16; 8 * 32];
    let mut args = [Arg::from(&mut out[..]), Arg::from(&x[..])];
    // SAFETY: both are 8 x 32 elements.
    unsafe { random.launch("test_transpose", Dims::new(1, 1, 32), &mut args) };
    for (column, out) in out.chunks(8).enumerate() {
        for (row, out) in out.iter().enumerate() {
            let expected = if column < 8 { 0 } else { x[row * 32 + column] };
            assert_eq!(*out, expected, "row {row}, column {column}");
        }
    }
}

#[cfg(not(kernel_sanitizer = "thread"))]
#[test]
fn threads_that_wait_in_vain_are_named_with_their_place() {
    let expected = [
        (
            "test_barrier_of_some",
            "64 at ",
            "barriers.cu:",
            "64 have ended",
        ),
        (
            "test_two_barriers",
            "threads of a block wait",
            "barriers.cu:",
            " and ",
        ),
        (
            "test_shuffle_of_some",
            "for their warp",
            "barriers.cu:",
            "64 have ended",
        ),
        (
            "test_shuffle_with_mask",
            "a part of the lanes",
            "barriers.cu:",
            "block 0, 0, 0",
        ),
    ];
    for (kernel, what, place, more) in expected {
        let mut out = unwritten(128);
        let mut args = [Arg::from(&mut out[..])];
        // SAFETY: one element for each thread.
        let error = unsafe { launch(kernel, Dims::new(1, 1, 128), 1, &mut args) };
        let error = error.expect_err(kernel).to_string();
        for part in [what, place, more] {
            assert!(error.contains(part), "{kernel}: {error}");
        }
    }
}

#[test]
fn shared_memory_is_nan_until_it_is_written() {
    let random = &mut Random::new();
    // The second launch finds the memory that the first one has written.
    let x = random.floats(64, 1.0);
    let mut out = vec![0.0_f32; 128];
    let mut args = [Arg::from(&mut out[..]), Arg::from(&x[..])];
    // SAFETY: one element of `x` and `out` for each thread.
    unsafe { random.launch("test_reverse", Dims::new(1, 1, 64), &mut args) };
    let mut args = [Arg::from(&mut out[..])];
    let dims = Dims {
        shared_bytes: 64 * 4,
        ..Dims::new(1, 1, 64)
    };
    // SAFETY: two elements of `out` for each thread, and one of dynamic shared memory.
    unsafe { random.launch("test_unwritten", dims, &mut args) };
    assert!(out.iter().all(|x| x.is_nan()), "{out:?}");
}

#[test]
fn a_launch_that_a_gpu_would_refuse_is_refused() {
    let out = &mut [0.0_f32; 32];
    let x = &[0.0_f32; 32];
    let mut run = |kernel: &str, dims: Dims, num_args: usize| -> Result<(), LaunchError> {
        let mut args = [Arg::from(&mut out[..]), Arg::from(&x[..]), 1_i32.into()];
        // SAFETY: at most 32 threads and one block are accepted.
        unsafe { launch(kernel, dims, 0, &mut args[..num_args]) }
    };
    let one = Dims::new(1, 1, 32);
    assert_eq!(run("test_broadcast", one, 2), Ok(()));
    for (kernel, dims, num_args, expected) in [
        ("test_nothing", one, 2, "no kernel 'test_nothing'"),
        ("test_broadcast", one, 1, "has 2 arguments, not 1"),
        ("test_sum_rows", one, 2, "has 3 arguments, not 2"),
        (
            "test_broadcast",
            Dims::new(0, 1, 32),
            2,
            "a grid of 0 x 1 x 1",
        ),
        (
            "test_broadcast",
            Dims::new(1, 65536, 32),
            2,
            "a grid of 1 x 65536 x 1",
        ),
        (
            "test_broadcast",
            Dims::new(1, 1, 48),
            2,
            "blocks of 48 x 1 x 1",
        ),
        ("test_broadcast", Dims::new(1, 1, 64), 2, "bound of 32"),
        (
            "test_broadcast",
            Dims {
                shared_bytes: 228 << 10,
                ..one
            },
            2,
            "bytes of shared memory",
        ),
    ] {
        let error = run(kernel, dims, num_args).expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}");
    }
    let mut args = [Arg::from(&mut out[..]), 1_i32.into()];
    // SAFETY: refused before it runs.
    let error = unsafe { launch("test_broadcast", one, 0, &mut args) };
    let error = error.expect_err("size of an argument").to_string();
    assert!(error.contains("argument 1 has 8 bytes, not 4"), "{error}");
}

#[test]
fn kernels_are_known_by_name() {
    let names = kernel_names();
    assert!(names.contains(&"embed") && names.contains(&"test_reverse"));
    assert!(names.is_sorted());
}
