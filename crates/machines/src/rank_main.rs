//! What the process of another rank does.

use std::env;
use std::os::fd::AsFd;
use std::process::exit;
use std::thread;
use std::time::Duration;

use super::serving::{serve, serve_mpi_rank};
use super::task::{Report, send};
use inflight_base::catch_panic;
use inflight_collective::{
    Channel, Link, MPI_LIBRARY, MpiWorld, Shm, follow_parent, leave_signals_to_rank_0,
};

/// The argument of a process that `mpirun` has started.
const MPI: &str = "--mpi";
/// Time limit of rank 0 for the task of this rank.
const MAX_WAIT: Duration = Duration::from_secs(60);

/// Is a rank of the process that has started this one, until that has no more to compute or has ended; or, with the
/// argument `--mpi`, of rank 0 of the world of `mpirun`, for one model after the other. Returns the exit status: 0, 1
/// after a failure, 2 if no such process has started this one.
pub fn rank_main() -> u8 {
    match env::args().skip(1).any(|argument| argument == MPI) {
        true => mpi_main(),
        false => process_main(),
    }
}

fn mpi_main() -> u8 {
    leave_signals_to_rank_0();
    let plugin = env::current_exe().unwrap_or_default();
    let world = MpiWorld::join(&plugin.with_file_name(MPI_LIBRARY), None);
    let served = world.and_then(|world| {
        serve_mpi_rank(&world)?;
        world.leave();
        Ok(())
    });
    match served {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("inflight-rank: {error}");
            1
        }
    }
}

fn process_main() -> u8 {
    follow_parent();
    let Ok(mut link) = Link::of_standard_input() else {
        eprintln!(
            "this program is started by Triton's backend inflight, or by mpirun with {MPI}: see docs/src/ranks.md"
        );
        return 2;
    };
    // Rank 0 may end while this rank computes, or waits for another one.
    let watched = link.try_clone().map(|link| {
        let exit_at_end = move || {
            link.wait_for_end();
            exit(0);
        };
        thread::Builder::new()
            .name("inflight-watch".to_owned())
            .spawn(exit_at_end)
    });
    let served = match watched {
        Ok(Ok(_)) => catch_panic(|| serve_process(&mut link)),
        Ok(Err(error)) | Err(error) => Ok(Err(error.to_string())),
    };
    let served = served.unwrap_or_else(Err);
    match served {
        Ok(()) => 0,
        Err(reason) => {
            // Rank 0 may have ended, too.
            let _ = send(&mut link, &Report::Failed(reason));
            1
        }
    }
}

fn serve_process(link: &mut Link) -> Result<(), String> {
    let limited = link.set_time_limit(Some(MAX_WAIT));
    limited.map_err(|error| error.to_string())?;
    let memory = link.receive_file().map_err(|error| error.to_string())?;
    serve(link, |task, _| {
        Ok(Box::new(Shm::attach(
            memory.as_fd(),
            task.rank,
            task.load_limit,
        )?))
    })
}
