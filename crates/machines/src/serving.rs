//! Computing the share of a rank, as rank 0 asks for it.

use std::time::Duration;

use super::rank_device::OpenedOptions;
use super::rank_gpu::RankGpu;
use super::task::{BUILD, Greeting, HostMemory, Instruction, Report, Task, receive, send};
use inflight_base::{StepError, catch_panic};
use inflight_collective::{Channel, Collective, CollectiveError, Grid, MpiSession, MpiWorld};
use inflight_device::Device;
use inflight_device_cpu::Cpu;
#[cfg(feature = "cuda")]
use inflight_device_cuda::Cuda;
use inflight_runner::{ModelRunner, ModelSource, RankOptions, ReceivedCalls};

/// Time limit of rank 0 for the task of a rank.
const MAX_WAIT: Duration = Duration::from_secs(60);

/// Is another rank of what rank 0 of an MPI world computes, one model after the other, until that leaves the world:
/// then this process has to [leave](MpiWorld::leave) it, too. A model that fails is reported to rank 0.
///
/// # Errors
/// MPI fails, or this is rank 0.
pub fn serve_mpi_rank(world: &MpiWorld) -> Result<(), CollectiveError> {
    while let Some(session) = MpiSession::next(world)? {
        // Rank 0 knows the reason.
        let _ = serve_session(&session);
    }
    Ok(())
}

/// Is another rank of the next model that rank 0 of an MPI world computes, until that ends the model.
///
/// # Errors
/// The model or MPI fails, rank 0 has left the world, or this is rank 0.
pub fn serve_next_mpi_model(world: &MpiWorld) -> Result<(), StepError> {
    let session = MpiSession::next(world).map_err(|error| StepError(error.to_string()))?;
    let session = session.ok_or_else(|| {
        StepError("rank 0 of the processes of mpirun has ended without another model".to_owned())
    })?;
    serve_session(&session).map_err(StepError)
}

/// Is another rank of one model. Rank 0 may end the model while this rank still reads the messages of the last
/// operation: an error after that is no failure.
fn serve_session(session: &MpiSession) -> Result<(), String> {
    let mut link = session.link(0);
    let attach = |task: &Task, grid| -> Result<Box<dyn Collective>, CollectiveError> {
        Ok(Box::new(session.attach(grid, task.load_limit)?))
    };
    let served = catch_panic(|| serve(&mut link, attach)).unwrap_or_else(Err);
    match served {
        Err(reason) if session.is_closed() => {
            log::info!(
                "rank {} had not finished when rank 0 ended the model: {reason}",
                session.rank()
            );
            Ok(())
        }
        Err(reason) => {
            log::error!("rank {} has failed: {reason}", session.rank());
            // Rank 0 may have ended the session.
            let _ = send(&mut link, &Report::Failed(reason.clone()));
            Err(reason)
        }
        Ok(()) => Ok(()),
    }
}

/// Computes the share of a model until rank 0 ends it. `attach` takes part in the operations between all ranks.
///
/// # Errors
/// What rank 0 has to be told.
pub(super) fn serve(
    channel: &mut dyn Channel,
    attach: impl FnOnce(&Task, Grid) -> Result<Box<dyn Collective>, CollectiveError>,
) -> Result<(), String> {
    let greeting = Greeting {
        build: BUILD.to_owned(),
        host: HostMemory::own(),
    };
    channel.set_time_limit(Some(MAX_WAIT)).map_err(text)?;
    send(channel, &greeting).map_err(text)?;
    let task = loop {
        match receive::<Instruction>(channel).map_err(text)? {
            None => return Ok(()),
            Some(Instruction::Load(task)) => break task,
            Some(Instruction::ReportGpu(choice)) => {
                send(channel, &RankGpu::of(choice).map_err(text)).map_err(text)?;
            }
        }
    };
    match task.device.options().ok_or_else(unknown)? {
        OpenedOptions::Cpu(options) => compute::<Cpu>(channel, &task, attach, &options),
        #[cfg(feature = "cuda")]
        OpenedOptions::Gpu(options) => compute::<Cuda>(channel, &task, attach, &options),
    }
}

/// Loads its share of the model, and computes calls until there are no more.
fn compute<D: Device>(
    channel: &mut dyn Channel,
    task: &Task,
    attach: impl FnOnce(&Task, Grid) -> Result<Box<dyn Collective>, CollectiveError>,
    options: &D::Options,
) -> Result<(), String> {
    let (mut runner, mut calls) = load::<D>(channel, task, attach, options)?;
    channel.set_time_limit(None).map_err(text)?;
    let mut message = Vec::new();
    while channel.receive(&mut message).map_err(text)? {
        if calls.take(&message).map_err(text)? {
            runner.run_share(&mut calls).map_err(text)?;
        }
    }
    Ok(())
}

/// Loads its share of the model, to compute the calls of rank 0.
fn load<D: Device>(
    channel: &mut dyn Channel,
    task: &Task,
    attach: impl FnOnce(&Task, Grid) -> Result<Box<dyn Collective>, CollectiveError>,
    options: &D::Options,
) -> Result<(ModelRunner<D>, ReceivedCalls), String> {
    let limits = task.limits().ok_or_else(unknown)?;
    let source = ModelSource::open(&task.folder).map_err(text)?;
    if source.stamps() != task.stamps {
        return Err(format!(
            "the files in {} are not those that rank 0 has opened: load the model again",
            task.folder.display()
        ));
    }
    let grid = task.grid().ok_or_else(unknown)?;
    let collective = attach(task, grid).map_err(text)?;
    send(channel, &Report::Ready).map_err(text)?;
    let calls = ReceivedCalls::new(&limits);
    let rank = RankOptions {
        collective,
        time_limit: task.time_limit,
    };
    let runner = ModelRunner::of_rank(&source, limits, options, rank).map_err(text)?;
    Ok((runner, calls))
}

fn unknown() -> String {
    "the task of rank 0 is of another version".to_owned()
}

fn text(error: impl ToString) -> String {
    error.to_string()
}
