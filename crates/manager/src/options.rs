//! A batch manager from JSON options: the parameters of config.pbtxt that apply to a batch manager.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use serde::Deserialize;

use crate::sizing::{
    ConfiguredModel, MAX_PREFIX_BLOCKS, ModelDimensions, check_draft_model, check_draft_model_path,
    check_ranks, cpu_options, image_limits, open_with_draft_head, open_with_draft_model,
    rank_limits, rank_transport, speculation,
};
use crate::step_cost::measure_costs;
use crate::{BatchManager, ServingRank, TensorModel};
use inflight_base::{BlockSize, Blocks, LoadError, Tokens};
use inflight_collective::{MPI_LIBRARY, beside_library};
use inflight_config::{
    BatchingScheme, CapacityPolicy, MAX_STATE_SNAPSHOTS, MAX_THREADS, Settings, SpeculationKind,
};
use inflight_engine::{BlockReuse, EngineConfig};
use inflight_machines::{RANK_PROGRAM, RankTransport, lead_on_cpus, load_on_cpus};
use inflight_runner::{ModelSource, RunnerLimits};

/// The options of a batch manager. Names, values and defaults are as in config.pbtxt, except that nothing is sized by
/// the machine: `max_num_requests` is 8 by default, and the KV cache holds as many sequences of the largest length
/// unless `max_tokens_in_paged_kv_cache` is smaller.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ManagerOptions {
    /// The folder of the checkpoint.
    pub gpt_model_path: PathBuf,
    /// `inflight_fused_batching`, `inflight_batching` or `V1`.
    #[serde(default)]
    pub gpt_model_type: Option<String>,
    /// `guaranteed_no_evict`, `max_utilization` or `static_batch`.
    #[serde(default)]
    pub batch_scheduler_policy: Option<String>,
    /// The most requests in one step.
    #[serde(default)]
    pub max_num_requests: Option<u32>,
    /// The most requests that are active at a time; by default 8 times `max_num_requests`.
    #[serde(default)]
    pub max_num_active: Option<u32>,
    /// The most beams of one request.
    #[serde(default)]
    pub max_beam_width: Option<u32>,
    /// The most tokens in one step.
    #[serde(default)]
    pub max_num_tokens: Option<u32>,
    /// The most tokens of prompt and output together; by default as many as the model has positions.
    #[serde(default)]
    pub max_seq_len: Option<u32>,
    /// Positions in the whole KV cache.
    #[serde(default)]
    pub max_tokens_in_paged_kv_cache: Option<u32>,
    /// Positions in one block.
    #[serde(default)]
    pub tokens_per_block: Option<u32>,
    /// Whether requests with a common beginning share blocks.
    #[serde(default)]
    pub enable_kv_cache_reuse: Option<bool>,
    /// Whether a prompt may be computed in chunks.
    #[serde(default)]
    pub enable_chunked_context: Option<bool>,
    /// Whether two micro-batches take turns, so that the host works on one while the other is computed.
    #[serde(default)]
    pub enable_trt_overlap: Option<bool>,
    /// `none`, `draft_input_ids`, `prompt_lookup`, `draft_model`, `eagle3` or `mtp`.
    #[serde(default)]
    pub speculation: Option<String>,
    /// The folder of a smaller model with the same tokens, for `speculation: draft_model`; of a head for `eagle3`.
    #[serde(default)]
    pub draft_model_path: Option<PathBuf>,
    /// The most draft tokens of one request in one step.
    #[serde(default)]
    pub max_draft_tokens: Option<u32>,
    /// Whether sequences have fewer drafts while those are wrong more often than they are worth.
    #[serde(default)]
    pub enable_adaptive_drafts: Option<bool>,
    /// The most tokens of images that are encoded in one step. Without it, the model is loaded for text only.
    #[serde(default)]
    pub max_num_image_tokens: Option<u32>,
    /// The most tokens of images whose rows are kept; by default 8192, or as many as a step encodes.
    #[serde(default)]
    pub max_cached_image_tokens: Option<u32>,
    /// The most tokens of one image, in models that take images of any size; 1280 by default.
    pub max_image_tokens: Option<u32>,
    /// The number of threads that compute a step: of each rank.
    #[serde(default)]
    pub num_threads: Option<NonZeroUsize>,
    /// Whether one rank cuts sums into the tiles of several, and so gives the bits of 2 and of 4.
    #[serde(default)]
    pub deterministic: bool,
    /// The number of ranks that share each layer.
    #[serde(default)]
    pub tensor_parallel_size: Option<u32>,
    /// The number of stages of layers, each of which has so many ranks.
    #[serde(default)]
    pub pipeline_parallel_size: Option<u32>,
    /// `processes`, which rank 0 starts, or `mpi`: the processes of `mpirun`.
    #[serde(default)]
    pub rank_transport: Option<String>,
    /// How long ranks wait for each other within a step.
    #[serde(default)]
    pub rank_timeout_seconds: Option<u32>,
    /// How long they wait until all have loaded their weights.
    #[serde(default)]
    pub rank_load_timeout_seconds: Option<u32>,
    /// The program of the processes that rank 0 starts: it runs [`rank_main`](inflight_machines::rank_main) of this
    /// build. By default `inflight-rank` beside this program, or beside the library that has this code.
    #[serde(default)]
    pub rank_program: Option<PathBuf>,
    /// The plug-in for MPI. By default `libinflight_mpi.so` at that place.
    #[serde(default)]
    pub mpi_library: Option<PathBuf>,
}

