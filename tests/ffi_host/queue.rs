//! The real backend in the fake server, with a model whose requests wait in Triton's queue: a thread of the backend
//! steps, and Execute calls bring it requests.

use std::time::Duration;

use serde_json::{Map, Value, json};

use crate::INTERNAL;
use crate::driver::LONGER_THAN_GRACE;
use crate::fake_triton::{Spec, Where};
use crate::gate::Gate;
use crate::served::{ClientRequest, RawRequest, Server, error_code, output_ids};

/// 1000 tokens take 10 seconds.
const LONG_STEPS: (&str, &str) = ("synthetic_step_us", "10000");

/// A server with a model of these parameters, and other fields of its configuration.
fn load(parameters: &[(&str, &str)], fields: &Value) -> Server {
    let common = [("runner", "synthetic"), ("synthetic_vocab_size", "64")];
    let all = common.iter().chain(parameters);
    let all: Map<_, _> = all
        .map(|(key, value)| ((*key).to_owned(), json!({ "string_value": value })))
        .collect();
    let mut config = json!({
        "name": "m", "backend": "inflight", "max_batch_size": 8, "input": [], "output": [],
        "dynamic_batching": {}, "parameters": all,
    });
    for (key, value) in fields.as_object().expect("fields") {
        config[key] = value.clone();
    }
    Server::load_config(&config)
}

fn assert_whole(server: &Server, content: &ClientRequest, request: RawRequest) {
    server.wait_for_final(request);
    let sent = server.host.sent(request);
    assert_eq!(
        (error_code(&sent), output_ids(&sent)),
        (None, content.expected())
    );
}

fn assert_unloaded(server: &Server, request: RawRequest) {
    let sent = server.host.sent(request);
    let error = sent.last().and_then(|last| last.error.clone());
    let (code, message) = error.expect("an error");
    assert_eq!(code, INTERNAL);
    assert!(message.contains("is being unloaded"), "{message}");
}

#[test]
fn execute_returns_when_a_further_request_could_start() {
    let gate = Gate::closed("queue");
    let parameters = [("max_num_requests", "2"), ("synthetic_gate", gate.path())];
    let mut server = load(&parameters, &json!({}));
    let contents = [5, 60, 7].map(|num| ClientRequest::of_lengths(4, num, false));
    let [first, second, third] = contents.each_ref().map(|content| server.request(content));
    // One more could start beside the first.
    assert_eq!(server.execute(&[first]), Ok(()));
    assert_eq!(server.host.place(first), Where::InBackend);
    std::thread::scope(|scope| {
        scope.spawn(|| gate.lift());
        assert_eq!(server.execute(&[second]), Ok(()));
    });
    assert_eq!(
        server.host.place(first),
        Where::Released,
        "none could start beside both"
    );
    assert_eq!(server.execute(&[third]), Ok(()));
    for (content, request) in contents.iter().zip([first, second, third]) {
        assert_whole(&server, content, request);
    }
    server.unload();
}

#[test]
fn a_batch_with_gaps_is_served_without_them() {
    let mut server = load(&[], &json!({}));
    let content = ClientRequest::of_lengths(4, 5, false);
    let gap = || server.host.request(Spec::default());
    let gaps = [gap(), gap()];
    let request = server.request(&content);
    assert_eq!(server.execute(&[gaps[0], request, gaps[1]]), Ok(()));
    assert_whole(&server, &content, request);
    for gap in gaps {
        let sent = server.host.sent(gap);
        assert!(sent.len() == 1 && sent[0].is_final && sent[0].is_flag);
    }
    assert_eq!(server.host.statistics().0.len(), 1);
    server.unload();
}

#[test]
fn the_first_requests_are_the_warm_up() {
    let warm_up = json!({ "model_warmup": [{ "name": "w", "batch_size": 1, "count": 2 }] });
    let mut server = load(&[], &warm_up);
    let content = ClientRequest::of_lengths(4, 5, false);
    for num_clients in [0, 0, 1, 2] {
        let request = server.request(&content);
        assert_eq!(server.execute(&[request]), Ok(()));
        assert_whole(&server, &content, request);
        let (reported, _) = server.host.statistics();
        assert_eq!(reported.len(), num_clients, "requests of clients");
    }
    server.unload();
}

#[test]
fn a_model_that_is_unloaded_answers_the_requests_in_flight() {
    let mut server = load(&[LONG_STEPS], &json!({}));
    let request = server.request(&ClientRequest::of_lengths(4, 1000, true));
    assert_eq!(server.execute(&[request]), Ok(()));
    server.wait_until("its first token is sent", || {
        !server.host.sent(request).is_empty()
    });
    server.unload();
    assert_unloaded(&server, request);
}

#[test]
fn a_model_that_is_unloaded_answers_the_requests_that_no_step_has_taken() {
    let gate = Gate::closed("untaken");
    gate.allow(1);
    let mut server = load(&[("synthetic_gate", gate.path())], &json!({}));
    let content = ClientRequest::of_lengths(4, 2, true);
    let [first, untaken] = [server.request(&content), server.request(&content)];
    assert_eq!(server.execute(&[first]), Ok(()));
    server.wait_until("its first token is sent", || {
        !server.host.sent(first).is_empty()
    });
    // The step of the last token is held: the second request arrives meanwhile.
    assert_eq!(server.execute(&[untaken]), Ok(()));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(100));
            gate.lift();
        });
        server.unload();
    });
    assert_whole(&server, &content, first);
    assert_unloaded(&server, untaken);
}

#[test]
fn a_queue_that_triton_never_finalises_releases_its_resources() {
    let mut server = load(&[], &json!({}));
    let content = ClientRequest::of_lengths(4, 6, false);
    let request = server.request(&content);
    assert_eq!(server.execute(&[request]), Ok(()));
    server.wait_for_final(request);
    // A batch without requests does not count.
    let gap = server.host.request(Spec::default());
    assert_eq!(server.execute(&[gap]), Ok(()));
    server.host.unload_model(true);
    server.wait_until("its metrics are gone", || server.host.num_metrics() == 0);
    server.unload();
}

#[test]
fn a_request_in_flight_keeps_a_model_that_is_told_to_unload() {
    let gate = Gate::closed("keeps");
    let mut server = load(&[("synthetic_gate", gate.path())], &json!({}));
    let content = ClientRequest::of_lengths(4, 6, false);
    let request = server.request(&content);
    assert_eq!(server.execute(&[request]), Ok(()));
    server.host.unload_model(true);
    std::thread::sleep(LONGER_THAN_GRACE);
    gate.lift();
    assert_whole(&server, &content, request);
    server.unload();
}

#[test]
fn the_times_of_a_request_that_stays_are_of_its_whole_generation() {
    let mut server = load(&[("synthetic_step_us", "2000")], &json!({}));
    let content = ClientRequest::of_lengths(4, 10, false);
    let request = server.request(&content);
    assert_eq!(server.execute(&[request]), Ok(()));
    assert_whole(&server, &content, request);
    let (reported, _) = server.host.statistics();
    let [(_, success, times)] = &reported[..] else {
        panic!("{reported:?}")
    };
    assert!(*success && times.is_sorted(), "{times:?}");
    let [start, compute_start, .., end] = times;
    for begin in [start, compute_start] {
        assert!(end - begin >= 10 * 2_000_000, "ten steps: {times:?}");
    }
    server.unload();
}
