//! The batch manager as a library: its callbacks, its two ways to compute a step, and the statistics that it
//! returns.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::num::NonZeroUsize;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::SystemTime;

use inflight_base::{BlockSize, Blocks, ClientId, RequestError, SequenceId, TokenId, Tokens};
use inflight_device_cpu::CpuOptions;
use inflight_engine::{
    BatchingScheme, BlockReuse, CapacityPolicy, EngineConfig, Event, ExtraOutputs, NewRequest,
    OutputOptions, Speculation, Stage, StepStats,
};
use inflight_machines::load_on_cpus;
use inflight_manager::{
    BatchManager, Callbacks, LandedStep, ManagerOptions, Response, Submission, measure_costs,
    measure_step_cost, serve, statistics_json,
};
use inflight_runner::{
    KvFile, ModelSource, RunnerLimits, SyntheticOptions, SyntheticRunner, next_token,
};
use inflight_sampling::{
    FinishReason, LogitsProcessor, Owner, ProcessLogits, SampleError, SamplingInput,
    SamplingParams, forbid_all_but,
};
use inflight_tests::checkout;
use regex::Regex;

const VOCAB_SIZE: u32 = 1000;

fn config() -> EngineConfig {
    let block_size = BlockSize::new(4).expect("not zero");
    EngineConfig {
        max_num_requests: 4,
        max_seq_len: Tokens(64),
        max_num_tokens: Tokens(24),
        block_size,
        chunk_unit: block_size,
        num_blocks: Blocks(40),
        record_requests: true,
        ..EngineConfig::default()
    }
}

fn manager(config: EngineConfig) -> BatchManager {
    let options = SyntheticOptions {
        vocab_size: VOCAB_SIZE,
        step_base_us: 0.0,
        step_per_token_us: 0.0,
    };
    let runner = SyntheticRunner::new(options, &RunnerLimits::of(&config)).expect("memory");
    BatchManager::new(config, Box::new(runner)).expect("a thread")
}

fn prompt(id: u64) -> Vec<TokenId> {
    (0..3 + id % 17).map(|n| (n % 5) as TokenId).collect()
}

fn max_new_tokens(id: u64) -> u32 {
    1 + (id as u32 * 7) % 20
}

/// The tokens that request `id` gets alone.
fn alone(id: u64) -> Vec<TokenId> {
    let mut tokens = prompt(id);
    let num_prompt_tokens = tokens.len();
    for _ in 0..max_new_tokens(id) {
        tokens.push(next_token(&tokens, VOCAB_SIZE));
    }
    tokens.split_off(num_prompt_tokens)
}

/// An application that records its calls.
#[derive(Default)]
struct Diary {
    /// The results of `get_requests`, call by call.
    arrivals: Vec<Vec<NewRequest>>,
    rooms: Vec<usize>,
    streams: BTreeMap<u64, Vec<TokenId>>,
    extra_outputs: BTreeMap<u64, Vec<ExtraOutputs>>,
    ends: BTreeMap<u64, Result<FinishReason, RequestError>>,
    /// Number of responses after which a request is stopped.
    stop_after: BTreeMap<u64, usize>,
    num_responses: BTreeMap<u64, usize>,
    stats: Vec<StepStats>,
    /// Whether its requests disable streaming.
    wants_whole: bool,
}

impl Callbacks for Diary {
    fn get_requests(&mut self, max_num_requests: usize, is_idle: bool) -> Option<Vec<Submission>> {
        assert_eq!(is_idle, self.streams.len() == self.ends.len());
        self.rooms.push(max_num_requests);
        let requests = self.arrivals.pop()?;
        for request in &requests {
            self.streams.entry(request.id.0).or_default();
        }
        let is_streaming = !self.wants_whole;
        let submissions = requests.into_iter().map(|request| Submission {
            request,
            is_streaming,
        });
        Some(submissions.collect())
    }

    fn send_response(&mut self, response: Response<'_>) {
        let id = response.id.0;
        assert!(!self.ends.contains_key(&id), "{id} has ended");
        self.streams.entry(id).or_default().extend(response.tokens);
        let extra_outputs = self.extra_outputs.entry(id).or_default();
        extra_outputs.extend_from_slice(response.extra_outputs);
        *self.num_responses.entry(id).or_default() += 1;
        if let Some(end) = response.end {
            self.ends.insert(id, end);
        }
    }

    fn reject_duplicate(&mut self, duplicate: Submission) {
        panic!("{} was added only once", duplicate.request.id);
    }

