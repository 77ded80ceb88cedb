//! Compiled libraries, and requests that run with them.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use inflight_base::{BlockSize, Blocks, ClientId, SequenceId, TokenId, Tokens};
use inflight_device_cpu::CpuOptions;
use inflight_engine::{BlockReuse, EngineConfig, Event, NewRequest, Speculation};
use inflight_machines::load_on_cpus;
use inflight_manager::BatchManager;
use inflight_post_processors::{PostProcessors, ProcessedRequest};
use inflight_runner::{ModelSource, RunnerLimits};
use inflight_sampling::{BeamSearch, EarlyStopping, FinishReason, LogitsProcessor, SamplingParams};
use inflight_tests::checkout;

/// Number of tokens that every request generates.
pub const NUM_TOKENS: usize = 12;

/// A folder for files that tests write.
pub fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
}

/// Compiles a C file into a shared library.
pub fn c_library(source: &str, name: &str, options: &[&str]) -> PathBuf {
    let root = checkout();
    // Tests build the same library concurrently.
    let thread = std::thread::current();
    let test = thread.name().unwrap_or_default().to_owned();
    let library = folder().join(format!("{name}-{test}.so"));
    let output = Command::new("cc")
        .args([
            "-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC",
        ])
        .args(options)
        .arg("-I")
        .arg(root.join("include"))
        .arg("-o")
        .args([&library, &root.join(source)])
        .output()
        .expect("a C compiler");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    library
}

/// The library of the Rust example.
pub fn rust_library() -> PathBuf {
    let status = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "--package", "logits-processors-example"])
        .arg("--target-dir")
        .arg(folder().join("rust-example"))
        .current_dir(checkout())
        // The flags of a sanitizer are for this program, which has its functions.
        .env_remove("RUSTFLAGS")
        .status()
        .expect("cargo runs");
    assert!(status.success());
    folder().join("rust-example/debug/liblogits_processors_example.so")
}

/// A request's specification.
pub struct TestRequest {
    pub id: u64,
    pub client_id: Option<ClientId>,
    processor: Option<(String, String)>,
    beam_search: Option<BeamSearch>,
}

impl TestRequest {
    pub fn new(id: u64) -> Self {
        Self {
            id,
            client_id: None,
            processor: None,
            beam_search: None,
        }
    }

    pub fn named(self, name: &str, arguments: &str) -> Self {
        let processor = Some((name.to_owned(), arguments.to_owned()));
        Self { processor, ..self }
    }

    /// Beam search with three beams; the answer is all hypotheses, concatenated.
    pub fn searching(self) -> Self {
        let beam_search = Some(BeamSearch {
            width: 3,
            num_returned: 3,
            length_penalty: 1.0,
            early_stopping: EarlyStopping::Never,
            diversity_rate: 0.0,
        });
        Self {
            beam_search,
            ..self
        }
    }

    pub fn prompt(&self) -> Vec<TokenId> {
        (0..3 + self.id % 17)
            .map(|n| (n * 7 % 50) as TokenId)
            .collect()
    }
}

fn checkpoint() -> ModelSource {
    let fixture = checkout().join("tests/fixtures/qwen3");
    ModelSource::open(&fixture).expect("the fixture opens")
}

pub fn vocab_size() -> usize {
    checkpoint().spec().vocab_size
}

/// The result of each request: its tokens, or its processor's error.
pub fn run(
    processors: &PostProcessors,
    requests: &[TestRequest],
) -> BTreeMap<u64, Result<Vec<TokenId>, String>> {
    run_with(processors, requests, 2, false, None)
}

pub fn run_with(
    processors: &PostProcessors,
    requests: &[TestRequest],
    num_threads: usize,
    overlap: bool,
    speculation: Option<Speculation>,
) -> BTreeMap<u64, Result<Vec<TokenId>, String>> {
    let config = EngineConfig {
        max_num_requests: 8,
        max_beam_width: 3,
        max_seq_len: Tokens(64),
        max_num_tokens: Tokens(64),
        block_size: BlockSize::new(4).expect("not zero"),
        chunk_unit: BlockSize::new(4).expect("not zero"),
        num_blocks: Blocks(128),
        num_micro_batches: if overlap { 2 } else { 1 },
        speculation,
        // No request waits for another one's blocks.
        reuse: BlockReuse::Off,
        ..EngineConfig::default()
    };
    let limits = RunnerLimits::of(&config);
    let options = CpuOptions {
        num_threads: NonZeroUsize::new(num_threads),
        ..CpuOptions::default()
    };
    let runner = load_on_cpus(&checkpoint(), limits, &options).expect("the fixture loads");
    let mut manager = BatchManager::new(config, runner).expect("a thread");
    let mut tokens = BTreeMap::<u64, Vec<TokenId>>::new();
    let mut own: BTreeMap<u64, LogitsProcessor> = BTreeMap::new();
    for request in requests {
        let client_request_id = format!("client-{}", request.id);
        let processed = ProcessedRequest {
            id: SequenceId(request.id),
            client_request_id: Some(&client_request_id),
            client_id: request.client_id,
            vocab_size: vocab_size() as u32,
        };
        let processor = request.processor.as_ref().map(|(name, arguments)| {
            let started = processors.start(name, arguments, processed);
            started.expect("good arguments")
        });
        own.extend(processor.clone().map(|processor| (request.id, processor)));
        let sampling = SamplingParams {
            logits_processor: processor,
            beam_search: request.beam_search,
            ..SamplingParams::default()
        };
        let new = NewRequest {
            sampling: Arc::new(sampling),
            ..NewRequest::new(
                SequenceId(request.id),
                request.prompt(),
                Tokens(NUM_TOKENS as u32),
            )
        };
        manager.add(new).expect("fits");
        tokens.insert(request.id, Vec::new());
    }
    let mut answers = BTreeMap::new();
    let mut events = Vec::new();
    while answers.len() < requests.len() {
        manager.launch().expect("steps succeed");
        manager.land(&mut events).expect("steps succeed");
        for event in events.drain(..) {
            match event {
                Event::Token(id, token) => tokens.get_mut(&id.0).expect("known").push(token),
                Event::Hypotheses(id, found) => {
                    let found = found.iter().flat_map(|it| &it.tokens);
                    tokens.get_mut(&id.0).expect("known").extend(found);
                }
                Event::Finished(id, reason) => {
                    let tokens = tokens.remove(&id.0).expect("it has not ended before");
                    let failure = own.get(&id.0).and_then(|processor| processor.0.failure());
                    let answer = match reason {
                        FinishReason::Error(error) => Err(failure.unwrap_or(error.to_string())),
                        _ => Ok(tokens),
                    };
                    answers.insert(id.0, answer);
                }
                _ => {}
            }
        }
    }
    assert_eq!(manager.kv_usage().num_used, Blocks(0));
    answers
}
