//! Threads that prepare requests, so that no step waits for them, and no small request for a large one.
//!
//! ```text
//! execute thread     submit a   submit b   ..... step ..... b is done: join it   ..... step ..... a is done
//! any input                     | prepare a                                                |
//! inputs <= 256 KiB             |
//! inputs <= 16 KiB              | prepare b      |
//! ```
//!
//! Each thread takes the next input that it may take from the next client in turn: a client with many inputs, or with
//! large ones, does not keep the others waiting. Inputs of one client, or without one, are begun in order of arrival.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::request::turns::{NUM_THREADS, Turns};
use inflight_base::{ClientId, LoadError, catch_panic};
use inflight_threads::yield_to_others;
use inflight_triton::{Error, ErrorCode};

/// The largest input in bytes that each thread takes.
const MAX_BYTES_OF_THREADS: [usize; NUM_THREADS] = [16 << 10, 256 << 10, usize::MAX];

/// Prepares inputs of type `I`, each to an output of type `O`. The threads end when this is dropped; what is still
/// waiting then is dropped unprepared.
pub struct Preparer<I, O> {
    shared: Arc<Shared<I, O>>,
    max_bytes: usize,
    threads: Vec<JoinHandle<()>>,
}

/// An input that has been submitted. If it is dropped before its turn, nothing is done for it.
pub struct Preparation<O> {
    outcome: Arc<Outcome<O>>,
    num_bytes: usize,
}

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
    waiting: Turns<Job<I, O>>,
    /// Bytes of the waiting inputs and of those in preparation.
    num_bytes: usize,
    is_closed: bool,
}

struct Job<I, O> {
    input: I,
    num_bytes: usize,
    outcome: Arc<Outcome<O>>,
}

impl<I: Send + 'static, O: Send + 'static> Preparer<I, O> {
    /// Starts the threads of the instance `name`. Its queue takes inputs of up to `max_bytes` together.
    ///
    /// # Errors
    /// The system has no thread to give.
    pub fn start(
        name: &str,
        max_bytes: usize,
        prepare: impl Fn(I) -> O + Send + Sync + 'static,
    ) -> Result<Self, LoadError> {
        let mut preparer = Self {
            shared: Arc::new(Shared {
                queue: Mutex::new(Queue {
                    waiting: Turns::default(),
                    num_bytes: 0,
                    is_closed: false,
                }),
                submitted: Condvar::new(),
                prepared: Condvar::new(),
            }),
            max_bytes,
            threads: Vec::new(),
        };
        let prepare = Arc::new(prepare);
        for thread in 0..NUM_THREADS {
            let shared = Arc::clone(&preparer.shared);
            let prepare = Arc::clone(&prepare);
            let thread = std::thread::Builder::new()
                .name("inflight-prepare".to_owned())
                .spawn(move || run(&shared, thread, &*prepare))
                .map_err(|error| {
                    LoadError::Resource(format!("{name}: no thread to prepare requests: {error}"))
                })?;
            preparer.threads.push(thread);
        }
        Ok(preparer)
    }

    /// Submits an input of `num_bytes`. A single input may have any size.
    ///
    /// # Errors
    /// The inputs that wait are too large together.
    pub fn submit(
        &self,
        input: I,
        num_bytes: usize,
        client: Option<ClientId>,
    ) -> Result<Preparation<O>, Error> {
        // Dropped after the lock.
        let mut _abandoned = Vec::new();
        let mut queue = self.shared.queue.lock();
        // Large inputs leave a quarter of the room to small ones.
        let max_bytes = match num_bytes > MAX_BYTES_OF_THREADS[0] {
            true => self.max_bytes - self.max_bytes / 4,
            false => self.max_bytes,
        };
        if num_bytes > max_bytes.saturating_sub(queue.num_bytes) {
            _abandoned = queue.take_abandoned();
        }
        let waiting_bytes = queue.num_bytes;
        if waiting_bytes > 0 && num_bytes > max_bytes.saturating_sub(waiting_bytes) {
            return Err(Error::new(
                ErrorCode::Unavailable,
                format!(
                    "the request has {num_bytes} bytes, and requests of {waiting_bytes} bytes are being tokenised, of \
                     at most {max_bytes}; try again when some of them are done"
                ),
            ));
        }
        let outcome = Arc::default();
        queue.num_bytes += num_bytes;
        let job = Job {
            input,
            num_bytes,
            outcome: Arc::clone(&outcome),
        };
        queue.waiting.add(client, job);
        // Not every thread may take it.
        self.shared.submitted.notify_all();
        Ok(Preparation { outcome, num_bytes })
    }