    fn poll_stop_signals(&mut self) -> Vec<SequenceId> {
        let due = self
            .stop_after
            .iter()
            .filter(|&(id, after)| self.num_responses.get(id).is_some_and(|num| num >= after));
        due.map(|(&id, _)| SequenceId(id)).collect()
    }

    fn return_stats(&mut self, stats: &StepStats) {
        assert!(stats.num_active > 0, "idle steps have no record");
        self.stats.push(stats.clone());
    }
}

fn request(id: u64) -> NewRequest {
    NewRequest::new(SequenceId(id), prompt(id), Tokens(max_new_tokens(id)))
}

#[test]
fn an_application_is_served_through_its_callbacks_in_every_scheme() {
    let schemes = [
        (BatchingScheme::InflightFused, 1),
        (BatchingScheme::InflightFused, 2),
        (BatchingScheme::Inflight, 1),
        (BatchingScheme::Inflight, 2),
        (BatchingScheme::V1, 1),
    ];
    for (scheme, num_micro_batches) in schemes {
        let config = EngineConfig {
            scheme,
            num_micro_batches,
            ..config()
        };
        let mut diary = Diary {
            arrivals: (0..8)
                .map(|n| (0..5).map(|i| request(n * 5 + i)).collect())
                .collect(),
            ..Diary::default()
        };
        let mut manager = manager(config);
        serve(&mut manager, None, &mut diary).expect("steps succeed");
        assert_eq!(diary.ends.len(), 40, "{scheme:?}");
        for (id, stream) in &diary.streams {
            assert_eq!(stream, &alone(*id), "{id}, {scheme:?}");
            assert_eq!(diary.ends[id], Ok(FinishReason::Length));
        }
        let is_lockstep = scheme == BatchingScheme::V1;
        let num_responses: usize = diary.num_responses.values().sum();
        assert!(is_lockstep || num_responses > 100, "answers stream");
        let micro_batches: BTreeSet<_> = diary.stats.iter().map(|s| s.micro_batch).collect();
        assert_eq!(micro_batches.len(), num_micro_batches);
        assert_eq!(manager.kv_usage().num_used, Blocks(0));
    }
}

#[test]
fn a_limited_manager_requests_only_as_many_as_it_has_room_for() {
    let mut diary = Diary {
        arrivals: vec![vec![], vec![], (1..4).map(request).collect()],
        ..Diary::default()
    };
    serve(&mut manager(config()), Some(3), &mut diary).expect("steps succeed");
    assert_eq!(diary.rooms[..2], [3, 0]);
    assert_eq!(diary.ends.len(), 3);
}

/// Adds a request with an id that is in flight, and again after its final response.
#[derive(Default)]
struct Twice {
    num_calls: u32,
    /// The responses, in order.
    responses: Vec<(Vec<TokenId>, bool)>,
    rejected: Vec<NewRequest>,
}

impl Callbacks for Twice {
    fn get_requests(&mut self, _: usize, is_idle: bool) -> Option<Vec<Submission>> {
        self.num_calls += 1;
        let duplicate = NewRequest {
            prompt: vec![9].into(),
            ..request(13)
        };
        let streaming = |request| Submission {
            request,
            is_streaming: true,
        };
        let num_ends = self
            .responses
            .iter()
            .filter(|(_, is_final)| *is_final)
            .count();
        match self.num_calls {
            1 => Some(vec![streaming(request(13)), streaming(duplicate)]),
            3 => Some(vec![streaming(duplicate)]),
            _ if !is_idle => Some(vec![]),
            _ if num_ends < 2 => Some(vec![streaming(request(13))]),
            _ => None,
        }
    }

    fn send_response(&mut self, response: Response<'_>) {
        assert_eq!(response.id, SequenceId(13));
        assert_eq!(
            response.end.clone().unwrap_or(Ok(FinishReason::Length)),
            Ok(FinishReason::Length)
        );
        self.responses
            .push((response.tokens.to_vec(), response.is_final()));
    }

    fn reject_duplicate(&mut self, duplicate: Submission) {
        self.rejected.push(duplicate.request);
    }
}

#[test]
fn a_duplicate_is_returned_and_gets_no_response_of_the_request_in_flight() {
    let mut twice = Twice::default();
    serve(&mut manager(config()), None, &mut twice).expect("steps succeed");
    assert_eq!(
        twice.rejected.len(),
        2,
        "of the first, and later of the one that streams"
    );
    assert!(twice.rejected.iter().all(|request| *request.prompt == [9]));
    // The request in flight gets its tokens, and one final response at the end; so does the next request with
    // its id.
    let ends: Vec<_> = (0..twice.responses.len())
        .filter(|&n| twice.responses[n].1)
        .collect();
    let num_tokens = max_new_tokens(13) as usize;
    assert_eq!(ends, [num_tokens - 1, 2 * num_tokens - 1]);
    let tokens: Vec<_> = twice
        .responses
        .into_iter()
        .flat_map(|(tokens, _)| tokens)
        .collect();
    assert_eq!(tokens, [alone(13), alone(13)].concat());
}

