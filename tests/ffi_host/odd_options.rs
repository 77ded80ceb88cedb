//! The real backend in the fake server, with a tokenizer whose vocabulary is larger than the model's: with
//! arbitrary options, each request is answered once, and none affects another.

use std::path::PathBuf;
use std::{env, fs};

use serde_json::json;
use triton_inflight::reference_table;

use crate::INVALID;
use crate::draw::Draw;
use crate::fake_triton::{Correlation, Input, Parameter, Sent, Spec, Where};
use crate::served::{RawRequest, Server, error_code};
use inflight_tests::checkout;

/// The model's vocabulary size; the tokenizer's is ten times as large.
const VOCAB_SIZE: i64 = 160;
const NUM_BATCHES: usize = 300;

/// A checkpoint with two small layers and another model's tokenizer; deleted after the test.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new(test: &str) -> Self {
        let root = checkout();
        let name = format!("inflight-{test}-{}", std::process::id());
        let folder = Self(env::temp_dir().join(name));
        fs::create_dir_all(&folder.0).expect("a folder");
        for file in ["config.json", "generation_config.json", "model.safetensors"] {
            folder.take(&root.join("tests/fixtures/llama3").join(file));
        }
        folder.take(&root.join("model_repository/stories/1/tokenizer.json"));
        folder
    }

    fn take(&self, file: &std::path::Path) {
        let name = file.file_name().expect("a file");
        fs::copy(file, self.0.join(name)).expect("copied");
    }

    fn load(&self) -> Server {
        let path = self.0.to_str().expect("plain text");
        let value = |text: &str| json!({ "string_value": text });
        Server::load_config(&json!({
            "name": "m", "backend": "inflight", "max_batch_size": 8, "input": [], "output": [],
            "parameters": {
                "gpt_model_path": value(path), "tokenizer_dir": value(path), "num_threads": value("1"),
                "max_beam_width": value("4"), "max_tokens_in_paged_kv_cache": value("2048"),
                "default_max_tokens": value("3"), "cpu_instruction_set": value("portable"),
            },
        }))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn request(
    server: &Server,
    number: u64,
    prompt: &str,
    options: Vec<(String, Parameter)>,
) -> RawRequest {
    let name = |name: String| std::ffi::CString::new(name).expect("no NUL");
    server.host.request(Spec {
        correlation: Correlation::Number(number),
        parameters: options
            .into_iter()
            .map(|(key, value)| (name(key), value))
            .collect(),
        inputs: vec![Input::text(prompt)],
        outputs: vec![c"text_output".to_owned(), c"output_ids".to_owned()],
        ..Spec::default()
    })
}

fn text(value: &str) -> Parameter {
    Parameter::String(std::ffi::CString::new(value).expect("no NUL"))
}

/// A prompt of tokens in the model's vocabulary, which the model must be able to serve.
fn known_prompt() -> &'static str {
    "ZQ7"
}

/// Every name in the reference, so that new options are covered automatically.
fn names() -> Vec<String> {
    let names: Vec<_> = reference_table()
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once('`'))
        .map(|(name, _)| name.to_owned())
        .collect();
    assert!(names.len() > 50, "the reference lists the options");
    names
}

/// A token id: known to both, the last one, known only to the tokenizer, or unknown to both.
fn id(draw: &mut Draw) -> i64 {
    match draw.below(6) {
        0..3 => draw.below(VOCAB_SIZE as usize) as i64,
        3 => [VOCAB_SIZE - 1, VOCAB_SIZE][draw.below(2)],
        4 => VOCAB_SIZE + draw.below(1400) as i64,
        _ => [-1, 100_000, i64::from(i32::MAX), i64::MAX][draw.below(4)],
    }
}

fn word(draw: &mut Draw) -> &'static str {
    [
        "a",
        "b",
        " the",
        "<|user|>",
        "dragon",
        "zebra",
        "é",
        "",
        "once upon a time",
    ][draw.below(9)]
}

fn value(draw: &mut Draw) -> Parameter {
    let num = draw.below(4);
    match draw.below(16) {
        0 => Parameter::Bool(draw.one_in(2)),
        1 | 2 => Parameter::Int([0, 1, 2, 3, 4, 7][draw.below(6)]),
        3 => Parameter::Int(id(draw)),
        4 => Parameter::Double([0.0, 0.5, 1.0, 1.5, -1.0, 1e-30][draw.below(6)]),
        5 => Parameter::Double([f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e300][draw.below(4)]),
        6 => text(word(draw)),
        7 => text(&json!((0..num).map(|_| word(draw)).collect::<Vec<_>>()).to_string()),
        8 | 9 => text(&json!((0..num).map(|_| id(draw)).collect::<Vec<_>>()).to_string()),
        10 => {
            let ids: Vec<_> = (0..num).map(|_| id(draw)).collect();
            text(&json!([ids, (1..=num).collect::<Vec<_>>()]).to_string())
        }
        11 => {
            let biases = (0..num).map(|i| (id(draw).to_string(), json!(i as f64 - 1.5)));
            text(&serde_json::Value::Object(biases.collect()).to_string())
        }
        12 => text(
            &json!(vec![
                0.5;
                [VOCAB_SIZE as usize, 159, 161, 1536][draw.below(4)]
            ])
            .to_string(),
        ),
        13 => text(&json!((0..num).map(|i| i as f64 - 1.0).collect::<Vec<_>>()).to_string()),
        14 => text(
            [
                "a+",
                "{\"type\": \"object\"}",
                "root ::= \"a\"",
                "[",
                "never",
                "json",
                "regex",
            ][draw.below(7)],
        ),
        _ => text(&json!([{ "role": "user", "content": word(draw) }]).to_string()),
    }
}

