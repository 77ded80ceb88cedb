//! The backend's parameters, as values.

use std::num::{NonZeroU32, NonZeroUsize};
use std::path::PathBuf;

use crate::base::nearest_name;
use crate::base::{BlockSize, LoadError};
use crate::config::client_compatibility::ClientCompatibility;
use crate::config::foreign_names::{Foreign, foreign};
use crate::config::knobs::{KNOBS, Knob};

/// Positions of a KV cache block where the user sets none.
const DEFAULT_BLOCK_SIZE: BlockSize = BlockSize::new(32).unwrap();

/// What computes the tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunnerKind {
    /// A Hugging Face checkpoint.
    HuggingFace,
    /// No weights: the next token is a hash of all tokens so far, a step takes a set time.
    Synthetic,
}

/// How requests become batches: `gpt_model_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BatchingScheme {
    /// In lockstep: a batch is padded to its longest member, nobody joins it, and its answers leave
    /// when all are done.
    V1,
    /// In flight: requests join and leave in every step, which is two model calls, one for contexts
    /// and one for generation.
    Inflight,
    /// In flight, with all of a step in one packed model call.
    InflightFused,
}

/// Which contexts get the tokens that are left: `context_chunking_policy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ContextChunkPolicy {
    /// The first one all it needs, then the next.
    FirstComeFirstServed,
    /// A block each in turn.
    EqualProgress,
}

/// What float weights are rounded to: `weight_only_precision`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightOnlyPrecision {
    /// 8 bits.
    Int8,
    /// 4 bits, the output layer 8.
    Int4,
}

/// Whose guesses at later tokens are verified: `speculation`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SpeculationKind {
    /// Nobody's.
    None,
    /// Those that requests bring.
    DraftInputIds,
    /// Those, and what followed the same n-grams before.
    PromptLookup,
}

/// Who may run, given the KV blocks there are: `batch_scheduler_policy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CapacityPolicy {
    /// Admit whatever fits now; when blocks run out, pause the sequence that started last.
    MaxUtilization,
    /// Admit only what can run to its last token: nothing is ever paused.
    GuaranteedNoEvict,
    /// As `GuaranteedNoEvict`, and admit only when nothing runs.
    StaticBatch,
}

