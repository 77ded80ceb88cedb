//! The real backend in the fake server: requests for several sequences, among requests for one.

use crate::fake_triton::{Parameter, Sent, Where};
use crate::served::{ClientRequest, Server, error_code, rows};
use crate::{INVALID, RawRequest};

/// The texts of an output, one per row.
fn texts(sent: &Sent, output: &str) -> Vec<String> {
    let found = sent.outputs.iter().find(|(name, ..)| name == output);
    let (.., shape, mut bytes) = found.expect("the output is there").clone();
    let mut texts = Vec::new();
    while !bytes.is_empty() {
        let rest = bytes.split_off(4);
        let len = u32::from_le_bytes(bytes.try_into().expect("four")) as usize;
        texts.push(String::from_utf8(rest[..len].to_vec()).expect("text"));
        bytes = rest[len..].to_vec();
    }
    assert_eq!(shape, [1, texts.len() as i64]);
    texts
}

/// Checks a whole answer: every row matches the prompt, in one response or several.
fn assert_whole(server: &Server, content: &ClientRequest, request: RawRequest) {
    let sent = server.host.sent(request);
    let rows = rows(&sent, content.num_sequences);
    assert_eq!(rows, vec![content.expected(); content.num_sequences]);
    let last = sent.last().expect("a response");
    assert!(last.is_final && last.error.is_none() && last.after_release);
    assert_eq!(
        texts(last, "finish_reason"),
        vec!["length"; content.num_sequences]
    );
    assert_eq!(sent.iter().filter(|sent| sent.is_final).count(), 1);
    assert_eq!(sent.len() > 1, content.stream);
}

#[test]
fn the_sequences_of_a_request_are_rows_of_one_answer_in_every_scheme() {
    // Fewer rows and blocks than branches, which therefore wait for each other.
    let tight = [
        ("max_num_requests", "3"),
        ("max_seq_len", "64"),
        ("tokens_per_block", "4"),
        ("max_tokens_in_paged_kv_cache", "96"),
        ("max_num_tokens", "64"),
    ];
    let schemes: &[&[(&str, &str)]] = &[
        &[],
        &[("gpt_model_type", "inflight_batching")],
        &[
            ("gpt_model_type", "V1"),
            ("enable_chunked_context", "false"),
        ],
        &[("batch_scheduler_policy", "max_utilization")],
        &[("batch_scheduler_policy", "static_batch")],
        &[("enable_trt_overlap", "true")],
        &[("enable_kv_cache_reuse", "false")],
    ];
    for scheme in schemes {
        let mut server = Server::load(&[&tight, *scheme].concat());
        let streams = !scheme.contains(&("gpt_model_type", "V1"));
        let contents = [
            ClientRequest::of_lengths(30, 12, streams).of_sequences(5),
            ClientRequest::of_lengths(3, 20, false),
            ClientRequest::of_lengths(30, 25, false).of_sequences(8),
            ClientRequest::of_lengths(9, 1, false).of_sequences(2),
            ClientRequest::of_lengths(30, 7, streams),
        ];
        let requests = contents.each_ref().map(|content| server.request(content));
        server.finish(&requests);
        server.unload();
        for (content, request) in contents.iter().zip(requests) {
            assert_whole(&server, content, request);
        }
        let (reported, _) = server.host.statistics();
        assert_eq!(
            reported.len(),
            contents.len(),
            "each request is counted once"
        );
        assert_eq!(server.num_used_blocks(), 0.0, "{scheme:?}");
    }
}

