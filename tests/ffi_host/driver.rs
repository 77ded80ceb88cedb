//! The real backend, over the synthetic runner, in the fake server: whatever clients and Triton do, every
//! stream is the one that its prompt foretells, every request is answered once and nothing is left.

use std::ffi::CString;

use serde_json::json;
use triton_inflight::backend::Inflight;
use triton_inflight::base::TokenId;
use triton_inflight::runner::next_token;
use triton_inflight::triton::{DataType, lifecycle, sys};

use crate::fake_triton::{Correlation, Host, Input, Parameter, Sent, Spec, Where};
use crate::{Failure, INVALID, RawRequest, outcome};

const VOCAB_SIZE: u32 = 64;
const ALREADY_EXISTS: u32 = sys::TRITONSERVER_Error_Code::TRITONSERVER_ERROR_ALREADY_EXISTS.0;

/// A loaded model with one instance.
pub struct Server {
    pub host: Host,
    model: *mut sys::TRITONBACKEND_Model,
    instance: *mut sys::TRITONBACKEND_ModelInstance,
    num_requests: u64,
}

/// What a client asks for.
#[derive(Clone)]
pub struct Ask {
    pub prompt: Vec<TokenId>,
    pub max_tokens: usize,
    pub stream: bool,
    pub num_sequences: usize,
}

impl Server {
    pub fn load(parameters: &[(&str, &str)]) -> Self {
        let mut all = serde_json::Map::new();
        let vocab_size = VOCAB_SIZE.to_string();
        let common = [
            ("runner", "synthetic"),
            ("synthetic_vocab_size", &vocab_size),
        ];
        for (key, value) in common.iter().chain(parameters) {
            all.insert((*key).to_owned(), json!({ "string_value": value }));
        }
        let config = json!({
            "name": "m", "backend": "inflight", "max_batch_size": 8,
            "input": [], "output": [], "parameters": all,
        });
        let host = Host::start();
        let model = host.model("m", &config.to_string());
        let instance = host.instance(model);
        // SAFETY: both handles are alive until `unload`.
        unsafe {
            outcome(lifecycle::model_initialize::<Inflight>(model)).expect("the model loads");
            outcome(lifecycle::instance_initialize::<Inflight>(instance))
                .expect("and its instance");
        }
        Self {
            host,
            model,
            instance,
            num_requests: 0,
        }
    }

    /// A new request of a sequence of its own.
    pub fn ask(&mut self, ask: &Ask) -> RawRequest {
        let spec = self.spec(ask);
        self.host.request(spec)
    }

    /// The same, to be changed before it is sent.
    pub fn spec(&mut self, ask: &Ask) -> Spec {
        self.num_requests += 1;
        spec(ask, Correlation::Number(self.num_requests))
    }

    fn ask_as(&self, ask: &Ask, correlation: Correlation) -> RawRequest {
        self.host.request(spec(ask, correlation))
    }

    /// One Execute call over requests that are the backend's or Triton's.
    pub fn execute(&self, batch: &[RawRequest]) -> Result<(), Failure> {
        for &request in batch {
            if self.host.place(request) == Where::InQueue {
                self.host.again(request);
            }
        }
        let mut batch = batch.to_vec();
        let (list, count) = (batch.as_mut_ptr(), batch.len() as u32);
        // SAFETY: the instance is alive, and so are the requests, which are the backend's.
        unsafe {
            outcome(lifecycle::instance_execute::<Inflight>(
                self.instance,
                list,
                count,
            ))
        }
    }

    /// Executes until Triton has none of these requests any more.
    pub fn finish(&self, requests: &[RawRequest]) {
        for _ in 0..1000 {
            let left: Vec<_> = requests
                .iter()
                .copied()
                .filter(|request| self.host.place(*request) != Where::Released)
                .collect();
            if left.is_empty() {
                return;
            }
            assert_eq!(self.execute(&left), Ok(()));
        }
        panic!("a request never ends");
    }

