//! Ranks that are the processes of an MPI world, on one host or on several.
//!
//! ```text
//! plugin.rs     the opened plug-in, and messages that own their bytes
//! wait.rs       waiting for a message
//! world.rs      the processes, from joining to leaving
//! messages.rs   what ranks send each other in a session
//! session.rs    the time in which a world computes one model
//! link.rs       calls of rank 0, and answers
//! exchange.rs   sums, and messages between stages
//! ```
//!
//! Messages have a tag for what they are and for their session, so that one that was left behind by a session that has
//! failed is never taken for one of a later session. Nothing blocks within MPI but joining and leaving, which have a
//! thread for that: all else begins a transfer, and looks whether it is done until its time limit. So a process that is
//! stopped is an error; one that ends makes `mpirun` end all others.

mod exchange;
mod link;
mod messages;
mod plugin;
mod session;
mod wait;
mod world;

pub use exchange::Mpi;
pub use link::MpiLink;
pub use session::MpiSession;
pub use world::{MPI_LIBRARY, MpiWorld};
