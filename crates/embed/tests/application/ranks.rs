//! C applications on several ranks: processes that rank 0 starts, or `mpirun`.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use super::{NUM_NEW_TOKENS, PROMPTS, example, fixture, missing, options, program, root};

const ONE: &str = "";
const TWO: &str = r#", "tensor_parallel_size": 2, "num_threads": 1"#;
const FOUR: &str = r#", "tensor_parallel_size": 4, "num_threads": 1"#;
const STAGES: &str = r#", "pipeline_parallel_size": 2, "num_threads": 1"#;

/// The plug-in for MPI; `None`, which is reported, if the machine lacks it or `mpirun`.
fn mpi_library() -> Option<PathBuf> {
    let library = root().join("target/mpi/release/libinflight_mpi.so");
    let version = Command::new("mpirun").arg("--version").output();
    let is_present = library.is_file() && version.is_ok_and(|output| output.status.success());
    missing::present_or_reported(&"MPI", is_present).then_some(library)
}

/// `mpirun` with so many processes. It ends them, and fails, if they take too long.
fn mpirun(num_ranks: usize) -> Command {
    let mut command = Command::new("mpirun");
    command
        .args(["--allow-run-as-root", "--oversubscribe", "--timeout", "300"])
        .args(["--mca", "btl", "self,vader", "-n"])
        .arg(num_ranks.to_string());
    command
}

fn over_mpi(ranks: &str, library: &Path) -> String {
    let library = library.display();
    format!(r#"{ranks}, "rank_transport": "mpi", "mpi_library": "{library}""#)
}

/// This very program runs the other ranks.
fn spawned(ranks: &str, program: &Path) -> String {
    let program = program.display();
    format!(r#"{ranks}, "rank_program": "{program}""#)
}

fn output(mut command: Command, more_options: &str) -> Output {
    command
        .arg(options(&fixture(), more_options))
        .arg(NUM_NEW_TOKENS.to_string())
        .args(PROMPTS)
        .stdin(Stdio::null())
        .output()
        .expect("it runs")
}

/// The responses that a program prints, each with all bits of its log-probability, in an order that does not depend on
/// time.
fn responses(command: Command, more_options: &str) -> Vec<String> {
    let output = output(command, more_options);
    let [text, errors] =
        [output.stdout, output.stderr].map(|text| String::from_utf8(text).expect("text"));
    assert!(output.status.success(), "{more_options}: {text}{errors}");
    let (records, mut lines): (Vec<_>, Vec<_>) =
        text.lines().partition(|line| line.ends_with(" records"));
    assert_eq!(records.len(), 1, "only rank 0 has requests: {text}");
    // Those of a request are in order.
    lines.sort_by_key(|line| line.split(':').next());
    let num_finals = lines.iter().filter(|line| line.contains(" final ")).count();
    assert_eq!(num_finals, PROMPTS.len(), "{text}");
    lines.into_iter().map(str::to_owned).collect()
}

#[test]
fn processes_that_rank_0_starts_give_the_bits_of_one() {
    for program in ["embed.c", "executor.c"].map(example) {
        let answers = |ranks: &str| responses(Command::new(&program), &spawned(ranks, &program));
        assert_eq!(answers(STAGES), answers(ONE));
        assert_eq!(answers(TWO), answers(FOUR));
    }
}

#[test]
fn processes_of_mpirun_give_the_same_bits() {
    let Some(library) = mpi_library() else {
        return;
    };
    for program in ["embed.c", "executor.c"].map(example) {
        for ranks in [TWO, STAGES] {
            let alone = responses(Command::new(&program), &spawned(ranks, &program));
            let mut command = mpirun(2);
            command.arg(&program);
            assert_eq!(responses(command, &over_mpi(ranks, &library)), alone);
        }
    }
}

#[test]
fn a_process_of_mpirun_computes_one_manager_after_the_other() {
    let Some(library) = mpi_library() else {
        return;
    };
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/application/ranks.c");
    let program = program("cc", &source, &["-std=c11"]);
    let output = mpirun(2)
        .arg(program)
        .arg(options(&fixture(), &over_mpi(TWO, &library)))
        .output()
        .expect("it runs");
    let [text, errors] =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(output.status.success(), "{text}{errors}");
    assert_eq!(text, "0 failures\n".repeat(2));
}

#[test]
fn a_rank_that_cannot_be_is_an_error_with_the_reason() {
    let program = example("embed.c");
    let fails = |command: Command, more_options: &str, words: &[&str]| {
        let output = output(command, more_options);
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{more_options}");
        for words in words {
            assert!(errors.contains(words), "{more_options}: {errors}");
        }
    };
    let alone = || Command::new(&program);
    // The default is beside the program.
    let beside = program.with_file_name("inflight-rank");
    let beside = beside.to_str().expect("a name");
    fails(
        alone(),
        TWO,
        &["rank 1 cannot be started", beside, "No such file"],
    );
    let stages = r#", "pipeline_parallel_size": 99"#;
    fails(alone(), stages, &["'pipeline_parallel_size': '99' is not"]);
    let sockets = r#", "rank_transport": "sockets""#;
    fails(alone(), sockets, &["'rank_transport': 'sockets' is not"]);
    let mpi = over_mpi(TWO, Path::new("/no/such/plug-in"));
    fails(alone(), &mpi, &["was not started by mpirun"]);

    let by_hand = Command::new(&program)
        .arg("rank=1")
        .stdin(Stdio::null())
        .output();
    assert_eq!(by_hand.expect("it runs").status.code(), Some(2));

    let Some(library) = mpi_library() else {
        return;
    };
    let of_mpirun = |num_ranks| {
        let mut command = mpirun(num_ranks);
        command.arg(&program);
        command
    };
    fails(of_mpirun(2), &mpi, &["/no/such/plug-in cannot be opened"]);
    let too_few = over_mpi(FOUR, &library);
    fails(
        of_mpirun(2),
        &too_few,
        &["started 2 processes, and the model has 4 ranks"],
    );
}
