//! The batch manager in other shapes than its callbacks: with a thread of its own, as an executor, and with tensors
//! by name.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use inflight_base::{BlockSize, Blocks, ClientId, SequenceId, TokenId, Tokens};
use inflight_device_cpu::CpuOptions;
use inflight_engine::{EngineConfig, NewRequest};
use inflight_machines::load_on_cpus;
use inflight_manager::{
    BatchManager, Callbacks, Executor, ExecutorOptions, HostTensor, HostTensors, ManagerOptions,
    ManagerThread, Response, Submission, TensorCallbacks, TensorExecutor, TensorLayer, TensorModel,
    TensorRequest, TensorType, serve,
};
use inflight_runner::{ModelSource, RunnerLimits, SyntheticOptions, SyntheticRunner, next_token};
use inflight_sampling::{
    FinishReason, LogitsProcessor, ProcessLogits, SampleError, SamplingInput, SamplingParams,
};
use inflight_tests::checkout;
use parking_lot::Mutex;

const VOCAB_SIZE: u32 = 1000;
/// Longer than any test takes, unless it hangs.
const PATIENCE: Option<Duration> = Some(Duration::from_secs(100));

fn config() -> EngineConfig {
    let block_size = BlockSize::new(4).expect("not zero");
    EngineConfig {
        max_num_requests: 4,
        max_num_active: 6,
        max_seq_len: Tokens(64),
        max_num_tokens: Tokens(24),
        block_size,
        chunk_unit: block_size,
        num_blocks: Blocks(64),
        ..EngineConfig::default()
    }
}

fn manager() -> BatchManager {
    let options = SyntheticOptions {
        vocab_size: VOCAB_SIZE,
        step_base_us: 0.0,
        step_per_token_us: 0.0,
    };
    let runner = SyntheticRunner::new(options, &RunnerLimits::of(&config())).expect("memory");
    BatchManager::new(config(), Box::new(runner)).expect("a thread")
}

fn prompt(id: u64) -> Vec<TokenId> {
    (0..3 + id % 17).map(|n| (n % 5) as TokenId).collect()
}

fn request(id: u64, max_new_tokens: u32) -> NewRequest {
    NewRequest::new(SequenceId(id), prompt(id), Tokens(max_new_tokens))
}

/// The tokens that request `id` gets alone.
fn alone(id: u64, max_new_tokens: u32) -> Vec<TokenId> {
    let mut tokens = prompt(id);
    let num_prompt_tokens = tokens.len();
    for _ in 0..max_new_tokens {
        tokens.push(next_token(&tokens, VOCAB_SIZE));
    }
    tokens.split_off(num_prompt_tokens)
}

/// An application connected by two channels.
struct Channels {
    requests: Receiver<NewRequest>,
    responses: Sender<(SequenceId, Vec<TokenId>, bool)>,
}

impl Callbacks for Channels {
    fn get_requests(&mut self, max_num_requests: usize, _is_idle: bool) -> Option<Vec<Submission>> {
        let requests = self.requests.try_iter().take(max_num_requests);
        Some(requests.map(Submission::from).collect())
    }

    fn send_response(&mut self, response: Response<'_>) {
        let tokens = response.tokens.to_vec();
        let sent = self
            .responses
            .send((response.id, tokens, response.is_final()));
        sent.expect("the test listens");
    }

    fn reject_duplicate(&mut self, duplicate: Submission) {
        panic!("{} was added only once", duplicate.request.id);
    }
}

