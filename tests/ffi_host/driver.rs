//! The real backend with the synthetic runner in the fake server: whatever clients and Triton do, every
//! stream matches its prompt, every request is answered once, and nothing is leaked.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use inflight_triton::sys;
use serde_json::json;

use crate::fake_triton::{Correlation, Parameter, Spec, Where};
use crate::served::{ClientRequest, RawRequest, Server, error_code, numbers, output_ids};
use crate::{INVALID, UNAVAILABLE};

const CANCELLED: u32 = sys::TRITONSERVER_Error_Code::TRITONSERVER_ERROR_CANCELLED.0;
const ALREADY_EXISTS: u32 = sys::TRITONSERVER_Error_Code::TRITONSERVER_ERROR_ALREADY_EXISTS.0;

#[test]
fn streams_and_whole_answers_match_their_prompts() {
    let mut server = Server::load(&[]);
    let contents = [
        ClientRequest::of_lengths(3, 5, true),
        ClientRequest::of_lengths(40, 2, false),
        ClientRequest::of_lengths(1, 9, false),
    ];
    let requests = contents.each_ref().map(|content| server.request(content));
    server.finish(&requests);
    server.unload();
    for (content, request) in contents.iter().zip(requests) {
        let sent = server.host.sent(request);
        assert_eq!(output_ids(&sent), content.expected());
        assert_eq!(sent.len() > 1, content.stream);
        assert!(
            sent.last()
                .is_some_and(|last| last.is_final && last.error.is_none())
        );
    }
    let (reported, _) = server.host.statistics();
    assert_eq!(reported.len(), 3, "each request is counted once");
    assert!(
        reported
            .iter()
            .all(|(_, success, at)| *success && at.is_sorted())
    );
}

#[test]
fn a_streams_responses_have_the_models_number_of_tokens() {
    let mut server = Server::load(&[("stream_interval", "4")]);
    let cases: [(usize, &[usize]); 6] = [
        (1, &[1]),
        (2, &[1, 1]),
        (5, &[1, 4]),
        (6, &[1, 4, 1]),
        (10, &[1, 4, 4, 1]),
        (13, &[1, 4, 4, 4]),
    ];
    let contents = cases.map(|(num_tokens, _)| ClientRequest::of_lengths(3, num_tokens, true));
    let requests = contents.each_ref().map(|content| server.request(content));
    server.finish(&requests);
    server.unload();
    for ((request, content), (_, expected)) in requests.into_iter().zip(&contents).zip(cases) {
        let sent = server.host.sent(request);
        assert_eq!(output_ids(&sent), content.expected());
        let lengths = sent.iter().map(|sent| numbers(sent, "output_ids").1.len());
        assert_eq!(lengths.collect::<Vec<_>>(), expected);
    }
}

#[test]
fn a_parameter_that_is_not_a_finite_number_is_rejected_by_name() {
    let mut server = Server::load(&[]);
    for (name, value, shown) in [
        (c"temperature", f64::NAN, "NaN"),
        (c"top_p", f64::INFINITY, "inf"),
        (c"repetition_penalty", f64::NEG_INFINITY, "-inf"),
        (c"stop", f64::NAN, "NaN"),
    ] {
        let mut spec = server.spec(&ClientRequest::of_lengths(3, 5, false));
        let parameter = (name.to_owned(), Parameter::Double(value));
        spec.parameters.push(parameter);
        let request = server.host.request(spec);
        assert_eq!(server.execute(&[request]), Ok(()));
        let sent = server.host.sent(request);
        let (code, text) = sent
            .last()
            .and_then(|last| last.error.clone())
            .expect(shown);
        let name = name.to_str().expect("a name");
        assert_eq!(code, INVALID);
        assert_eq!(
            text,
            format!(
                "option '{name}': {shown} is not a finite number; give one, or leave the option out"
            )
        );
        assert_eq!(server.host.place(request), Where::Released);
    }
    server.unload();
}

#[test]
fn requests_without_a_sequence_are_ended_at_once_without_effect_on_others() {
    let mut server = Server::load(&[]);
    let content = ClientRequest::of_lengths(4, 3, true);
    let request = server.request(&content);
    let null = || {
        server.host.request(Spec {
            correlation: Correlation::Number(0),
            flags: 0,
            ..Spec::default()
        })
    };
    let batch = [null(), request, null()];
    assert_eq!(server.execute(&batch), Ok(()));
    for null in [batch[0], batch[2]] {
        let sent = server.host.sent(null);
        assert!(sent[0].is_final && sent[0].is_flag);
        assert_eq!(server.host.place(null), Where::Released);
    }
    server.finish(&[request]);
    server.unload();
    assert_eq!(output_ids(&server.host.sent(request)), content.expected());
}