/// Options that only make sense together.
fn some_options(draw: &mut Draw, names: &[String]) -> Vec<(String, Parameter)> {
    let mut options = Vec::new();
    let mut give = |name: &str, value| options.push((name.to_owned(), value));
    match draw.below(6) {
        0 => {
            let words = [word(draw), word(draw)];
            give("embedding_bias_words", text(&json!(words).to_string()));
            give("embedding_bias_weights", text("[1.5, -3.0]"));
            if draw.one_in(2) {
                give(
                    "embedding_bias",
                    text(&json!(vec![0.25; VOCAB_SIZE as usize]).to_string()),
                );
            }
        }
        1 => {
            give("temperature", Parameter::Double(1.0));
            give("n", Parameter::Int(1 + draw.below(4) as i64));
        }
        2 => give("beam_width", Parameter::Int(1 + draw.below(4) as i64)),
        3 => give("stream", Parameter::Bool(true)),
        _ => {}
    }
    for _ in 0..draw.below(4) {
        give(&names[draw.below(names.len())], value(draw));
    }
    // Short, so that many are tried; a request that also sets the limit itself gives it twice.
    if draw.one_in(2) {
        give("max_tokens", Parameter::Int(1 + draw.below(4) as i64));
    }
    options
}

fn last_error(sent: &[Sent]) -> Option<(u32, String)> {
    sent.last().expect("an answer").error.clone()
}

#[test]
fn a_word_with_tokens_outside_the_models_vocabulary_fails_only_its_own_request() {
    let folder = Folder::new("odd-words");
    let server = folder.load();
    let other = request(&server, 1, known_prompt(), Vec::new());
    assert_eq!(server.execute(&[other]), Ok(()));
    let weights = || ("embedding_bias_weights".to_owned(), text("[1.0]"));
    let biases = || {
        let all = json!(vec![0.0; VOCAB_SIZE as usize]).to_string();
        ("embedding_bias".to_owned(), text(&all))
    };
    for (number, (name, others)) in [
        ("embedding_bias_words", vec![weights(), biases()]),
        ("embedding_bias_words", vec![weights()]),
        ("bad_words", vec![]),
    ]
    .into_iter()
    .enumerate()
    {
        let mut options = vec![(name.to_owned(), text("[\"dragon\"]"))];
        options.extend(others);
        let odd = request(&server, 2 + number as u64, known_prompt(), options);
        // The longer ones are prepared by another thread, which may take more than one call.
        server.finish(&[odd]);
        let (code, message) = last_error(&server.host.sent(odd)).expect("refused");
        assert_eq!(code, INVALID, "{message}");
        assert!(message.contains(&format!("option '{name}'")), "{message}");
        assert!(message.contains("vocabulary is 0 to 159"), "{message}");
        assert_eq!(server.ready(), Ok(()));
    }
    server.finish(&[other]);
    server.unload();
    assert_eq!(error_code(&server.host.sent(other)), None);
}

#[test]
fn with_arbitrary_options_every_request_is_answered_once_and_none_affects_another() {
    let folder = Folder::new("odd-options");
    let server = folder.load();
    let names = names();
    let mut draw = Draw::from_seed(11);
    let mut number = 0;
    let mut send = |prompt: &str, options| {
        number += 1;
        request(&server, number, prompt, options)
    };
    let (mut num_served, mut num_refused) = (0, 0);
    let mut expected: Option<Vec<Sent>> = None;
    for batch in 0..NUM_BATCHES {
        let witness = send(known_prompt(), Vec::new());
        let odd: Vec<_> = (0..3)
            .map(|_| {
                let prompt = match draw.one_in(8) {
                    true => word(&mut draw),
                    false => known_prompt(),
                };
                let options = some_options(&mut draw, &names);
                send(prompt, options)
            })
            .collect();
        let all = [&[witness][..], &odd].concat();
        server.finish(&all);
        assert_eq!(server.ready(), Ok(()), "batch {batch}");
        for &request in &all {
            server.wait_for_final(request);
            assert_eq!(server.host.place(request), Where::Released);
        }
        let served = server.host.sent(witness);
        assert_eq!(error_code(&served), None);
        assert_eq!(
            expected.get_or_insert_with(|| served.clone()),
            &served,
            "batch {batch}"
        );
        for request in odd {
            match last_error(&server.host.sent(request)) {
                None => num_served += 1,
                Some((INVALID, _)) => num_refused += 1,
                Some((code, message)) => panic!("batch {batch}: {code}: {message}"),
            }
        }
    }
    assert!(num_served > 100, "only {num_served} served");
    assert!(num_refused > 100, "only {num_refused} refused");
    server.unload();
}
