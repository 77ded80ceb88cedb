//! The engine's configuration, from the model's configuration, its dimensions and the free memory.

use std::fmt::Display;

use super::host_cache::{HostCache, MAX_PREFIX_BLOCKS};
use inflight_base::{BlockSize, Blocks, LoadError, Tokens};
use inflight_config::{
    BatchingScheme, MAX_STATE_SNAPSHOTS, ModelConfig, Scheduling, Settings, SpeculationKind,
};
use inflight_engine::{BlockReuse, EngineConfig, ImageLimits, PromptLookup, Speculation};
use inflight_runner::GroupedLayers;

/// The model's figures that the engine is sized by.
pub trait ModelDimensions {
    /// The longest sequence that the model can attend over.
    fn max_positions(&self) -> u32;

    /// Which layers share blocks, in a cache for sequences of up to `max_seq_len` tokens; all, where each sequence has
    /// one block.
    fn layer_groups(&self, max_seq_len: Tokens, is_paged: bool) -> GroupedLayers;

    /// Bytes of one KV block of a group of layers, with padding.
    fn kv_bytes_per_block(&self, block_size: BlockSize, groups: &GroupedLayers) -> u64;

    /// The default of `max_num_tokens`, unless a full batch needs more.
    fn default_max_num_tokens(&self) -> u32;

    /// The default of `kv_cache_free_gpu_mem_fraction`.
    fn default_kv_fraction(&self) -> f64;

    /// Whether each of its tokens sees all others of a prompt, which is computed in one step then.
    fn sees_whole_prompts(&self) -> bool {
        false
    }

    /// Patches that its vision tower computes for a token of an image; `None` if prompts have no images.
    fn patches_per_image_token(&self) -> Option<u32> {
        None
    }

    /// Whether the tokens of an image see each other, so that a step computes all of them.
    fn has_whole_images(&self) -> bool {
        false
    }

    /// Bytes of the recurrent states of a sequence, whatever its length; `None` if the model has none. A state sums up
    /// a whole sequence, so a prefix is reused only where a snapshot of the states behind it is kept.
    fn state_bytes(&self) -> Option<u64> {
        None
    }

    /// Whether free memory is filled with a KV cache for prefixes, beyond what sequences in flight can use: memory that
    /// nothing else uses.
    fn fills_free_memory(&self) -> bool {
        false
    }

    /// Whether its runner can begin a step before the host knows the tokens of the last one.
    fn can_run_ahead(&self) -> bool {
        false
    }
}

