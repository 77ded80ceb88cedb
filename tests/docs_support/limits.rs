//! Limits, each with the text by which the code refuses what is beyond it.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use inflight_base::{LoadError, SequenceId, Tokens};
use inflight_checkpoint::AdapterFiles;
use inflight_collective::Grid;
use inflight_config::{AutoComplete, ModelConfig, check_server};
use inflight_device::Tiling;
use inflight_engine::{Engine, EngineConfig, NewRequest};
use inflight_manager::ManagerOptions;
use inflight_manager::sizing::{load_runner, open_model_source};
use inflight_runner::{AdapterRoom, ModelSource, PreparedAdapter};
use inflight_sampling::{BeamSearch, EarlyStopping, SamplingParams};
use serde_json::{Value, json};
use triton_inflight::RequestOptions;

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
    let shifting = json!({
        "sink_token_length": 4, "max_attention_window_size": 16, "enable_sink_token_shift": true
    });
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
            "a file of a KV cache with recurrent states",
            of_model(
                "lfm2",
                json!({ "kv_cache_file": "states.kv", "kv_cache_host_memory_bytes": 1 << 20 }),
            ),
        ),
        (
            "recurrent states whose heads have one norm, divided over ranks",
            of_two_ranks("granite4-dense"),
        ),
        (
            "CPU-only operations on several ranks",
            of_two_ranks("llama4"),
        ),
        (
            "a pooling model on several ranks",
            of_model(
                "embeddings/qwen3",
                json!({ "task": "embed", "tensor_parallel_size": 2 }),
            ),
        ),
        (
            "attention sinks that shift, with learned positions",
            of_model("gpt2", shifting.clone()),
        ),
        (
            "attention sinks that shift, with latent attention",
            of_model("deepseek-v2", shifting),
        ),
        ("an adapter of experts", of_adapter("mlp.experts.0.up_proj")),
        (
            "beams with a guide",
            of_options(&[("beam_width", json!(4)), ("guided_regex", json!("a+"))]),
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
fn of_load(mut options: Value) -> String {
    options["gpt_model_path"] = json!(Path::new(env!("CARGO_MANIFEST_DIR")).join(DEMO));
    let options = ManagerOptions::parse(&options.to_string()).expect("good options");
    text(options.load())
}

/// The refusal of the model of a fixture with these parameters of config.pbtxt.
fn of_model(fixture: &str, mut parameters: Value) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = root.join("tests/fixtures").join(fixture);
    parameters["gpt_model_path"] = json!(folder);
    let parameters = parameters.as_object().expect("parameters").iter();
    let text_of = |value: &Value| value.as_str().map_or(value.to_string(), str::to_owned);
    let parameters: Value = parameters
        .map(|(name, value)| (name.clone(), json!({ "string_value": text_of(value) })))
        .collect();
    let fields = json!({ "parameters": parameters });
    let config = ModelConfig::complete(&fields, true).expect("fields are missing");
    let mut config = ModelConfig::parse(&config, AutoComplete::Enabled).expect("good parameters");
    let source = open_model_source(&mut config, &folder, 1).expect("the fixture opens");
    let program = Path::new("inflight-rank");
    let room = AdapterRoom::default();
    text(load_runner(
        &config,
        source.as_ref(),
        &folder,
        None,
        room,
        program,
    ))
}

/// The refusal of the model of a fixture on two ranks that share each layer.
fn of_two_ranks(fixture: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let source = ModelSource::open(&root.join("tests/fixtures").join(fixture)).expect("it opens");
    text(source.check_ranks(Grid::from(2), Tiling::of_cpus(false)))
}

/// The refusal of an adapter that changes this module in the layers of a mixture of experts.
fn of_adapter(module: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("adapter-of-experts");
    fs::create_dir_all(&folder).expect("a folder");
    let config =
        json!({ "peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["up_proj"] });
    fs::write(folder.join("adapter_config.json"), config.to_string()).expect("a file");
    let path = format!("base_model.model.model.layers.0.{module}");
    let tensors = json!({
        format!("{path}.lora_A.weight"): { "dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4] },
        format!("{path}.lora_B.weight"): { "dtype": "F32", "shape": [1, 1], "data_offsets": [4, 8] },
    });
    let header = tensors.to_string();
    let bytes = [
        &(header.len() as u64).to_le_bytes()[..],
        header.as_bytes(),
        &[0; 8],
    ]
    .concat();
    fs::write(folder.join("adapter_model.safetensors"), bytes).expect("a file");
    let source = ModelSource::open(&root.join("tests/fixtures/qwen2-moe")).expect("it opens");
    let files = AdapterFiles::open(&folder, 64).expect("an adapter");
    text(PreparedAdapter::new(&files, &source)).replace(&folder.display().to_string(), "adapter")
}

/// The refusal of a request with these options.
fn of_options(options: &[(&str, Value)]) -> String {
    let options = RequestOptions::parse(options.iter().cloned()).expect("good options");
    let refused = options.beam_search(4).expect_err("it must be refused");
    refused.to_string()
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