/// An application with the two callbacks that every one has.
#[derive(Default)]
struct TwoCallbacks {
    num_calls: usize,
    ends: Vec<Result<FinishReason, RequestError>>,
    tokens: Vec<TokenId>,
}

impl Callbacks for TwoCallbacks {
    fn get_requests(&mut self, _: usize, _: bool) -> Option<Vec<Submission>> {
        self.num_calls += 1;
        (self.num_calls <= 2).then(|| vec![request(13).into()])
    }

    fn send_response(&mut self, response: Response<'_>) {
        assert_eq!(response.id, SequenceId(13));
        self.tokens.extend(response.tokens);
        self.ends.extend(response.end);
    }
}

#[test]
fn without_a_callback_for_it_a_duplicate_gets_an_error_as_its_response() {
    let mut two = TwoCallbacks::default();
    serve(&mut manager(config()), None, &mut two).expect("steps succeed");
    let refused = Err(RequestError::InFlight("13".to_owned()));
    assert_eq!(two.ends, [refused, Ok(FinishReason::Length)]);
    assert_eq!(two.tokens, alone(13));
}

#[test]
fn a_request_that_does_not_stream_has_one_whole_response() {
    for num_micro_batches in [1, 2] {
        let mut diary = Diary {
            arrivals: vec![(0..12).map(request).collect()],
            stop_after: BTreeMap::from([(77, 0)]),
            wants_whole: true,
            ..Diary::default()
        };
        let config = EngineConfig {
            num_micro_batches,
            ..config()
        };
        serve(&mut manager(config), None, &mut diary).expect("steps succeed");
        for (id, stream) in &diary.streams {
            assert_eq!((stream, diary.num_responses[id]), (&alone(*id), 1), "{id}");
            assert_eq!(diary.ends[id], Ok(FinishReason::Length));
        }
    }
}

#[test]
fn a_request_that_can_never_run_is_rejected_alone() {
    let too_long = NewRequest::new(SequenceId(8), vec![1; 64], Tokens(1));
    let mut diary = Diary {
        arrivals: vec![vec![too_long, request(9)]],
        ..Diary::default()
    };
    serve(&mut manager(config()), None, &mut diary).expect("steps succeed");
    let refusal = diary.ends[&8].as_ref().expect_err("too long").to_string();
    assert!(refusal.contains("max_seq_len"), "{refusal}");
    assert_eq!(diary.ends[&9], Ok(FinishReason::Length));
}

#[test]
fn a_token_outside_the_vocabulary_is_rejected_before_a_step() {
    let mut manager = manager(config());
    for (id, is_known) in [
        (VOCAB_SIZE - 1, true),
        (VOCAB_SIZE, false),
        (TokenId::MAX, false),
    ] {
        let mut in_prompt = request(1);
        in_prompt.prompt = [1, id, 2].into();
        let mut in_draft = request(2);
        in_draft.drafts.expected = [id].into();
        for request in [in_prompt, in_draft] {
            let (id, added) = (request.id, manager.add(request));
            assert_eq!(added.is_ok(), is_known, "{added:?}");
            manager.cancel(id);
        }
    }
}

#[test]
fn a_stop_signal_ends_only_its_request_and_within_a_step() {
    for num_micro_batches in [1, 2] {
        let config = EngineConfig {
            num_micro_batches,
            ..config()
        };
        let long = NewRequest::new(SequenceId(1), prompt(1), Tokens(50));
        let mut diary = Diary {
            arrivals: vec![vec![long, request(2)]],
            stop_after: BTreeMap::from([(1, 3), (77, 0)]),
            ..Diary::default()
        };
        let mut manager = manager(config);
        serve(&mut manager, None, &mut diary).expect("steps succeed");
        assert_eq!(diary.ends[&1], Ok(FinishReason::Cancelled));
        assert_eq!(diary.streams[&1].len(), 3);
        assert_eq!(diary.ends[&2], Ok(FinishReason::Length));
        assert_eq!(manager.kv_usage().num_used, Blocks(0));
    }
}

