//! L1: sums and messages between the ranks of a model.
//!
//! ```text
//! error.rs        why a collective operation failed
//! label.rs        what the ranks of a round must agree on
//! grid.rs         where the ranks of a model are
//! exchange.rs     one message of each rank to all, in rounds, and messages between stages
//! operations.rs   Collective: sums and messages, made of rounds
//! sums.rs         the fixed order in which ranks are summed
//! local.rs        between threads of a process
//! shm/            between processes of a host, in shared memory
//! channel.rs      messages between rank 0 and another rank
//! mpi/            between the processes of an MPI world, by a plug-in library
//! library.rs      where this library lies, and what belongs to it
//! ```
//!
//! All ranks of a stage call the same operations in the same order. A rank that ends, fails or does something else is
//! an error for all others, within the time limit of the operation.

mod channel;
mod error;
mod exchange;
mod grid;
mod label;
mod library;
mod local;
mod mpi;
mod operations;
mod shm;
mod sums;

pub use channel::Channel;
pub use error::CollectiveError;
pub use exchange::Exchange;
pub use grid::{Grid, MAX_RANKS};
pub use label::{Label, Operation};
pub use library::beside_library;
pub use local::Local;
pub use mpi::{MPI_LIBRARY, Mpi, MpiLink, MpiSession, MpiWorld};
pub use operations::Collective;
pub use shm::{Link, Shm, ShmWorld, follow_parent, leave_signals_to_rank_0};
