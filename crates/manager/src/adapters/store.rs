//! Loads adapters on threads of its own, so that no step waits for a file, and keeps them for later requests.
//!
//! ```text
//! request names a --> kept, and looked at a moment ago: at once
//!                 --> otherwise a job:
//!                       put worker      are the files those that were loaded? if not, how many pages do they need?
//!                       keeper          gives pages to jobs, in the order in which they ask for them
//!                       ensure worker   reads the weights into these pages
//! ```
//!
//! An adapter that a request brings takes the same way, without files: it is kept under its number until others need
//! its place, and then a request has to bring it again.
//!
//! A job that finds no room waits until a request has ended, and all jobs that ask for room after it wait, too: so a
//! stream of requests for adapters that are kept cannot hold up one for another adapter forever. The keeper reads no
//! file, and a file that is slow to read holds up one worker.

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::cache::{AdapterCache, AdapterCacheUsage};
use super::folders::AdapterFolders;
use super::loaded::LoadedAdapter;
use super::pages::AdapterPageLimits;
use super::signal::Signal;
use super::upload::{AdapterUpload, UploadHeader, UploadMemory, UploadWriter};
use super::workers::Workers;
use inflight_base::{LoadError, RequestError, catch_panic};
use inflight_checkpoint::{AdapterFiles, AdapterStamp};
use inflight_collective::Grid;
use inflight_config::Settings;
use inflight_device::Tiling;
use inflight_runner::{AdapterParts, ModelSource, ModelSpec, PreparedAdapter};
use inflight_threads::yield_to_others;

/// The most requests that wait for adapters.
const MAX_WAITING: usize = 4096;

/// How often an adapter is read whose files change meanwhile.
const MAX_READS: usize = 3;

/// The limits of a store.
#[derive(Clone, Copy, Debug)]
pub struct AdapterLimits {
    /// The largest rank.
    pub max_rank: usize,
    /// The memory.
    pub pages: AdapterPageLimits,
    /// The most threads that look at files.
    pub num_put_workers: usize,
    /// The most threads that read weights.
    pub num_ensure_workers: usize,
    /// The ranks that compute with them.
    pub grid: Grid,
    /// How their CPUs cut sums.
    pub tiling: Tiling,
}

impl AdapterLimits {
    /// The limits that a model's settings name.
    pub fn new(settings: &Settings, spec: &ModelSpec) -> Self {
        Self {
            max_rank: settings.lora_cache_max_adapter_size as usize,
            pages: AdapterPageLimits::new(settings, spec),
            num_put_workers: settings.lora_cache_num_put_workers as usize,
            num_ensure_workers: settings.lora_cache_num_ensure_workers as usize,
            grid: Grid {
                num_stages: settings.pipeline_parallel_size as usize,
                ranks_per_stage: settings.tensor_parallel_size as usize,
            },
            tiling: Tiling::of_cpus(settings.deterministic),
        }
    }
}

/// The adapters of a model. Its threads start with the first requests for adapters, and end when this is dropped.
pub struct AdapterStore {
    shared: Arc<Shared>,
    keeper: Mutex<Option<JoinHandle<()>>>,
}

/// A request's adapter, which may still have to be loaded.
pub struct AdapterLoad {
    job: Arc<Job>,
    shared: Arc<Shared>,
}

struct Shared {
    folders: AdapterFolders,
    source: Arc<ModelSource>,
    limits: AdapterLimits,
    /// How the devices of instances cut sums, and so adapters.
    tiling: OnceLock<Tiling>,
    upload_memory: Arc<UploadMemory>,
    state: Mutex<State>,
    /// A job is done.
    finished: Condvar,
    /// A job asks for pages, or an adapter or a job is not used any more, or the store is closed.
    signal: Arc<Signal>,
    put: Workers,
    ensure: Workers,
    /// Requests that wait.
    num_waiting: AtomicUsize,
}

struct State {
    cache: AdapterCache,
    /// Jobs that are not done, by the name of the adapter; the latest of those that bring it.
    jobs: BTreeMap<String, Arc<Job>>,
    /// Jobs that wait for pages, in order.
    pending: VecDeque<Measured>,
    /// Adapters that had been loaded and evicted when [`AdapterStore::take_counts`] was called last.
    counted: (u64, u64),
    is_closed: bool,
}

/// An adapter that is looked for, or loaded.
struct Job {
    name: String,
    origin: Origin,
    /// Requests that wait for it.
    num_loads: AtomicUsize,
    outcome: Mutex<Option<Result<LoadedAdapter, RequestError>>>,
}

