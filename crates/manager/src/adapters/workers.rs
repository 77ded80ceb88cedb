//! Threads that do one task after the other. There are as many as there are tasks at a time, up to a limit, so a task
//! that takes long holds up others only when all threads have one.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use parking_lot::{Condvar, Mutex};

use inflight_threads::yield_to_others;

type Task = Box<dyn FnOnce() + Send>;

/// A pool of threads, which start with tasks and end with [`close`](Workers::close).
pub(super) struct Workers {
    name: &'static str,
    max_threads: usize,
    queue: Arc<Queue>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    tasks: VecDeque<Task>,
    num_idle: usize,
    is_closed: bool,
}

impl Workers {
    /// No threads yet, and up to `max_threads` later.
    pub(super) fn new(name: &'static str, max_threads: usize) -> Self {
        Self {
            name,
            max_threads: max_threads.max(1),
            queue: Arc::default(),
            threads: Mutex::default(),
        }
    }

    /// Has a thread do a task, after those before it. It is dropped if the pool is closed first.
    ///
    /// # Errors
    /// There is no thread, and none can be started.
    pub(super) fn push(&self, task: impl FnOnce() + Send + 'static) -> io::Result<()> {
        // Before the queue: two that push at a time must not both start the last thread.
        let mut threads = self.threads.lock();
        let mut state = self.queue.state.lock();
        if state.is_closed {
            return Ok(());
        }
        if state.num_idle <= state.tasks.len() && threads.len() < self.max_threads {
            let queue = Arc::clone(&self.queue);
            let builder = thread::Builder::new().name(self.name.to_owned());
            match builder.spawn(move || queue.run()) {
                Ok(thread) => threads.push(thread),
                Err(error) if threads.is_empty() => return Err(error),
                Err(error) => log::warn!("cannot start one more thread for adapters: {error}"),
            }
        }
        state.tasks.push_back(Box::new(task));
        self.queue.changed.notify_one();
        Ok(())
    }

    /// Drops the tasks that wait, and ends the threads when they have done theirs.
    pub(super) fn close(&self) {
        let mut state = self.queue.state.lock();
        state.is_closed = true;
        let tasks = std::mem::take(&mut state.tasks);
        drop(state);
        drop(tasks);
        self.queue.changed.notify_all();
        let threads = std::mem::take(&mut *self.threads.lock());
        for thread in threads {
            if thread.join().is_err() {
                log::error!("a thread that loads adapters ended in a panic");
            }
        }
    }
}

impl Queue {
    fn run(&self) {
        // The threads that compute steps come first.
        yield_to_others();
        let mut state = self.state.lock();
        while !state.is_closed {
            match state.tasks.pop_front() {
                Some(task) => {
                    drop(state);
                    task();
                    state = self.state.lock();
                }
                None => {
                    state.num_idle += 1;
                    self.changed.wait(&mut state);
                    state.num_idle -= 1;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Duration;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    /// A task that tells when it begins, and ends when it is told to.
    fn slow(workers: &Workers) -> (Receiver<()>, Sender<()>) {
        let (began, begins) = channel();
        let (end, ends) = channel();
        let task = move || {
            began.send(()).expect("the test waits");
            let _ended = ends.recv();
        };
        workers.push(task).expect("a thread");
        (begins, end)
    }

    #[test]
    fn slow_tasks_hold_up_others_only_when_every_thread_has_one() {
        let workers = Workers::new("test", 2);
        let (first_begins, end_first) = slow(&workers);
        first_begins.recv_timeout(LONG).expect("it begins");
        for _ in 0..100 {
            let (begins, end) = slow(&workers);
            begins.recv_timeout(LONG).expect("beside the first");
            drop(end);
        }
        let (second_begins, end_second) = slow(&workers);
        second_begins.recv_timeout(LONG).expect("beside the first");
        let (third_begins, _end_third) = slow(&workers);
        assert!(third_begins.try_recv().is_err());
        assert_eq!(workers.threads.lock().len(), 2);
        drop(end_first);
        third_begins.recv_timeout(LONG).expect("after the first");
        drop((end_second, _end_third));
        workers.close();
    }

    #[test]
    fn threads_start_with_tasks_and_end_with_the_pool() {
        let workers = Workers::new("test", 4);
        assert!(workers.threads.lock().is_empty());
        let (begins, end) = slow(&workers);
        begins.recv_timeout(LONG).expect("it begins");
        assert_eq!(workers.threads.lock().len(), 1);
        drop(end);
        workers.close();
        // What comes later, or waits, is dropped.
        let (late, _end) = slow(&workers);
        assert!(late.recv_timeout(LONG).is_err());
        assert_eq!(Arc::strong_count(&workers.queue), 1);
    }
}