#[test]
fn a_rejected_reschedule_ends_only_that_request() {
    let mut server = Server::load(&[]);
    let content = ClientRequest::of_lengths(4, 6, true);
    let (idle, other) = (server.request(&content), server.request(&content));
    assert_eq!(server.execute(&[idle, other]), Ok(()));
    server.host.refuse_reschedule(true);
    assert_eq!(server.execute(&[idle]), Ok(()));
    server.host.refuse_reschedule(false);
    assert_eq!(server.host.place(idle), Where::Released);
    assert_eq!(error_code(&server.host.sent(idle)), Some(INVALID));
    server.finish(&[other]);
    server.unload();
    assert_eq!(output_ids(&server.host.sent(other)), content.expected());
}

#[test]
fn a_second_request_of_a_live_sequence_is_rejected_and_the_first_continues() {
    let server = Server::load(&[]);
    let content = ClientRequest::of_lengths(4, 6, true);
    for correlation in [
        || Correlation::Number(77),
        || Correlation::Text(c"chat".to_owned()),
    ] {
        let first = server.request_as(&content, correlation());
        assert_eq!(server.execute(&[first]), Ok(()));
        let second = server.request_as(&content, correlation());
        assert_eq!(server.execute(&[second]), Ok(()));
        assert_eq!(error_code(&server.host.sent(second)), Some(ALREADY_EXISTS));
        assert!(
            server.host.is_cancelled(second),
            "otherwise its release would end the sequence"
        );
        server.finish(&[first]);
        // Its ids can be used again.
        let third = server.request_as(&content, correlation());
        server.finish(&[third]);
        for request in [first, third] {
            server.wait_for_final(request);
            assert_eq!(output_ids(&server.host.sent(request)), content.expected());
        }
    }
    server.unload();
}

#[test]
fn the_last_tokens_of_a_stopped_stream_are_in_its_final_response() {
    let mut server = Server::load(&[]);
    let content = ClientRequest::of_lengths(4, 50, true);
    let mut spec = server.spec(&content);
    spec.client_id = c"me".to_owned();
    let stream = server.host.request(spec);
    for _ in 0..3 {
        assert_eq!(server.execute(&[stream]), Ok(()));
    }
    let mut spec = server.spec(&ClientRequest::of_lengths(1, 1, false));
    spec.client_id = c"me".to_owned();
    let stop = (c"stop".to_owned(), Parameter::Bool(true));
    spec.parameters.push(stop);
    let stop = server.host.request(spec);
    assert_eq!(server.execute(&[stream, stop]), Ok(()));
    server.unload();
    let sent = server.host.sent(stream);
    assert_eq!(output_ids(&sent), content.expected()[..3]);
    // Each step but the first sends the token of the one before it.
    let lengths = sent.iter().map(|sent| numbers(sent, "output_ids").1.len());
    assert_eq!(lengths.collect::<Vec<_>>(), [1, 1, 1]);
}

#[test]
fn a_request_is_stopped_by_whichever_instance_is_asked() {
    let mut server = Server::load(&[]);
    let other = server.load_instance();
    let content = ClientRequest::of_lengths(4, 50, true);
    let mut spec = server.spec(&content);
    spec.client_id = c"me".to_owned();
    let stream = server.host.request(spec);
    assert_eq!(server.execute(&[stream]), Ok(()));
    let mut spec = server.spec(&ClientRequest::of_lengths(1, 1, false));
    spec.client_id = c"me".to_owned();
    let stop = (c"stop".to_owned(), Parameter::Bool(true));
    spec.parameters.push(stop);
    let stop = server.host.request(spec);
    assert_eq!(server.execute_on(other, &[stop]), Ok(()));
    assert_eq!(server.execute(&[stream]), Ok(()));
    assert_eq!(server.host.place(stream), Where::Released);
    server.unload_instance(other);
    server.unload();
    assert_eq!(
        output_ids(&server.host.sent(stream)),
        content.expected()[..1]
    );
}