impl ManagerOptions {
    /// Parses a JSON object.
    ///
    /// # Errors
    /// An unknown name, or an invalid value.
    pub fn parse(json: &str) -> Result<Self, LoadError> {
        serde_json::from_str(json).map_err(|error| LoadError::Config {
            problem: format!("the options are invalid: {error}"),
            remedy: "write a JSON object with gpt_model_path".to_owned(),
        })
    }

    /// If the ranks are processes of `mpirun`, waits until all of them have called this function or
    /// [`ManagerOptions::load`]. A process that is another rank than 0 has no requests: this computes its share of the
    /// batch manager that rank 0 loads. `None` if this process has to load the batch manager itself.
    ///
    /// # Errors
    /// The options are invalid, MPI fails, or not all processes have come in time.
    pub fn serve_rank(&self) -> Result<Option<ServingRank>, LoadError> {
        let settings = self.settings()?;
        let num_ranks = settings.tensor_parallel_size * settings.pipeline_parallel_size;
        if num_ranks == 1 {
            return Ok(None);
        }
        let RankTransport::Mpi(world) = self.rank_transport(&settings)? else {
            return Ok(None);
        };
        let failed = |error: &dyn ToString| LoadError::Resource(error.to_string());
        match world.rank().map_err(|error| failed(&error))? {
            0 => Ok(None),
            _ => {
                let rank = ServingRank::start(world);
                rank.map(Some).map_err(|error| failed(&error))
            }
        }
    }