/// The engine's configuration, checked.
///
/// The KV pool is the smaller of what the memory fraction allows and `max_tokens_in_paged_kv_cache`. Without prefixes
/// to keep it is no larger than `max_num_requests` sequences of `max_seq_len` can use with all their beams. With them,
/// that is the limit only on a CPU without `max_tokens_in_paged_kv_cache`, whose free memory is not the cache's alone.
///
/// # Errors
/// Settings that contradict each other, or a pool that cannot hold one sequence.
pub fn engine_config(
    config: &ModelConfig,
    model: &impl ModelDimensions,
    available_bytes: Option<u64>,
) -> Result<EngineConfig, LoadError> {
    let settings = &config.settings;
    let max_seq_len = max_seq_len(settings, model.max_positions())?;
    let max_num_requests = settings.max_num_requests.unwrap_or(config.max_batch_size);
    let sees_whole_prompts = model.sees_whole_prompts();
    if sees_whole_prompts {
        check_whole_prompts(settings)?;
    }
    let has_states = model.state_bytes().is_some();
    if has_states {
        check_states(settings)?;
    }
    let chunks_contexts = chunks_contexts(settings)? && !sees_whole_prompts;
    let speculation = speculation(settings);
    let max_num_tokens = settings.max_num_tokens.unwrap_or_else(|| {
        let whole_context = if chunks_contexts { 0 } else { max_seq_len.0 };
        // A full batch of generating sequences leaves room for one chunk of the next context.
        let each = 1 + speculation.map_or(0, |it| it.max_draft_tokens);
        let full_batch = max_num_requests
            .saturating_mul(each)
            .max(settings.max_beam_width)
            .saturating_add(settings.tokens_per_block.tokens().0);
        let default = model.default_max_num_tokens();
        default.max(full_batch).max(whole_context)
    });
    let paged_kv = settings.paged_kv_cache;
    // In a contiguous cache, one block holds a whole sequence.
    let block_size = match paged_kv {
        true => settings.tokens_per_block,
        false => BlockSize::new(max_seq_len.0).unwrap_or(settings.tokens_per_block),
    };
    let groups = model.layer_groups(max_seq_len, paged_kv);
    let bytes_per_block = model.kv_bytes_per_block(block_size, &groups);
    let fraction = settings.kv_cache_free_mem_fraction;
    let fraction = fraction.unwrap_or_else(|| model.default_kv_fraction());
    let plan_ahead = settings.enable_trt_overlap
        && model.can_run_ahead()
        && settings.gpt_model_type == BatchingScheme::InflightFused;
    if has_states {
        check_states_ahead(plan_ahead)?;
    }
    let reuse = match reuse(settings)? {
        _ if sees_whole_prompts => BlockReuse::Off,
        BlockReuse::PartialBlocks if has_states => BlockReuse::WholeBlocks,
        reuse => reuse,
    };
    let available = available_bytes;
    let num_rows = max_num_requests.saturating_mul(settings.max_beam_width);
    let available_bytes = match available_bytes {
        Some(bytes) => Some(without_states(
            bytes,
            model.state_bytes().unwrap_or(0),
            num_rows,
            num_states(num_rows, speculation.as_ref()),
        )?),
        None => None,
    };
    let kv_bytes = available_bytes.map(|bytes| (bytes as f64 * fraction) as u64);
    let num_snapshots = match model.state_bytes() {
        Some(bytes) if reuse != BlockReuse::Off => {
            num_snapshots(settings, bytes, max_num_requests, kv_bytes)?
        }
        _ => 0,
    };
    let snapshot_bytes = model.state_bytes().unwrap_or(0) * u64::from(num_snapshots);
    let kv_bytes = kv_bytes.map(|bytes| bytes - snapshot_bytes);
    let reuse = match has_states && num_snapshots == 0 {
        true => BlockReuse::Off,
        false => reuse,
    };
    let host_cache = HostCache::new(
        settings.kv_cache_host_memory_bytes,
        bytes_per_block,
        model.state_bytes().filter(|_| num_snapshots > 0),
        max_seq_len.blocks_ceil(block_size).0,
    )?;
    let keeps_prefixes = reuse != BlockReuse::Off
        && (model.fills_free_memory() || settings.max_tokens_in_paged_kv_cache.is_some());
    let engine = EngineConfig {
        scheme: settings.gpt_model_type,
        max_num_requests,
        max_num_active: max_num_active(config, max_num_requests),
        max_beam_width: settings.max_beam_width,
        max_seq_len,
        max_num_tokens: Tokens(max_num_tokens),
        block_size,
        num_blocks: num_blocks(
            settings,
            bytes_per_block,
            groups.windows().num_groups() as u32,
            block_size,
            max_num_requests,
            max_seq_len,
            kv_bytes,
            keeps_prefixes,
        ),
        num_host_blocks: host_cache.num_blocks,
        policy: settings.batch_scheduler_policy,
        enable_chunked_context: settings.enable_chunked_context.unwrap_or(true),
        chunk_policy: settings.context_chunking_policy,
        chunk_unit: settings.tokens_per_block,
        num_micro_batches: if settings.enable_trt_overlap && !plan_ahead {
            2
        } else {
            1
        },
        plan_ahead,
        reuse,
        num_state_snapshots: num_snapshots,
        num_host_state_snapshots: host_cache.num_snapshots,
        state_snapshot_interval: Tokens(settings.state_snapshot_interval),
        groups: groups.windows(),
        paged_kv,
        speculation,
        step_cost: None,
        draft_cost: None,
        num_adapter_pages: None,
        images: model.patches_per_image_token().map(|num_patches| {
            // A patch takes about as long as a token.
            let default = (max_num_tokens / num_patches.max(1)).max(1);
            let max_num_image_tokens = settings.max_num_image_tokens.unwrap_or(default);
            ImageLimits {
                has_whole_images: model.has_whole_images(),
                ..image_limits(max_num_image_tokens, settings.max_cached_image_tokens)
            }
        }),
        pools: settings.task.is_pooling(),
        whole_prompts: sees_whole_prompts,
        record_requests: settings.stats_file.is_some(),
    };
    // By default, snapshots take no memory that the longest sequence needs.
    if engine.num_state_snapshots > 0
        && settings.max_state_snapshots.is_none()
        && engine.num_blocks < engine.min_num_blocks()
    {
        let mut config = config.clone();
        config.settings.max_state_snapshots = Some(0);
        return engine_config(&config, model, available);
    }
    engine.check()?;
    Ok(engine)
}

