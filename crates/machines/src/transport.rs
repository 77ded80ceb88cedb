//! How the ranks of a model reach each other.

use std::iter;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::Duration;

use super::other_rank::{OtherRank, OtherRanks};
use super::rank_gpu::{GpuChoice, RankGpu, gpus_by_host};
use super::rank_memory::{RankMemory, bytes_of_host};
use super::rank_process::RankProcess;
use super::serving::serve_mpi_rank;
use super::task::{HostMemory, Instruction};
use inflight_base::LoadError;
use inflight_collective::{Collective, CollectiveError, Grid, MpiSession, MpiWorld, ShmWorld};
use inflight_device::host_id;

/// How long a process may take to start.
const START_LIMIT: Duration = Duration::from_secs(60);

/// How the ranks of a model reach each other.
#[derive(Clone)]
pub enum RankTransport {
    /// They are processes of one host, which rank 0 starts from this program, and share memory.
    Processes(PathBuf),
    /// They are the processes of this MPI world, which wait in [`serve_mpi_rank`].
    Mpi(MpiWorld),
}

/// Leaves the MPI world that this process has joined, if it has, when it computes no more. Rank 0 ends the others.
/// Another rank computes what rank 0 still asks for until then.
pub fn leave_mpi_world() {
    let Some(world) = MpiWorld::joined() else {
        return;
    };
    let ended = match world.rank() {
        Ok(0) => MpiSession::end_all(&world),
        Ok(_) => serve_mpi_rank(&world),
        Err(error) => Err(error),
    };
    if let Err(error) = ended {
        log::warn!("the ranks of mpirun have not ended together: {error}");
    }
    world.leave();
}

/// Rank 0 and the others, which have not loaded anything yet. Dropping it ends them.
pub struct RankConnections {
    pub(super) grid: Grid,
    pub(super) collective: Box<dyn Collective>,
    pub(super) others: OtherRanks,
    /// The memory of the other ranks' hosts.
    hosts: Vec<HostMemory>,
}

impl RankConnections {
    /// Memory available to all ranks, in equal shares. `host_bytes` are free on rank 0's host, for all ranks there;
    /// `process_bytes` are left to rank 0's process. `None` if no host reports its memory.
    pub fn memory(
        &self,
        host_bytes: Option<u64>,
        process_bytes: Option<u64>,
    ) -> Option<RankMemory> {
        let own = HostMemory {
            id: host_id(),
            available_bytes: host_bytes,
            limit_bytes: process_bytes,
        };
        RankMemory::of_hosts(iter::once(&own).chain(&self.hosts))
    }

    /// The GPUs that all ranks have if those of a host have one after the other: from `own` on at rank 0's host, from 0
    /// on at others.
    pub fn gpus_by_host(&self, own: usize) -> Vec<usize> {
        let own_host = host_id();
        let others = self.hosts.iter().map(|host| &*host.id);
        gpus_by_host(
            &iter::once(&*own_host).chain(others).collect::<Vec<_>>(),
            own,
        )
    }

    /// The GPUs of all ranks but rank 0, for each of which there is a choice. They are asked at the same time.
    ///
    /// # Errors
    /// A rank cannot have its GPU, or does not answer in time.
    pub fn gpus(&mut self, choices: &[GpuChoice]) -> Result<Vec<RankGpu>, LoadError> {
        let others = &mut self.others.0;
        for (other, choice) in others.iter_mut().zip(choices) {
            other.instruct(&Instruction::ReportGpu(*choice))?;
        }
        others.iter_mut().map(OtherRank::gpu).collect()
    }

    /// Of memory that all ranks take together, each the same, what those on the host of rank 0 take.
    pub fn bytes_of_own_host(&self, bytes_of_all: u64) -> u64 {
        bytes_of_host(&host_id(), &self.hosts, bytes_of_all)
    }
}

impl RankTransport {
    /// Connects rank 0 with the others. No operation between them takes longer than `limit`.
    ///
    /// # Errors
    /// There are too many, a process cannot be started, is of another build or does not answer in time, or a world of
    /// MPI has other processes or computes something else.
    pub fn connect(
        &self,
        grid: impl Into<Grid>,
        limit: Duration,
    ) -> Result<RankConnections, LoadError> {
        let grid = grid.into();
        let (collective, mut others) = self.open(grid, limit)?;
        let met = others.0.iter_mut();
        let hosts = met.map(|other| other.meet(START_LIMIT.min(limit)));
        Ok(RankConnections {
            grid,
            collective,
            hosts: hosts.collect::<Result<_, _>>()?,
            others,
        })
    }

    /// Takes part as rank 0.
    fn open(
        &self,
        grid: Grid,
        limit: Duration,
    ) -> Result<(Box<dyn Collective>, OtherRanks), LoadError> {
        if grid.checked_num_ranks().is_none() {
            return Err(resource(CollectiveError::TooManyRanks(grid)));
        }
        let others = 1..grid.num_ranks();
        match self {
            Self::Processes(program) => {
                let world = ShmWorld::new(grid).map_err(resource)?;
                let collective = world.attach(0, limit).map_err(resource)?;
                let start = |rank| {
                    let (process, link) = RankProcess::start(program, rank, world.as_fd())?;
                    Ok(OtherRank::new(rank, Box::new(link), Some(process)))
                };
                let others = others.map(start).collect::<Result<_, LoadError>>()?;
                Ok((Box::new(collective), OtherRanks(others)))
            }
            Self::Mpi(world) => {
                let session = MpiSession::begin(world, grid.num_ranks()).map_err(resource)?;
                let of_rank = |rank| OtherRank::new(rank, Box::new(session.link(rank)), None);
                let others = OtherRanks(others.map(of_rank).collect());
                let collective = session.attach(grid, limit).map_err(resource)?;
                Ok((Box::new(collective), others))
            }
        }
    }
}

fn resource(error: CollectiveError) -> LoadError {
    LoadError::Resource(error.to_string())
}
