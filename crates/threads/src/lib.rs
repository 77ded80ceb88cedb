//! L1: the host's threads: a pool that computes operations, and where threads run.
//!
//! ```text
//! pool.rs            Pool: the threads of an operation, and turns of several pools
//! team.rs cores.rs   the threads themselves, shared by all pools of a process
//! topology.rs        the machine's nodes and cores
//! affinity.rs        the CPUs and the priority of a thread
//! disjoint_slice.rs  a slice whose parts several threads write
//! ```

mod affinity;
mod cores;
mod disjoint_slice;
mod pool;
mod team;
mod topology;

pub use affinity::yield_to_others;
pub use disjoint_slice::DisjointSlice;
pub use pool::{Pool, Turn};
pub use topology::Topology;