    /// What the metrics say of the KV cache.
    pub fn num_used_blocks(&self) -> f64 {
        let families = self.host.families();
        let blocks = families
            .iter()
            .find(|family| family.name == "nv_trt_llm_kv_cache_block_metrics");
        let is_used = |(_, value): &(String, String)| value == "used";
        let used = blocks
            .expect("the family")
            .metrics
            .iter()
            .find(|metric| metric.labels.iter().any(is_used));
        used.expect("the gauge").value
    }

    /// Whether the instance says that it can serve.
    pub fn ready(&self) -> Result<(), Failure> {
        // SAFETY: the instance is alive.
        unsafe { outcome(lifecycle::instance_ready::<Inflight>(self.instance)) }
    }

    /// Unloads, which sends everything that was still to be sent.
    pub fn unload(&self) {
        // SAFETY: both were initialised, and nothing else is in progress.
        unsafe {
            let instance = lifecycle::instance_finalize::<Inflight>(self.instance);
            assert_eq!(outcome(instance), Ok(()));
            assert_eq!(
                outcome(lifecycle::model_finalize::<Inflight>(self.model)),
                Ok(())
            );
        }
    }
}

fn spec(ask: &Ask, correlation: Correlation) -> Spec {
    let ids = ask
        .prompt
        .iter()
        .flat_map(|id| (*id as i32).to_le_bytes())
        .collect();
    let mut parameters = vec![(
        c"max_tokens".to_owned(),
        Parameter::Int(ask.max_tokens as i64),
    )];
    parameters.push(match ask.stream {
        true => (c"stream".to_owned(), Parameter::Bool(true)),
        false => (c"exclude_input_in_output".to_owned(), Parameter::Bool(true)),
    });
    if ask.num_sequences > 1 {
        // The synthetic runner draws nothing, but a greedy request has only one sequence.
        parameters.push((c"temperature".to_owned(), Parameter::Double(1.0)));
        let n = Parameter::Int(ask.num_sequences as i64);
        parameters.push((c"n".to_owned(), n));
    }
    let outputs = ["output_ids", "finish_reason", "num_output_tokens"];
    Spec {
        correlation,
        parameters,
        inputs: vec![Input {
            name: c"input_ids".to_owned(),
            data_type: DataType::Int32,
            shape: vec![1, ask.prompt.len() as i64],
            buffers: vec![ids],
            on_gpu: false,
        }],
        outputs: outputs
            .map(|name| CString::new(name).expect("a name"))
            .into(),
        ..Spec::default()
    }
}

impl Ask {
    pub fn of_lengths(prompt: usize, max_tokens: usize, stream: bool) -> Self {
        let prompt = (0..prompt).map(|i| (i * 7 % 64) as TokenId).collect();
        Self {
            prompt,
            max_tokens,
            stream,
            num_sequences: 1,
        }
    }

    pub fn of_sequences(self, num_sequences: usize) -> Self {
        Self {
            num_sequences,
            ..self
        }
    }

    /// The whole output that the synthetic runner gives it.
    pub fn expected(&self) -> Vec<TokenId> {
        let mut tokens = self.prompt.clone();
        for _ in 0..self.max_tokens {
            tokens.push(next_token(&tokens, VOCAB_SIZE));
        }
        tokens.split_off(self.prompt.len())
    }
}

/// The tokens of an answer of one sequence, over all its responses.
pub fn output_ids(sent: &[Sent]) -> Vec<TokenId> {
    rows(sent, 1).remove(0)
}