/// Where the adapter of a job is.
enum Origin {
    Folder(PathBuf),
    Upload(AdapterUpload),
    /// In memory, which it may have to leave for those that wait for longer. It has this stamp and these pages.
    Kept(AdapterStamp, u32),
}

/// A job whose files have been looked at.
struct Measured {
    job: Arc<Job>,
    stamp: AdapterStamp,
    num_pages: u32,
    /// How often its weights have been read.
    num_reads: usize,
}

impl AdapterStore {
    /// A store for the adapters of a model.
    pub fn new(folders: AdapterFolders, source: Arc<ModelSource>, limits: AdapterLimits) -> Self {
        Self {
            shared: Arc::new(Shared {
                folders,
                source,
                limits,
                tiling: OnceLock::new(),
                upload_memory: UploadMemory::new(limits.pages.num_bytes()),
                state: Mutex::new(State {
                    cache: AdapterCache::new(limits.pages.num_pages),
                    jobs: BTreeMap::new(),
                    pending: VecDeque::new(),
                    counted: (0, 0),
                    is_closed: false,
                }),
                finished: Condvar::new(),
                signal: Arc::default(),
                put: Workers::new("inflight-put", limits.num_put_workers),
                ensure: Workers::new("inflight-ensure", limits.num_ensure_workers),
                num_waiting: AtomicUsize::new(0),
            }),
            keeper: Mutex::new(None),
        }
    }

    /// Has adapters be cut for ranks on GPUs, or on CPUs, before any is loaded.
    ///
    /// # Errors
    /// They are cut for others.
    pub fn cut_for(&self, is_on_gpus: bool) -> Result<(), LoadError> {
        let AdapterLimits { grid, tiling, .. } = self.shared.limits;
        let own = if is_on_gpus { Tiling::Never } else { tiling };
        let known = *self.shared.tiling.get_or_init(|| own);
        let is_never_cut = grid.num_ranks() == 1 && tiling != Tiling::Always;
        if known == own || is_never_cut {
            return Ok(());
        }
        Err(LoadError::Config {
            problem: "the model has adapters, which instances on CPUs and on GPUs cut differently for several ranks and with \
                      deterministic: true"
                .to_owned(),
            remedy: "write one kind in instance_group, or two models".to_owned(),
        })
    }

    /// The adapter of this name. If it is not at hand, a thread begins to look for it.
    ///
    /// # Errors
    /// No adapter can have this name, or too many requests wait for adapters.
    pub fn load(&self, name: &str) -> Result<AdapterLoad, RequestError> {
        let shared = &self.shared;
        self.start_keeper()?;
        let mut state = shared.state.lock();
        // A request that comes after one that brings an adapter means that one.
        let known = state.jobs.get(name);
        let is_arriving = known.is_some_and(|job| matches!(job.origin, Origin::Upload(_)));
        let kept = match state.pending.is_empty() && !is_arriving {
            true => state.cache.at_hand(name, &shared.signal),
            false => None,
        };
        let job = match state.jobs.get(name) {
            Some(job) if kept.is_none() => Arc::clone(job),
            _ => {
                let origin = match state.cache.uploaded(name) {
                    Some((stamp, num_pages)) => Origin::Kept(stamp, num_pages),
                    None => Origin::Folder(shared.folders.find(name)?),
                };
                Arc::new(Job::new(name, origin, kept))
            }
        };
        let load = AdapterLoad::new(&job, shared);
        if load.is_done() {
            return Ok(load);
        }
        shared.check_num_waiting()?;
        if state
            .jobs
            .insert(name.to_owned(), Arc::clone(&job))
            .is_none()
        {
            drop(state);
            shared.look_for(job, 0);
        }
        Ok(load)
    }

    /// Sets memory aside for an adapter that a request brings.
    ///
    /// # Errors
    /// It is too large, or others that arrive leave no room for it now.
    pub fn receive(
        &self,
        header: UploadHeader,
    ) -> Result<(AdapterUpload, UploadWriter), RequestError> {
        self.shared.upload_memory.receive(header)
    }

    /// The adapter that a request brings under this name. Later requests with the name get it, too.
    ///
    /// # Errors
    /// Too many requests wait for adapters.
    pub fn load_upload(
        &self,
        name: &str,
        upload: AdapterUpload,
    ) -> Result<AdapterLoad, RequestError> {
        let shared = &self.shared;
        self.start_keeper()?;
        let job = Arc::new(Job::new(name, Origin::Upload(upload.clone()), None));
        let load = AdapterLoad::new(&job, shared);
        shared.check_num_waiting()?;
        let mut state = shared.state.lock();
        state.jobs.insert(name.to_owned(), Arc::clone(&job));
        drop(state);
        let shared = Arc::clone(shared);
        upload.when_known(move || shared.look_for(job, 0));
        Ok(load)
    }

