//! An instance: one engine, one runner, one responder, driven by Triton's Execute calls.

use std::path::{self, Path, PathBuf};
use std::thread;
use std::time::Duration;

use crate::backend::advice::{Setting, advice};
use crate::backend::driver::iterative::Driver;
use crate::backend::driver::watched::{WatchContext, WatchedDriver};
use crate::backend::host_memory::{self, InstanceMemory};
use crate::backend::limits::{ModelFacts, engine_config};
use crate::backend::model::Model;
use crate::backend::observe::observer::Observer;
use crate::backend::request::admission::{Admission, Warned};
use crate::backend::response::answer_memory::AnswerMemory;
use crate::backend::response::log_probs;
use crate::backend::response::responder::Responder;
use crate::base::LoadError;
use crate::config::Settings;
use crate::device::cpu::{CpuOptions, Simd};
use crate::engine::{EngineConfig, StepStats};
use crate::manager::BatchManager;
use crate::runner::{CpuRunner, Runner, RunnerLimits, SyntheticOptions, SyntheticRunner};
use crate::triton::{Error, Instance};

/// Loads the weights, sizes the KV cache, starts the responder.
///
/// # Errors
/// What is wrong with the checkpoint or with the limits, or what the machine cannot give.
pub fn load_instance(model: &Model, handle: Instance) -> Result<WatchedDriver, Error> {
    let name = handle.name()?.to_owned();
    let settings = &model.config.settings;
    let Loaded {
        config: engine_config,
        runner,
        memory,
    } = load_runner(model)?;
    if let Err(error) = handle.report_system_memory(memory.usage().host_bytes as usize) {
        log::debug!("{name}: its memory could not be reported: {error}");
    }
    log::info!(
        "{name}: {} KV blocks of {} tokens; up to {} requests and {} tokens a step, sequences of up \
         to {} tokens",
        engine_config.num_blocks,
        engine_config.block_size.tokens(),
        engine_config.max_num_requests,
        engine_config.max_num_tokens,
        engine_config.max_seq_len,
    );
    let stats_file = match &settings.stats_file {
        Some(path) => Some(place(path)?),
        None => None,
    };
    let setting = Setting {
        settings,
        engine: &engine_config,
        has_windows: model.facts().has_windows(engine_config.max_seq_len),
        num_cores: thread::available_parallelism().map_or(usize::MAX, usize::from),
        folder: &model.folder.canonicalize().unwrap_or_default(),
        stats_folder: stats_file.as_deref().and_then(Path::parent),
    };
    for warning in advice(&setting) {
        log::warn!("{name}: {warning}");
    }
    if let Some(path) = &stats_file {
        log::info!("{name}: statistics go to {}", path.display());
    }
    let max_seq_len = engine_config.max_seq_len;
    let (vocab_size, has_logits) = (runner.vocab_size(), runner.has_logits());
    let manager = BatchManager::new(engine_config.clone(), runner)
        .map_err(|error| LoadError::Resource(format!("no thread for the runner: {error}")))?;
    let stats = StepStats::before_the_first(&engine_config, manager.kv_usage());
    let observer = Observer::new(
        model.metrics.get().as_ref(),
        stats_file.as_deref(),
        stats,
        memory,
    )?;
    let tokenizer = model.text.as_ref().map(|parts| &*parts.tokenizer);
    let admission = Admission {
        name: name.clone(),
        config: model.config.clone(),
        text: model.text.clone(),
        post_processors: model.post_processors.clone(),
        guides: model.guides.clone(),
        vocab_size,
        has_logits,
        answer_memory: AnswerMemory::new(
            settings.logits_memory_bytes,
            vocab_size,
            log_probs::max_entry_bytes(tokenizer, vocab_size),
        ),
        max_seq_len,
        end_ids: model
            .checkpoint
            .as_ref()
            .map(|c| c.end_ids().to_vec())
            .unwrap_or_default(),
        warned: Warned::default(),
    };
    let max_absence = Duration::from_micros(model.config.max_sequence_idle_us);
    let responder = Responder::start(&name, observer)?;
    let served = model.served.clone();
    let driver = Driver::new(handle, served, admission, manager, responder, max_absence);
    let context = WatchContext {
        served: model.served.clone(),
        load: model.load.clone(),
        metrics: model.metrics.clone(),
    };
    Ok(WatchedDriver::start(&name, driver, context)?)
}

/// Where a file is to be, without links: a relative path starts at the server's working directory.
fn place(file: &Path) -> Result<PathBuf, LoadError> {
    let fail = |error| LoadError::File {
        path: file.to_owned(),
        reason: format!("its folder is not there: {error}"),
    };
    let file = path::absolute(file).map_err(fail)?;
    match (file.parent(), file.file_name()) {
        (Some(folder), Some(name)) => Ok(folder.canonicalize().map_err(fail)?.join(name)),
        _ => Ok(file),
    }
}

/// An engine's limits, what computes for it, and the memory that both may fill.
struct Loaded {
    config: EngineConfig,
    runner: Runner,
    memory: InstanceMemory,
}

fn load_runner(model: &Model) -> Result<Loaded, LoadError> {
    let weight_bytes = model.facts().num_weight_bytes()?;
    let (config, promise) = host_memory::promise(|available_bytes| {
        // The KV cache shares what the weights leave.
        let left = available_bytes.map(|bytes| bytes.saturating_sub(weight_bytes));
        let config = engine_config(&model.config, &model.facts(), left)?;
        let kv_bytes =
            u64::from(config.num_blocks.0) * model.facts().kv_bytes_per_block(config.block_size);
        Ok::<_, LoadError>((config, weight_bytes + kv_bytes))
    })?;
    let settings = &model.config.settings;
    let runner = match &model.checkpoint {
        Some(checkpoint) => {
            let options = cpu_options(settings)?;
            let runner = CpuRunner::new(checkpoint, runner_limits(model, &config), &options)?;
            Runner::Cpu(Box::new(runner))
        }
        None => {
            let options = SyntheticOptions {
                vocab_size: settings.synthetic_vocab_size,
                step_base_us: settings.synthetic_step_us,
                step_per_token_us: settings.synthetic_token_us,
            };
            let runner = SyntheticRunner::new(options, &runner_limits(model, &config))?;
            let gate = settings.synthetic_gate.as_ref();
            Runner::Synthetic(
                runner
                    .failing_after(settings.synthetic_fail_after)
                    .gated_by(gate.map(|path| model.folder.join(path))),
            )
        }
    };
    let memory = InstanceMemory::new(
        promise,
        weight_bytes,
        model.facts().kv_bytes_per_block(config.block_size),
    );
    Ok(Loaded {
        config,
        runner,
        memory,
    })
}

fn runner_limits(model: &Model, config: &EngineConfig) -> RunnerLimits {
    RunnerLimits {
        kv_dtype: model.facts().kv_dtype(),
        weights: model.facts().weights(),
        attention: model.facts().attention(),
        ..RunnerLimits::of(config)
    }
}

fn cpu_options(settings: &Settings) -> Result<CpuOptions, LoadError> {
    let simd = settings.cpu_instruction_set.as_deref().map(|name| {
        name.parse::<Simd>().map_err(|_| LoadError::Knob {
            key: "cpu_instruction_set".to_owned(),
            value: name.to_owned(),
            expected: "one that this build has".to_owned(),
        })
    });
    Ok(CpuOptions {
        num_threads: settings.num_threads,
        simd: simd.transpose()?,
    })
}
