//! The real backend in the fake server, with a model whose sequences are conversations: each request is a turn, which
//! continues what the turns before it have said.

use std::ffi::CString;

use inflight_base::TokenId;
use inflight_triton::{install_logger, sys};
use serde_json::{Map, json};

use crate::fake_triton::{Correlation, Parameter, START, Spec, Where};
use crate::gate::Gate;
use crate::served::{ClientRequest, RawRequest, Server, error_code, numbers, output_ids};
use crate::{INTERNAL, INVALID, UNAVAILABLE};

const END: u32 = sys::TRITONSERVER_RequestFlag::TRITONSERVER_REQUEST_FLAG_SEQUENCE_END.0;

/// Longer than a test takes.
const LONG_US: u64 = 3_600_000_000;

/// The most turns of a conversation that wait.
const MAX_WAITING: usize = 16;

/// A server with a model of `max_open` conversations, which are forgotten after `max_idle_us` without a turn.
fn load(max_open: u32, max_idle_us: u64, parameters: &[(&str, &str)]) -> Server {
    install_logger();
    let common = [("runner", "synthetic"), ("synthetic_vocab_size", "64")];
    let all = common.iter().chain(parameters);
    let all: Map<_, _> = all
        .map(|(key, value)| ((*key).to_owned(), json!({ "string_value": value })))
        .collect();
    Server::load_config(&json!({
        "name": "m", "backend": "inflight", "max_batch_size": max_open, "input": [], "output": [],
        "sequence_batching": { "max_sequence_idle_microseconds": max_idle_us, "direct": {} },
        "parameters": all,
    }))
}

/// The server, with a gate that holds its runner back and that is dropped before it.
fn load_gated(
    gate: Gate,
    max_open: u32,
    max_idle_us: u64,
    parameters: &[(&str, &str)],
) -> (Server, Gate) {
    let gated = [("synthetic_gate", gate.path())];
    let server = load(max_open, max_idle_us, &[&gated, parameters].concat());
    (server, gate)
}

/// A conversation, and what has been said in it.
struct Conversation {
    id: u64,
    said: Vec<TokenId>,
}

impl Conversation {
    fn new(id: u64) -> Self {
        let said = Vec::new();
        Self { id, said }
    }

    /// The specification of a turn.
    fn spec(&self, server: &mut Server, prompt: &[TokenId], max_tokens: usize, flags: u32) -> Spec {
        let spec = server.spec(&ClientRequest {
            prompt: prompt.to_vec(),
            max_tokens,
            stream: false,
            num_sequences: 1,
        });
        Spec {
            correlation: Correlation::Number(self.id),
            flags,
            ..spec
        }
    }

    /// Begins a turn.
    fn begin(
        &self,
        server: &mut Server,
        prompt: &[TokenId],
        max_tokens: usize,
        flags: u32,
    ) -> RawRequest {
        let spec = self.spec(server, prompt, max_tokens, flags);
        let turn = server.host.request(spec);
        assert_eq!(server.execute(&[turn]), Ok(()));
        turn
    }

    /// Checks the answer to the next turn, which has `prompt`.
    fn check(&mut self, server: &Server, turn: RawRequest, prompt: &[TokenId], max_tokens: usize) {
        server.wait_for_final(turn);
        self.said.extend(prompt);
        let whole = ClientRequest {
            prompt: self.said.clone(),
            max_tokens,
            stream: false,
            num_sequences: 1,
        };
        let sent = server.host.sent(turn);
        assert_eq!(
            (error_code(&sent), output_ids(&sent)),
            (None, whole.expected())
        );
        self.said.extend(whole.expected());
    }

    /// A turn that is answered.
    fn say(&mut self, server: &mut Server, prompt: &[TokenId], flags: u32) {
        let turn = self.begin(server, prompt, 5, flags);
        if flags & START != 0 {
            self.said.clear();
        }
        self.check(server, turn, prompt, 5);
    }

    /// A turn of a conversation that is not open.
    fn is_refused(&self, server: &mut Server) {
        let turn = self.begin(server, &[1], 1, 0);
        assert_refused(
            server,
            turn,
            INVALID,
            "the conversation of this request has ended",
        );
    }
}

