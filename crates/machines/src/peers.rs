//! Ranks that each have an engine: the application runs on all of them, and gives each the same requests.
//!
//! ```text
//! rank 0   greeting <-  what must be equal ->  ready <-   steps: operations between ranks   at its end <-  all are ->
//! rank 1   greeting ->  what must be equal <-  ready ->   steps: operations between ranks   at its end ->  all are <-
//! ```

use std::env;
use std::os::fd::AsFd;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::leader::RankLimits;
use super::other_rank::{OtherRank, OtherRanks, explain};
use super::task::{BUILD, Greeting, HostMemory, Report, receive, send};
use super::transport::RankTransport;
use inflight_base::{LoadError, StepError};
use inflight_collective::{Channel, Collective, Grid, Link, MpiSession, Shm, end_with_parent};

/// How long another process may take to come, as rank 0 has it.
const START_LIMIT: Duration = Duration::from_secs(60);

/// The other ranks of a model of which each has an engine. Dropping it ends those that rank 0 has started.
pub struct Peers {
    side: Side,
    limit: Duration,
}

enum Side {
    /// Of rank 0.
    First(OtherRanks),
    /// Of another rank: rank 0.
    Other(Box<dyn Channel>),
}

/// What all ranks must have alike: names, and values as text.
#[derive(Serialize, Deserialize)]
struct Common(Vec<(String, String)>);

impl RankTransport {
    /// Connects this rank with the others, each of which does the same. `common` is what all must have alike: names and
    /// values.
    ///
    /// Rank 0 starts processes of its host by `rank=N`, followed by the arguments of its own program.
    ///
    /// # Errors
    /// As [`RankTransport::connect`], or this rank and rank 0 differ.
    pub fn meet_peers(
        &self,
        grid: Grid,
        limits: RankLimits,
        common: &[(&str, String)],
    ) -> Result<(Peers, Box<dyn Collective>), LoadError> {
        let common = common.iter().cloned();
        let common = Common(
            common
                .map(|(name, value)| (name.to_owned(), value))
                .collect(),
        );
        let is_first = match self {
            Self::Processes(_) => started_rank().is_none(),
            Self::Mpi(world) => world.rank().map_err(resource)? == 0,
        };
        let (side, collective) = match is_first {
            true => self.meet_others(grid, limits.load, &common)?,
            false => self.meet_first(grid, limits.load, &common)?,
        };
        let peers = Peers {
            side,
            limit: limits.step,
        };
        Ok((peers, collective))
    }

    fn meet_others(
        &self,
        grid: Grid,
        limit: Duration,
        common: &Common,
    ) -> Result<(Side, Box<dyn Collective>), LoadError> {
        let arguments: Vec<_> = env::args_os().skip(1).collect();
        let (collective, mut others) = self.open(grid, limit, &arguments)?;
        for other in &mut others.0 {
            other.meet(START_LIMIT.min(limit))?;
            other.instruct(common)?;
        }
        for other in &mut others.0 {
            other.wait_until_ready()?;
        }
        Ok((Side::First(others), collective))
    }

    fn meet_first(
        &self,
        grid: Grid,
        limit: Duration,
        common: &Common,
    ) -> Result<(Side, Box<dyn Collective>), LoadError> {
        match self {
            Self::Processes(_) => {
                let failed = |error: std::io::Error| {
                    resource(format!(
                        "this process was not started by rank 0, though its first argument says so: {error}"
                    ))
                };
                let rank = started_rank().unwrap_or_default();
                end_with_parent();
                let mut link = Link::of_standard_input().map_err(failed)?;
                link.set_time_limit(Some(START_LIMIT)).map_err(failed)?;
                let memory = link.receive_file().map_err(failed)?;
                introduce(&mut link, common)?;
                let collective = Shm::attach(memory.as_fd(), rank, limit).map_err(resource)?;
                answer(Box::new(link), Box::new(collective))
            }
            Self::Mpi(world) => {
                let session = MpiSession::next(world).map_err(resource)?;
                let session = session.ok_or_else(|| {
                    resource("rank 0 of the processes of mpirun has ended without another manager")
                })?;
                let mut link = session.link(0);
                link.set_time_limit(Some(START_LIMIT)).map_err(resource)?;
                introduce(&mut link, common)?;
                let collective = session.attach(grid, limit).map_err(resource)?;
                answer(Box::new(link), Box::new(collective))
            }
        }
    }
}