#[test]
fn a_cancelled_request_is_left_to_triton() {
    let mut server = Server::load(&[]);
    let content = ClientRequest::of_lengths(4, 50, true);
    let (cancelled, other) = (server.request(&content), server.request(&content));
    assert_eq!(server.execute(&[cancelled, other]), Ok(()));
    server.host.cancel(cancelled);
    assert_eq!(server.execute(&[cancelled, other]), Ok(()));
    server.assert_left_to_triton(cancelled, &[other]);
    server.finish(&[other]);
    server.unload();
    let sent = server.host.sent(cancelled);
    assert!(
        sent.iter()
            .all(|sent| !sent.is_final && sent.error.is_none())
    );
    assert_eq!(output_ids(&server.host.sent(other)), content.expected());
}

#[test]
fn a_request_that_is_cancelled_during_a_step_is_left_to_triton_and_removed() {
    // A pipe as the gate: opening it for writing succeeds when the step opens it for reading.
    let pipe = std::env::temp_dir().join(format!("inflight-step-{}", std::process::id()));
    let made = Command::new("mkfifo").arg(&pipe).status();
    assert!(made.expect("mkfifo").success());
    let mut server = Server::load(&[("synthetic_gate", pipe.to_str().expect("UTF-8"))]);
    for (num_steps, max_tokens) in [(1, 1), (2, 100)] {
        cancel_in_a_step(&mut server, &pipe, num_steps, max_tokens);
    }
    server.unload();
    fs::remove_file(pipe).expect("the pipe is there");
    // No request came after them, but their blocks are free.
    assert_eq!(server.num_used_blocks(), 0.0);
}

#[test]
fn a_request_that_triton_ends_between_two_steps_is_removed_although_no_step_follows() {
    for overlap in ["false", "true"] {
        let mut server = Server::load(&[("enable_trt_overlap", overlap)]);
        for num_sequences in [1, 3] {
            let content = ClientRequest::of_lengths(40, 100, true).of_sequences(num_sequences);
            let requests = [server.request(&content), server.request(&content)];
            for _ in 0..3 {
                assert_eq!(server.execute(&requests), Ok(()));
            }
            for request in requests {
                server.host.cancel(request);
            }
            server.wait_until("they are removed", || server.host.num_factories() == 0);
            server.wait_until("their blocks are free", || server.num_used_blocks() == 0.0);
            assert_eq!(server.gauge("nv_trt_llm_request_metrics", "active"), 0.0);
            // Triton answers a request that was already on its way to the backend.
            assert_eq!(server.execute(&requests[..1]), Ok(()));
            assert_eq!(server.host.place(requests[0]), Where::InQueue);
            let sent = server.host.sent(requests[0]);
            assert!(sent.iter().all(|sent| !sent.is_final));
        }
        let last = ClientRequest::of_lengths(4, 6, true);
        let request = server.request(&last);
        server.finish(&[request]);
        server.unload();
        assert_eq!(output_ids(&server.host.sent(request)), last.expected());
    }
}

#[test]
fn a_request_that_waits_between_two_steps_while_others_are_removed_continues() {
    let mut server = Server::load(&[]);
    let content = ClientRequest::of_lengths(4, 6, true);
    let requests = [server.request(&content), server.request(&content)];
    assert_eq!(server.execute(&requests), Ok(()));
    assert_eq!(server.host.num_factories(), 2);
    server.host.cancel(requests[1]);
    server.wait_until("one is removed", || server.host.num_factories() == 1);
    server.finish(&requests[..1]);
    server.unload();
    assert_eq!(
        output_ids(&server.host.sent(requests[0])),
        content.expected()
    );
}

#[test]
fn the_sequence_of_a_request_that_triton_has_ended_can_be_started_again_at_once() {
    let server = Server::load(&[]);
    let content = ClientRequest::of_lengths(4, 6, true);
    let first = server.request_as(&content, Correlation::Number(77));
    assert_eq!(server.execute(&[first]), Ok(()));
    server.host.cancel(first);
    let second = server.request_as(&content, Correlation::Number(77));
    server.finish(&[second]);
    server.unload();
    assert_eq!(output_ids(&server.host.sent(second)), content.expected());
}

