//! A thread that compiles grammars, so that no step waits for one.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use llguidance::ParserFactory;
use llguidance::api::ParserLimits;
use parking_lot::{Condvar, Mutex};

use crate::base::{RequestError, TokenId};
use crate::guidance::guide::{Compiled, GrammarGuide};
use crate::guidance::spec::GuideSpec;
use crate::guidance::vocabulary;
use crate::sampling::{Guide, SampleError};
use crate::text::Tokenizer;

/// How long a request waits for its grammar, the grammars before it included.
const MAX_WAIT: Duration = Duration::from_secs(20);

/// Grammars that are kept for the next request with the same.
const MAX_KEPT: usize = 16;

/// Grammars that wait to be compiled.
const MAX_QUEUED: usize = 256;

/// The compiling thread's stack: a grammar of the largest size nests this deep at most. The system gives
/// memory only to what is used of it.
const STACK_BYTES: usize = 256 << 20;

/// What a grammar may cost to compile, and one token of its guide to work out: a few ten milliseconds each,
/// and a few ten megabytes. None of them is a time, which would differ from run to run.
fn limits(spec: &GuideSpec) -> ParserLimits {
    ParserLimits {
        initial_lexer_fuel: spec.max_lexer_fuel(),
        max_grammar_size: 200_000,
        step_lexer_fuel: 200_000,
        step_max_items: 50_000,
        max_items_in_row: 2_000,
        max_lexer_states: 20_000,
        precompute_large_lexemes: false,
        verbose_errors: false,
    }
}

/// Compiles grammars for one model. Its thread starts with the first grammar and ends when it is dropped.
pub struct Compiler {
    shared: Arc<Shared>,
    tokenizer: Arc<Tokenizer>,
    vocab_size: u32,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// A grammar on its way.
pub struct Compilation {
    job: Arc<Job>,
    end_ids: Arc<[TokenId]>,
    since: Instant,
}

type Outcome = Result<Arc<Compiled>, RequestError>;

/// A grammar to be compiled, and what has come of it.
struct Job {
    spec: GuideSpec,
    key: String,
    outcome: Mutex<Option<Outcome>>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// There is something to do, or nothing ever again.
    work: Condvar,
    /// Something has been done.
    finished: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Arc<Job>>,
    is_closed: bool,
    /// What was used last comes last.
    kept: Vec<(String, Arc<Compiled>)>,
}

impl Compiler {
    /// A compiler for a model whose token ids are below `vocab_size`.
    pub fn new(tokenizer: Arc<Tokenizer>, vocab_size: u32) -> Self {
        Self {
            shared: Arc::default(),
            tokenizer,
            vocab_size,
            thread: Mutex::new(None),
        }
    }

    /// Begins to compile what `spec` says, for a request that ends with any of `end_ids`.
    ///
    /// # Errors
    /// It is too large, no token ends the request, or too many others wait.
    pub fn compile(
        &self,
        spec: GuideSpec,
        end_ids: Vec<TokenId>,
        now: Instant,
    ) -> Result<Compilation, RequestError> {
        spec.check()?;
        if end_ids.is_empty() {
            return Err(RequestError::Invalid(
                "guided decoding ends with an end id, and this request has none; leave out 'ignore_eos', \
                 or name one in 'end_id'"
                    .to_owned(),
            ));
        }
        let key = spec.key();
        let mut state = self.shared.state.lock();
        let outcome = state.kept(&key).map(Ok);
        let is_ready = outcome.is_some();
        let job = Arc::new(Job {
            spec,
            key,
            outcome: Mutex::new(outcome),
        });
        if !is_ready {
            if state.queue.len() >= MAX_QUEUED {
                return Err(RequestError::Invalid(format!(
                    "{MAX_QUEUED} other grammars wait to be compiled; try again later"
                )));
            }
            self.start_thread()?;
            state.queue.push_back(Arc::clone(&job));
            self.shared.work.notify_one();
        }
        Ok(Compilation {
            job,
            end_ids: end_ids.into(),
            since: now,
        })
    }

    /// Waits until `is_done`, which is asked whenever a grammar has been compiled; `max_wait` at most.
    pub fn wait(&self, is_done: impl Fn() -> bool, max_wait: Duration) {
        let mut state = self.shared.state.lock();
        let finished = &self.shared.finished;
        finished.wait_while_for(&mut state, |_| !is_done(), max_wait);
    }

    fn start_thread(&self) -> Result<(), RequestError> {
        let mut thread = self.thread.lock();
        if thread.is_none() {
            let started = start(
                Arc::clone(&self.shared),
                Arc::clone(&self.tokenizer),
                self.vocab_size,
            );
            let no_thread =
                |error| RequestError::Internal(format!("no thread to compile grammars: {error}"));
            *thread = Some(started.map_err(no_thread)?);
        }
        Ok(())
    }
}

impl Drop for Compiler {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.is_closed = true;
        state.queue.clear();
        self.shared.work.notify_all();
        drop(state);
        if let Some(thread) = self.thread.lock().take() {
            // It catches its panics, so there is nothing to hear.
            let _ = thread.join();
        }
    }
}

