//! The exported functions for processes that are other ranks. Each is documented in the header.

use std::panic::catch_unwind;

use inflight_machines::{leave_mpi_world, rank_main};

/// Is another rank of a manager; see the header.
#[unsafe(no_mangle)]
pub extern "C" fn inflight_rank_main() -> i32 {
    catch_unwind(rank_main).unwrap_or(1).into()
}

/// Leaves the processes of `mpirun`; see the header.
#[unsafe(no_mangle)]
pub extern "C" fn inflight_leave_mpi() {
    // A panic must not leave the library, and there is nothing left to do.
    let _ = catch_unwind(leave_mpi_world);
}
