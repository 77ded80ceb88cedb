//! Logits post-processors in shared libraries, over the real engine and runner: the examples, and processors
//! that break the rules.

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use inflight_base::{ClientId, SequenceId, TokenId};
use inflight_engine::{PromptLookup, Speculation};
use inflight_post_processors::{PostProcessors, ProcessedRequest};
use support::{TestRequest, c_library, folder, run, run_with, rust_library};

const C_EXAMPLE: &str = "examples/logits_processor_c/logits_processors.c";
const MISBEHAVING: &str = "tests/logits_processors/misbehaving.c";

fn example() -> PostProcessors {
    PostProcessors::with_library(&c_library(C_EXAMPLE, "example", &[])).expect("it opens")
}

fn misbehaving() -> PostProcessors {
    PostProcessors::with_library(&c_library(MISBEHAVING, "misbehaving", &[])).expect("it opens")
}

/// The tokens that a request gets alone.
fn alone(processors: &PostProcessors, request: &TestRequest) -> Result<Vec<TokenId>, String> {
    run(processors, std::slice::from_ref(request))
        .remove(&request.id)
        .expect("it ends")
}

#[test]
fn the_examples_do_what_they_document() {
    let (c, rust) = (example(), rust_library());
    let rust = PostProcessors::with_library(&rust).expect("it opens");
    let free = alone(&c, &TestRequest::new(1)).expect("free");
    let most_frequent = *free.last().expect("tokens");

    let avoiding = alone(&c, &TestRequest::new(1).named("avoid_last", "")).expect("free");
    assert!(avoiding.windows(2).all(|pair| pair[0] != pair[1]));
    assert!(
        free.windows(2).any(|pair| pair[0] == pair[1]),
        "avoid_last had no effect"
    );
    let same = [
        alone(&c, &TestRequest::new(1).named("avoid_last_batched", "")),
        alone(&rust, &TestRequest::new(1).named("avoid_recent", "1")),
        alone(
            &rust,
            &TestRequest::new(1).named("avoid_recent_batched", "1"),
        ),
    ];
    assert_eq!(same, [(); 3].map(|()| Ok(avoiding.clone())));

    let at_most = format!("{most_frequent} 2");
    let capped = alone(&c, &TestRequest::new(1).named("at_most", &at_most)).expect("free");
    let count = |tokens: &[TokenId]| tokens.iter().filter(|&&id| id == most_frequent).count();
    assert!(
        count(&free) > 2 && count(&capped) == 2,
        "{free:?} {capped:?}"
    );

    let recent = alone(&rust, &TestRequest::new(1).named("avoid_recent", "5")).expect("free");
    assert!(
        recent
            .windows(5)
            .all(|five| (1..5).all(|n| !five[..n].contains(&five[n])))
    );
}

#[test]
fn arguments_that_a_library_rejects_are_an_error_of_the_request() {
    let request = ProcessedRequest {
        id: SequenceId(1),
        client_request_id: Some("me"),
        client_id: None,
        vocab_size: 128,
    };
    let rust = PostProcessors::with_library(&rust_library()).expect("it opens");
    for (processors, name, arguments, words) in [
        (
            &example(),
            "at_most",
            "7",
            "rejected by 'at_most': '7' is not TOKEN COUNT",
        ),
        (&example(), "at_most", "500 1", "token 500 is not below 128"),
        (&example(), "at_most", "1\0", "a zero byte"),
        (&rust, "avoid_recent", "none", "'none' is not a number"),
        (
            &misbehaving(),
            "refuses",
            "",
            "rejected by 'refuses': never",
        ),
        (&misbehaving(), "fail", "", "did you mean 'fails'?"),
    ] {
        let error = processors.start(name, arguments, request).expect_err(words);
        assert!(error.to_string().contains(words), "{error}");
    }
}

