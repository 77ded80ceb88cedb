//! Parameters of the Batch Manager and of TensorRT-LLM's Triton backend that are none here: what to write instead, or
//! why there is nothing to write.

/// What has become of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Foreign {
    /// It is a parameter of another name.
    RenamedTo(&'static str),
    /// What it sets is somewhere else, or is so without it.
    NoEffect(&'static str),
    /// What it is for is not there.
    Unsupported(&'static str),
}

/// What is known of a name, whatever its case.
pub(super) fn foreign(name: &str) -> Option<Foreign> {
    let known = |&(theirs, _): &&(&str, Foreign)| theirs.eq_ignore_ascii_case(name);
    NAMES.iter().find(known).map(|&(_, foreign)| foreign)
}

const LORA: Foreign = Foreign::Unsupported("LoRA adapters are not served yet");
const GPU: Foreign =
    Foreign::Unsupported("GPUs are not served yet: this build computes on the CPU");
const RANKS: Foreign =
    Foreign::Unsupported("models over several devices or machines are not served yet");
const ENCODER: Foreign = Foreign::Unsupported("encoders are not served, only decoders");
const SPECULATION: Foreign = Foreign::Unsupported(
    "draft models and heads are not served; the parameter 'speculation' guesses without them",
);
const HOST_CACHE: Foreign =
    Foreign::NoEffect("keys and values are in host memory already, and have no second place");
const WORKERS: Foreign = Foreign::NoEffect("the model runs inside the server's process");
const STATISTICS: Foreign =
    Foreign::NoEffect("every step and every request is counted, nothing is kept");
const STATS_FILE: Foreign = Foreign::RenamedTo("stats_file");
const ENGINE: Foreign = Foreign::NoEffect(
    "a checkpoint is loaded as it is, there is no engine that is built for some lengths",
);
const LOGITS: Foreign = Foreign::NoEffect(
    "requests ask for logits with return_context_logits and return_generation_logits",
);
const GROUP: Foreign =
    Foreign::NoEffect("its fields are parameters of their own: see docs/src/configuration.md");

/// The Batch Manager's names first, as its document has them, then those of the Triton backend.
pub(super) const NAMES: &[(&str, Foreign)] = &[
    ("trtEnginePath", Foreign::RenamedTo("gpt_model_path")),
    ("modelType", Foreign::RenamedTo("gpt_model_type")),
    ("maxBeamWidth", Foreign::RenamedTo("max_beam_width")),
    (
        "capacitySchedulerPolicy",
        Foreign::RenamedTo("batch_scheduler_policy"),
    ),
    (
        "schedulerPolicy",
        Foreign::RenamedTo("batch_scheduler_policy"),
    ),
    (
        "schedulerConfig",
        Foreign::RenamedTo("batch_scheduler_policy"),
    ),
    (
        "contextChunkingPolicy",
        Foreign::RenamedTo("context_chunking_policy"),
    ),
    ("maxNumRequests", Foreign::RenamedTo("max_num_requests")),
    ("maxBatchSize", Foreign::RenamedTo("max_num_requests")),
    ("maxNumTokens", Foreign::RenamedTo("max_num_tokens")),
    ("maxSeqLen", Foreign::RenamedTo("max_seq_len")),
    ("maxInputLen", ENGINE),
    ("maxOutputLen", ENGINE),
    ("max_input_len", ENGINE),
    ("max_output_len", ENGINE),
    ("TrtGptModelOptionalParams", GROUP),
    ("kvCacheConfig", GROUP),
    (
        "maxTokens",
        Foreign::RenamedTo("max_tokens_in_paged_kv_cache"),
    ),
    (
        "maxAttentionWindow",
        Foreign::RenamedTo("max_attention_window_size"),
    ),
    (
        "maxAttentionWindowVec",
        Foreign::RenamedTo("max_attention_window_size"),
    ),
    ("sinkTokenLength", Foreign::RenamedTo("sink_token_length")),
    (
        "freeGpuMemoryFraction",
        Foreign::RenamedTo("kv_cache_free_gpu_mem_fraction"),
    ),
    (
        "enableBlockReuse",
        Foreign::RenamedTo("enable_kv_cache_reuse"),
    ),
    (
        "enablePartialReuse",
        Foreign::RenamedTo("enable_partial_reuse"),
    ),
    (
        "copyOnPartialReuse",
        Foreign::RenamedTo("enable_partial_reuse"),
    ),
    ("tokensPerBlock", Foreign::RenamedTo("tokens_per_block")),
    (
        "hostCacheSize",
        Foreign::Unsupported(
            "LoRA adapters are not served yet, and keys and values are in host memory already",
        ),
    ),
    ("onboardBlocks", HOST_CACHE),
    ("enableTrtOverlap", Foreign::RenamedTo("enable_trt_overlap")),
    (
        "enableChunkedContext",
        Foreign::RenamedTo("enable_chunked_context"),
    ),
    ("normalizeLogProbs", NORMALIZED),
    ("decodingMode", SPECULATION),
    ("gather_context_logits", LOGITS),
    ("gather_generation_logits", LOGITS),
    ("gather_all_token_logits", LOGITS),
    ("peftCacheManagerConfig", LORA),
    ("use_lora_plugin", LORA),
    ("numHostModuleLayer", LORA),
    ("numDeviceModuleLayer", LORA),
    ("optimalAdapterSize", LORA),
    ("maxAdapterSize", LORA),
    ("numPutWorkers", LORA),
    ("numEnsureWorkers", LORA),
    ("numCopyStreams", LORA),
    ("maxPagesPerBlockHost", LORA),
    ("maxPagesPerBlockDevice", LORA),
    ("deviceCachePercent", LORA),
    ("gptModelPath", Foreign::RenamedTo("gpt_model_path")),
    ("engine_dir", Foreign::RenamedTo("gpt_model_path")),
    (
        "max_kv_cache_length",
        Foreign::RenamedTo("max_attention_window_size"),
    ),
    ("max_num_sequences", Foreign::RenamedTo("max_num_requests")),
    (
        "kv_cache_free_mem_fraction",
        Foreign::RenamedTo("kv_cache_free_gpu_mem_fraction"),
    ),
    ("stats_path", STATS_FILE),
    ("lora_cache_optimal_adapter_size", LORA),
    ("lora_cache_max_adapter_size", LORA),
    ("lora_cache_gpu_memory_fraction", LORA),
    ("lora_cache_host_memory_bytes", LORA),
    ("lora_prefetch_dir", LORA),
    ("gpu_device_ids", GPU),
    ("gpu_weights_percent", GPU),
    ("cuda_graph_mode", GPU),
    ("cuda_graph_cache_size", GPU),
    ("multi_block_mode", GPU),
    ("enable_context_fmha_fp32_acc", GPU),
    ("participant_ids", RANKS),
    ("num_nodes", RANKS),
    ("encoder_model_path", ENCODER),
    ("encoder_engine_dir", ENCODER),
    ("cross_kv_cache_fraction", ENCODER),
    ("kv_cache_host_memory_bytes", HOST_CACHE),
    ("kv_cache_onboard_blocks", HOST_CACHE),
    ("decoding_mode", SPECULATION),
    ("medusa_choices", SPECULATION),
    ("eagle_choices", SPECULATION),
    ("lookahead_window_size", SPECULATION),
    ("lookahead_ngram_size", SPECULATION),
    ("lookahead_verification_set_size", SPECULATION),
    ("speculative_decoding_fast_logits", SPECULATION),
    (
        "guided_decoding_backend",
        Foreign::NoEffect("guides are compiled by the library that is built in"),
    ),
    (
        "xgrammar_tokenizer_info_path",
        Foreign::NoEffect("what guides know of the tokenizer is read from tokenizer.json"),
    ),
    (
        "tokenizer_type",
        Foreign::NoEffect("what a tokenizer is, its files say"),
    ),
    ("iter_stats_max_iterations", STATISTICS),
    ("request_stats_max_iterations", STATISTICS),
    (
        "cancellation_check_period_ms",
        Foreign::NoEffect("cancellation is looked for in every step"),
    ),
    (
        "stats_check_period_ms",
        Foreign::NoEffect("statistics are made in every step"),
    ),
    (
        "recv_poll_period_ms",
        Foreign::NoEffect("requests arrive with the step, nothing is polled"),
    ),
    ("executor_worker_path", WORKERS),
    ("normalize_log_probs", NORMALIZED),
    (
        "FORCE_CPU_ONLY_INPUT_TENSORS",
        Foreign::NoEffect("inputs are always read from host memory"),
    ),
];

const NORMALIZED: Foreign =
    Foreign::NoEffect("log-probabilities are of the model's own logits, over the whole vocabulary");

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::knobs::knobs;

    #[test]
    fn foreign_names_are_unique_and_map_to_known_parameters() {
        let knobs = knobs();
        let is_ours = |name: &str| knobs.iter().any(|knob| knob.key == name);
        for (index, (name, foreign)) in NAMES.iter().enumerate() {
            assert!(!is_ours(name), "{name}");
            let again = NAMES[..index].iter();
            let mut again = again.filter(|(other, _)| other.eq_ignore_ascii_case(name));
            assert_eq!(again.next(), None);
            if let Foreign::RenamedTo(ours) = foreign {
                assert!(is_ours(ours), "{name}: {ours}");
            }
        }
    }

    /// The fields that the Batch Manager's documentation has (sections on its parameters).
    #[test]
    fn knows_every_parameter_in_the_batch_managers_documentation() {
        for name in [
            "trtEnginePath",
            "modelType",
            "maxBeamWidth",
            "capacitySchedulerPolicy",
            "kvCacheConfig",
            "maxTokens",
            "maxAttentionWindow",
            "freeGpuMemoryFraction",
            "enableBlockReuse",
            "enableTrtOverlap",
            "enableChunkedContext",
            "peftCacheManagerConfig",
            "numHostModuleLayer",
            "numDeviceModuleLayer",
            "optimalAdapterSize",
            "maxAdapterSize",
            "numPutWorkers",
            "numEnsureWorkers",
            "numCopyStreams",
            "maxPagesPerBlockHost",
            "maxPagesPerBlockDevice",
            "deviceCachePercent",
            "hostCacheSize",
            "gather_context_logits",
            "gather_generation_logits",
            "gather_all_token_logits",
        ] {
            assert!(foreign(name).is_some(), "{name}");
        }
    }
}