/// Every field of a record, recomputed from the stages of the requests in the step.
#[test]
fn a_record_sums_up_the_requests_of_its_step() {
    for scheme in [BatchingScheme::InflightFused, BatchingScheme::Inflight] {
        let config = EngineConfig {
            scheme,
            num_blocks: Blocks(20),
            policy: CapacityPolicy::MaxUtilization,
            reuse: BlockReuse::Off,
            ..config()
        };
        let mut manager = manager(config);
        for id in 0..30 {
            manager.add(request(id)).expect("fits");
        }
        let (mut events, mut num_records, mut num_paused, mut num_ended) = (vec![], 0, 0, 0);
        while !manager.is_idle() {
            manager.launch().expect("steps succeed");
            let landed = manager.land(&mut events).expect("steps succeed");
            let landed = landed.expect("one micro-batch lands at once");
            let stats = landed.stats.clone();
            let count = |stage: Stage, computes: bool| {
                let stages = landed.stages.iter();
                stages
                    .filter(|it| it.stage == stage && (it.tokens > 0) == computes)
                    .count()
            };
            num_records += 1;
            assert_eq!(stats.iteration_counter, num_records);
            assert_eq!(stats.num_active, landed.stages.len());
            assert_eq!(stats.num_context, count(Stage::Context, true));
            assert_eq!(stats.num_generation, count(Stage::Generation, true));
            assert_eq!(
                stats.num_scheduled,
                stats.num_context + stats.num_generation
            );
            let contexts = landed.stages.iter().filter(|it| it.stage == Stage::Context);
            let num_context_tokens = contexts.map(|it| it.tokens).sum();
            assert_eq!(stats.num_context_tokens, Tokens(num_context_tokens));
            assert_eq!(stats.num_paused, count(Stage::Paused, false));
            assert_eq!(stats.num_waiting, stats.num_active - stats.num_scheduled);
            assert_eq!(landed.records().collect::<Vec<_>>(), [&stats]);
            assert_eq!(stats.ended.num_requests, num_ended);
            assert!(stats.kv.num_used <= stats.kv.num_blocks);
            num_paused += stats.num_paused;
            let finished = |event: &inflight_engine::Event| {
                matches!(event, inflight_engine::Event::Finished(..))
            };
            num_ended += events.drain(..).filter(finished).count() as u64;
        }
        assert_eq!(num_ended, 30);
        assert!(num_paused > 0);
    }
}

/// Four at a time, in lockstep, with a token budget smaller than any of their batches.
fn lockstep() -> EngineConfig {
    EngineConfig {
        scheme: BatchingScheme::V1,
        max_num_tokens: Tokens(8),
        reuse: BlockReuse::Off,
        ..config()
    }
}

/// Requests with these prompt and output lengths.
fn of_lengths(lengths: &[(usize, u32)]) -> Vec<NewRequest> {
    let prompt = |id: u64, num: usize| (0..num as TokenId).map(|n| n + id as TokenId).collect();
    let requests = (1..).zip(lengths);
    requests
        .map(|(id, &(num_prompt, num_output))| {
            NewRequest::new(SequenceId(id), prompt(id, num_prompt), Tokens(num_output))
        })
        .collect()
}

/// Runs until idle; returns the records and each request's tokens.
fn run(manager: &mut BatchManager) -> (Vec<StepStats>, BTreeMap<SequenceId, Vec<TokenId>>) {
    let (mut events, mut records, mut streams) = (vec![], vec![], BTreeMap::new());
    while !manager.is_idle() {
        manager.launch().expect("steps succeed");
        let landed = manager.land(&mut events).expect("steps succeed");
        records.extend(landed.iter().flat_map(LandedStep::records).cloned());
        for event in events.drain(..) {
            if let Event::Token(id, token) = event {
                streams.entry(id).or_insert_with(Vec::new).push(token);
            }
        }
    }
    (records, streams)
}

#[test]
fn in_lockstep_a_record_is_a_batch_and_the_token_budget_does_not_limit_it() {
    let lengths = [(5, 2), (9, 5), (3, 1), (12, 4), (6, 3), (2, 3)];
    let mut manager = manager(lockstep());
    for request in of_lengths(&lengths) {
        manager.add(request).expect("fits");
    }
    let (records, streams) = run(&mut manager);
    let figures = |stats: &StepStats| {
        let batch = stats.lockstep.expect("a batch");
        (
            (stats.iteration_counter, stats.num_active, stats.num_waiting),
            (batch.num_requests, batch.num_context_tokens),
            (batch.num_generated_tokens, batch.num_empty_slots),
        )
    };
    let figures: Vec<_> = records.iter().map(figures).collect();
    // The longest output of the first batch has 5 tokens, and each request has as many slots.
    let first = ((1, 6, 2), (4, 5 + 9 + 3 + 12), (12, 4 * 5 - 12));
    let second = ((2, 2, 0), (2, 8), (6, 0));
    assert_eq!(figures, [first, second]);

    for (request, (_, num_output)) in of_lengths(&lengths).into_iter().zip(lengths) {
        let mut alone = self::manager(config());
        let id = request.id;
        alone.add(request).expect("fits");
        assert_eq!(streams[&id], run(&mut alone).1[&id]);
        assert_eq!(streams[&id].len(), num_output as usize);
    }
}

