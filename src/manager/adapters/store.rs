//! Loads adapters on a thread of its own, so that no step waits for a file, and keeps them for later requests.
//!
//! ```text
//! request names a  --> kept, and looked at a moment ago: at once
//!                  --> otherwise a job of the thread: are the files those that were loaded? if not, load them
//! kept adapters    | d | c | b | a |    those used longest ago go first, and none that a request in flight uses
//! ```
//!
//! A job that finds no room waits until a request has ended, and all jobs after it wait, too: so a stream of requests
//! for adapters that are kept cannot hold up one for another adapter forever.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::folders::AdapterFolders;
use super::signal::Signal;
use crate::base::{LoadError, RequestError};
use crate::checkpoint::{AdapterStamp, PeftAdapter};
use crate::device::{AdapterWeights, yield_to_others};
use crate::engine::{Adapter, NewRequest};
use crate::runner::{ModelSpec, PreparedAdapter, UsedAdapter};

/// How long the files of a kept adapter are taken to be the same before they are looked at again.
const MAX_UNCHECKED: Duration = Duration::from_secs(1);

/// The most requests that wait for adapters.
const MAX_QUEUED: usize = 4096;

/// How often an adapter is read whose files change meanwhile.
const MAX_READS: usize = 3;

/// The adapters of a model. Its thread starts with the first request for one, and ends when this is dropped.
pub struct AdapterStore {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// A request's adapter, which may still have to be loaded.
pub struct AdapterLoad {
    job: Arc<Job>,
    /// Behind the job: the thread may wait for room for one that nobody holds any more.
    _notice: Notice,
}

/// Wakes the thread when it is dropped.
struct Notice(Arc<Signal>);

/// An adapter as a request gets it. It stays in memory until the last request with it has ended.
#[derive(Clone, Debug)]
pub struct LoadedAdapter {
    adapter: Adapter,
    /// The name, and the stamps of the files.
    version: Arc<str>,
}

struct Shared {
    folders: AdapterFolders,
    spec: ModelSpec,
    max_rank: usize,
    max_bytes: u64,
    state: Mutex<State>,
    /// A job is done.
    finished: Condvar,
    /// There is a job, or a job or an adapter is not used any more, or the store is closed.
    signal: Arc<Signal>,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Arc<Job>>,
    is_closed: bool,
    /// Whether the thread waits for room.
    is_full: bool,
    /// Used longest ago first.
    kept: Vec<Kept>,
    /// Bytes of those that are kept and of the one that is being loaded.
    num_bytes: u64,
}

struct Job {
    name: String,
    folder: PathBuf,
    outcome: Mutex<Option<Result<LoadedAdapter, RequestError>>>,
}

/// An adapter in memory.
struct Kept {
    name: String,
    stamp: AdapterStamp,
    version: Arc<str>,
    weights: Arc<AdapterWeights>,
    num_bytes: u64,
    /// What the requests with it hold.
    used: Weak<UsedAdapter>,
    /// When its files were compared last with their stamps; `None` if they have been replaced.
    checked: Option<Instant>,
}

impl AdapterStore {
    /// A store for the adapters of a model, up to `max_rank`, which take up to `max_bytes` together.
    pub fn new(folders: AdapterFolders, spec: ModelSpec, max_rank: usize, max_bytes: u64) -> Self {
        Self {
            shared: Arc::new(Shared {
                folders,
                spec,
                max_rank,
                max_bytes,
                state: Mutex::default(),
                finished: Condvar::new(),
                signal: Arc::default(),
            }),
            thread: Mutex::new(None),
        }
    }

