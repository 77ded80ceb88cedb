//! The real backend in the fake server, with random clients and a random Triton.

use std::time::{Duration, Instant};

use inflight_tests::seed;
use inflight_triton::sys;

use crate::draw::Draw;
use crate::fake_triton::Where;
use crate::served::{ClientRequest, Server, error_code, rows};
use crate::{INVALID, RawRequest};

const CANCELLED: u32 = sys::TRITONSERVER_Error_Code::TRITONSERVER_ERROR_CANCELLED.0;

/// Clients that connect, stream, wait and disconnect, and Triton passing whole batches or parts of them, with a cache
/// too small for all: 200 steps, after which all remaining requests are served to their ends. Returns how many requests
/// were served as a whole.
fn random_walk(seed: u64, parameters: &[(&str, &str)]) -> usize {
    let mut draw = Draw::from_seed(seed);
    let mut server = Server::load(parameters);
    let mut started: Vec<(ClientRequest, RawRequest)> = Vec::new();
    let mut live: Vec<RawRequest> = Vec::new();
    // Cancelled requests, which the backend keeps for a moment.
    let mut kept: Vec<RawRequest> = Vec::new();
    for _ in 0..200 {
        if live.len() < 8 && draw.one_in(2) {
            let (prompt, max_tokens) = (1 + draw.below(30), 1 + draw.below(30));
            let content = ClientRequest::of_lengths(prompt, max_tokens, draw.one_in(2));
            let content = content.of_sequences([1, 1, 2, 4][draw.below(4)]);
            let request = server.request(&content);
            started.push((content, request));
            live.push(request);
        }
        if !live.is_empty() && draw.one_in(10) {
            server.host.cancel(live[draw.below(live.len())]);
        }
        server.host.refuse_reschedule(draw.one_in(40));
        // Direct passes all requests, oldest a random part. A request's first call is never delayed here,
        // because the fake server has already passed it to the backend.
        let all = draw.one_in(2);
        let batch: Vec<_> = live
            .iter()
            .copied()
            .filter(|request| {
                all || server.host.place(*request) == Where::InBackend || draw.one_in(2)
            })
            .collect();
        if !batch.is_empty() {
            assert_eq!(server.execute(&batch), Ok(()), "seed {seed}");
        }
        live.retain(|request| {
            let is_kept =
                batch.contains(request) && server.host.place(*request) == Where::InBackend;
            kept.extend(is_kept.then_some(*request));
            !is_kept
        });
        // Triton answers a cancelled request in its hands without notice.
        live.retain(|request| match server.host.place(*request) {
            Where::InQueue => !server.host.is_cancelled(*request),
            place => place != Where::Released,
        });
    }
    server.host.refuse_reschedule(false);
    server.finish(&live);
    let deadline = Instant::now() + Duration::from_secs(10);
    while let Some(request) = kept.pop() {
        assert!(server.host.is_cancelled(request), "seed {seed}");
        while server.host.place(request) == Where::InBackend {
            assert!(Instant::now() < deadline, "seed {seed}: kept for good");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    server.unload();

    let mut num_whole = 0;
    for (content, request) in started {
        let sent = server.host.sent(request);
        let (rows, expected) = (rows(&sent, content.num_sequences), content.expected());
        let whole = sent
            .last()
            .is_some_and(|last| last.is_final && last.error.is_none());
        if whole {
            num_whole += 1;
            assert!(rows.iter().all(|ids| *ids == expected), "seed {seed}");
        } else {
            // Cancelled or rejected on the way: its output is a prefix of the whole output.
            assert!(
                rows.iter().all(|ids| expected.starts_with(ids)),
                "seed {seed}: {rows:?} of {expected:?}"
            );
            match error_code(&sent) {
                // Triton rejected the reschedule.
                Some(INVALID) => {}
                // Triton has it, or rejected it.
                None | Some(CANCELLED) => {
                    assert!(server.host.is_cancelled(request), "seed {seed}");
                }
                Some(other) => panic!("seed {seed}: error {other}"),
            }
        }
    }
    num_whole
}

#[test]
fn random_clients_get_their_own_streams_and_nothing_leaks() {
    let small = [
        ("max_seq_len", "64"),
        ("tokens_per_block", "4"),
        ("max_tokens_in_paged_kv_cache", "96"),
        ("max_num_tokens", "16"),
    ];
    let first = seed();
    for policy in ["guaranteed_no_evict", "max_utilization", "static_batch"] {
        // Without overlap, and with it.
        let mut num_whole = [0; 2];
        for number in 0..8 {
            let seed = first.wrapping_add(number);
            let overlap = if number % 2 == 1 { "true" } else { "false" };
            let mut parameters = small.to_vec();
            parameters.push(("batch_scheduler_policy", policy));
            parameters.push(("enable_trt_overlap", overlap));
            num_whole[number as usize % 2] += random_walk(seed, &parameters);
        }
        println!("{policy}: {num_whole:?} requests served as a whole");
        assert!(
            num_whole.iter().all(|num| *num > 15),
            "{policy}, {num_whole:?}"
        );
    }
}