/// The tokens of each row of an answer, over all its responses, without what fills them up.
pub fn rows(sent: &[Sent], num_rows: usize) -> Vec<Vec<TokenId>> {
    let mut rows = vec![Vec::new(); num_rows];
    for sent in sent.iter().filter(|sent| !sent.outputs.is_empty()) {
        let (shape, ids) = numbers(sent, "output_ids");
        let (count_shape, counts) = numbers(sent, "num_output_tokens");
        assert_eq!(shape[..2], [1, num_rows as i64]);
        assert_eq!(count_shape, [1, num_rows as i64]);
        let width = shape[2] as usize;
        for (i, (row, count)) in rows.iter_mut().zip(counts).enumerate() {
            let num_new = count as usize - row.len();
            let ids = &ids[i * width..(i + 1) * width];
            row.extend(ids[..num_new].iter().map(|id| *id as TokenId));
            assert!(ids[num_new..].iter().all(|id| *id == 0), "the padding");
        }
    }
    rows
}

/// Shape and values of an output.
pub fn numbers(sent: &Sent, output: &str) -> (Vec<i64>, Vec<i32>) {
    let found = sent.outputs.iter().find(|(name, ..)| name == output);
    let (.., shape, bytes) = found.expect("the output is there");
    let (numbers, _) = bytes.as_chunks::<4>();
    let numbers = numbers.iter().map(|bytes| i32::from_le_bytes(*bytes));
    (shape.clone(), numbers.collect())
}

pub fn error_code(sent: &[Sent]) -> Option<u32> {
    sent.last()?.error.as_ref().map(|(code, _)| *code)
}

