//! The values of the backend's parameters.

use std::num::{NonZeroU32, NonZeroUsize};
use std::path::{Path, PathBuf};

use crate::choices::{
    BatchingScheme, CapacityPolicy, ContextChunkPolicy, KvCacheDtype, PoolingMode, RankCpus,
    RankTransportKind, ReasoningFormat, ReplyParser, RunnerKind, SpeculationKind, Task,
    ToolCallFormat, WeightOnlyPrecision,
};
use crate::client_compatibility::ClientCompatibility;
use inflight_base::BlockSize;

/// Default of `tokens_per_block`.
const DEFAULT_BLOCK_SIZE: BlockSize = BlockSize::new(32).unwrap();

/// The `parameters` of a config.pbtxt. None: not set; derived from the model or the machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// `runner`
    pub runner: RunnerKind,
    /// `task`
    pub task: Task,
    /// `pooling`; None: as the checkpoint says
    pub pooling: Option<PoolingMode>,
    /// `normalize`; None: as the checkpoint says
    pub normalize: Option<bool>,
    /// `classifier_from_token`
    pub classifier_from_token: Option<[String; 2]>,
    /// `is_original_qwen3_reranker`
    pub is_original_qwen3_reranker: bool,
    /// `gpt_model_path`
    pub gpt_model_path: Option<PathBuf>,
    /// `tokenizer_dir`
    pub tokenizer_dir: Option<PathBuf>,
    /// `gpt_model_type`
    pub gpt_model_type: BatchingScheme,
    /// `batch_scheduler_policy`
    pub batch_scheduler_policy: CapacityPolicy,
    /// `context_chunking_policy`
    pub context_chunking_policy: ContextChunkPolicy,
    /// `enable_trt_overlap`
    pub enable_trt_overlap: bool,
    /// `speculation`
    pub speculation: SpeculationKind,
    /// `draft_model_path`
    pub draft_model_path: Option<PathBuf>,
    /// `max_draft_tokens`
    pub max_draft_tokens: u32,
    /// `enable_adaptive_drafts`
    pub enable_adaptive_drafts: bool,
    /// `prompt_lookup_min`
    pub prompt_lookup_min: u32,
    /// `prompt_lookup_max`
    pub prompt_lookup_max: u32,
    /// `kv_cache_type`: whether it is paged
    pub paged_kv_cache: bool,
    /// `kv_cache_dtype`
    pub kv_cache_dtype: KvCacheDtype,
    /// `weight_only_precision`; None: as in the checkpoint
    pub weight_only_precision: Option<WeightOnlyPrecision>,
    /// `weight_only_group_size`; None: the default of the precision
    pub weight_only_group_size: Option<u32>,
    /// `weight_cache_dir`
    pub weight_cache_dir: Option<PathBuf>,
    /// `weight_cache_mode`
    pub weight_cache_mode: u32,
    /// `enable_kv_cache_reuse`; None: if possible
    pub enable_kv_cache_reuse: Option<bool>,
    /// `enable_partial_reuse`
    pub enable_partial_reuse: bool,
    /// `max_attention_window_size`: one per layer, repeated; empty: the model's own windows
    pub max_attention_window_size: Vec<NonZeroU32>,
    /// `sink_token_length`
    pub sink_token_length: u32,
    /// `enable_sink_token_shift`
    pub enable_sink_token_shift: bool,
    /// `max_num_requests`
    pub max_num_requests: Option<u32>,
    /// `allow_iterative_oldest`
    pub allow_iterative_oldest: bool,
    /// `max_rank_restarts`
    pub max_rank_restarts: u32,
    /// `drain_timeout_seconds`; None: no limit
    pub drain_timeout_seconds: Option<u32>,
    /// `max_beam_width`
    pub max_beam_width: u32,
    /// `max_num_tokens`
    pub max_num_tokens: Option<u32>,
    /// `max_seq_len`
    pub max_seq_len: Option<u32>,
    /// `tokens_per_block`
    pub tokens_per_block: BlockSize,
    /// `max_tokens_in_paged_kv_cache`
    pub max_tokens_in_paged_kv_cache: Option<u32>,
    /// `kv_cache_free_gpu_mem_fraction`
    pub kv_cache_free_mem_fraction: Option<f64>,
    /// `kv_cache_host_memory_bytes`
    pub kv_cache_host_memory_bytes: u64,
    /// `max_state_snapshots`
    pub max_state_snapshots: Option<u32>,
    /// `state_snapshot_interval`
    pub state_snapshot_interval: u32,
    /// `kv_cache_file`
    pub kv_cache_file: Option<PathBuf>,
    /// `lora_dir`
    pub lora_dir: Option<PathBuf>,
    /// `lora_prefetch_dir`
    pub lora_prefetch_dir: Option<PathBuf>,
    /// `lora_cache_max_adapter_size`
    pub lora_cache_max_adapter_size: u32,
    /// `lora_cache_optimal_adapter_size`
    pub lora_cache_optimal_adapter_size: u32,
    /// `lora_cache_host_memory_bytes`
    pub lora_cache_host_memory_bytes: u64,
    /// `lora_cache_num_host_module_layer`
    pub lora_cache_num_host_module_layer: u64,
    /// `lora_cache_num_device_module_layer`
    pub lora_cache_num_device_module_layer: u64,
    /// `lora_cache_gpu_memory_fraction`
    pub lora_cache_gpu_memory_fraction: f64,
    /// `lora_cache_num_put_workers`
    pub lora_cache_num_put_workers: u32,
    /// `lora_cache_num_ensure_workers`
    pub lora_cache_num_ensure_workers: u32,
    /// `enable_chunked_context`; None: if possible
    pub enable_chunked_context: Option<bool>,
    /// `max_num_image_tokens`; None: as many as take `max_num_tokens` patches, if the model takes images
    pub max_num_image_tokens: Option<u32>,
    /// `max_cached_image_tokens`
    pub max_cached_image_tokens: Option<u32>,
    /// `max_image_tokens`
    pub max_image_tokens: u32,
    /// `max_images`
    pub max_images: u32,
    /// `max_image_bytes`
    pub max_image_bytes: u64,
    /// `max_image_pixels`
    pub max_image_pixels: u64,
    /// `image_memory_bytes`
    pub image_memory_bytes: u64,
    /// `logits_memory_bytes`
    pub logits_memory_bytes: u64,
    /// `logits_post_processor_library`
    pub logits_post_processor_library: Option<PathBuf>,
    /// `exclude_input_in_output`
    pub exclude_input_in_output: bool,
    /// `stream_interval`
    pub stream_interval: u32,
    /// `client_compatibility`
    pub client_compatibility: ClientCompatibility,
    /// `add_special_tokens`
    pub add_special_tokens: bool,
    /// `skip_special_tokens`
    pub skip_special_tokens: bool,
    /// `reasoning_parser`
    pub reasoning_parser: ReplyParser<ReasoningFormat>,
    /// `tool_call_parser`
    pub tool_call_parser: ReplyParser<ToolCallFormat>,
    /// `default_max_tokens`
    pub default_max_tokens: u32,
    /// `use_generation_config`
    pub use_generation_config: bool,
    /// `gpu_device_ids`
    pub gpu_device_ids: Vec<u32>,
    /// `deterministic`
    pub deterministic: bool,
    /// `fp8_activations`
    pub fp8_activations: bool,
    /// `cuda_graph_mode`
    pub cuda_graph_mode: bool,
    /// `cuda_graph_cache_size`
    pub cuda_graph_cache_size: u32,
    /// `tensor_parallel_size`
    pub tensor_parallel_size: u32,
    /// `pipeline_parallel_size`
    pub pipeline_parallel_size: u32,
    /// `rank_transport`
    pub rank_transport: RankTransportKind,
    /// `rank_cpus`
    pub rank_cpus: RankCpus,
    /// `rank_timeout_seconds`
    pub rank_timeout_seconds: u32,
    /// `rank_load_timeout_seconds`
    pub rank_load_timeout_seconds: u32,
    /// `num_threads`
    pub num_threads: Option<NonZeroUsize>,
    /// `cpu_instruction_set`; `None` is `auto`
    pub cpu_instruction_set: Option<String>,
    /// `stats_file`
    pub stats_file: Option<PathBuf>,
    /// `synthetic_vocab_size`
    pub synthetic_vocab_size: u32,
    /// `synthetic_step_us`
    pub synthetic_step_us: f64,
    /// `synthetic_token_us`
    pub synthetic_token_us: f64,
    /// `synthetic_fail_after`
    pub synthetic_fail_after: Option<u32>,
    /// `synthetic_gate`
    pub synthetic_gate: Option<PathBuf>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            runner: RunnerKind::HuggingFace,
            task: Task::Generate,
            pooling: None,
            normalize: None,
            classifier_from_token: None,
            is_original_qwen3_reranker: false,
            gpt_model_path: None,
            tokenizer_dir: None,
            gpt_model_type: BatchingScheme::InflightFused,
            batch_scheduler_policy: CapacityPolicy::GuaranteedNoEvict,
            context_chunking_policy: ContextChunkPolicy::FirstComeFirstServed,
            enable_trt_overlap: false,
            speculation: SpeculationKind::None,
            draft_model_path: None,
            max_draft_tokens: 4,
            enable_adaptive_drafts: true,
            prompt_lookup_min: 2,
            prompt_lookup_max: 4,
            paged_kv_cache: true,
            kv_cache_dtype: KvCacheDtype::Bf16,
            weight_only_precision: None,
            weight_only_group_size: None,
            weight_cache_dir: None,
            weight_cache_mode: 0o600,
            enable_kv_cache_reuse: None,
            enable_partial_reuse: true,
            max_attention_window_size: Vec::new(),
            sink_token_length: 0,
            enable_sink_token_shift: false,
            max_num_requests: None,
            allow_iterative_oldest: false,
            max_rank_restarts: 5,
            drain_timeout_seconds: None,
            max_beam_width: 1,
            max_num_tokens: None,
            max_seq_len: None,
            tokens_per_block: DEFAULT_BLOCK_SIZE,
            max_tokens_in_paged_kv_cache: None,
            kv_cache_free_mem_fraction: None,
            kv_cache_host_memory_bytes: 0,
            max_state_snapshots: None,
            state_snapshot_interval: 0,
            kv_cache_file: None,
            lora_dir: None,
            lora_prefetch_dir: None,
            lora_cache_max_adapter_size: 64,
            lora_cache_optimal_adapter_size: 8,
            lora_cache_host_memory_bytes: 1 << 30,
            lora_cache_num_host_module_layer: 0,
            lora_cache_num_device_module_layer: 0,
            lora_cache_gpu_memory_fraction: 0.05,
            lora_cache_num_put_workers: 4,
            lora_cache_num_ensure_workers: 4,
            enable_chunked_context: None,
            max_num_image_tokens: None,
            max_cached_image_tokens: None,
            max_image_tokens: Settings::MAX_IMAGE_TOKENS,
            max_images: 16,
            max_image_bytes: 20 << 20,
            max_image_pixels: 32 << 20,
            image_memory_bytes: 1 << 30,
            logits_memory_bytes: 1 << 30,
            logits_post_processor_library: None,
            exclude_input_in_output: false,
            stream_interval: 1,
            client_compatibility: ClientCompatibility::None,
            add_special_tokens: true,
            skip_special_tokens: true,
            reasoning_parser: ReplyParser::Auto,
            tool_call_parser: ReplyParser::Auto,
            default_max_tokens: 16,
            use_generation_config: false,
            gpu_device_ids: Vec::new(),
            deterministic: false,
            fp8_activations: false,
            cuda_graph_mode: true,
            cuda_graph_cache_size: 64,
            tensor_parallel_size: 1,
            pipeline_parallel_size: 1,
            rank_transport: RankTransportKind::Processes,
            rank_cpus: RankCpus::Auto,
            rank_timeout_seconds: 30,
            rank_load_timeout_seconds: 600,
            num_threads: None,
            cpu_instruction_set: None,
            stats_file: None,
            synthetic_vocab_size: 32_000,
            synthetic_step_us: 0.0,
            synthetic_token_us: 0.0,
            synthetic_fail_after: None,
            synthetic_gate: None,
        }
    }
}

