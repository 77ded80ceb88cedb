//! The input tensors that clients of TensorRT-LLM's and vLLM's Triton backends send.
//!
//! A model may declare any of them next to its prompt. Each carries the request option of the same name, which can
//! also be given as a request parameter.

/// An input tensor of another backend's model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientInput {
    /// Tensor name.
    pub name: &'static str,
    /// Data type, as spelled in config.pbtxt.
    pub data_type: &'static str,
    /// Shape without the batch dimension.
    pub dims: &'static [i64],
}

const ONE: &[i64] = &[1];
const ROW: &[i64] = &[-1];
const MATRIX: &[i64] = &[-1, -1];

const fn bool(name: &'static str) -> ClientInput {
    input(name, "TYPE_BOOL", ONE)
}

const fn int(name: &'static str) -> ClientInput {
    input(name, "TYPE_INT32", ONE)
}

const fn number(name: &'static str) -> ClientInput {
    input(name, "TYPE_FP32", ONE)
}

const fn text(name: &'static str) -> ClientInput {
    input(name, "TYPE_STRING", ONE)
}

const fn texts(name: &'static str) -> ClientInput {
    input(name, "TYPE_STRING", ROW)
}

const fn input(name: &'static str, data_type: &'static str, dims: &'static [i64]) -> ClientInput {
    ClientInput {
        name,
        data_type,
        dims,
    }
}

/// Inputs of TensorRT-LLM's `ensemble` and `tensorrt_llm_bls` models and of requests from Triton's OpenAI frontend.
pub const ENSEMBLE: &[ClientInput] = &[
    text("text_input"),
    int("max_tokens"),
    texts("stop_words"),
    texts("bad_words"),
    int("end_id"),
    int("pad_id"),
    int("top_k"),
    number("top_p"),
    number("temperature"),
    number("length_penalty"),
    number("repetition_penalty"),
    int("min_tokens"),
    int("min_length"),
    number("presence_penalty"),
    number("frequency_penalty"),
    input("seed", "TYPE_UINT64", ONE),
    input("random_seed", "TYPE_UINT64", ONE),
    bool("stream"),
    bool("exclude_input_in_output"),
    int("beam_width"),
    int("num_return_sequences"),
    text("guided_decoding_guide_type"),
    text("guided_decoding_guide"),
    bool("return_log_probs"),
    bool("return_context_logits"),
    bool("return_generation_logits"),
    bool("return_perf_metrics"),
    bool("return_num_input_tokens"),
    bool("return_num_output_tokens"),
    texts("embedding_bias_words"),
    input("embedding_bias_weights", "TYPE_FP32", ROW),
    int("num_draft_tokens"),
    bool("use_draft_logits"),
    text("decoder_text_input"),
    texts("image_input"),
    texts("image_bytes_input"),
    texts("image_url_input"),
    texts("video_bytes_input"),
    input("prompt_embedding_table", "TYPE_FP16", MATRIX),
    int("prompt_vocab_size"),
    input("prompt_table_extra_id", "TYPE_UINT64", ROW),
    input("lora_task_id", "TYPE_UINT64", ONE),
    input("lora_weights", "TYPE_FP16", MATRIX),
    input("lora_config", "TYPE_INT32", &[-1, 3]),
];

