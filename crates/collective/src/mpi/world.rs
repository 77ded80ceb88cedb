//! The processes of an MPI world, from joining to leaving.

use std::env;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use inflight_mpi_interface::World;
use parking_lot::{Condvar, Mutex};

use super::super::error::CollectiveError;
use super::plugin::Plugin;

/// The plug-in. It lies beside the library.
pub const MPI_LIBRARY: &str = "libinflight_mpi.so";

/// What `mpirun`, Slurm's `srun` and MPICH's `mpiexec` set for the processes that they start.
const STARTED_BY_MPI: [&str; 3] = ["OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"];
/// How long the processes may take to leave together.
const LEAVE_LIMIT: Duration = Duration::from_secs(20);

/// A process can join once.
static JOINED: Mutex<Option<MpiWorld>> = Mutex::new(None);

/// The processes that were started together by `mpirun`, of which this is one.
#[derive(Clone)]
pub struct MpiWorld(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    stage: Stage,
    /// Sessions that rank 0 has begun.
    num_sessions: u32,
    /// Whether the last one has not ended.
    is_in_use: bool,
    /// Whether rank 0 has said that there will be no more.
    is_over: bool,
}

/// What the thread that has joined does.
#[derive(Clone)]
enum Stage {
    /// Waits until all have.
    Joining,
    Joined(Plugin, World),
    Leaving,
    /// Has left, or could not join.
    Left(Result<(), CollectiveError>),
}

impl MpiWorld {
    /// Joins the world by a plug-in, and waits until all processes have; or returns the world that this process has
    /// joined.
    ///
    /// # Errors
    ///
    /// This process was not started by MPI; the plug-in cannot be opened; MPI fails; this process has left the world;
    /// or not all have joined within `limit`, which can be waited for again.
    pub fn join(plugin: &Path, limit: Option<Duration>) -> Result<Self, CollectiveError> {
        let mut joined = JOINED.lock();
        let world = match &*joined {
            Some(world) => world.clone(),
            None => joined.insert(Self::begin(plugin)?).clone(),
        };
        drop(joined);
        world.wait_until_joined(limit)?;
        Ok(world)
    }

    /// The world that this process has joined, if it has.
    pub fn joined() -> Option<Self> {
        JOINED.lock().clone()
    }

    fn begin(plugin: &Path) -> Result<Self, CollectiveError> {
        if STARTED_BY_MPI
            .iter()
            .all(|name| env::var_os(name).is_none())
        {
            return Err(CollectiveError::World(
                "this process was not started by mpirun or srun".to_owned(),
            ));
        }
        let plugin = Plugin::open(plugin)?;
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                stage: Stage::Joining,
                num_sessions: 0,
                is_in_use: false,
                is_over: false,
            }),
            changed: Condvar::new(),
        });
        let of_thread = Arc::clone(&shared);
        let thread = thread::Builder::new().name("inflight-mpi".to_owned());
        // MPI wants to be finalised by the thread that has initialised it.
        let started = thread.spawn(move || of_thread.be_in_world(plugin));
        started.map_err(|error| CollectiveError::World(error.to_string()))?;
        Ok(Self(shared))
    }

    fn wait_until_joined(&self, limit: Option<Duration>) -> Result<(), CollectiveError> {
        let deadline = limit.map(|limit| Instant::now() + limit);
        let mut state = self.0.state.lock();
        while let Stage::Joining = state.stage {
            let Some(deadline) = deadline else {
                self.0.changed.wait(&mut state);
                continue;
            };
            if self.0.changed.wait_until(&mut state, deadline).timed_out() {
                return Err(CollectiveError::World(format!(
                    "not all processes of mpirun have joined within {:?}: each but the first has to be `inflight-rank --mpi`, or to create the \
                     same batch manager",
                    limit.unwrap_or_default()
                )));
            }
        }
        state.joined().map(|_| ())
    }

    /// This process among all.
    ///
    /// # Errors
    ///
    /// It has left the world.
    pub fn rank(&self) -> Result<usize, CollectiveError> {
        Ok(self.plugin()?.1.rank as usize)
    }

    /// The number of processes.
    ///
    /// # Errors
    ///
    /// As [`MpiWorld::rank`].
    pub fn size(&self) -> Result<usize, CollectiveError> {
        Ok(self.plugin()?.1.size as usize)
    }

    /// Leaves the world, for which all processes have to do it. If they do not in time, all are ended.
    pub fn leave(&self) {
        let mut state = self.0.state.lock();
        let Ok((plugin, _)) = state.joined() else {
            return;
        };
        state.stage = Stage::Leaving;
        self.0.changed.notify_all();
        let deadline = Instant::now() + LEAVE_LIMIT;
        while let Stage::Leaving = state.stage {
            if self.0.changed.wait_until(&mut state, deadline).timed_out() {
                log::error!(
                    "not all processes of mpirun have left within {LEAVE_LIMIT:?}: they are ended"
                );
                plugin.abort();
                return;
            }
        }
    }

    pub(super) fn plugin(&self) -> Result<(Plugin, World), CollectiveError> {
        self.0.state.lock().joined()
    }

    /// Begins a session, unless there is one; its number is not 0.
    pub(super) fn take(&self) -> Result<u32, CollectiveError> {
        let mut state = self.0.state.lock();
        if std::mem::replace(&mut state.is_in_use, true) {
            return Err(CollectiveError::World(
                "the processes of mpirun compute another model instance: they can compute one at a time".to_owned(),
            ));
        }
        state.num_sessions = state.num_sessions % u32::MAX + 1;
        Ok(state.num_sessions)
    }

    /// Whether there will be no more sessions, as another rank knows it.
    pub(super) fn is_over(&self) -> bool {
        self.0.state.lock().is_over
    }

    /// Remembers that there will be no more.
    pub(super) fn set_over(&self) {
        self.0.state.lock().is_over = true;
    }

    /// Ends it.
    pub(super) fn give_back(&self) {
        self.0.state.lock().is_in_use = false;
    }
}

impl Shared {
    fn be_in_world(&self, plugin: Plugin) {
        let stage = match plugin.join() {
            Ok(world) => Stage::Joined(plugin, world),
            Err(error) => Stage::Left(Err(error)),
        };
        let mut state = self.state.lock();
        state.stage = stage;
        self.changed.notify_all();
        while let Stage::Joined(..) = state.stage {
            self.changed.wait(&mut state);
        }
        if let Stage::Leaving = state.stage {
            drop(state);
            let left = plugin.leave();
            self.state.lock().stage = Stage::Left(left);
            self.changed.notify_all();
        }
    }
}

impl State {
    fn joined(&self) -> Result<(Plugin, World), CollectiveError> {
        match &self.stage {
            Stage::Joined(plugin, world) => Ok((*plugin, *world)),
            Stage::Left(Err(error)) => Err(error.clone()),
            Stage::Joining => Err(CollectiveError::World(
                "not all processes of mpirun have joined".to_owned(),
            )),
            Stage::Leaving | Stage::Left(Ok(())) => Err(CollectiveError::World(
                "this process has left the world of mpirun".to_owned(),
            )),
        }
    }
}
