//! After warm-up, a generation step takes no memory from the allocator, neither in the engine nor in
//! the runner.
//!
//! A test binary of its own, because it replaces the allocator.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::num::NonZeroUsize;
use std::sync::Arc;

use inflight_base::{BlockSize, Blocks, SequenceId, Tokens};
use inflight_device::KvDtype;
use inflight_device_cpu::CpuOptions;
use inflight_engine::{
    BlockReuse, CapacityPolicy, Engine, EngineConfig, NewRequest, PromptLookup, Sampled,
    Speculation, Stage, StepOutput,
};
use inflight_post_processors::{PostProcessors, ProcessedRequest};
use inflight_runner::{CpuRunner, ModelSource, RunnerLimits};
use inflight_sampling::{LogitsProcessor, SamplingParams, TopPDecay};
use inflight_tests::checkout;

thread_local! {
    /// Allocations of this thread: others, the test harness among them, do as they like. A runner of
    /// one thread computes on its caller's.
    static NUM_ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

struct CountingAllocator;

// SAFETY: every call goes to the system's allocator as it is; counting touches no memory of it.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps the contract of `alloc`, which is the system's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `dealloc`, which is the system's.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller keeps the contract of `realloc`, which is the system's.
        unsafe { System.realloc(pointer, layout, new_size) }
    }
}

