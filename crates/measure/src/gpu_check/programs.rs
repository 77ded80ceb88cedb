//! Test programs of the bundle: the project's own tests, which run on a GPU instead of in its place.

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use super::budget::Budget;
use super::check::Check;
use super::report::Report;
use crate::Result;

/// How often a program is asked whether it has ended.
const POLL: Duration = Duration::from_millis(20);

/// The modules of the kernels' tests that run on a GPU: the others are about the machine that takes a GPU's place.
/// Attention, whose references take longest, comes last.
const KERNEL_TESTS: [&str; 13] = [
    "activations",
    "elementwise",
    "experts",
    "fp8",
    "latent",
    "low_rank",
    "norms",
    "quantised",
    "recurrence",
    "rope",
    "rows",
    "sampling",
    "attention",
];

/// Every kernel against its reference in f64. Each module has a process: an error of one kernel may be an error of all
/// that the process launches behind it.
pub fn kernels(check: &Check, budget: &Budget, report: &mut Report) -> Result<()> {
    let program = check.bundle.join("tests/kernels");
    if !program.is_file() {
        return report.skipped("the bundle has no tests of kernels");
    }
    for module in KERNEL_TESTS {
        let mut command = Command::new(&program);
        command
            .arg(format!("{module}::"))
            .env("KERNEL_GPU", check.options.gpu.to_string())
            .env("KERNEL_IMAGES", check.bundle.join("kernels"));
        run_tests(&format!("kernels {module}"), command, 1, budget, report)?;
    }
    Ok(())
}

/// Tests of models on a GPU, by parts of their paths.
const MODEL_TESTS: [&str; 2] = ["cuda", "change_nothing_on_a_gpu"];
/// Those among them that need the stand-in: they count launches and free bytes, know its order of sums, provoke faults,
/// or have several GPUs.
const STAND_IN_TESTS: [&str; 14] = [
    "cuda_faults::",
    "cuda_overlap::",
    "cuda_rank_experts::",
    "cuda_rank_schedules::",
    "cuda_ranks::",
    "cuda_stages::",
    "cuda_weight_cache::",
    "a_generation_step_is_one_launch",
    "each_logit_shows_one_wrong_scale",
    "fp8_activations_need_a_gpu_that_multiplies_them",
    "graphs_of_all_shapes_are_recorded_at_load",
    "several_gpus_keep_the_same_groups",
    "the_memory_of_mixtures_is_counted",
    "the_memory_of_quantised_products_is_counted",
];

/// Whole models with checked-in weights: logits beside the CPU's.
pub fn models(check: &Check, budget: &Budget, report: &mut Report) -> Result<()> {
    let program = check.bundle.join("tests/models");
    if !program.is_file() {
        return report.skipped("the bundle has no tests of models");
    }
    let mut command = Command::new(&program);
    command
        .args(MODEL_TESTS)
        .args(STAND_IN_TESTS.map(|test| format!("--skip={test}")))
        .env("CUDA_VISIBLE_DEVICES", check.options.gpu.to_string())
        .env("INFLIGHT_TEST_GPU", "1")
        .env("INFLIGHT_FIXTURES", check.bundle.join("fixtures"));
    // The cores of a stand-in compute beside each other.
    let num_threads = if check.options.quick { 2 } else { 1 };
    run_tests("models", command, num_threads, budget, report)
}

/// Runs a test program, and reports each of its tests that fails, under a name.
fn run_tests(
    name: &str,
    mut command: Command,
    num_threads: usize,
    budget: &Budget,
    report: &mut Report,
) -> Result<()> {
    if budget.is_over() {
        return report.failed(name, "not run: no time was left");
    }
    // On a GPU one after the other: all of them share it, and an error of one may be an error of all.
    command
        .arg(format!("--test-threads={num_threads}"))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let ended = run_until(&mut command, budget)?;
    let tests = Tests::read(&ended.output);
    match (&ended.status, tests.failed.is_empty()) {
        (Some(true), true) => report.passed(name, &format!("{} tests", tests.num_passed)),
        (None, true) => report.failed(
            name,
            &format!("cut off after {} tests: no time was left", tests.num_passed),
        ),
        _ => report.failed(name, &tests.complaint(&ended.output)),
    }
}

/// What a test program has said.
struct Tests {
    num_passed: usize,
    failed: Vec<String>,
}