#[test]
fn a_lockstep_batch_that_is_ended_from_outside_also_has_a_record() {
    let mut manager = manager(lockstep());
    let mut events = Vec::new();
    let mut step = |manager: &mut BatchManager| {
        manager.launch().expect("steps succeed");
        let landed = manager.land(&mut events).expect("steps succeed");
        let records: Vec<_> = landed
            .iter()
            .flat_map(LandedStep::records)
            .cloned()
            .collect();
        records
    };
    for request in of_lengths(&[(4, 9), (4, 9)]) {
        manager.add(request).expect("fits");
    }
    assert_eq!(step(&mut manager), []);
    assert!(manager.cancel(SequenceId(1)));
    assert_eq!(step(&mut manager), []);
    // A stop word, which is not visible to the engine.
    manager.finish(SequenceId(2), Tokens(2), FinishReason::StopWords);
    let [record] = &step(&mut manager)[..] else {
        panic!("one record");
    };
    let batch = record.lockstep.expect("a batch");
    assert_eq!((batch.num_requests, batch.num_context_tokens), (2, 8));
    assert_eq!((batch.num_generated_tokens, batch.num_empty_slots), (3, 0));

    manager.add(request(3)).expect("fits");
    assert_eq!(step(&mut manager), []);
    assert!(manager.cancel(SequenceId(3)));
    assert!(manager.is_idle());
    assert_eq!(step(&mut manager).len(), 1);
    assert_eq!(step(&mut manager), []);
}

#[test]
fn the_manager_holds_up_to_max_num_active_requests() {
    let mut manager = manager(EngineConfig {
        max_num_active: 5,
        ..config()
    });
    for id in 0..5 {
        manager.add(request(id)).expect("there is room");
    }
    let refusal = manager.add(request(5)).expect_err("one too many");
    assert!(matches!(refusal, RequestError::Busy(_)), "{refusal:?}");
    assert!(refusal.to_string().contains("max_num_active = 5"));
    let (records, _) = run(&mut manager);
    assert_eq!((records[0].num_active, records[0].max_num_active), (5, 5));
    manager.add(request(5)).expect("there is room again");
}

