//! Another rank of a batch manager, in a process that `mpirun` has started.

use std::io;
use std::thread::{self, JoinHandle};

use parking_lot::Mutex;

use inflight_base::{StepError, catch_panic, panic_message};
use inflight_collective::MpiWorld;
use inflight_machines::serve_next_mpi_model;

/// Computes, on a thread of its own, what rank 0 of an MPI world asks for, until the batch manager of rank 0 has ended.
/// It has no requests.
///
/// Dropping it waits for that.
pub struct ServingRank {
    /// `None` when it has ended.
    thread: Mutex<Option<JoinHandle<Result<(), StepError>>>>,
}

impl ServingRank {
    /// Waits for the next batch manager of rank 0, and computes its share of that.
    ///
    /// # Errors
    /// The system refuses the thread.
    pub(super) fn start(world: MpiWorld) -> io::Result<Self> {
        let serve = move || {
            let served = catch_panic(|| serve_next_mpi_model(&world));
            served.unwrap_or_else(|panic| Err(StepError(panic)))
        };
        let thread = thread::Builder::new().name("inflight-rank".to_owned());
        Ok(Self {
            thread: Mutex::new(Some(thread.spawn(serve)?)),
        })
    }

    /// Waits until the batch manager of rank 0 has ended.
    ///
    /// # Errors
    /// This rank has failed, or rank 0 has ended without a batch manager. Only the first call returns it.
    pub fn join(&self) -> Result<(), StepError> {
        // Locked until the thread has ended, so that every caller waits for it.
        let mut thread = self.thread.lock();
        let ended = thread.take().map_or(Ok(Ok(())), JoinHandle::join);
        ended.unwrap_or_else(|panic| Err(StepError(panic_message(panic))))
    }
}

impl Drop for ServingRank {
    fn drop(&mut self) {
        // Rank 0 knows of an error.
        let _ = self.join();
    }
}
