//! The real backend in the fake server: models that embed.

use std::ffi::CString;

use inflight_config::{OutputKind, Task};
use inflight_tests::checkout;
use inflight_triton::DataType;
use serde_json::json;

use crate::INVALID;
use crate::fake_triton::{Correlation, Input, Parameter, Sent, Spec};
use crate::served::Server;

fn load() -> Server {
    load_task("embed", "embeddings/qwen3")
}

/// A server with a fixture.
pub fn load_task(task: &str, fixture: &str) -> Server {
    load_task_with(task, fixture, &[])
}

/// The same with more parameters.
pub fn load_task_with(task: &str, fixture: &str, parameters: &[(&str, &str)]) -> Server {
    let fixtures = checkout().join("tests/fixtures");
    let folder = fixtures.join(fixture);
    let folder = folder.to_str().expect("plain text");
    let value = |text: &str| json!({ "string_value": text });
    let mut config = json!({
        "name": "m", "backend": "inflight", "max_batch_size": 8, "input": [], "output": [],
        "parameters": {
            "task": value(task), "gpt_model_path": value(folder), "tokenizer_dir": value(folder),
            "num_threads": value("1"), "cpu_instruction_set": value("portable"),
            "max_tokens_in_paged_kv_cache": value("1024"),
        },
    });
    for (name, text) in parameters {
        config["parameters"][name] = value(text);
    }
    Server::load_config(&config)
}

fn ask(server: &Server, texts: &[&str], options: &[(&str, Parameter)]) -> Vec<Vec<Sent>> {
    ask_task(server, Task::Embed, texts, options)
}

/// The responses to requests that are sent together.
pub fn ask_task(
    server: &Server,
    task: Task,
    texts: &[&str],
    options: &[(&str, Parameter)],
) -> Vec<Vec<Sent>> {
    let requests: Vec<_> = (1..)
        .zip(texts)
        .map(|(number, text)| server.host.request(spec(task, number, text, options)))
        .collect();
    server.finish(&requests);
    let sent = requests.iter().map(|&request| {
        server.wait_for_final(request);
        server.host.sent(request)
    });
    sent.collect()
}

/// A request for a text.
pub fn spec(task: Task, number: u64, text: &str, options: &[(&str, Parameter)]) -> Spec {
    let outputs = OutputKind::ALL.into_iter();
    let outputs = outputs.filter(|kind| kind.is_of(task));
    let options = options
        .iter()
        .map(|(name, value)| (CString::new(*name).expect("no NUL"), value.clone()));
    Spec {
        correlation: Correlation::Number(number),
        parameters: options.collect(),
        inputs: vec![Input::text(text)],
        outputs: outputs.map(|kind| kind.c_name().to_owned()).collect(),
        ..Spec::default()
    }
}

/// The embedding in the final response, the only one. Those of an earlier request at the same address come before it.
fn embedding(sent: &[Sent]) -> Vec<f32> {
    let sent = sent.last().expect("a response");
    assert!(sent.is_final);
    let mut outputs = sent.outputs.iter();
    let found = outputs.find(|(name, ..)| name == "embedding");
    let (_, data_type, shape, bytes) = found.unwrap_or_else(|| panic!("no embedding: {sent:?}"));
    let (values, _) = bytes.as_chunks();
    let values: Vec<_> = values
        .iter()
        .map(|value| f32::from_le_bytes(*value))
        .collect();
    assert_eq!(
        (*data_type, &shape[..]),
        (DataType::Fp32, &[1, values.len() as i64][..])
    );
    values
}

fn length(vector: &[f32]) -> f32 {
    vector.iter().map(|it| it * it).sum::<f32>().sqrt()
}

