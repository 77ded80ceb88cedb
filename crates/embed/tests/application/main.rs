//! Compiles a C application of the batch manager, links it with the static library, and runs it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Mutex;

use inflight_base::{SequenceId, TokenId, Tokens};
use inflight_engine::{Event, NewRequest};
use inflight_manager::ManagerOptions;

#[path = "../../../../tests/support/missing.rs"]
mod missing;
mod ranks;

const PROMPTS: [&str; 5] = [
    "5 6 7",
    "1",
    "9 8 7 6 5 4 3 2 1",
    "100 101 102 103",
    "42 42",
];
const NUM_NEW_TOKENS: u32 = 6;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .nth(2)
        .expect("the workspace")
}

fn fixture() -> PathBuf {
    root().join("tests/fixtures/qwen3")
}

/// The static library that cargo built with this test: the latest, if there are several.
fn archive() -> PathBuf {
    let test = std::env::current_exe().expect("the test has a path");
    let folder = test.parent().expect("a file lies in a folder");
    let files = fs::read_dir(folder).expect("the folder of the test");
    let archives = files.flatten().filter(|file| {
        let name = file.file_name();
        let name = name.to_string_lossy();
        name.starts_with("libinflight_embed") && name.ends_with(".a")
    });
    let latest = archives.max_by_key(|file| {
        let written = file.metadata().and_then(|it| it.modified());
        written.expect("a file has a time")
    });
    latest.expect("cargo makes the archive").path()
}

/// Builds a program from one C or C++ source.
fn program(compiler: &str, source: &Path, options: &[&str]) -> PathBuf {
    // Named after the test, because tests build the same program concurrently.
    let test = std::thread::current();
    let test = test.name().unwrap_or_default().replace("::", "-");
    let name = source.file_stem().unwrap_or_default().to_string_lossy();
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{test}-{name}"));
    let output = Command::new(compiler)
        .args(options)
        .args(["-O1", "-Wall", "-Wextra", "-Werror", "-pedantic", "-I"])
        .arg(root().join("include"))
        .arg(source)
        .arg(archive())
        .args(["-Wl,--gc-sections", "-lpthread", "-ldl", "-lm", "-o"])
        .arg(&program)
        .output()
        .expect("a compiler");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    program
}

fn ids(text: &str) -> Vec<TokenId> {
    let words = text.split_whitespace();
    words.filter_map(|word| word.parse().ok()).collect()
}