    /// Waits until `is_done` returns true, or for `max_wait`. Looks whenever an adapter has been loaded.
    pub fn wait(&self, is_done: impl Fn() -> bool, max_wait: Duration) {
        let mut state = self.shared.state.lock();
        let finished = &self.shared.finished;
        finished.wait_while_for(&mut state, |_| !is_done(), max_wait);
    }

    /// The memory for adapters.
    pub fn pages(&self) -> &AdapterPageLimits {
        &self.shared.limits.pages
    }

    /// How full the memory is.
    pub fn usage(&self) -> AdapterCacheUsage {
        AdapterCacheUsage {
            num_loading: self.shared.num_waiting.load(Ordering::Relaxed) as u32,
            ..self.shared.state.lock().cache.usage()
        }
    }

    /// How many adapters have been loaded, and how many evicted, since this was called last.
    pub fn take_counts(&self) -> (u64, u64) {
        let mut state = self.shared.state.lock();
        let AdapterCacheUsage {
            num_loaded,
            num_evicted,
            ..
        } = state.cache.usage();
        let (loaded_before, evicted_before) =
            std::mem::replace(&mut state.counted, (num_loaded, num_evicted));
        (num_loaded - loaded_before, num_evicted - evicted_before)
    }

    fn start_keeper(&self) -> Result<(), RequestError> {
        let mut keeper = self.keeper.lock();
        if keeper.is_none() {
            let shared = Arc::clone(&self.shared);
            let builder = thread::Builder::new().name("inflight-adapters".into());
            let started = builder.spawn(move || shared.give_pages());
            *keeper = Some(started.map_err(no_thread)?);
        }
        Ok(())
    }
}

impl Drop for AdapterStore {
    fn drop(&mut self) {
        let shared = &self.shared;
        let mut state = shared.state.lock();
        state.is_closed = true;
        let abandoned = std::mem::take(&mut state.pending);
        drop(state);
        drop(abandoned);
        shared.signal.notify();
        if let Some(keeper) = self.keeper.lock().take()
            && keeper.join().is_err()
        {
            log::error!("the thread that gives pages to adapters ended in a panic");
        }
        shared.put.close();
        shared.ensure.close();
    }
}

impl AdapterLoad {
    fn new(job: &Arc<Job>, shared: &Arc<Shared>) -> Self {
        job.num_loads.fetch_add(1, Ordering::Relaxed);
        shared.num_waiting.fetch_add(1, Ordering::Relaxed);
        Self {
            job: Arc::clone(job),
            shared: Arc::clone(shared),
        }
    }

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

impl Drop for AdapterLoad {
    fn drop(&mut self) {
        self.shared.num_waiting.fetch_sub(1, Ordering::Relaxed);
        self.job.num_loads.fetch_sub(1, Ordering::Relaxed);
        // Its pages may be for the next.
        self.shared.signal.notify();
    }
}

impl Shared {
    fn check_num_waiting(&self) -> Result<(), RequestError> {
        match self.num_waiting.load(Ordering::Relaxed) > MAX_WAITING {
            false => Ok(()),
            true => Err(RequestError::Busy(format!(
                "{MAX_WAITING} requests wait for their adapters, which the memory has {} pages for: send it again later, or \
                 raise lora_cache_host_memory_bytes in the model's config.pbtxt",
                self.limits.pages.num_pages
            ))),
        }
    }

    /// Has a put worker look for the adapter of a job, whose weights have been read `num_reads` times.
    fn look_for(self: &Arc<Self>, job: Arc<Job>, num_reads: usize) {
        let shared = Arc::clone(self);
        let task_job = Arc::clone(&job);
        let task = move || shared.put(task_job, num_reads);
        if let Err(error) = self.put.push(task) {
            self.finish(&job, Err(no_thread(error)));
        }
    }

    /// What a put worker does.
    fn put(&self, job: Arc<Job>, num_reads: usize) {
        if self.is_abandoned(&job) {
            return;
        }
        let stamp = match self.stamp(&job) {
            Ok(stamp) => stamp,
            Err(error) => return self.finish(&job, Err(error)),
        };
        let mut state = self.state.lock();
        if state.pending.is_empty()
            && let Some(kept) = self.kept(&mut state, &job, &stamp)
        {
            return self.finish_in(&mut state, &job, Ok(kept));
        }
        drop(state);
        match without_panic(|| self.num_pages(&job)) {
            Ok(num_pages) => {
                self.state.lock().pending.push_back(Measured {
                    job,
                    stamp,
                    num_pages,
                    num_reads,
                });
                self.signal.notify();
            }
            Err(error) => self.finish(&job, Err(error)),
        }
    }

