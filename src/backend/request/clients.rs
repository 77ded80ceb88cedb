//! How each field that clients of TensorRT-LLM's and vLLM's backends send is handled.
//!
//! A field is a request parameter here: a key of a generate request's JSON body, an entry of `parameters`
//! over gRPC. Most are options of ours under the same name. The others are in [`FOREIGN`]: what has no
//! effect here is ignored, with one warning, and what would change the answer is refused.

use std::fmt::Write as _;

use serde_json::Value;

use crate::backend::request::options;
use crate::config::client_inputs::{self, ClientInput};
use crate::config::{InputKind, OutputKind};

/// A field of other backends' clients that is not an option here.
pub(super) struct ForeignField {
    /// Its name.
    pub name: &'static str,
    /// How it is handled.
    pub handling: Handling,
}

/// How a field that is not an option is handled.
pub(super) enum Handling {
    /// It has no effect, for this reason.
    Ignored(&'static str),
    /// It may only ask for the only behaviour that there is.
    Only {
        /// Whether it does.
        is_neutral: fn(&Value) -> bool,
        /// The value that is accepted, worded to follow "is not".
        expected: &'static str,
    },
    /// It is refused, for this reason, with the alternative.
    Refused(&'static str),
}

use Handling::{Ignored, Only, Refused};

const ONLY_SPEED: Handling = Ignored("it only changes how fast the same text is generated");
const EXACT_DRAFTS: Handling = Ignored(
    "a draft token is accepted if it is what would have been generated without it, and never else",
);
const KEPT_BY_USE: Handling =
    Ignored("the KV blocks that were not used for longest are given up first");
const NO_ADAPTERS: Handling =
    Refused("no LoRA adapters are served; serve the merged checkpoint as a model of its own");
const NO_PROMPT_TABLE: Handling =
    Refused("prompts are text or token ids; no embeddings are taken in their place");
const NO_PICTURES: Handling =
    Refused("prompts are text or token ids; no pictures or videos are taken");
const NO_ENCODER: Handling =
    Refused("the models are decoders; write the whole prompt to the input");
const NO_DISAGGREGATION: Handling =
    Refused("context and generation are computed by one server; leave it out");

/// Every field of the other backends' clients that is not an option here.
pub(super) const FOREIGN: &[ForeignField] = &[
    field("Streaming", Ignored("'streaming' says it")),
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
            expected: "context_and_generation: both are computed by one server",
        },
    ),
    field("context_phase_params", NO_DISAGGREGATION),
    field("prompt_embedding_table", NO_PROMPT_TABLE),
    field("prompt_table_extra_ids", NO_PROMPT_TABLE),
    field("prompt_table_extra_id", NO_PROMPT_TABLE),
    field("prompt_vocab_size", NO_PROMPT_TABLE),
    field("lora_task_id", NO_ADAPTERS),
    field("lora_weights", NO_ADAPTERS),
    field("lora_config", NO_ADAPTERS),
    field("lora_id", NO_ADAPTERS),
    field("lora_name", NO_ADAPTERS),
    field("lora_path", NO_ADAPTERS),
    field("lora_ckpt_source", NO_ADAPTERS),
    field("image", NO_PICTURES),
    field("image_input", NO_PICTURES),
    field("image_bytes_input", NO_PICTURES),
    field("image_url_input", NO_PICTURES),
    field("image_url", NO_PICTURES),
    field("video_bytes_input", NO_PICTURES),
    field("mrope_rotary_cos_sin", NO_PICTURES),
    field("mrope_position_deltas", NO_PICTURES),
    field("encoder_input_features", NO_ENCODER),
    field("encoder_output_lengths", NO_ENCODER),
    field("decoder_text_input", NO_ENCODER),
    field("decoder_input_ids", NO_ENCODER),
    field("decoder_input_lengths", NO_ENCODER),
    field("cross_attention_mask", NO_ENCODER),
    field("skip_cross_attn_blocks", NO_ENCODER),
    field(
        "prompt_logprobs",
        Ignored(
            "vLLM's backend has no output for the prompt's log-probabilities; return_context_logits gives its logits",
        ),
    ),
    field(
        "embedding_request",
        Refused("the models generate text; no embeddings are computed"),
    ),
];

const fn field(name: &'static str, handling: Handling) -> ForeignField {
    ForeignField { name, handling }
}

/// The foreign field of this name.
pub(super) fn foreign(name: &str) -> Option<&'static ForeignField> {
    let name = options::plain_name(name);
    FOREIGN.iter().find(|field| field.name == name)
}

/// Whether a field is ignored or refused whatever its value, so that the value is not read.
pub(super) fn is_unread(name: &str) -> bool {
    let handling = foreign(name).map(|field| &field.handling);
    matches!(handling, Some(Handling::Ignored(_) | Handling::Refused(_)))
}

/// The keys of vLLM's `sampling_parameters`.
const SAMPLING_PARAMETERS: &[&str] = &[
    "n",
    "best_of",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "use_beam_search",
    "length_penalty",
    "early_stopping",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "max_tokens",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "structured_outputs",
    "guided_decoding",
    "lora_name",
];

/// The outputs of TensorRT-LLM's models.
const TENSORRT_LLM_OUTPUTS: &[&str] = &[
    "text_output",
    "output_ids",
    "sequence_length",
    "cum_log_probs",
    "output_log_probs",
    "context_logits",
    "generation_logits",
    "batch_index",
    "sequence_index",
    "num_input_tokens",
    "num_output_tokens",
    "finish_reason",
    "stop_reason",
    "cumulative_logprob",
    "kv_cache_alloc_new_blocks",
    "kv_cache_reused_blocks",
    "kv_cache_alloc_total_blocks",
    "arrival_time_ns",
    "first_scheduled_time_ns",
    "first_token_time_ns",
    "last_token_time_ns",
    "acceptance_rate",
    "total_accepted_draft_tokens",
    "total_draft_tokens",
    "context_phase_params",
];

