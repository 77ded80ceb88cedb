//! The real backend in the fake server: models that classify and score.

use std::ffi::CString;
use std::fs;

use inflight_config::Task;
use inflight_tests::checkout;
use inflight_triton::DataType;
use serde::Deserialize;
use serde_json::json;

use crate::INVALID;
use crate::embeddings::{ask_task, load_task, load_task_with, spec};
use crate::fake_triton::{Parameter, Sent};
use crate::served::Server;

#[derive(Deserialize)]
struct Expected {
    texts: Vec<Text>,
}

#[derive(Deserialize)]
struct Text {
    text: String,
    pair: Option<String>,
    max_tokens: Option<i64>,
    ids: Vec<u32>,
    second_text: Option<usize>,
    numbers: Vec<f32>,
    values: Vec<f32>,
}

/// What transformers and sentence-transformers make of the texts of a fixture.
fn texts(fixture: &str) -> Vec<Text> {
    let fixtures = checkout().join("tests/fixtures");
    let json = fs::read_to_string(fixtures.join(fixture).join("expected.json")).expect("a fixture");
    serde_json::from_str::<Expected>(&json)
        .expect("a fixture")
        .texts
}

fn pair_of(text: &Text) -> Vec<(&'static str, Parameter)> {
    let pair = text.pair.as_deref();
    let pair = pair.map(|pair| ("text_pair", string(pair)));
    let cut = text.max_tokens.map(Parameter::Int);
    let cut = cut.map(|cut| ("truncate_prompt_tokens", cut));
    pair.into_iter().chain(cut).collect()
}

fn string(text: &str) -> Parameter {
    Parameter::String(CString::new(text).expect("no NUL"))
}

/// An output of the final response.
fn output<'a>(sent: &'a [Sent], name: &str) -> (DataType, &'a [i64], &'a [u8]) {
    let sent = sent.last().expect("a response");
    assert!(sent.is_final);
    let mut outputs = sent.outputs.iter();
    let found = outputs.find(|(other, ..)| other == name);
    let (_, data_type, shape, bytes) = found.unwrap_or_else(|| panic!("no {name}: {sent:?}"));
    (*data_type, shape, bytes)
}

fn numbers(sent: &[Sent], name: &str) -> Vec<f32> {
    let (data_type, shape, bytes) = output(sent, name);
    let (values, _) = bytes.as_chunks();
    assert_eq!(
        (data_type, shape),
        (DataType::Fp32, &[1, values.len() as i64][..])
    );
    values.iter().map(|it| f32::from_le_bytes(*it)).collect()
}

fn strings(sent: &[Sent], name: &str) -> Vec<String> {
    let (data_type, shape, mut bytes) = output(sent, name);
    let mut strings = Vec::new();
    while let Some((len, rest)) = bytes.split_first_chunk() {
        let (string, rest) = rest.split_at(u32::from_le_bytes(*len) as usize);
        strings.push(String::from_utf8(string.to_vec()).expect("UTF-8"));
        bytes = rest;
    }
    assert_eq!(
        (data_type, shape),
        (DataType::Bytes, &[1, strings.len() as i64][..])
    );
    strings
}

fn assert_near(found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len());
    for (a, b) in found.iter().zip(expected) {
        assert!((a - b).abs() < 0.03, "{found:?} {expected:?}");
    }
}

#[test]
fn a_request_gets_the_probabilities_of_classes_and_their_names() {
    for fixture in [
        "classes/qwen3",
        "classes/llama",
        "classes/bert",
        "classes/modernbert",
    ] {
        let server = load_task("classify", fixture);
        for text in texts(fixture) {
            let ask = |options: &[(&str, Parameter)]| {
                ask_task(&server, Task::Classify, &[&text.text], options).remove(0)
            };
            let sent = ask(&pair_of(&text));
            let probs = numbers(&sent, "probs");
            assert_near(&probs, &text.values);
            let labels = strings(&sent, "labels");
            assert_eq!(labels, ["neutral", "glad", "sad"]);
            let best = (0..3).max_by(|&a, &b| text.values[a].total_cmp(&text.values[b]));
            assert_eq!(
                strings(&sent, "label"),
                [labels[best.expect("three")].clone()]
            );
            let num_tokens = (text.ids.len() as i32).to_le_bytes();
            assert_eq!(output(&sent, "num_input_tokens").2, num_tokens);
            let mut options = pair_of(&text);
            options.push(("raw_scores", Parameter::Bool(true)));
            assert_near(&numbers(&ask(&options), "probs"), &text.numbers);
        }
        server.unload();
    }
}

#[test]
fn a_pair_gets_a_score() {
    for fixture in ["classes/mistral", "classes/xlm-roberta"] {
        score_pairs(fixture);
    }
}

