//! The time in which a world computes one model.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::super::error::CollectiveError;
use super::super::grid::Grid;
use super::exchange::Mpi;
use super::link::MpiLink;
use super::messages::{Kind, Session};
use super::plugin::Tag;
use super::wait::wait_for;
use super::world::MpiWorld;

/// Tells the number of a session from anything else.
const MAGIC: u32 = 0x696e_6603;
/// The session that is none: messages before and after all.
const NONE: u32 = 0;

/// The time in which a world computes one model. A rank may use it only on the thread that computes.
#[derive(Clone)]
pub struct MpiSession(Arc<Session>);

impl MpiSession {
    /// Begins a session on all ranks of a world. For rank 0.
    ///
    /// # Errors
    ///
    /// There is one, the world has more or fewer processes, or this is another rank.
    pub fn begin(world: &MpiWorld, num_ranks: usize) -> Result<Self, CollectiveError> {
        let (rank, size) = (world.rank()?, world.size()?);
        if rank != 0 {
            return Err(CollectiveError::World(format!(
                "this is rank {rank} of the processes of mpirun, and a model is served by rank 0"
            )));
        }
        if size != num_ranks {
            return Err(CollectiveError::World(format!(
                "mpirun has started {size} processes, and the model has {num_ranks} ranks: start one process for each rank"
            )));
        }
        let number = world.take()?;
        let (plugin, _) = world.plugin()?;
        let session = Session {
            plugin,
            rank,
            size,
            number,
            world: Some(world.clone()),
            is_closed: AtomicBool::new(false),
        };
        announce(&session, number)?;
        Ok(Self(Arc::new(session)))
    }

    /// Waits for the next session; `None` if there will be none. For the other ranks.
    ///
    /// # Errors
    ///
    /// MPI fails, or this is rank 0.
    pub fn next(world: &MpiWorld) -> Result<Option<Self>, CollectiveError> {
        let (rank, size) = (world.rank()?, world.size()?);
        let (plugin, _) = world.plugin()?;
        if rank == 0 {
            return Err(CollectiveError::World(
                "rank 0 of the processes of mpirun has to be the server".to_owned(),
            ));
        }
        if world.is_over() {
            return Ok(None);
        }
        let mut session = Session {
            plugin,
            rank,
            size,
            number: NONE,
            world: None,
            is_closed: AtomicBool::new(false),
        };
        let (mut words, tag) = (Vec::new(), session.tag(Kind::Session));
        let receiving = wait_for(None, || plugin.receive(Some(0), tag, &mut words))?;
        let mut receiving = receiving.expect("it is waited for");
        let words = wait_for(None, || receiving.words())?.expect("it is waited for");
        match words[..] {
            [MAGIC, NONE] => {
                world.set_over();
                Ok(None)
            }
            [MAGIC, number] => {
                session.number = number;
                Ok(Some(Self(Arc::new(session))))
            }
            _ => Err(CollectiveError::World(
                "rank 0 is of another version".to_owned(),
            )),
        }
    }

    /// Tells all ranks that there will be no more sessions. For rank 0.
    ///
    /// # Errors
    ///
    /// MPI fails, or a session has not ended.
    pub fn end_all(world: &MpiWorld) -> Result<(), CollectiveError> {
        world.take()?;
        let (plugin, _) = world.plugin()?;
        let session = Session {
            plugin,
            rank: world.rank()?,
            size: world.size()?,
            number: NONE,
            world: None,
            is_closed: AtomicBool::new(false),
        };
        announce(&session, NONE)
    }

    /// The connection with another rank: with rank 0, if this one is not.
    pub fn link(&self, other: usize) -> MpiLink {
        MpiLink::new(Arc::clone(&self.0), other)
    }

    /// Takes part in the operations between the ranks. None takes longer than `time_limit`.
    ///
    /// # Errors
    ///
    /// The world has another number of ranks.
    pub fn attach(&self, grid: Grid, time_limit: Duration) -> Result<Mpi, CollectiveError> {
        match grid.num_ranks() == self.0.size {
            true => Ok(Mpi::new(Arc::clone(&self.0), grid, time_limit)),
            false => Err(CollectiveError::World(format!(
                "the model has {} ranks, and mpirun has started {} processes",
                grid.num_ranks(),
                self.0.size
            ))),
        }
    }

    /// Whether rank 0 has told this rank that it needs no more of the model. An operation that another rank has not
    /// finished then fails, and nobody misses it.
    pub fn is_closed(&self) -> bool {
        self.0.is_closed.load(Ordering::Acquire)
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.0.rank
    }
}

/// Tells the others of a session. They wait for it before they know its number.
fn announce(session: &Session, number: u32) -> Result<(), CollectiveError> {
    let tag = Tag::new(NONE, Kind::Session as u8);
    session.send_at_once(session.others(), tag, vec![MAGIC, number])
}
