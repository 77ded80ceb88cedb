//! What each step of `cargo xtask test` runs.

use std::process::Command;

use super::binaries::{self, TestBinary};
use super::report::{self, skipped_tests_file};
use super::step::Step;
use super::tier::{Tier, left_out_models, seed_of_commit};
use crate::library::Build;
use crate::process::{cargo, command, run};
use crate::{
    Result, book, coverage, fuzz, kernels, library, mutants, sanitize, setup, soak, source_paths,
    workspace,
};

/// Runs a step.
///
/// # Errors
/// A check fails, or what it needs cannot be installed.
pub fn run_step(step: Step, tier: Tier, pytest: &[String]) -> Result<()> {
    match step {
        Step::Kernels => match tier {
            Tier::Quick => kernels::run_sample(seed_of_commit()),
            Tier::Step | Tier::Part(_) | Tier::All => kernels::run(kernels::ALL),
        },
        Step::Fmt => {
            run(cargo().args(["fmt", "--all", "--check"]))?;
            let fuzz = "--manifest-path=tests/fuzz/Cargo.toml";
            run(cargo().args(["fmt", fuzz, "--check"]))
        }
        Step::Setup => {
            setup::python()?;
            setup::tritonserver()?;
            Ok(())
        }
        Step::Clippy => clippy(),
        Step::Doc => documentation(),
        Step::Deny => dependencies(),
        Step::Book => book::run(),
        Step::Build => {
            binaries::compile()?;
            build_programs(Build::Tested)
        }
        Step::Release => {
            build_programs(Build::Shipped)?;
            let backend = ["--package", "inflight-backend"];
            run(cargo()
                .args(["check", "--no-default-features"])
                .args(backend))
        }
        Step::Models => {
            let models = test_binaries(tier)?
                .into_iter()
                .filter(|binary| binary.name == MODELS);
            let has_test = |name: &str| tier.has_test_of_models(name);
            let mut chosen = Vec::new();
            for binary in models {
                let choice = binary.with_tests(has_test)?;
                report::leave_out(&choice.binary.name, &choice.left_out, &left_out_models())?;
                chosen.push(choice.binary);
            }
            run_tests(tier, &chosen)
        }
        Step::Unit => {
            let mut binaries = test_binaries(tier)?;
            let has_others = tier == Tier::Step;
            let is_apart = |name: &str| name == MODELS || name == DRIVER;
            binaries.retain(|binary| has_others || !is_apart(&binary.name));
            run_tests(tier, &binaries)
        }
        Step::Driver => {
            let mut binaries = test_binaries(tier)?;
            binaries.retain(|binary| binary.name == DRIVER);
            run_tests(tier, &binaries)
        }
        Step::Fuzz => fuzz::run(&fuzz::Options::short()),
        Step::Mutants => mutants::run_shard(seed_of_commit() as usize),
        Step::Coverage => coverage::run(&coverage::Options::default()),
        Step::Pages => page_tests(tier.build(), pytest),
        Step::Server | Step::OtherServer | Step::Gpus => {
            let mut options = tier.pytest_options();
            options.push(format!("--share={}", tier.share_of_server_tests(step)));
            options.extend_from_slice(pytest);
            server_tests(tier, tier.build(), &options)
        }
        Step::Shipped => {
            let mut options = vec!["--tier=shipped".to_owned()];
            options.extend_from_slice(pytest);
            server_tests(tier, Build::Shipped, &options)
        }
        Step::Sanitize => sanitize::run(&sanitize::Options::default()),
        Step::Soak => soak::run(&soak::Options::in_tests()),
    }
}

/// Checks the dependencies for known vulnerabilities. Not a test step: tests pass with no network beyond the
/// package registries.
pub fn advisories() -> Result<()> {
    run(command(setup::cargo_deny()?).args(["check", "advisories"]))
}

fn clippy() -> Result<()> {
    run(cargo().args([
        "clippy",
        "--workspace",
        "--all-targets",
        "--",
        "--deny=warnings",
    ]))
}

fn documentation() -> Result<()> {
    run(cargo()
        .args([
            "doc",
            "--workspace",
            "--no-deps",
            "--document-private-items",
        ])
        .env("RUSTDOCFLAGS", "--deny=warnings"))?;
    run(cargo().args(["test", "--workspace", "--doc"]))
}