#[test]
fn all_sequences_end_with_their_request() {
    for overlap in ["false", "true"] {
        let mut server =
            Server::load(&[("enable_trt_overlap", overlap), ("max_num_requests", "4")]);
        let content = ClientRequest::of_lengths(4, 200, true).of_sequences(6);
        let other = ClientRequest::of_lengths(5, 30, true);
        let (cancelled, goes_on) = (server.request(&content), server.request(&other));
        let mut spec = server.spec(&content);
        spec.timeout_us = 1;
        let late = server.host.request(spec);
        let mut spec = server.spec(&content);
        spec.client_id = c"me".to_owned();
        let stopped = server.host.request(spec);
        let all = [cancelled, goes_on, late, stopped];
        for _ in 0..4 {
            let held: Vec<_> = all
                .iter()
                .copied()
                .filter(|request| server.host.place(*request) != Where::Released)
                .collect();
            assert_eq!(server.execute(&held), Ok(()));
        }
        server.host.cancel(cancelled);
        let mut spec = server.spec(&ClientRequest::of_lengths(1, 1, false));
        spec.client_id = c"me".to_owned();
        spec.parameters
            .push((c"stop".to_owned(), Parameter::Bool(true)));
        let stop = server.host.request(spec);
        assert_eq!(server.execute(&[cancelled, goes_on, stopped, stop]), Ok(()));
        server.assert_left_to_triton(cancelled, &[goes_on]);
        server.finish(&[goes_on, stopped, stop]);
        server.unload();
        assert_whole(&server, &other, goes_on);
        for (request, reason) in [(late, "timed_out"), (stopped, "cancelled")] {
            let sent = server.host.sent(request);
            let last = sent.last().expect("a response");
            assert!(last.is_final && last.error.is_none());
            assert_eq!(texts(last, "finish_reason"), [reason; 6]);
            let rows = rows(&sent, 6);
            assert!(rows.iter().all(|ids| content.expected().starts_with(ids)));
        }
        let sent = server.host.sent(cancelled);
        assert!(sent.iter().all(|sent| !sent.is_final));
        assert_eq!(server.num_used_blocks(), 0.0);
    }
}

#[test]
fn more_sequences_than_slots_and_identical_sequences_are_rejected() {
    let mut server = Server::load(&[]);
    let cases: &[(&[(&str, i64)], &str)] = &[
        (
            &[("n", 9)],
            "'n': 9 is not at most max_batch_size, which is 8",
        ),
        (
            &[("best_of", 9)],
            "'best_of': 9 is not at most max_batch_size",
        ),
        (
            &[("n", 2)],
            "'n': the 2 sequences of a greedy request are all the same",
        ),
        (
            &[("best_of", 3)],
            "'best_of': the 3 sequences of a greedy request",
        ),
        (
            &[("best_of", 3), ("top_p", 1)],
            "'best_of': the synthetic runner has no logits",
        ),
        (
            &[("n", 3), ("best_of", 2)],
            "'best_of': 2 is not at least n, which is 3",
        ),
    ];
    for (options, expected) in cases {
        let mut spec = server.spec(&ClientRequest::of_lengths(3, 5, false));
        for (name, value) in *options {
            let name = std::ffi::CString::new(*name).expect("a name");
            spec.parameters.push((name, Parameter::Int(*value)));
        }
        let request = server.host.request(spec);
        assert_eq!(server.execute(&[request]), Ok(()));
        let sent = server.host.sent(request);
        assert_eq!(error_code(&sent), Some(INVALID));
        let (_, message) = sent[0].error.clone().expect("an error");
        assert!(
            message.contains(expected),
            "'{message}' does not contain '{expected}'"
        );
    }
    server.unload();
}

#[test]
fn a_request_is_counted_once_and_each_of_its_sequences_separately() {
    let mut server = Server::load(&[]);
    let request = server.request(&ClientRequest::of_lengths(4, 6, false).of_sequences(3));
    server.finish(&[request]);
    server.unload();
    let families = server.host.families();
    let observed = |name: &str| {
        let family = families.iter().find(|family| family.name == name);
        family.expect("the family").metrics[0].observed.clone()
    };
    assert_eq!(observed("nv_llm_input_token_len"), [4.0]);
    assert_eq!(observed("nv_llm_output_token_len"), [6.0; 3]);
    for (name, count) in [
        ("nv_inflight_queue_seconds", 1),
        ("nv_inflight_time_to_first_token_seconds", 1),
        ("nv_inflight_time_per_output_token_seconds", 3),
        ("nv_inflight_e2e_seconds", 1),
    ] {
        assert_eq!(observed(name).len(), count, "{name}");
    }
}
