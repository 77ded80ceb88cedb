//! A driver, and the thread that watches its requests between steps.
//!
//! ```text
//! Triton      | Execute |          | Execute |   no request
//! watch                                          100 ms     100 ms     100 ms
//! ```
//!
//! Triton does not report that it ends a request between two steps. A step finds the requests that are missing from its
//! batch; while there are no steps, this thread does. It locks the driver only while no Execute call holds it.
//!
//! It also notices that the process of another rank has ended while there are no steps, and loads an instance that has
//! failed anew (`restarts.rs`).
//!
//! Nor does Triton finalise every model that is unloaded: a request that server 2.51 leaks (which can happen if its
//! gRPC stream is cancelled) keeps the model forever. So the thread also checks whether the model is still served, and
//! frees the resources of the instance if it has not been for a while.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::driver::ending::{Ending, UNLOAD_GRACE};
use crate::driver::restarts::{REMEDY, Restarts};
use crate::driver::service::Service;
use crate::observe::metrics::MetricsShare;
use inflight_base::{LoadError, StepError, catch_panic};
use inflight_machines::RankWatch;
use inflight_triton::{Error, Health, Request, ServedModel, Serving, endpoints_are_up};

/// The longest time until a request that Triton has ended is noticed.
const PERIOD: Duration = Duration::from_millis(100);

/// The model, for its watching thread.
pub struct WatchContext {
    /// The instance's name.
    pub name: String,
    /// The model in its server.
    pub served: ServedModel,
    /// The model's own hold on its metrics.
    pub metrics: MetricsShare,
    /// What the driver is told of the model's end.
    pub service: Service,
    /// How long the requests of a model that is being unloaded may continue; `None`: to their end.
    pub drain_timeout: Option<Duration>,
    /// Whether the instance can serve, as the server sees it.
    pub health: Health,
    /// Loads the instance anew after it has failed.
    pub loader: Box<dyn FnMut() -> Result<LoadedDriver, Error> + Send>,
    /// When a failed instance is loaded anew.
    pub restarts: Restarts,
}

/// A driver, and what is watched beside its requests.
pub struct LoadedDriver {
    /// The driver.
    pub driver: Box<dyn Driver>,
    /// Whether the processes of the other ranks live; `None` if there are none.
    pub ranks: Option<RankWatch>,
}

/// Executes the requests of one instance.
pub trait Driver: Send {
    /// Takes `requests` over.
    ///
    /// # Errors
    /// A step failed. The requests taken over have been answered with the error; the instance must take no more.
    fn execute(&mut self, requests: &mut Vec<Request>) -> Result<(), StepError>;

    /// Forgets the requests that Triton has ended, and frees slots, if no step has come for `max_silence`: a step does
    /// that itself.
    ///
    /// # Errors
    /// A step failed. The instance must take no more requests.
    fn look_after(&mut self, now: Instant, max_silence: Duration) -> Result<(), StepError>;

    /// The server was seen to stop. It waits for the sequences that are open.
    fn server_stops(&mut self) {}

    /// Whether there has been no request for `silence`.
    fn is_idle_for(&self, silence: Duration, now: Instant) -> bool;
}

/// A driver and the thread that watches its requests.
pub struct WatchedDriver {
    driver: Arc<SharedDriver>,
    health: Health,
    /// Dropping it ends the thread.
    until: Option<SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// The driver; `None` while the instance does not serve, and its health says why.
type SharedDriver = Mutex<Option<LoadedDriver>>;

impl WatchedDriver {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub fn start(loaded: LoadedDriver, context: WatchContext) -> Result<Self, LoadError> {
        let driver = Arc::new(Mutex::new(Some(loaded)));
        let (until, end) = sync_channel(0);
        let (shared, health) = (driver.clone(), context.health.clone());
        let name = context.name.clone();
        let thread = std::thread::Builder::new()
            .name("inflight-watch".to_owned())
            .spawn(move || watch(&shared, context, &end))
            .map_err(|e| {
                LoadError::Resource(format!("{name}: no thread to watch its requests: {e}"))
            })?;
        Ok(Self {
            driver,
            health,
            until: Some(until),
            thread: Some(thread),
        })
    }