#[test]
fn a_returned_record_starts_with_the_timestamp() {
    let mut manager = manager(config());
    manager.add(request(1)).expect("fits");
    let (records, _) = run(&mut manager);
    let json = statistics_json(&records[0], SystemTime::now());
    let format =
        Regex::new(r#"^\{"Timestamp":"\d\d-\d\d-\d{4} \d\d:\d\d:\d\d","Iteration Counter":1,"#);
    assert!(format.expect("a pattern").is_match(&json), "{json}");
}

#[test]
fn a_logits_processor_is_rejected_without_logits() {
    struct Nothing;
    impl ProcessLogits for Nothing {
        fn process(&self, _: &mut [f32], _: SamplingInput<'_>) -> Result<(), SampleError> {
            Ok(())
        }
    }
    let sampling = SamplingParams {
        logits_processor: Some(LogitsProcessor(Arc::new(Nothing))),
        ..SamplingParams::default()
    };
    let request = NewRequest {
        sampling: Arc::new(sampling),
        ..request(1)
    };
    let refusal = manager(config()).add(request).expect_err("no logits");
    assert!(refusal.to_string().contains("logits processor"));
}

#[test]
fn outputs_that_need_logits_are_rejected_without_logits() {
    let request = NewRequest {
        outputs: OutputOptions {
            log_probs: Some(0),
            ..OutputOptions::default()
        },
        ..request(1)
    };
    let refusal = manager(config()).add(request).expect_err("no logits");
    assert!(refusal.to_string().contains("need a model"), "{refusal}");
}

/// A batch manager with the fixture `qwen3`.
fn model(config: EngineConfig) -> BatchManager {
    let dir = checkout().join("tests/fixtures/qwen3");
    let source = ModelSource::open(&dir).expect("the fixture opens");
    let options = CpuOptions {
        num_threads: NonZeroUsize::new(2),
        ..CpuOptions::default()
    };
    let runner = load_on_cpus(&source, RunnerLimits::of(&config), &options).expect("it loads");
    BatchManager::new(config, runner).expect("a thread")
}

#[test]
fn extra_outputs_come_with_their_tokens_and_are_the_same_in_every_scheme() {
    let served = |scheme, num_micro_batches| {
        let config = EngineConfig {
            scheme,
            num_micro_batches,
            num_blocks: Blocks(64),
            ..config()
        };
        let ask = |id: u64| NewRequest {
            outputs: OutputOptions {
                log_probs: (!id.is_multiple_of(3)).then_some(id as u32),
                context_logits: id % 3 == 2,
                prompt_log_probs: (id % 4 == 1).then_some(2),
                generation_logits: id % 3 == 2,
                kv_blocks: id.is_multiple_of(2),
                pooled: false,
                drafts: false,
                beams: None,
            },
            ..request(id)
        };
        let mut diary = Diary {
            arrivals: vec![(0..4).map(ask).collect(), (4..12).map(ask).collect()],
            ..Diary::default()
        };
        serve(&mut model(config), None, &mut diary).expect("steps succeed");
        diary
    };
    // The scheme determines how the outputs are divided into responses.
    let all_of = |extra_outputs: &Vec<ExtraOutputs>| {
        let log_probs = extra_outputs.iter().filter_map(|it| it.log_probs.clone());
        let context: Vec<_> = extra_outputs
            .iter()
            .map(|it| &it.context_logits[..])
            .collect();
        let generation: Vec<_> = extra_outputs
            .iter()
            .map(|it| &it.generation_logits[..])
            .collect();
        let log_probs: Vec<_> = log_probs.collect();
        (log_probs, context.concat(), generation.concat())
    };
    const VOCAB_SIZE: usize = 160;
    let fused = served(BatchingScheme::InflightFused, 1);
    for (id, extra_outputs) in &fused.extra_outputs {
        let tokens = &fused.streams[id];
        let (log_probs, context, generation) = all_of(extra_outputs);
        let num_logits = [context.len(), generation.len()].map(|len| len / VOCAB_SIZE);
        let all = [prompt(*id).len(), tokens.len()];
        assert_eq!(num_logits, if id % 3 == 2 { all } else { [0, 0] });
        let chosen: Vec<_> = log_probs.iter().map(|it| it.chosen.token).collect();
        assert!(if id % 3 > 0 {
            chosen == *tokens
        } else {
            chosen.is_empty()
        });
        assert!(log_probs.iter().all(|it| it.top.len() as u64 == *id));
    }
    for (scheme, num_micro_batches) in [
        (BatchingScheme::InflightFused, 2),
        (BatchingScheme::Inflight, 1),
        (BatchingScheme::V1, 1),
    ] {
        let other = served(scheme, num_micro_batches);
        assert_eq!(other.streams, fused.streams, "{scheme:?}");
        for (id, extra_outputs) in &other.extra_outputs {
            assert_eq!(
                all_of(extra_outputs),
                all_of(&fused.extra_outputs[id]),
                "{id}, {scheme:?}"
            );
        }
    }
}

/// Forces the token whose id is the number of tokens so far.
struct Count;

impl ProcessLogits for Count {
    fn process(&self, logits: &mut [f32], input: SamplingInput<'_>) -> Result<(), SampleError> {
        forbid_all_but(logits, &[input.tokens.len() as TokenId]);
        Ok(())
    }
}

#[test]
fn a_logits_processor_only_affects_its_own_request() {
    let answers = |with_count: bool| {
        let mut manager = model(EngineConfig {
            num_blocks: Blocks(64),
            ..config()
        });
        let mut requests: Vec<_> = (0..3).map(request).collect();
        if with_count {
            let sampling = SamplingParams {
                logits_processor: Some(LogitsProcessor(Arc::new(Count))),
                ..SamplingParams::default()
            };
            requests.push(NewRequest {
                sampling: Arc::new(sampling),
                ..request(5)
            });
        }
        let mut diary = Diary {
            arrivals: vec![requests],
            ..Diary::default()
        };
        serve(&mut manager, None, &mut diary).expect("steps succeed");
        diary.streams
    };
    let (alone, mut together) = (answers(false), answers(true));
    let first = prompt(5).len() as TokenId;
    let counted: Vec<_> = (first..first + max_new_tokens(5)).collect();
    assert_eq!(together.remove(&5), Some(counted));
    assert_eq!(together, alone);
}

/// Forces a token that encodes the owner of the row.
struct TellsWhose;

impl ProcessLogits for TellsWhose {
    fn process(&self, logits: &mut [f32], input: SamplingInput<'_>) -> Result<(), SampleError> {
        forbid_all_but(logits, &[told_of(input.owner)]);
        Ok(())
    }
}

fn told_of(owner: Owner) -> TokenId {
    let client = owner.client.map_or(50, |client| client.0);
    (owner.sequence.0 + client) as TokenId
}

#[test]
fn a_logits_processor_gets_the_request_id_and_the_client_id_which_may_be_shared() {
    let sampling = Arc::new(SamplingParams {
        logits_processor: Some(LogitsProcessor(Arc::new(TellsWhose))),
        ..SamplingParams::default()
    });
    let client_of = |id| [None, Some(ClientId(100)), Some(ClientId(7))][id as usize % 3];
    let ask = |id| NewRequest {
        client_id: client_of(id),
        sampling: Arc::clone(&sampling),
        ..request(id)
    };
    let mut diary = Diary {
        arrivals: vec![(0..9).map(ask).collect()],
        ..Diary::default()
    };
    let mut manager = model(EngineConfig {
        num_blocks: Blocks(64),
        ..config()
    });
    serve(&mut manager, None, &mut diary).expect("steps succeed");
    for (&id, tokens) in &diary.streams {
        let told = told_of(Owner {
            sequence: SequenceId(id),
            client: client_of(id),
        });
        assert_eq!(*tokens, vec![told; max_new_tokens(id) as usize], "{id}");
    }
}

#[test]
fn the_example_answers_a_file_of_prompts() {
    let folder = checkout();
    // Built for the whole workspace, like the tests: with the features of one package alone, cargo would
    // build the library again.
    let built = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "--workspace", "--example", "prompts"])
        .arg("--message-format=json")
        .current_dir(folder)
        .output()
        .expect("cargo runs");
    let messages = String::from_utf8(built.stdout).expect("text");
    let program = messages
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .find_map(|message| Some(message["executable"].as_str()?.to_owned()))
        .expect("cargo builds the example");
    let mut example = Command::new(program)
        .args(["model_repository/stories/1", "-"])
        .current_dir(folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the example runs");
    let mut prompts = example.stdin.take().expect("a pipe");
    prompts
        .write_all(b"Once upon a time\nThe\n")
        .expect("it reads");
    drop(prompts);
    let output = example.wait_with_output().expect("it ends");
    let answers = String::from_utf8(output.stdout).expect("text");
    assert!(output.status.success(), "{answers}");
    for prompt in ["Once upon a time|", "The|"] {
        assert!(
            answers.contains(prompt),
            "no answer to '{prompt}': {answers}"
        );
    }
}