    /// Loads the checkpoint, on all ranks. Returns the batch manager, and what is needed to read and write tensors.
    ///
    /// # Errors
    /// The options contradict each other, the checkpoint cannot be loaded, or a rank has failed. This process is
    /// another rank of `mpirun`, see [`ManagerOptions::serve_rank`].
    pub fn load(&self) -> Result<(BatchManager, TensorModel), LoadError> {
        if let Some(num_threads) = self
            .num_threads
            .filter(|num| num.get() > MAX_THREADS as usize)
        {
            return Err(LoadError::Config {
                problem: format!("num_threads is {num_threads}"),
                remedy: format!("set it to at most {MAX_THREADS}"),
            });
        }
        let settings = self.settings()?;
        check_draft_model_path(settings.speculation, self.draft_model_path.is_some())?;
        let path = &self.gpt_model_path;
        let source = match settings.speculation {
            SpeculationKind::Eagle3 => {
                open_with_draft_head(path, self.draft_model_path.as_deref())?
            }
            SpeculationKind::DraftModel => {
                open_with_draft_model(path, path, self.draft_model_path.as_deref())?
            }
            SpeculationKind::Mtp => ModelSource::open(path)?.with_mtp_head()?,
            _ => ModelSource::open(path)?,
        };
        let source = match self.max_num_image_tokens {
            Some(_) => {
                let max_tokens = self.max_image_tokens.unwrap_or(Settings::MAX_IMAGE_TOKENS);
                let tower = source.find_tower()?;
                source.with_tower(tower.with_max_tokens(max_tokens as usize))
            }
            None => source,
        };
        let model = ConfiguredModel {
            settings: &settings,
            source: Some(&source),
            gpu: None,
        };
        check_ranks(&model)?;
        check_draft_model(&model)?;
        let has_states = model.state_bytes().is_some();
        let positions = source.max_positions();
        let mut config = self.engine_config(positions, settings.speculation, has_states)?;
        if let Some(images) = &mut config.images {
            images.has_whole_images = source.spec().has_whole_images;
        }
        config.check()?;
        let options = cpu_options(&settings)?;
        let limits = RunnerLimits::of(&config);
        let mut runner = match model.grid().num_ranks() {
            1 => load_on_cpus(&source, limits, &options)?,
            _ => {
                let time_limits = rank_limits(&settings);
                let transport = self.rank_transport(&settings)?;
                let ranks = transport.connect(model.grid(), time_limits.load)?;
                lead_on_cpus(ranks, &source, limits, &options, time_limits)?.0
            }
        };
        if self.enable_adaptive_drafts != Some(false) {
            measure_costs(&mut config, &mut *runner)?;
        }
        let model = TensorModel {
            vocab_size: runner.vocab_size(),
            max_seq_len: config.max_seq_len,
            end_ids: source.end_ids().to_vec(),
        };
        let manager = BatchManager::new(config, runner).map_err(|error| LoadError::Config {
            problem: format!("the runner's thread cannot be started: {error}"),
            remedy: "let the process have more threads".to_owned(),
        })?;
        Ok((manager, model))
    }

    /// The settings for ranks and threads.
    fn settings(&self) -> Result<Settings, LoadError> {
        let numbers = [
            ("tensor_parallel_size", self.tensor_parallel_size),
            ("pipeline_parallel_size", self.pipeline_parallel_size),
            ("rank_timeout_seconds", self.rank_timeout_seconds),
            ("rank_load_timeout_seconds", self.rank_load_timeout_seconds),
        ];
        let given = numbers
            .into_iter()
            .filter_map(|(key, number)| Some((key, number?.to_string())));
        let transport = self.rank_transport.clone();
        let given = given.chain(transport.map(|kind| ("rank_transport", kind)));
        let given: Vec<_> = given.collect();
        let settings = Settings::parse(given.iter().map(|(key, value)| (*key, value.as_str())))?;
        Ok(Settings {
            num_threads: self.num_threads,
            deterministic: self.deterministic,
            speculation: named(
                "speculation",
                self.speculation.as_deref(),
                &[
                    ("none", SpeculationKind::None),
                    ("draft_input_ids", SpeculationKind::DraftInputIds),
                    ("prompt_lookup", SpeculationKind::PromptLookup),
                    ("draft_model", SpeculationKind::DraftModel),
                    ("eagle3", SpeculationKind::Eagle3),
                    ("mtp", SpeculationKind::Mtp),
                ],
            )?,
            ..settings
        })
    }

    fn rank_transport(&self, settings: &Settings) -> Result<RankTransport, LoadError> {
        let beside =
            |given: &Option<PathBuf>, name| given.clone().unwrap_or_else(|| beside_library(name));
        let program = beside(&self.rank_program, RANK_PROGRAM);
        let mpi_library = beside(&self.mpi_library, MPI_LIBRARY);
        rank_transport(settings, &program, &mpi_library)
    }