#[test]
fn only_the_batcher_of_oldest_keeps_the_slot_of_a_request_that_is_cancelled_in_its_queue() {
    for (strategy, num_freed) in [("oldest", 1), ("direct", 0)] {
        let mut server = Server::load_config(&json!({
            "name": "m", "backend": "inflight", "max_batch_size": 8, "input": [], "output": [],
            "sequence_batching": {
                "iterative_sequence": true, "max_sequence_idle_microseconds": 60_000_000_u64,
                strategy: { "max_candidate_sequences": 8 },
            },
            "parameters": {
                "runner": { "string_value": "synthetic" },
                "synthetic_vocab_size": { "string_value": "64" },
                "allow_iterative_oldest": { "string_value": "true" },
            },
        }));
        let request = server.request(&ClientRequest::of_lengths(4, 50, true));
        assert_eq!(server.execute(&[request]), Ok(()));
        assert_eq!(server.host.num_factories(), 1);
        server.host.cancel(request);
        server.wait_until("it is removed", || server.host.num_factories() == 0);
        // The batcher may not have had its turn in the call that removes it.
        for _ in 0..2 {
            assert_eq!(server.execute(&[]), Ok(()));
        }
        let submitted = server.host.submitted();
        assert_eq!(submitted.len(), num_freed, "{strategy}");
        for end in submitted {
            assert_eq!(server.execute(&[end.request]), Ok(()));
        }
        server.unload();
    }
}

#[test]
fn a_cancelled_request_that_no_step_hands_to_triton_is_answered() {
    let mut server = Server::load(&[]);
    let content = ClientRequest::of_lengths(4, 50, true);
    let other = server.request(&content);
    let cancelled = loop {
        let cancelled = server.request(&content);
        assert_eq!(server.execute(&[cancelled, other]), Ok(()));
        server.host.cancel(cancelled);
        assert_eq!(server.execute(&[cancelled, other]), Ok(()));
        // It is kept for a moment, unless that has passed in the step.
        if server.host.place(cancelled) != Where::InQueue {
            break cancelled;
        }
    };
    let is_released = || server.host.place(cancelled) == Where::Released;
    server.wait_until("it is released, without a step", is_released);
    // The thread that sends responses may be later.
    let is_answered = || error_code(&server.host.sent(cancelled)) == Some(CANCELLED);
    server.wait_until("it is answered", is_answered);
    // Triton may have kept its slot.
    server.wait_until("its slot is freed", || !server.host.submitted().is_empty());
    for end in server.host.submitted() {
        assert_eq!(server.execute(&[other, end.request]), Ok(()));
    }
    server.finish(&[other]);
    server.unload();
    assert_eq!(output_ids(&server.host.sent(other)), content.expected());
}

#[test]
fn a_request_in_triton_s_hands_keeps_a_model_that_is_told_to_unload() {
    let mut server = Server::load(&[]);
    let content = ClientRequest::of_lengths(4, 6, true);
    let request = server.request(&content);
    assert_eq!(server.execute(&[request]), Ok(()));
    server.host.unload_model(true);
    std::thread::sleep(LONGER_THAN_GRACE);
    server.finish(&[request]);
    server.unload();
    assert_eq!(output_ids(&server.host.sent(request)), content.expected());
}

#[test]
fn the_drain_timeout_of_a_model_begins_when_it_is_unloaded() {
    let parameters = [
        ("drain_timeout_seconds", "1"),
        ("synthetic_step_us", "5000"),
    ];
    let mut server = Server::load(&parameters);
    let content = ClientRequest::of_lengths(4, 1500, true);
    let request = server.request(&content);
    let runs_until = |end: Instant| {
        while Instant::now() < end && server.host.place(request) != Where::Released {
            assert_eq!(server.execute(&[request]), Ok(()));
        }
        server.host.place(request) == Where::InQueue
    };
    // The server is asked every second.
    assert!(runs_until(Instant::now() + Duration::from_millis(2500)));
    server.host.unload_model(true);
    assert!(!runs_until(Instant::now() + Duration::from_secs(30)));
    server.unload();
    let ids = output_ids(&server.host.sent(request));
    assert!(content.expected().starts_with(&ids) && ids.len() < 1500);
}

fn warm_up(server: &mut Server, content: &ClientRequest) -> RawRequest {
    let spec = server.spec(content);
    server.host.request(Spec {
        correlation: Correlation::Number(0),
        flags: 0,
        ..spec
    })
}