    /// The adapter of this name. If it is not at hand, the thread begins to look for it.
    ///
    /// # Errors
    /// No adapter can have this name, or too many requests wait for adapters.
    pub fn load(&self, name: &str) -> Result<AdapterLoad, RequestError> {
        let folder = self.shared.folders.find(name)?;
        let mut state = self.shared.state.lock();
        let kept = match state.is_full {
            true => None,
            false => state.at_hand(name, &self.shared.signal),
        };
        let is_kept = kept.is_some();
        let job = Arc::new(Job {
            name: name.to_owned(),
            folder,
            outcome: Mutex::new(kept.map(Ok)),
        });
        if !is_kept {
            if state.queue.len() >= MAX_QUEUED {
                return Err(RequestError::Invalid(format!(
                    "{MAX_QUEUED} other requests wait for their adapters; try again later"
                )));
            }
            self.start_thread()?;
            state.queue.push_back(Arc::clone(&job));
            drop(state);
            self.shared.signal.notify();
        }
        Ok(AdapterLoad {
            job,
            _notice: Notice(Arc::clone(&self.shared.signal)),
        })
    }

    /// Waits until `is_done` returns true, or for `max_wait`. Looks whenever an adapter has been loaded.
    pub fn wait(&self, is_done: impl Fn() -> bool, max_wait: Duration) {
        let mut state = self.shared.state.lock();
        let finished = &self.shared.finished;
        finished.wait_while_for(&mut state, |_| !is_done(), max_wait);
    }

    /// The most bytes of all adapters in memory.
    pub fn max_bytes(&self) -> u64 {
        self.shared.max_bytes
    }

    fn start_thread(&self) -> Result<(), RequestError> {
        let mut thread = self.thread.lock();
        if thread.is_none() {
            let shared = Arc::clone(&self.shared);
            let builder = thread::Builder::new().name("inflight-adapters".into());
            let started = builder.spawn(move || run(&shared));
            *thread = Some(started.map_err(|error| {
                RequestError::Internal(format!("cannot start the thread for adapters: {error}"))
            })?);
        }
        Ok(())
    }
}

impl Drop for AdapterStore {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.is_closed = true;
        let abandoned = std::mem::take(&mut state.queue);
        drop(state);
        drop(abandoned);
        self.shared.signal.notify();
        if let Some(thread) = self.thread.lock().take()
            && thread.join().is_err()
        {
            log::error!("the thread that loads adapters ended in a panic");
        }
    }
}

impl AdapterLoad {
    /// Whether there is an adapter, or an error.
    pub fn is_done(&self) -> bool {
        self.job.outcome.lock().is_some()
    }

    /// The adapter, once it is loaded.
    ///
    /// # Errors
    /// There is none of this name, its files are damaged or not for this model, or it is too large.
    pub fn poll(&self) -> Option<Result<LoadedAdapter, RequestError>> {
        self.job.outcome.lock().clone()
    }
}

impl Drop for Notice {
    fn drop(&mut self) {
        self.0.notify();
    }
}

impl LoadedAdapter {
    /// Has a request computed with it. Its blocks are shared only with requests with this version of it.
    pub fn apply_to(&self, request: &mut NewRequest) {
        let salt = request.reuse.salt.as_deref().unwrap_or_default();
        request.reuse.salt = Some(format!("\0{}\0{salt}", self.version).into());
        request.adapter = Some(self.adapter.clone());
    }
}

impl State {
    /// An adapter that is kept and was checked a moment ago.
    fn at_hand(&mut self, name: &str, signal: &Arc<Signal>) -> Option<LoadedAdapter> {
        let is_fresh = |checked: Instant| checked.elapsed() < MAX_UNCHECKED;
        let mut kept = self.kept.iter();
        let index =
            kept.rposition(|kept| kept.name == name && kept.checked.is_some_and(is_fresh))?;
        Some(self.take(index, signal))
    }

    /// A kept adapter for a request, as the one that was used last.
    fn take(&mut self, index: usize, signal: &Arc<Signal>) -> LoadedAdapter {
        let mut kept = self.kept.remove(index);
        let used = kept.used.upgrade().unwrap_or_else(|| {
            let signal = Arc::clone(signal);
            Arc::new(UsedAdapter::new(Arc::clone(&kept.weights), move || {
                signal.notify();
            }))
        });
        kept.used = Arc::downgrade(&used);
        let version = Arc::clone(&kept.version);
        self.kept.push(kept);
        LoadedAdapter {
            adapter: Adapter::new(used),
            version,
        }
    }

