//! The process of another rank on the host of rank 0, from the start to the end.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use inflight_base::LoadError;
use inflight_collective::Link;

/// The program that is another rank. It lies beside the library.
pub const RANK_PROGRAM: &str = "inflight-rank";

/// How often its keeper looks whether a process has ended.
const PERIOD: Duration = Duration::from_millis(50);
/// How long a process may take to end by itself.
const GRACE: Duration = Duration::from_secs(1);

/// A process that is another rank. Dropping it ends the process.
pub(super) struct RankProcess {
    rank: usize,
    /// `None` when the process has to end.
    until: Option<SyncSender<()>>,
    ending: Ending,
    keeper: Option<JoinHandle<()>>,
}

/// How a process has ended, when it has.
#[derive(Clone, Default)]
pub(super) struct Ending(Arc<OnceLock<String>>);

impl RankProcess {
    /// Starts the process with the argument `rank=N`, and gives it the shared memory. Returns the connection with it,
    /// too.
    ///
    /// # Errors
    /// The system refuses it, or there is no such program.
    pub(super) fn start(
        program: &Path,
        rank: usize,
        memory: BorrowedFd<'_>,
    ) -> Result<(Self, Link), LoadError> {
        let cannot = |error: io::Error| {
            LoadError::Resource(format!(
                "the process of rank {rank} cannot be started: {}: {error}",
                program.display()
            ))
        };
        let (mut link, theirs) = Link::pair().map_err(cannot)?;
        // Before the process may end.
        link.send_file(memory).map_err(cannot)?;
        let mut command = Command::new(program);
        command.arg(format!("rank={rank}"));
        command.stdin(OwnedFd::from(theirs));
        let ending = Ending::default();
        let (until, end) = sync_channel(0);
        let (started, result) = sync_channel(1);
        let own = ending.clone();
        // The system ends the process with the thread that has started it, so this one stays.
        let keep = move || {
            let child = command.spawn();
            drop(command);
            match child {
                Ok(child) => {
                    let _ = started.send(Ok(()));
                    own.set(keep(child, &end));
                }
                Err(error) => drop(started.send(Err(error))),
            }
        };
        let keeper = thread::Builder::new().name(format!("inflight-rank-{rank}"));
        let keeper = keeper.spawn(keep).map_err(cannot)?;
        let started = result
            .recv()
            .unwrap_or_else(|_| Err(io::Error::other("its thread has ended")));
        started.map_err(cannot)?;
        let process = Self {
            rank,
            until: Some(until),
            ending,
            keeper: Some(keeper),
        };
        Ok((process, link))
    }

    /// How it has ended, when it has.
    pub(super) fn ending(&self) -> &Ending {
        &self.ending
    }

    /// Has it end, without waiting for that, when its connection is closed.
    pub(super) fn close(&mut self) {
        self.until = None;
    }
}

impl Drop for RankProcess {
    fn drop(&mut self) {
        self.close();
        if let Some(keeper) = self.keeper.take()
            && keeper.join().is_err()
        {
            log::error!("the thread of rank {} ended in a panic", self.rank);
        }
    }
}

impl Ending {
    /// How the process has ended, if it has.
    pub(super) fn get(&self) -> Option<&str> {
        self.0.get().map(String::as_str)
    }

    /// Of a process that has ended so.
    #[cfg(test)]
    pub(super) fn of(how: &str) -> Self {
        let ending = Self::default();
        ending.set(how.to_owned());
        ending
    }

    fn set(&self, how: String) {
        self.0.get_or_init(|| how);
    }

    /// The same; waits for it for some time.
    pub(super) fn wait(&self, limit: Duration) -> Option<&str> {
        let deadline = Instant::now() + limit;
        while self.0.get().is_none() && Instant::now() < deadline {
            thread::sleep(PERIOD / 10);
        }
        self.get()
    }
}

/// Waits until a process has ended, and says how. When the other end of `until` is dropped, it has to end.
fn keep(mut child: Child, until: &Receiver<()>) -> String {
    loop {
        if let Some(how) = how_ended(&mut child) {
            return how;
        }
        if until.recv_timeout(PERIOD) != Err(RecvTimeoutError::Timeout) {
            break;
        }
    }
    let deadline = Instant::now() + GRACE;
    while Instant::now() < deadline {
        if let Some(how) = how_ended(&mut child) {
            return how;
        }
        thread::sleep(PERIOD / 10);
    }
    // A process that is stopped ends, too. One that the system does not let end is left to it.
    let killed = child.kill().and_then(|()| child.wait());
    killed.map_or_else(|error| error.to_string(), |status| status.to_string())
}

fn how_ended(child: &mut Child) -> Option<String> {
    match child.try_wait() {
        Ok(None) => None,
        Ok(Some(status)) => Some(status.to_string()),
        // Somebody else has waited for it.
        Err(error) => Some(error.to_string()),
    }
}
