//! The batch manager without Triton: reads a file of prompts and prints each answer when it is complete.
//!
//! ```text
//! cargo run --release --example prompts -- model_repository/stories/1 prompts.txt
//! ```
//!
//! Every line of the file is a prompt; `-` reads standard input. The application is a set of callbacks; a
//! server would do the same with sockets.

use std::collections::{BTreeMap, VecDeque};
use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::{env, fs, io};

use inflight_base::{BlockSize, Blocks, SequenceId, Tokens};
use inflight_device_cpu::CpuOptions;
use inflight_engine::{EngineConfig, NewRequest, StepStats};
use inflight_machines::load_on_cpus;
use inflight_manager::{BatchManager, Callbacks, Response, Submission, serve};
use inflight_runner::{ModelSource, RunnerLimits};
use inflight_sampling::SamplingParams;
use inflight_text::{Detokenizer, Tokenizer};

const MAX_NEW_TOKENS: Tokens = Tokens(64);

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [folder, file] = arguments.as_slice() else {
        return Err("usage: prompts CHECKPOINT_FOLDER PROMPT_FILE".into());
    };
    let prompts = match file.as_str() {
        "-" => io::read_to_string(io::stdin())?,
        path => fs::read_to_string(path)?,
    };
    let source = ModelSource::open(Path::new(folder))?;
    let tokenizer = Tokenizer::load(Path::new(folder))?;
    let mut manager = batch_manager(&source)?;
    let mut application = Application::new(&source, &tokenizer, prompts.lines())?;
    serve(&mut manager, None, &mut application)?;
    eprintln!("{} steps", application.num_steps);
    Ok(())
}

/// A batch manager with up to 8 requests in flight.
fn batch_manager(source: &ModelSource) -> Result<BatchManager, Box<dyn Error>> {
    let block_size = BlockSize::new(32).ok_or("the block size is zero")?;
    let max_seq_len = Tokens(source.spec().max_seq_len() as u32);
    let max_num_requests = 8;
    let config = EngineConfig {
        max_num_requests,
        max_seq_len,
        block_size,
        chunk_unit: block_size,
        num_blocks: Blocks(max_num_requests * max_seq_len.blocks_ceil(block_size).0),
        ..EngineConfig::default()
    };
    let limits = RunnerLimits::of(&config);
    let runner = load_on_cpus(source, limits, &CpuOptions::default())?;
    Ok(BatchManager::new(config, runner)?)
}

/// The waiting prompts, and the answers in progress.
struct Application<'a> {
    tokenizer: &'a Tokenizer,
    waiting: VecDeque<NewRequest>,
    answers: BTreeMap<SequenceId, Answer<'a>>,
    num_steps: u64,
}

struct Answer<'a> {
    prompt: &'a str,
    detokenizer: Detokenizer,
    text: String,
}

impl<'a> Application<'a> {
    fn new(
        source: &ModelSource,
        tokenizer: &'a Tokenizer,
        prompts: impl Iterator<Item = &'a str>,
    ) -> Result<Self, Box<dyn Error>> {
        let sampling = Arc::new(SamplingParams {
            end_ids: source.end_ids().to_vec(),
            ..SamplingParams::default()
        });
        let mut application = Self {
            tokenizer,
            waiting: VecDeque::new(),
            answers: BTreeMap::new(),
            num_steps: 0,
        };
        for (id, prompt) in (1..).map(SequenceId).zip(prompts) {
            let ids = tokenizer.encode(prompt, true)?;
            let answer = Answer {
                prompt,
                detokenizer: Detokenizer::new(tokenizer, &ids, true),
                text: String::new(),
            };
            application.answers.insert(id, answer);
            application.waiting.push_back(NewRequest {
                sampling: sampling.clone(),
                ..NewRequest::new(id, ids, MAX_NEW_TOKENS)
            });
        }
        Ok(application)
    }
}

impl Callbacks for Application<'_> {
    fn get_requests(&mut self, max_num_requests: usize, _is_idle: bool) -> Option<Vec<Submission>> {
        if self.waiting.is_empty() {
            return None;
        }
        let num = max_num_requests.min(self.waiting.len());
        Some(self.waiting.drain(..num).map(Submission::from).collect())
    }

    fn send_response(&mut self, response: Response<'_>) {
        let Some(answer) = self.answers.get_mut(&response.id) else {
            return;
        };
        for &token in response.tokens {
            answer
                .detokenizer
                .push(self.tokenizer, token, &mut answer.text);
        }
        let Some(end) = response.end else { return };
        answer.detokenizer.finish(self.tokenizer, &mut answer.text);
        match end {
            Ok(reason) => println!("{}|{} [{reason:?}]", answer.prompt, answer.text),
            Err(error) => println!("{}| refused: {error}", answer.prompt),
        }
        self.answers.remove(&response.id);
    }

    fn reject_duplicate(&mut self, duplicate: Submission) {
        unreachable!("every line has its own id, also {}", duplicate.request.id);
    }

    fn return_stats(&mut self, stats: &StepStats) {
        self.num_steps = stats.iteration_counter;
    }
}
