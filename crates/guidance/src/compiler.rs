//! Compiles grammars on a thread of its own, so that no step waits for them.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use llguidance::ParserFactory;
use llguidance::api::ParserLimits;
use parking_lot::{Condvar, Mutex};

use crate::guide::{Compiled, GrammarGuide, too_complex};
use crate::memory::{GuideMemory, MAX_GUIDE_BYTES};
use crate::spec::GuideSpec;
use crate::structure_grammar::SpecialToken;
use crate::vocabulary;
use crate::work::{MAX_ITEMS, MAX_ITEMS_IN_ROW};
use inflight_base::{RequestError, TokenId};
use inflight_sampling::{Guide, SampleError};
use inflight_text::Tokenizer;
use inflight_threads::yield_to_others;

/// Maximum time that a grammar may be compiled, and that a request waits for the grammars queued before its own.
const MAX_WAIT: Duration = Duration::from_secs(20);

/// Maximum number of compiled grammars in the cache.
const MAX_CACHED: usize = 16;

/// Maximum number of grammars that wait to be compiled.
const MAX_QUEUED: usize = 256;

/// Stack size of the compiling thread: enough for the deepest nesting in a grammar of maximum size. The system only
/// commits the memory that is used.
const STACK_BYTES: usize = 256 << 20;

/// Limits on the work to compile a grammar and to compute the mask of one token: megabytes, and tens of milliseconds,
/// or some hundreds if it is ambiguous (`work.rs`). The limits are counts of work and not times, so that they do not
/// differ from run to run.
fn limits(spec: &GuideSpec) -> ParserLimits {
    ParserLimits {
        initial_lexer_fuel: spec.max_lexer_fuel(),
        max_grammar_size: 200_000,
        step_lexer_fuel: 200_000,
        step_max_items: MAX_ITEMS,
        max_items_in_row: MAX_ITEMS_IN_ROW,
        max_lexer_states: 20_000,
        precompute_large_lexemes: false,
        verbose_errors: false,
    }
}

/// The grammar compiler of one model. Its thread starts with the first grammar and ends when the compiler is dropped.
pub struct Compiler {
    shared: Arc<Shared>,
    tokenizer: Arc<Tokenizer>,
    vocab_size: u32,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// A request's pending or finished compilation.
pub struct Compilation {
    job: Arc<Job>,
    end_ids: Arc<[TokenId]>,
    since: Instant,
}

type Outcome = Result<Arc<Compiled>, RequestError>;

/// A grammar to compile, and the result once it is done.
struct Job {
    spec: GuideSpec,
    key: String,
    /// When it began to be compiled.
    begun: Mutex<Option<Instant>>,
    outcome: Mutex<Option<Outcome>>,
}

struct Shared {
    /// Of compiled grammars, and of the guides that use them.
    memory: Arc<GuideMemory>,
    state: Mutex<State>,
    /// Signals a new job, or the end of the compiler.
    work: Condvar,
    /// Signals a finished job.
    finished: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Arc<Job>>,
    is_closed: bool,
    /// Least recently used first.
    cache: Vec<(String, Arc<Compiled>)>,
}

impl Compiler {
    /// A compiler for a model whose token ids are below `vocab_size`.
    pub fn new(tokenizer: Arc<Tokenizer>, vocab_size: u32) -> Self {
        Self::with_memory(tokenizer, vocab_size, MAX_GUIDE_BYTES)
    }

    /// A compiler whose grammars and guides have `max_bytes` together instead of [`MAX_GUIDE_BYTES`], and what the
    /// grammars of running requests have beyond that.
    pub fn with_memory(tokenizer: Arc<Tokenizer>, vocab_size: u32, max_bytes: usize) -> Self {
        Self {
            shared: Arc::new(Shared {
                memory: Arc::new(GuideMemory::new(max_bytes)),
                state: Mutex::default(),
                work: Condvar::new(),
                finished: Condvar::new(),
            }),
            tokenizer,
            vocab_size,
            thread: Mutex::new(None),
        }
    }

