//! Answers that take long to send do not delay others.

use crate::fake_triton::{Parameter, Where};
use crate::served::{ClientRequest, Server, rows};

#[test]
fn neither_steps_nor_small_answers_wait_for_a_large_answer() {
    let mut server = Server::load(&[
        ("max_seq_len", "131072"),
        ("max_tokens_in_paged_kv_cache", "262144"),
        ("max_num_tokens", "8192"),
    ]);
    // Eight times the prompt plus a token: megabytes.
    let large = ClientRequest::of_lengths(100_000, 1, false).of_sequences(8);
    let mut spec = server.spec(&large);
    for (name, value) in &mut spec.parameters {
        if name.as_c_str() == c"exclude_input_in_output" {
            *value = Parameter::Bool(false);
        }
    }
    let heavy = server.host.request(spec);
    server.host.hold_responses(Some(heavy));
    server.finish(&[heavy]);

    // Its answer is blocked for as long as the test needs. More requests than fit into a channel are served
    // meanwhile.
    let cheap = [
        ClientRequest::of_lengths(3, 5, true),
        ClientRequest::of_lengths(40, 2, false),
        ClientRequest::of_lengths(1, 9, false).of_sequences(3),
    ];
    // Nothing is asserted while it is blocked: a failing test would then wait for it forever.
    let mut answers = Vec::new();
    for _ in 0..20 {
        let requests = cheap.each_ref().map(|content| server.request(content));
        server.finish(&requests);
        for (content, request) in cheap.iter().zip(requests) {
            let is_final = |server: &Server| {
                let sent = server.host.sent(request);
                sent.last().is_some_and(|it| it.is_final)
            };
            while !is_final(&server) {
                std::thread::yield_now();
            }
            answers.push((content, server.host.sent(request)));
        }
    }
    // The metrics are updated after the answers; its blocks are freed while it is blocked.
    while server.num_used_blocks() != 0.0 {
        std::thread::yield_now();
    }
    let is_held = server.host.sent(heavy).is_empty();
    let place = server.host.place(heavy);
    server.host.hold_responses(None);

    assert!(is_held);
    assert_eq!(place, Where::Released);
    for (content, sent) in answers {
        let expected = vec![content.expected(); content.num_sequences];
        assert_eq!(rows(&sent, content.num_sequences), expected);
    }
    server.unload();
    let sent = server.host.sent(heavy);
    assert_eq!(sent.len(), 1);
    assert!(sent[0].is_final && sent[0].error.is_none());
}