    /// The adapter of a job, if its version is in memory.
    fn kept(&self, state: &mut State, job: &Job, stamp: &AdapterStamp) -> Option<LoadedAdapter> {
        match &job.origin {
            Origin::Kept(..) => state.cache.at_hand(&job.name, &self.signal),
            _ => state.cache.checked(&job.name, stamp, &self.signal),
        }
    }

    /// The version of the adapter of a job.
    fn stamp(&self, job: &Job) -> Result<AdapterStamp, RequestError> {
        match &job.origin {
            Origin::Folder(folder) => {
                AdapterStamp::of(folder).ok_or_else(|| match AdapterStamp::problem(folder) {
                    Some(problem) => {
                        RequestError::Invalid(format!("the adapter '{}': {problem}", job.name))
                    }
                    None => self.folders.unknown(&job.name),
                })
            }
            Origin::Upload(upload) => {
                let arrays = upload.arrays().ok_or_else(|| lost(&job.name))?;
                Ok(AdapterStamp::of_arrays(&arrays))
            }
            Origin::Kept(stamp, _) => Ok(stamp.clone()),
        }
    }

    /// The pages that the adapter of a job needs. The files are not kept open, for there may be many.
    fn num_pages(&self, job: &Job) -> Result<u32, RequestError> {
        if let Origin::Kept(_, num_pages) = job.origin {
            return Ok(num_pages);
        }
        let files = self.open(job)?;
        let prepared = self.prepare(job, &files)?;
        let num_bytes = prepared.num_bytes();
        let pages = &self.limits.pages;
        let num_pages = pages.pages_of(num_bytes);
        let (max, remedy) = match num_pages > pages.num_pages {
            true => (
                pages.num_pages,
                "raise lora_cache_host_memory_bytes in the model's config.pbtxt",
            ),
            false => (
                pages.num_running_pages,
                "raise lora_cache_num_device_module_layer in the model's config.pbtxt, or leave it out",
            ),
        };
        match num_pages > max {
            false => Ok(num_pages),
            true => Err(RequestError::Invalid(format!(
                "the adapter '{}' takes {num_bytes} bytes; in pages of {} bytes that is {num_pages}, and there are {max}: \
                 {remedy}",
                job.name, pages.page_bytes
            ))),
        }
    }

    /// What the keeper does until the store is closed: jobs get pages in the order in which they have asked for them.
    fn give_pages(self: &Arc<Self>) {
        yield_to_others();
        loop {
            let seen = self.signal.num_events();
            let (mut evicted, mut granted) = (Vec::new(), Vec::new());
            let mut state = self.state.lock();
            if state.is_closed {
                return;
            }
            state.forget_abandoned();
            while let Some(first) = state.pending.pop_front() {
                let Measured { job, stamp, .. } = &first;
                if let Some(kept) = self.kept(&mut state, job, stamp) {
                    self.finish_in(&mut state, job, Ok(kept));
                } else if matches!(job.origin, Origin::Kept(..)) {
                    self.finish_in(&mut state, job, Err(self.folders.unknown(&job.name)));
                } else if state.cache.reserve(first.num_pages, &mut evicted) {
                    granted.push(first);
                } else {
                    state.pending.push_front(first);
                    break;
                }
            }
            drop(state);
            // Memory is given back without the lock, and before it is taken again.
            for kept in evicted {
                log::debug!("the adapter '{}' leaves the memory", kept.name);
            }
            for measured in granted {
                self.read(measured);
            }
            self.signal.wait(seen);
        }
    }

    /// Has an ensure worker read the weights of a job that has pages.
    fn read(self: &Arc<Self>, measured: Measured) {
        let shared = Arc::clone(self);
        let (job, num_pages) = (Arc::clone(&measured.job), measured.num_pages);
        if let Err(error) = self.ensure.push(move || shared.ensure(measured)) {
            self.state.lock().cache.give_back(num_pages);
            self.finish(&job, Err(no_thread(error)));
        }
    }