/// The `parameters` of a config.pbtxt. `None`: not written, and derived from the model or machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// `runner`
    pub runner: RunnerKind,
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
    /// `max_draft_tokens`
    pub max_draft_tokens: u32,
    /// `prompt_lookup_min`
    pub prompt_lookup_min: u32,
    /// `prompt_lookup_max`
    pub prompt_lookup_max: u32,
    /// `kv_cache_type`: whether it is paged
    pub paged_kv_cache: bool,
    /// `kv_cache_dtype`: whether it is int8
    pub int8_kv_cache: bool,
    /// `weight_only_precision`; `None`: as the checkpoint has them
    pub weight_only_precision: Option<WeightOnlyPrecision>,
    /// `weight_only_group_size`; `None`: the precision's usual one
    pub weight_only_group_size: Option<u32>,
    /// `weight_cache_dir`
    pub weight_cache_dir: Option<PathBuf>,
    /// `weight_cache_mode`
    pub weight_cache_mode: u32,
    /// `enable_kv_cache_reuse`; `None`: where it is possible
    pub enable_kv_cache_reuse: Option<bool>,
    /// `enable_partial_reuse`
    pub enable_partial_reuse: bool,
    /// `max_attention_window_size`: for each layer, repeated; empty: the model's own
    pub max_attention_window_size: Vec<NonZeroU32>,
    /// `sink_token_length`
    pub sink_token_length: u32,
    /// `max_num_requests`
    pub max_num_requests: Option<u32>,
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
    pub kv_cache_free_mem_fraction: f64,
    /// `enable_chunked_context`; `None`: where it is possible
    pub enable_chunked_context: Option<bool>,
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
    /// `default_max_tokens`
    pub default_max_tokens: u32,
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
            gpt_model_path: None,
            tokenizer_dir: None,
            gpt_model_type: BatchingScheme::InflightFused,
            batch_scheduler_policy: CapacityPolicy::GuaranteedNoEvict,
            context_chunking_policy: ContextChunkPolicy::FirstComeFirstServed,
            enable_trt_overlap: false,
            speculation: SpeculationKind::None,
            max_draft_tokens: 4,
            prompt_lookup_min: 2,
            prompt_lookup_max: 4,
            paged_kv_cache: true,
            int8_kv_cache: false,
            weight_only_precision: None,
            weight_only_group_size: None,
            weight_cache_dir: None,
            weight_cache_mode: 0o600,
            enable_kv_cache_reuse: None,
            enable_partial_reuse: true,
            max_attention_window_size: Vec::new(),
            sink_token_length: 0,
            max_num_requests: None,
            max_beam_width: 1,
            max_num_tokens: None,
            max_seq_len: None,
            tokens_per_block: DEFAULT_BLOCK_SIZE,
            max_tokens_in_paged_kv_cache: None,
            kv_cache_free_mem_fraction: 0.5,
            enable_chunked_context: None,
            logits_memory_bytes: 1 << 30,
            logits_post_processor_library: None,
            exclude_input_in_output: false,
            stream_interval: 1,
            client_compatibility: ClientCompatibility::None,
            add_special_tokens: true,
            skip_special_tokens: true,
            default_max_tokens: 16,
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
    /// Reads the `parameters` of a config.pbtxt. Those of TensorRT-LLM's backend that mean nothing here are skipped, see
    /// `meaningless`.
    ///
    /// # Errors
    /// All unknown keys, each with the nearest known one or with our name of it, and all values outside their range.
    pub fn parse<'a>(
        parameters: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Result<Self, LoadError> {
        let mut settings = Self::default();
        let mut errors = Vec::new();
        for (key, value) in parameters {
            match KNOBS.iter().find(|knob| knob.key == key) {
                Some(knob) => {
                    if (knob.set)(&mut settings, value.trim()).is_none() {
                        errors.push(bad_value(knob, value));
                    }
                }
                None if why_meaningless(key).is_some() => {}
                None => errors.push(unknown(key)),
            }
        }
        LoadError::check(errors).map(|()| settings)
    }
}

fn bad_value(knob: &Knob, value: &str) -> LoadError {
    let meant = match meant(knob, value) {
        Some(name) => format!("; did you mean '{name}'?"),
        None => String::new(),
    };
    LoadError::Knob {
        key: knob.key.to_owned(),
        value: value.to_owned(),
        expected: format!("{}{meant}", knob.expected),
    }
}

/// The name among those that a knob takes which the Batch Manager writes so: `kMAX_UTILIZATION`, `InflightBatching`.
fn meant<'k>(knob: &'k Knob, value: &str) -> Option<&'k str> {
    let plain = |name: &str| name.replace(['_', '-', ' '], "").to_ascii_lowercase();
    let value = plain(value.trim());
    let without_k = value.strip_prefix('k').unwrap_or(&value);
    let mut names = knob.expected.split('\'').skip(1).step_by(2);
    names.find(|name| [value.as_str(), without_k].contains(&plain(name).as_str()))
}

/// The parameters that are skipped, each with the reason.
pub(super) fn meaningless<'a>(
    keys: impl IntoIterator<Item = &'a str>,
) -> impl Iterator<Item = (&'a str, &'static str)> {
    keys.into_iter()
        .filter_map(|key| Some((key, why_meaningless(key)?)))
}

/// Why a parameter of another backend can be skipped: without it every answer is the same.
fn why_meaningless(key: &str) -> Option<&'static str> {
    match foreign(key)? {
        Foreign::HasNoEffect(why) | Foreign::IsNotServed(why) => Some(why),
        Foreign::Is(_) => None,
    }
}

