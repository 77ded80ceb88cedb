//! A loaded model, shared by its instances.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;

use crate::batch_strategy::BatchStrategy;
use crate::driver::stops::StopBoard;
use crate::image_source::open_images;
use crate::model_load::ModelLoad;
use crate::observe::metrics::{MetricsShare, SharedMetrics};
use crate::request::RequestOptions;
use crate::request::prompt::TextParts;
use crate::request::volume::{TextLengths, VolumeReader};
use crate::text_source::TextSource;
use inflight_base::LoadError;
use inflight_config::{AutoComplete, InputKind, ModelConfig, RunnerKind, Settings, check_server};
use inflight_guidance::Compiler;
use inflight_images::ImageProcessor;
use inflight_manager::sizing::{ConfiguredModel, open_model_source};
use inflight_manager::{AdapterFolders, AdapterLimits, AdapterStore};
use inflight_post_processors::PostProcessors;
use inflight_runner::ModelSource;
use inflight_text::ChatTemplates;
use inflight_triton::{Error, ServedModel};

/// A model of the repository, checked and ready for instances.
pub struct Model {
    /// The model's folder in the repository.
    pub folder: PathBuf,
    /// The model, as the server serves it.
    pub served: ServedModel,
    /// Its configuration.
    pub config: Arc<ModelConfig>,
    /// Its weights; none for the synthetic runner.
    pub source: Option<Arc<ModelSource>>,
    /// The options that its checkpoint recommends; none unless its requests take them.
    pub recommended: RequestOptions,
    /// Its tokenizer; `None` if it takes and returns token ids only.
    pub text: Option<TextParts>,
    /// The processor of its images; `None` if it takes none.
    pub images: Option<Arc<ImageProcessor>>,
    /// The logits post-processors that its requests may name.
    pub post_processors: Arc<PostProcessors>,
    /// Compiles the guides of its requests; `None` without logits or text.
    pub guides: Option<Arc<Compiler>>,
    /// The adapters that its requests may name; `None` if it has none.
    pub adapters: Option<Arc<AdapterStore>>,
    /// Its metrics; empty if the server has none.
    pub metrics: MetricsShare,
    /// Which load of its name it is.
    pub load: ModelLoad,
    /// How long its prompts are in tokens.
    pub text_lengths: Arc<TextLengths>,
    /// How Triton forms its batches, with `dynamic_batching`.
    pub batching: BatchStrategy,
    /// Stop requests that its instances pass on to each other.
    pub stops: Arc<StopBoard>,
}

impl Model {
    /// Loads the model that Triton names: completes its configuration, opens its files.
    ///
    /// # Errors
    /// A problem in config.pbtxt or in the checkpoint, and the way out.
    pub fn load(handle: &inflight_triton::Model) -> Result<Self, Error> {
        let folder = handle.folder()?;
        let version = handle.version()?;
        let name = handle.name()?.to_owned();
        let given = parse_json(&handle.config_json()?)?;
        // Bad settings are refused below.
        let settings = ModelConfig::settings(&given).unwrap_or_default();
        let text_source = TextSource::find(&settings, &folder, version);
        let inputs = given.get("input").and_then(Value::as_array);
        let names_inputs = inputs.is_some_and(|inputs| !inputs.is_empty());

        let auto_complete = match handle.may_auto_complete()? {
            true => AutoComplete::Enabled,
            false => AutoComplete::Disabled,
        };
        let completed = match ModelConfig::complete(&given, text_source.has_tokenizer()) {
            Some(completed) if auto_complete == AutoComplete::Enabled => {
                if let (None | Some(0), Some(slots @ 1..)) = (slots(&given), slots(&completed)) {
                    log::warn!(
                        "{name}: config.pbtxt has no max_batch_size, so it is {slots}; write max_batch_size to say how \
                         many requests may be in flight"
                    );
                }
                handle.set_config(&completed.to_string())?;
                completed
            }
            _ => given,
        };
        if let Some(version) = handle.server_version()? {
            check_server(&completed, version)?;
        }
        for warning in ModelConfig::warnings(&completed) {
            log::warn!("{name}: {warning}");
        }
        if settings.runner != RunnerKind::Synthetic
            && !names_inputs
            && let Some(problem) = text_source.problem()
        {
            log::warn!(
                "{name}: takes input_ids only, and no text_input, because {problem}; Triton refuses other requests with \
                 'expected 1 inputs but got 0'"
            );
        }
        let mut config = ModelConfig::parse(&completed, auto_complete)?;
        let source = open_model_source(&mut config, &folder, version)?;
        let (source, images) = match source {
            Some(source) => {
                let is_on_gpu = is_on_gpu(&completed, &config.settings);
                let (source, images) = open_images(&name, source, &config.settings, is_on_gpu)?;
                (Some(source), images)
            }
            None => (None, None),
        };
        let weight_cache = config.settings.weight_cache_path(&folder, &name, version);
        let mode = config.settings.weight_cache_mode;
        let source = match weight_cache {
            Some(path) => source.map(|source| source.with_weight_cache(path, mode)),
            None => source,
        };
        let source = source.map(Arc::new);
        let recommended = recommended_options(&config.settings, source.as_deref())?;
        let text = match text_source.has_tokenizer() || config.input == InputKind::Text {
            true => Some(text_source.load()?),
            false => None,
        };
        let templates = text.iter().filter_map(|text| text.templates.as_deref());
        for problem in templates.flat_map(ChatTemplates::problems) {
            log::warn!(
                "{name}: a chat template cannot be used, and requests with messages that need it are refused: {problem}"
            );
        }
        let post_processors = post_processors(&config.settings, &folder)?;
        let guides = source.as_ref().zip(text.as_ref()).map(|(source, text)| {
            let vocab_size = source.spec().vocab_size as u32;
            Arc::new(Compiler::new(text.tokenizer.clone(), vocab_size))
        });
        let adapters = adapters(&config, source.as_ref(), &folder, version)?;
        let text_lengths = Arc::new(TextLengths::default());
        let batching = BatchStrategy::new(VolumeReader {
            input: config.input,
            default_max_tokens: match config.settings.task.is_pooling() {
                true => 0,
                false => config.settings.default_max_tokens,
            },
            text_lengths: text_lengths.clone(),
        });
        Ok(Self {
            stops: Arc::default(),
            guides,
            adapters,
            text_lengths,
            batching,
            post_processors: Arc::new(post_processors),
            metrics: MetricsShare::new(SharedMetrics::of(&name, version)?),
            load: ModelLoad::new(&name, version),
            served: handle.served()?,
            folder,
            config: Arc::new(config),
            source,
            recommended,
            text,
            images,
        })
    }