fn assert_refused(server: &Server, turn: RawRequest, code: u32, words: &str) {
    server.wait_for_final(turn);
    let sent = server.host.sent(turn);
    let error = sent.last().and_then(|last| last.error.clone());
    let (found, message) = error.expect("an error");
    assert_eq!(found, code);
    assert!(message.contains(words), "{message}");
    server.wait_until("it is released", || {
        server.host.place(turn) == Where::Released
    });
}

/// How many records of the log contain `words`.
fn num_logged(server: &Server, words: &str) -> usize {
    let log = server.host.log();
    log.iter().filter(|it| it.message.contains(words)).count()
}

#[test]
fn each_turn_continues_the_turns_before_it_until_the_last() {
    let mut server = load(8, LONG_US, &[]);
    let [mut first, mut second] = [Conversation::new(1), Conversation::new(2)];
    first.say(&mut server, &[3, 4, 5], START);
    second.say(&mut server, &[6], START);
    for turn in 0..3 {
        first.say(&mut server, &[turn], 0);
        second.say(&mut server, &[7, turn], 0);
    }
    first.say(&mut server, &[9], END);
    first.is_refused(&mut server);
    second.say(&mut server, &[9], 0);
    // A start begins anew, whether the conversation is open or not.
    for conversation in [&mut first, &mut second] {
        conversation.say(&mut server, &[2, 2], START);
        conversation.say(&mut server, &[8], 0);
    }
    first.say(&mut server, &[1], START | END);
    first.is_refused(&mut server);
    server.unload();
}

#[test]
fn turns_wait_for_the_one_before_them_and_no_more_than_sixteen() {
    let (mut server, gate) = load_gated(Gate::closed("waiting-turns"), 32, LONG_US, &[]);
    let mut conversation = Conversation::new(1);
    let first = conversation.begin(&mut server, &[1, 2], 3, START);
    let waiting: Vec<_> = (0..=MAX_WAITING as TokenId)
        .map(|n| conversation.begin(&mut server, &[n], 2, 0))
        .collect();
    // They are read when the first step is over.
    gate.allow(1);
    let (refused, waiting) = waiting.split_last().expect("seventeen");
    assert_refused(
        &server,
        *refused,
        UNAVAILABLE,
        "16 turns of this conversation wait already",
    );
    gate.lift();
    conversation.check(&server, first, &[1, 2], 3);
    for (n, turn) in (0..).zip(waiting) {
        conversation.check(&server, *turn, &[n], 2);
    }
    conversation.say(&mut server, &[4], END);
    server.unload();
}

#[test]
fn a_start_behind_the_last_turn_begins_anew() {
    let (mut server, gate) = load_gated(Gate::closed("behind-the-last"), 8, LONG_US, &[]);
    let mut conversation = Conversation::new(1);
    let last = conversation.begin(&mut server, &[1, 2], 3, START | END);
    let next = conversation.begin(&mut server, &[4, 5], 3, START);
    gate.lift();
    conversation.check(&server, last, &[1, 2], 3);
    conversation.said.clear();
    conversation.check(&server, next, &[4, 5], 3);
    conversation.say(&mut server, &[6], 0);
    server.unload();
}

#[test]
fn a_turn_that_is_refused_or_cancelled_has_said_nothing() {
    let mut server = load(8, LONG_US, &[]);
    let mut conversation = Conversation::new(1);
    conversation.say(&mut server, &[1, 2], START);
    let mut wrong = conversation.spec(&mut server, &[3], 2, 0);
    let temperature = Parameter::Double(f64::NAN);
    wrong
        .parameters
        .push((c"temperature".to_owned(), temperature));
    let wrong = server.host.request(wrong);
    assert_eq!(server.execute(&[wrong]), Ok(()));
    assert_refused(&server, wrong, INVALID, "temperature");
    conversation.say(&mut server, &[4], 0);
    let cancelled = conversation.spec(&mut server, &[5], 2, 0);
    let cancelled = server.host.request(cancelled);
    server.host.cancel(cancelled);
    assert_eq!(server.execute(&[cancelled]), Ok(()));
    conversation.say(&mut server, &[6], 0);
    // Nor has one that is cancelled while it generates.
    let cancelled = conversation.begin(&mut server, &[7], 1000, 0);
    server.host.cancel(cancelled);
    conversation.say(&mut server, &[8], END);
    server.unload();
}

