//! The responder: a thread that turns tokens into text and sends it while the next step computes.
//!
//! ```text
//! execute k     |accept|respond|------ run ------|collect|apply|finish|
//! responder            send output of step k-1 ──►|      send finals of step k
//! heavy responder                                        send the large ones
//! ```
//!
//! A step waits until the responses of the previous one are sent, so each must be small: a stream's response leaves as
//! soon as it holds as much as a step may wait for.
//!
//! Waking a thread whose core is idle can take longer than the rest of a step, and Triton wakes two threads of its own
//! between steps. So the responder is woken only when a client waits for a response. Step records go to a [`Journal`],
//! which it reads when it is awake anyway, and otherwise ten times a second.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::model_anchor::ModelAnchor;
use crate::observe::observer::{Observer, StepRecord};
use crate::response::answer::Answer;
use crate::response::heavy_responder::{HeavyResponder, HeavyWork};
use inflight_base::{LoadError, RequestId, StepError, catch_panic};
use inflight_engine::KvUsage;
use inflight_triton::{Error, ResponseFactory};

/// Capacity of the work queue: a few steps, so that a slow client slows steps down rather than letting memory grow.
const MAX_WAITING: usize = 16;

/// The longest that a record stays in the journal while steps go on.
const RECORD_DELAY: Duration = Duration::from_millis(100);

/// The responder is woken when the journal has this many records.
const MAX_RECORDS: usize = 256;

/// A stream's answer with new tokens, which the responder has while it sends them.
pub type StreamAnswer = (RequestId, Box<Answer>);

enum Work {
    Streams(Vec<StreamAnswer>),
    Finals(Vec<Answer>),
    /// A request was released with an error; keep its model loaded for a while.
    Refused(ResponseFactory),
    /// Read the journal.
    Records,
    Idle(KvUsage),
}

/// Step records that are still to be written.
type Journal = Mutex<Vec<StepRecord>>;

/// The driver's end of the responder.
pub struct Responder {
    work: Option<SyncSender<Work>>,
    journal: Arc<Journal>,
    /// When the responder was last woken, and so read the journal.
    woken: Instant,
    returned: Receiver<Vec<StreamAnswer>>,
    heavy: Option<HeavyResponder>,
    threads: Vec<JoinHandle<()>>,
    is_sending: bool,
}

