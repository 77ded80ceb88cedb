//! An instance: one engine, one runner, one responder, driven by Triton's Execute calls.

use std::path::{self, Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::advice::{Setting, advice};
use crate::batch_strategy::PublishedRoom;
use crate::driver::conversations::ConversationLimits;
use crate::driver::iterative::IterativeDriver;
use crate::driver::queued::QueuedDriver;
use crate::driver::restarts::Restarts;
use crate::driver::service::Service;
use crate::driver::step_driver::{Helpers, RequestPreparer, StepDriver};
use crate::driver::watched::{Driver, LoadedDriver, WatchContext, WatchedDriver};
use crate::model::Model;
use crate::observe::observer::Observer;
use crate::request::admission::{Admission, Warned};
use crate::request::images::ImageReader;
use crate::request::preparer::Preparer;
use crate::request::prompt::{KeptPart, PromptEncoder};
use crate::response::answer::ClassForm;
use crate::response::answer_memory::AnswerMemory;
use crate::response::log_probs;
use crate::response::responder::Responder;
use inflight_base::{LoadError, TokenId};
use inflight_collective::beside_library;
use inflight_config::Scheduling;
use inflight_engine::{EngineConfig, StepStats};
use inflight_machines::{RANK_PROGRAM, RankWatch};
use inflight_manager::BatchManager;
use inflight_manager::sizing::{LoadedRunner, load_runner};
use inflight_runner::{AdapterRoom, ModelSpec};
use inflight_text::{ReplyFormat, Tokenizer};
use inflight_triton::{Error, Health, Instance};

/// Bytes of the requests that wait to be tokenised.
const MAX_PREPARING_BYTES: usize = 256 << 20;

/// Loads the instance, and starts the thread that watches it.
///
/// # Errors
/// A problem in the checkpoint or the settings, or not enough memory or threads.
pub fn load_instance(
    model: &Arc<Model>,
    handle: Instance,
    health: Health,
) -> Result<WatchedDriver, Error> {
    let name = handle.name()?.to_owned();
    let settings = &model.config.settings;
    let service = Service::new(model.load.clone());
    let room = model.batching.add_instance();
    let loaded = load_driver(
        model,
        handle.copy(),
        service.clone(),
        room.clone(),
        model.config.num_warm_ups,
    )?;
    if let Some(metrics) = model.metrics.get() {
        let mut mark = metrics.failure_mark();
        health.watch(move |has_failed| mark.set(has_failed));
    }
    let has_processes = loaded.ranks.as_ref().is_some_and(RankWatch::has_processes);
    let max_restarts = match has_processes {
        true => settings.max_rank_restarts,
        false => 0,
    };
    let context = WatchContext {
        name,
        served: model.served.clone(),
        metrics: model.metrics.clone(),
        service: service.clone(),
        drain_timeout: settings
            .drain_timeout_seconds
            .map(|seconds| Duration::from_secs(seconds.into())),
        health,
        restarts: Restarts::new(&model.folder, max_restarts),
        loader: Box::new({
            let model = model.clone();
            move || load_driver(&model, handle.copy(), service.clone(), room.clone(), 0)
        }),
    };
    Ok(WatchedDriver::start(loaded, context)?)
}

/// Loads the weights, sizes the KV cache and starts the threads. The first `num_warm_ups` requests are the model's
/// warm-up.
fn load_driver(
    model: &Model,
    handle: Instance,
    service: Service,
    room: PublishedRoom,
    num_warm_ups: u64,
) -> Result<LoadedDriver, Error> {
    let name = handle.name()?.to_owned();
    let settings = &model.config.settings;
    let gpu = handle
        .gpu()?
        .or_else(|| settings.gpu_device_ids.first().map(|gpu| *gpu as usize));
    if let Some(adapters) = &model.adapters {
        adapters.cut_for(gpu.is_some())?;
    }
    let adapters = model.adapters.as_ref().map(|adapters| AdapterRoom {
        max_rank: settings.lora_cache_max_adapter_size as usize,
        num_bytes: adapters.pages().num_bytes(),
        page_bytes: adapters.pages().page_bytes,
        num_running_pages: adapters.pages().num_running_pages,
    });
    let LoadedRunner {
        config: engine_config,
        runner,
        rank_watch: ranks,
        memory,
        kv_file,
        adapters,
    } = load_runner(
        &model.config,
        model.source.as_deref(),
        &model.folder,
        gpu,
        adapters.unwrap_or_default(),
        &beside_library(RANK_PROGRAM),
    )?;
    let engine_config = EngineConfig {
        num_adapter_pages: model.adapters.as_ref().map(|_| adapters.num_running_pages),
        ..engine_config
    };
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
        has_windows: model.configured().has_windows(engine_config.max_seq_len),
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
    let manager = BatchManager::with_kv_file(engine_config.clone(), runner, kv_file)
        .map_err(|error| LoadError::Resource(format!("no thread for the runner: {error}")))?;
    let stats = StepStats::before_the_first(&engine_config, manager.kv_usage());
    let observer = Observer::new(
        model.metrics.get().as_ref(),
        stats_file.as_deref(),
        stats,
        memory,
        model.adapters.clone(),
    )?;
    let tokenizer = model.text.as_ref().map(|parts| &*parts.tokenizer);
    let templates = model
        .text
        .as_ref()
        .and_then(|parts| parts.templates.as_deref());
    let spec = model.source.as_ref().map(|source| source.spec());
    let admission = Arc::new(Admission {
        name: name.clone(),
        config: model.config.clone(),
        encoder: PromptEncoder {
            text: model.text.clone(),
            vocab_size,
            max_seq_len,
            add_special_tokens: settings.add_special_tokens,
            kept: match settings.task.is_pooling() {
                true => KeptPart::Beginning {
                    max_tokens: model.source.as_ref().and_then(|it| it.max_text_tokens()),
                },
                false => KeptPart::End,
            },
            judges_pairs: settings.is_original_qwen3_reranker,
            padding: spec.and_then(ModelSpec::padding),
            images: image_reader(model, tokenizer)?,
        },
        post_processors: model.post_processors.clone(),
        guides: model.guides.clone(),
        adapters: model.adapters.clone(),
        has_logits,
        pooling: spec.and_then(|spec| spec.pooling),
        has_token_types: spec
            .and_then(|spec| spec.token_types)
            .is_some_and(|types| types.num_types > 1),
        classes: spec.and_then(|spec| spec.classes.as_ref()).map_or_else(
            ClassForm::default,
            |head| ClassForm {
                transform: head.transform,
                labels: head.labels.as_slice().into(),
            },
        ),
        hidden_size: spec.map_or(0, ModelSpec::embedding_width),
        answer_memory: AnswerMemory::new(
            settings.logits_memory_bytes,
            vocab_size,
            log_probs::max_entry_bytes(tokenizer, vocab_size),
        ),
        end_ids: end_ids(model, tokenizer, vocab_size),
        replies: ReplyFormat::new(
            settings.reasoning_parser,
            settings.tool_call_parser,
            templates.map(|it| it.sources()).into_iter().flatten(),
        ),
        recommended: model.recommended.clone(),
        text_lengths: model.text_lengths.clone(),
        warned: Warned::default(),
    });
    let preparer = start_preparer(&name, &admission)?;
    let scheduling = model.config.scheduling;
    let responder = Responder::start(&name, observer)?;
    let served = model.served.clone();
    let steps = StepDriver::new(
        handle,
        served,
        admission,
        Helpers {
            preparer,
            responder,
        },
        manager,
        service,
        model.stops.join(),
    );
    let driver: Box<dyn Driver> = match scheduling {
        Scheduling::Iterative {
            max_sequence_idle_us,
            is_oldest,
        } => {
            let max_absence = Duration::from_micros(max_sequence_idle_us);
            Box::new(IterativeDriver::new(
                steps.with_max_absence(max_absence),
                is_oldest,
            ))
        }
        Scheduling::Queued => {
            Box::new(QueuedDriver::start(&name, steps, num_warm_ups, None, room)?)
        }
        Scheduling::Conversations {
            max_sequences,
            max_sequence_idle_us,
        } => {
            let limits = ConversationLimits {
                max_open: max_sequences as usize,
                max_idle: Duration::from_micros(max_sequence_idle_us),
            };
            Box::new(QueuedDriver::start(
                &name,
                steps,
                num_warm_ups,
                Some(limits),
                room,
            )?)
        }
    };
    Ok(LoadedDriver { driver, ranks })
}

/// Reads the images of a model that takes images and text.
fn image_reader(
    model: &Model,
    tokenizer: Option<&Tokenizer>,
) -> Result<Option<ImageReader>, LoadError> {
    let tower = model.source.as_ref().and_then(|source| source.tower());
    let (Some(processor), Some(tower), Some(tokenizer)) = (&model.images, tower, tokenizer) else {
        return Ok(None);
    };
    let settings = &model.config.settings;
    ImageReader::new(processor.clone(), tower.clone(), tokenizer, settings).map(Some)
}

/// The tokens that end a text: the checkpoint's, and its tokenizer's.
fn end_ids(model: &Model, tokenizer: Option<&Tokenizer>, vocab_size: u32) -> Vec<TokenId> {
    let Some(source) = &model.source else {
        return Vec::new();
    };
    let mut ids = source.end_ids().to_vec();
    let end = tokenizer.and_then(Tokenizer::end_id);
    ids.extend(end.filter(|end| *end < vocab_size && !ids.contains(end)));
    ids
}

/// Starts the threads that prepare requests.
fn start_preparer(name: &str, admission: &Arc<Admission>) -> Result<RequestPreparer, LoadError> {
    let admission = Arc::clone(admission);
    let prepare = move |arrival| admission.prepare(arrival);
    Preparer::start(name, MAX_PREPARING_BYTES, prepare)
}

/// The path of a file that is to be written, with links resolved. A relative path starts at the server's working
/// directory.
fn place(file: &Path) -> Result<PathBuf, LoadError> {
    let fail = |error| LoadError::File {
        path: file.to_owned(),
        reason: format!("its folder does not exist: {error}"),
    };
    let file = path::absolute(file).map_err(fail)?;
    match (file.parent(), file.file_name()) {
        (Some(folder), Some(name)) => Ok(folder.canonicalize().map_err(fail)?.join(name)),
        _ => Ok(file),
    }
}