/// The options of a manager with some more.
fn options(checkpoint: &Path, more: &str) -> String {
    let checkpoint = checkpoint.display();
    format!(r#"{{"gpt_model_path": "{checkpoint}"{more}}}"#)
}

/// The tokens that the manager itself generates for each prompt.
fn expected() -> Vec<Vec<TokenId>> {
    let options = options(&fixture(), "");
    let options = ManagerOptions::parse(&options).expect("good options");
    let (mut manager, model) = options.load().expect("the fixture loads");
    for (id, prompt) in (0..).zip(PROMPTS) {
        let request = NewRequest::new(SequenceId(id), ids(prompt), Tokens(NUM_NEW_TOKENS));
        manager.add(request).expect("fits");
    }
    let mut answers = vec![Vec::new(); PROMPTS.len()];
    let mut events = Vec::new();
    while !manager.is_idle() {
        manager.launch().expect("steps succeed");
        manager.land(&mut events).expect("steps succeed");
        for event in events.drain(..) {
            if let Event::Token(id, token) = event {
                answers[id.index()].push(token);
            }
        }
    }
    // An end id would end the application's request early.
    let has_end = |answer: &Vec<TokenId>| answer.iter().any(|id| model.end_ids.contains(id));
    assert!(!answers.iter().any(has_end), "{answers:?}");
    answers
}

/// Builds one of the examples, unless another test has: the archive takes seconds to link.
fn example(name: &'static str) -> PathBuf {
    static BUILT: Mutex<BTreeMap<&str, PathBuf>> = Mutex::new(BTreeMap::new());
    let build = || {
        program(
            "cc",
            &root().join("examples/embed_c").join(name),
            &["-std=c11"],
        )
    };
    let mut built = BUILT.lock().expect("the other examples compile");
    built.entry(name).or_insert_with(build).clone()
}

/// Checks that an application prints the manager's tokens for every prompt, as its requests ask.
fn check_answers(program: &Path) {
    let output = run(program, &fixture(), &PROMPTS);
    let text = String::from_utf8(output.stdout).expect("text");
    assert!(output.status.success(), "{text}");
    for (id, (prompt, answer)) in PROMPTS.iter().zip(expected()).enumerate() {
        let mine: Vec<_> = text
            .lines()
            .filter_map(|line| line.strip_prefix(&format!("{id}:")))
            .collect();
        let is_final = |line: &&&str| line.contains(" final ");
        let tokens = mine
            .iter()
            .map(|line| line.split(" final ").next().unwrap_or(line));
        let tokens: Vec<_> = tokens.flat_map(ids).collect();
        let is_streaming = id % 2 != 0;
        let whole = [ids(prompt), answer.clone()].concat();
        assert_eq!(tokens, if is_streaming { answer } else { whole }, "{text}");
        assert_eq!(
            mine.len(),
            if is_streaming {
                NUM_NEW_TOKENS as usize
            } else {
                1
            }
        );
        let num_finals = mine.iter().filter(is_final).count();
        assert!(num_finals == 1 && mine.last().as_ref().is_some_and(is_final));
    }
    let records = text
        .lines()
        .last()
        .and_then(|line| line.strip_suffix(" records"));
    let num_records: u32 = records.expect("the last line").parse().expect("a number");
    assert!(num_records >= NUM_NEW_TOKENS, "{text}");
}

#[test]
fn a_c_application_gets_the_managers_tokens() {
    check_answers(&example("embed.c"));
}

#[test]
fn an_executor_in_c_has_the_same_tokens() {
    check_answers(&example("executor.c"));
}

#[test]
fn errors_reach_the_application() {
    let program = example("embed.c");
    let missing = run(&program, Path::new("/no/such/checkpoint"), &PROMPTS);
    let words = String::from_utf8_lossy(&missing.stderr).into_owned();
    assert!(
        !missing.status.success() && words.contains("/no/such/checkpoint"),
        "{words}"
    );

    let wrong = run(&program, &fixture(), &["5 6", "5 100000"]);
    let text = String::from_utf8_lossy(&wrong.stdout).into_owned();
    let error = "1: error: tensor 'input_ids' has 100000, which is not a token id";
    assert!(wrong.status.success() && text.contains(error), "{text}");
    assert!(text.contains("0: 5 6 ") && text.contains("final"), "{text}");
}

#[test]
fn errors_of_an_executor_are_returned_where_the_request_is_enqueued() {
    let program = example("executor.c");
    let wrong = run(&program, &fixture(), &["5 6", "5 100000"]);
    let [answers, errors] =
        [wrong.stdout, wrong.stderr].map(|text| String::from_utf8(text).expect("text"));
    let error = "prompt 1: tensor 'input_ids' has 100000, which is not a token id";
    assert!(wrong.status.success() && errors.contains(error), "{errors}");
    assert!(
        answers.contains("0: 5 6 ") && answers.contains("final"),
        "{answers}"
    );
}

#[test]
fn whatever_violates_the_header_is_refused() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/application/misuse.c");
    let program = program("cc", &source, &["-std=c11"]);
    let output = Command::new(program)
        .arg(fixture())
        .output()
        .expect("it runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && text == "0 failures\n", "{text}");
}

fn run(program: &Path, checkpoint: &Path, prompts: &[&str]) -> Output {
    let small = r#", "max_num_requests": 4, "max_num_tokens": 64"#;
    Command::new(program)
        .arg(options(checkpoint, small))
        .arg(NUM_NEW_TOKENS.to_string())
        .args(prompts)
        .output()
        .expect("it runs")
}

#[test]
fn the_header_compiles_as_cpp() {
    let source = Path::new(env!("CARGO_TARGET_TMPDIR")).join("header.cpp");
    let code = "#include \"inflight_batch_manager.h\"\n\
                int main() {\n\
                  return inflight_batch_manager_destroy(nullptr) + inflight_executor_destroy(nullptr);\n\
                }\n";
    fs::write(&source, code).expect("a file");
    let program = program("c++", &source, &["-std=c++17"]);
    let status = Command::new(program).status().expect("it runs");
    assert!(status.success());
}
