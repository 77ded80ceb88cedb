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
//! It also notices that the process of another rank has ended while there are no steps.
//!
//! Nor does Triton finalise every model that is unloaded: a request that server 2.51 leaks (which can happen if its gRPC
//! stream is cancelled) keeps the model forever. So the thread also checks whether the model is still served, and
//! frees the resources of the instance if it has not been for a while.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::backend::driver::service::Service;
use crate::backend::observe::metrics::MetricsShare;
use crate::base::{LoadError, StepError, catch_panic};
use crate::runner::RankWatch;
use crate::triton::{Health, Request, ServedModel};

/// The longest time until a request that Triton has ended is noticed.
const PERIOD: Duration = Duration::from_millis(100);

/// How often the server is asked whether the model still serves.
const SERVING_PERIOD: Duration = Duration::from_secs(1);

/// An instance whose model is unloaded frees its resources after this time without requests. Triton finalises a model
/// that has not leaked earlier.
const UNLOAD_GRACE: Duration = Duration::from_secs(5);

/// The model, for its watching thread.
pub struct WatchContext {
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

    /// Forgets the requests that Triton has ended, and frees slots, if no step has come for `max_silence`: a step does that
    /// itself.
    ///
    /// # Errors
    /// A step failed. The instance must take no more requests.
    fn look_after(&mut self, now: Instant, max_silence: Duration) -> Result<(), StepError>;

    /// Whether there has been no request for `silence`.
    fn is_idle_for(&self, silence: Duration, now: Instant) -> bool;
}

/// A driver and the thread that watches its requests.
pub struct WatchedDriver {
    driver: Arc<SharedDriver>,
    /// Dropping it ends the thread.
    until: Option<SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// The driver, or the error that ended it.
type SharedDriver = Mutex<Result<Box<dyn Driver>, StepError>>;

impl WatchedDriver {
    /// Starts the thread of the instance `name`.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub fn start(
        name: &str,
        driver: Box<dyn Driver>,
        context: WatchContext,
    ) -> Result<Self, LoadError> {
        let driver = Arc::new(Mutex::new(Ok(driver)));
        let (until, end) = sync_channel(0);
        let shared = driver.clone();
        let thread = std::thread::Builder::new()
            .name("inflight-watch".to_owned())
            .spawn(move || watch(&shared, &context, &end))
            .map_err(|e| {
                LoadError::Resource(format!("{name}: no thread to watch its requests: {e}"))
            })?;
        Ok(Self {
            driver,
            until: Some(until),
            thread: Some(thread),
        })
    }

    /// See [`Driver::execute`].
    ///
    /// # Errors
    /// As there. Requests that stay in `requests` have not been answered.
    pub fn execute(&mut self, requests: &mut Vec<Request>) -> Result<(), StepError> {
        match &mut *self.driver.lock() {
            Ok(driver) => driver.execute(requests),
            Err(error) => Err(error.clone()),
        }
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

/// Watches the requests every [`PERIOD`], until the other end of `end` is dropped.
fn watch(shared: &SharedDriver, context: &WatchContext, end: &Receiver<()>) {
    let mut ending = Ending::new();
    while end.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
        let is_over = ending.is_over(context, Instant::now());
        // An Execute call that holds the driver checks its requests itself.
        let Some(mut driver_lock) = shared.try_lock() else {
            continue;
        };
        let Ok(driver) = &mut *driver_lock else {
            return;
        };
        let now = Instant::now();
        let looked = catch_panic(|| {
            driver.look_after(now, PERIOD)?;
            // A step notices by itself that a rank is missing, and knows why.
            match &context.ranks {
                Some(ranks) if driver.is_idle_for(Duration::ZERO, now) => ranks.check(),
                _ => Ok(()),
            }
        });
        let end = match looked.unwrap_or_else(|panic| Err(StepError(panic))) {
            Err(error) => {
                log::error!("the instance has failed between its requests: {error}");
                error
            }
            Ok(()) if is_over && driver.is_idle_for(UNLOAD_GRACE, now) => {
                let error = "the model was told to unload, and has freed its resources";
                log::info!("{error}; Triton still keeps it");
                StepError(error.to_owned())
            }
            Ok(()) => continue,
        };
        context.health.fail(&end);
        if let Err(panic) = catch_panic(|| *driver_lock = Err(end)) {
            log::error!("the instance could not be dropped: {panic}");
        }
        if is_over {
            context.metrics.release();
        }
    }
}

/// Tracks whether the model has stopped serving.
struct Ending {
    asked: Instant,
    over_since: Option<Instant>,
}

impl Ending {
    fn new() -> Self {
        Self {
            asked: Instant::now(),
            over_since: None,
        }
    }

    /// Whether the model has not been served for [`UNLOAD_GRACE`]. Asks the server from time to time.
    fn is_over(&mut self, context: &WatchContext, now: Instant) -> bool {
        // Before the first request the model may be loading still, and a load that fails waits for this thread with the
        // server's locks held.
        let has_served = context.service.has_served();
        if has_served && now.saturating_duration_since(self.asked) >= SERVING_PERIOD {
            self.asked = now;
            let is_replaced = context.service.is_replaced();
            let is_ready = context.served.is_ready();
            if let Some(timeout) = context.drain_timeout
                && (is_replaced || is_ready != Ok(true))
            {
                context.service.end_within(timeout, now);
            }
            // A server that shuts down returns an error, and unloads all models anyway.
            let serves = is_ready.unwrap_or(true) && !is_replaced;
            self.over_since = match serves {
                true => None,
                false => self.over_since.or(Some(now)),
            };
        }
        self.over_since
            .is_some_and(|since| now.saturating_duration_since(since) >= UNLOAD_GRACE)
    }
}
