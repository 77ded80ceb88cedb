//! A thread that prepares requests in order of arrival, so that no step waits for it.
//!
//! ```text
//! execute thread   submit a   submit b   ..... step ..... a is done: join it   ..... step ..... b is done
//! this thread                 | prepare a              || prepare b                            |
//! ```

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::base::{LoadError, catch_panic};
use crate::device::yield_to_others;
use crate::triton::{Error, ErrorCode};

/// Prepares inputs of type `I` one after the other, each to an output of type `O`. The thread ends when this is
/// dropped; what is still waiting then is dropped unprepared.
pub struct Preparer<I, O> {
    shared: Arc<Shared<I, O>>,
    max_bytes: usize,
    thread: Option<JoinHandle<()>>,
}

/// An input that has been submitted. If it is dropped before its turn, nothing is done for it.
pub struct Preparation<O>(Arc<Outcome<O>>);

/// The output, or the message of a panic; `None` until it is there.
type Outcome<O> = Mutex<Option<Result<O, String>>>;

struct Shared<I, O> {
    queue: Mutex<Queue<I, O>>,
    /// The queue has an input, or is closed.
    submitted: Condvar,
    /// An input has been prepared.
    prepared: Condvar,
}

struct Queue<I, O> {
    waiting: VecDeque<Job<I, O>>,
    /// Bytes of the waiting inputs and of the one in preparation.
    num_bytes: usize,
    is_closed: bool,
}

struct Job<I, O> {
    input: I,
    num_bytes: usize,
    outcome: Arc<Outcome<O>>,
}

impl<I: Send + 'static, O: Send + 'static> Preparer<I, O> {
    /// Starts the thread of the instance `name`. Its queue has room for `capacity` inputs without allocating, and
    /// takes inputs of up to `max_bytes` together.
    ///
    /// # Errors
    /// The system has no thread to give.
    pub fn start(
        name: &str,
        capacity: usize,
        max_bytes: usize,
        prepare: impl Fn(I) -> O + Send + 'static,
    ) -> Result<Self, LoadError> {
        let shared = Arc::new(Shared {
            queue: Mutex::new(Queue {
                waiting: VecDeque::with_capacity(capacity),
                num_bytes: 0,
                is_closed: false,
            }),
            submitted: Condvar::new(),
            prepared: Condvar::new(),
        });
        let worker = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("inflight-prepare".to_owned())
            .spawn(move || run(&worker, prepare))
            .map_err(|error| {
                LoadError::Resource(format!("{name}: no thread to prepare requests: {error}"))
            })?;
        Ok(Self {
            shared,
            max_bytes,
            thread: Some(thread),
        })
    }

    /// Submits an input of `num_bytes`. A single input may have any size.
    ///
    /// # Errors
    /// The inputs that wait are too large together.
    pub fn submit(&self, input: I, num_bytes: usize) -> Result<Preparation<O>, Error> {
        let mut queue = self.shared.queue.lock();
        let waiting_bytes = queue.num_bytes;
        if waiting_bytes > 0 && num_bytes > self.max_bytes.saturating_sub(waiting_bytes) {
            return Err(Error::new(
                ErrorCode::Unavailable,
                format!(
                    "the request has {num_bytes} bytes, and requests of {waiting_bytes} bytes are being tokenised, of \
                     at most {}; try again when some of them are done",
                    self.max_bytes
                ),
            ));
        }
        let outcome = Arc::default();
        queue.num_bytes += num_bytes;
        queue.waiting.push_back(Job {
            input,
            num_bytes,
            outcome: Arc::clone(&outcome),
        });
        self.shared.submitted.notify_one();
        Ok(Preparation(outcome))
    }

    /// Waits until `preparation` is done, for at most `max_wait`.
    pub fn wait(&self, preparation: &Preparation<O>, max_wait: Duration) {
        let mut queue = self.shared.queue.lock();
        let prepared = &self.shared.prepared;
        prepared.wait_while_for(&mut queue, |_| !preparation.is_done(), max_wait);
    }
}

impl<I, O> Drop for Preparer<I, O> {
    fn drop(&mut self) {
        let mut queue = self.shared.queue.lock();
        queue.is_closed = true;
        let unprepared = std::mem::take(&mut queue.waiting);
        self.shared.submitted.notify_one();
        drop(queue);
        drop(unprepared);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("the thread that prepares requests ended in a panic");
        }
    }
}

impl<O> Preparation<O> {
    /// One that is done already, with this output.
    pub fn done(output: O) -> Self {
        Self(Arc::new(Mutex::new(Some(Ok(output)))))
    }

    /// Whether [`Preparation::take`] has an outcome to give.
    pub fn is_done(&self) -> bool {
        self.0.lock().is_some()
    }

    /// The output, or the message of the panic that preparing it ended in; `None` until it is done, and once it has
    /// been taken.
    pub fn take(&self) -> Option<Result<O, String>> {
        self.0.lock().take()
    }
}