    /// The adapter of this name with these files, if it is kept. Others of this name have been replaced.
    fn checked(
        &mut self,
        name: &str,
        stamp: &AdapterStamp,
        signal: &Arc<Signal>,
    ) -> Option<LoadedAdapter> {
        let now = Instant::now();
        let mut found = None;
        for (index, kept) in self.kept.iter_mut().enumerate() {
            if kept.name == name {
                let is_same = kept.stamp == *stamp;
                kept.checked = is_same.then_some(now);
                found = found.or(is_same.then_some(index));
            }
        }
        Some(self.take(found?, signal))
    }

    /// Sets bytes aside, and evicts adapters that no request uses, replaced ones first. Returns whether there was room.
    fn reserve(&mut self, num_bytes: u64, max_bytes: u64, evicted: &mut Vec<Kept>) -> bool {
        let is_unused = |kept: &Kept| kept.used.strong_count() == 0;
        while self.num_bytes + num_bytes > max_bytes {
            let unused = |kept: &Kept| is_unused(kept) && kept.checked.is_none();
            let oldest = self.kept.iter().position(unused);
            let Some(oldest) = oldest.or_else(|| self.kept.iter().position(is_unused)) else {
                return false;
            };
            let kept = self.kept.remove(oldest);
            self.num_bytes -= kept.num_bytes;
            evicted.push(kept);
        }
        self.num_bytes += num_bytes;
        true
    }
}

/// Does jobs until the store is closed.
fn run(shared: &Shared) {
    // The threads that compute steps come first.
    yield_to_others();
    loop {
        let seen = shared.signal.num_events();
        let mut state = shared.state.lock();
        if state.is_closed {
            return;
        }
        let Some(job) = state.queue.pop_front() else {
            drop(state);
            shared.signal.wait(seen);
            continue;
        };
        drop(state);
        if Arc::strong_count(&job) == 1 {
            // The request is gone.
            continue;
        }
        if let Some(outcome) = shared.load(&job) {
            let state = shared.state.lock();
            *job.outcome.lock() = Some(outcome);
            shared.finished.notify_all();
            drop(state);
        }
    }
}

impl Shared {
    /// The adapter of a job; `None` if nobody waits for it any more.
    fn load(&self, job: &Arc<Job>) -> Option<Result<LoadedAdapter, RequestError>> {
        for _ in 0..MAX_READS {
            let Some(stamp) = AdapterStamp::of(&job.folder) else {
                return Some(Err(self.folders.unknown(&job.name)));
            };
            let kept = self.state.lock().checked(&job.name, &stamp, &self.signal);
            if let Some(kept) = kept {
                return Some(Ok(kept));
            }
            match self.read(job, stamp) {
                Read::Loaded(loaded) => return Some(Ok(loaded)),
                Read::Failed(error) => return Some(Err(error)),
                Read::Abandoned => return None,
                Read::Changed => {}
            }
        }
        Some(Err(RequestError::Internal(format!(
            "the files of the adapter '{}' change while they are read; put it into a new folder, and rename that",
            job.name
        ))))
    }

