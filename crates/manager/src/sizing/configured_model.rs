//! A model as its configuration serves it: a checkpoint, or the synthetic runner.

use std::num::NonZeroU32;
use std::ops::Range;
use std::path::Path;

use super::engine_config::{ModelDimensions, image_limits};
use inflight_base::{BlockSize, LoadError, TokenId, Tokens};
use inflight_collective::Grid;
use inflight_config::{
    KvCacheDtype, ModelConfig, RunnerKind, Settings, SpeculationKind, Task, WeightOnlyPrecision,
};
use inflight_device::KvDtype;
use inflight_engine::AttentionWindow;
#[cfg(feature = "cuda")]
use inflight_machines::CudaRunner;
use inflight_numbers::CodeBits;
use inflight_runner::{
    AttentionWindows, CpuRunner, GroupedLayers, ModelSource, ModelSpec, SyntheticRunner, TowerSpec,
    WeightPrecision,
};
use inflight_text::Tokenizer;

#[cfg(feature = "cuda")]
type GpuRunner = CudaRunner;
/// Only until the load is refused.
#[cfg(not(feature = "cuda"))]
type GpuRunner = CpuRunner;

/// The longest sequence of the synthetic runner, which has no limit of its own.
const SYNTHETIC_MAX_POSITIONS: u32 = 1 << 20;
/// The default of `max_seq_len` for the synthetic runner.
const SYNTHETIC_MAX_SEQ_LEN: u32 = 4096;
/// Bytes of one position in the synthetic runner's cache: a hash of all tokens up to it.
const SYNTHETIC_KV_BYTES: u64 = 8;

/// A CPU is at full throughput from this many tokens a step; a larger default would only make generating requests
/// wait longer for the prompts of others.
const CPU_MAX_NUM_TOKENS: u32 = 512;
/// The default of the Batch Manager for GPUs.
const GPU_MAX_NUM_TOKENS: u32 = 8192;

/// Host memory is shared with Triton, other models and the system.
const CPU_KV_FRACTION: f64 = 0.5;
/// The default of the Batch Manager, for memory that nothing else uses.
const GPU_KV_FRACTION: f64 = 0.9;

/// A model's settings and its checkpoint.
#[derive(Clone, Copy)]
pub struct ConfiguredModel<'a> {
    /// The parameters of its config.pbtxt.
    pub settings: &'a Settings,
    /// The checkpoint; `None` for the synthetic runner.
    pub source: Option<&'a ModelSource>,
    /// The GPU that it runs on; `None` for the CPU.
    pub gpu: Option<usize>,
}

/// Opens the checkpoint that `config` names for version `version` of the model in `folder`. For the synthetic
/// runner, which has none, this sets `max_seq_len` where the user has not.
///
/// # Errors
/// The checkpoint is missing or malformed.
pub fn open_model_source(
    config: &mut ModelConfig,
    folder: &Path,
    version: u64,
) -> Result<Option<ModelSource>, LoadError> {
    let settings = &mut config.settings;
    check_draft_model_path(settings.speculation, settings.draft_model_path.is_some())?;
    check_score_tokens(settings)?;
    match settings.runner {
        RunnerKind::Synthetic if settings.speculation.is_by_model() => Err(LoadError::Config {
            problem: format!(
                "speculation is {}, and the synthetic runner has none",
                settings.speculation.name()
            ),
            remedy: "set speculation to draft_input_ids, prompt_lookup or none".to_owned(),
        }),
        RunnerKind::Synthetic if settings.task.is_pooling() => Err(LoadError::Config {
            problem: format!(
                "task is {}, and the synthetic runner only generates",
                settings.task.name()
            ),
            remedy: "leave out task, or serve a checkpoint".to_owned(),
        }),
        RunnerKind::Synthetic => {
            settings.max_seq_len.get_or_insert(SYNTHETIC_MAX_SEQ_LEN);
            Ok(None)
        }
        RunnerKind::HuggingFace => {
            let dir = settings.checkpoint_path(folder, version);
            let source = match settings.task {
                Task::Generate if settings.speculation == SpeculationKind::DraftModel => {
                    let tokenizer_dir = settings.tokenizer_path(folder, version);
                    let draft_dir = settings.draft_model_path.as_ref();
                    let draft_dir = draft_dir.map(|path| folder.join(path));
                    open_with_draft_model(&dir, &tokenizer_dir, draft_dir.as_deref())
                }
                Task::Generate if settings.speculation == SpeculationKind::Eagle3 => {
                    let head_dir = settings.draft_model_path.as_ref();
                    let head_dir = head_dir.map(|path| folder.join(path));
                    open_with_draft_head(&dir, head_dir.as_deref())
                }
                Task::Generate if settings.speculation == SpeculationKind::Mtp => {
                    ModelSource::open(&dir)?.with_mtp_head()
                }
                Task::Generate => ModelSource::open(&dir),
                Task::Embed => {
                    ModelSource::open_embedder(&dir, settings.pooling, settings.normalize)
                }
                Task::Classify => ModelSource::open_classifier(&dir, settings.pooling),
                Task::Score => match settings.score_tokens() {
                    None => ModelSource::open_scorer(&dir, settings.pooling),
                    Some(tokens) => {
                        let tokenizer_dir = settings.tokenizer_path(folder, version);
                        let tokens = token_ids(&tokenizer_dir, &tokens)?;
                        ModelSource::open_token_scorer(&dir, settings.pooling, tokens)
                    }
                },
            };
            source.map(Some)
        }
    }
}