impl Compilation {
    /// Whether there is a guide, or an error.
    pub fn is_done(&self) -> bool {
        self.job.outcome.lock().is_some()
    }

    /// The guide, once there is one.
    ///
    /// # Errors
    /// What is wrong with the grammar, or that it took too long.
    pub fn poll(&self, now: Instant) -> Option<Result<Guide, RequestError>> {
        let outcome = self.job.outcome.lock().clone();
        match outcome {
            Some(Ok(compiled)) => {
                let guide = GrammarGuide::new(compiled, self.end_ids.clone());
                Some(Ok(Guide(Arc::new(guide))))
            }
            Some(Err(error)) => Some(Err(error)),
            None if now.saturating_duration_since(self.since) > MAX_WAIT => {
                Some(Err(RequestError::Invalid(format!(
                    "the guide was not compiled within {} s; write a simpler one",
                    MAX_WAIT.as_secs()
                ))))
            }
            None => None,
        }
    }
}

impl State {
    fn kept(&mut self, key: &str) -> Option<Arc<Compiled>> {
        let index = self.kept.iter().position(|(kept, _)| kept == key)?;
        let entry = self.kept.remove(index);
        let compiled = Arc::clone(&entry.1);
        self.kept.push(entry);
        Some(compiled)
    }

    fn keep(&mut self, key: &str, compiled: Arc<Compiled>) {
        if self.kept.len() == MAX_KEPT {
            self.kept.remove(0);
        }
        self.kept.push((key.to_owned(), compiled));
    }
}

fn start(
    shared: Arc<Shared>,
    tokenizer: Arc<Tokenizer>,
    vocab_size: u32,
) -> io::Result<JoinHandle<()>> {
    let work = move || {
        // The first grammar pays for what all of them need.
        let mut factory = guarded(|| factory(&tokenizer, vocab_size));
        while let Some(job) = next(&shared) {
            // Nobody waits for it any more.
            if Arc::strong_count(&job) == 1 {
                continue;
            }
            let kept = shared.state.lock().kept(&job.key);
            let outcome = match (kept, &mut factory) {
                (Some(compiled), _) => Ok(compiled),
                (None, Ok(factory)) => guarded(|| compile(factory, &job.spec, vocab_size)),
                (None, Err(error)) => Err(error.clone()),
            };
            let mut state = shared.state.lock();
            if let Ok(compiled) = &outcome
                && state.kept(&job.key).is_none()
            {
                state.keep(&job.key, Arc::clone(compiled));
            }
            *job.outcome.lock() = Some(outcome);
            shared.finished.notify_all();
        }
    };
    let thread = thread::Builder::new().name("inflight-grammars".into());
    thread.stack_size(STACK_BYTES).spawn(work)
}

/// The next grammar; `None` when there will be none.
fn next(shared: &Shared) -> Option<Arc<Job>> {
    let mut state = shared.state.lock();
    loop {
        if state.is_closed {
            return None;
        }
        if let Some(job) = state.queue.pop_front() {
            return Some(job);
        }
        shared.work.wait(&mut state);
    }
}

fn factory(tokenizer: &Tokenizer, vocab_size: u32) -> Result<ParserFactory, RequestError> {
    let tokens = vocabulary::trie(tokenizer, vocab_size)
        .map_err(|error| RequestError::Invalid(format!("this model cannot be guided: {error}")))?;
    let factory = ParserFactory::new_simple(&tokens);
    let mut factory = factory.map_err(|error| RequestError::Internal(error.to_string()))?;
    factory.quiet();
    Ok(factory)
}

fn compile(factory: &mut ParserFactory, spec: &GuideSpec, vocab_size: u32) -> Outcome {
    let grammar = spec.grammar().map_err(refused)?;
    *factory.limits_mut() = limits(spec);
    let parser = factory
        .create_parser(grammar)
        .map_err(|error| refused(format!("{error:#}")))?;
    let compiled = Compiled::new(parser, vocab_size);
    compiled.map(Arc::new).map_err(|error| {
        refused(match error {
            SampleError::NoneAllowed => {
                "no text fits it, or none that this model's tokens can begin".to_owned()
            }
            error => error.to_string(),
        })
    })
}

fn refused(problem: String) -> RequestError {
    const MAX_CHARS: usize = 400;
    // The library's panics come as errors, each with where it was.
    let problem = problem.split("<backtrace>").next().unwrap_or_default();
    let problem: String = problem.trim().chars().take(MAX_CHARS).collect();
    RequestError::Invalid(format!("the guide cannot be used: {problem}"))
}

/// Keeps a panic of a library an error of the one grammar.
fn guarded<T>(call: impl FnOnce() -> Result<T, RequestError>) -> Result<T, RequestError> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|_| {
        Err(RequestError::Internal(
            "the grammar library panicked; write the guide in another way".to_owned(),
        ))
    })
}