#[test]
fn beyond_the_slots_the_conversation_that_has_rested_longest_is_forgotten() {
    let mut server = load(2, LONG_US, &[]);
    let mut conversations = [1, 2, 3].map(Conversation::new);
    let [first, second, third] = &mut conversations;
    first.say(&mut server, &[1], START);
    second.say(&mut server, &[2], START);
    first.say(&mut server, &[3], 0);
    third.say(&mut server, &[4], START);
    second.is_refused(&mut server);
    first.say(&mut server, &[5], 0);
    third.say(&mut server, &[6], 0);
    // One that begins anew takes no other's place.
    third.say(&mut server, &[7], START);
    first.say(&mut server, &[8], END);
    third.say(&mut server, &[8], END);
    server.unload();
}

#[test]
fn a_conversation_in_its_turn_takes_no_slot_of_those_that_rest() {
    let slow = [("synthetic_step_us", "1000"), ("max_num_requests", "4")];
    let mut server = load(2, LONG_US, &slow);
    let mut conversations = [1, 2, 3, 4].map(Conversation::new);
    let [first, second, third, fourth] = &mut conversations;
    first.say(&mut server, &[1], START);
    second.say(&mut server, &[2], START);
    // Triton frees the slot of the first with its last turn, long before that has ended.
    let last = first.begin(&mut server, &[3], 300, END);
    third.say(&mut server, &[4], START);
    second.say(&mut server, &[5], 0);
    // Another one takes the slot of the third.
    fourth.say(&mut server, &[6], START);
    third.is_refused(&mut server);
    second.say(&mut server, &[7], 0);
    fourth.say(&mut server, &[7], 0);
    assert!(server.host.sent(last).is_empty(), "it goes on");
    first.check(&server, last, &[3], 300);
    server.unload();
}

#[test]
fn a_conversation_without_turns_is_forgotten_when_it_has_been_idle_for_too_long() {
    let (mut server, gate) = load_gated(Gate::open("idle"), 8, 20_000, &[]);
    server.host.set_verbose(true);
    let forgotten = "a conversation was forgotten";
    let [mut first, mut second] = [1, 2].map(Conversation::new);
    first.say(&mut server, &[1], START);
    server.wait_until("it is forgotten", || num_logged(&server, forgotten) == 1);
    first.is_refused(&mut server);
    // Each of two is.
    first.say(&mut server, &[1], START);
    second.say(&mut server, &[1], START);
    server.wait_until("both are forgotten", || num_logged(&server, forgotten) == 3);
    // One that has a turn is not.
    second.say(&mut server, &[1], START);
    gate.close();
    first.said.clear();
    let turn = first.begin(&mut server, &[2], 3, START);
    let next = first.begin(&mut server, &[3], 3, END);
    std::thread::sleep(std::time::Duration::from_millis(30));
    gate.lift();
    first.check(&server, turn, &[2], 3);
    first.check(&server, next, &[3], 3);
    server.wait_until("the second is", || num_logged(&server, forgotten) == 4);
    server.unload();
}

/// A pool of few blocks of four positions.
const FEW_BLOCKS: [(&str, &str); 3] = [
    ("max_seq_len", "64"),
    ("tokens_per_block", "4"),
    ("max_tokens_in_paged_kv_cache", "96"),
];

/// How many blocks of 17 tokens a new conversation finds in the cache, after others have used all blocks several times.
fn num_left(server: &mut Server, id: u64) -> i32 {
    for other in 10..20 {
        let mut other = Conversation::new(id + other);
        let prompt: Vec<_> = (0..50).map(|n| (other.id + n) as TokenId % 64).collect();
        other.say(server, &prompt, START | END);
    }
    let conversation = Conversation::new(id);
    let mut spec = conversation.spec(server, &[7; 17], 1, START | END);
    spec.outputs.push(CString::from(c"kv_cache_reused_blocks"));
    let asks = (c"return_perf_metrics".to_owned(), Parameter::Bool(true));
    spec.parameters.push(asks);
    let turn = server.host.request(spec);
    assert_eq!(server.execute(&[turn]), Ok(()));
    server.wait_for_final(turn);
    let sent = server.host.sent(turn);
    let found = numbers(sent.last().expect("an answer"), "kv_cache_reused_blocks");
    found.1[0]
}