#[test]
fn what_a_manager_has_cached_is_kept_in_its_file() {
    for num_micro_batches in [1, 2] {
        let name = format!(
            "inflight-kept-{}-{num_micro_batches}.kv",
            std::process::id()
        );
        let path = std::env::temp_dir().join(name);
        let _ = std::fs::remove_file(&path);
        let load = || {
            let config = EngineConfig {
                num_micro_batches,
                num_host_blocks: Blocks(32),
                ..config()
            };
            let options = SyntheticOptions {
                vocab_size: VOCAB_SIZE,
                step_base_us: 0.0,
                step_per_token_us: 0.0,
            };
            let runner = SyntheticRunner::new(options, &RunnerLimits::of(&config)).expect("memory");
            let file = KvFile::new(path.clone(), "a model".to_owned());
            let mut manager =
                BatchManager::with_kv_file(config, Box::new(runner), Some(file)).expect("a thread");
            let request = NewRequest::new(SequenceId(1), (0..40).collect(), Tokens(3));
            manager.add(request).expect("fits");
            manager
        };
        let mut num_reused_tokens = Vec::new();
        for _ in 0..2 {
            let mut manager = load();
            let mut last = 0;
            while !manager.is_idle() {
                manager.launch().expect("a step");
                if let Some(landed) = manager.land(&mut Vec::new()).expect("a step") {
                    last = landed.stats.reuse.num_reused_tokens;
                }
            }
            num_reused_tokens.push(last);
        }
        assert_eq!(num_reused_tokens, [0, 39], "all but the last token");

        let kept = std::fs::read(&path).expect("it is there");
        let mut manager = load();
        manager.launch().expect("a step");
        drop(manager);
        let left = std::fs::read(&path).expect("it is there");
        assert_eq!(left, kept, "a request was running");
        std::fs::remove_file(&path).expect("it is there");
    }
}