    /// What an ensure worker does.
    fn ensure(self: &Arc<Self>, measured: Measured) {
        let Measured {
            job,
            stamp,
            num_pages,
            num_reads,
        } = measured;
        if self.is_abandoned(&job) {
            self.state.lock().cache.give_back(num_pages);
            return self.signal.notify();
        }
        let started = Instant::now();
        let weights = without_panic(|| self.weights(&job, num_pages));
        let has_changed = match &job.origin {
            Origin::Folder(folder) => AdapterStamp::of(folder).as_ref() != Some(&stamp),
            Origin::Upload(_) | Origin::Kept(..) => false,
        };
        let mut state = self.state.lock();
        if matches!(job.origin, Origin::Upload(_))
            && let Some(kept) = self.kept(&mut state, &job, &stamp)
        {
            // Another request has brought the same meanwhile.
            state.cache.give_back(num_pages);
            self.finish_in(&mut state, &job, Ok(kept));
            return self.signal.notify();
        }
        let outcome = match weights {
            Ok(Some(weights)) if !has_changed => {
                log::info!(
                    "loaded the adapter '{}' of {num_pages} pages in {:.3} s",
                    job.name,
                    started.elapsed().as_secs_f64()
                );
                let (name, cache) = (job.name.clone(), &mut state.cache);
                return {
                    let loaded = cache.insert(name, stamp, weights, num_pages, &self.signal);
                    self.finish_in(&mut state, &job, Ok(loaded));
                };
            }
            Err(error) if !has_changed => Err(error),
            _ if num_reads + 1 < MAX_READS => Ok(()),
            _ => Err(RequestError::Internal(format!(
                "the files of the adapter '{}' change while they are read; put it into a new folder, and rename that",
                job.name
            ))),
        };
        state.cache.give_back(num_pages);
        if let Err(error) = outcome {
            self.finish_in(&mut state, &job, Err(error));
        } else {
            drop(state);
            self.look_for(job, num_reads + 1);
        }
        self.signal.notify();
    }

    /// The weights of the adapter of a job; `None` if it needs more pages than it has now.
    fn weights(&self, job: &Job, num_pages: u32) -> Result<Option<AdapterParts>, RequestError> {
        let files = self.open(job)?;
        let prepared = self.prepare(job, &files)?;
        if self.limits.pages.pages_of(prepared.num_bytes()) > num_pages {
            return Ok(None);
        }
        let loaded = prepared.load();
        let parts = loaded.and_then(|it| {
            let tiling = self.tiling.get().copied();
            let tiling = tiling.unwrap_or(self.limits.tiling);
            self.source.adapter_parts(it, self.limits.grid, tiling)
        });
        parts.map(Some).map_err(|error| unusable(job, &error))
    }

    fn open(&self, job: &Job) -> Result<AdapterFiles, RequestError> {
        let max_rank = self.limits.max_rank;
        let files = match &job.origin {
            Origin::Folder(folder) => AdapterFiles::open(folder, max_rank),
            Origin::Upload(upload) => {
                let arrays = upload.arrays().ok_or_else(|| lost(&job.name))?;
                AdapterFiles::of_arrays(&arrays, max_rank)
            }
            Origin::Kept(..) => return Err(self.folders.unknown(&job.name)),
        };
        files.map_err(|error| unusable(job, &error))
    }

    fn prepare<'a>(
        &'a self,
        job: &Job,
        files: &'a AdapterFiles,
    ) -> Result<PreparedAdapter<'a>, RequestError> {
        let prepared = PreparedAdapter::new(files, &self.source);
        prepared.map_err(|error| unusable(job, &error))
    }

    /// Whether nobody waits for a job any more, which is forgotten then.
    fn is_abandoned(&self, job: &Arc<Job>) -> bool {
        let mut state = self.state.lock();
        let is_abandoned = state.is_closed || job.is_abandoned();
        if is_abandoned {
            state.forget(job);
        }
        is_abandoned
    }

    fn finish(&self, job: &Arc<Job>, outcome: Result<LoadedAdapter, RequestError>) {
        self.finish_in(&mut self.state.lock(), job, outcome);
    }

    fn finish_in(
        &self,
        state: &mut State,
        job: &Arc<Job>,
        outcome: Result<LoadedAdapter, RequestError>,
    ) {
        state.forget(job);
        *job.outcome.lock() = Some(outcome);
        self.finished.notify_all();
    }
}

impl State {
    /// Forgets a job, so that the next request for its adapter begins another one.
    fn forget(&mut self, job: &Arc<Job>) {
        let known = self.jobs.get(&job.name);
        if known.is_some_and(|known| Arc::ptr_eq(known, job)) {
            self.jobs.remove(&job.name);
        }
    }

    /// Forgets the jobs among those that wait for pages that nobody waits for.
    fn forget_abandoned(&mut self) {
        let pending = std::mem::take(&mut self.pending);
        let (abandoned, pending): (VecDeque<_>, _) = pending
            .into_iter()
            .partition(|measured| measured.job.is_abandoned());
        self.pending = pending;
        abandoned.iter().for_each(|it| self.forget(&it.job));
    }
}