fn count() {
    NUM_ALLOCATIONS.set(NUM_ALLOCATIONS.get() + 1);
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const SPECULATION: Speculation = Speculation {
    max_draft_tokens: 4,
    prompt_lookup: Some(PromptLookup { min: 1, max: 3 }),
    has_draft_model: false,
    recomputes_drafts: false,
};

/// Allocations of several hundred steps of 64 sequences that generate, blocks and all. With drafts, three
/// of four are right.
fn allocations_of_the_engine(policy: CapacityPolicy, speculation: Option<Speculation>) -> u64 {
    const NUM_REQUESTS: u32 = 64;
    let mut engine = Engine::new(EngineConfig {
        max_num_requests: NUM_REQUESTS,
        max_seq_len: Tokens(2048),
        max_num_tokens: Tokens(4096),
        block_size: BlockSize::new(16).expect("not zero"),
        num_blocks: Blocks(NUM_REQUESTS * 128),
        policy,
        speculation,
        record_requests: true,
        ..EngineConfig::default()
    });
    for id in 0..u64::from(NUM_REQUESTS) {
        engine
            .add(NewRequest::new(
                SequenceId(id),
                vec![7; 5 + id as usize],
                Tokens(1500),
            ))
            .expect("fits");
    }
    let mut output = StepOutput::default();
    let mut events = Vec::new();
    let mut before = 0;
    // Those that begin in the same way wait for each other's blocks at first.
    const WARM_UP: u32 = 100;
    // With drafts a step may generate four tokens.
    let num_steps = if speculation.is_some() { 250 } else { 1000 };
    let mut num_drafts = 0;
    for step in 0..WARM_UP + num_steps {
        if step == WARM_UP {
            before = NUM_ALLOCATIONS.get();
        }
        let decided = engine.schedule();
        let sequences = decided.sequences();
        if step + 2 >= WARM_UP {
            assert_eq!(sequences.len(), NUM_REQUESTS as usize);
            let mut stages = engine.request_stages().iter().map(|it| it.stage);
            assert!(stages.all(|stage| stage == Stage::Generation));
        }
        output.sampled.clear();
        for plan in decided.plans() {
            for planned in plan.sequences {
                // The drafts, followed by tokens after n-grams that occur repeatedly.
                let drafts = plan.drafts(planned);
                num_drafts += drafts.len();
                let accepted = &drafts[..drafts.len().min(3)];
                let tokens = accepted.iter().copied().chain([step % 7]);
                let sampled = tokens.map(|token| (planned.slot, Sampled::Token(token)));
                output.sampled.extend(sampled);
            }
        }
        events.clear();
        engine.apply(decided, &mut output, &mut events);
    }
    assert_eq!(num_drafts > 1000, speculation.is_some(), "{num_drafts}");
    NUM_ALLOCATIONS.get() - before
}

/// A post-processor that leaves enough tokens.
fn built_in(id: u32) -> LogitsProcessor {
    let request = ProcessedRequest {
        id: SequenceId(u64::from(id)),
        client_request_id: None,
        client_id: None,
        vocab_size: 100,
    };
    let started = PostProcessors::default().start("ban_tokens", r#"{"tokens": [5, 6]}"#, request);
    started.expect("good arguments")
}

/// Allocations of the model's part of 40 steps of 8 sequences that generate, each with other options; with
/// drafts, of 15.
fn allocations_of_the_runner(
    fixture: &str,
    kv_dtype: KvDtype,
    speculation: Option<Speculation>,
) -> u64 {
    const NUM_REQUESTS: u32 = 8;
    let config = EngineConfig {
        max_num_requests: NUM_REQUESTS,
        max_seq_len: Tokens(96),
        max_num_tokens: Tokens(1024),
        block_size: BlockSize::new(16).expect("not zero"),
        num_blocks: Blocks(NUM_REQUESTS * 6),
        reuse: BlockReuse::Off,
        speculation,
        ..EngineConfig::default()
    };
    let limits = RunnerLimits {
        kv_dtype,
        ..RunnerLimits::of(&config)
    };
    let options = CpuOptions {
        num_threads: NonZeroUsize::new(1),
        ..CpuOptions::default()
    };
    let dir = checkout().join("tests/fixtures").join(fixture);
    let source = ModelSource::open(&dir).expect("the fixture opens");
    let mut runner = CpuRunner::new(&source, limits, &options).expect("the fixture loads");
    let mut engine = Engine::new(config);
    for id in 0..NUM_REQUESTS {
        let sampling = SamplingParams {
            temperature: id as f32 * 0.3,
            top_k: id / 2 * 20,
            top_p: 1.0 - id as f32 * 0.1,
            repetition_penalty: 1.0 + id as f32 * 0.1,
            presence_penalty: (id % 2) as f32,
            prompt_ignore_length: id,
            typical_p: if id > 4 { 0.8 } else { 1.0 },
            top_p_decay: (id % 3 == 0).then(|| TopPDecay {
                factor: 0.9,
                min: 0.1,
                reset_ids: vec![3],
            }),
            no_repeat_ngram_size: if id % 2 == 0 { 5 } else { 0 },
            allowed_token_ids: (id % 4 == 1).then(|| (3..100).collect()),
            stop_token_ids: vec![99],
            logits_processor: (id % 4 == 2).then(|| built_in(id)),
            min_tokens: 80,
            ..SamplingParams::default()
        };
        engine
            .add(NewRequest {
                sampling: Arc::new(sampling),
                ..NewRequest::new(
                    SequenceId(u64::from(id)),
                    vec![7; 5 + id as usize],
                    Tokens(80),
                )
            })
            .expect("fits");
    }
    let (mut output, mut events) = (StepOutput::default(), Vec::new());
    let mut num_allocations = 0;
    // Buffers are as large as they get once a step had as many drafts as it may.
    let (warm_up, num_steps) = match speculation {
        None => (2, 40),
        Some(_) => (5, 10),
    };
    let mut num_drafts = 0;
    for step in 0..warm_up + num_steps {
        let decided = engine.schedule();
        assert_eq!(decided.sequences().len(), NUM_REQUESTS as usize);
        output.sampled.clear();
        let before = NUM_ALLOCATIONS.get();
        for plan in decided.plans() {
            num_drafts += plan.sequences.iter().map(|it| it.num_drafts).sum::<u32>();
            runner.run(plan, &mut output).expect("the step runs");
        }
        if step >= warm_up {
            num_allocations += NUM_ALLOCATIONS.get() - before;
        }
        events.clear();
        engine.apply(decided, &mut output, &mut events);
    }
    assert_eq!(num_drafts > 0, speculation.is_some(), "{num_drafts}");
    num_allocations
}

#[test]
fn the_counter_counts() {
    let before = NUM_ALLOCATIONS.get();
    let mut numbers = std::hint::black_box(vec![1]);
    numbers.reserve_exact(100);
    assert!(NUM_ALLOCATIONS.get() >= before + 2);
}

#[test]
fn a_thousand_generation_steps_of_the_engine_allocate_nothing() {
    for policy in [
        CapacityPolicy::GuaranteedNoEvict,
        CapacityPolicy::MaxUtilization,
    ] {
        for speculation in [None, Some(SPECULATION)] {
            let num_allocations = allocations_of_the_engine(policy, speculation);
            assert_eq!(num_allocations, 0, "{policy:?}, {speculation:?}");
        }
    }
}

#[test]
fn generation_steps_of_the_runner_allocate_nothing() {
    for kv_dtype in KvDtype::ON_CPU {
        for speculation in [None, Some(SPECULATION)] {
            let num_allocations = allocations_of_the_runner("qwen3", kv_dtype, speculation);
            assert_eq!(num_allocations, 0, "{kv_dtype}, {speculation:?}");
        }
    }
    for fixture in ["lfm2", "qwen3-5", "granite4-dense"] {
        let num_allocations = allocations_of_the_runner(fixture, KvDtype::Bf16, None);
        assert_eq!(num_allocations, 0, "{fixture}");
    }
}