/// [`engine_config`], with the memory limit in the error if memory is all that is missing.
///
/// # Errors
/// Those of [`engine_config`].
pub(super) fn engine_config_within(
    config: &ModelConfig,
    model: &impl ModelDimensions,
    available_bytes: Option<u64>,
    limit: Option<&dyn Display>,
) -> Result<EngineConfig, LoadError> {
    let sized = engine_config(config, model, available_bytes);
    sized.map_err(|error| match (error, limit) {
        (LoadError::Config { problem, remedy }, Some(limit))
            if engine_config(config, model, None).is_ok() =>
        {
            LoadError::Config {
                problem: format!("{problem}: {limit}"),
                remedy,
            }
        }
        (error, _) => error,
    })
}

/// The tokens of images whose rows are kept by default.
const CACHED_IMAGE_TOKENS: u32 = 8192;

/// Limits of images, of which `max_num_tokens` are encoded in a step, and whose tokens do not see each other.
pub(crate) fn image_limits(max_num_tokens: u32, max_cached_tokens: Option<u32>) -> ImageLimits {
    let max_cached_tokens = max_cached_tokens.unwrap_or(max_num_tokens.max(CACHED_IMAGE_TOKENS));
    ImageLimits {
        max_num_tokens: Tokens(max_num_tokens),
        max_cached_tokens: Tokens(max_cached_tokens),
        has_whole_images: false,
    }
}

/// The most sequences that can be in the engine: a request may ask for up to `max_batch_size`.
fn max_num_active(config: &ModelConfig, max_num_requests: u32) -> u32 {
    let max_requests = match config.scheduling {
        // Triton can give a slot to the next request before a step notices that the previous one was cancelled.
        Scheduling::Iterative { .. } => config.max_batch_size.saturating_mul(2),
        // Triton brings a batch as long as there is room for one request.
        Scheduling::Queued | Scheduling::Conversations { .. } => {
            config.max_batch_size.saturating_add(max_num_requests)
        }
    };
    max_requests
        .saturating_mul(config.max_batch_size)
        .max(max_num_requests)
}

/// Refuses settings that prompts whose tokens see all others do not have.
fn check_whole_prompts(settings: &Settings) -> Result<(), LoadError> {
    let given = [
        (
            "enable_chunked_context is true",
            settings.enable_chunked_context == Some(true),
        ),
        (
            "enable_kv_cache_reuse is true",
            settings.enable_kv_cache_reuse == Some(true),
        ),
        (
            "max_attention_window_size is given",
            !settings.max_attention_window_size.is_empty(),
        ),
        (
            "sink_token_length is not 0",
            settings.sink_token_length != 0,
        ),
    ];
    refuse_given(
        &given,
        "each token of the model sees all others of its prompt",
    )
}

/// Refuses settings that models with recurrent states do not have.
fn check_states(settings: &Settings) -> Result<(), LoadError> {
    refuse_given(
        &[("kv_cache_file is given", settings.kv_cache_file.is_some())],
        "the model has layers with recurrent states, which the file does not keep",
    )
}

/// Refuses steps of a model with recurrent states that are planned ahead: where the device leaves a token to the host,
/// the step behind it has changed the states with another one.
fn check_states_ahead(plan_ahead: bool) -> Result<(), LoadError> {
    refuse_given(
        &[("enable_trt_overlap is true", plan_ahead)],
        "a GPU computes no step of a model with recurrent states before the tokens of the last one are known",
    )
}

/// Refuses the first of these settings that is given, for a reason.
fn refuse_given(given: &[(&str, bool)], reason: &str) -> Result<(), LoadError> {
    match given.iter().find(|(_, is_given)| *is_given) {
        None => Ok(()),
        Some((problem, _)) => Err(LoadError::Config {
            problem: format!("{problem}, and {reason}"),
            remedy: "leave it out".to_owned(),
        }),
    }
}

/// The memory that the recurrent states of all sequences leave.
fn without_states(
    available_bytes: u64,
    state_bytes: u64,
    num_rows: u32,
    num_states: u64,
) -> Result<u64, LoadError> {
    let all = state_bytes.saturating_mul(num_states);
    let of_drafts = match num_states > num_rows.into() {
        true => ", and 1 + max_draft_tokens more for each,",
        false => "",
    };
    available_bytes
        .checked_sub(all)
        .ok_or_else(|| LoadError::Config {
            problem: format!(
                "the recurrent states of {num_rows} sequences or beams{of_drafts} take {state_bytes} bytes each, and \
                 {available_bytes} bytes are available"
            ),
            remedy: match of_drafts {
                "" => "lower max_num_requests, max_batch_size or max_beam_width".to_owned(),
                _ => "lower max_num_requests, max_batch_size, max_beam_width or max_draft_tokens"
                    .to_owned(),
            },
        })
}

