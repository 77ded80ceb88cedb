//! The real backend in the fake server, with requests that bring a LoRA adapter, which is copied over several steps.

use std::fs;

use inflight_base::TokenId;
use inflight_tests::checkout;
use inflight_triton::DataType;
use serde::Deserialize;
use serde_json::json;

use crate::fake_triton::{Input, Parameter, Spec};
use crate::served::{ClientRequest, Server, error_code, output_ids};

/// The bytes before the values of the fixture's arrays.
const HEADER_BYTES: usize = 128;

/// Bytes of a row of the weights, with many that no module reads: a step copies less than all rows.
const ROW_BYTES: usize = 2 << 20;

#[derive(Deserialize)]
struct Expected {
    prompts: Vec<Text>,
}

#[derive(Deserialize)]
struct Text {
    prompt: Vec<TokenId>,
    greedy: Vec<TokenId>,
}

fn load() -> Server {
    let model = checkout().join("tests/fixtures/phi3");
    let input = |name, data_type, dims: &[i64]| {
        json!({
            "name": name, "data_type": data_type, "dims": dims,
            "optional": name != "input_ids", "allow_ragged_batch": true,
        })
    };
    Server::load_config(&json!({
        "name": "m", "backend": "inflight", "max_batch_size": 8, "output": [],
        "dynamic_batching": {},
        "input": [
            input("input_ids", "TYPE_INT32", &[-1]),
            input("lora_weights", "TYPE_BF16", &[-1, -1]),
            input("lora_config", "TYPE_INT32", &[-1, 3]),
        ],
        "parameters": { "gpt_model_path": { "string_value": model } },
    }))
}

/// A request with an adapter by its number.
fn naming(server: &mut Server, text: &Text) -> Spec {
    let mut spec = server.spec(&ClientRequest {
        prompt: text.prompt.clone(),
        max_tokens: text.greedy.len(),
        stream: false,
        num_sequences: 1,
    });
    let options = [
        (c"lora_task_id", Parameter::Int(5)),
        (c"ignore_eos", Parameter::Bool(true)),
    ];
    let options = options.map(|(name, value)| (name.to_owned(), value));
    spec.parameters.extend(options);
    spec
}

/// A request with an adapter, which it brings.
fn bringing(server: &mut Server, text: &Text) -> Spec {
    let folder = checkout().join("tests/fixtures/adapters/rows");
    let values = |name| fs::read(folder.join(name)).expect("a fixture")[HEADER_BYTES..].to_vec();
    let config = values("model.lora_config.npy");
    let num_rows = config.len() / (3 * size_of::<i32>());
    let weights = values("model.lora_weights.npy");
    let rows = weights.chunks(weights.len() / num_rows).map(|row| {
        let mut row = row.to_vec();
        row.resize(ROW_BYTES, 0);
        row
    });
    let weights = rows.collect::<Vec<_>>().concat();
    let num_columns = (ROW_BYTES / size_of::<u16>()) as i64;
    let mut spec = naming(server, text);
    let inputs = [
        (c"lora_weights", DataType::Bf16, num_columns, weights),
        (c"lora_config", DataType::Int32, 3, config),
    ];
    spec.inputs
        .extend(inputs.map(|(name, data_type, num_columns, values)| Input {
            name: name.to_owned(),
            data_type,
            shape: vec![1, num_rows as i64, num_columns],
            buffers: vec![values],
            on_gpu: false,
        }));
    spec
}

#[test]
fn requests_that_bring_an_adapter_are_computed_with_it_beside_others() {
    let json = checkout().join("tests/fixtures/adapters/rows/expected.json");
    let json = fs::read_to_string(json).expect("a fixture");
    let texts = serde_json::from_str::<Expected>(&json)
        .expect("a fixture")
        .prompts;
    let mut server = load();
    let specs = texts.iter().map(|text| bringing(&mut server, text));
    let specs: Vec<_> = specs.collect();
    let mut requests: Vec<_> = specs
        .into_iter()
        .map(|it| server.host.request(it))
        .collect();
    let plain = server.request(&ClientRequest::of_lengths(4, 30, true));
    let batch = [&[plain][..], &requests].concat();
    assert_eq!(server.execute(&batch), Ok(()));
    batch.iter().for_each(|it| server.wait_for_final(*it));
    // The model has it now.
    for text in &texts {
        let spec = naming(&mut server, text);
        requests.push(server.host.request(spec));
    }
    let later = &requests[texts.len()..];
    assert_eq!(server.execute(later), Ok(()));
    later.iter().for_each(|it| server.wait_for_final(*it));
    server.unload();
    for (text, request) in texts.iter().chain(&texts).zip(requests) {
        let sent = server.host.sent(request);
        assert_eq!(
            (error_code(&sent), output_ids(&sent)),
            (None, text.greedy.clone())
        );
    }
}
