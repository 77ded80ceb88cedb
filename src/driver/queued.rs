//! The queued driver: a thread steps as long as there are requests, and Execute calls bring it new ones.
//!
//! ```text
//! Triton's queue   r5 r4 r3 | Execute r1 r2 ........ returns |              | Execute r3 ... returns |
//! this thread               | step | step r1 | step r1 r2    | step r1 r2   | step r2 r3
//!                                              a third could start           r1 has ended: one more could
//! ```
//!
//! The same for conversations, whose requests Triton's sequence batcher brings.
//!
//! An Execute call returns when the engine could start a further request. Until then Triton keeps the others in its
//! queue, where its priorities, limits and time-outs act on them.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::batch_strategy::PublishedRoom;
use crate::driver::conversations::{ConversationLimits, Conversations};
use crate::driver::service::Service;
use crate::driver::step_clock::StepClock;
use crate::driver::step_driver::{Batch, StepDriver};
use crate::driver::watched::Driver;
use inflight_base::{LoadError, StepError, catch_panic};
use inflight_engine::{Room, Volume};
use inflight_triton::{MovingRequest, Request};

/// The driver of a model with `dynamic_batching`.
pub struct QueuedDriver {
    name: String,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    /// Requests of the model's warm-up that are still to come: Triton sends them before all others.
    num_warm_ups: u64,
    service: Service,
}

/// What Execute calls and the thread share.
struct Shared {
    state: Mutex<State>,
    /// For the batches that Triton forms.
    room: PublishedRoom,
    /// There are arrivals, or the driver is closing.
    arrived: Condvar,
    /// A request could start, or the thread has failed.
    drained: Condvar,
}

struct State {
    /// Requests that the thread has not taken in yet.
    arrivals: Vec<MovingRequest>,
    /// Their volumes.
    volumes: Vec<Volume>,
    /// How many further requests could start beside the arrivals.
    num_startable: usize,
    /// When the last request ended; `None` while there are some.
    idle_since: Option<Instant>,
    is_closing: bool,
    /// Whether the server stops, which the thread has not heard yet.
    server_stops: bool,
    failure: Option<StepError>,
}

/// Events since the last step, for the engine thread.
struct News {
    /// The requests that have arrived.
    arrivals: Vec<MovingRequest>,
    /// Whether the server was seen to stop since the last time.
    server_stops: bool,
}

impl QueuedDriver {
    /// Starts the thread of the instance `name`. The first `num_warm_ups` requests are the model's warm-up. With
    /// `conversations`, each of the others is a turn of one.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub fn start(
        name: &str,
        steps: StepDriver,
        num_warm_ups: u64,
        conversations: Option<ConversationLimits>,
        room: PublishedRoom,
    ) -> Result<Self, LoadError> {
        room.publish(steps.room(), &[]);
        let shared = Arc::new(Shared {
            room,
            state: Mutex::new(State {
                arrivals: Vec::new(),
                volumes: Vec::new(),
                num_startable: steps.num_startable(),
                idle_since: Some(Instant::now()),
                is_closing: false,
                server_stops: false,
                failure: None,
            }),
            arrived: Condvar::new(),
            drained: Condvar::new(),
        });
        let own = Arc::clone(&shared);
        let service = steps.service.clone();
        let thread = std::thread::Builder::new()
            .name("inflight-steps".to_owned())
            .spawn(move || run(&own, steps, conversations))
            .map_err(|error| {
                LoadError::Resource(format!("{name}: no thread for its steps: {error}"))
            })?;
        Ok(Self {
            name: name.to_owned(),
            shared,
            thread: Some(thread),
            num_warm_ups,
            service,
        })
    }
}

impl Driver for QueuedDriver {
    fn execute(&mut self, requests: &mut Vec<Request>) -> Result<(), StepError> {
        let mut state = self.shared.state.lock();
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        let mut num_requests = 0;
        for mut request in requests.drain(..) {
            if request.wants_nothing() {
                // It fills a gap in a direct batch.
                request.dismiss();
                continue;
            }
            num_requests += 1;
            if self.num_warm_ups > 0 {
                self.num_warm_ups -= 1;
                request.belongs_to_warm_up();
            } else {
                self.service.serves();
            }
            state.volumes.push(self.shared.room.take(&request));
            state.arrivals.push(request.hand_over());
        }
        if num_requests > 0 {
            log::debug!("{}: a batch of {num_requests} requests", self.name);
            state.idle_since = None;
        }
        state.num_startable = state.num_startable.saturating_sub(num_requests);
        self.shared.arrived.notify_one();
        let is_held = |state: &mut State| state.num_startable == 0 && state.failure.is_none();
        self.shared.drained.wait_while(&mut state, is_held);
        state.failure.clone().map_or(Ok(()), Err)
    }

