//! The process of another rank, from the start to the end.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::task::{BUILD, Greeting, Report, Task, receive, send};
use crate::base::LoadError;
use crate::collective::Link;

/// The program that is another rank. It lies beside the library.
pub const RANK_PROGRAM: &str = "inflight-rank";

/// How often its keeper looks whether a process has ended.
const PERIOD: Duration = Duration::from_millis(50);
/// How long a process may take to end by itself.
const GRACE: Duration = Duration::from_secs(1);
/// How long a process that lives may take to say why it has failed.
const PATIENCE: Duration = Duration::from_millis(500);
/// How long after the end of its connection the system may take to say how a process has ended.
const END_LIMIT: Duration = Duration::from_secs(5);

/// A process that is another rank. Dropping it ends the process.
pub(super) struct RankProcess {
    rank: usize,
    /// `None` when the process has to end.
    link: Option<Link>,
    until: Option<SyncSender<()>>,
    ending: Ending,
    keeper: Option<JoinHandle<()>>,
}

/// How a process has ended, when it has.
#[derive(Clone, Default)]
pub(super) struct Ending(Arc<OnceLock<String>>);

impl RankProcess {
    /// Starts the process.
    ///
    /// # Errors
    /// The system refuses it, or there is no such program.
    pub(super) fn start(program: &Path, rank: usize) -> Result<Self, LoadError> {
        let cannot = |error: io::Error| {
            LoadError::Resource(format!(
                "the process of rank {rank} cannot be started: {}: {error}",
                program.display()
            ))
        };
        let (link, theirs) = Link::pair().map_err(cannot)?;
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
        Ok(Self {
            rank,
            link: Some(link),
            until: Some(until),
            ending,
            keeper: Some(keeper),
        })
    }

    /// Tells it what it has to load, and gives it the shared memory.
    ///
    /// # Errors
    /// It is of another build, or does not answer in time.
    pub(super) fn instruct(
        &mut self,
        task: &Task,
        memory: BorrowedFd<'_>,
        time_limit: Duration,
    ) -> Result<(), LoadError> {
        let instructed = self.link(|link| {
            link.set_time_limit(Some(time_limit))?;
            let Some(greeting) = receive::<Greeting>(link)? else {
                return Ok(None);
            };
            if greeting.build == BUILD {
                send(link, task)?;
                link.send_file(memory)?;
            }
            Ok(Some(greeting.build))
        });
        match instructed {
            Ok(Some(build)) if build == BUILD => Ok(()),
            Ok(Some(build)) => Err(LoadError::Resource(format!(
                "{RANK_PROGRAM} is of build {build}, and the library beside it of build {BUILD}: install both of one \
                 build"
            ))),
            Ok(None) => Err(self.has_ended()),
            Err(error) => Err(self.failure(&error.to_string())),
        }
    }

    /// Waits until it has opened the model, and takes part in the operations between ranks.
    ///
    /// # Errors
    /// It cannot, or does not answer in time.
    pub(super) fn wait_until_ready(&mut self) -> Result<(), LoadError> {
        match self.link(receive::<Report>) {
            Ok(Some(Report::Ready)) => Ok(()),
            Ok(Some(Report::Failed(reason))) => Err(self.failure(&reason)),
            Ok(None) => Err(self.has_ended()),
            Err(error) => Err(self.failure(&error.to_string())),
        }
    }

    /// Sends it a message, which it must read in time.
    ///
    /// # Errors
    /// It does not, or has ended.
    pub(super) fn send(&mut self, message: &[u8]) -> io::Result<()> {
        self.link(|link| link.send(message))
    }

    /// No message may take longer.
    ///
    /// # Errors
    /// The system refuses it.
    pub(super) fn set_time_limit(&mut self, limit: Duration) -> io::Result<()> {
        self.link(|link| link.set_time_limit(Some(limit)))
    }

    /// Why it has failed, if it says so, and how it has ended, if it has. May wait a moment for it.
    pub(super) fn what_happened(&mut self) -> Option<String> {
        let report = self.link(|link| {
            link.set_time_limit(Some(PATIENCE))?;
            receive::<Report>(link)
        });
        let rank = self.rank;
        match report {
            Ok(Some(Report::Failed(reason))) => Some(format!("rank {rank}: {reason}")),
            Ok(None) => {
                let how = self.ending.wait(END_LIMIT)?;
                Some(format!("the process of rank {rank} has ended ({how})"))
            }
            // It has something else to say, or nothing.
            Ok(Some(Report::Ready)) | Err(_) => None,
        }
    }

    /// How it has ended, when it has.
    pub(super) fn ending(&self) -> &Ending {
        &self.ending
    }

    /// Has it end, without waiting for that.
    pub(super) fn close(&mut self) {
        self.link = None;
        self.until = None;
    }

    fn link<T>(&mut self, act: impl FnOnce(&mut Link) -> io::Result<T>) -> io::Result<T> {
        match &mut self.link {
            Some(link) => act(link),
            None => Err(io::Error::other("the process has been ended")),
        }
    }

    fn has_ended(&self) -> LoadError {
        let how = self.ending.wait(END_LIMIT).unwrap_or("without a status");
        self.failure(&format!("it has ended ({how})"))
    }

    fn failure(&self, reason: &str) -> LoadError {
        LoadError::Resource(format!("the process of rank {}: {reason}", self.rank))
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

    fn set(&self, how: String) {
        self.0.get_or_init(|| how);
    }

    /// The same; waits for it for some time.
    fn wait(&self, limit: Duration) -> Option<&str> {
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
