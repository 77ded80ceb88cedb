//! An instance whose requests are looked after while Triton has no step for it, too.
//!
//! ```text
//! Triton      | Execute |          | Execute |   nothing in flight that it would hand over
//! attendant                                      100 ms     100 ms     100 ms
//! ```
//!
//! Triton says nothing of a request that it ends between two steps. A step looks after those that are missing from
//! its batch; while none comes, a thread does. It has the driver only while no Execute call has it.
//!
//! Nor does Triton end every model that was told to unload: a request of it that Triton has lost (server 2.51 can
//! lose one whose gRPC stream is cancelled) keeps it for ever. So the thread also asks now and then whether the model
//! still serves, and gives back what the instance holds when it has not for a while.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::backend::driver::Driver;
use crate::backend::metrics::MetricsShare;
use crate::backend::tenure::Tenure;
use crate::base::{LoadError, StepError};
use crate::triton::lifecycle::catch;
use crate::triton::{Request, ServedModel};

/// How long a request that Triton has ended can stay unnoticed.
const PERIOD: Duration = Duration::from_millis(100);

/// How often it is asked whether the model still serves.
const SERVING_PERIOD: Duration = Duration::from_secs(1);

/// How long an instance has no request after its model was told to unload until it gives back what it holds. Triton
/// ends a model that it has not lost earlier than that.
const UNLOAD_GRACE: Duration = Duration::from_secs(5);

/// What an attendant knows of its model.
pub struct Post {
    /// The model in its server.
    pub served: ServedModel,
    /// Which load of the model it is.
    pub tenure: Tenure,
    /// The model's own hold on its metrics.
    pub metrics: MetricsShare,
}

/// A driver and the thread that looks after its requests.
pub struct Attended {
    driver: Arc<Seat>,
    tenure: Tenure,
    /// Whether `tenure` knows that clients are served.
    serves: bool,
    /// Dropped to end the thread.
    until: Option<SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// The driver, or why there is none any more.
type Seat = Mutex<Result<Driver, StepError>>;

impl Attended {
    /// Starts the thread of the instance `name`.
    ///
    /// # Errors
    /// The machine has no thread to give.
    pub fn start(name: &str, driver: Driver, post: Post) -> Result<Self, LoadError> {
        let tenure = post.tenure.clone();
        let driver = Arc::new(Mutex::new(Ok(driver)));
        let (until, end) = sync_channel(0);
        let seat = driver.clone();
        let thread = std::thread::Builder::new()
            .name("inflight-attend".to_owned())
            .spawn(move || attend(&seat, &post, &end))
            .map_err(|e| {
                LoadError::Resource(format!("{name}: no thread to look after requests: {e}"))
            })?;
        Ok(Self {
            driver,
            tenure,
            serves: false,
            until: Some(until),
            thread: Some(thread),
        })
    }

    /// See [`Driver::execute`].
    ///
    /// # Errors
    /// As there. Requests that stay in `requests` have not been answered.
    pub fn execute(&mut self, requests: &mut Vec<Request>) -> Result<(), StepError> {
        let mut seat = self.driver.lock();
        let driver = match &mut *seat {
            Ok(driver) => driver,
            Err(error) => return Err(error.clone()),
        };
        let result = driver.execute(requests.drain(..));
        if !self.serves && driver.has_served() {
            self.serves = true;
            self.tenure.serves();
        }
        result
    }
}

impl Drop for Attended {
    fn drop(&mut self) {
        self.until = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("the thread that looks after requests ended in a panic");
        }
    }
}

/// Looks after the requests time and again, until the other end of `end` is dropped.
fn attend(seat: &Seat, post: &Post, end: &Receiver<()>) {
    let mut ending = Ending::new();
    while end.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
        let is_over = ending.is_over(post, Instant::now());
        // An Execute call that has the driver looks after its requests itself.
        let Some(mut seat) = seat.try_lock() else {
            continue;
        };
        let Ok(driver) = &mut *seat else {
            return;
        };
        ending.has_served |= driver.has_served();
        let now = Instant::now();
        let looked = catch(|| driver.look_after(now, PERIOD));
        let end = match looked.unwrap_or_else(|panic| Err(StepError(panic))) {
            Err(error) => {
                log::error!("requests could not be looked after: {error}");
                error
            }
            Ok(()) if is_over && driver.is_idle_for(UNLOAD_GRACE, now) => {
                let error = "the model was told to unload, and has given back what it held";
                log::info!("{error}; Triton still keeps it");
                StepError(error.to_owned())
            }
            Ok(()) => continue,
        };
        if let Err(panic) = catch(|| *seat = Err(end)) {
            log::error!("the instance could not be dropped: {panic}");
        }
        if is_over {
            post.metrics.give_back();
        }
    }
}

/// Whether the model has stopped serving, as far as that is known.
struct Ending {
    /// Before that the model may be loading still, and a load that fails waits for this thread with the server's
    /// locks held.
    has_served: bool,
    asked: Instant,
    over_since: Option<Instant>,
}

impl Ending {
    fn new() -> Self {
        Self {
            has_served: false,
            asked: Instant::now(),
            over_since: None,
        }
    }

    /// Whether the model has not served for [`UNLOAD_GRACE`]. Asks the server now and then.
    fn is_over(&mut self, post: &Post, now: Instant) -> bool {
        if self.has_served && now.saturating_duration_since(self.asked) >= SERVING_PERIOD {
            self.asked = now;
            // A server that ends says nothing of its models, and ends them all.
            let serves = post.served.is_ready().unwrap_or(true) && !post.tenure.is_over();
            self.over_since = match serves {
                true => None,
                false => self.over_since.or(Some(now)),
            };
        }
        self.over_since
            .is_some_and(|since| now.saturating_duration_since(since) >= UNLOAD_GRACE)
    }
}