/// Refuses tokens to score by where nothing is scored.
fn check_score_tokens(settings: &Settings) -> Result<(), LoadError> {
    let name = match settings.is_original_qwen3_reranker {
        true => "is_original_qwen3_reranker",
        false => "classifier_from_token",
    };
    match settings.score_tokens() {
        Some(_) if settings.task != Task::Score => Err(LoadError::Config {
            problem: format!("{name} is set, and task is {}", settings.task.name()),
            remedy: format!("set task to score, or leave out {name}"),
        }),
        _ => Ok(()),
    }
}

/// The ids of two tokens of the tokenizer in `dir`.
fn token_ids(dir: &Path, tokens: &[String; 2]) -> Result<[TokenId; 2], LoadError> {
    let tokenizer = Tokenizer::load(dir)?;
    let id = |token: &String| {
        tokenizer.id_of(token).ok_or_else(|| LoadError::Config {
            problem: format!(
                "classifier_from_token has '{token}', which is no token of the tokenizer in {}",
                dir.display()
            ),
            remedy: "name two tokens of its vocabulary".to_owned(),
        })
    };
    Ok([id(&tokens[0])?, id(&tokens[1])?])
}

/// Refuses the path of a draft model that is not used.
///
/// # Errors
/// It is.
pub(crate) fn check_draft_model_path(
    kind: SpeculationKind,
    has_path: bool,
) -> Result<(), LoadError> {
    match has_path && !kind.has_path() {
        false => Ok(()),
        true => Err(LoadError::Config {
            problem: "draft_model_path is set, and speculation is not draft_model or eagle3"
                .to_owned(),
            remedy: "set speculation to one of these, or leave out draft_model_path".to_owned(),
        }),
    }
}

/// Opens a checkpoint with its EAGLE-3 draft head.
///
/// # Errors
/// One of them is missing or malformed, or they do not fit.
pub(crate) fn open_with_draft_head(
    dir: &Path,
    head_dir: Option<&Path>,
) -> Result<ModelSource, LoadError> {
    let Some(head_dir) = head_dir else {
        return Err(LoadError::Config {
            problem: "speculation is eagle3, and draft_model_path is not set".to_owned(),
            remedy: "set it to the folder of a head that was trained for the model".to_owned(),
        });
    };
    ModelSource::open(dir)?.with_draft_head(head_dir)
}

/// Opens a checkpoint with another one that makes drafts for it: both have the same tokens. Those of the first are in
/// `tokenizer_dir`; they are compared where both have a tokenizer.json.
///
/// # Errors
/// One of them is missing or malformed, or they have different tokens.
pub(crate) fn open_with_draft_model(
    dir: &Path,
    tokenizer_dir: &Path,
    draft_dir: Option<&Path>,
) -> Result<ModelSource, LoadError> {
    let Some(draft_dir) = draft_dir else {
        return Err(LoadError::Config {
            problem: "speculation is draft_model, and draft_model_path is not set".to_owned(),
            remedy: "set it to the folder of a smaller model with the same tokenizer".to_owned(),
        });
    };
    let source = ModelSource::open(dir)?.with_draft_model(ModelSource::open(draft_dir)?)?;
    let vocab_size = source.spec().vocab_size as u32;
    if let [Ok(own), Ok(others)] = [tokenizer_dir, draft_dir].map(Tokenizer::load)
        && let Some(token) = (0..vocab_size).find(|&it| own.content(it) != others.content(it))
    {
        let name = |content: Option<String>| content.unwrap_or_else(|| "nothing".to_owned());
        return Err(LoadError::Config {
            problem: format!(
                "token {token} is '{}' for the model, by {}, and '{}' for the draft model, by {}",
                name(own.content(token)),
                tokenizer_dir.display(),
                name(others.content(token)),
                draft_dir.display()
            ),
            remedy: "set draft_model_path to a model with the same tokenizer".to_owned(),
        });
    }
    Ok(source)
}

