//! Limits, each with the text by which the code refuses what is beyond it.

use std::path::Path;
use std::sync::Arc;

use inflight_base::{LoadError, SequenceId, Tokens};
use inflight_config::{AutoComplete, ModelConfig, check_server};
use inflight_engine::{Engine, EngineConfig, NewRequest};
use inflight_manager::ManagerOptions;
use inflight_sampling::{BeamSearch, EarlyStopping, SamplingParams};
use serde_json::{Value, json};

/// The table of limits and refusals in `docs/src/limitations.md`. Each refusal is what the code answers here.
pub fn table() -> String {
    let mut table = String::from("| what is refused | refusal |\n|---|---|\n");
    for (what, refusal) in refusals() {
        table += &format!("| {what} | {} |\n", refusal.replace('|', "\\|"));
    }
    table
}

fn refusals() -> Vec<(&'static str, String)> {
    let risky = json!({ "sequence_batching": {
        "iterative_sequence": true, "max_sequence_idle_microseconds": 3_600_000_000_u64, "oldest": {}
    } });
    let ordered = json!({
        "dynamic_batching": { "preserve_ordering": true }, "model_transaction_policy": { "decoupled": true }
    });
    let idle = json!({ "sequence_batching": {
        "iterative_sequence": true, "max_sequence_idle_microseconds": 1_000, "direct": {}
    } });
    let state = json!({ "sequence_batching": { "state": [{ "input_name": "x" }] } });
    let encoder =
        json!({ "parameters": { "encoder_model_path": { "string_value": "/models/t5" } } });
    let whole = EngineConfig {
        enable_chunked_context: false,
        max_num_tokens: Tokens(256),
        ..EngineConfig::default()
    };
    vec![
        (
            "iterative sequences with the strategy `oldest`",
            of_config(&risky),
        ),
        (
            "streams in order, on servers 25.09 to 26.07",
            text(check_server(&ordered, (2, 61))),
        ),
        (
            "sequences that Triton drops within a step",
            of_config(&idle),
        ),
        ("implicit state of sequences", of_config(&state)),
        ("models with an encoder and a decoder", of_config(&encoder)),
        (
            "a model on more than 16 processes",
            of_load(json!({ "tensor_parallel_size": 8, "pipeline_parallel_size": 4 })),
        ),
        (
            "more stages than layers",
            of_load(json!({ "pipeline_parallel_size": 8 })),
        ),
        (
            "a draft model beside ranks",
            of_load(json!({
                "tensor_parallel_size": 2, "speculation": "draft_model", "draft_model_path": DEMO
            })),
        ),
        (
            "beams of a model with recurrent states",
            of_load_from("tests/fixtures/lfm2", json!({ "max_beam_width": 2 })),
        ),
        (
            "a prompt that leaves no room for output",
            of_request(EngineConfig::default(), 512, None),
        ),
        (
            "a prompt longer than a step, without chunked context",
            of_request(whole, 300, None),
        ),
        (
            "more beams than the model has",
            of_request(EngineConfig::default(), 1, Some(4)),
        ),
    ]
}

const DEMO: &str = "model_repository/stories/1";

/// The refusal of a config.pbtxt with these fields.
fn of_config(fields: &Value) -> String {
    let config = ModelConfig::complete(fields, true).expect("fields are missing");
    text(ModelConfig::parse(&config, AutoComplete::Enabled))
}

/// The refusal of the demo model with these options.
fn of_load(options: Value) -> String {
    of_load_from(DEMO, options)
}

/// The refusal of the model in a folder with these options.
fn of_load_from(folder: &str, mut options: Value) -> String {
    options["gpt_model_path"] = json!(Path::new(env!("CARGO_MANIFEST_DIR")).join(folder));
    let options = ManagerOptions::parse(&options.to_string()).expect("good options");
    text(options.load())
}

/// The refusal of a request with this many tokens.
fn of_request(config: EngineConfig, num_tokens: usize, beam_width: Option<u32>) -> String {
    let mut request = NewRequest::new(SequenceId(1), vec![1; num_tokens], Tokens(1));
    request.sampling = Arc::new(SamplingParams {
        beam_search: beam_width.map(|width| BeamSearch {
            width,
            num_returned: width,
            length_penalty: 1.0,
            early_stopping: EarlyStopping::Likely,
            diversity_rate: 0.0,
        }),
        ..SamplingParams::default()
    });
    let refused = Engine::new(config).add(request);
    refused.expect_err("it must be refused").to_string()
}

fn text<T>(refused: Result<T, LoadError>) -> String {
    match refused {
        Ok(_) => panic!("it must be refused"),
        Err(error) => error.to_string(),
    }
}