    /// Reads an adapter, once there is room for it.
    fn read(&self, job: &Arc<Job>, stamp: AdapterStamp) -> Read {
        let failed = |error: LoadError| {
            RequestError::Invalid(format!(
                "the adapter '{}' cannot be used: {error}",
                job.name
            ))
        };
        let files = match PeftAdapter::open(&job.folder, self.max_rank) {
            Ok(files) => files,
            Err(error) => return Read::Failed(failed(error)),
        };
        let prepared = match PreparedAdapter::new(&files, &self.spec) {
            Ok(prepared) => prepared,
            Err(error) => return Read::Failed(failed(error)),
        };
        let num_bytes = prepared.num_bytes();
        if num_bytes > self.max_bytes {
            return Read::Failed(RequestError::Invalid(format!(
                "the adapter '{}' takes {num_bytes} bytes; lora_cache_host_memory_bytes is {}: raise it in the model's \
                 config.pbtxt",
                job.name, self.max_bytes
            )));
        }
        if !self.wait_for_room(job, num_bytes) {
            return Read::Abandoned;
        }
        let started = Instant::now();
        let loaded = prepared.load();
        let has_changed = AdapterStamp::of(&job.folder).as_ref() != Some(&stamp);
        let mut state = self.state.lock();
        let weights = match loaded {
            Ok(weights) if !has_changed => weights,
            loaded => {
                state.num_bytes -= num_bytes;
                return match loaded {
                    Err(error) if !has_changed => Read::Failed(failed(error)),
                    _ => Read::Changed,
                };
            }
        };
        log::info!(
            "loaded the adapter '{}' of {:.1} MB in {:.3} s",
            job.name,
            num_bytes as f64 / 1e6,
            started.elapsed().as_secs_f64()
        );
        state.kept.push(Kept {
            name: job.name.clone(),
            version: format!("{}\0{stamp}", job.name).into(),
            stamp,
            weights: Arc::new(weights),
            num_bytes,
            used: Weak::new(),
            checked: Some(Instant::now()),
        });
        let last = state.kept.len() - 1;
        Read::Loaded(state.take(last, &self.signal))
    }

    /// Sets bytes aside, once there is room. Returns whether there is; else nobody waits for the job any more.
    fn wait_for_room(&self, job: &Arc<Job>, num_bytes: u64) -> bool {
        let mut evicted = Vec::new();
        loop {
            let seen = self.signal.num_events();
            let mut state = self.state.lock();
            let has_room = state.reserve(num_bytes, self.max_bytes, &mut evicted);
            let is_abandoned = state.is_closed || Arc::strong_count(job) == 1;
            state.is_full = !has_room && !is_abandoned;
            if has_room && is_abandoned {
                state.num_bytes -= num_bytes;
            }
            drop(state);
            // Memory is given back without the lock.
            for kept in evicted.drain(..) {
                log::debug!("the adapter '{}' leaves the memory", kept.name);
            }
            if has_room || is_abandoned {
                return !is_abandoned;
            }
            self.signal.wait(seen);
        }
    }
}

/// What became of reading an adapter.
enum Read {
    Loaded(LoadedAdapter),
    Failed(RequestError),
    /// Its files have changed meanwhile.
    Changed,
    /// Nobody waits for it any more.
    Abandoned,
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;
    use crate::config::Settings;
    use crate::manager::adapters::test_folder::TestFolder;
    use crate::runner::ModelSource;

    const LONG: Duration = Duration::from_secs(60);