impl Peers {
    /// An error of loading on this rank, and what has happened to the others. They are told.
    pub fn explain_load(&mut self, error: LoadError) -> LoadError {
        match &mut self.side {
            Side::First(others) => others.explain_load(error),
            Side::Other(channel) => {
                let _ = send(&mut **channel, &Report::Failed(error.to_string()));
                error
            }
        }
    }

    /// An error of a step on this rank, and what has happened to the others, as far as rank 0 knows. Waits for them no
    /// longer.
    pub fn explain(&mut self, error: StepError) -> StepError {
        self.limit = Duration::ZERO;
        match &mut self.side {
            Side::First(others) => StepError(explain(&error.0, &mut others.0)),
            Side::Other(channel) => {
                let _ = send(&mut **channel, &Report::Failed(error.0.clone()));
                error
            }
        }
    }

    /// Waits until all ranks have come to their end, but no longer than for a step. Until then no rank may drop what
    /// takes part in their operations.
    pub fn end_together(&mut self) {
        let Self { side, limit } = self;
        if limit.is_zero() {
            return;
        }
        match side {
            Side::First(others) => others.end_together(*limit),
            Side::Other(channel) => {
                // Rank 0 may have ended after a failure.
                let _ = channel
                    .set_time_limit(Some(*limit))
                    .and_then(|()| send(&mut **channel, &Report::Ready))
                    .and_then(|()| receive::<Report>(&mut **channel));
            }
        }
    }
}

/// Says what this rank is, and compares what it has with what rank 0 has.
fn introduce(channel: &mut dyn Channel, own: &Common) -> Result<(), LoadError> {
    let greeting = Greeting {
        build: BUILD.to_owned(),
        host: HostMemory::own(),
    };
    send(channel, &greeting).map_err(resource)?;
    let first = receive::<Common>(channel).map_err(resource)?;
    let first = first.ok_or_else(|| resource("rank 0 has ended"))?;
    let differs = |((name, own), (_, first)): &(&(String, String), &(String, String))| {
        (own != first).then(|| {
            format!("{name} of this rank differ from those of rank 0: {own}, and not {first}")
        })
    };
    let reason = match own.0.len() == first.0.len() {
        true => own.0.iter().zip(&first.0).find_map(|pair| differs(&pair)),
        false => Some("rank 0 is of another version".to_owned()),
    };
    let Some(reason) = reason else {
        return Ok(());
    };
    let _ = send(channel, &Report::Failed(reason.clone()));
    Err(resource(reason))
}

/// Says that this rank takes part.
fn answer(
    mut channel: Box<dyn Channel>,
    collective: Box<dyn Collective>,
) -> Result<(Side, Box<dyn Collective>), LoadError> {
    send(&mut *channel, &Report::Ready).map_err(resource)?;
    Ok((Side::Other(channel), collective))
}

/// The rank that rank 0 has started this process as; `None` if it is rank 0 itself.
fn started_rank() -> Option<usize> {
    env::args().nth(1)?.strip_prefix("rank=")?.parse().ok()
}

fn resource(error: impl ToString) -> LoadError {
    LoadError::Resource(error.to_string())
}

impl OtherRanks {
    fn end_together(&mut self, limit: Duration) {
        for other in &mut self.0 {
            // One that has failed has said so to all.
            let _ = other.set_time_limit(limit);
            let _ = other.wait_until_ready();
        }
        for other in &mut self.0 {
            other.let_end();
        }
        self.0.iter().for_each(OtherRank::wait_for_end);
    }
}