#[test]
fn a_model_that_generates_scores_by_the_logits_of_two_tokens() {
    score_pairs_on(
        load_task_with(
            "score",
            "classes/qwen3-reranker",
            &[("is_original_qwen3_reranker", "true")],
        ),
        "classes/qwen3-reranker",
    );
    let fixture = "classes/qwen2-reranker";
    let tokens = [("classifier_from_token", r#"["0", "1"]"#)];
    let server = load_task_with("score", fixture, &tokens);
    for text in texts(fixture) {
        let sent = &ask_task(&server, Task::Score, &[&text.text], &pair_of(&text))[0];
        assert_near(&numbers(sent, "score"), &text.values);
        let num_tokens = (text.ids.len() as i32).to_le_bytes();
        assert_eq!(output(sent, "num_input_tokens").2, num_tokens);
    }
    server.unload();
}

#[test]
fn tokens_of_a_pair_have_types_that_the_request_gives() {
    let fixture = "classes/bert";
    let server = load_task("classify", fixture);
    let pairs = texts(fixture);
    let pairs = pairs.iter().filter(|text| text.pair.is_some());
    for text in pairs {
        let second = text.second_text.expect("of two types");
        let all: Vec<_> = (0..text.ids.len())
            .map(|at| u32::from(at >= second))
            .collect();
        let ids = ("prompt_token_ids", string(&json!(text.ids).to_string()));
        let types = |list: &[u32]| ("token_type_ids", string(&json!(list).to_string()));
        let ask = |text: &str, options: &[(&str, Parameter)]| {
            ask_task(&server, Task::Classify, &[text], options).remove(0)
        };
        let of_texts = numbers(&ask(&text.text, &pair_of(text)), "probs");
        let of_tokens = numbers(&ask("", &[ids.clone(), types(&all)]), "probs");
        assert_near(&of_tokens, &text.values);
        assert_eq!(of_tokens, of_texts, "the same bits");
        let of_one_type = numbers(&ask("", std::slice::from_ref(&ids)), "probs");
        assert_ne!(of_one_type, of_texts);
        let zeros = vec![0; all.len()];
        assert_eq!(
            numbers(&ask("", &[ids.clone(), types(&zeros)]), "probs"),
            of_one_type
        );
        for (prompt, options, part) in [
            ("", vec![ids.clone(), types(&all[1..])], "one for each"),
            ("a", vec![types(&[0])], "the tokenizer gives"),
        ] {
            let sent = ask(prompt, &options);
            let error = sent.last().and_then(|sent| sent.error.clone());
            let (code, message) = error.unwrap_or_else(|| panic!("{part}: not refused"));
            assert!(code == INVALID && message.contains(part), "{message}");
        }
    }
    server.unload();
}

#[test]
fn a_model_without_types_of_tokens_refuses_them() {
    let server = load_task("classify", "classes/qwen3");
    let options = [
        ("prompt_token_ids", string("[5, 6]")),
        ("token_type_ids", string("[0, 1]")),
    ];
    let sent = ask_task(&server, Task::Classify, &[""], &options).remove(0);
    let error = sent.last().and_then(|sent| sent.error.clone());
    let (_, message) = error.expect("refused");
    assert!(message.contains("no types of tokens"), "{message}");
    server.unload();
}

#[test]
fn a_request_that_is_cancelled_among_its_chunks_is_left_to_triton() {
    let fixture = "classes/qwen3";
    // A step has a part of each prompt.
    let parameters = [("max_num_tokens", "12"), ("tokens_per_block", "4")];
    let server = load_task_with("classify", fixture, &parameters);
    let texts = texts(fixture);
    let longest = texts.iter().max_by_key(|text| text.ids.len());
    let longest = longest.expect("a text");
    let request = |number| {
        server
            .host
            .request(spec(Task::Classify, number, &longest.text, &[]))
    };
    let (cancelled, other) = (request(1), request(2));
    for _ in 0..2 {
        assert_eq!(server.execute(&[cancelled, other]), Ok(()));
    }
    assert!(server.host.sent(cancelled).is_empty() && server.host.sent(other).is_empty());
    server.host.cancel(cancelled);
    assert_eq!(server.execute(&[cancelled, other]), Ok(()));
    server.assert_left_to_triton(cancelled, &[other]);
    server.finish(&[other]);
    server.wait_for_final(other);
    assert_near(&numbers(&server.host.sent(other), "probs"), &longest.values);
    assert!(server.host.sent(cancelled).is_empty());
    server.unload();
}

fn score_pairs(fixture: &str) {
    score_pairs_on(load_task("score", fixture), fixture);
}

fn score_pairs_on(server: Server, fixture: &str) {
    for text in texts(fixture) {
        let ask = |options: &[(&str, Parameter)]| {
            numbers(
                &ask_task(&server, Task::Score, &[&text.text], options)[0],
                "score",
            )
        };
        let score = ask(&pair_of(&text));
        assert_near(&score, &text.values);
        assert_ne!(ask(&[]), score, "without the second text");
        let mut options = pair_of(&text);
        options.push(("raw_scores", Parameter::Bool(true)));
        assert_near(&ask(&options), &text.numbers);
    }
    server.unload();
}

#[test]
fn what_makes_no_pair_is_refused() {
    let server = load_task("score", "classes/mistral");
    let messages = string(r#"[{"role": "user", "content": "a"}]"#);
    let pair = || ("text_pair", string("b"));
    for (options, part) in [
        (vec![("text_pair", string(""))], "is empty"),
        (
            vec![pair(), ("truncate_prompt_tokens", Parameter::Int(3))],
            "allow at least 4",
        ),
        (vec![pair(), ("messages", messages)], "a conversation"),
        (
            vec![pair(), ("dimensions", Parameter::Int(2))],
            "task: embed",
        ),
        (vec![pair(), ("stream", Parameter::Bool(true))], "'stream'"),
        (
            vec![("text_pair", string(&"a ".repeat(200)))],
            "shorten the prompt",
        ),
    ] {
        let sent = ask_task(&server, Task::Score, &["a"], &options);
        let error = sent[0].last().and_then(|sent| sent.error.clone());
        let (code, message) = error.unwrap_or_else(|| panic!("{part}: not refused"));
        assert_eq!(code, INVALID, "{message}");
        assert!(message.contains(part), "{message}");
    }
    server.unload();
}