impl Settings {
    /// The default of `max_image_tokens`.
    pub const MAX_IMAGE_TOKENS: u32 = 1280;

    /// The checkpoint's folder, for `version` of the model in the repository folder `model_path`.
    pub fn checkpoint_path(&self, model_path: &Path, version: u64) -> PathBuf {
        match &self.gpt_model_path {
            Some(path) => model_path.join(path),
            None => model_path.join(version.to_string()),
        }
    }

    /// The cache file for the quantised weights of the model `name`. None without `weight_cache_dir`.
    ///
    /// Its extension is no checkpoint file's, so that programs that scan a checkpoint folder skip it.
    pub fn weight_cache_path(
        &self,
        model_path: &Path,
        name: &str,
        version: u64,
    ) -> Option<PathBuf> {
        let dir = model_path.join(self.weight_cache_dir.as_ref()?);
        Some(dir.join(format!("{name}-{version}.weights")))
    }

    /// The two tokens that a score is made of, if it is made of tokens.
    pub fn score_tokens(&self) -> Option<[String; 2]> {
        let of_reranker = || {
            self.is_original_qwen3_reranker
                .then(|| ["no", "yes"].map(str::to_owned))
        };
        self.classifier_from_token.clone().or_else(of_reranker)
    }

    /// The tokenizer's folder.
    pub fn tokenizer_path(&self, model_path: &Path, version: u64) -> PathBuf {
        match &self.tokenizer_dir {
            Some(path) => model_path.join(path),
            None => self.checkpoint_path(model_path, version),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checkpoint_paths_default_to_the_version_folder() {
        let mut settings = Settings::default();
        let model = Path::new("/repo/m");
        assert_eq!(settings.checkpoint_path(model, 3), Path::new("/repo/m/3"));
        settings.gpt_model_path = Some("weights".into());
        assert_eq!(
            settings.tokenizer_path(model, 3),
            Path::new("/repo/m/weights")
        );
        settings.tokenizer_dir = Some("/tokens".into());
        assert_eq!(settings.tokenizer_path(model, 3), Path::new("/tokens"));
        assert_eq!(settings.weight_cache_path(model, "m", 3), None);
        settings.weight_cache_dir = Some("../cache".into());
        let file = settings.weight_cache_path(model, "m", 3);
        assert_eq!(
            file.as_deref(),
            Some(Path::new("/repo/m/../cache/m-3.weights"))
        );
    }
}