#[test]
fn the_blocks_of_a_conversation_outlast_others_until_it_is_over() {
    type Ends = fn(&mut Server, &mut Conversation);
    let ends: [(&str, Ends); 3] = [
        ("its last turn", |server, it| it.say(server, &[1], END)),
        ("a new start", |server, it| it.say(server, &[1], START)),
        ("others", |server, _| {
            for other in 0..8 {
                Conversation::new(1000 + other).say(server, &[1], START);
            }
        }),
    ];
    for (name, ends) in ends {
        let mut server = load(8, LONG_US, &FEW_BLOCKS);
        let mut conversation = Conversation::new(1);
        conversation.say(&mut server, &[7; 17], START);
        // Of 17 positions, 4 blocks are full.
        assert_eq!(num_left(&mut server, 100), 4, "{name}");
        ends(&mut server, &mut conversation);
        assert_eq!(num_left(&mut server, 200), 0, "{name}");
        server.unload();
    }
}

#[test]
fn a_server_that_stops_ends_the_conversations_that_rest() {
    // While another generates, and while nothing does.
    for goes_on in [true, false] {
        let mut server = load(8, LONG_US, &[("synthetic_step_us", "2000")]);
        let mut conversations = [1, 2, 3].map(Conversation::new);
        for conversation in &mut conversations {
            conversation.say(&mut server, &[1], START);
        }
        let [first, second, third] = &mut conversations;
        third.say(&mut server, &[2], END);
        let long = Conversation::new(4);
        let long = goes_on.then(|| long.begin(&mut server, &[3], 1_000_000, START));
        server.host.stop_server();
        let submitted = || server.host.submitted();
        server.wait_until("they are ended", || submitted().len() == 2);
        let words = "the server stops: 2 open conversations are ended";
        server.wait_until("it is logged", || num_logged(&server, words) == 1);
        for end in submitted() {
            let ended = [Correlation::Number(1), Correlation::Number(2)];
            assert!(ended.contains(&end.correlation));
            assert_eq!(server.execute(&[end.request]), Ok(()));
            server.wait_for_final(end.request);
            assert_eq!(error_code(&server.host.sent(end.request)), None);
        }
        first.is_refused(&mut server);
        second.is_refused(&mut server);
        if let Some(long) = long {
            server.host.cancel(long);
        }
        server.unload();
    }
}

#[test]
fn a_step_that_fails_answers_the_turns_that_wait() {
    let fails = [("synthetic_fail_after", "2")];
    let (mut server, gate) = load_gated(Gate::closed("failing-turns"), 8, LONG_US, &fails);
    let conversation = Conversation::new(1);
    let turns = [START, 0, 0].map(|flags| conversation.begin(&mut server, &[1], 9, flags));
    gate.lift();
    for turn in turns {
        assert_refused(&server, turn, INTERNAL, "told to fail");
    }
    server.unload();
}

#[test]
fn requests_of_a_warm_up_and_of_gaps_belong_to_no_conversation() {
    let mut server = load(8, LONG_US, &[]);
    let warm_up = Conversation::new(0).begin(&mut server, &[1, 2], 3, 0);
    Conversation::new(0).check(&server, warm_up, &[1, 2], 3);
    assert_eq!(server.host.statistics().0, [], "it is no client's");
    let gap = server.host.request(Spec {
        correlation: Correlation::Number(0),
        flags: 0,
        ..Spec::default()
    });
    assert_eq!(server.execute(&[gap]), Ok(()));
    let sent = server.host.sent(gap);
    assert!(sent.len() == 1 && sent[0].is_final && sent[0].is_flag);
    server.unload();
}
