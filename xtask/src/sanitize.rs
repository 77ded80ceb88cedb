//! `cargo xtask sanitize`: runs tests under the compilers' sanitizers.

use clap::{Args, ValueEnum};

use crate::process::{cargo, run as run_command};
use crate::{Result, workspace};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Sanitizer {
    /// Memory errors in the kernels, in the backend in a fake server, and beside users' libraries of post-processors
    Address,
    /// Data races in the thread pool, in the threads of responses and guides, and in the backend in a fake server
    Thread,
}

#[derive(Args, Default)]
pub struct Options {
    /// The sanitizers [default: all]
    #[arg(value_enum)]
    sanitizers: Vec<Sanitizer>,
}

/// Runs the tests of each sanitizer, also those after a failure.
pub fn run(options: &Options) -> Result<()> {
    let mut failed = Vec::new();
    for &sanitizer in Sanitizer::value_variants() {
        if options.sanitizers.is_empty() || options.sanitizers.contains(&sanitizer) {
            for tests in sanitizer.tests() {
                if let Err(error) = sanitizer.run_tests(tests) {
                    failed.push(error.to_string());
                }
            }
            if let Err(error) = sanitizer.run_cuda_kernels() {
                failed.push(error.to_string());
            }
        }
    }
    match failed.is_empty() {
        true => Ok(()),
        false => Err(failed.join("\n").into()),
    }
}

impl Sanitizer {
    const fn name(self) -> &'static str {
        match self {
            Self::Address => "address",
            Self::Thread => "thread",
        }
    }

    /// Flags of rustc.
    const fn flags(self) -> &'static str {
        match self {
            Self::Address => "-Zsanitizer=address",
            // The standard library comes compiled, without the sanitizer.
            Self::Thread => "-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer",
        }
    }

    /// Arguments of `cargo test`.
    const fn tests(self) -> &'static [&'static [&'static str]] {
        match self {
            Self::Address => &[
                &["--package=inflight-device-cpu", "--test=kernels"],
                &[
                    "--package=inflight-tests",
                    "--no-fail-fast",
                    "--test=ffi_host",
                    "--test=panics",
                    "--test=logits_processors",
                ],
            ],
            Self::Thread => &[
                &["--package=inflight-threads", "--lib"],
                &[
                    "--package=inflight-runner",
                    "--package=inflight-guidance",
                    "--package=triton-inflight",
                    "--lib",
                    "--",
                    "guid",
                    "compil",
                    "respon",
                ],
                &["--package=inflight-tests", "--test=ffi_host"],
            ],
        }
    }

    /// Tests of the Rust code.
    fn run_tests(self, tests: &[&str]) -> Result<()> {
        // With a named machine, the flags do not apply to build scripts and macros.
        let machine = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
        // What it reports, and is no fault of ours: each with its reason.
        let suppressions = |file: &str| {
            let path = workspace::root().join("xtask/src").join(file);
            format!("suppressions={}", path.display())
        };
        run_command(
            cargo()
                .args(["test", "--target", &machine])
                // Less than other tests have, because all dependencies are compiled anew.
                .args(["--config", "profile.dev.package.\"*\".opt-level=1"])
                .arg("--target-dir")
                .arg(workspace::target("sanitize").join(self.name()))
                .args(tests)
                // The flags are unstable, and the stable compiler takes them with this variable.
                .env("RUSTC_BOOTSTRAP", "1")
                .env("RUSTFLAGS", self.flags())
                .env("LSAN_OPTIONS", suppressions("leak_sanitizer.supp"))
                .env("TSAN_OPTIONS", suppressions("thread_sanitizer.supp")),
        )
    }

    /// Tests of the CUDA kernels, which run on the CPU under the sanitizer of g++.
    fn run_cuda_kernels(self) -> Result<()> {
        run_command(
            cargo()
                .args(["test", "--package=inflight-kernels-on-cpu"])
                .arg("--target-dir")
                .arg(workspace::target("sanitize").join("cuda"))
                .env("INFLIGHT_KERNEL_SANITIZER", self.name()),
        )
    }
}
