//! Guided requests through the batch manager, on the demo model.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use inflight_base::{BlockSize, Blocks, RequestError, SequenceId, TokenId, Tokens};
use inflight_device_cpu::CpuOptions;
use inflight_engine::{EngineConfig, Event, NewRequest};
use inflight_guidance::{Compiler, GrammarGuide, GuideSpec};
use inflight_machines::load_on_cpus;
use inflight_manager::BatchManager;
use inflight_runner::{ModelSource, RunnerLimits};
use inflight_sampling::{FinishReason, Guide, SamplingParams};
use inflight_tests::checkout;
use inflight_text::{Detokenizer, Tokenizer};

/// The demo model, and a compiler of guides for it.
pub struct Model {
    pub source: ModelSource,
    pub tokenizer: Arc<Tokenizer>,
    pub compiler: Compiler,
}

pub static MODEL: LazyLock<Model> = LazyLock::new(|| {
    let dir = checkout().join("model_repository/stories/1");
    let source = ModelSource::open(&dir).expect("the demo model opens");
    let tokenizer = Arc::new(Tokenizer::load(&dir).expect("its tokenizer loads"));
    let vocab_size = source.spec().vocab_size as u32;
    Model {
        compiler: Compiler::new(Arc::clone(&tokenizer), vocab_size),
        source,
        tokenizer,
    }
});

impl Model {
    /// The guide that `spec` describes.
    pub fn guide(&self, spec: GuideSpec) -> Result<Guide, RequestError> {
        Ok(Guide(Arc::new(self.grammar_guide(spec)?)))
    }

    /// The guide that `spec` describes, however long it takes to compile.
    pub fn grammar_guide(&self, spec: GuideSpec) -> Result<GrammarGuide, RequestError> {
        let end_ids = self.source.end_ids().to_vec();
        let compilation = self.compiler.compile(spec, end_ids, Instant::now())?;
        self.compiler
            .wait(|| compilation.is_done(), Duration::from_secs(3600));
        let guide = compilation.poll_grammar(Instant::now());
        guide.expect("it is compiled")
    }

    pub fn text(&self, prompt: &[TokenId], tokens: &[TokenId]) -> String {
        let mut detokenizer = Detokenizer::new(&self.tokenizer, prompt, true);
        let mut text = String::new();
        for &token in tokens {
            detokenizer.push(&self.tokenizer, token, &mut text);
        }
        detokenizer.finish(&self.tokenizer, &mut text);
        text
    }

    pub fn manager(&self, config: EngineConfig, num_threads: usize) -> BatchManager {
        let limits = RunnerLimits::of(&config);
        let options = CpuOptions {
            num_threads: NonZeroUsize::new(num_threads),
            ..CpuOptions::default()
        };
        let runner = load_on_cpus(&self.source, limits, &options).expect("it loads");
        BatchManager::new(config, runner).expect("a thread")
    }
}

/// Enough memory and slots for all requests.
pub fn roomy() -> EngineConfig {
    let block_size = BlockSize::new(16).expect("not zero");
    EngineConfig {
        max_num_requests: 16,
        max_seq_len: Tokens(1024),
        max_num_tokens: Tokens(512),
        block_size,
        chunk_unit: block_size,
        num_blocks: Blocks(16 * 64),
        ..EngineConfig::default()
    }
}

/// A prompt and its sampling parameters.
#[derive(Clone)]
pub struct Request {
    pub prompt: String,
    pub max_new_tokens: u32,
    pub sampling: SamplingParams,
}

impl Request {
    /// A guided request, sampled with `seed`, until the demo model's end token.
    pub fn guided(prompt: &str, guide: Guide, seed: u64) -> Self {
        Self {
            prompt: prompt.to_owned(),
            max_new_tokens: 800,
            sampling: SamplingParams {
                temperature: 1.0,
                seed,
                end_ids: MODEL.source.end_ids().to_vec(),
                guide: Some(guide),
                ..SamplingParams::default()
            },
        }
    }
}

/// The answer to a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    pub tokens: Vec<TokenId>,
    pub text: String,
    pub reason: FinishReason,
}

/// Serves all requests; returns the answers and the number of pauses.
pub fn serve(manager: &mut BatchManager, requests: &[Request]) -> (Vec<Answer>, usize) {
    let prompts: Vec<Vec<TokenId>> = requests
        .iter()
        .map(|request| {
            MODEL
                .tokenizer
                .encode(&request.prompt, true)
                .expect("tokens")
        })
        .collect();
    for (index, (request, prompt)) in requests.iter().zip(&prompts).enumerate() {
        let id = SequenceId(index as u64);
        manager
            .add(NewRequest {
                sampling: Arc::new(request.sampling.clone()),
                ..NewRequest::new(id, prompt.clone(), Tokens(request.max_new_tokens))
            })
            .expect("a valid request");
    }
    let mut tokens: BTreeMap<usize, Vec<TokenId>> = BTreeMap::new();
    let mut reasons = BTreeMap::new();
    let mut num_pauses = 0;
    let mut events = Vec::new();
    while reasons.len() < requests.len() {
        manager.launch().expect("a step");
        manager.land(&mut events).expect("a step");
        for event in events.drain(..) {
            match event {
                Event::Token(id, token) => tokens.entry(id.index()).or_default().push(token),
                Event::Finished(id, reason) => {
                    reasons.insert(id.index(), reason);
                }
                Event::Paused(_) => num_pauses += 1,
                Event::Admitted(..) | Event::ExtraOutputs(..) | Event::Hypotheses(..) => {}
            }
        }
    }
    let answers = reasons.into_iter().map(|(index, reason)| {
        let tokens = tokens.remove(&index).unwrap_or_default();
        Answer {
            text: MODEL.text(&prompts[index], &tokens),
            tokens,
            reason,
        }
    });
    (answers.collect(), num_pauses)
}