/// The recurrent states of so many sequences or beams, with states behind the tokens of a step with drafts.
pub(super) fn num_states(num_rows: u32, speculation: Option<&Speculation>) -> u64 {
    let of_drafts = speculation.map_or(0, |it| 1 + u64::from(it.max_draft_tokens));
    u64::from(num_rows) * (1 + of_drafts)
}

/// Snapshots of recurrent states of so many bytes each, in the memory of the KV cache.
fn num_snapshots(
    settings: &Settings,
    state_bytes: u64,
    max_num_requests: u32,
    kv_bytes: Option<u64>,
) -> Result<u32, LoadError> {
    let fitting = |bytes: u64| u32::try_from(bytes / state_bytes.max(1)).unwrap_or(u32::MAX);
    match (settings.max_state_snapshots, kv_bytes) {
        (Some(max), Some(bytes)) if max > fitting(bytes) => Err(LoadError::Config {
            problem: format!(
                "max_state_snapshots is {max}, each takes {state_bytes} bytes, and the KV cache may use {bytes} bytes"
            ),
            remedy: format!("write at most {}, or leave it out", fitting(bytes / 4)),
        }),
        (Some(max), _) => Ok(max),
        (None, kv_bytes) => {
            let fitting = kv_bytes.map_or(u32::MAX, |bytes| fitting(bytes / 4));
            let usual = max_num_requests.saturating_mul(2);
            Ok(usual.min(fitting).min(MAX_STATE_SNAPSHOTS))
        }
    }
}

/// Whether a context may be computed over several steps.
fn chunks_contexts(settings: &Settings) -> Result<bool, LoadError> {
    match (settings.gpt_model_type, settings.enable_chunked_context) {
        (BatchingScheme::V1, Some(true)) => Err(LoadError::Config {
            problem:
                "gpt_model_type is V1, which has no chunks, and enable_chunked_context is true"
                    .to_owned(),
            remedy:
                "leave enable_chunked_context out, or set gpt_model_type to inflight_fused_batching"
                    .to_owned(),
        }),
        // Its padded prompts take as many steps as they need.
        (BatchingScheme::V1, _) => Ok(true),
        (_, chunked) => Ok(chunked.unwrap_or(true)),
    }
}

/// Whether and how tokens are drafted.
pub(crate) fn speculation(settings: &Settings) -> Option<Speculation> {
    let lookup = PromptLookup {
        min: settings.prompt_lookup_min,
        max: settings.prompt_lookup_max,
    };
    let with = |prompt_lookup| Speculation {
        max_draft_tokens: settings.max_draft_tokens,
        prompt_lookup,
        has_draft_model: settings.speculation.is_by_model(),
        recomputes_drafts: settings.speculation.is_by_head(),
    };
    match settings.speculation {
        SpeculationKind::None => None,
        SpeculationKind::DraftInputIds
        | SpeculationKind::DraftModel
        | SpeculationKind::Eagle3
        | SpeculationKind::Mtp => Some(with(None)),
        SpeculationKind::PromptLookup => Some(with(Some(lookup))),
    }
}

/// Which KV blocks sequences share.
fn reuse(settings: &Settings) -> Result<BlockReuse, LoadError> {
    let paged = settings.paged_kv_cache;
    if settings.enable_kv_cache_reuse == Some(true) && !paged {
        return Err(LoadError::Config {
            problem: "enable_kv_cache_reuse is true and kv_cache_type is contiguous, whose \
                      blocks cannot be shared"
                .to_owned(),
            remedy: "set kv_cache_type to paged, or enable_kv_cache_reuse to false".to_owned(),
        });
    }
    Ok(match settings.enable_kv_cache_reuse.unwrap_or(paged) {
        false => BlockReuse::Off,
        true if settings.enable_partial_reuse => BlockReuse::PartialBlocks,
        true => BlockReuse::WholeBlocks,
    })
}

fn max_seq_len(settings: &Settings, max_positions: u32) -> Result<Tokens, LoadError> {
    match settings.max_seq_len {
        Some(max) if max > max_positions => Err(LoadError::Config {
            problem: format!("max_seq_len is {max}, and the model has {max_positions} positions"),
            remedy: format!("write at most {max_positions}, or leave it out"),
        }),
        Some(max) => Ok(Tokens(max)),
        None => Ok(Tokens(max_positions)),
    }
}

