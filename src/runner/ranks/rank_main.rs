//! What the process of another rank does.

use std::os::fd::AsFd;
use std::process::exit;
use std::thread;
use std::time::Duration;

use super::rank_adapters::{AdapterRuns, ReceivedAdapters};
use super::rank_call::RankCall;
use super::rank_device::OpenedOptions;
use super::task::{BUILD, Greeting, Report, Task, receive, send};
use crate::base::{BlockSize, catch_panic};
use crate::collective::{Link, Shm, follow_parent};
use crate::device::cpu::Cpu;
use crate::device::cuda::Cuda;
use crate::device::{Device, RankRole};
use crate::runner::model_runner::{ModelRunner, RankOptions};
use crate::runner::model_source::ModelSource;

/// Time limit of rank 0 for the task of this rank.
const MAX_WAIT: Duration = Duration::from_secs(60);

/// Is a rank of the process that has started this one, until that has no more to compute or has ended. Returns the exit
/// status: 0, 1 after a failure, 2 if no such process has started this one.
pub fn rank_main() -> u8 {
    follow_parent();
    let Ok(mut link) = Link::of_standard_input() else {
        eprintln!("this program is started by Triton's backend inflight, see docs/src/ranks.md");
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
        Ok(Ok(_)) => catch_panic(|| serve(&mut link)),
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

fn serve(link: &mut Link) -> Result<(), String> {
    let greeting = Greeting {
        build: BUILD.to_owned(),
    };
    link.set_time_limit(Some(MAX_WAIT)).map_err(text)?;
    send(link, &greeting).map_err(text)?;
    let Some(task) = receive::<Task>(link).map_err(text)? else {
        return Ok(());
    };
    let memory = link.receive_file().map_err(text)?;
    match task.device.options().ok_or_else(unknown)? {
        OpenedOptions::Cpu(options) => compute::<Cpu>(link, &task, &memory, &options),
        OpenedOptions::Gpu(options) => compute::<Cuda>(link, &task, &memory, &options),
    }
}

/// Loads its share of the model, and computes calls until there are no more.
fn compute<D: Device>(
    link: &mut Link,
    task: &Task,
    memory: &impl AsFd,
    options: &D::Options,
) -> Result<(), String> {
    let (mut runner, block_size) = load::<D>(link, task, memory, options)?;
    link.set_time_limit(None).map_err(text)?;
    let (mut message, mut words) = (Vec::new(), Vec::new());
    let (mut call, mut number) = (RankCall::default(), 0_u32);
    let (mut adapters, mut runs) = (ReceivedAdapters::default(), AdapterRuns::default());
    while link.receive(&mut message).map_err(text)? {
        words.clear();
        let (chunks, _) = message.as_chunks();
        words.extend(chunks.iter().map(|word| u32::from_ne_bytes(*word)));
        if ReceivedAdapters::is_piece(&words) {
            adapters.take(&words).map_err(text)?;
            continue;
        }
        call.read(number, block_size, &words).map_err(text)?;
        number = number.wrapping_add(1);
        let [tokens, kept, sampled] = &call.adapters;
        adapters
            .find([tokens, kept, sampled], &mut runs)
            .map_err(text)?;
        runner.run_share(&call, &runs).map_err(text)?;
        adapters.forget(&call.forgotten);
    }
    Ok(())
}

/// Loads its share of the model.
fn load<D: Device>(
    link: &mut Link,
    task: &Task,
    memory: &impl AsFd,
    options: &D::Options,
) -> Result<(ModelRunner<D>, BlockSize), String> {
    let limits = task.limits().ok_or_else(unknown)?;
    let source = ModelSource::open(&task.folder).map_err(text)?;
    if source.stamps() != task.stamps {
        return Err(format!(
            "the files in {} are not those that rank 0 has opened: load the model again",
            task.folder.display()
        ));
    }
    let shm = Shm::attach(memory.as_fd(), task.rank, task.load_limit).map_err(text)?;
    send(link, &Report::Ready).map_err(text)?;
    let block_size = limits.block_size;
    let rank = RankOptions {
        collective: Box::new(shm),
        role: RankRole::Computes,
        time_limit: task.time_limit,
    };
    let runner = ModelRunner::of_rank(&source, limits, options, rank).map_err(text)?;
    Ok((runner, block_size))
}

fn unknown() -> String {
    "the task of rank 0 is of another version".to_owned()
}

fn text(error: impl ToString) -> String {
    error.to_string()
}