    fn look_after(&mut self, _: Instant, _: Duration) -> Result<(), StepError> {
        self.shared.state.lock().failure.clone().map_or(Ok(()), Err)
    }

    fn server_stops(&mut self) {
        self.shared.state.lock().server_stops = true;
        self.shared.arrived.notify_one();
    }

    fn is_idle_for(&self, silence: Duration, now: Instant) -> bool {
        let idle_since = self.shared.state.lock().idle_since;
        idle_since.is_some_and(|since| now.saturating_duration_since(since) >= silence)
    }
}

impl Drop for QueuedDriver {
    fn drop(&mut self) {
        self.shared.state.lock().is_closing = true;
        self.shared.arrived.notify_one();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("the thread that steps ended in a panic");
        }
    }
}

impl Shared {
    /// Takes the events since the last call. Without requests (`is_idle`), waits for one, at most until `max_wait`.
    /// None when the driver is closing.
    fn news(&self, is_idle: bool, max_wait: Option<Instant>) -> Option<News> {
        let mut state = self.state.lock();
        if is_idle && state.arrivals.is_empty() {
            state.idle_since.get_or_insert_with(Instant::now);
            let must_wait = |state: &mut State| {
                state.arrivals.is_empty() && !state.is_closing && !state.server_stops
            };
            match max_wait {
                None => self.arrived.wait_while(&mut state, must_wait),
                Some(end) => {
                    self.arrived.wait_while_until(&mut state, must_wait, end);
                }
            }
        }
        match state.is_closing {
            false => {
                state.volumes.clear();
                Some(News {
                    arrivals: std::mem::take(&mut state.arrivals),
                    server_stops: std::mem::take(&mut state.server_stops),
                })
            }
            true => None,
        }
    }

    /// Lets Execute return, if as many requests can start that another can beside the arrivals.
    fn allow(&self, num_startable: usize, room: Room) {
        let mut state = self.state.lock();
        self.room.publish(room, &state.volumes);
        state.num_startable = num_startable.saturating_sub(state.arrivals.len());
        if state.num_startable > 0 {
            self.drained.notify_one();
        }
    }

    /// Refuses all further requests. Returns those that have arrived.
    fn fail(&self, failure: StepError) -> Vec<MovingRequest> {
        let mut state = self.state.lock();
        state.failure = Some(failure);
        self.drained.notify_one();
        std::mem::take(&mut state.arrivals)
    }
}

/// Steps until the driver is closed or a step fails, and fails the requests that are left.
fn run(shared: &Shared, mut steps: StepDriver, limits: Option<ConversationLimits>) {
    let mut conversations = limits.map(Conversations::new);
    let mut batch = Batch::new();
    // A panic must not drop the batch: that would answer requests whose answers the responder has.
    let end = catch_panic(|| serve(shared, &mut steps, conversations.as_mut(), &mut batch));
    let failure = end.map_or_else(StepError, |end| match end {
        Err(failure) => failure,
        Ok(()) => StepError("the model instance is being unloaded".to_owned()),
    });
    let failed = catch_panic(|| {
        let untaken = shared.fail(failure.clone()).into_iter();
        let untaken = untaken.map(MovingRequest::receive);
        let waiting = conversations.map(|mut it| it.take_waiting());
        let untaken = waiting.into_iter().flatten().chain(untaken);
        steps.fail_all(&mut batch, untaken, &failure);
    });
    if let Err(panic) = failed {
        log::error!("requests could not be answered: {panic}");
    }
}

/// Steps until the driver is closed. Requests may be left then, of which some no step has taken.
fn serve(
    shared: &Shared,
    steps: &mut StepDriver,
    mut conversations: Option<&mut Conversations>,
    batch: &mut Batch,
) -> Result<(), StepError> {
    loop {
        let expiry = conversations.as_ref().and_then(|it| it.next_expiry());
        let Some(news) = shared.news(batch.is_empty(), expiry) else {
            break;
        };
        let mut clock = StepClock::start();
        steps.begin();
        for arrival in news.arrivals {
            let request = arrival.receive();
            match &mut conversations {
                None => steps.admit_alone(request, batch, clock.start),
                Some(conversations) => conversations.accept(request, steps, batch, clock.start),
            }
        }
        steps.step_over(batch, &mut clock)?;
        if let Some(conversations) = &mut conversations {
            conversations.continue_after_step(steps, batch, Instant::now());
            if news.server_stops {
                conversations.end_the_idle(steps);
            }
        }
        shared.allow(steps.num_startable(), steps.room());
    }
    Ok(())
}