impl Job {
    /// A job that is done if the adapter is in memory.
    fn new(name: &str, origin: Origin, kept: Option<LoadedAdapter>) -> Self {
        Self {
            name: name.to_owned(),
            origin,
            num_loads: AtomicUsize::new(0),
            outcome: Mutex::new(kept.map(Ok)),
        }
    }

    fn is_abandoned(&self) -> bool {
        self.num_loads.load(Ordering::Relaxed) == 0
    }
}

/// What `read` returns; an error if it panics.
fn without_panic<T>(read: impl FnOnce() -> Result<T, RequestError>) -> Result<T, RequestError> {
    catch_panic(read).unwrap_or_else(|panic| {
        Err(RequestError::Internal(format!(
            "an adapter could not be read: {panic}"
        )))
    })
}

/// The error of the requests that wait for an adapter whose request has ended before all of it was there.
fn lost(name: &str) -> RequestError {
    RequestError::Invalid(format!(
        "the request that was to bring the adapter '{name}' has ended before all of it had arrived: send lora_weights \
         and lora_config again"
    ))
}

/// The error of the requests that wait for an adapter. The log has all of it; clients are not told where its files are.
fn unusable(job: &Job, error: &LoadError) -> RequestError {
    let mut shown = error.for_client();
    if let Origin::Folder(folder) = &job.origin {
        log::warn!("the adapter '{}' cannot be used: {error}", job.name);
        let folder = folder.to_string_lossy();
        shown = shown
            .replace(&format!("{folder}/"), "")
            .replace(&*folder, &job.name);
    }
    RequestError::Invalid(format!(
        "the adapter '{}' cannot be used: {shown}",
        job.name
    ))
}