impl Tests {
    fn read(output: &str) -> Self {
        let mut tests = Self {
            num_passed: 0,
            failed: Vec::new(),
        };
        for line in output.lines() {
            let Some((name, outcome)) = line
                .strip_prefix("test ")
                .and_then(|rest| rest.split_once(" ... "))
            else {
                continue;
            };
            match outcome.trim() {
                "ok" => tests.num_passed += 1,
                "ignored" => {}
                // The program was stopped in the midst of it.
                "" => {}
                _ => tests.failed.push(name.to_owned()),
            }
        }
        tests
    }

    fn complaint(&self, output: &str) -> String {
        /// Enough for what a test says, and little beside the figures.
        const MAX_CHARS: usize = 1500;
        let from = output.find("\nfailures:").unwrap_or(0);
        let said: String = output[from..].chars().take(MAX_CHARS).collect();
        let names = self.failed.join(", ");
        format!("{} passed; failed: {names}\n{said}", self.num_passed)
    }
}

/// A program that has ended, or was stopped.
struct Ended {
    /// Whether it has succeeded; nothing if it was stopped.
    status: Option<bool>,
    /// Standard output, then standard error.
    output: String,
}

fn run_until(command: &mut Command, budget: &Budget) -> Result<Ended> {
    die_with_parent(command);
    let mut child = command.spawn()?;
    let readers = [
        child.stdout.take().map(|pipe| read(Box::new(pipe))),
        child.stderr.take().map(|pipe| read(Box::new(pipe))),
    ];
    let status = wait_until(&mut child, budget)?;
    let texts = readers
        .into_iter()
        .flatten()
        .map(|reader| reader.join().unwrap_or_default());
    Ok(Ended {
        status,
        output: texts.collect(),
    })
}

fn wait_until(child: &mut Child, budget: &Budget) -> Result<Option<bool>> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status.success()));
        }
        if budget.is_over() {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        thread::sleep(POLL);
    }
}

fn read(mut pipe: Box<dyn Read + Send>) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        // What was read before an error is still of use.
        let _ = pipe.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// No program outlives a check that is killed.
pub fn die_with_parent(command: &mut Command) {
    // SAFETY: prctl may be called between fork and exec.
    unsafe {
        command.pre_exec(|| {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            Ok(())
        });
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::Path;

    use super::*;

    #[test]
    fn the_outcome_of_each_test_is_read() {
        let tests = Tests::read(
            "running 4 tests\ntest a::b ... ok\ntest c ... FAILED\ntest d ... ignored\ntest e ... ",
        );
        assert_eq!((tests.num_passed, tests.failed), (1, vec!["c".to_owned()]));
    }

    #[test]
    fn the_tests_of_every_kernel_run_on_a_gpu() {
        const NOT_OF_KERNELS: [&str; 3] = ["machine", "sanitizers", "support"];
        let main =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels-on-cpu/tests/suite/main.rs");
        let main = fs::read_to_string(main).expect("the file is read");
        let modules = main
            .lines()
            .filter_map(|line| line.strip_prefix("mod ")?.strip_suffix(';'));
        let of_kernels: BTreeSet<_> = modules
            .filter(|module| !NOT_OF_KERNELS.contains(module))
            .collect();
        assert_eq!(of_kernels, BTreeSet::from(KERNEL_TESTS));
    }

    #[test]
    fn tests_that_need_the_stand_in_are_skipped() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/models");
        let mut num_found = 0;
        for entry in fs::read_dir(folder).expect("the folder is read") {
            let path = entry.expect("the folder is read").path();
            let module = path.file_stem().expect("it has a name").to_string_lossy();
            if !module.starts_with("cuda") {
                continue;
            }
            let source = fs::read_to_string(&path).expect("the file is read");
            let mut function = "";
            for line in source.lines() {
                if let Some((_, name)) = line.split_once("fn ") {
                    function = name.split(['(', '<']).next().unwrap_or_default();
                }
                // They choose between the stand-in and a GPU.
                let chooses = ["on_stand_in", "on_any_gpu"].contains(&function);
                if line.contains("on_stand_in(") && !chooses {
                    num_found += 1;
                    let test = format!("{module}::{function}");
                    assert!(
                        STAND_IN_TESTS.iter().any(|skipped| test.contains(skipped)),
                        "{test}"
                    );
                }
            }
        }
        assert!(num_found > 20, "{num_found}");
    }

    #[test]
    fn a_program_that_takes_too_long_is_stopped() {
        let mut command = Command::new("sh");
        command
            .args(["-c", "echo test a ... ok; exec sleep 1000"])
            .stdout(Stdio::piped());
        let budget = Budget::new(Duration::from_millis(300));
        let ended = run_until(&mut command, &budget).expect("it starts");
        assert_eq!(ended.status, None);
        assert_eq!(Tests::read(&ended.output).num_passed, 1);
    }
}
