//! Parameters of the Batch Manager and of TensorRT-LLM's Triton backend that this backend lacks: what to write instead,
//! why they are ignored, or why they are refused.

/// How this backend treats another backend's parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Foreign {
    /// This backend has it under another name.
    RenamedTo(&'static str),
    /// No value of it changes an answer: it is set elsewhere or always in effect, or speed is all that it is for; the
    /// reason.
    NoEffect(&'static str),
    /// It asks for what is not computed here.
    Refused {
        /// The values that do not, in lower case.
        but: &'static [&'static str],
        /// What to do instead.
        remedy: &'static str,
    },
}

impl Foreign {
    /// What to do instead, if `value` is refused. Templates leave parameters empty, or their names in `${...}`.
    pub(super) fn refusal(self, value: &str) -> Option<&'static str> {
        let Self::Refused { but, remedy } = self else {
            return None;
        };
        let value = value.trim().to_ascii_lowercase();
        let is_unset = value.is_empty() || value.contains("${");
        (!is_unset && !but.contains(&&*value)).then_some(remedy)
    }
}

/// How the parameter `name` is treated, case-insensitive. None if the name is not known.
pub(super) fn foreign(name: &str) -> Option<Foreign> {
    let known = |&(theirs, _): &&(&str, Foreign)| theirs.eq_ignore_ascii_case(name);
    NAMES.iter().find(known).map(|&(_, foreign)| foreign)
}

const LORA_STREAMS: Foreign = Foreign::NoEffect(
    "the threads of lora_cache_num_ensure_workers read adapters into host memory; a step copies those that it uses to its GPU",
);
const LORA_BLOCKS: Foreign = Foreign::NoEffect(
    "memory is allocated with each adapter and given back when it is evicted, not in blocks of pages",
);
const LORA_GPU_BLOCKS: Foreign =
    Foreign::NoEffect("copies of adapters in the memory of a GPU are not divided into blocks");
const LORA_ENABLED: Foreign = Foreign::NoEffect(
    "requests may name adapters where the model has lora_dir, lora_prefetch_dir or a multi_lora.json, and bring them where it \
     declares the inputs lora_weights and lora_config",
);
const WEIGHT_STREAMING: Foreign =
    Foreign::NoEffect("all weights are in the memory of the device that the model runs on");
const ATTENTION: Foreign = Foreign::NoEffect(
    "attention always splits long sequences over blocks, and always accumulates in f32",
);
const RANKS: Foreign = Foreign::NoEffect(
    "tensor_parallel_size and pipeline_parallel_size say how many ranks there are; with rank_transport, mpirun places them on \
     hosts",
);
const ORCHESTRATOR: Foreign = Foreign::NoEffect(
    "the server starts the processes of tensor_parallel_size and pipeline_parallel_size itself, from the program beside the library; \
     with rank_transport, mpirun has started them",
);
const ENCODER: Foreign = Foreign::Refused {
    but: &[],
    remedy: "models with an encoder and a decoder are not served: take a decoder; an encoder alone is served with 'task' embed, \
             classify or score",
};
const CROSS_ATTENTION: Foreign =
    Foreign::NoEffect("no model here attends to an encoder, so there is one KV cache");
const DRAFTS: Foreign = Foreign::Refused {
    // How tokens are sampled, which is the requests' to say.
    but: &[
        "auto",
        "top_k",
        "top_p",
        "top_k_top_p",
        "topk",
        "topp",
        "topktopp",
        "beam_search",
        "beamsearch",
    ],
    remedy: "write 'speculation' instead: eagle3 and draft_model with a checkpoint that makes drafts, prompt_lookup without one",
};
const DRAFT_TREE: Foreign = Foreign::Refused {
    but: &["[]"],
    remedy: "drafts are not trees: write 'speculation' instead, eagle3 and draft_model with a checkpoint that makes drafts, \
             prompt_lookup without one",
};
const LOOKAHEAD: Foreign = Foreign::NoEffect(
    "it only affects speed; 'speculation: prompt_lookup' guesses tokens without a model",
);
const DRAFT_LOGITS: Foreign = Foreign::NoEffect(
    "a draft token is accepted only if it is the token that would be generated without it, whatever its logits",
);
const HOST_CACHE: Foreign = Foreign::RenamedTo("kv_cache_host_memory_bytes");
const ONBOARD: Foreign =
    Foreign::NoEffect("blocks in host memory always come back to the cache before they are read");
const STATISTICS: Foreign =
    Foreign::NoEffect("every step and request is recorded, and no history is kept");
const STATS_FILE: Foreign = Foreign::RenamedTo("stats_file");
const ENGINE: Foreign = Foreign::NoEffect(
    "checkpoints are loaded directly; there is no engine built for certain lengths",
);
const LOGITS: Foreign = Foreign::NoEffect(
    "requests enable logits with return_context_logits and return_generation_logits",
);
const GROUP: Foreign =
    Foreign::NoEffect("its fields are separate parameters: see docs/src/configuration.md");