    /// See [`Driver::execute`]. Requests that stay in `requests` have not been answered: the instance does not serve,
    /// as its health says.
    pub fn execute(&mut self, requests: &mut Vec<Request>) {
        let mut driver = self.driver.lock();
        let Some(loaded) = &mut *driver else {
            return;
        };
        let executed = catch_panic(|| loaded.driver.execute(requests));
        if let Err(error) = executed.unwrap_or_else(|panic| Err(StepError(panic))) {
            log::error!("the instance has failed: {error}");
            fail(&mut driver, &self.health, &error);
        }
    }
}

/// Ends a driver that has failed. What it still sends goes out before its requests are answered with the error.
fn fail(driver: &mut Option<LoadedDriver>, health: &Health, error: &StepError) {
    health.fail(error, REMEDY);
    end(driver);
}

fn end(driver: &mut Option<LoadedDriver>) {
    if let Err(panic) = catch_panic(|| drop(driver.take())) {
        log::error!("the instance could not be dropped: {panic}");
    }
}

impl Drop for WatchedDriver {
    fn drop(&mut self) {
        self.until = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("the thread that watches requests ended in a panic");
        }
    }
}

/// Watches the requests every [`PERIOD`], until the other end of `end` is dropped, or the model has freed its
/// resources.
fn watch(shared: &SharedDriver, mut context: WatchContext, end_of_instance: &Receiver<()>) {
    let mut ending = Ending::new(Instant::now());
    while end_of_instance.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
        let serving = ask(&mut ending, &context, Instant::now());
        // An Execute call that holds the driver checks its requests itself.
        let Some(mut driver) = shared.try_lock() else {
            continue;
        };
        let now = Instant::now();
        if ending.is_over(now)
            && driver
                .as_ref()
                .is_none_or(|it| it.driver.is_idle_for(UNLOAD_GRACE, now))
        {
            let reason = "the model was told to unload, and has freed its resources";
            log::info!("{reason}; Triton still keeps it");
            context.health.retire(&reason);
            end(&mut driver);
            context.metrics.release();
            return;
        }
        let Some(loaded) = &mut *driver else {
            drop(driver);
            restart(shared, &mut context);
            continue;
        };
        if serving == Some(Serving::ServerStops) {
            loaded.driver.server_stops();
        }
        let looked = catch_panic(|| {
            loaded.driver.look_after(now, PERIOD)?;
            // A step notices by itself that a rank is missing, and knows why.
            match &loaded.ranks {
                Some(ranks) if loaded.driver.is_idle_for(Duration::ZERO, now) => ranks.check(),
                _ => Ok(()),
            }
        });
        if let Err(error) = looked.unwrap_or_else(|panic| Err(StepError(panic))) {
            log::error!("the instance has failed between its requests: {error}");
            fail(&mut driver, &context.health, &error);
        }
    }
}

/// Loads a failed instance anew, if it is time. Its requests are answered with the error until then.
fn restart(shared: &SharedDriver, context: &mut WatchContext) {
    let must_not = context.service.is_replaced() || context.service.deadline().is_some();
    if must_not || !context.restarts.is_due(Instant::now()) {
        return;
    }
    let name = &context.name;
    log::info!("{name}: the failed instance is loaded anew");
    let loaded = catch_panic(|| (context.loader)());
    match loaded.unwrap_or_else(|panic| Err(Error::internal(panic))) {
        Ok(loaded) => {
            *shared.lock() = Some(loaded);
            context.health.recover();
            context.restarts.succeeded(Instant::now());
            log::info!("{name}: the instance serves again");
        }
        Err(error) => log::error!("{name}: the failed instance cannot be loaded anew: {error}"),
    }
}

/// Asks the server from time to time how the model is served. Where it no longer is, has its requests end in time.
fn ask(ending: &mut Ending, context: &WatchContext, now: Instant) -> Option<Serving> {
    // Before the first request the model may be loading still, and a load that fails waits for this thread with the
    // server's locks held.
    if !context.service.has_served() {
        return None;
    }
    endpoints_are_up();
    if !ending.is_due(now) {
        return None;
    }
    let is_replaced = context.service.is_replaced();
    let serving = context.served.serving();
    if let Some(timeout) = context.drain_timeout
        && (is_replaced || serving != Serving::Loaded)
    {
        context.service.end_within(timeout, now);
    }
    ending.note(serving, is_replaced, now);
    Some(serving)
}