/// Requests of every kind, including failing ones, get the same in any batch as alone.
#[test]
fn each_request_in_a_batch_gets_what_it_gets_alone() {
    let processors = misbehaving();
    let kinds = [
        ("", ""),
        ("nothing", ""),
        ("fails", "3"),
        ("fails_batched", "5"),
        ("writes_behind_batched", ""),
        ("tells", ""),
        ("force_tokens", r#"{"tokens": [1, 2, 3], "start": 2}"#),
        ("writes_before", ""),
        ("makes_nan", ""),
    ];
    let requests: Vec<_> = (0..27)
        .map(|id| match kinds[id as usize % kinds.len()] {
            ("", _) => TestRequest::new(id),
            (name, arguments) => TestRequest::new(id).named(name, arguments),
        })
        .collect();
    let alone: BTreeMap<_, _> = requests
        .iter()
        .map(|request| (request.id, alone(&processors, request)))
        .collect();
    assert!(alone.values().filter(|answer| answer.is_err()).count() == 15);
    let guesses = Speculation {
        max_draft_tokens: 3,
        prompt_lookup: Some(PromptLookup { min: 1, max: 2 }),
        has_draft_model: false,
        recomputes_drafts: false,
    };
    for num_threads in [1, 3] {
        for (overlap, speculation) in [(false, None), (true, None), (false, Some(guesses))] {
            let together = run_with(&processors, &requests, num_threads, overlap, speculation);
            assert_eq!(
                together, alone,
                "{num_threads} threads, overlap {overlap}, {speculation:?}"
            );
        }
    }
}

#[test]
fn an_entry_contains_the_ids_of_its_request() {
    let processors = misbehaving();
    for (client_id, told) in [(None, 0), (Some(0), 1), (Some(u64::MAX), 1 + 615)] {
        assert_told(&processors, client_id, told);
    }
}

fn assert_told(processors: &PostProcessors, client_id: Option<u64>, told: usize) {
    let mut request = TestRequest::new(4).named("tells", "");
    request.client_id = client_id.map(ClientId);
    let mut tokens = request.prompt();
    let num_prompt_tokens = tokens.len();
    // The length of the client's id, "client-4".
    let number = 3 * num_prompt_tokens + 5 * 8 + told;
    while tokens.len() < num_prompt_tokens + support::NUM_TOKENS {
        let last = *tokens.last().expect("a prompt") as usize;
        tokens.push(((last + 2 * tokens.len() + number) % support::vocab_size()) as TokenId);
    }
    assert_eq!(
        alone(processors, &request).as_deref(),
        Ok(&tokens[num_prompt_tokens..])
    );
}

#[test]
fn each_beam_of_a_request_is_processed_separately() {
    let c = example();
    let search = || TestRequest::new(3).searching();
    let free = alone(&c, &search()).expect("free");
    let avoiding = alone(&c, &search().named("avoid_last", "")).expect("free");
    assert_eq!(free.len(), 3 * support::NUM_TOKENS);
    assert_ne!(free, avoiding);
    for beam in avoiding.chunks(support::NUM_TOKENS) {
        assert!(beam.windows(2).all(|pair| pair[0] != pair[1]), "{beam:?}");
    }
    let rogue = misbehaving();
    let batched = [
        search().named("avoid_last_batched", ""),
        TestRequest::new(4),
    ];
    // The beams of a request are processed on several threads, and must not be mixed up.
    for _ in 0..200 {
        assert_eq!(run(&c, &batched)[&3].as_ref(), Ok(&avoiding));
    }
    let nothing = [search().named("nothing", ""), search_beside(4)];
    assert_eq!(run(&rogue, &nothing)[&3], Ok(free));
    let diary = folder().join("beams");
    let _ = fs::remove_file(&diary);
    let noting = search().named("notes_beams", diary.to_str().expect("UTF-8"));
    assert_eq!(alone(&rogue, &noting), alone(&rogue, &search()));
    let written = fs::read_to_string(&diary).expect("it was written");
    for beam in ["beam 0", "beam 1", "beam 2"] {
        assert!(written.contains(beam), "{written}");
    }
    let error = alone(&rogue, &search().named("fails", "4")).expect_err("it fails");
    assert!(error.contains("enough after 4 tokens"), "{error}");
}

/// A beam search that shares its steps with another one.
fn search_beside(id: u64) -> TestRequest {
    TestRequest::new(id).searching().named("fails_batched", "6")
}

#[test]
fn a_processor_that_breaks_the_rules_fails_its_own_request_and_is_named() {
    let processors = misbehaving();
    for (name, arguments, words) in [
        ("fails", "3", "enough after 3 tokens"),
        ("fails_batched", "0", "enough after 0 tokens"),
        (
            "fails_silently",
            "",
            "it returned status -3 without a reason",
        ),
        ("shouts", "", "xxxx"),
        ("writes_before", "", "it wrote outside of the logits"),
        ("writes_behind", "", "it wrote outside of the logits"),
        (
            "writes_behind_batched",
            "",
            "it wrote outside of the logits",
        ),
        (
            "makes_nan",
            "",
            "it set the logit of token 5 to NaN; a logit must",
        ),
        (
            "makes_infinity",
            "",
            "it set the logit of token 5 to inf; a logit must",
        ),
    ] {
        let error =
            alone(&processors, &TestRequest::new(1).named(name, arguments)).expect_err(words);
        assert!(
            error.starts_with(&format!("logits post-processor '{name}': ")),
            "{error}"
        );
        assert!(error.contains(words) && error.len() < 1600, "{error}");
    }
    let error =
        alone(&processors, &TestRequest::new(1).named("rules_all_out", "")).expect_err("none left");
    assert!(
        error.starts_with("no token is allowed: the logits post-processor"),
        "{error}"
    );
    // The memory of processors that wrote out of bounds is not used again.
    let free = alone(&processors, &TestRequest::new(1));
    assert_eq!(
        alone(&processors, &TestRequest::new(1).named("nothing", "")),
        free
    );
}

#[test]
fn states_are_created_and_destroyed_once_and_a_batch_is_one_call_per_step() {
    let processors = misbehaving();
    let diary = folder().join("diary");
    for (name, line) in [("notes", "process"), ("notes_batched", "batch")] {
        let _ = fs::remove_file(&diary);
        let arguments = diary.to_str().expect("UTF-8");
        let requests: Vec<_> = (0..4)
            .map(|id| TestRequest::new(id).named(name, arguments))
            .chain((4..6).map(TestRequest::new))
            .collect();
        let answers = run(&processors, &requests);
        assert!(answers.values().all(Result::is_ok));
        let written = fs::read_to_string(&diary).expect("it was written");
        let count = |what: &str| written.lines().filter(|it| it.starts_with(what)).count();
        assert_eq!((count("create"), count("destroy")), (4, 4), "{written}");
        let expected = match name {
            "notes" => 4 * support::NUM_TOKENS,
            _ => support::NUM_TOKENS,
        };
        assert_eq!(count(line), expected, "{written}");
        if name == "notes_batched" {
            assert_eq!(count("batch 4"), expected, "{written}");
        }
    }
}

#[test]
fn a_bad_library_is_rejected_with_the_reason() {
    let bad_table = |wrong: &str| {
        let define = format!("-DWRONG={wrong}");
        c_library("tests/logits_processors/bad_table.c", wrong, &[&define])
    };
    let text = folder().join("text.so");
    fs::write(&text, "This is no library.").expect("a file");
    let empty = folder().join("empty.c");
    fs::write(&empty, "int nothing_of_interest;").expect("a file");
    let empty = c_library(empty.to_str().expect("UTF-8"), "empty", &[]);
    let undefined = folder().join("undefined.c");
    fs::write(
        &undefined,
        "void not_there(void); void f(void) { not_there(); }",
    )
    .expect("a file");
    let undefined = c_library(undefined.to_str().expect("UTF-8"), "undefined", &[]);
    for (library, words) in [
        (Path::new("/no/such/library.so").to_owned(), "No such file"),
        (text, "file too short"),
        (folder(), "Is a directory"),
        (undefined, "not_there"),
        (empty, "does not export inflight_get_logits_processors()"),
        (
            bad_table("VERSION"),
            "built for version 1 of inflight_logits_processor.h, but this backend needs version 2",
        ),
        (bad_table("NO_TABLE"), "does not return a valid table"),
        (bad_table("EMPTY"), "0 processors; allowed are 1 to 1024"),
        (bad_table("MANY"), "4000000000 processors"),
        (
            bad_table("NO_PROCESSORS"),
            "pointer to processors is invalid",
        ),
        (bad_table("NO_NAME"), "processor 0: it has no name"),
        (
            bad_table("EMPTY_NAME"),
            "processor 0: its name is not 1 to 256 bytes",
        ),
        (bad_table("TWICE"), "there is already a processor 'one'"),
        (
            bad_table("BUILT_IN"),
            "there is already a processor 'ban_tokens'",
        ),
        (
            bad_table("NEITHER"),
            "'one' must set exactly one of process and process_batch",
        ),
        (
            bad_table("BOTH"),
            "'one' must set exactly one of process and process_batch",
        ),
    ] {
        let error = PostProcessors::with_library(&library)
            .err()
            .expect(words)
            .to_string();
        assert!(error.starts_with(&library.display().to_string()), "{error}");
        assert!(error.contains("logits_post_processor_library"), "{error}");
        assert!(error.contains(words), "{error}");
    }
}
