//! The real backend in the fake server, with a model that takes text: behaviour while a long prompt is being
//! tokenised.
//!
//! Tokenising a prompt of a mebibyte takes a few hundred milliseconds, and an Execute call waits a few
//! milliseconds for it at most: after one call it is still being prepared, which the tests check by the state
//! of a request behind it.

use std::ffi::CString;
use std::time::{Duration, Instant};

use inflight_tests::checkout;
use inflight_triton::sys;
use serde_json::json;

use crate::fake_triton::{Correlation, Input, Parameter, Sent, Spec, Where};
use crate::served::{RawRequest, Server, error_code, numbers};

const ALREADY_EXISTS: u32 = sys::TRITONSERVER_Error_Code::TRITONSERVER_ERROR_ALREADY_EXISTS.0;

/// A server whose model has the demo model's tokenizer, and no practical limit of the sequence length.
fn load(parameters: &[(&str, &str)]) -> Server {
    let root = checkout().display();
    let tokenizer = format!("{root}/model_repository/stories/1");
    let common = [
        ("runner", "synthetic"),
        ("synthetic_vocab_size", "4096"),
        ("tokenizer_dir", &tokenizer),
        ("max_seq_len", "1000000"),
        ("max_num_tokens", "65536"),
    ];
    let all = common.iter().chain(parameters);
    let all: serde_json::Map<_, _> = all
        .map(|(key, value)| ((*key).to_owned(), json!({ "string_value": value })))
        .collect();
    Server::load_config(&json!({
        "name": "m", "backend": "inflight", "max_batch_size": 8, "input": [], "output": [],
        "model_transaction_policy": { "decoupled": true }, "parameters": all,
    }))
}

/// A prompt that takes long to tokenise.
fn long() -> String {
    "Once upon a time there was a fox. ".repeat((1 << 20) / 34)
}

fn short() -> String {
    "Once upon a time".to_owned()
}

fn spec(sequence: u64, client_id: &str, prompt: &str, max_tokens: i64, stream: bool) -> Spec {
    let outputs = ["text_output", "finish_reason", "num_output_tokens"];
    Spec {
        client_id: CString::new(client_id).expect("a name"),
        correlation: Correlation::Number(sequence),
        parameters: vec![
            (c"max_tokens".to_owned(), Parameter::Int(max_tokens)),
            (c"stream".to_owned(), Parameter::Bool(stream)),
        ],
        inputs: vec![Input::text(prompt)],
        outputs: outputs
            .map(|name| CString::new(name).expect("a name"))
            .into(),
        ..Spec::default()
    }
}

/// A request that stops the one with the same request id.
fn stop_spec(sequence: u64, client_id: &str) -> Spec {
    Spec {
        parameters: vec![(c"stop".to_owned(), Parameter::Bool(true))],
        ..spec(sequence, client_id, "", 1, false)
    }
}

/// Executes until all of these requests have ended.
fn finish(server: &Server, requests: &[RawRequest]) {
    let deadline = Instant::now() + Duration::from_secs(300);
    loop {
        let is_left = |request: &RawRequest| server.host.place(*request) != Where::Released;
        let left: Vec<_> = requests.iter().copied().filter(is_left).collect();
        if left.is_empty() {
            return;
        }
        assert!(Instant::now() < deadline, "a request did not end");
        assert_eq!(server.execute(&left), Ok(()));
    }
}

fn num_tokens(sent: &[Sent]) -> i32 {
    let counted = sent.iter().rfind(|sent| !sent.outputs.is_empty());
    counted.map_or(0, |sent| numbers(sent, "num_output_tokens").1[0])
}

#[test]
fn a_stream_continues_while_a_long_prompt_is_tokenised() {
    let server = load(&[]);
    let stream = server.host.request(spec(1, "", &short(), 1000, true));
    let long = server.host.request(spec(2, "", &long(), 1, false));
    for _ in 0..5 {
        assert_eq!(server.execute(&[stream, long]), Ok(()));
    }
    assert!(
        num_tokens(&server.host.sent(stream)) >= 3,
        "a token a step, each sent in the next one"
    );
    assert!(server.host.sent(long).is_empty(), "it is being prepared");
    server.host.cancel(stream);
    finish_one(&server, long);
    assert_eq!(num_tokens(&server.host.sent(long)), 1);
    assert_eq!(server.execute(&[stream]), Ok(()));
    server.unload();
}

/// Executes until this request is answered, with no other request.
fn finish_one(server: &Server, request: RawRequest) {
    finish(server, &[request]);
    server.wait_for_final(request);
}

#[test]
fn a_short_prompt_does_not_wait_for_a_long_one_before_it() {
    let server = load(&[]);
    let first = server.host.request(spec(1, "", &long(), 1, false));
    let second = server.host.request(spec(2, "", &short(), 1, false));
    assert_eq!(server.execute(&[first, second]), Ok(()));
    assert_eq!(
        server.host.place(first),
        Where::InQueue,
        "it is being prepared"
    );
    server.wait_for_final(second);
    finish_one(&server, first);
    server.unload();
    for request in [first, second] {
        assert_eq!(num_tokens(&server.host.sent(request)), 1);
    }
}