/// The Batch Manager's parameters in the order of its documentation, then the Triton backend's.
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
    ("hostCacheSize", HOST_CACHE),
    ("host_cache_size", HOST_CACHE),
    ("onboardBlocks", ONBOARD),
    ("enableTrtOverlap", Foreign::RenamedTo("enable_trt_overlap")),
    (
        "enableChunkedContext",
        Foreign::RenamedTo("enable_chunked_context"),
    ),
    ("normalizeLogProbs", NORMALIZED),
    ("decodingMode", DRAFTS),
    ("gather_context_logits", LOGITS),
    ("gather_generation_logits", LOGITS),
    ("gather_all_token_logits", LOGITS),
    (
        "peftCacheManagerConfig",
        Foreign::RenamedTo("lora_cache_host_memory_bytes"),
    ),
    ("use_lora_plugin", LORA_ENABLED),
    (
        "numHostModuleLayer",
        Foreign::RenamedTo("lora_cache_num_host_module_layer"),
    ),
    (
        "numDeviceModuleLayer",
        Foreign::RenamedTo("lora_cache_num_device_module_layer"),
    ),
    (
        "optimalAdapterSize",
        Foreign::RenamedTo("lora_cache_optimal_adapter_size"),
    ),
    (
        "maxAdapterSize",
        Foreign::RenamedTo("lora_cache_max_adapter_size"),
    ),
    (
        "numPutWorkers",
        Foreign::RenamedTo("lora_cache_num_put_workers"),
    ),
    (
        "numEnsureWorkers",
        Foreign::RenamedTo("lora_cache_num_ensure_workers"),
    ),
    ("numCopyStreams", LORA_STREAMS),
    ("maxPagesPerBlockHost", LORA_BLOCKS),
    ("maxPagesPerBlockDevice", LORA_GPU_BLOCKS),
    (
        "deviceCachePercent",
        Foreign::RenamedTo("lora_cache_gpu_memory_fraction"),
    ),
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
    ("lora_cache_num_copy_streams", LORA_STREAMS),
    ("lora_cache_max_pages_per_block_host", LORA_BLOCKS),
    ("lora_cache_max_pages_per_block_device", LORA_GPU_BLOCKS),
    ("gpu_weights_percent", WEIGHT_STREAMING),
    ("multi_block_mode", ATTENTION),
    ("enable_context_fmha_fp32_acc", ATTENTION),
    ("participant_ids", RANKS),
    ("num_nodes", RANKS),
    ("tensorParallel", Foreign::RenamedTo("tensor_parallel_size")),
    ("tp_size", Foreign::RenamedTo("tensor_parallel_size")),
    (
        "pipelineParallel",
        Foreign::RenamedTo("pipeline_parallel_size"),
    ),
    ("pp_size", Foreign::RenamedTo("pipeline_parallel_size")),
    ("encoder_model_path", ENCODER),
    ("encoder_engine_dir", ENCODER),
    ("cross_kv_cache_fraction", CROSS_ATTENTION),
    ("kv_cache_onboard_blocks", ONBOARD),
    ("decoding_mode", DRAFTS),
    ("medusa_choices", DRAFT_TREE),
    ("eagle_choices", DRAFT_TREE),
    ("lookahead_window_size", LOOKAHEAD),
    ("lookahead_ngram_size", LOOKAHEAD),
    ("lookahead_verification_set_size", LOOKAHEAD),
    ("speculative_decoding_fast_logits", DRAFT_LOGITS),
    (
        "guided_decoding_backend",
        Foreign::NoEffect("guides are compiled by the built-in library"),
    ),
    (
        "xgrammar_tokenizer_info_path",
        Foreign::NoEffect("guides read the tokenizer from tokenizer.json"),
    ),
    (
        "tokenizer_type",
        Foreign::NoEffect("the type of the tokenizer is read from its files"),
    ),
    ("iter_stats_max_iterations", STATISTICS),
    ("request_stats_max_iterations", STATISTICS),
    (
        "cancellation_check_period_ms",
        Foreign::NoEffect("cancellation is checked at every step"),
    ),
    (
        "stats_check_period_ms",
        Foreign::NoEffect("statistics are recorded at every step"),
    ),
    (
        "recv_poll_period_ms",
        Foreign::NoEffect("requests arrive with the step; nothing is polled"),
    ),
    ("executor_worker_path", ORCHESTRATOR),
    ("normalize_log_probs", NORMALIZED),
    (
        "FORCE_CPU_ONLY_INPUT_TENSORS",
        Foreign::NoEffect("inputs are always read from host memory"),
    ),
];

const NORMALIZED: Foreign = Foreign::NoEffect(
    "log-probabilities are always computed from the model's own logits, over the whole vocabulary",
);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::knobs::knobs;

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

    /// A reason to load without it is none to refuse it, and the other way round.
    #[test]
    fn a_refusal_names_what_to_write_and_a_reason_refuses_nothing() {
        let knobs = knobs();
        for (name, foreign) in NAMES {
            match foreign {
                Foreign::RenamedTo(_) => {}
                Foreign::NoEffect(reason) => {
                    assert!(!reason.contains("not supported"), "{name}: {reason}");
                }
                Foreign::Refused { remedy, .. } => {
                    let mut quoted = remedy.split('\'').skip(1).step_by(2);
                    let is_ours = |name: &str| knobs.iter().any(|knob| knob.key == name);
                    assert!(quoted.any(is_ours), "{name}: {remedy}");
                }
            }
        }
    }

    #[test]
    fn every_parameter_of_the_adapter_cache_is_read_or_ignored_for_a_reason() {
        let knobs = knobs();
        for name in [
            "num_host_module_layer",
            "num_device_module_layer",
            "optimal_adapter_size",
            "max_adapter_size",
            "num_put_workers",
            "num_ensure_workers",
            "num_copy_streams",
            "max_pages_per_block_host",
            "max_pages_per_block_device",
            "gpu_memory_fraction",
            "host_memory_bytes",
        ] {
            let name = format!("lora_cache_{name}");
            let is_ours = knobs.iter().any(|knob| knob.key == name);
            let is_ignored = matches!(foreign(&name), Some(Foreign::NoEffect(_)));
            assert!(is_ours != is_ignored, "{name}");
        }
    }

    /// The fields in the Batch Manager's documentation (sections on its parameters).
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
