//! How the ranks of a model reach each other.

use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::Duration;

use super::other_rank::OtherRank;
use super::rank_process::RankProcess;
use super::serving::serve_mpi_rank;
use crate::base::LoadError;
use crate::collective::{Collective, CollectiveError, Grid, MpiSession, MpiWorld, ShmWorld};

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

/// What rank 0 has of a transport.
pub(super) struct Connections {
    pub(super) collective: Box<dyn Collective>,
    /// From rank 1 on.
    pub(super) others: Vec<OtherRank>,
}

impl RankTransport {
    /// Connects rank 0 with the others. No operation between them takes longer than `limit`.
    ///
    /// # Errors
    /// A process cannot be started, or a world of MPI has other processes or computes something else.
    pub(super) fn connect(&self, grid: Grid, limit: Duration) -> Result<Connections, LoadError> {
        let others = 1..grid.num_ranks();
        match self {
            Self::Processes(program) => {
                let world = ShmWorld::new(grid).map_err(resource)?;
                let collective = world.attach(0, limit).map_err(resource)?;
                let start = |rank| {
                    let (process, link) = RankProcess::start(program, rank, world.as_fd())?;
                    Ok(OtherRank::new(rank, Box::new(link), Some(process)))
                };
                Ok(Connections {
                    collective: Box::new(collective),
                    others: others.map(start).collect::<Result<_, LoadError>>()?,
                })
            }
            Self::Mpi(world) => {
                let session = MpiSession::begin(world, grid.num_ranks()).map_err(resource)?;
                let of_rank = |rank| OtherRank::new(rank, Box::new(session.link(rank)), None);
                Ok(Connections {
                    others: others.map(of_rank).collect(),
                    collective: Box::new(session.attach(grid, limit).map_err(resource)?),
                })
            }
        }
    }
}

fn resource(error: CollectiveError) -> LoadError {
    LoadError::Resource(error.to_string())
}