#[test]
fn the_requests_of_a_warm_up_are_served_in_one_call_and_not_counted_as_clients() {
    for overlap in ["false", "true"] {
        let mut server = Server::load(&[("enable_trt_overlap", overlap)]);
        let contents = [(3, 7), (40, 2), (1, 1)]
            .map(|(prompt, num)| ClientRequest::of_lengths(prompt, num, false));
        let requests = contents
            .each_ref()
            .map(|content| warm_up(&mut server, content));
        assert_eq!(server.execute(&requests), Ok(()));
        for (content, request) in contents.iter().zip(requests) {
            server.wait_for_final(request);
            let sent = server.host.sent(request);
            assert_eq!((sent.len(), error_code(&sent)), (1, None));
            assert_eq!(output_ids(&sent), content.expected());
            assert_eq!(server.host.place(request), Where::Released);
        }
        server.wait_until("nothing is active", || server.num_used_blocks() == 0.0);
        let num_steps = server.gauge("nv_trt_llm_general_metrics", "iteration_counter");
        assert!(num_steps >= 7.0, "{num_steps}");
        // Triton repeats a warm-up, and its requests may be invalid.
        let again = warm_up(&mut server, &contents[0]);
        let bad = warm_up(&mut server, &ClientRequest::of_lengths(0, 1, false));
        assert_eq!(server.execute(&[again, bad]), Ok(()));
        server.wait_for_final(again);
        assert_eq!(output_ids(&server.host.sent(again)), contents[0].expected());
        let sent = server.host.sent(bad);
        assert!(sent.len() == 1 && sent[0].is_flag && sent[0].is_final);
        let (reported, _) = server.host.statistics();
        assert_eq!(reported, []);
        server.unload();
        let families = server.host.families();
        let family = families
            .iter()
            .find(|family| family.name == "nv_inflight_e2e_seconds");
        assert!(
            family
                .expect("the family")
                .metrics
                .iter()
                .all(|metric| metric.observed.is_empty())
        );
    }
}

fn cancel_in_a_step(server: &mut Server, pipe: &Path, num_steps: u32, max_tokens: usize) {
    let cancelled = server.request(&ClientRequest::of_lengths(4, max_tokens, true));
    let (host, address) = (&server.host, cancelled.addr());
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut gate = File::options().write(true).open(pipe).expect("a step");
            host.cancel(std::ptr::without_provenance_mut(address));
            write!(gate, "{num_steps}").expect("the step reads");
        });
        assert_eq!(server.execute(&[cancelled]), Ok(()));
    });
    // A release would leave its slot taken until the sequence idles out.
    assert_eq!(server.host.place(cancelled), Where::InQueue);
    assert!(server.host.sent(cancelled).is_empty());
}

#[test]
fn a_rejected_request_that_was_cancelled_is_left_to_triton() {
    let mut server = Server::load(&[]);
    let refused = server.request(&ClientRequest::of_lengths(0, 5, true));
    server.host.cancel(refused);
    assert_eq!(server.execute(&[refused]), Ok(()));
    assert_eq!(server.host.place(refused), Where::InQueue);
    server.unload();
    assert!(server.host.sent(refused).is_empty());
}

#[test]
fn a_slot_that_a_cancelled_release_may_have_kept_is_freed_by_a_request_of_our_own() {
    let server = Server::load(&[]);
    let named = || Correlation::Text(c"chat".to_owned());
    let numbered = || Correlation::Number(77);
    let served = ClientRequest::of_lengths(4, 2, false);
    let refused = ClientRequest::of_lengths(0, 2, false);
    let correlations: [fn() -> Correlation; 2] = [numbered, named];
    for correlation in correlations {
        for (content, is_raced) in [(&served, false), (&served, true), (&refused, true)] {
            let request = server.request_as(content, correlation());
            if is_raced {
                server.host.cancel_in_release(request);
            }
            server.finish(&[request]);
            server.wait_for_final(request);
            // In the call of the release, Triton may not have ended the sequence yet.
            assert_eq!(server.execute(&[]), Ok(()));
            let submitted = server.host.submitted();
            assert_eq!(submitted.len(), usize::from(is_raced));
            let (reported, _) = server.host.statistics();
            for end in submitted {
                assert_eq!(end.correlation, correlation());
                assert_eq!(end.inputs, [("input_ids".to_owned(), vec![1, 1])]);
                let end = end.request;
                // Releasing it frees the slot.
                assert_eq!(server.execute(&[end]), Ok(()));
                assert_eq!(server.host.place(end), Where::Released);
                assert!(
                    !server.host.is_cancelled(end),
                    "otherwise its release would not end the sequence"
                );
                let sent = server.host.sent(end);
                assert!(sent.len() == 1 && sent[0].is_flag && sent[0].is_final);
            }
            assert_eq!(server.host.statistics().0.len(), reported.len());
        }
    }
    server.unload();
}