    /// The checkpoint as the configuration serves it.
    pub fn configured(&self) -> ConfiguredModel<'_> {
        ConfiguredModel {
            settings: &self.config.settings,
            source: self.source.as_deref(),
            gpu: None,
        }
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        self.metrics.release();
    }
}

fn parse_json(text: &str) -> Result<Value, Error> {
    serde_json::from_str(text)
        .map_err(|error| Error::internal(format!("Triton's model configuration: {error}")))
}

/// Requests that Triton holds in slots.
fn slots(config: &Value) -> Option<u64> {
    config.get("max_batch_size").and_then(Value::as_u64)
}

/// Whether any instance of a model is on a GPU.
fn is_on_gpu(config: &Value, settings: &Settings) -> bool {
    let groups = config.get("instance_group").and_then(Value::as_array);
    let is_on_gpu = |group: &Value| group.get("kind").is_some_and(|kind| kind == "KIND_GPU");
    groups.is_some_and(|groups| groups.iter().any(is_on_gpu)) || !settings.gpu_device_ids.is_empty()
}

/// The options of generation_config.json, if requests are to take them.
fn recommended_options(
    settings: &Settings,
    source: Option<&ModelSource>,
) -> Result<RequestOptions, LoadError> {
    if !settings.use_generation_config {
        return Ok(RequestOptions::default());
    }
    let file = source.and_then(ModelSource::generation_config);
    let file = file.ok_or_else(|| LoadError::Config {
        problem: "use_generation_config is true, and the checkpoint has no generation_config.json"
            .to_owned(),
        remedy: "leave it out, or add the file".to_owned(),
    })?;
    RequestOptions::recommended(file)
}

/// The built-in post-processors, and the user's library's.
fn post_processors(settings: &Settings, folder: &Path) -> Result<PostProcessors, LoadError> {
    let Some(library) = &settings.logits_post_processor_library else {
        return Ok(PostProcessors::default());
    };
    let useless = |what: &str, remedy: &str| {
        Err(LoadError::Config {
            problem: format!("logits_post_processor_library is set, and {what}"),
            remedy: format!("leave it out, or {remedy}"),
        })
    };
    if settings.gpt_model_type.is_lockstep() {
        return useless(
            "with gpt_model_type V1 there are no logits post-processors",
            "take inflight_fused_batching",
        );
    }
    if settings.runner == RunnerKind::Synthetic {
        return useless("the synthetic runner has no logits", "serve a checkpoint");
    }
    PostProcessors::with_library(&folder.join(library))
}

/// The adapters of a model, which has a checkpoint then.
fn adapters(
    config: &ModelConfig,
    source: Option<&Arc<ModelSource>>,
    folder: &Path,
    version: u64,
) -> Result<Option<Arc<AdapterStore>>, LoadError> {
    let settings = &config.settings;
    // The configurations of TensorRT-LLM's models declare the inputs whether or not there are adapters.
    let takes_uploads = config.takes_adapters && source.is_some();
    let Some(folders) = AdapterFolders::open(settings, folder, version, takes_uploads)? else {
        return Ok(None);
    };
    let Some(source) = source else {
        return Err(LoadError::Config {
            problem: "there is a lora_dir, a lora_prefetch_dir or a multi_lora.json, \
                      and the synthetic runner computes no adapters"
                .to_owned(),
            remedy: "leave it out, or serve a checkpoint".to_owned(),
        });
    };
    Ok(Some(Arc::new(AdapterStore::new(
        folders,
        Arc::clone(source),
        AdapterLimits::new(settings, source.spec()),
    ))))
}
