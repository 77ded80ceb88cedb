//! How the ranks of a model reach each other.

use std::ffi::OsString;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::Duration;

use super::other_rank::{OtherRank, OtherRanks};
use super::rank_process::RankProcess;
use super::serving::serve_mpi_rank;
use super::task::RankHost;
use crate::base::LoadError;
use crate::collective::{Collective, CollectiveError, Grid, MpiSession, MpiWorld, ShmWorld};
use crate::device::host_id;

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

/// Leaves the MPI world that this process has joined, if it has, when it computes no more. Rank 0 ends the others. Another rank
/// computes what rank 0 still asks for until then.
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
    /// Those of the others.
    hosts: Vec<RankHost>,
}

impl RankConnections {
    /// The memory that all ranks can have together, each the same, where rank 0 may take `own_bytes` of its host for itself and the
    /// others that are there. `None` if no system tells.
    pub fn available_bytes(&self, own_bytes: Option<u64>) -> Option<u64> {
        let own = RankHost {
            id: host_id(),
            available_bytes: own_bytes,
            limit_bytes: None,
        };
        bytes_of_all(&own, &self.hosts)
    }

    /// Of memory that all ranks take together, each the same, what those on the host of rank 0 take.
    pub fn bytes_of_own_host(&self, bytes_of_all: u64) -> u64 {
        own_bytes(&host_id(), &self.hosts, bytes_of_all)
    }
}

impl RankTransport {
    /// Connects rank 0 with the others. No operation between them takes longer than `limit`.
    ///
    /// # Errors
    /// There are too many, a process cannot be started, is of another build or does not answer in time, or a world of MPI has
    /// other processes or computes something else.
    pub fn connect(
        &self,
        grid: impl Into<Grid>,
        limit: Duration,
    ) -> Result<RankConnections, LoadError> {
        let grid = grid.into();
        let (collective, mut others) = self.open(grid, limit, &[])?;
        let met = others.0.iter_mut();
        let hosts = met.map(|other| other.meet(START_LIMIT.min(limit)));
        Ok(RankConnections {
            grid,
            collective,
            hosts: hosts.collect::<Result<_, _>>()?,
            others,
        })
    }

    /// Takes part as rank 0. Processes of this host are started with these arguments.
    pub(super) fn open(
        &self,
        grid: Grid,
        limit: Duration,
        arguments: &[OsString],
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
                    let (process, link) =
                        RankProcess::start(program, rank, arguments, world.as_fd())?;
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

/// What all ranks can have together, each the same, given the hosts of rank 0 and of the others. Those of a host share what any of
/// them says is free there: rank 0 knows what is reserved, and another one may be in a container.
fn bytes_of_all(own: &RankHost, others: &[RankHost]) -> Option<u64> {
    let all = || std::iter::once(own).chain(others);
    let num_at = |id: &str| all().filter(|host| host.id == id).count() as u128;
    let num_ranks = 1 + others.len() as u128;
    let shares = all().flat_map(|host| {
        let shared = host.available_bytes.map(|bytes| (bytes, num_at(&host.id)));
        [shared, host.limit_bytes.map(|bytes| (bytes, 1))]
    });
    let of_all = shares.flatten().map(|(bytes, num_ranks_there)| {
        let bytes = u128::from(bytes) * num_ranks / num_ranks_there;
        u64::try_from(bytes).unwrap_or(u64::MAX)
    });
    of_all.min()
}

/// The part of memory of all ranks, each the same, that those on the host `own_id` of rank 0 have, rounded up.
fn own_bytes(own_id: &str, others: &[RankHost], bytes_of_all: u64) -> u64 {
    let num_ranks = 1 + others.len() as u128;
    let num_here = 1 + others.iter().filter(|other| other.id == own_id).count() as u128;
    let bytes = (u128::from(bytes_of_all) * num_here).div_ceil(num_ranks);
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(id: &str, available_bytes: impl Into<Option<u64>>) -> RankHost {
        RankHost {
            id: id.to_owned(),
            available_bytes: available_bytes.into(),
            limit_bytes: None,
        }
    }

    #[test]
    fn the_host_with_the_least_for_each_of_its_ranks_decides() {
        let a = host("a", 1000);
        // Rank 0 knows of models that are reserved there.
        assert_eq!(bytes_of_all(&a, &[host("a", 4000)]), Some(1000));
        // A rank in a container has less.
        assert_eq!(bytes_of_all(&a, &[host("a", 300)]), Some(300));
        assert_eq!(bytes_of_all(&a, &[host("b", 3000)]), Some(2000));
        assert_eq!(bytes_of_all(&a, &[host("b", 300)]), Some(600));
        let two_there = [host("b", 1500), host("b", 1400), host("a", 4000)];
        assert_eq!(bytes_of_all(&a, &two_there), Some(2000));
        let three_there = [host("b", 1200), host("b", 1200), host("b", 1200)];
        assert_eq!(bytes_of_all(&a, &three_there), Some(1600));
        assert_eq!(bytes_of_all(&a, &[host("b", None)]), Some(2000));
        assert_eq!(bytes_of_all(&host("a", None), &[host("b", 7)]), Some(14));
        assert_eq!(bytes_of_all(&host("a", None), &[host("a", None)]), None);
        assert_eq!(bytes_of_all(&host("a", u64::MAX), &[]), Some(u64::MAX));
    }

    #[test]
    fn the_process_with_the_least_memory_decides() {
        let limited = |available_bytes: Option<u64>, limit_bytes| RankHost {
            limit_bytes: Some(limit_bytes),
            ..host("a", available_bytes)
        };
        let own = host("a", 1000);
        let bytes = |other: RankHost| bytes_of_all(&own, &[other]);
        assert_eq!(bytes(limited(Some(4000), 100)), Some(200));
        assert_eq!(bytes(limited(Some(4000), 9000)), Some(1000));
        assert_eq!(bytes(limited(None, 3)), Some(6));
    }

    #[test]
    fn memory_of_other_hosts_is_not_reserved_here() {
        assert_eq!(own_bytes("a", &[], u64::MAX), u64::MAX);
        assert_eq!(own_bytes("a", &[host("a", 1)], 1001), 1001);
        assert_eq!(own_bytes("a", &[host("b", 1)], 1001), 501);
        let others = [host("b", 1), host("a", None), host("b", 2)];
        assert_eq!(own_bytes("a", &others, 1000), 500);
    }
}
