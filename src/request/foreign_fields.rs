//! Fields of other backends' clients that are not options here: ignored with one warning where they have no effect,
//! and refused where they would change the answer.

use serde_json::Value;

/// A field of other backends' clients that is not an option here.
pub(super) struct ForeignField {
    /// Its name.
    pub name: &'static str,
    /// How it is handled.
    pub handling: Handling,
}

/// How a field that is not an option is handled.
pub(super) enum Handling {
    /// The field has no effect, for this reason.
    Ignored(&'static str),
    /// The field may only request the one supported behaviour.
    Only {
        /// Whether the value requests it.
        is_neutral: fn(&Value) -> bool,
        /// The value that is accepted, worded to follow "is not".
        expected: &'static str,
    },
    /// The field is a tensor of models that have adapters.
    AdapterTensor,
    /// The field is refused, for this reason, with the alternative.
    Refused(&'static str),
}

use Handling::{AdapterTensor, Ignored, Only, Refused};

/// The error about an adapter's tensor where there can be none.
pub(super) const ADAPTER_TENSOR: &str = "an adapter comes in two input tensors, lora_weights and lora_config, of models \
                                         that declare both and serve a checkpoint";

const ONLY_SPEED: Handling = Ignored("it only affects speed, not the text");
const EXACT_DRAFTS: Handling = Ignored(
    "a draft token is accepted only if it equals the token that would be generated without it",
);
const KEPT_BY_USE: Handling = Ignored("the least recently used KV blocks are evicted first");
const NAMED_ADAPTERS: Handling = Refused(
    "adapters are read from the server's files; name one in lora_name, or give its number in lora_task_id",
);
const NO_PROMPT_TABLE: Handling =
    Refused("prompt embeddings are not supported; prompts are text or token ids");
const NO_VIDEOS: Handling = Refused(
    "videos, and images that were processed elsewhere, are not supported; send frames or files in 'images'",
);
const NO_ENCODER: Handling =
    Refused("encoder-decoder models are not supported; put the whole prompt into the input");
const NO_DISAGGREGATION: Handling =
    Refused("context and generation run on the same server; leave it out");

/// Every field of the other backends' clients that is not an option here.
pub(super) const FOREIGN: &[ForeignField] = &[
    field("Streaming", Ignored("'streaming' has the same meaning")),
    field("use_draft_logits", EXACT_DRAFTS),
    field("draft_logits", EXACT_DRAFTS),
    field("draft_acceptance_threshold", EXACT_DRAFTS),
    field("lookahead_window_size", ONLY_SPEED),
    field("lookahead_ngram_size", ONLY_SPEED),
    field("lookahead_verification_set_size", ONLY_SPEED),
    field("retention_token_range_starts", KEPT_BY_USE),
    field("retention_token_range_ends", KEPT_BY_USE),
    field("retention_token_range_priorities", KEPT_BY_USE),
    field("retention_token_range_durations_ms", KEPT_BY_USE),
    field("retention_decode_priority", KEPT_BY_USE),
    field("retention_decode_duration_ms", KEPT_BY_USE),
    field(
        "request_type",
        Only {
            is_neutral: |value| *value == "context_and_generation",
            expected: "context_and_generation: both run on the same server",
        },
    ),
    field("context_phase_params", NO_DISAGGREGATION),
    field("prompt_embedding_table", NO_PROMPT_TABLE),
    field("prompt_table_extra_ids", NO_PROMPT_TABLE),
    field("prompt_table_extra_id", NO_PROMPT_TABLE),
    field("prompt_vocab_size", NO_PROMPT_TABLE),
    field("lora_weights", AdapterTensor),
    field("lora_config", AdapterTensor),
    field("lora_id", NAMED_ADAPTERS),
    field("lora_path", NAMED_ADAPTERS),
    field("lora_ckpt_source", NAMED_ADAPTERS),
    field("image_input", NO_VIDEOS),
    field("video_bytes_input", NO_VIDEOS),
    field("mrope_rotary_cos_sin", NO_VIDEOS),
    field("mrope_position_deltas", NO_VIDEOS),
    field("encoder_input_features", NO_ENCODER),
    field("encoder_output_lengths", NO_ENCODER),
    field("decoder_text_input", NO_ENCODER),
    field("decoder_input_ids", NO_ENCODER),
    field("decoder_input_lengths", NO_ENCODER),
    field("cross_attention_mask", NO_ENCODER),
    field("skip_cross_attn_blocks", NO_ENCODER),
    field(
        "embedding_request",
        Refused(
            "a model whose task is embed gives the embedding of text_input without it; see docs/src/embeddings.md",
        ),
    ),
];

const fn field(name: &'static str, handling: Handling) -> ForeignField {
    ForeignField { name, handling }
}

/// The foreign field of this name.
pub(super) fn foreign(name: &str) -> Option<&'static ForeignField> {
    let name = plain_name(name);
    FOREIGN.iter().find(|field| field.name == name)
}

/// Whether a field is ignored or refused with any value, so that the value is not read.
pub(super) fn is_unread(name: &str) -> bool {
    let handling = foreign(name).map(|field| &field.handling);
    matches!(
        handling,
        Some(Handling::Ignored(_) | Handling::AdapterTensor | Handling::Refused(_))
    )
}

/// The name without the prefix of TensorRT-LLM's LLM API model.
pub(super) fn plain_name(name: &str) -> &str {
    name.strip_prefix("sampling_param_").unwrap_or(name)
}