#[expect(clippy::too_many_arguments, reason = "each bounds the pool")]
fn num_blocks(
    settings: &Settings,
    bytes_per_block: u64,
    num_groups: u32,
    block_size: BlockSize,
    max_num_requests: u32,
    max_seq_len: Tokens,
    kv_bytes: Option<u64>,
    keeps_prefixes: bool,
) -> Blocks {
    let max_texts = u64::from(max_num_requests) * u64::from(settings.max_beam_width);
    // A place in a table has a block for each group.
    let num_groups = u64::from(num_groups);
    let usable = max_texts * num_groups * u64::from(max_seq_len.blocks_ceil(block_size).0);
    let usable = match keeps_prefixes && bytes_per_block > 0 {
        true => usable.max(MAX_PREFIX_BLOCKS),
        false => usable,
    };
    let by_tokens = settings
        .max_tokens_in_paged_kv_cache
        .map_or(u64::MAX, |tokens| {
            num_groups * u64::from(tokens / block_size.tokens().0)
        });
    let by_memory = match kv_bytes {
        Some(bytes) if bytes_per_block > 0 => bytes / bytes_per_block,
        // Blocks of a model without keys and values take no memory.
        _ => u64::MAX,
    };
    let blocks = usable.min(by_tokens).min(by_memory);
    Blocks(u32::try_from(blocks).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;
    use std::slice;

    use super::*;
    use inflight_config::InputKind;

    /// A model of 1000 positions, whose blocks have 100 bytes for each, with these windows of its layers.
    struct Small(&'static [Option<NonZeroU32>]);

    impl ModelDimensions for Small {
        fn max_positions(&self) -> u32 {
            1000
        }

        fn layer_groups(&self, max_seq_len: Tokens, _: bool) -> GroupedLayers {
            GroupedLayers::new(
                self.0.iter().map(|&window| (window, 1)),
                slice::from_ref(&(0..self.0.len())),
                Tokens(0),
                max_seq_len,
            )
        }

        fn kv_bytes_per_block(&self, block_size: BlockSize, _: &GroupedLayers) -> u64 {
            100 * u64::from(block_size.tokens().0)
        }

        fn default_max_num_tokens(&self) -> u32 {
            512
        }

        fn default_kv_fraction(&self) -> f64 {
            0.5
        }
    }

    fn config(parameters: &[(&str, &str)]) -> ModelConfig {
        ModelConfig {
            max_batch_size: 8,
            has_batch_dim: true,
            decoupled: true,
            input: InputKind::Text,
            outputs: Vec::new(),
            scheduling: Scheduling::Iterative {
                max_sequence_idle_us: 0,
                is_oldest: false,
            },
            takes_adapters: false,
            controls: Vec::new(),
            num_warm_ups: 0,
            settings: Settings::parse(parameters.iter().copied()).expect("good parameters"),
        }
    }

    fn sized(parameters: &[(&str, &str)], available: Option<u64>) -> EngineConfig {
        engine_config(&config(parameters), &Small(&[None; 3]), available).expect("good settings")
    }

    #[test]
    fn by_default_a_full_batch_fits_at_the_models_full_length() {
        let engine = sized(&[], None);
        assert_eq!(
            (engine.max_num_requests, engine.max_seq_len),
            (8, Tokens(1000))
        );
        assert_eq!(engine.max_num_tokens, Tokens(512));
        assert_eq!(
            engine.num_blocks,
            Blocks(8 * 32),
            "no more than eight sequences can use"
        );
    }

    /// [`Small`], on another machine or with states.
    struct Changed {
        max_num_tokens: u32,
        kv_fraction: f64,
        fills_free_memory: bool,
        state_bytes: Option<u64>,
        can_run_ahead: bool,
        patches_per_image_token: Option<u32>,
    }

    const ON_GPU: Changed = Changed {
        max_num_tokens: 8192,
        kv_fraction: 0.9,
        fills_free_memory: true,
        state_bytes: None,
        can_run_ahead: true,
        patches_per_image_token: None,
    };

    const WITH_STATES: Changed = Changed {
        max_num_tokens: 512,
        kv_fraction: 0.5,
        fills_free_memory: false,
        state_bytes: Some(1000),
        can_run_ahead: false,
        patches_per_image_token: None,
    };

    impl ModelDimensions for Changed {
        fn max_positions(&self) -> u32 {
            1000
        }

        fn layer_groups(&self, max_seq_len: Tokens, is_paged: bool) -> GroupedLayers {
            Small(&[None; 3]).layer_groups(max_seq_len, is_paged)
        }

        fn kv_bytes_per_block(&self, block_size: BlockSize, groups: &GroupedLayers) -> u64 {
            Small(&[None; 3]).kv_bytes_per_block(block_size, groups)
        }

        fn default_max_num_tokens(&self) -> u32 {
            self.max_num_tokens
        }

        fn default_kv_fraction(&self) -> f64 {
            self.kv_fraction
        }

        fn fills_free_memory(&self) -> bool {
            self.fills_free_memory
        }

        fn state_bytes(&self) -> Option<u64> {
            self.state_bytes
        }

        fn can_run_ahead(&self) -> bool {
            self.can_run_ahead
        }

        fn patches_per_image_token(&self) -> Option<u32> {
            self.patches_per_image_token
        }
    }

    #[test]
    fn a_step_encodes_as_many_patches_as_it_has_tokens() {
        for (num_patches, parameters, expected) in [
            (16, &[][..], (32, 8192)),
            (1, &[], (512, 8192)),
            (16, &[("max_num_tokens", "64")], (4, 8192)),
            (1000, &[], (1, 8192)),
            (16, &[("max_num_image_tokens", "9000")], (9000, 9000)),
            (16, &[("max_cached_image_tokens", "100")], (32, 100)),
        ] {
            let model = Changed {
                max_num_tokens: 512,
                patches_per_image_token: Some(num_patches),
                ..ON_GPU
            };
            let sized = engine_config(&config(parameters), &model, Some(1 << 30));
            let images = sized.expect("good settings").images.expect("images");
            let (max_num_tokens, max_cached_tokens) = expected;
            let expected = image_limits(max_num_tokens, Some(max_cached_tokens));
            assert_eq!(images, expected, "{parameters:?}");
        }
    }

    #[test]
    fn steps_with_states_are_not_planned_ahead() {
        let on_gpu = Changed {
            state_bytes: WITH_STATES.state_bytes,
            ..ON_GPU
        };
        let sized =
            |parameters: &[_], model| engine_config(&config(parameters), model, Some(1 << 30));
        let overlap = ("enable_trt_overlap", "true");
        let error = sized(&[overlap], &on_gpu).expect_err("refused").to_string();
        for words in ["enable_trt_overlap is true", "recurrent states"] {
            assert!(error.contains(words), "{error}");
        }
        let engine = sized(&[], &on_gpu).expect("good settings");
        assert_eq!(engine.reuse, BlockReuse::WholeBlocks);
        // Two micro-batches know their tokens.
        let engine = sized(&[overlap], &WITH_STATES).expect("good settings");
        assert_eq!((engine.plan_ahead, engine.num_micro_batches), (false, 2));
    }

    #[test]
    fn states_and_their_snapshots_take_memory_before_blocks_do() {
        let sized = |parameters: &[(&str, &str)], available| {
            engine_config(&config(parameters), &WITH_STATES, Some(available))
        };
        let kv_bytes = 40 * 3200;
        let available = 8000 + 2 * kv_bytes;
        let engine = sized(&[], available).expect("good settings");
        assert_eq!(engine.num_state_snapshots, 16);
        assert_eq!(engine.num_blocks, Blocks(35), "in 128000 - 16000 bytes");
        assert_eq!(engine.reuse, BlockReuse::WholeBlocks);
        // With 16 snapshots there were 27 blocks, and the longest sequence needs 32.
        let engine = sized(&[], 8000 + 2 * 32 * 3200).expect("good settings");
        let figures = (engine.num_state_snapshots, engine.num_blocks, engine.reuse);
        assert_eq!(figures, (0, Blocks(32), BlockReuse::Off));
        for without in [
            ("max_state_snapshots", "0"),
            ("enable_kv_cache_reuse", "false"),
        ] {
            let engine = sized(&[without], available).expect("good settings");
            let figures = (engine.num_state_snapshots, engine.num_blocks, engine.reuse);
            assert_eq!(figures, (0, Blocks(40), BlockReuse::Off));
        }
        let given = [
            ("max_state_snapshots", "5"),
            ("state_snapshot_interval", "64"),
        ];
        let engine = sized(&given, available).expect("good settings");
        let figures = (engine.num_state_snapshots, engine.state_snapshot_interval);
        assert_eq!(figures, (5, Tokens(64)));
        let error = sized(&[("max_state_snapshots", "129")], available);
        let error = error.expect_err("refused").to_string();
        for words in ["is 129", "1000 bytes", "128000 bytes", "at most 32"] {
            assert!(error.contains(words), "{error}");
        }
        let drafts = [("speculation", "prompt_lookup"), ("max_draft_tokens", "3")];
        let error = sized(&drafts, 8 * 5 * 1000 - 1)
            .expect_err("refused")
            .to_string();
        for words in [
            "8 sequences or beams, and 1 + max_draft_tokens more",
            "39999 bytes",
        ] {
            assert!(error.contains(words), "{error}");
        }
        let error = sized(&[], 7999).expect_err("refused").to_string();
        let words = "the recurrent states of 8 sequences or beams take 1000 bytes each, and 7999 bytes are available";
        assert!(
            error.contains(words) && error.contains("max_num_requests"),
            "{error}"
        );
        let error = sized(&[("max_beam_width", "3")], 23_999);
        let error = error.expect_err("refused").to_string();
        assert!(error.contains("24 sequences or beams"), "{error}");
        let error = sized(&[("kv_cache_file", "stories.kv")], 1 << 30);
        let error = error.expect_err("refused").to_string();
        let words = "kv_cache_file is given, and the model has layers with recurrent states";
        assert!(error.contains(words), "{error}");
    }

    /// The Batch Manager's document: "If maxTokens is specified, allocated KV cache is the minimum of maxTokens and the
    /// value inferred from freeGpuMemoryFraction."
    #[test]
    fn with_prefixes_to_keep_the_pool_is_the_minimum_of_tokens_and_fraction() {
        let on_gpu = |parameters: &[(&str, &str)], available| {
            let engine = engine_config(&config(parameters), &ON_GPU, Some(available));
            engine.expect("good settings").num_blocks
        };
        // Eight sequences of 1000 tokens can use 256 blocks of 3200 bytes; 0.9 of these bytes are 900.
        let bytes = 1000 * 3200;
        assert_eq!(on_gpu(&[], bytes), Blocks(900));
        assert_eq!(
            on_gpu(&[("kv_cache_free_gpu_mem_fraction", "0.5")], bytes),
            Blocks(500)
        );
        let tokens = ("max_tokens_in_paged_kv_cache", "16000");
        assert_eq!(on_gpu(&[tokens], bytes), Blocks(500));
        assert_eq!(on_gpu(&[tokens], bytes / 10), Blocks(90));
        // On a CPU, whose free memory is not the cache's alone, if it is asked for.
        assert_eq!(sized(&[tokens], Some(2 * bytes)).num_blocks, Blocks(500));
        assert_eq!(sized(&[tokens], Some(bytes / 10)).num_blocks, Blocks(50));
        // Nothing would use the rest.
        let without = ("enable_kv_cache_reuse", "false");
        assert_eq!(on_gpu(&[without], bytes), Blocks(256));
        assert_eq!(on_gpu(&[without, tokens], bytes), Blocks(256));
        // The index has a size of its own.
        let huge = u64::MAX / 2;
        assert_eq!(on_gpu(&[], huge), Blocks(MAX_PREFIX_BLOCKS as u32));
    }

    #[test]
    fn the_smallest_limit_sets_the_pool() {
        // 64 blocks of 32 positions of 100 bytes, as half of what is free.
        assert_eq!(sized(&[], Some(2 * 64 * 32 * 100)).num_blocks, Blocks(64));
        let tokens = [("max_tokens_in_paged_kv_cache", "1100")];
        assert_eq!(
            sized(&tokens, Some(2 * 64 * 32 * 100)).num_blocks,
            Blocks(34)
        );
    }

    #[test]
    fn a_group_of_layers_has_a_block_at_every_place() {
        const WINDOW: Option<NonZeroU32> = NonZeroU32::new(100);
        let model = Small(&[WINDOW, WINDOW, None, WINDOW, WINDOW, None]);
        let sized = |parameters, available| {
            engine_config(&config(parameters), &model, available).expect("good settings")
        };
        let engine = sized(&[], None);
        assert_eq!(engine.groups.num_groups(), 3);
        assert_eq!(engine.num_blocks, Blocks(3 * 8 * 32));
        // A sequence's token has memory in all layers.
        let tokens = [("max_tokens_in_paged_kv_cache", "1100")];
        assert_eq!(sized(&tokens, None).num_blocks, Blocks(3 * 34));
        let available = Some(2 * 160 * 32 * 100);
        assert_eq!(sized(&[], available).num_blocks, Blocks(160));
    }

    #[test]
    fn host_memory_is_cut_into_blocks_of_its_own() {
        let engine = sized(&[("kv_cache_host_memory_bytes", "10000")], None);
        assert_eq!(engine.num_host_blocks, Blocks(3), "of 3200 bytes");
        assert_eq!(engine.num_blocks, Blocks(8 * 32));
        assert_eq!(sized(&[], None).num_host_blocks, Blocks(0));
        let host_memory = config(&[("kv_cache_host_memory_bytes", "10000")]);
        let engine = engine_config(&host_memory, &WITH_STATES, None).expect("good settings");
        let figures = (engine.num_host_blocks, engine.num_host_state_snapshots);
        assert_eq!(figures, (Blocks(2), 2), "snapshots of 1000 bytes");
    }

    #[test]
    fn a_contiguous_cache_is_a_block_for_each_request_and_shares_nothing() {
        let engine = sized(&[("kv_cache_type", "contiguous")], None);
        assert_eq!(engine.block_size.tokens(), Tokens(1000));
        assert_eq!((engine.num_blocks, engine.paged_kv), (Blocks(8), false));
        assert_eq!(engine.chunk_unit.tokens(), Tokens(32));
        assert_eq!(engine.reuse, BlockReuse::Off);
    }

    #[test]
    fn a_full_batch_leaves_room_for_a_chunk() {
        let engine = sized(&[("max_num_requests", "600")], None);
        assert_eq!(engine.max_num_tokens, Tokens(632));
    }

    #[test]
    fn a_full_batch_with_drafts_leaves_room_for_a_chunk() {
        let [kind, drafts] = [("speculation", "prompt_lookup"), ("max_draft_tokens", "9")];
        let engine = sized(&[kind, drafts, ("max_num_requests", "60")], None);
        let lookup = PromptLookup { min: 2, max: 4 };
        let expected = Speculation {
            max_draft_tokens: 9,
            prompt_lookup: Some(lookup),
            has_draft_model: false,
            recomputes_drafts: false,
        };
        assert_eq!(engine.speculation, Some(expected));
        assert_eq!(engine.max_num_tokens, Tokens(632));
        assert_eq!(engine.max_sampled_rows(), Tokens(600));
    }

    #[test]
    fn a_whole_context_is_one_step_without_chunking() {
        let whole = sized(&[("enable_chunked_context", "false")], None);
        assert_eq!(whole.max_num_tokens, Tokens(1000));
    }

    #[test]
    fn v1_needs_no_setting_to_turn_chunking_off() {
        for parameters in [
            &[("gpt_model_type", "V1")][..],
            &[
                ("gpt_model_type", "V1"),
                ("enable_chunked_context", "false"),
            ],
        ] {
            assert_eq!(sized(parameters, None).max_num_tokens, Tokens(512));
        }
    }

    #[test]
    fn contradictions_are_refused_with_the_values() {
        for (parameters, available, words) in [
            (
                &[("max_seq_len", "1001")][..],
                None,
                ["1001", "1000 positions"],
            ),
            (
                &[("max_num_tokens", "7")],
                None,
                ["max_num_tokens is 7", "max_num_requests"],
            ),
            (&[], Some(1 << 16), ["max_seq_len", "10 blocks"]),
            (
                &[
                    ("kv_cache_type", "contiguous"),
                    ("enable_kv_cache_reuse", "true"),
                ],
                None,
                ["enable_kv_cache_reuse", "contiguous"],
            ),
            (
                &[
                    ("gpt_model_type", "V1"),
                    ("batch_scheduler_policy", "max_utilization"),
                ],
                None,
                ["V1", "guaranteed_no_evict"],
            ),
            (
                &[("gpt_model_type", "V1"), ("speculation", "draft_input_ids")],
                None,
                ["V1", "speculation to none"],
            ),
            (
                &[("speculation", "prompt_lookup"), ("prompt_lookup_min", "5")],
                None,
                ["prompt_lookup_min is 5", "prompt_lookup_max is 4"],
            ),
            (
                &[("gpt_model_type", "V1"), ("enable_chunked_context", "true")],
                None,
                ["V1", "leave enable_chunked_context out"],
            ),
            (
                &[("kv_cache_host_memory_bytes", "3199")],
                None,
                ["is 3199", "3200 bytes of one block"],
            ),
            (
                &[
                    ("kv_cache_host_memory_bytes", "3200"),
                    ("enable_kv_cache_reuse", "false"),
                ],
                None,
                ["host memory", "enable_kv_cache_reuse to true"],
            ),
            (
                &[("gpt_model_type", "V1"), ("enable_trt_overlap", "true")],
                None,
                ["V1", "enable_trt_overlap"],
            ),
        ] {
            let error = engine_config(&config(parameters), &Small(&[None; 3]), available)
                .expect_err("refused");
            for word in words {
                assert!(
                    error.to_string().contains(word),
                    "'{error}' does not say '{word}'"
                );
            }
        }
    }
}