fn no_thread(error: std::io::Error) -> RequestError {
    RequestError::Internal(format!("cannot start a thread for adapters: {error}"))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;
    use crate::adapters::test_folder::TestFolder;
    use inflight_numbers::Dtype;

    const LONG: Duration = Duration::from_secs(60);

    fn fixtures() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures")
    }

    fn source() -> Arc<ModelSource> {
        let source = ModelSource::open(&fixtures().join("llama3"));
        Arc::new(source.expect("the checkpoint opens"))
    }

    /// Pages of a byte each.
    fn limits(num_pages: u64) -> AdapterLimits {
        let num_pages = u32::try_from(num_pages).expect("few");
        AdapterLimits {
            max_rank: 64,
            pages: AdapterPageLimits {
                page_bytes: 1,
                num_pages,
                num_running_pages: num_pages,
            },
            num_put_workers: 2,
            num_ensure_workers: 2,
            grid: 1.into(),
            tiling: Tiling::OfRanks,
        }
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
        let folders = AdapterFolders::open(&settings, dir, 1, true).expect("a folder");
        AdapterStore::new(folders.expect("a folder"), source(), limits(max_bytes))
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
        let files = AdapterFiles::open(&fixtures().join("adapters").join(fixture), 64);
        let files = files.expect("it opens");
        let source = source();
        let prepared = PreparedAdapter::new(&files, &source);
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

    /// Waits until so many jobs wait for room.
    fn wait_until_pending(store: &AdapterStore, num_jobs: usize) {
        let start = Instant::now();
        while store.shared.state.lock().pending.len() != num_jobs {
            assert!(start.elapsed() < LONG, "there is room");
            thread::yield_now();
        }
    }

    fn used_pages(store: &AdapterStore) -> u64 {
        store.usage().num_used.into()
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
        let weights = Arc::downgrade(&store.shared.state.lock().cache.kept()[0].parts);
        drop((first, other));
        assert!(weights.upgrade().is_some(), "kept for later requests");
        assert_eq!(
            store.usage(),
            AdapterCacheUsage {
                num_pages: 1 << 30,
                num_used: (num_bytes("all-modules") + num_bytes("rank-33")) as u32,
                num_kept: 2,
                num_loading: 0,
                num_loaded: 2,
                num_evicted: 0,
            }
        );
        assert_eq!(store.take_counts(), (2, 0));
        assert_eq!(store.take_counts(), (0, 0));
    }

    #[test]
    fn requests_that_come_while_an_adapter_is_loaded_share_it() {
        let dir = TestFolder::new("shared");
        let store = store(dir.path(), 1 << 30);
        let loads: Vec<_> = (0..50)
            .map(|n| store.load(["small", "large"][n % 2]).expect("a name"))
            .collect();
        let loaded: Vec<_> = loads
            .iter()
            .map(|load| done(&store, load).expect("it loads").adapter)
            .collect();
        for pair in loaded.chunks(2) {
            assert_eq!(pair, &loaded[..2]);
        }
        assert_eq!(store.usage().num_loaded, 2);
        assert!(store.shared.state.lock().jobs.is_empty());
    }

    #[test]
    fn a_request_waits_for_room_and_goes_when_the_last_request_with_another_adapter_has_ended() {
        let dir = TestFolder::new("room");
        let store = store(dir.path(), num_bytes("rank-33"));
        let small = loaded(&store, "small");
        let waiting = store.load("large").expect("a name");
        wait_until_pending(&store, 1);
        assert_eq!(store.usage().num_loading, 1);
        // It is kept, but would hold up the one that waits.
        let again = store.load("small").expect("a name");
        wait_until_pending(&store, 2);
        assert!(!waiting.is_done() && !again.is_done());
        drop(small);
        let large = done(&store, &waiting).expect("there is room");
        drop(waiting);
        wait_until_pending(&store, 1);
        assert!(!again.is_done());
        drop(large);
        done(&store, &again).expect("there is room");
        assert_eq!(used_pages(&store), num_bytes("all-modules"));
        assert_eq!(store.usage().num_evicted, 2);
    }

    #[test]
    fn a_request_that_is_gone_waits_for_no_room() {
        let dir = TestFolder::new("gone");
        let store = store(dir.path(), num_bytes("rank-33"));
        let small = loaded(&store, "small");
        let large = store.load("large").expect("a name");
        wait_until_pending(&store, 1);
        let load = store.load("small").expect("a name");
        drop(large);
        let again = done(&store, &load).expect("it is kept");
        drop(load);
        assert_eq!(again.adapter, small.adapter);
        let waiting = store.load("large").expect("a name");
        wait_until_pending(&store, 1);
        // The threads end all the same, and nothing is left of the store but what the request holds.
        let shared = Arc::downgrade(&store.shared);
        drop(store);
        assert!(!waiting.is_done());
        drop(waiting);
        assert!(shared.upgrade().is_none(), "a thread is left");
    }

    #[test]
    fn an_adapter_whose_files_change_is_another_version() {
        let dir = TestFolder::new("version");
        let store = store(dir.path(), num_bytes("all-modules") + num_bytes("rank-33"));
        let old = loaded(&store, "small");
        copy("rank-33", &dir.path().join("small"));
        store.shared.state.lock().cache.kept()[0].forget_check();
        let new = loaded(&store, "small");
        assert_ne!(new.adapter, old.adapter);
        assert_ne!(new.version, old.version);
        assert_eq!(loaded(&store, "small").adapter, new.adapter);
        let weights = Arc::downgrade(&store.shared.state.lock().cache.kept()[0].parts);
        drop((old, new));
        // The old version goes first.
        loaded(&store, "large");
        assert!(weights.upgrade().is_none());
    }

    #[test]
    fn what_is_not_there_or_never_fits_is_refused() {
        let dir = TestFolder::new("refused");
        let store = store(dir.path(), num_bytes("rank-33") - 1);
        let pages = format!("pages of 1 bytes that is {}", num_bytes("rank-33"));
        for (name, words) in [
            ("nobody", &["'nobody' is not known"][..]),
            (
                "large",
                &["'large' takes", &pages, "lora_cache_host_memory_bytes"],
            ),
        ] {
            let load = store.load(name).expect("a name");
            let error = done(&store, &load).expect_err("refused").to_string();
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
        }
        assert_eq!(used_pages(&store), 0);
        loaded(&store, "small");
    }

    #[test]
    fn what_could_never_run_is_refused() {
        let dir = TestFolder::new("running");
        let mut store = store(dir.path(), 1 << 30);
        let shared = Arc::get_mut(&mut store.shared).expect("no thread yet");
        shared.limits.pages.num_running_pages = num_bytes("rank-33") as u32 - 1;
        let load = store.load("large").expect("a name");
        let error = done(&store, &load).expect_err("refused").to_string();
        assert!(
            error.contains("lora_cache_num_device_module_layer"),
            "{error}"
        );
        loaded(&store, "small");
    }

    #[test]
    fn a_file_that_is_no_file_is_refused_at_once() {
        let dir = TestFolder::new("pipe");
        let store = store(dir.path(), 1 << 30);
        let pipe = dir.path().join("large/adapter_model.safetensors");
        fs::remove_file(&pipe).expect("a file");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status();
        assert!(made.expect("mkfifo runs").success());
        let load = store.load("large").expect("a name");
        let error = done(&store, &load).expect_err("refused").to_string();
        assert!(error.contains("is not a regular file"), "{error}");
    }

    /// An adapter of one module, with this value everywhere.
    fn header(value: f32) -> (UploadHeader, Vec<u8>) {
        let header = UploadHeader {
            config: vec![6, 0, 2],
            config_shape: vec![1, 3],
            weights_shape: vec![1, 2048],
            dtype: Dtype::F32,
        };
        (header, value.to_le_bytes().repeat(2048))
    }

    fn begin(store: &AdapterStore, name: &str, value: f32) -> (AdapterLoad, UploadWriter) {
        let (upload, writer) = store.receive(header(value).0).expect("room");
        (store.load_upload(name, upload).expect("a thread"), writer)
    }

    fn upload(store: &AdapterStore, name: &str, value: f32) -> LoadedAdapter {
        let (load, mut writer) = begin(store, name, value);
        assert!(writer.write(&header(value).1));
        done(store, &load).expect("it loads")
    }

    fn refusal(store: &AdapterStore, name: &str) -> String {
        let load = store.load(name).and_then(|load| done(store, &load));
        load.expect_err("refused").to_string()
    }

    #[test]
    fn what_a_request_brings_is_kept_under_its_number() {
        let dir = TestFolder::new("upload");
        let store = store(dir.path(), 1 << 30);
        assert!(refusal(&store, "7").contains("no request has brought it"));
        let first = upload(&store, "7", 0.5);
        assert_eq!(loaded(&store, "7").adapter, first.adapter);
        assert_eq!(upload(&store, "7", 0.5).adapter, first.adapter, "the same");
        assert_eq!(store.usage().num_loaded, 1);
        let second = upload(&store, "7", 0.25);
        assert_ne!(second.version, first.version);
        assert_eq!(loaded(&store, "7").adapter, second.adapter);
        // The first version is still in memory, and the current one again once it is brought again.
        assert_eq!(upload(&store, "7", 0.5).adapter, first.adapter);
        assert_eq!(loaded(&store, "7").adapter, first.adapter);
        assert_eq!(store.usage().num_loaded, 2);
    }

    #[test]
    fn requests_that_come_after_the_one_that_brings_an_adapter_wait_for_it() {
        let dir = TestFolder::new("arriving");
        let store = store(dir.path(), 1 << 30);
        let old = upload(&store, "7", 0.5);
        let (bringing, mut writer) = begin(&store, "7", 0.25);
        let waiting = store.load("7").expect("a name");
        let bytes = header(0.25).1;
        assert!(!writer.write(&bytes[..100]) && !waiting.is_done());
        assert!(writer.write(&bytes[100..]));
        let new = done(&store, &waiting).expect("it loads");
        assert_eq!(
            done(&store, &bringing).expect("it loads").adapter,
            new.adapter
        );
        assert_ne!(new.adapter, old.adapter);

        let (_bringing, writer) = begin(&store, "7", 1.0);
        let waiting = store.load("7").expect("a name");
        drop(writer);
        let error = done(&store, &waiting)
            .expect_err("it never comes")
            .to_string();
        assert!(error.contains("'7' has ended before all"), "{error}");
        assert_eq!(loaded(&store, "7").adapter, new.adapter);
        assert!(store.shared.state.lock().jobs.is_empty());
    }

    #[test]
    fn what_is_damaged_replaces_nothing() {
        let dir = TestFolder::new("damaged");
        let store = store(dir.path(), 1 << 30);
        let good = upload(&store, "7", 0.5);
        for value in [f32::NAN, f32::INFINITY] {
            let (load, mut writer) = begin(&store, "7", value);
            assert!(writer.write(&header(value).1));
            let error = done(&store, &load).expect_err("not finite").to_string();
            assert!(error.contains("row 0, mlp_4h_to_h of layer 0"), "{error}");
        }
        assert_eq!(loaded(&store, "7").adapter, good.adapter);
        assert_eq!(used_pages(&store), u64::from(good.adapter.num_pages()));
    }

    #[test]
    fn what_has_made_room_for_others_has_to_be_brought_again() {
        let dir = TestFolder::new("evicted");
        let store = store(dir.path(), num_bytes("rank-33"));
        let first = upload(&store, "7", 0.5).adapter;
        let holder = loaded(&store, "small");
        // It waits for room, and what comes after it waits behind it.
        let large = store.load("large").expect("a name");
        wait_until_pending(&store, 1);
        let behind = store.load("7").expect("a name");
        wait_until_pending(&store, 2);
        drop((first, holder));
        done(&store, &large).expect("there is room");
        let error = done(&store, &behind).expect_err("it is gone").to_string();
        assert!(error.contains("it has left the memory since"), "{error}");
        drop((large, behind));
        assert!(refusal(&store, "7").contains("send lora_weights"));
        upload(&store, "7", 0.5);
    }
}
