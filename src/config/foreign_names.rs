//! Parameters of the Batch Manager and of TensorRT-LLM's Triton backend that are none here: what to write instead, or
//! why there is nothing to write.

/// What has become of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Foreign {
    /// It is a parameter of another name.
    Is(&'static str),
    /// What it sets is somewhere else, or is so without it.
    HasNoEffect(&'static str),
    /// What it is for is not there.
    IsNotServed(&'static str),
}

/// What is known of a name, whatever its case.
pub(super) fn foreign(name: &str) -> Option<Foreign> {
    let known = |&(theirs, _): &&(&str, Foreign)| theirs.eq_ignore_ascii_case(name);
    NAMES.iter().find(known).map(|&(_, foreign)| foreign)
}

const LORA: Foreign = Foreign::IsNotServed("LoRA adapters are not served yet");
const GPU: Foreign =
    Foreign::IsNotServed("GPUs are not served yet: this build computes on the CPU");
const RANKS: Foreign =
    Foreign::IsNotServed("models over several devices or machines are not served yet");
const ENCODER: Foreign = Foreign::IsNotServed("encoders are not served, only decoders");
const SPECULATION: Foreign = Foreign::IsNotServed(
    "draft models and heads are not served; the parameter 'speculation' guesses without them",
);
const HOST_CACHE: Foreign =
    Foreign::HasNoEffect("keys and values are in host memory already, and have no second place");
const WORKERS: Foreign = Foreign::HasNoEffect("the model runs inside the server's process");
const STATISTICS: Foreign =
    Foreign::HasNoEffect("every step and every request is counted, nothing is kept");
const STATS_FILE: Foreign = Foreign::Is("stats_file");
const ENGINE: Foreign = Foreign::HasNoEffect(
    "a checkpoint is loaded as it is, there is no engine that is built for some lengths",
);
const LOGITS: Foreign = Foreign::HasNoEffect(
    "requests ask for logits with return_context_logits and return_generation_logits",
);
const GROUP: Foreign =
    Foreign::HasNoEffect("its fields are parameters of their own: see docs/src/configuration.md");

/// The Batch Manager's names first, as its document has them, then those of the Triton backend.
pub(super) const NAMES: &[(&str, Foreign)] = &[
    ("trtEnginePath", Foreign::Is("gpt_model_path")),
    ("modelType", Foreign::Is("gpt_model_type")),
    ("maxBeamWidth", Foreign::Is("max_beam_width")),
    (
        "capacitySchedulerPolicy",
        Foreign::Is("batch_scheduler_policy"),
    ),
    ("schedulerPolicy", Foreign::Is("batch_scheduler_policy")),
    ("schedulerConfig", Foreign::Is("batch_scheduler_policy")),
    (
        "contextChunkingPolicy",
        Foreign::Is("context_chunking_policy"),
    ),
    ("maxNumRequests", Foreign::Is("max_num_requests")),
    ("maxBatchSize", Foreign::Is("max_num_requests")),
    ("maxNumTokens", Foreign::Is("max_num_tokens")),
    ("maxSeqLen", Foreign::Is("max_seq_len")),
    ("maxInputLen", ENGINE),
    ("maxOutputLen", ENGINE),
    ("max_input_len", ENGINE),
    ("max_output_len", ENGINE),
    ("TrtGptModelOptionalParams", GROUP),
    ("kvCacheConfig", GROUP),
    ("maxTokens", Foreign::Is("max_tokens_in_paged_kv_cache")),
    (
        "maxAttentionWindow",
        Foreign::Is("max_attention_window_size"),
    ),
    (
        "maxAttentionWindowVec",
        Foreign::Is("max_attention_window_size"),
    ),
    ("sinkTokenLength", Foreign::Is("sink_token_length")),
    (
        "freeGpuMemoryFraction",
        Foreign::Is("kv_cache_free_gpu_mem_fraction"),
    ),
    ("enableBlockReuse", Foreign::Is("enable_kv_cache_reuse")),
    ("enablePartialReuse", Foreign::Is("enable_partial_reuse")),
    ("copyOnPartialReuse", Foreign::Is("enable_partial_reuse")),
    ("tokensPerBlock", Foreign::Is("tokens_per_block")),
    (
        "hostCacheSize",
        Foreign::IsNotServed(
            "LoRA adapters are not served yet, and keys and values are in host memory already",
        ),
    ),
    ("onboardBlocks", HOST_CACHE),
    ("enableTrtOverlap", Foreign::Is("enable_trt_overlap")),
    (
        "enableChunkedContext",
        Foreign::Is("enable_chunked_context"),
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
    ("gptModelPath", Foreign::Is("gpt_model_path")),
    ("engine_dir", Foreign::Is("gpt_model_path")),
    (
        "max_kv_cache_length",
        Foreign::Is("max_attention_window_size"),
    ),
    ("max_num_sequences", Foreign::Is("max_num_requests")),
    (
        "kv_cache_free_mem_fraction",
        Foreign::Is("kv_cache_free_gpu_mem_fraction"),
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
        Foreign::HasNoEffect("guides are compiled by the library that is built in"),
    ),
    (
        "xgrammar_tokenizer_info_path",
        Foreign::HasNoEffect("what guides know of the tokenizer is read from tokenizer.json"),
    ),
    (
        "tokenizer_type",
        Foreign::HasNoEffect("what a tokenizer is, its files say"),
    ),
    ("iter_stats_max_iterations", STATISTICS),
    ("request_stats_max_iterations", STATISTICS),
    (
        "cancellation_check_period_ms",
        Foreign::HasNoEffect("cancellation is looked for in every step"),
    ),
    (
        "stats_check_period_ms",
        Foreign::HasNoEffect("statistics are made in every step"),
    ),
    (
        "recv_poll_period_ms",
        Foreign::HasNoEffect("requests arrive with the step, nothing is polled"),
    ),
    ("executor_worker_path", WORKERS),
    ("normalize_log_probs", NORMALIZED),
    (
        "FORCE_CPU_ONLY_INPUT_TENSORS",
        Foreign::HasNoEffect("inputs are always read from host memory"),
    ),
];

const NORMALIZED: Foreign = Foreign::HasNoEffect(
    "log-probabilities are of the model's own logits, over the whole vocabulary",
);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::knobs::knobs;

    #[test]
    fn every_name_is_foreign_and_leads_to_one_that_is_not() {
        let knobs = knobs();
        let is_ours = |name: &str| knobs.iter().any(|knob| knob.key == name);
        for (index, (name, foreign)) in NAMES.iter().enumerate() {
            assert!(!is_ours(name), "{name}");
            let again = NAMES[..index].iter();
            let mut again = again.filter(|(other, _)| other.eq_ignore_ascii_case(name));
            assert_eq!(again.next(), None);
            if let Foreign::Is(ours) = foreign {
                assert!(is_ours(ours), "{name}: {ours}");
            }
        }
    }

    /// The fields that the Batch Manager's documentation has (sections on its parameters).
    #[test]
    fn all_names_of_the_batch_managers_document_are_known() {
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