fn dependencies() -> Result<()> {
    // cargo-deny reads all dependencies, also those that no build has fetched yet.
    run(cargo().args(["fetch", "--locked"]))?;
    run(command(setup::cargo_deny()?).args(["--offline", "check", "bans", "licenses", "sources"]))
}

/// Builds the library and the programs that server tests run.
fn build_programs(build: Build) -> Result<()> {
    library::backend_directory(build)?;
    library::simulator(build)?;
    if build == Build::Shipped {
        // A test installs it by cmake.
        library::embed()?;
    }
    library::openai(build)?;
    library::front_cost(build)?;
    build_mpi_plugin(build);
    Ok(())
}

/// The executable of the step `models`.
const MODELS: &str = "models";
/// The executable of the step `driver`.
const DRIVER: &str = "ffi_host";

fn test_binaries(tier: Tier) -> Result<Vec<TestBinary>> {
    // Some of the tests use the plug-in.
    build_mpi_plugin(tier.build());
    binaries::compile()
}

fn run_tests(tier: Tier, binaries: &[TestBinary]) -> Result<()> {
    let mut variables = tier.seeds();
    let skipped = skipped_tests_file().display().to_string();
    variables.push(("INFLIGHT_SKIPPED_TESTS", skipped));
    binaries::run(binaries, &variables)
}

fn page_tests(build: Build, pytest: &[String]) -> Result<()> {
    run(command(setup::python()?)
        .current_dir(workspace::root().join("tests/pages"))
        .args(["-m", "pytest"])
        .args(pytest)
        .env("XTASK", library::xtask()?)
        .env("CHROMIUM", setup::browser()?)
        .env("BOOK", book::build()?)
        .env("INFLIGHT_SIM", library::simulator(build)?)
        .env("INFLIGHT_SKIPPED_TESTS", skipped_tests_file()))
}

fn server_tests(tier: Tier, build: Build, pytest: &[String]) -> Result<()> {
    build_mpi_plugin(build);
    let mut tests = command(setup::python()?);
    if tier != Tier::Quick {
        add_other_clients(&mut tests)?;
    }
    if build == Build::Shipped {
        tests.env("INFLIGHT_EMBED", library::embed()?);
    }
    run(tests
        .current_dir(workspace::root().join("tests/server"))
        .args(["-m", "pytest"])
        .args(pytest)
        .envs(tier.seeds())
        .env("XTASK", library::xtask()?)
        .env("INFLIGHT_OPENAI", library::openai(build)?)
        .env("INFLIGHT_FRONT_COST", library::front_cost(build)?)
        .env("CUDA_STAND_IN", library::cuda_stand_in()?)
        .env("TRITONSERVER", setup::tritonserver()?)
        .env("TRITON_BACKENDS", library::backend_directory(build)?)
        .env("INFLIGHT_SIM", library::simulator(build)?)
        .env("RELEASE_RUSTFLAGS", source_paths::rustflags()?.join("\x1f"))
        .env("INFLIGHT_SKIPPED_TESTS", skipped_tests_file()))
}

/// The clients that the quick tier does without, since installing them takes minutes.
fn add_other_clients(tests: &mut Command) -> Result<()> {
    match setup::prometheus() {
        Ok(programs) => {
            tests.env("PROMETHEUS", programs);
        }
        // Its tests are skipped, and say so.
        Err(error) => eprintln!("no Prometheus: {error}"),
    }
    match setup::claude_code() {
        Ok(program) => {
            tests.env("CLAUDE_CODE", program);
        }
        // Its test is skipped, and says so.
        Err(error) => eprintln!("no Claude Code: {error}"),
    }
    tests
        .env("CHROMIUM", setup::browser()?)
        .env("AIPERF_PYTHON", setup::aiperf()?)
        .env("PYTHON_BACKEND_PACKAGES", setup::python_backend_packages()?)
        .env("NODE_CLIENTS", setup::node_clients()?);
    Ok(())
}

/// Builds the plug-in for MPI. Its tests are skipped, and say so, where MPI cannot be had.
fn build_mpi_plugin(build: Build) {
    if let Err(error) = library::mpi_plugin(build) {
        eprintln!("no plug-in for MPI: {error}");
    }
}