/// Inputs of TensorRT-LLM's `tensorrt_llm` model, whose prompts and outputs are token ids.
pub const TENSORRT_LLM: &[ClientInput] = &[
    input("input_ids", "TYPE_INT32", ROW),
    int("input_lengths"),
    int("request_output_len"),
    int("num_return_sequences"),
    input("draft_input_ids", "TYPE_INT32", ROW),
    input("draft_logits", "TYPE_FP32", MATRIX),
    number("draft_acceptance_threshold"),
    int("end_id"),
    int("pad_id"),
    input("stop_words_list", "TYPE_INT32", &[2, -1]),
    input("bad_words_list", "TYPE_INT32", &[2, -1]),
    input("embedding_bias", "TYPE_FP32", ROW),
    int("beam_width"),
    number("temperature"),
    int("runtime_top_k"),
    number("runtime_top_p"),
    number("runtime_top_p_min"),
    number("runtime_top_p_decay"),
    int("runtime_top_p_reset_ids"),
    number("len_penalty"),
    bool("early_stopping"),
    number("repetition_penalty"),
    int("min_tokens"),
    int("min_length"),
    number("beam_search_diversity_rate"),
    number("presence_penalty"),
    number("frequency_penalty"),
    input("seed", "TYPE_UINT64", ONE),
    input("random_seed", "TYPE_UINT64", ONE),
    text("guided_decoding_guide_type"),
    text("guided_decoding_guide"),
    bool("return_log_probs"),
    bool("return_context_logits"),
    bool("return_generation_logits"),
    bool("return_perf_metrics"),
    bool("return_num_input_tokens"),
    bool("return_num_output_tokens"),
    bool("exclude_input_in_output"),
    bool("stop"),
    bool("streaming"),
    input("prompt_embedding_table", "TYPE_FP16", MATRIX),
    input("prompt_table_extra_ids", "TYPE_UINT64", ROW),
    int("prompt_vocab_size"),
    input("encoder_input_features", "TYPE_FP16", MATRIX),
    int("encoder_output_lengths"),
    input("decoder_input_ids", "TYPE_INT32", ROW),
    int("decoder_input_lengths"),
    input("cross_attention_mask", "TYPE_BOOL", MATRIX),
    bool("skip_cross_attn_blocks"),
    input("mrope_rotary_cos_sin", "TYPE_FP32", ROW),
    input("mrope_position_deltas", "TYPE_INT64", ONE),
    input("lora_task_id", "TYPE_UINT64", ONE),
    input("lora_weights", "TYPE_FP16", MATRIX),
    input("lora_config", "TYPE_INT32", &[-1, 3]),
    input("context_phase_params", "TYPE_UINT8", ROW),
    input("retention_token_range_starts", "TYPE_INT32", ROW),
    input("retention_token_range_ends", "TYPE_INT32", ROW),
    input("retention_token_range_priorities", "TYPE_INT32", ROW),
    input("retention_token_range_durations_ms", "TYPE_INT32", ROW),
    int("retention_decode_priority"),
    int("retention_decode_duration_ms"),
    int("lookahead_window_size"),
    int("lookahead_ngram_size"),
    int("lookahead_verification_set_size"),
];

/// Inputs of the model on top of TensorRT-LLM's LLM API.
pub const LLM_API: &[ClientInput] = &[
    text("text_input"),
    bool("streaming"),
    bool("stop"),
    int("sampling_param_best_of"),
    number("sampling_param_temperature"),
    int("sampling_param_top_k"),
    number("sampling_param_top_p"),
    number("sampling_param_frequency_penalty"),
    number("sampling_param_presence_penalty"),
    int("sampling_param_max_tokens"),
    texts("sampling_param_stop"),
    input("sampling_param_seed", "TYPE_UINT64", ONE),
    bool("sampling_param_exclude_input_from_output"),
    bool("sampling_param_return_perf_metrics"),
    bool("return_finish_reason"),
    bool("return_stop_reason"),
    bool("return_cumulative_logprob"),
    texts("image_url"),
    text("lora_id"),
    text("lora_name"),
    text("lora_path"),
    text("lora_ckpt_source"),
];

/// Inputs of vLLM's backend. Its models have no batch dimension.
pub const VLLM: &[ClientInput] = &[
    text("text_input"),
    texts("image"),
    bool("stream"),
    text("sampling_parameters"),
    bool("exclude_input_in_output"),
    bool("return_finish_reason"),
    bool("return_cumulative_logprob"),
    bool("return_logprobs"),
    bool("return_num_input_tokens"),
    bool("return_num_output_tokens"),
    text("embedding_request"),
];

/// Fields of the Batch Manager's requests that are not tensors there. No other backend's models have them.
pub const BATCH_MANAGER: &[ClientInput] = &[input("client_id", "TYPE_UINT64", ONE)];

/// The second text of a pair that is scored or classified, and which tokens of a pair belong to it.
pub const PAIRS: &[ClientInput] = &[
    text("text_pair"),
    input("token_type_ids", "TYPE_INT32", ROW),
];

/// The images of a prompt: encoded ones, and decoded ones of one size, `[num_images, height, width, 3]`.
pub const IMAGES: &[ClientInput] = &[
    texts("images"),
    input("image_pixels", "TYPE_UINT8", &[-1, -1, -1, 3]),
];

/// The input with this name, of any of the models.
pub fn client_input(name: &str) -> Option<&'static ClientInput> {
    [
        ENSEMBLE,
        TENSORRT_LLM,
        LLM_API,
        VLLM,
        BATCH_MANAGER,
        PAIRS,
        IMAGES,
    ]
    .into_iter()
    .flatten()
    .find(|input| input.name == name)
}
