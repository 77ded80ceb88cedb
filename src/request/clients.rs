//! How each field that clients of TensorRT-LLM's and vLLM's backends send is handled.
//!
//! A field is a request parameter here: a key of a generate request's JSON body, an entry of `parameters`
//! over gRPC. Most are options here, with the same name. The others are in `foreign_fields.rs`.

use std::fmt::Write as _;

use crate::request::foreign_fields::{Handling, foreign};
use crate::request::options;
use inflight_config::client_inputs::{self, ClientInput};
use inflight_config::{InputKind, OutputKind};

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
                "may be declared, but is never sent: a request has one prompt and one server"
            }
            Some(_) => "the same",
            None => "not sent",
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
        Some(Handling::Ignored(reason)) => format!("ignored, with a warning: {reason}"),
        Some(Handling::Only { expected, .. }) => format!("only {expected}"),
        Some(Handling::AdapterTensor) => {
            "the same, a tensor only: the adapter `lora_task_id`".to_owned()
        }
        Some(Handling::Refused(reason)) => format!("refused: {reason}"),
        None => "unknown; refused".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::foreign_fields::{FOREIGN, ForeignField};
    use crate::request::options::RequestOptions;
    use inflight_base::RequestError;
    use serde_json::{Value, json};

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
    fn a_foreign_field_is_not_an_option_and_is_listed_once() {
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
    fn a_foreign_field_is_handled_as_the_table_says() {
        for ForeignField { name, handling } in FOREIGN {
            match handling {
                Handling::Ignored(_) => {
                    let mut options = parse(name, json!(7)).expect("accepted");
                    assert_eq!(std::mem::take(&mut options.ignored), [*name]);
                    assert_eq!(options, RequestOptions::default());
                }
                Handling::Only { expected, .. } => {
                    let value = expected.split(':').next().expect("a value");
                    assert_eq!(parse(name, json!(value)), Ok(RequestOptions::default()));
                    let error = parse(name, json!(7)).expect_err("refused").to_string();
                    assert!(
                        error.contains(&format!("'{name}': 7 is not {expected}")),
                        "{error}"
                    );
                }
                Handling::AdapterTensor => {
                    let error = parse(name, json!(7)).expect_err("refused").to_string();
                    assert!(error.contains("two input tensors"), "{error}");
                }
                Handling::Refused(reason) => {
                    let error = parse(name, json!(7)).expect_err("refused").to_string();
                    assert_eq!(error, format!("option '{name}': {reason}"));
                }
            }
        }
    }
}