    /// Starts to compile `spec` for a request that ends with any of `end_ids`.
    ///
    /// # Errors
    /// `spec` is too large, or `end_ids` is empty. [`RequestError::Busy`] if too many grammars are queued, or the
    /// guides of other requests have all the memory that guides may have.
    pub fn compile(
        &self,
        spec: GuideSpec,
        end_ids: Vec<TokenId>,
        now: Instant,
    ) -> Result<Compilation, RequestError> {
        spec.check()?;
        if end_ids.is_empty() {
            return Err(RequestError::Invalid(
                "guided decoding needs an end id, and this request has none; leave out 'ignore_eos', \
                 or set 'end_id'"
                    .to_owned(),
            ));
        }
        let key = spec.key();
        let mut state = self.shared.state.lock();
        if self.shared.memory.is_over() {
            state.cache.clear();
        }
        if self.shared.memory.is_over() {
            return Err(RequestError::Busy(format!(
                "the guides of other requests have {} MiB, and guides may have {}; try again later",
                self.shared.memory.num_bytes() >> 20,
                self.shared.memory.max_bytes() >> 20
            )));
        }
        let outcome = state.cached(&key).map(Ok);
        let is_ready = outcome.is_some();
        let job = Arc::new(Job {
            spec,
            key,
            begun: Mutex::new(None),
            outcome: Mutex::new(outcome),
        });
        if !is_ready {
            if state.queue.len() >= MAX_QUEUED {
                return Err(RequestError::Busy(format!(
                    "{MAX_QUEUED} other grammars are waiting to be compiled; try again later"
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

    /// Counted memory of its grammars and of the guides that use them, in bytes.
    pub fn num_guide_bytes(&self) -> usize {
        self.shared.memory.num_bytes()
    }

    /// Waits until `is_done` returns true, or for `max_wait`. Checks it whenever a grammar has been compiled.
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
                |error| RequestError::Internal(format!("cannot start the grammar thread: {error}"));
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
            // The thread catches its panics, so joining cannot fail.
            let _ = thread.join();
        }
    }
}

impl Compilation {
    /// Whether the compilation has finished, with a guide or an error.
    pub fn is_done(&self) -> bool {
        self.job.outcome.lock().is_some()
    }

    /// The guide, once it is compiled.
    ///
    /// # Errors
    /// The grammar is invalid, or takes too long to compile. [`RequestError::Busy`] if those queued before it did.
    pub fn poll(&self, now: Instant) -> Option<Result<Guide, RequestError>> {
        let guide = self.poll_grammar(now)?;
        Some(guide.map(|guide| Guide(Arc::new(guide))))
    }

    /// What [`Compilation::poll`] returns, as the guide that it is.
    ///
    /// # Errors
    /// As with [`Compilation::poll`].
    pub fn poll_grammar(&self, now: Instant) -> Option<Result<GrammarGuide, RequestError>> {
        let outcome = self.job.outcome.lock().clone();
        match outcome {
            Some(Ok(compiled)) => Some(Ok(GrammarGuide::new(compiled, self.end_ids.clone()))),
            Some(Err(error)) => Some(Err(error)),
            None => self.overdue(now).map(Err),
        }
    }

    /// The error of a compilation that has taken too long, or that others have kept waiting for too long.
    fn overdue(&self, now: Instant) -> Option<RequestError> {
        let begun = *self.job.begun.lock();
        let since = begun.unwrap_or(self.since);
        let seconds = MAX_WAIT.as_secs();
        (now.saturating_duration_since(since) > MAX_WAIT).then(|| match begun {
            Some(_) => RequestError::Invalid(format!(
                "the guide was not compiled within {seconds} s; write a simpler one"
            )),
            None => RequestError::Busy(format!(
                "the guides of other requests have been compiled for {seconds} s before this one; try again later"
            )),
        })
    }
}

impl State {
    fn cached(&mut self, key: &str) -> Option<Arc<Compiled>> {
        let index = self.cache.iter().position(|(cached, _)| cached == key)?;
        let entry = self.cache.remove(index);
        let compiled = Arc::clone(&entry.1);
        self.cache.push(entry);
        Some(compiled)
    }

    fn insert(&mut self, key: &str, compiled: Arc<Compiled>, memory: &GuideMemory) {
        let is_full = |cache: &[_]| cache.len() == MAX_CACHED || memory.is_over();
        while !self.cache.is_empty() && is_full(&self.cache) {
            self.cache.remove(0);
        }
        self.cache.push((key.to_owned(), compiled));
    }
}

fn start(
    shared: Arc<Shared>,
    tokenizer: Arc<Tokenizer>,
    vocab_size: u32,
) -> io::Result<JoinHandle<()>> {
    let work = move || {
        // The threads that compute steps come first.
        yield_to_others();
        // Built once, before the first grammar.
        let mut factory = guarded(|| factory(&tokenizer, vocab_size));
        let special_tokens = tokenizer.special_tokens(vocab_size);
        while let Some(job) = next(&shared) {
            // The request is gone.
            if Arc::strong_count(&job) == 1 {
                continue;
            }
            *job.begun.lock() = Some(Instant::now());
            let cached = shared.state.lock().cached(&job.key);
            let outcome = match (cached, &mut factory) {
                (Some(compiled), _) => Ok(compiled),
                (None, Ok(factory)) => {
                    guarded(|| compile(factory, &job, &special_tokens, vocab_size, &shared.memory))
                }
                (None, Err(error)) => Err(error.clone()),
            };
            let mut state = shared.state.lock();
            if let Ok(compiled) = &outcome
                && state.cached(&job.key).is_none()
            {
                state.insert(&job.key, Arc::clone(compiled), &shared.memory);
            }
            *job.outcome.lock() = Some(outcome);
            shared.finished.notify_all();
        }
    };
    let thread = thread::Builder::new().name("inflight-grammars".into());
    thread.stack_size(STACK_BYTES).spawn(work)
}

/// Waits for the next job. None if the compiler was dropped.
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
    let tokens = vocabulary::trie(tokenizer, vocab_size).map_err(|error| {
        RequestError::Invalid(format!(
            "this model does not support guided decoding: {error}"
        ))
    })?;
    let factory = ParserFactory::new_simple(&tokens);
    let mut factory = factory.map_err(|error| RequestError::Internal(error.to_string()))?;
    factory.quiet();
    Ok(factory)
}

fn compile(
    factory: &mut ParserFactory,
    job: &Job,
    special_tokens: &[SpecialToken],
    vocab_size: u32,
    memory: &Arc<GuideMemory>,
) -> Outcome {
    let spec = &job.spec;
    let grammar = spec.grammar(special_tokens).map_err(refused)?;
    *factory.limits_mut() = limits(spec);
    let parser = factory
        .create_parser(grammar)
        .map_err(|error| refused(format!("{error:#}")))?;
    let ambiguity = spec.ambiguity();
    let compiled = Compiled::new(parser, vocab_size, memory, job.key.len(), ambiguity.clone());
    compiled.map(Arc::new).map_err(|error| {
        refused(match (error, ambiguity) {
            (SampleError::NoneAllowed, _) => {
                "it matches no text, or none that starts with a token of this model".to_owned()
            }
            (SampleError::GuideTooComplex, Some(ambiguity)) => too_complex(&ambiguity),
            (error, _) => error.to_string(),
        })
    })
}

fn refused(problem: String) -> RequestError {
    const MAX_CHARS: usize = 400;
    // The library reports panics as errors with a backtrace.
    let problem = problem.split("<backtrace>").next().unwrap_or_default();
    let problem: String = problem.trim().chars().take(MAX_CHARS).collect();
    RequestError::Invalid(format!("the guide cannot be used: {problem}"))
}

/// Turns a panic in the library into an error of this grammar.
fn guarded<T>(call: impl FnOnce() -> Result<T, RequestError>) -> Result<T, RequestError> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|_| {
        Err(RequestError::Internal(
            "the grammar library panicked; write the guide in another way".to_owned(),
        ))
    })
}