    /// Waits until one of `preparations` is done, for at most `max_wait`.
    pub fn wait<'a>(
        &self,
        preparations: impl Iterator<Item = &'a Preparation<O>> + Clone,
        max_wait: Duration,
    ) {
        let mut queue = self.shared.queue.lock();
        let is_none_done = |_: &mut _| !preparations.clone().any(Preparation::is_done);
        let prepared = &self.shared.prepared;
        prepared.wait_while_for(&mut queue, is_none_done, max_wait);
    }
}

impl<I, O> Queue<I, O> {
    /// Takes out the waiting inputs whose outputs nobody waits for.
    fn take_abandoned(&mut self) -> Vec<Job<I, O>> {
        let abandoned = self.waiting.extract_if(Job::is_abandoned);
        self.num_bytes -= abandoned.iter().map(|job| job.num_bytes).sum::<usize>();
        abandoned
    }
}

impl<I, O> Job<I, O> {
    fn is_abandoned(&self) -> bool {
        Arc::strong_count(&self.outcome) == 1
    }
}

impl<I, O> Drop for Preparer<I, O> {
    fn drop(&mut self) {
        let mut queue = self.shared.queue.lock();
        queue.is_closed = true;
        let unprepared = std::mem::take(&mut queue.waiting);
        self.shared.submitted.notify_all();
        drop(queue);
        drop(unprepared);
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                log::error!("a thread that prepares requests ended in a panic");
            }
        }
    }
}

impl<O> Preparation<O> {
    /// One that is done already, with this output.
    pub fn done(output: O) -> Self {
        Self {
            outcome: Arc::new(Mutex::new(Some(Ok(output)))),
            num_bytes: 0,
        }
    }

    /// Whether it may take long, so that what arrives later is not to wait for it.
    pub fn is_large(&self) -> bool {
        self.num_bytes > MAX_BYTES_OF_THREADS[0]
    }

    /// Whether [`Preparation::take`] has an outcome to give.
    pub fn is_done(&self) -> bool {
        self.outcome.lock().is_some()
    }

    /// The output, or the message of the panic that preparing it ended in; `None` until it is done, and once it has
    /// been taken.
    pub fn take(&self) -> Option<Result<O, String>> {
        self.outcome.lock().take()
    }
}