impl ConfiguredModel<'_> {
    /// The data type of the KV cache.
    pub fn kv_dtype(&self) -> KvDtype {
        match self.settings.kv_cache_dtype {
            KvCacheDtype::Bf16 => KvDtype::Bf16,
            KvCacheDtype::Int8 => KvDtype::Int8,
            KvCacheDtype::Fp8 => KvDtype::Fp8,
        }
    }

    /// The precision that the weights of a floating-point checkpoint are quantised to at load.
    pub fn weights(&self) -> Option<WeightPrecision> {
        let bits = match self.settings.weight_only_precision? {
            WeightOnlyPrecision::Int8 => CodeBits::Eight,
            WeightOnlyPrecision::Int4 => CodeBits::Four,
            WeightOnlyPrecision::Fp8 => CodeBits::Fp8,
        };
        let usual = WeightPrecision::new(bits);
        let group_size = match self.settings.weight_only_group_size {
            Some(size) => size as usize,
            // Products with FP8 activations need one scale for each output.
            None if self.settings.fp8_activations => WeightPrecision::WHOLE_ROWS,
            None => usual.group_size,
        };
        Some(WeightPrecision {
            group_size,
            ..usual
        })
    }

    /// Bytes of the weights in memory; 0 for the synthetic runner.
    ///
    /// # Errors
    /// A tensor of the checkpoint is missing, or its shape or data type is wrong.
    pub fn num_weight_bytes(&self) -> Result<u64, LoadError> {
        match (self.source, self.gpu) {
            (None, _) => Ok(0),
            (Some(source), None) => {
                source.num_weight_bytes_in(self.weights(), self.grid().num_stages)
            }
            (Some(source), Some(_)) => GpuRunner::num_weight_bytes(source, self.weights()),
        }
    }

    /// Bytes of scratch memory that all ranks on CPUs take at load, besides the weights, and of what a vision tower
    /// computes with and the rows of images that are kept.
    pub(super) fn num_scratch_bytes(&self) -> u64 {
        let parts = self.source.iter().flat_map(|source| self.parts(source));
        let of_ranks = parts.map(|(spec, _)| CpuRunner::num_scratch_bytes(&spec) as u64);
        let tower = self.source.and_then(ModelSource::tower);
        let of_tower = tower.map_or(0, |tower| {
            let computed = CpuRunner::num_tower_bytes(tower, self.settings.tokens_per_block);
            computed as u64 + self.num_image_row_bytes(tower)
        });
        of_ranks.sum::<u64>() + of_tower
    }

    /// Bytes of the rows of images that are kept, in bf16.
    fn num_image_row_bytes(&self, tower: &TowerSpec) -> u64 {
        let limits = image_limits(
            self.settings.max_num_image_tokens.unwrap_or(1),
            self.settings.max_cached_image_tokens,
        );
        let row_bytes = 2 * tower.row_width() as u64;
        row_bytes * u64::from(limits.max_cached_tokens.0)
    }

    /// The processes that compute it.
    pub fn grid(&self) -> Grid {
        Grid {
            num_stages: self.settings.pipeline_parallel_size as usize,
            ranks_per_stage: self.settings.tensor_parallel_size as usize,
        }
    }

    /// The sizes of its parts on several ranks, and the layers of each; the whole on one, and if it cannot be split.
    fn parts(&self, source: &ModelSource) -> Vec<(ModelSpec, Range<usize>)> {
        let grid = self.grid();
        let specs = source.specs_of_ranks(grid).unwrap_or_default();
        if grid.num_ranks() == 1 || specs.is_empty() {
            let spec = source.spec().clone();
            let layers = 0..spec.num_cached_layers();
            return vec![(spec, layers)];
        }
        let stages = self.stages(source);
        let specs = specs.into_iter().enumerate();
        specs
            .map(|(rank, spec)| (spec, stages[grid.stage(rank)].clone()))
            .collect()
    }

    /// The layers of each stage that keep keys and values; one stage if they cannot be split.
    fn stages(&self, source: &ModelSource) -> Vec<Range<usize>> {
        let spec = source.spec();
        let stages = source.layers_of_stages(self.grid());
        let all = 0..spec.num_layers();
        let stages = stages.unwrap_or_else(|_| vec![all]);
        let stages = stages.into_iter();
        stages.map(|layers| spec.cached_layers(layers)).collect()
    }

    /// Whether any layer's attention window is shorter than `max_seq_len`.
    pub fn has_windows(&self, max_seq_len: Tokens) -> bool {
        let attention = self.attention();
        let is_less = |window: NonZeroU32| window.get() < max_seq_len.0;
        match self.source {
            Some(source) => {
                let mut windows = source.spec().windows_within(&attention).flatten();
                windows.any(is_less)
            }
            None => attention.windows.iter().copied().any(is_less),
        }
    }

    /// The attention windows and sinks that the configuration sets.
    pub fn attention(&self) -> AttentionWindows {
        AttentionWindows {
            windows: self.settings.max_attention_window_size.clone(),
            num_sinks: Tokens(self.settings.sink_token_length),
            shifts_sinks: self.settings.enable_sink_token_shift,
        }
    }
}