#[test]
fn dropping_a_manager_thread_waits_for_all_active_requests() {
    let (send, requests) = channel();
    let (responses, receive) = channel();
    let thread = ManagerThread::spawn(
        manager(),
        None,
        Channels {
            requests,
            responses,
        },
    );
    let thread = thread.expect("a thread");
    send.send(request(1, 1)).expect("it listens");
    thread.wake();
    assert_eq!(receive.recv(), Ok((SequenceId(1), alone(1, 1), true)));
    // Whole answers: none of these comes before its end.
    for id in 2..6 {
        send.send(request(id, 40)).expect("it listens");
    }
    let first = receive.recv().expect("one of them ends");
    drop(thread);
    let mut answers: BTreeMap<_, _> = receive.into_iter().map(|it| (it.0, it.1)).collect();
    answers.insert(first.0, first.1);
    let expected = (2..6).map(|id| (SequenceId(id), alone(id, 40)));
    assert_eq!(answers, expected.collect());
}

#[test]
fn a_panic_in_a_callback_ends_the_thread_with_its_message() {
    struct Panics;
    impl Callbacks for Panics {
        fn get_requests(&mut self, _: usize, _: bool) -> Option<Vec<Submission>> {
            panic!("no requests today");
        }
        fn send_response(&mut self, _: Response<'_>) {}
        fn reject_duplicate(&mut self, _: Submission) {}
    }
    let thread = ManagerThread::spawn(manager(), None, Panics).expect("a thread");
    let error = thread.join().expect_err("it panicked").to_string();
    assert!(error.contains("no requests today"), "{error}");
}

/// All responses of `id`, the final one last.
fn answer_of(executor: &Executor, id: SequenceId) -> (Vec<TokenId>, usize, FinishReason) {
    let (mut tokens, mut num_responses) = (Vec::new(), 0);
    loop {
        let responses = executor.await_responses(Some(id), PATIENCE);
        assert!(!responses.is_empty(), "{id} does not end");
        for response in responses {
            num_responses += 1;
            tokens.extend(response.tokens);
            if let Some(end) = response.end {
                return (tokens, num_responses, end.expect("no error"));
            }
        }
    }
}

#[test]
fn an_executor_takes_requests_from_any_thread_and_keeps_their_responses() {
    let executor = Executor::new(manager(), ExecutorOptions::default()).expect("a thread");
    std::thread::scope(|scope| {
        for n in 0..12 {
            let executor = &executor;
            scope.spawn(move || {
                let is_streaming = n % 2 == 0;
                let id = executor
                    .enqueue(request(n, 20), is_streaming)
                    .expect("it is open");
                let (tokens, num_responses, end) = answer_of(executor, id);
                assert_eq!((tokens, end), (alone(n, 20), FinishReason::Length));
                assert!(is_streaming || num_responses == 1);
                // All have been taken, and its id is unknown.
                assert_eq!(executor.await_responses(Some(id), None), []);
            });
        }
    });
    assert_eq!(executor.num_responses_ready(None), 0);
    let statistics = executor.take_statistics();
    assert!(statistics.len() >= 20 && statistics[0].starts_with(r#"{"Timestamp":""#));
    assert_eq!(executor.take_statistics(), Vec::<String>::new());
}

/// Waits until the test opens the gate.
struct Gate(Arc<Mutex<()>>);

impl ProcessLogits for Gate {
    fn process(&self, _: &mut [f32], _: SamplingInput<'_>) -> Result<(), SampleError> {
        drop(self.0.lock());
        Ok(())
    }
}

#[test]
fn a_cancelled_request_returns_its_partial_answer_and_shutdown_waits_for_the_rest() {
    const NUM_TOKENS: u32 = 12;
    let alone = Executor::new(model(), ExecutorOptions::default()).expect("a thread");
    let expected: Vec<_> = (0..10)
        .map(|n| {
            let id = alone
                .enqueue(request(n, NUM_TOKENS), false)
                .expect("it is open");
            answer_of(&alone, id).0
        })
        .collect();
    alone.shutdown().expect("steps succeed");

    let executor = Executor::new(model(), ExecutorOptions::default()).expect("a thread");
    let gate = Arc::new(Mutex::new(()));
    let closed = gate.lock();
    let sampling = SamplingParams {
        logits_processor: Some(LogitsProcessor(Arc::new(Gate(Arc::clone(&gate))))),
        ..SamplingParams::default()
    };
    let gated = NewRequest {
        sampling: Arc::new(sampling),
        ..request(0, NUM_TOKENS)
    };
    // The first holds its step, and no request gets past its first token meanwhile.
    let mut ids = vec![executor.enqueue(gated, false).expect("it is open")];
    ids.extend((1..10).map(|n| {
        let id = executor.enqueue(request(n, NUM_TOKENS), false);
        id.expect("it is open")
    }));
    executor.cancel(ids[0]);
    executor.cancel(ids[9]);
    executor.cancel(SequenceId(1 << 40));
    drop(closed);
    executor.shutdown().expect("steps succeed");
    assert!(!executor.can_enqueue());
    let refusal = executor
        .enqueue(request(1, 1), false)
        .expect_err("it is shut down");
    assert!(refusal.to_string().contains("shut down"));
    for (n, &id) in ids.iter().enumerate() {
        assert_eq!(executor.num_responses_ready(Some(id)), 1);
        let (tokens, _, end) = answer_of(&executor, id);
        match n {
            // One token at most: those of the step that it was in.
            0 | 9 => {
                assert_eq!(end, FinishReason::Cancelled);
                assert!(tokens.len() <= 1 && expected[n].starts_with(&tokens));
            }
            _ => assert_eq!((&tokens, end), (&expected[n], FinishReason::Length)),
        }
    }
    assert_eq!(executor.await_responses(Some(ids[5]), None), []);
}

#[test]
fn an_executor_limits_its_active_requests() {
    let options = ExecutorOptions {
        max_queue_size: 0,
        max_num_statistics: 2,
    };
    let executor = Executor::new(manager(), options).expect("a thread");
    assert!(!executor.can_enqueue());
    let refusal = executor.enqueue(request(1, 1), false).expect_err("full");
    assert!(
        refusal.to_string().contains("max_queue_size = 0"),
        "{refusal}"
    );
    let options = ExecutorOptions {
        max_queue_size: 1,
        ..options
    };
    let executor = Executor::new(manager(), options).expect("a thread");
    executor
        .enqueue(request(1, 9), false)
        .expect("there is room");
    executor.shutdown().expect("steps succeed");
    assert_eq!(executor.take_statistics().len(), 2);
}

fn int(values: &[i32]) -> HostTensor {
    HostTensor {
        data_type: TensorType::Int32,
        shape: vec![1, values.len() as i64],
        bytes: values
            .iter()
            .flat_map(|value| value.to_ne_bytes())
            .collect(),
    }
}

fn flag(value: bool) -> HostTensor {
    HostTensor {
        data_type: TensorType::Bool,
        shape: vec![1],
        bytes: vec![value.into()],
    }
}

fn number(value: f32) -> HostTensor {
    HostTensor {
        data_type: TensorType::Fp32,
        shape: vec![1, 1],
        bytes: value.to_ne_bytes().to_vec(),
    }
}

fn tensors(prompt: &[i32], num_new_tokens: i32, more: &[(&str, HostTensor)]) -> HostTensors {
    let named = |(name, tensor): &(&str, HostTensor)| ((*name).to_owned(), tensor.clone());
    let mut tensors: HostTensors = more.iter().map(named).collect();
    tensors.insert("input_ids".to_owned(), int(prompt));
    tensors.insert("request_output_len".to_owned(), int(&[num_new_tokens]));
    tensors
}

fn tensor_request(id: u64, is_streaming: bool, tensors: HostTensors) -> TensorRequest {
    TensorRequest {
        id: SequenceId(id),
        client_id: Some(ClientId(7)),
        is_streaming,
        tensors,
    }
}

/// Records the calls of an application with tensors.
#[derive(Default)]
struct TensorDiary {
    requests: Vec<TensorRequest>,
    responses: BTreeMap<u64, Vec<(HostTensors, bool, String)>>,
    rejected: Vec<u64>,
    records: Vec<String>,
}

impl TensorCallbacks for &mut TensorDiary {
    fn get_requests(&mut self, _: usize, _: bool) -> Option<Vec<TensorRequest>> {
        let requests = std::mem::take(&mut self.requests);
        (!requests.is_empty()).then_some(requests)
    }

    fn send_response(
        &mut self,
        id: SequenceId,
        tensors: &HostTensors,
        is_final: bool,
        error: &str,
    ) {
        let response = (tensors.clone(), is_final, error.to_owned());
        self.responses.entry(id.0).or_default().push(response);
    }

    fn reject_duplicate(&mut self, duplicate: TensorRequest) {
        self.rejected.push(duplicate.id.0);
    }

    fn return_stats(&mut self, json: &str) {
        self.records.push(json.to_owned());
    }
}

/// A manager of the fixture `qwen3`.
fn model() -> BatchManager {
    let config = EngineConfig {
        max_beam_width: 3,
        ..config()
    };
    let dir = checkout().join("tests/fixtures/qwen3");
    let source = ModelSource::open(&dir).expect("the fixture opens");
    let options = CpuOptions {
        num_threads: NonZeroUsize::new(2),
        ..CpuOptions::default()
    };
    let limits = RunnerLimits::of(&config);
    let runner = load_on_cpus(&source, limits, &options).expect("it loads");
    BatchManager::new(config, runner).expect("a thread")
}

/// Serves requests with it.
fn served(requests: Vec<TensorRequest>) -> TensorDiary {
    let mut diary = TensorDiary {
        requests,
        ..TensorDiary::default()
    };
    let mut layer = TensorLayer::new(&mut diary, tensor_model());
    serve(&mut model(), None, &mut layer).expect("steps succeed");
    diary
}

fn ints(tensor: &HostTensor) -> Vec<i32> {
    let elements = tensor.bytes.chunks_exact(4);
    elements
        .map(|bytes| i32::from_ne_bytes(bytes.try_into().expect("four bytes")))
        .collect()
}

fn floats(tensor: &HostTensor) -> Vec<f32> {
    ints(tensor)
        .into_iter()
        .map(|bits| f32::from_bits(bits as u32))
        .collect()
}

#[test]
fn a_response_has_the_tensors_and_the_shapes_of_the_batch_manager() {
    let plain = || tensors(&[5, 6, 7], 4, &[("pad_id", int(&[9]))]);
    let all = [
        ("return_log_probs", flag(true)),
        ("return_context_logits", flag(true)),
        ("return_generation_logits", flag(true)),
    ];
    let diary = served(vec![
        tensor_request(1, false, plain()),
        tensor_request(2, true, plain()),
        tensor_request(3, false, tensors(&[5, 6, 7], 4, &all)),
        tensor_request(
            4,
            false,
            tensors(&[5, 6, 7], 4, &[("beam_width", int(&[3]))]),
        ),
    ]);
    let shapes = |id: u64, n: usize| {
        let tensors = &diary.responses[&id][n].0;
        let shapes = tensors
            .iter()
            .map(|(name, tensor)| (name.as_str(), &tensor.shape[..]));
        shapes.collect::<BTreeMap<_, _>>()
    };
    let no_logits: [(&str, &[i64]); 2] = [
        ("context_logits", &[1, 1, 1]),
        ("generation_logits", &[1, 1, 1, 1]),
    ];
    let mut expected = BTreeMap::from(no_logits);
    expected
        .extend::<[(&str, &[i64]); 2]>([("output_ids", &[1, 1, 64]), ("sequence_length", &[1, 1])]);
    assert_eq!(shapes(1, 0), expected);
    let [(whole, true, error)] = &diary.responses[&1][..] else {
        panic!("one response, the final one");
    };
    assert_eq!(
        (ints(&whole["sequence_length"]), error.as_str()),
        (vec![7], "")
    );
    let ids = ints(&whole["output_ids"]);
    assert!(
        ids[..3] == [5, 6, 7] && ids[7..].iter().all(|id| *id == 9),
        "{ids:?}"
    );

    // The same, a token at a time.
    let stream = &diary.responses[&2];
    assert_eq!(stream.len(), 4);
    expected.insert("output_ids", &[1, 1, 1]);
    for (n, (tensors, is_final, _)) in stream.iter().enumerate() {
        assert_eq!(shapes(2, n), expected);
        assert_eq!(ints(&tensors["output_ids"]), [ids[3 + n]]);
        assert_eq!(ints(&tensors["sequence_length"]), [4 + n as i32]);
        assert_eq!(*is_final, n == 3);
    }

    let expected: [(&str, &[i64]); 6] = [
        ("output_ids", &[1, 1, 64]),
        ("sequence_length", &[1, 1]),
        ("context_logits", &[1, 3, 160]),
        ("generation_logits", &[1, 1, 4, 160]),
        ("output_log_probs", &[1, 1, 4]),
        ("cum_log_probs", &[1, 1]),
    ];
    assert_eq!(shapes(3, 0), BTreeMap::from(expected));
    let all = &diary.responses[&3][0].0;
    assert_eq!(ints(&all["output_ids"])[..7], ids[..7]);
    let log_probs = floats(&all["output_log_probs"]);
    assert_eq!(
        floats(&all["cum_log_probs"]),
        [log_probs.iter().sum::<f32>()]
    );
    let logits = floats(&all["generation_logits"]);
    for (logits, id) in logits.chunks(160).zip(&ids[3..7]) {
        // Greedy: the chosen token has the largest logit.
        assert!(logits.iter().all(|logit| *logit <= logits[*id as usize]));
    }

    let beams = shapes(4, 0);
    assert_eq!(beams["output_ids"], [1, 3, 64]);
    assert_eq!(
        (beams["sequence_length"], beams["cum_log_probs"]),
        (&[1, 3][..], &[1, 3][..])
    );
    assert_eq!(beams["output_log_probs"], [1, 3, 4]);
    let sums = floats(&diary.responses[&4][0].0["cum_log_probs"]);
    assert!(sums.is_sorted_by(|a, b| a >= b), "the best first: {sums:?}");
    assert!(
        diary
            .records
            .iter()
            .all(|json| json.starts_with(r#"{"Timestamp":""#))
    );
}

/// A word of token ids as `stop_words_list` and `bad_words_list` have it.
fn id_word(ids: &[i32]) -> HostTensor {
    let mut ends = vec![-1; ids.len()];
    ends[0] = ids.len() as i32;
    HostTensor {
        shape: vec![1, 2, ids.len() as i64],
        ..int(&[ids, &ends].concat())
    }
}

/// The generated tokens of a whole response to the prompt 5 6 7.
fn generated(diary: &TensorDiary, id: u64) -> Vec<i32> {
    let [(tensors, true, error)] = &diary.responses[&id][..] else {
        panic!("one response, the final one");
    };
    assert_eq!(error, "");
    let length = ints(&tensors["sequence_length"])[0] as usize;
    ints(&tensors["output_ids"])[3..length].to_vec()
}

#[test]
fn an_output_ends_with_a_stop_word_and_never_has_a_bad_word() {
    let request =
        |id, more: &[(&str, HostTensor)]| tensor_request(id, false, tensors(&[5, 6, 7], 12, more));
    let free = generated(&served(vec![request(0, &[])]), 0);
    assert_eq!(free.len(), 12);
    let word = &free[4..6];
    let end = free.windows(2).position(|pair| pair == word);
    let end = end.expect("it is there") + 2;
    let beams = ("beam_width", int(&[2]));
    let diary = served(vec![
        request(1, &[("stop_words_list", id_word(word))]),
        request(2, &[("bad_words_list", id_word(word))]),
        request(3, &[("bad_words_list", id_word(&free[..1]))]),
        request(4, &[("bad_words_list", id_word(&free[..1])), beams]),
    ]);
    assert_eq!(generated(&diary, 1), free[..end]);
    let without = generated(&diary, 2);
    assert_eq!(without[..end - 1], free[..end - 1]);
    assert!(without.windows(2).all(|pair| pair != word), "{without:?}");
    for id in [3, 4] {
        let without = generated(&diary, id);
        assert!(!without.contains(&free[0]), "{without:?}");
    }
}

#[test]
fn a_stream_of_beams_has_the_current_ones_in_every_response() {
    let beams = [
        ("beam_width", int(&[3])),
        ("num_return_sequences", int(&[2])),
    ];
    let request =
        |id, is_streaming| tensor_request(id, is_streaming, tensors(&[5, 6, 7], 4, &beams));
    let diary = served(vec![request(1, true), request(2, false)]);
    let stream = &diary.responses[&1];
    let shapes: Vec<_> = stream
        .iter()
        .map(|(tensors, ..)| &tensors["output_ids"].shape[..])
        .collect();
    assert_eq!(shapes, [[1, 2, 1], [1, 2, 2], [1, 2, 3], [1, 2, 4]]);
    let last = &stream[3].0;
    let whole = &diary.responses[&2][0].0;
    assert_eq!(whole["output_ids"].shape, [1, 2, 64]);
    let rows = ints(&whole["output_ids"]);
    let rows: Vec<_> = rows
        .chunks(64)
        .flat_map(|row| &row[3..7])
        .copied()
        .collect();
    assert_eq!(ints(&last["output_ids"]), rows);
    assert_eq!(last["cum_log_probs"], whole["cum_log_probs"]);
}

#[test]
fn the_figures_of_a_request_come_with_its_final_response() {
    let figures = [("return_perf_metrics", flag(true))];
    let diary = served(vec![tensor_request(
        1,
        true,
        tensors(&[5, 6, 7], 4, &figures),
    )]);
    let (last, others) = diary.responses[&1].split_last().expect("responses");
    assert!(
        others
            .iter()
            .all(|(it, ..)| !it.contains_key("acceptance_rate"))
    );
    // Seven tokens, all but the last in the cache, are two blocks of four.
    for (name, count) in [
        ("kv_cache_alloc_new_blocks", 2),
        ("kv_cache_reused_blocks", 0),
        ("kv_cache_alloc_total_blocks", 2),
        ("total_draft_tokens", 0),
        ("total_accepted_draft_tokens", 0),
    ] {
        assert_eq!((name, ints(&last.0[name])), (name, vec![count]));
        assert_eq!(last.0[name].shape, [1]);
    }
    assert_eq!(floats(&last.0["acceptance_rate"]), [0.0]);
}

/// The model of [`model`].
fn tensor_model() -> TensorModel {
    TensorModel {
        vocab_size: 160,
        max_seq_len: Tokens(64),
        end_ids: vec![],
    }
}

#[test]
fn an_executor_with_tensors_has_the_responses_of_the_callbacks() {
    let request = |id| {
        let more = [("return_log_probs", flag(true))];
        tensor_request(id, id % 2 == 0, tensors(&[5, 6, 7 + id as i32], 6, &more))
    };
    let diary = served((0..6).map(request).collect());
    let executor = TensorExecutor::new(model(), tensor_model(), ExecutorOptions::default());
    let executor = executor.expect("a thread");
    std::thread::scope(|scope| {
        let ids = (0..6).map(|id| executor.enqueue(&request(id)).expect("good tensors"));
        let ids: Vec<_> = ids.collect();
        for (n, id) in (0..).zip(ids) {
            let (executor, expected) = (&executor, &diary.responses[&n]);
            // Two threads share the responses of one request: each is returned once, and counts the tokens before it.
            let [mut one, other] = [(); 2]
                .map(|()| {
                    scope.spawn(move || {
                        let mut all = Vec::new();
                        loop {
                            let responses = executor.await_responses(Some(id), PATIENCE);
                            if responses.is_empty() {
                                return all;
                            }
                            all.extend(responses);
                        }
                    })
                })
                .map(|thread| thread.join().expect("no panic"));
            one.extend(other);
            let length = |it: &HostTensors| ints(&it["sequence_length"])[0];
            one.sort_by_key(|response| length(&response.tensors));
            let responses: Vec<_> = one
                .into_iter()
                .map(|it| (it.tensors, it.is_final, it.error))
                .collect();
            assert_eq!(&responses, expected);
        }
    });
    // A request that the engine refuses has the error as its response; a bad tensor is refused at once.
    let long = tensor_request(0, false, tensors(&[1; 64], 1, &[]));
    let id = executor.enqueue(&long).expect("good tensors");
    let responses = executor.await_responses(None, PATIENCE);
    let [refused] = &responses[..] else {
        panic!("one response");
    };
    assert!(refused.id == id && refused.is_final && refused.tensors.is_empty());
    assert!(
        refused.error.contains("more than max_seq_len = 64"),
        "{}",
        refused.error
    );
    let unknown = tensor_request(0, false, tensors(&[1], 1, &[("lora_task_id", int(&[1]))]));
    let error = executor
        .enqueue(&unknown)
        .expect_err("an adapter")
        .to_string();
    assert!(error.contains("'lora_task_id' is not supported"), "{error}");
    // A cancelled request ends too, with the prompt if nothing else.
    let id = executor.enqueue(&request(2)).expect("good tensors");
    executor.cancel(id);
    executor.shutdown().expect("steps succeed");
    let responses = executor.await_responses(Some(id), PATIENCE);
    assert!(
        responses
            .last()
            .is_some_and(|it| it.is_final && it.error.is_empty())
    );
    assert!(!executor.can_enqueue() && executor.num_responses_ready(None) == 0);
    assert!(executor.take_statistics().len() >= 6);
}

#[test]
fn a_bad_tensor_is_an_error_of_its_own_request() {
    let cases = [
        (
            tensors(&[160], 1, &[]),
            "tensor 'input_ids' has 160, which is not a token id: those are 0 to 159",
        ),
        (tensors(&[-1], 1, &[]), "'input_ids' has -1"),
        (tensors(&[], 1, &[]), "the prompt is empty"),
        (
            tensors(&[1; 65], 1, &[]),
            "'input_ids' is longer than max_seq_len = 64",
        ),
        (tensors(&[1; 64], 1, &[]), "more than max_seq_len = 64"),
        (
            tensors(&[1], 0, &[]),
            "'request_output_len' is 0, and must be at least 1",
        ),
        (
            tensors(&[1], 1, &[("temprature", number(1.0))]),
            "unknown tensor 'temprature'; did you mean 'temperature'?",
        ),
        (
            tensors(&[1], 1, &[("temperature", int(&[1]))]),
            "'temperature' is INT32, and must be FP32",
        ),
        (
            tensors(&[1], 1, &[("temperature", number(f32::NAN))]),
            "'temperature' is NaN",
        ),
        (
            tensors(&[1], 1, &[("end_id", int(&[1, 2]))]),
            "'end_id' has 2 elements, and must have 1",
        ),
        (
            tensors(&[1], 1, &[("beam_width", int(&[4]))]),
            "max_beam_width is 3",
        ),
        (
            tensors(&[1], 1, &[("embedding_bias", number(1.0))]),
            "'embedding_bias' has 1 elements, and must have one for each of 160 tokens",
        ),
        (
            tensors(
                &[1],
                1,
                &[(
                    "pad_id",
                    HostTensor {
                        shape: vec![i64::MAX, 2],
                        ..int(&[1])
                    },
                )],
            ),
            "'pad_id' has 4 bytes, which does not match INT32 [9223372036854775807, 2]",
        ),
    ];
    let ids = || 0..cases.len() as u64;
    let requests = ids()
        .zip(&cases)
        .map(|(id, (tensors, _))| tensor_request(id, true, tensors.clone()));
    let good = tensor_request(99, false, tensors(&[1], 2, &[]));
    let duplicate = tensor_request(99, false, tensors(&[200], 2, &[]));
    let diary = served(requests.chain([good, duplicate]).collect());
    for (id, (_, words)) in ids().zip(&cases) {
        let [(tensors, true, error)] = &diary.responses[&id][..] else {
            panic!("one response, the final one: {words}");
        };
        assert!(tensors.is_empty() && error.contains(words), "{error}");
    }
    // A duplicate is none of the one in flight, whatever is wrong with it.
    assert_eq!(diary.rejected, [99]);
    let [(tensors, true, error)] = &diary.responses[&99][..] else {
        panic!("one response, the final one");
    };
    assert!(error.is_empty() && ints(&tensors["sequence_length"]) == [3]);
}

#[test]
fn bad_options_are_rejected_with_the_reason() {
    let fixture = checkout().join("tests/fixtures/qwen3");
    let fixture = fixture.display();
    for (options, words) in [
        ("{}".to_owned(), "missing field `gpt_model_path`"),
        (
            r#"{"gpt_model_path": "a", "max_batch_size": 4}"#.to_owned(),
            "unknown field `max_batch_size`",
        ),
        (
            format!(r#"{{"gpt_model_path": "{fixture}", "gpt_model_type": "V2"}}"#),
            "gpt_model_type is 'V2'",
        ),
        (
            format!(r#"{{"gpt_model_path": "{fixture}", "max_seq_len": 100000000}}"#),
            "max_seq_len is 100000000",
        ),
        (
            format!(r#"{{"gpt_model_path": "{fixture}", "max_num_tokens": 1}}"#),
            "max_num_tokens is 1",
        ),
        (
            format!(r#"{{"gpt_model_path": "{fixture}", "num_threads": 1025}}"#),
            "num_threads is 1025; set it to at most 1024",
        ),
        (
            format!(r#"{{"gpt_model_path": "{fixture}", "max_num_active": 0}}"#),
            "max_num_active is 0; set it to at least max_num_requests, which is 8",
        ),
        (
            format!(r#"{{"gpt_model_path": "{fixture}", "speculation": "draft"}}"#),
            "speculation is 'draft'",
        ),
        (
            format!(r#"{{"gpt_model_path": "{fixture}", "speculation": "draft_model"}}"#),
            "draft_model_path is not set; set it to the folder of a smaller model",
        ),
        (
            format!(r#"{{"gpt_model_path": "{fixture}", "draft_model_path": "{fixture}"}}"#),
            "draft_model_path is set, and speculation is not draft_model",
        ),
        (
            format!(
                r#"{{"gpt_model_path": "{fixture}", "speculation": "draft_model", "draft_model_path": "{fixture}",
                     "tensor_parallel_size": 2}}"#
            ),
            "a draft model is computed by one process",
        ),
        (
            format!(
                r#"{{"gpt_model_path": "{fixture}", "speculation": "prompt_lookup", "max_draft_tokens": 4294967295}}"#
            ),
            "max_draft_tokens is 4294967295",
        ),
        (
            format!(r#"{{"gpt_model_path": "{fixture}", "tokens_per_block": 0}}"#),
            "tokens_per_block is 0",
        ),
    ] {
        let made = ManagerOptions::parse(&options).and_then(|options| options.load());
        let error = made.err().expect(words).to_string();
        assert!(error.contains(words), "{error}");
    }
}