#[test]
fn a_request_that_is_cancelled_during_preparation_is_left_to_triton() {
    let server = load(&[]);
    let cancelled = server.host.request(spec(1, "chat", &long(), 1, false));
    assert_eq!(server.execute(&[cancelled]), Ok(()));
    assert_eq!(server.host.place(cancelled), Where::InQueue);
    server.host.cancel(cancelled);
    assert_eq!(server.execute(&[cancelled]), Ok(()));
    assert_eq!(server.host.place(cancelled), Where::InQueue);
    assert!(server.host.sent(cancelled).is_empty());
    // Its ids can be used again, and it delays no other request.
    let next = server.host.request(spec(1, "chat", &short(), 1, false));
    finish(&server, &[next]);
    server.unload();
    assert_eq!(num_tokens(&server.host.sent(next)), 1);
}

#[test]
fn a_model_unloads_while_a_prompt_is_tokenised() {
    let server = load(&[]);
    let cancelled = server.host.request(spec(1, "", &long(), 1, false));
    let waiting = server.host.request(spec(2, "", &long(), 1, false));
    assert_eq!(server.execute(&[cancelled, waiting]), Ok(()));
    for request in [cancelled, waiting] {
        assert_eq!(server.host.place(request), Where::InQueue);
        server.host.cancel(request);
    }
    server.unload();
    assert!(server.host.sent(cancelled).is_empty());
}

#[test]
fn a_request_that_is_stopped_during_preparation_ends_without_a_token() {
    let server = load(&[]);
    let stopped = server.host.request(spec(1, "chat", &long(), 5, false));
    assert_eq!(server.execute(&[stopped]), Ok(()));
    assert_eq!(server.host.place(stopped), Where::InQueue);
    let stop = server.host.request(stop_spec(2, "chat"));
    assert_eq!(server.execute(&[stopped, stop]), Ok(()));
    assert_eq!(
        server.host.place(stop),
        Where::Released,
        "it does not wait for others"
    );
    finish(&server, &[stopped]);
    server.unload();
    let sent = server.host.sent(stopped);
    assert_eq!(error_code(&sent), None);
    assert_eq!(num_tokens(&sent), 0);
    assert!(sent.last().is_some_and(|last| last.is_final));
}

#[test]
fn the_ids_of_a_request_in_preparation_are_taken() {
    let server = load(&[]);
    let first = server.host.request(spec(1, "chat", &long(), 1, false));
    assert_eq!(server.execute(&[first]), Ok(()));
    let same_id = server.host.request(spec(2, "chat", &short(), 1, false));
    let same_sequence = server.host.request(spec(1, "", &short(), 1, false));
    assert_eq!(server.execute(&[first, same_id, same_sequence]), Ok(()));
    assert_eq!(server.host.place(first), Where::InQueue);
    for refused in [same_id, same_sequence] {
        assert_eq!(server.host.place(refused), Where::Released);
        assert_eq!(error_code(&server.host.sent(refused)), Some(ALREADY_EXISTS));
    }
    finish(&server, &[first]);
    server.unload();
    assert_eq!(num_tokens(&server.host.sent(first)), 1);
}

#[test]
fn a_long_prompt_that_cannot_be_served_is_rejected_and_the_next_one_is_served() {
    let server = load(&[("max_seq_len", "100000")]);
    let long = server.host.request(spec(1, "", &long(), 1, false));
    let next = server.host.request(spec(2, "", &short(), 1, false));
    finish(&server, &[long, next]);
    server.unload();
    let sent = server.host.sent(long);
    let (_, message) = sent[0].error.clone().expect("an error");
    assert!(message.contains("max_seq_len"), "{message}");
    assert_eq!(num_tokens(&server.host.sent(next)), 1);
}

#[test]
fn a_long_prompt_that_is_rejected_between_its_calls_is_answered_in_the_next_one() {
    let server = load(&[("max_seq_len", "100000")]);
    let long = server.host.request(spec(1, "", &long(), 1, false));
    assert_eq!(server.execute(&[long]), Ok(()));
    // Most calls, each of which waits for it for a moment, are without it.
    let deadline = Instant::now() + Duration::from_secs(60);
    while server.host.place(long) != Where::Released {
        assert!(Instant::now() < deadline, "it is not answered");
        for _ in 0..20 {
            assert_eq!(server.execute(&[]), Ok(()));
        }
        assert_eq!(server.execute(&[long]), Ok(()));
    }
    server.unload();
    let sent = server.host.sent(long);
    let (_, message) = sent[0].error.clone().expect("an error");
    assert!(message.contains("max_seq_len"), "{message}");
}

#[test]
fn a_time_limit_includes_the_tokenisation_of_the_prompt() {
    let server = load(&[]);
    let mut late = spec(1, "", &long(), 5, false);
    late.parameters
        .push((c"timeout".to_owned(), Parameter::Int(1)));
    let late = server.host.request(late);
    finish(&server, &[late]);
    server.unload();
    let sent = server.host.sent(late);
    assert_eq!((error_code(&sent), num_tokens(&sent)), (None, 0));
}