/// Prepares the inputs that a thread may take until the queue is closed.
fn run<I, O>(shared: &Shared<I, O>, thread: usize, prepare: impl Fn(I) -> O) {
    // The threads that compute steps come first.
    yield_to_others();
    while let Some(job) = next(shared, thread) {
        let num_bytes = job.num_bytes;
        let outcome = match job.is_abandoned() {
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

/// The next input that a thread may take; `None` when the queue is closed.
fn next<I, O>(shared: &Shared<I, O>, thread: usize) -> Option<Job<I, O>> {
    let mut queue = shared.queue.lock();
    loop {
        if queue.is_closed {
            return None;
        }
        let is_for_it = |job: &Job<I, O>| job.num_bytes <= MAX_BYTES_OF_THREADS[thread];
        if let Some(job) = queue.waiting.take(thread, is_for_it) {
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
        Preparer::start("test", max_bytes, prepare).expect("a thread")
    }

    fn done<O: Send + 'static>(
        preparer: &Preparer<Receiver<u32>, O>,
        preparation: &Preparation<O>,
    ) -> Result<O, String> {
        preparer.wait([preparation].into_iter(), LONG);
        preparation.take().expect("it is done")
    }

    /// Larger than what but one thread takes.
    const LARGE: usize = 1 << 20;

    #[test]
    fn inputs_of_one_client_are_prepared_in_their_order() {
        let preparer = gated(10 * LARGE);
        let (first_gate, first) = channel();
        let (second_gate, second) = channel();
        let first = preparer.submit(first, LARGE, None).expect("room");
        let second = preparer.submit(second, LARGE, None).expect("room");
        second_gate.send(2).expect("it waits");
        assert!(!second.is_done(), "the first holds the thread");
        first_gate.send(1).expect("it waits");
        assert_eq!(done(&preparer, &second), Ok(2));
        assert_eq!(first.take(), Some(Ok(1)), "the first was done before");
        assert_eq!(first.take(), None, "an output is taken once");
    }

    #[test]
    fn a_small_input_does_not_wait_for_large_ones() {
        let preparer = gated(10 * LARGE);
        let large: Vec<_> = (0..4).map(|_| channel()).collect();
        let (gates, inputs): (Vec<_>, Vec<_>) = large.into_iter().unzip();
        let submit = |input| preparer.submit(input, LARGE, None).expect("room");
        let large: Vec<_> = inputs.into_iter().map(submit).collect();
        let (gate, small) = channel();
        let small = preparer.submit(small, 100, None).expect("room");
        gate.send(7).expect("it waits");
        assert_eq!(done(&preparer, &small), Ok(7));
        assert!(large.iter().all(|it| !it.is_done()), "their gates are shut");
        drop(gates);
    }

    #[test]
    fn a_client_with_many_large_inputs_does_not_keep_another_waiting() {
        let preparer = gated(10 * LARGE);
        let submit = |client| {
            let (gate, input) = channel();
            let client = Some(ClientId(client));
            (gate, preparer.submit(input, LARGE, client).expect("room"))
        };
        let many = [submit(1), submit(1), submit(1)];
        let (other_gate, other) = submit(2);
        other_gate.send(7).expect("it waits");
        many[0].0.send(1).expect("it waits");
        assert_eq!(done(&preparer, &other), Ok(7));
        assert!(many[0].1.is_done(), "it was first");
        assert!(many[1..].iter().all(|(_, it)| !it.is_done()));
        drop(many);
    }

    #[test]
    fn abandoned_inputs_leave_their_room() {
        let preparer = gated(2 * LARGE * 4 / 3);
        let (gate, first) = channel();
        let (_never, abandoned) = channel();
        let first = preparer.submit(first, LARGE, None).expect("room");
        let abandoned = preparer.submit(abandoned, LARGE, None).expect("room");
        let (_gate, next) = channel();
        assert!(
            preparer.submit(next, LARGE, None).is_err(),
            "no room is left"
        );
        drop(abandoned);
        let (next_gate, next) = channel();
        let next = preparer.submit(next, LARGE, None).expect("room again");
        gate.send(1).expect("it waits");
        next_gate.send(2).expect("it waits");
        assert_eq!(done(&preparer, &next), Ok(2));
        assert_eq!(done(&preparer, &first), Ok(1));
    }

    #[test]
    fn a_panic_is_the_outcome_of_its_own_input_alone() {
        let preparer = gated(100);
        for (message, expected) in [(0, Err("panic: zero".to_owned())), (3, Ok(3))] {
            let (gate, input) = channel();
            let preparation = preparer.submit(input, 1, None).expect("room");
            gate.send(message).expect("it waits");
            assert_eq!(done(&preparer, &preparation), expected);
        }
    }

    #[test]
    fn an_abandoned_input_is_not_prepared() {
        let preparer = gated(10 * LARGE);
        let (first_gate, first) = channel();
        // Nobody ever opens this gate.
        let (_gate, abandoned) = channel();
        let (last_gate, last) = channel();
        let first = preparer.submit(first, LARGE, None).expect("room");
        drop(preparer.submit(abandoned, LARGE, None).expect("room"));
        let last = preparer.submit(last, LARGE, None).expect("room");
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
        let first = preparer
            .submit(first, 500, None)
            .expect("alone it may be larger");
        let error = preparer
            .submit(other, 1, None)
            .err()
            .expect("no room is left");
        assert_eq!(error.code(), ErrorCode::Unavailable);
        assert!(error.message().contains("500 bytes"), "{error}");
        gate.send(1).expect("it waits");
        assert_eq!(done(&preparer, &first), Ok(1));
        let (gate, next) = channel();
        let next = preparer
            .submit(next, 100, None)
            .expect("there is room again");
        gate.send(2).expect("it waits");
        assert_eq!(done(&preparer, &next), Ok(2));
    }

    #[test]
    fn large_inputs_leave_room_for_small_ones() {
        let preparer = gated(4 * LARGE);
        let submit = |num_bytes| {
            let (gate, input) = channel();
            preparer.submit(input, num_bytes, None).map(|it| (gate, it))
        };
        let large: Vec<_> = (0..3).map(|_| submit(LARGE).expect("room")).collect();
        let error = submit(LARGE).err().expect("the rest is for small ones");
        assert_eq!(error.code(), ErrorCode::Unavailable);
        let (gate, small) = submit(100).expect("room");
        gate.send(1).expect("it waits");
        assert_eq!(done(&preparer, &small), Ok(1));
        drop(large);
    }

    #[test]
    fn a_dropped_preparer_drops_what_waits() {
        let preparer = gated(100);
        let (first_gate, first) = channel();
        let (gate, waiting) = channel();
        let first = preparer.submit(first, 1, None).expect("room");
        let waiting = preparer.submit(waiting, 1, None).expect("room");
        first_gate.send(1).expect("it waits");
        preparer.wait([&first].into_iter(), LONG);
        // The second may have its turn or not; without a sender it ends at once.
        drop(gate);
        drop(preparer);
        assert_eq!(first.take(), Some(Ok(1)));
        assert!(!matches!(waiting.take(), Some(Ok(_))));
    }
}
