//! The real backend in the fake server, with a runner that panics in a step: each request is answered once,
//! after the tokens generated so far.

use std::ptr::NonNull;

use inflight_triton::{Model, Serving, lifecycle};
use serde_json::json;
use triton_inflight::Inflight;

use crate::fake_triton::Where;
use crate::served::{ClientRequest, Server, error_code, output_ids};
use crate::{INTERNAL, RawRequest, UNAVAILABLE};

/// Three concurrent requests: two streams, whose answers the responder holds while a step computes, and one
/// that is answered at its end.
fn contents() -> [ClientRequest; 3] {
    [(4, true), (1, false), (40, true)]
        .map(|(prompt, stream)| ClientRequest::of_lengths(prompt, 20, stream))
}

/// Checks that a request was answered with an error after `num_tokens` tokens, and with nothing else.
fn assert_failed(server: &Server, content: &ClientRequest, request: RawRequest, num_tokens: usize) {
    let sent = server.host.sent(request);
    let streamed = if content.stream { num_tokens } else { 0 };
    assert_eq!(output_ids(&sent), content.expected()[..streamed]);
    assert_eq!(error_code(&sent), Some(INTERNAL));
    let last = sent.last().and_then(|sent| sent.error.clone());
    let (_, message) = last.expect("an error");
    assert!(message.contains("told to fail"), "{message}");
    assert_eq!(sent.iter().filter(|sent| sent.is_final).count(), 1);
    assert_eq!(server.host.place(request), Where::Released);
}

#[test]
fn a_panic_while_the_responder_holds_answers_answers_every_request_once_after_its_tokens() {
    for num_steps in [0, 1, 3] {
        let mut server = Server::load(&[("synthetic_fail_after", &num_steps.to_string())]);
        let contents = contents();
        let requests = contents.each_ref().map(|content| server.request(content));
        for _ in 0..num_steps {
            assert_eq!(server.execute(&requests), Ok(()));
            assert_eq!(server.ready(), Ok(()));
        }
        assert_eq!(server.execute(&requests), Ok(()), "the requests were ours");
        for (content, request) in contents.iter().zip(requests) {
            assert_failed(&server, content, request, num_steps);
        }
        let (reported, _) = server.host.statistics();
        assert!(reported.len() == 3 && reported.iter().all(|(_, success, _)| !success));
        server.unload();
    }
}

#[test]
fn an_instance_whose_step_panicked_accepts_no_more_requests() {
    let mut server = Server::load(&[("synthetic_fail_after", "2")]);
    let [first, second, third] = contents();
    let (in_batch, held) = (server.request(&first), server.request(&second));
    for _ in 0..2 {
        assert_eq!(server.execute(&[in_batch, held]), Ok(()));
    }
    // One of them is in Triton's hands when the step fails, and is passed to the backend again later.
    assert_eq!(server.execute(&[in_batch]), Ok(()));
    assert_failed(&server, &first, in_batch, 2);
    let (code, message) = server.ready().expect_err("not ready any more");
    assert_eq!(code, UNAVAILABLE);
    assert!(
        message.contains("unload the model and load it again"),
        "{message}"
    );
    let new = server.request(&third);
    for request in [held, new] {
        assert_eq!(server.execute(&[request]), Ok(()));
        let sent = server.host.sent(request);
        assert_eq!(sent.len(), 1);
        assert_eq!(sent[0].error, Some((code, message.clone())));
        assert_eq!(server.host.place(request), Where::Released);
    }
    server.unload();
}

#[test]
fn a_step_that_fails_between_two_calls_is_seen_without_another_call() {
    let mut server = Server::load_config(&json!({
        "name": "m", "backend": "inflight", "max_batch_size": 8, "input": [], "output": [],
        "dynamic_batching": {},
        "parameters": {
            "runner": { "string_value": "synthetic" },
            "synthetic_vocab_size": { "string_value": "64" },
            "synthetic_fail_after": { "string_value": "3" },
        },
    }));
    let [content, ..] = contents();
    let request = server.request(&content);
    assert_eq!(server.execute(&[request]), Ok(()));
    server.wait_until("the instance is not ready", || server.ready().is_err());
    let (code, message) = server.ready().expect_err("not ready");
    assert_eq!(code, UNAVAILABLE);
    assert!(
        message.contains("unload the model and load it again"),
        "{message}"
    );
    server.wait_for_final(request);
    assert_failed(&server, &content, request, 3);
    server.unload();
}

#[test]
fn the_gauges_of_a_failed_instance_are_zero() {
    let mut server = Server::load(&[("synthetic_fail_after", "2")]);
    let [content, ..] = contents();
    let request = server.request(&content);
    for _ in 0..2 {
        assert_eq!(server.execute(&[request]), Ok(()));
    }
    assert_eq!(server.execute(&[request]), Ok(()));
    let requests = |kind| server.gauge("nv_trt_llm_request_metrics", kind);
    let blocks = |kind| server.gauge("nv_trt_llm_kv_cache_block_metrics", kind);
    for value in [requests("active"), requests("scheduled"), requests("max")] {
        assert_eq!(value, 0.0);
    }
    for value in ["used", "free", "max", "fraction"].map(blocks) {
        assert_eq!(value, 0.0);
    }
    assert_eq!(
        server.gauge("nv_trt_llm_runtime_memory_metrics", "cpu"),
        0.0
    );
    server.unload();
}

/// Has the only instance fail.
fn fail(server: &mut Server) {
    let [content, ..] = contents();
    let request = server.request(&content);
    while server.ready().is_ok() {
        assert_eq!(server.execute(&[request]), Ok(()));
    }
}

#[test]
fn readiness_unload_and_failure_are_three_answers() {
    let mut server = Server::load(&[("synthetic_fail_after", "1")]);
    server
        .host
        .ask_instances(lifecycle::instance_ready::<Inflight>);
    let raw = NonNull::new(server.model).expect("not null");
    // SAFETY: the model is alive to the end of the test.
    let served = unsafe { Model::from_raw(raw) }.served().expect("a server");
    assert_eq!(
        (served.serving(), server.host.is_model_ready()),
        (Serving::Loaded, true)
    );
    fail(&mut server);
    // Its siblings still serve, and must not take it for an unload.
    assert_eq!(
        (served.serving(), server.host.is_model_ready()),
        (Serving::Loaded, false)
    );
    server.host.unload_model(true);
    assert_eq!(served.serving(), Serving::Unloaded);
    server.host.stop_server();
    assert_eq!(served.serving(), Serving::ServerStops);
    server.unload();
}

#[test]
fn a_failed_instance_is_counted_until_it_is_unloaded() {
    let mut server = Server::load(&[("synthetic_fail_after", "1")]);
    let num_failed = |server: &Server| server.gauge("nv_inflight_failed_instances", "m");
    assert_eq!(num_failed(&server), 0.0);
    fail(&mut server);
    assert_eq!(num_failed(&server), 1.0);
    server.unload();
    assert_eq!(num_failed(&server), 0.0);
}