#[test]
fn a_request_of_our_own_has_no_batch_dimension_where_the_model_has_none() {
    let mut server = Server::load_config(&json!({
        "name": "m", "backend": "inflight", "max_batch_size": 0,
        "input": [{ "name": "input_ids", "data_type": "TYPE_INT32", "dims": [-1] }],
        "output": [{ "name": "output_ids", "data_type": "TYPE_INT32", "dims": [-1, -1] }],
        "sequence_batching": {
            "iterative_sequence": true, "max_sequence_idle_microseconds": 60_000_000_u64,
            "oldest": { "max_candidate_sequences": 8 },
        },
        "parameters": {
            "runner": { "string_value": "synthetic" },
            "synthetic_vocab_size": { "string_value": "64" },
            "allow_iterative_oldest": { "string_value": "true" },
            "client_compatibility": { "string_value": "vllm" },
        },
    }));
    let mut spec = server.spec(&ClientRequest::of_lengths(4, 2, false));
    spec.inputs[0].shape = vec![4];
    spec.outputs = vec![c"output_ids".to_owned()];
    let request = server.host.request(spec);
    server.host.cancel_in_release(request);
    server.finish(&[request]);
    server.wait_for_final(request);
    assert_eq!(server.execute(&[]), Ok(()));
    let submitted = server.host.submitted();
    assert_eq!(submitted.len(), 1);
    for end in submitted {
        assert_eq!(end.inputs, [("input_ids".to_owned(), vec![1])]);
        assert_eq!(server.execute(&[end.request]), Ok(()));
    }
    server.unload();
}

#[test]
fn a_request_that_frees_a_slot_does_not_end_a_sequence_that_a_client_has_started_there() {
    let server = Server::load(&[]);
    let raced = server.request_as(
        &ClientRequest::of_lengths(4, 1, false),
        Correlation::Number(77),
    );
    server.host.cancel_in_release(raced);
    server.finish(&[raced]);
    assert_eq!(server.execute(&[]), Ok(()));
    let content = ClientRequest::of_lengths(4, 6, true);
    let next = server.request_as(&content, Correlation::Number(77));
    assert_eq!(server.execute(&[next]), Ok(()));
    let end = server.host.submitted().remove(0).request;
    assert_eq!(server.execute(&[next, end]), Ok(()));
    assert!(
        server.host.is_cancelled(end),
        "so that its release does not end the sequence"
    );
    server.finish(&[next]);
    server.unload();
    assert_eq!(output_ids(&server.host.sent(next)), content.expected());
}

/// An unloaded model without requests frees its resources after five seconds, and a second passes until it is noticed.
pub const LONGER_THAN_GRACE: Duration = Duration::from_millis(6500);

/// Number of the backend's threads in this process; each of them has a name.
fn num_threads() -> usize {
    let threads = std::fs::read_dir("/proc/self/task").expect("Linux");
    let names =
        threads.filter_map(|thread| std::fs::read_to_string(thread.ok()?.path().join("comm")).ok());
    names.filter(|name| name.starts_with("inflight-")).count()
}

#[test]
fn a_model_that_triton_never_finalises_releases_its_resources() {
    let mut server = Server::load(&[]);
    let content = ClientRequest::of_lengths(4, 6, false);
    // As long as it is loaded it has them, whether it is used or not.
    for pause in [Duration::from_millis(1200), LONGER_THAN_GRACE] {
        std::thread::sleep(pause);
        let request = server.request(&content);
        server.finish(&[request]);
        server.wait_for_final(request);
        assert_eq!(output_ids(&server.host.sent(request)), content.expected());
    }
    assert!(server.host.num_metrics() > 0 && num_threads() > 0);
    server.host.unload_model(true);
    server.wait_until("its metrics are gone", || server.host.num_metrics() == 0);
    server.wait_until("its threads are gone", || num_threads() == 0);
    let late = server.request(&content);
    assert_eq!(server.execute(&[late]), Ok(()));
    let sent = server.host.sent(late);
    let (code, message) = sent[0].error.clone().expect("refused");
    assert_eq!(code, UNAVAILABLE);
    assert!(message.contains("told to unload"), "{message}");
    server.unload();
}

#[test]
fn the_configuration_is_completed_for_triton() {
    let server = Server::load(&[]);
    let config: serde_json::Value =
        serde_json::from_str(&server.host.config(server.model)).expect("JSON");
    assert_eq!(config["input"][0]["name"], "input_ids");
    assert_eq!(config["sequence_batching"]["iterative_sequence"], true);
    assert_eq!(config["model_transaction_policy"]["decoupled"], true);
    server.unload();
}
