//! Another rank, as rank 0 knows it.

use std::io;
use std::time::Duration;

use super::rank_gpu::RankGpu;
use super::rank_process::{Ending, RANK_PROGRAM, RankProcess};
use super::task::{BUILD, Greeting, HostMemory, Instruction, Report, receive, send};
use inflight_base::LoadError;
use inflight_collective::Channel;

/// How long a rank that lives may take to say why it has failed.
const PATIENCE: Duration = Duration::from_millis(500);
/// How long after the end of its connection the system may take to say how a process has ended.
const END_LIMIT: Duration = Duration::from_secs(5);

/// Another rank. Dropping it ends what it computes.
pub(super) struct OtherRank {
    rank: usize,
    /// `None` when it has to end.
    channel: Option<Box<dyn Channel>>,
    /// `None` if somebody else has started it.
    process: Option<RankProcess>,
}

impl OtherRank {
    /// A rank that sends its greeting over `channel`.
    pub(super) fn new(
        rank: usize,
        channel: Box<dyn Channel>,
        process: Option<RankProcess>,
    ) -> Self {
        Self {
            rank,
            channel: Some(channel),
            process,
        }
    }

    /// Waits for its greeting. Returns its host.
    ///
    /// # Errors
    /// It is of another build, or does not answer in time.
    pub(super) fn meet(&mut self, time_limit: Duration) -> Result<HostMemory, LoadError> {
        let greeting = self.with_channel(|channel| {
            channel.set_time_limit(Some(time_limit))?;
            receive::<Greeting>(channel)
        });
        match greeting {
            Ok(Some(Greeting { build, host })) if build == BUILD => Ok(host),
            Ok(Some(Greeting { build, .. })) => Err(LoadError::Resource(format!(
                "{RANK_PROGRAM} of rank {} is of build {build}, and the library of rank 0 of build {BUILD}: install both of \
                 one build",
                self.rank
            ))),
            Ok(None) => Err(self.has_ended()),
            Err(error) => Err(self.failure(&error.to_string())),
        }
    }

    /// Tells it what it has to do.
    ///
    /// # Errors
    /// It does not take it in time.
    pub(super) fn instruct(&mut self, instruction: &Instruction) -> Result<(), LoadError> {
        let sent = self.with_channel(|channel| send(channel, instruction));
        sent.map_err(|error| self.failure(&error.to_string()))
    }

    /// Waits for the GPU that it has been asked for.
    ///
    /// # Errors
    /// It cannot have it, or does not answer in time.
    pub(super) fn gpu(&mut self) -> Result<RankGpu, LoadError> {
        match self.with_channel(|channel| receive::<Result<RankGpu, String>>(channel)) {
            Ok(Some(Ok(gpu))) => Ok(gpu),
            Ok(Some(Err(reason))) => Err(self.failure(&reason)),
            Ok(None) => Err(self.has_ended()),
            Err(error) => Err(self.failure(&error.to_string())),
        }
    }

    /// Waits until it has opened the model, and takes part in the operations between ranks.
    ///
    /// # Errors
    /// It cannot, or does not answer in time.
    pub(super) fn wait_until_ready(&mut self) -> Result<(), LoadError> {
        match self.with_channel(|channel| receive::<Report>(channel)) {
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
        self.with_channel(|channel| channel.send(message))
    }

    /// No message may take longer.
    ///
    /// # Errors
    /// The system refuses it.
    pub(super) fn set_time_limit(&mut self, limit: Duration) -> io::Result<()> {
        self.with_channel(|channel| channel.set_time_limit(Some(limit)))
    }

    /// Why it has failed, if it says so, and how it has ended, if it has. May wait a moment for it.
    pub(super) fn what_happened(&mut self) -> Option<String> {
        let report = self.with_channel(|channel| {
            channel.set_time_limit(Some(PATIENCE))?;
            receive::<Report>(channel)
        });
        let rank = self.rank;
        match report {
            Ok(Some(Report::Failed(reason))) => Some(format!("rank {rank}: {reason}")),
            Ok(None) => {
                let how = self.ending()?.wait(END_LIMIT)?;
                Some(format!("the process of rank {rank} has ended ({how})"))
            }
            // It has something else to say, or nothing.
            Ok(Some(Report::Ready)) | Err(_) => None,
        }
    }

    /// How its process has ended, when it has; `None` if somebody else has started it.
    pub(super) fn ending(&self) -> Option<&Ending> {
        self.process.as_ref().map(RankProcess::ending)
    }

    /// Has it end what it computes, without waiting for that.
    pub(super) fn close(&mut self) {
        self.channel = None;
        if let Some(process) = &mut self.process {
            process.close();
        }
    }

    fn with_channel<T>(
        &mut self,
        act: impl FnOnce(&mut dyn Channel) -> io::Result<T>,
    ) -> io::Result<T> {
        match &mut self.channel {
            Some(channel) => act(&mut **channel),
            None => Err(io::Error::other("it has been ended")),
        }
    }

    fn has_ended(&self) -> LoadError {
        let how = self.ending().and_then(|ending| ending.wait(END_LIMIT));
        self.failure(&format!(
            "it has ended ({})",
            how.unwrap_or("without a status")
        ))
    }

    fn failure(&self, reason: &str) -> LoadError {
        LoadError::Resource(format!("the process of rank {}: {reason}", self.rank))
    }
}

/// Ranks that are ended together.
pub(super) struct OtherRanks(pub(super) Vec<OtherRank>);

impl OtherRanks {
    /// An error of loading, and what has happened to them.
    pub(super) fn explain_load(&mut self, error: LoadError) -> LoadError {
        match error {
            LoadError::Resource(error) => LoadError::Resource(explain(&error, &mut self.0)),
            // The configuration or a file.
            error => error,
        }
    }
}

impl Drop for OtherRanks {
    fn drop(&mut self) {
        self.0.iter_mut().for_each(OtherRank::close);
    }
}

/// An error, and what has happened to the other ranks.
pub(super) fn explain(error: &str, others: &mut [OtherRank]) -> String {
    let happened = others.iter_mut().filter_map(OtherRank::what_happened);
    let texts = std::iter::once(error.to_owned()).chain(happened);
    texts.collect::<Vec<_>>().join("; ")
}