    fn fixtures() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
    }

    fn spec() -> ModelSpec {
        let source = ModelSource::open(&fixtures().join("llama3"));
        source.expect("the checkpoint opens").spec().clone()
    }

    /// A store for copies of two adapters, `small` and `large`.
    fn store(dir: &Path, max_bytes: u64) -> AdapterStore {
        for (name, fixture) in [("small", "all-modules"), ("large", "rank-33")] {
            copy(fixture, &dir.join(name));
        }
        let settings = Settings {
            lora_dir: Some(dir.to_owned()),
            ..Settings::default()
        };
        let folders = AdapterFolders::open(&settings, dir, 1).expect("a folder");
        AdapterStore::new(folders.expect("a folder"), spec(), 64, max_bytes)
    }

    fn copy(fixture: &str, to: &Path) {
        fs::create_dir_all(to).expect("written");
        for file in ["adapter_config.json", "adapter_model.safetensors"] {
            let from = fixtures().join("adapters").join(fixture).join(file);
            // A file of its own, with a time of its own.
            fs::write(to.join(file), fs::read(from).expect("a fixture")).expect("written");
        }
    }

    fn num_bytes(fixture: &str) -> u64 {
        let files = PeftAdapter::open(&fixtures().join("adapters").join(fixture), 64);
        let files = files.expect("it opens");
        let prepared = PreparedAdapter::new(&files, &spec());
        prepared.expect("it fits the model").num_bytes()
    }

    fn done(store: &AdapterStore, load: &AdapterLoad) -> Result<LoadedAdapter, RequestError> {
        store.wait(|| load.is_done(), LONG);
        load.poll().expect("it is done")
    }

    fn loaded(store: &AdapterStore, name: &str) -> LoadedAdapter {
        let load = store.load(name).expect("a name");
        done(store, &load).expect("it loads")
    }

    /// Waits until the thread waits for room.
    fn wait_until_full(store: &AdapterStore) {
        let start = Instant::now();
        while !store.shared.state.lock().is_full {
            assert!(start.elapsed() < LONG, "there is room");
            thread::yield_now();
        }
    }

    #[test]
    fn an_adapter_is_loaded_once_while_it_is_kept() {
        let dir = TestFolder::new("kept");
        let store = store(dir.path(), 1 << 30);
        let first = loaded(&store, "small");
        assert_eq!(loaded(&store, "small").adapter, first.adapter);
        let other = loaded(&store, "large");
        assert_ne!(other.adapter, first.adapter);
        assert_ne!(other.version, first.version);
        let weights = Arc::downgrade(&store.shared.state.lock().kept[0].weights);
        drop((first, other));
        assert!(weights.upgrade().is_some(), "kept for later requests");
        assert_eq!(
            store.shared.state.lock().num_bytes,
            num_bytes("all-modules") + num_bytes("rank-33")
        );
    }

    #[test]
    fn a_request_waits_for_room_and_goes_when_the_last_request_with_another_adapter_has_ended() {
        let dir = TestFolder::new("room");
        let store = store(dir.path(), num_bytes("rank-33"));
        let small = loaded(&store, "small");
        let waiting = store.load("large").expect("a name");
        wait_until_full(&store);
        // It is kept, but would hold up the one that waits.
        let again = store.load("small").expect("a name");
        assert!(!waiting.is_done() && !again.is_done());
        drop(small);
        let large = done(&store, &waiting).expect("there is room");
        drop(waiting);
        wait_until_full(&store);
        assert!(!again.is_done());
        drop(large);
        done(&store, &again).expect("there is room");
        assert_eq!(
            store.shared.state.lock().num_bytes,
            num_bytes("all-modules")
        );
    }

    #[test]
    fn a_request_that_is_gone_waits_for_no_room() {
        let dir = TestFolder::new("gone");
        let store = store(dir.path(), num_bytes("rank-33"));
        let small = loaded(&store, "small");
        let large = store.load("large").expect("a name");
        wait_until_full(&store);
        let again = store.load("small").expect("a name");
        drop(large);
        let again = done(&store, &again).expect("it is kept");
        assert_eq!(again.adapter, small.adapter);
        let waiting = store.load("large").expect("a name");
        wait_until_full(&store);
        // The thread ends all the same.
        drop(store);
        assert!(!waiting.is_done());
    }

    #[test]
    fn an_adapter_whose_files_change_is_another_version() {
        let dir = TestFolder::new("version");
        let store = store(dir.path(), num_bytes("all-modules") + num_bytes("rank-33"));
        let old = loaded(&store, "small");
        copy("rank-33", &dir.path().join("small"));
        // As if the last look at the files were long ago.
        store.shared.state.lock().kept[0].checked = None;
        let new = loaded(&store, "small");
        assert_ne!(new.adapter, old.adapter);
        assert_ne!(new.version, old.version);
        assert_eq!(loaded(&store, "small").adapter, new.adapter);
        let weights = Arc::downgrade(&store.shared.state.lock().kept[0].weights);
        drop((old, new));
        // The old version goes first.
        loaded(&store, "large");
        assert!(weights.upgrade().is_none());
    }

    #[test]
    fn what_is_not_there_or_never_fits_is_refused() {
        let dir = TestFolder::new("refused");
        let store = store(dir.path(), num_bytes("rank-33") - 1);
        for (name, words) in [
            ("nobody", &["'nobody' is not known"][..]),
            (
                "large",
                &["'large' takes", "lora_cache_host_memory_bytes is"],
            ),
        ] {
            let load = store.load(name).expect("a name");
            let error = done(&store, &load).expect_err("refused").to_string();
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
        }
        assert_eq!(store.shared.state.lock().num_bytes, 0);
        loaded(&store, "small");
    }
}