#[test]
fn a_request_gets_the_embedding_of_its_text() {
    let server = load();
    let texts = [
        "a b c",
        "z",
        "a b c d e f g h i j k l m n o p q r s t u v w x y z",
    ];
    let together = ask(&server, &texts, &[]);
    let embeddings: Vec<_> = together.iter().map(|sent| embedding(sent)).collect();
    for (text, expected) in texts.iter().zip(&embeddings) {
        assert_eq!(expected.len(), 32);
        assert!((length(expected) - 1.0).abs() < 1e-5, "normalised");
        let alone = embedding(&ask(&server, &[text], &[])[0]);
        assert_eq!(&alone, expected, "the same bits alone, after reuse");
    }
    let outputs = &together[0][0].outputs;
    let names: Vec<_> = outputs.iter().map(|(name, ..)| name).collect();
    assert_eq!(names, ["num_input_tokens", "embedding"]);
    // Three words, and the end token of the tokenizer's template.
    assert_eq!(outputs[0].3, 4i32.to_le_bytes());
    server.unload();
}

#[test]
fn an_encoder_embeds_texts_of_mixed_lengths_together_and_cuts_those_that_are_too_long() {
    let server = load_task("embed", "encoders/bert");
    let long = "a ".repeat(200);
    let texts: Vec<_> = (1..40).map(|num| &long[..2 * num]).collect();
    let together = ask(&server, &texts, &[]);
    for (text, sent) in texts.iter().zip(&together) {
        let expected = embedding(sent);
        assert!((length(&expected) - 1.0).abs() < 1e-5, "normalised");
        let alone = embedding(&ask(&server, &[text], &[])[0]);
        assert_eq!(alone, expected, "the same bits alone");
    }
    // The checkpoint says 98 tokens, two of which are the template's.
    let [most, cut] = [&long[..2 * 96], &long].map(|text| ask(&server, &[text], &[]).remove(0));
    assert_eq!(embedding(&cut), embedding(&most));
    let shorter = ask(&server, &[&long[..2 * 95]], &[]).remove(0);
    assert_ne!(embedding(&shorter), embedding(&most));
    server.unload();
}

#[test]
fn a_request_may_ask_for_some_dimensions_and_for_the_length() {
    let server = load();
    let ask = |options: &[(&str, Parameter)]| embedding(&ask(&server, &["a b"], options)[0]);
    let (number, flag) = (Parameter::Int, Parameter::Bool);
    let whole = ask(&[("normalize", flag(false))]);
    assert!(length(&whole) > 2.0, "not normalised");
    let some = ask(&[("normalize", flag(false)), ("dimensions", number(5))]);
    assert_eq!(some, whole[..5]);
    let normalised = ask(&[("dimensions", number(5))]);
    for (a, b) in normalised.iter().zip(&some) {
        assert!((a - b / length(&some)).abs() < 1e-6);
    }
    server.unload();
}

#[test]
fn options_of_generation_are_refused_and_so_are_those_of_embeddings_elsewhere() {
    let server = load();
    let text = |text: &str| Parameter::String(CString::new(text).expect("no NUL"));
    for (name, value, part) in [
        ("stream", Parameter::Bool(true), "'stream'"),
        ("n", Parameter::Int(2), "'n'"),
        ("guided_regex", text("a*"), "embed"),
        ("dimensions", Parameter::Int(33), "have 32"),
        ("text_pair", text("b"), "score or classify"),
        ("raw_scores", Parameter::Bool(true), "score or classify"),
        ("beam_width", Parameter::Int(2), "max_beam_width"),
        (
            "return_log_probs",
            Parameter::Bool(true),
            "no output 'output_log_probs'",
        ),
    ] {
        let sent = ask(&server, &["a"], &[(name, value)]);
        let (code, message) = sent[0]
            .last()
            .and_then(|sent| sent.error.clone())
            .expect(name);
        assert_eq!(code, INVALID, "{message}");
        assert!(message.contains(part), "{message}");
    }
    // The model goes on.
    embedding(&ask(&server, &["a"], &[])[0]);
    server.unload();
}
