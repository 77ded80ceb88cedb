//! In a build with a sanitizer (see `src/lib.rs`): it reports what is wrong with wrong kernels.
use std::env;
use std::process::Command;

use inflight_kernels_on_cpu::{Arg, Dims};

use crate::support::Random;

/// Names the kernel that a process of this test runs.
const KERNEL: &str = "KERNEL_TO_RUN";

#[cfg(kernel_sanitizer = "thread")]
#[test]
fn races_are_reported() {
    for kernel in [
        "test_reverse",
        "test_sum_rows",
        "test_broadcast",
        "test_multiply",
    ] {
        let (is_fine, report) = run(kernel);
        assert!(is_fine, "{kernel}: {report}");
    }
    for (kernel, file) in [
        ("test_reverse_without_barrier", "barriers.cu"),
        ("test_sum_rows_without_barrier", "barriers.cu"),
        ("test_broadcast_by_shuffle", "barriers.cu"),
        ("test_blocks_collide", "barriers.cu"),
        ("test_multiply_without_barrier", "tiles.cu"),
    ] {
        let (is_fine, report) = run(kernel);
        let is_found = report.contains("data race") && report.contains(file);
        assert!(!is_fine && is_found, "{kernel}: {report}");
    }
}

#[cfg(kernel_sanitizer = "address")]
#[test]
fn accesses_out_of_bounds_are_reported() {
    for kernel in [
        "test_reverse",
        "test_sum_rows",
        "test_broadcast",
        "test_multiply",
    ] {
        let (is_fine, report) = run(kernel);
        assert!(is_fine, "{kernel}: {report}");
    }
    for kernel in [
        "test_shared_overrun",
        "test_dynamic_overrun",
        "test_global_overrun",
    ] {
        let (is_fine, report) = run(kernel);
        let is_found = report.contains("AddressSanitizer") && report.contains("barriers.cu");
        assert!(!is_fine && is_found, "{kernel}: {report}");
    }
}

#[cfg(kernel_sanitizer = "undefined")]
#[test]
fn misaligned_accesses_are_reported() {
    let (is_fine, report) = run("test_reverse");
    assert!(is_fine, "{report}");
    let (is_fine, report) = run("test_misaligned");
    let is_found = report.contains("misaligned address") && report.contains("barriers.cu");
    assert!(!is_fine && is_found, "{report}");
}

/// Whether a process that runs a kernel ends well, and what it prints.
fn run(kernel: &str) -> (bool, String) {
    let mut process = Command::new(env::current_exe().expect("the path of this test"));
    process.args([
        "--ignored",
        "--exact",
        "sanitizers::one_kernel",
        "--nocapture",
    ]);
    process.env(KERNEL, kernel);
    let output = process.output().expect("a process of this test");
    let printed = [&output.stdout[..], &output.stderr].concat();
    (
        output.status.success(),
        String::from_utf8_lossy(&printed).into_owned(),
    )
}

#[test]
#[ignore = "run as a process by the other test"]
fn one_kernel() {
    let kernel = env::var(KERNEL).expect("the name of a kernel");
    let random = &mut Random::new();
    let mut out = vec![0.0_f32; 64 * 64];
    let x = vec![0.0_f32; 64 * 96 / 2];
    // Twice as many blocks as would do, so that both teams of threads have one.
    let num_blocks = if kernel == "test_blocks_collide" {
        16
    } else {
        1
    };
    for _ in 0..8 {
        let mut args = match kernel.as_str() {
            "test_blocks_collide"
            | "test_shared_overrun"
            | "test_dynamic_overrun"
            | "test_global_overrun"
            | "test_misaligned" => vec![Arg::from(&mut out[..])],
            name if name.starts_with("test_sum_rows") => {
                vec![Arg::from(&mut out[..]), Arg::from(&x[..]), 4_i32.into()]
            }
            name if name.starts_with("test_multiply") => {
                vec![
                    Arg::from(&mut out[..]),
                    Arg::from(&x[..]),
                    Arg::from(&x[..]),
                    64_i32.into(),
                    96_i32.into(),
                ]
            }
            _ => vec![Arg::from(&mut out[..]), Arg::from(&x[..])],
        };
        let block = match kernel.as_str() {
            name if name.starts_with("test_broadcast") => 32,
            name if name.starts_with("test_multiply") => 128,
            _ => 64,
        };
        let dims = Dims {
            shared_bytes: 64 * 4,
            ..Dims::new(num_blocks, 1, block)
        };
        // SAFETY: the operands are large enough for right kernels; the sanitizer stops wrong ones.
        unsafe { random.launch(&kernel, dims, &mut args) };
    }
}