    fn engine_config(
        &self,
        max_positions: u32,
        kind: SpeculationKind,
        has_states: bool,
    ) -> Result<EngineConfig, LoadError> {
        let default = EngineConfig::default();
        let scheme = named(
            "gpt_model_type",
            self.gpt_model_type.as_deref(),
            &[
                ("inflight_fused_batching", BatchingScheme::InflightFused),
                ("inflight_batching", BatchingScheme::Inflight),
                ("V1", BatchingScheme::V1),
            ],
        )?;
        let policy = named(
            "batch_scheduler_policy",
            self.batch_scheduler_policy.as_deref(),
            &[
                ("guaranteed_no_evict", CapacityPolicy::GuaranteedNoEvict),
                ("max_utilization", CapacityPolicy::MaxUtilization),
                ("static_batch", CapacityPolicy::StaticBatch),
            ],
        )?;
        let settings = Settings::default();
        let speculation = speculation(&Settings {
            speculation: kind,
            max_draft_tokens: self.max_draft_tokens.unwrap_or(settings.max_draft_tokens),
            ..settings
        });
        let max_num_requests = self.max_num_requests.unwrap_or(default.max_num_requests);
        let max_seq_len = self.max_seq_len.unwrap_or(max_positions);
        if max_seq_len > max_positions {
            return Err(LoadError::Config {
                problem: format!(
                    "max_seq_len is {max_seq_len}, and the model has {max_positions} positions"
                ),
                remedy: format!("write at most {max_positions}, or leave it out"),
            });
        }
        let tokens_per_block = self
            .tokens_per_block
            .unwrap_or(default.block_size.tokens().0);
        let block_size = BlockSize::new(tokens_per_block).ok_or_else(|| LoadError::Config {
            problem: "tokens_per_block is 0".to_owned(),
            remedy: "set it to at least 1".to_owned(),
        })?;
        let of_one = Tokens(max_seq_len).blocks_ceil(block_size).0;
        let max_beam_width = self.max_beam_width.unwrap_or(1);
        let full = max_num_requests
            .saturating_mul(of_one)
            .saturating_mul(max_beam_width);
        let given = self
            .max_tokens_in_paged_kv_cache
            .map(|max| max / tokens_per_block);
        let reuse = match self.enable_kv_cache_reuse {
            Some(false) => BlockReuse::Off,
            _ if has_states => BlockReuse::WholeBlocks,
            _ => BlockReuse::PartialBlocks,
        };
        let max_num_tokens = self.max_num_tokens.unwrap_or_else(|| {
            let whole = match self.enable_chunked_context {
                Some(false) => max_seq_len,
                _ => 0,
            };
            let each = 1u32.saturating_add(speculation.map_or(0, |it| it.max_draft_tokens));
            let full_batch = max_num_requests
                .saturating_mul(each)
                .saturating_add(tokens_per_block);
            default
                .max_num_tokens
                .0
                .max(full_batch)
                .max(max_beam_width)
                .max(whole)
        });
        let num_state_snapshots = match reuse {
            BlockReuse::WholeBlocks => max_num_requests.saturating_mul(2).min(MAX_STATE_SNAPSHOTS),
            BlockReuse::Off | BlockReuse::PartialBlocks => 0,
        };
        Ok(EngineConfig {
            scheme,
            policy,
            num_state_snapshots,
            max_num_requests,
            max_num_active: self
                .max_num_active
                .unwrap_or(max_num_requests.saturating_mul(8)),
            max_beam_width,
            max_seq_len: Tokens(max_seq_len),
            max_num_tokens: Tokens(max_num_tokens),
            block_size,
            chunk_unit: block_size,
            num_blocks: Blocks(match (given, reuse) {
                (None, _) => full,
                (Some(given), BlockReuse::Off) => given.min(full),
                // What no sequence uses keeps prefixes.
                (Some(given), _) => given.min(full.max(MAX_PREFIX_BLOCKS as u32)),
            }),
            enable_chunked_context: self.enable_chunked_context.unwrap_or(true),
            num_micro_batches: if self.enable_trt_overlap == Some(true) {
                2
            } else {
                1
            },
            speculation,
            reuse,
            images: self
                .max_num_image_tokens
                .map(|max| image_limits(max, self.max_cached_image_tokens)),
            ..default
        })
    }
}

/// The meaning of a value; the first if there is none.
fn named<T: Copy>(key: &str, value: Option<&str>, known: &[(&str, T)]) -> Result<T, LoadError> {
    let value = value.unwrap_or(known[0].0);
    let found = known.iter().find(|(name, _)| *name == value);
    found.map(|(_, it)| *it).ok_or_else(|| LoadError::Config {
        problem: format!("{key} is '{value}'"),
        remedy: format!(
            "use one of {}",
            known
                .iter()
                .map(|(name, _)| *name)
                .collect::<Vec<_>>()
                .join(", ")
        ),
    })
}