fn unknown(key: &str) -> LoadError {
    if let Some(Foreign::Is(ours)) = foreign(key) {
        return LoadError::ForeignKnob {
            key: key.to_owned(),
            reason: format!("write '{ours}' instead"),
        };
    }
    LoadError::UnknownKnob {
        key: key.to_owned(),
        nearest: nearest_name(key, KNOBS.iter().map(|knob| knob.key)).map(str::to_owned),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_parameters_give_the_defaults() {
        assert_eq!(
            Settings::parse([]).expect("nothing to refuse"),
            Settings::default()
        );
    }

    #[test]
    fn a_mistyped_key_is_refused_with_the_nearest_one() {
        let error = Settings::parse([("max_num_token", "8")]).expect_err("no such key");
        assert_eq!(
            error.to_string(),
            "unknown parameter 'max_num_token'; did you mean 'max_num_tokens'?"
        );
    }

    #[test]
    fn a_parameter_of_another_backend_is_skipped_with_the_reason() {
        let parameters = [
            ("gpu_weights_percent", "GPUs are not served yet"),
            (
                "lora_cache_max_adapter_size",
                "LoRA adapters are not served yet",
            ),
            ("FORCE_CPU_ONLY_INPUT_TENSORS", "host memory"),
        ];
        let keys = parameters.map(|(key, _)| key);
        let given = [(keys[0], "0.5"), (keys[1], "64"), (keys[2], "no")];
        assert_eq!(
            Settings::parse(given).expect("nothing to refuse"),
            Settings::default()
        );
        let skipped: Vec<_> =
            meaningless(keys.into_iter().chain(["max_num_tokens", "x"])).collect();
        assert_eq!(skipped.len(), 3);
        for ((key, why), (expected, words)) in skipped.iter().zip(parameters) {
            assert!(*key == expected && why.contains(words), "{key}: {why}");
        }
    }

    #[test]
    fn the_batch_managers_own_names_lead_to_ours() {
        for (key, ours) in [
            ("maxTokens", "'max_tokens_in_paged_kv_cache'"),
            ("freeGpuMemoryFraction", "'kv_cache_free_gpu_mem_fraction'"),
            ("enableBlockReuse", "'enable_kv_cache_reuse'"),
            ("maxBeamWidth", "'max_beam_width'"),
            ("trtEnginePath", "'gpt_model_path'"),
        ] {
            let error = Settings::parse([(key, "1")]).expect_err("not ours");
            assert!(
                error.to_string().contains(&format!("write {ours}")),
                "{error}"
            );
        }
        for (key, value, ours) in [
            (
                "gpt_model_type",
                "InflightFusedBatching",
                "inflight_fused_batching",
            ),
            ("gpt_model_type", "InflightBatching", "inflight_batching"),
            (
                "batch_scheduler_policy",
                "kMAX_UTILIZATION",
                "max_utilization",
            ),
            (
                "batch_scheduler_policy",
                "GuaranteedNoEvict",
                "guaranteed_no_evict",
            ),
            (
                "context_chunking_policy",
                "kEQUAL_PROGRESS",
                "equal_progress",
            ),
        ] {
            let error = Settings::parse([(key, value)]).expect_err("not our spelling");
            let error = error.to_string();
            assert!(
                error.ends_with(&format!("did you mean '{ours}'?")),
                "{error}"
            );
        }
    }

    #[test]
    fn all_unknown_keys_and_all_wrong_values_are_reported_at_once() {
        let parameters = [
            ("max_num_token", "8"),
            ("max_seq_len", "1"),
            ("tokens_per_block", "32"),
            ("maxTokens", "100"),
            ("num_threads", "many"),
        ];
        let error = Settings::parse(parameters).expect_err("four errors");
        assert!(
            matches!(&error, LoadError::Several(errors) if errors.len() == 4),
            "{error}"
        );
        let error = error.to_string();
        for words in [
            "4 errors: (1) unknown parameter 'max_num_token'; did you mean",
            "(2) parameter 'max_seq_len': '1' is not",
            "(3) parameter 'maxTokens' is none of this backend's: write",
            "(4) parameter 'num_threads': 'many' is not",
        ] {
            assert!(error.contains(words), "{error}");
        }
    }
}