/// The outputs of vLLM's backend.
const VLLM_OUTPUTS: &[&str] = &[
    "text_output",
    "finish_reason",
    "cumulative_logprob",
    "logprobs",
    "num_input_tokens",
    "num_output_tokens",
];

/// The tables of `docs/src/clients.md`: the name and the content of each section.
pub fn client_tables() -> Vec<(&'static str, String)> {
    vec![
        ("ensemble", input_table(client_inputs::ENSEMBLE)),
        ("tensorrt_llm", input_table(client_inputs::TENSORRT_LLM)),
        ("llm_api", input_table(client_inputs::LLM_API)),
        ("vllm", input_table(client_inputs::VLLM)),
        ("batch_manager", input_table(client_inputs::BATCH_MANAGER)),
        ("sampling_parameters", key_table(SAMPLING_PARAMETERS)),
        ("tensorrt_llm_outputs", output_table(TENSORRT_LLM_OUTPUTS)),
        ("vllm_outputs", output_table(VLLM_OUTPUTS)),
    ]
}

fn input_table(inputs: &[ClientInput]) -> String {
    let mut table = String::from("| field | tensor | here |\n|---|---|---|\n");
    for input in inputs {
        let kind = input.data_type.trim_start_matches("TYPE_");
        let handling = handling_of(input.name);
        // Writing to a String cannot fail.
        let _ = writeln!(
            table,
            "| `{}` | {kind} {:?} | {handling} |",
            input.name, input.dims
        );
    }
    table
}

fn key_table(keys: &[&str]) -> String {
    let mut table = String::from("| key | here |\n|---|---|\n");
    for key in keys {
        let _ = writeln!(table, "| `{key}` | {} |", handling_of(key));
    }
    table
}

fn output_table(outputs: &[&str]) -> String {
    let mut table = String::from("| output | here |\n|---|---|\n");
    for name in outputs {
        let handling = match OutputKind::from_name(name) {
            Some(kind) if kind.is_never_sent() => {
                "may be declared, and is never given: a request has one prompt, and one server"
            }
            Some(_) => "the same",
            None => "not given",
        };
        let _ = writeln!(table, "| `{name}` | {handling} |");
    }
    table
}

/// How a field is handled, in words.
fn handling_of(name: &str) -> String {
    let is_prompt = [InputKind::Text, InputKind::Ids].map(InputKind::name);
    if is_prompt.contains(&name) {
        return "the prompt".to_owned();
    }
    if let Some(option) = options::canonical_name(name) {
        return format!("option `{option}`");
    }
    match foreign(name).map(|field| &field.handling) {
        Some(Ignored(reason)) => format!("ignored, with a warning: {reason}"),
        Some(Only { expected, .. }) => format!("only {expected}"),
        Some(Refused(reason)) => format!("refused: {reason}"),
        None => "unknown, and refused".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::request::options::RequestOptions;
    use crate::base::RequestError;
    use serde_json::json;

    fn parse(name: &str, value: Value) -> Result<RequestOptions, RequestError> {
        RequestOptions::parse([(name, value)])
    }

    /// Every field of every table.
    fn all_fields() -> Vec<&'static str> {
        let inputs = [
            client_inputs::ENSEMBLE,
            client_inputs::TENSORRT_LLM,
            client_inputs::LLM_API,
            client_inputs::VLLM,
            client_inputs::BATCH_MANAGER,
        ];
        let inputs = inputs.into_iter().flatten().map(|input| input.name);
        inputs.chain(SAMPLING_PARAMETERS.iter().copied()).collect()
    }

    #[test]
    fn no_field_of_another_backend_is_unknown() {
        for name in all_fields() {
            assert!(!handling_of(name).contains("unknown"), "{name}");
        }
    }

    #[test]
    fn a_foreign_field_is_no_option_and_stands_once_in_the_list_and_in_a_table() {
        let fields = all_fields();
        for (i, field) in FOREIGN.iter().enumerate() {
            let name = field.name;
            assert_eq!(options::canonical_name(name), None, "{name}");
            assert!(
                FOREIGN[..i].iter().all(|other| other.name != name),
                "{name}"
            );
            // This one is a parameter that the clients of the tensorrt_llm model send.
            let is_parameter = ["request_type", "Streaming"].contains(&name);
            assert!(is_parameter || fields.contains(&name), "{name}");
        }
    }

    #[test]
    fn a_foreign_field_meets_the_fate_that_the_table_says() {
        for ForeignField { name, handling } in FOREIGN {
            match handling {
                Ignored(_) => {
                    let mut options = parse(name, json!(7)).expect("accepted");
                    assert_eq!(std::mem::take(&mut options.ignored), [*name]);
                    assert_eq!(options, RequestOptions::default());
                }
                Only { expected, .. } => {
                    let value = expected.split(':').next().expect("a value");
                    assert_eq!(parse(name, json!(value)), Ok(RequestOptions::default()));
                    let error = parse(name, json!(7)).expect_err("refused").to_string();
                    assert!(
                        error.contains(&format!("'{name}': 7 is not {expected}")),
                        "{error}"
                    );
                }
                Refused(reason) => {
                    let error = parse(name, json!(7)).expect_err("refused").to_string();
                    assert_eq!(error, format!("option '{name}': {reason}"));
                }
            }
        }
    }
}