/// Prepares what is submitted until the queue is closed.
fn run<I, O>(shared: &Shared<I, O>, prepare: impl Fn(I) -> O) {
    // The threads that compute steps come first.
    yield_to_others();
    while let Some(job) = next(shared) {
        let num_bytes = job.num_bytes;
        let is_abandoned = Arc::strong_count(&job.outcome) == 1;
        let outcome = match is_abandoned {
            true => None,
            // A panic is the request's own: preparing it has touched nothing else.
            false => Some(catch_panic(|| prepare(job.input))),
        };
        let mut queue = shared.queue.lock();
        queue.num_bytes -= num_bytes;
        let unheard = std::mem::replace(&mut *job.outcome.lock(), outcome);
        shared.prepared.notify_all();
        drop(queue);
        drop((unheard, job.outcome));
    }
}

/// The next input; `None` when the queue is closed.
fn next<I, O>(shared: &Shared<I, O>) -> Option<Job<I, O>> {
    let mut queue = shared.queue.lock();
    loop {
        if queue.is_closed {
            return None;
        }
        if let Some(job) = queue.waiting.pop_front() {
            return Some(job);
        }
        shared.submitted.wait(&mut queue);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};

    use super::*;

    const LONG: Duration = Duration::from_secs(30);

    /// A preparer of messages to send: each waits for its own, so that a test decides when it is done.
    fn gated(max_bytes: usize) -> Preparer<Receiver<u32>, u32> {
        let prepare = |gate: Receiver<u32>| match gate.recv().expect("the test opens the gate") {
            0 => panic!("zero"),
            number => number,
        };
        Preparer::start("test", 4, max_bytes, prepare).expect("a thread")
    }

    fn done<O: Send + 'static>(
        preparer: &Preparer<Receiver<u32>, O>,
        preparation: &Preparation<O>,
    ) -> Result<O, String> {
        preparer.wait(preparation, LONG);
        preparation.take().expect("it is done")
    }

    #[test]
    fn inputs_are_prepared_in_their_order() {
        let preparer = gated(100);
        let (first_gate, first) = channel();
        let (second_gate, second) = channel();
        let first = preparer.submit(first, 1).expect("room");
        let second = preparer.submit(second, 1).expect("room");
        second_gate.send(2).expect("it waits");
        assert!(!second.is_done(), "the first holds the thread");
        first_gate.send(1).expect("it waits");
        assert_eq!(done(&preparer, &second), Ok(2));
        assert_eq!(first.take(), Some(Ok(1)), "the first was done before");
        assert_eq!(first.take(), None, "an output is taken once");
    }

    #[test]
    fn a_panic_is_the_outcome_of_its_own_input_alone() {
        let preparer = gated(100);
        for (message, expected) in [(0, Err("panic: zero".to_owned())), (3, Ok(3))] {
            let (gate, input) = channel();
            let preparation = preparer.submit(input, 1).expect("room");
            gate.send(message).expect("it waits");
            assert_eq!(done(&preparer, &preparation), expected);
        }
    }

    #[test]
    fn an_abandoned_input_is_not_prepared() {
        let preparer = gated(100);
        let (first_gate, first) = channel();
        // Nobody ever opens this gate.
        let (_gate, abandoned) = channel();
        let (last_gate, last) = channel();
        let first = preparer.submit(first, 1).expect("room");
        drop(preparer.submit(abandoned, 1).expect("room"));
        let last = preparer.submit(last, 1).expect("room");
        first_gate.send(1).expect("it waits");
        last_gate.send(2).expect("it waits");
        assert_eq!(done(&preparer, &last), Ok(2));
        assert_eq!(done(&preparer, &first), Ok(1));
    }

    #[test]
    fn inputs_are_refused_while_those_that_wait_are_too_large() {
        let preparer = gated(100);
        let (gate, first) = channel();
        let (_other_gate, other) = channel();
        let first = preparer.submit(first, 500).expect("alone it may be larger");
        let error = preparer.submit(other, 1).err().expect("no room is left");
        assert_eq!(error.code(), ErrorCode::Unavailable);
        assert!(error.message().contains("500 bytes"), "{error}");
        gate.send(1).expect("it waits");
        assert_eq!(done(&preparer, &first), Ok(1));
        let (gate, next) = channel();
        let next = preparer.submit(next, 100).expect("there is room again");
        gate.send(2).expect("it waits");
        assert_eq!(done(&preparer, &next), Ok(2));
    }

    #[test]
    fn a_dropped_preparer_drops_what_waits() {
        let preparer = gated(100);
        let (first_gate, first) = channel();
        let (gate, waiting) = channel();
        let first = preparer.submit(first, 1).expect("room");
        let waiting = preparer.submit(waiting, 1).expect("room");
        first_gate.send(1).expect("it waits");
        preparer.wait(&first, LONG);
        // The second may have its turn or not; without a sender it ends at once.
        drop(gate);
        drop(preparer);
        assert_eq!(first.take(), Some(Ok(1)));
        assert!(!matches!(waiting.take(), Some(Ok(_))));
    }
}