#[test]
fn what_a_step_costs_is_measured_where_there_are_drafts() {
    let speculation = Some(Speculation {
        max_draft_tokens: 4,
        prompt_lookup: None,
        has_draft_model: false,
        recomputes_drafts: false,
    });
    let config = EngineConfig {
        speculation,
        ..config()
    };
    let cost = |config: &EngineConfig, step_base_us, step_per_token_us| {
        let options = SyntheticOptions {
            vocab_size: VOCAB_SIZE,
            step_base_us,
            step_per_token_us,
        };
        let mut runner = SyntheticRunner::new(options, &RunnerLimits::of(config)).expect("memory");
        measure_step_cost(config, &mut runner).expect("steps are computed")
    };
    // The figures are far apart, whatever else the machine does.
    let large = cost(&config, 20_000.0, 0.0).expect("drafts are possible");
    assert!(large.fixed_ns > 50 * large.per_token_ns, "{large:?}");
    let small = cost(&config, 0.0, 2_000.0).expect("drafts are possible");
    assert!(small.fixed_ns < 5 * small.per_token_ns, "{small:?}");

    let without = EngineConfig {
        speculation: None,
        ..config.clone()
    };
    assert_eq!(cost(&without, 1.0, 1.0), None);
    // No sequence is long enough for a draft.
    let short = EngineConfig {
        max_seq_len: Tokens(2),
        ..config
    };
    assert_eq!(cost(&short, 1.0, 1.0), None);
}

#[test]
fn a_batch_manager_with_a_draft_model_gives_the_same_tokens_in_fewer_steps() {
    let fixture = checkout().join("tests/fixtures/qwen3");
    let fixture = fixture.display();
    let served = |more: &str| {
        let options = format!(
            r#"{{"gpt_model_path": "{fixture}", "max_seq_len": 64, "max_num_tokens": 40, "tokens_per_block": 4 {more}}}"#
        );
        let options = ManagerOptions::parse(&options).expect("good options");
        let (mut manager, _) = options.load().expect("it loads");
        for id in 0..6 {
            let prompt = (0..3 + 5 * id).map(|n| 3 + (n * n) as TokenId % 90);
            let request = NewRequest {
                sampling: Arc::new(SamplingParams {
                    temperature: [0.0, 0.2][id % 2],
                    ..SamplingParams::default()
                }),
                ..NewRequest::new(SequenceId(id as u64), prompt.collect(), Tokens(20))
            };
            manager.add(request).expect("it fits");
        }
        let mut tokens = BTreeMap::<_, Vec<_>>::new();
        let (mut num_steps, mut events) = (0, Vec::new());
        while !manager.is_idle() {
            manager.launch().expect("a step");
            num_steps += usize::from(manager.land(&mut events).expect("a step").is_some());
        }
        for event in events {
            if let Event::Token(id, token) = event {
                tokens.entry(id).or_default().push(token);
            }
        }
        (tokens, num_steps, manager.draft_totals())
    };
    let (alone, num_steps_alone, _) = served("");
    let drafted = format!(r#", "speculation": "draft_model", "draft_model_path": "{fixture}""#);
    for (more, are_fewer) in [
        (r#", "enable_adaptive_drafts": false"#, true),
        (
            r#", "enable_adaptive_drafts": false, "gpt_model_type": "inflight_batching""#,
            true,
        ),
        (
            r#", "enable_adaptive_drafts": false, "enable_trt_overlap": true"#,
            false,
        ),
        // No draft is worth what it costs, as the draft model is as large as the model.
        ("", false),
    ] {
        let (tokens, num_steps, drafts) = served(&format!("{drafted}{more}"));
        assert_eq!(tokens, alone, "{more}");
        assert!(!are_fewer || drafts.num_accepted > 40, "{more}: {drafts:?}");
        assert!(
            !are_fewer || num_steps < num_steps_alone,
            "{more}: {num_steps}"
        );
    }
}

#[test]
fn what_a_draft_model_costs_is_measured() {
    let dir = checkout().join("tests/fixtures/qwen3");
    let open = || ModelSource::open(&dir).expect("the fixture opens");
    let source = open().with_draft_model(open()).expect("the same tokens");
    let mut config = EngineConfig {
        speculation: Some(Speculation {
            max_draft_tokens: 4,
            prompt_lookup: None,
            has_draft_model: true,
            recomputes_drafts: false,
        }),
        ..config()
    };
    let limits = RunnerLimits::of(&config);
    let mut runner = load_on_cpus(&source, limits, &CpuOptions::default()).expect("it loads");
    measure_costs(&mut config, &mut *runner).expect("steps are computed");
    assert!(config.step_cost.is_some(), "{config:?}");
    assert!(config.draft_cost.is_some(), "{config:?}");
}