#[test]
fn streams_and_whole_answers_are_what_their_prompts_foretell() {
    let mut server = Server::load(&[]);
    let asks = [
        Ask::of_lengths(3, 5, true),
        Ask::of_lengths(40, 2, false),
        Ask::of_lengths(1, 9, false),
    ];
    let requests = asks.each_ref().map(|ask| server.ask(ask));
    server.finish(&requests);
    server.unload();
    for (ask, request) in asks.iter().zip(requests) {
        let sent = server.host.sent(request);
        assert_eq!(output_ids(&sent), ask.expected());
        assert_eq!(sent.len() > 1, ask.stream);
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
fn a_streams_responses_have_as_many_tokens_as_the_model_says() {
    let mut server = Server::load(&[("stream_interval", "4")]);
    let cases: [(usize, &[usize]); 6] = [
        (1, &[1]),
        (2, &[1, 1]),
        (5, &[1, 4]),
        (6, &[1, 4, 1]),
        (10, &[1, 4, 4, 1]),
        (13, &[1, 4, 4, 4]),
    ];
    let asks = cases.map(|(num_tokens, _)| Ask::of_lengths(3, num_tokens, true));
    let requests = asks.each_ref().map(|ask| server.ask(ask));
    server.finish(&requests);
    server.unload();
    for ((request, ask), (_, expected)) in requests.into_iter().zip(&asks).zip(cases) {
        let sent = server.host.sent(request);
        assert_eq!(output_ids(&sent), ask.expected());
        let lengths = sent.iter().map(|sent| numbers(sent, "output_ids").1.len());
        assert_eq!(lengths.collect::<Vec<_>>(), expected);
    }
}

#[test]
fn requests_without_a_sequence_are_ended_at_once_and_hurt_nobody() {
    let mut server = Server::load(&[]);
    let ask = Ask::of_lengths(4, 3, true);
    let request = server.ask(&ask);
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
    assert_eq!(output_ids(&server.host.sent(request)), ask.expected());
}

#[test]
fn a_refused_reschedule_ends_that_request_alone() {
    let mut server = Server::load(&[]);
    let ask = Ask::of_lengths(4, 6, true);
    let (idle, other) = (server.ask(&ask), server.ask(&ask));
    assert_eq!(server.execute(&[idle, other]), Ok(()));
    server.host.refuse_reschedule(true);
    assert_eq!(server.execute(&[idle]), Ok(()));
    server.host.refuse_reschedule(false);
    assert_eq!(server.host.place(idle), Where::Released);
    assert_eq!(error_code(&server.host.sent(idle)), Some(INVALID));
    server.finish(&[other]);
    server.unload();
    assert_eq!(output_ids(&server.host.sent(other)), ask.expected());
}

#[test]
fn a_second_request_of_a_live_sequence_is_refused_and_the_first_goes_on() {
    let server = Server::load(&[]);
    let ask = Ask::of_lengths(4, 6, true);
    for correlation in [
        || Correlation::Number(77),
        || Correlation::Text(c"chat".to_owned()),
    ] {
        let first = server.ask_as(&ask, correlation());
        assert_eq!(server.execute(&[first]), Ok(()));
        let second = server.ask_as(&ask, correlation());
        assert_eq!(server.execute(&[second]), Ok(()));
        assert_eq!(error_code(&server.host.sent(second)), Some(ALREADY_EXISTS));
        assert!(
            server.host.is_cancelled(second),
            "else its release ends the sequence"
        );
        server.finish(&[first]);
        // Its names are free again.
        let third = server.ask_as(&ask, correlation());
        server.finish(&[third]);
        for request in [first, third] {
            while !server
                .host
                .sent(request)
                .last()
                .is_some_and(|last| last.is_final)
            {
                std::thread::yield_now();
            }
            assert_eq!(output_ids(&server.host.sent(request)), ask.expected());
        }
    }
    server.unload();
}

#[test]
fn a_cancelled_request_is_left_to_triton() {
    let mut server = Server::load(&[]);
    let ask = Ask::of_lengths(4, 50, true);
    let (cancelled, other) = (server.ask(&ask), server.ask(&ask));
    assert_eq!(server.execute(&[cancelled, other]), Ok(()));
    server.host.cancel(cancelled);
    assert_eq!(server.execute(&[cancelled, other]), Ok(()));
    assert_eq!(server.host.place(cancelled), Where::InQueue);
    server.finish(&[other]);
    server.unload();
    let sent = server.host.sent(cancelled);
    assert!(
        sent.iter()
            .all(|sent| !sent.is_final && sent.error.is_none())
    );
    assert_eq!(output_ids(&server.host.sent(other)), ask.expected());
}

#[test]
fn a_request_that_is_cancelled_in_a_step_is_left_to_triton_and_forgotten() {
    let mut server = Server::load(&[("synthetic_step_us", "50000")]);
    for max_tokens in [1, 100] {
        cancel_in_a_step(&mut server, max_tokens);
    }
    server.unload();
    // No request came after them, and their blocks are free all the same.
    assert_eq!(server.num_used_blocks(), 0.0);
}

fn cancel_in_a_step(server: &mut Server, max_tokens: usize) {
    let cancelled = server.ask(&Ask::of_lengths(4, max_tokens, true));
    let (host, address) = (&server.host, cancelled.addr());
    std::thread::scope(|scope| {
        scope.spawn(move || {
            std::thread::sleep(std::time::Duration::from_millis(10));
            host.cancel(std::ptr::without_provenance_mut(address));
        });
        assert_eq!(server.execute(&[cancelled]), Ok(()));
    });
    // A release would leave its slot taken until the sequence idles out.
    assert_eq!(server.host.place(cancelled), Where::InQueue);
    assert!(server.host.sent(cancelled).is_empty());
}

#[test]
fn a_refused_request_that_was_cancelled_is_left_to_triton() {
    let mut server = Server::load(&[]);
    let refused = server.ask(&Ask::of_lengths(0, 5, true));
    server.host.cancel(refused);
    assert_eq!(server.execute(&[refused]), Ok(()));
    assert_eq!(server.host.place(refused), Where::InQueue);
    server.unload();
    assert!(server.host.sent(refused).is_empty());
}

#[test]
fn the_configuration_is_completed_as_triton_must_see_it() {
    let server = Server::load(&[]);
    let config: serde_json::Value =
        serde_json::from_str(&server.host.config(server.model)).expect("JSON");
    assert_eq!(config["input"][0]["name"], "input_ids");
    assert_eq!(config["sequence_batching"]["iterative_sequence"], true);
    assert_eq!(config["model_transaction_policy"]["decoupled"], true);
    server.unload();
}