impl ModelDimensions for ConfiguredModel<'_> {
    fn max_positions(&self) -> u32 {
        match self.source {
            Some(source) => source.max_positions(),
            None => SYNTHETIC_MAX_POSITIONS,
        }
    }

    fn patches_per_image_token(&self) -> Option<u32> {
        let tower = self.source?.tower()?;
        Some(tower.num_patches_per_token() as u32)
    }

    fn has_whole_images(&self) -> bool {
        self.source.is_some_and(|it| it.spec().has_whole_images)
    }

    /// Of all ranks together: they are on one host, so what it has left is divided among them as they need it. On GPUs
    /// the rank with the largest blocks counts: each has memory of its own.
    fn kv_bytes_per_block(&self, block_size: BlockSize, groups: &GroupedLayers) -> u64 {
        match self.source {
            Some(source) => {
                let dtype = self.kv_dtype();
                let parts = self.parts(source).into_iter();
                let of_parts = parts.map(|(spec, layers)| {
                    let num_bytes = match self.gpu {
                        None => CpuRunner::kv_bytes_in_groups,
                        Some(_) => GpuRunner::kv_bytes_in_groups,
                    };
                    num_bytes(&spec, layers, groups.layers(), block_size, dtype)
                });
                let num_bytes = match self.gpu {
                    None => {
                        let drafted = source.draft_model().map(ModelSource::spec);
                        let drafted =
                            drafted.map(|it| CpuRunner::kv_bytes_per_block(it, block_size, dtype));
                        let of_head = source.draft_head();
                        let of_head = of_head
                            .map(|it| CpuRunner::head_bytes_per_block(it, block_size, dtype));
                        of_parts.chain(drafted).chain(of_head).sum()
                    }
                    Some(_) => of_parts.max().unwrap_or(0),
                };
                num_bytes as u64
            }
            None => SYNTHETIC_KV_BYTES * u64::from(block_size.tokens().0),
        }
    }

    fn default_max_num_tokens(&self) -> u32 {
        match self.gpu {
            None => CPU_MAX_NUM_TOKENS,
            Some(_) => GPU_MAX_NUM_TOKENS,
        }
    }

    fn default_kv_fraction(&self) -> f64 {
        match self.gpu {
            None => CPU_KV_FRACTION,
            Some(_) => GPU_KV_FRACTION,
        }
    }

    fn layer_groups(&self, max_seq_len: Tokens, is_paged: bool) -> GroupedLayers {
        let attention = self.attention();
        let num_sinks = attention.num_sinks;
        let (num_layers, largest) = match self.source {
            Some(source) => {
                let spec = source.spec();
                if spec.is_bidirectional {
                    return GroupedLayers::of_one_step(spec.num_layers());
                }
                if is_paged {
                    let layers = spec.windows_within(&attention).zip(spec.kv_widths());
                    let stages = self.stages(source);
                    return GroupedLayers::new(layers, &stages, num_sinks, max_seq_len);
                }
                let largest = spec.largest_window(&attention, max_seq_len);
                (spec.num_cached_layers(), largest)
            }
            None => (0, SyntheticRunner::largest_window(&attention, max_seq_len)),
        };
        let window = largest.map(|size| AttentionWindow { size, num_sinks });
        GroupedLayers::one(num_layers, window)
    }

    fn sees_whole_prompts(&self) -> bool {
        self.source.is_some_and(|it| it.spec().is_bidirectional)
    }

    /// Of all ranks together, or on GPUs of the rank with the most, as [`ModelDimensions::kv_bytes_per_block`].
    fn state_bytes(&self) -> Option<u64> {
        let source = self.source?;
        source.spec().recurrence()?;
        let parts = self.parts(source).into_iter();
        let of_parts = parts.map(|(spec, _)| spec.state_bytes());
        Some(match self.gpu {
            None => of_parts.sum(),
            Some(_) => of_parts.max().unwrap_or(0),
        })
    }

    /// Free host memory is the system's too.
    fn fills_free_memory(&self) -> bool {
        self.gpu.is_some()
    }

    /// Stages take turns with micro-batches instead.
    fn can_run_ahead(&self) -> bool {
        self.gpu.is_some() && self.grid().num_stages == 1
    }
}