impl Responder {
    /// Starts the thread of the instance `name`.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub fn start(name: &str, mut observer: Observer) -> Result<Self, LoadError> {
        let (work, inbox) = sync_channel::<Work>(MAX_WAITING);
        let (outbox, returned) = sync_channel::<Vec<StreamAnswer>>(1);
        let journal = Arc::new(Journal::default());
        let mut reader = JournalReader::new(journal.clone());
        let (heavy, heavy_thread) = HeavyResponder::start(name)?;
        let heavy_end = heavy.clone();
        let run = move || {
            let mut anchor = ModelAnchor::default();
            while let Some(work) = anchor.receive(&inbox) {
                match work {
                    Work::Streams(mut streams) => {
                        // No response goes to a frontend that is ending a cancelled stream: the gRPC one of
                        // server 2.51 could then release its state twice, and crash.
                        let listening =
                            |(_, answer): &&mut StreamAnswer| !answer.factory.is_cancelled();
                        for (_, answer) in streams.iter_mut().filter(listening) {
                            let sent = catch_panic(|| answer.send_news());
                            if let Err(error) = sent.unwrap_or_else(panicked) {
                                answer.fail(error);
                            }
                        }
                        if outbox.send(streams).is_err() {
                            return;
                        }
                    }
                    Work::Finals(finals) => {
                        for answer in finals {
                            writing(|| observer.request_ended(&answer));
                            // Streams of the next step, and later finals, do not wait for a large one.
                            match answer.is_heavy() {
                                true => heavy_end.take(HeavyWork::Send(Box::new(answer))),
                                false => anchor.hold(answer.send_last()),
                            }
                        }
                    }
                    Work::Refused(factory) => anchor.hold(factory),
                    Work::Records => {}
                    Work::Idle(kv) => {
                        writing(|| observer.steps_done(reader.read()));
                        writing(|| observer.idle(kv));
                    }
                }
                writing(|| observer.steps_done(reader.read()));
            }
            writing(|| observer.steps_done(reader.read()));
        };
        let thread = std::thread::Builder::new()
            .name("inflight-respond".to_owned())
            .spawn(run)
            .map_err(|e| LoadError::Resource(format!("{name}: no thread for responses: {e}")))?;
        Ok(Self {
            work: Some(work),
            journal,
            woken: Instant::now(),
            returned,
            heavy: Some(heavy),
            threads: vec![thread, heavy_thread],
            is_sending: false,
        })
    }

    /// Sends the new tokens of answers; [`Responder::collect`] must follow.
    pub fn send(&mut self, answers: Vec<StreamAnswer>) -> Result<(), StepError> {
        self.queue(Work::Streams(answers))?;
        self.is_sending = true;
        Ok(())
    }

    /// Waits until the responses of [`Responder::send`] are sent, and returns the answers. `None` if none were sent.
    pub fn collect(&mut self) -> Result<Option<Vec<StreamAnswer>>, StepError> {
        if !std::mem::take(&mut self.is_sending) {
            return Ok(None);
        }
        self.returned.recv().map(Some).map_err(|_| gone())
    }

    /// Sends final responses of requests that are released.
    pub fn finish(&mut self, finals: Vec<Answer>) -> Result<(), StepError> {
        self.queue(Work::Finals(finals))
    }

    /// Drops the answer of a request that was cancelled, off the execute thread.
    pub fn discard(&self, answer: Box<Answer>) {
        if let Some(heavy) = &self.heavy {
            heavy.take(HeavyWork::Drop(answer));
        }
    }

    /// Keeps the model loaded for a while after a request was released without an answer.
    pub fn refused(&mut self, factory: ResponseFactory) -> Result<(), StepError> {
        self.queue(Work::Refused(factory))
    }

    /// Queues a step's record to be written.
    pub fn record(&mut self, record: StepRecord) -> Result<(), StepError> {
        let num_records = {
            let mut journal = self.journal.lock();
            journal.push(record);
            journal.len()
        };
        if num_records >= MAX_RECORDS || self.woken.elapsed() >= RECORD_DELAY {
            self.queue(Work::Records)?;
        }
        Ok(())
    }

    /// Shows that nothing is active.
    pub fn idle(&mut self, kv: KvUsage) -> Result<(), StepError> {
        self.queue(Work::Idle(kv))
    }

    fn queue(&mut self, work: Work) -> Result<(), StepError> {
        let channel = self.work.as_ref().ok_or_else(gone)?;
        channel.send(work).map_err(|_| gone())?;
        self.woken = Instant::now();
        Ok(())
    }
}

impl Drop for Responder {
    /// Sends and writes everything before the instance is dropped.
    fn drop(&mut self) {
        self.work = None;
        self.heavy = None;
        // The first has work for the second until it ends.
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                log::error!("the responder ended in a panic");
            }
        }
    }
}

/// The responder's end of the journal.
struct JournalReader {
    journal: Arc<Journal>,
    /// Swapped with the list that the driver fills, so that records allocate nothing.
    page: Vec<StepRecord>,
}

impl JournalReader {
    fn new(journal: Arc<Journal>) -> Self {
        Self {
            journal,
            page: Vec::new(),
        }
    }

    /// The records since the last call.
    fn read(&mut self) -> &[StepRecord] {
        self.page.clear();
        std::mem::swap(&mut self.page, &mut self.journal.lock());
        &self.page
    }
}

fn gone() -> StepError {
    StepError("the responder thread has ended".to_owned())
}

fn panicked(panic: String) -> Result<(), Error> {
    Err(Error::internal(panic))
}

/// Runs a write of metrics or records. A panic there must not leave requests unanswered.
fn writing(write: impl FnOnce()) {
    if let Err(panic) = catch_panic(write) {
        log::error!("a step or a request could not be written down: {panic}");
    }
}
