//! Checkpoints whose JSON files and chat templates start with a byte order mark, as some editors write it: they are
//! read as without.

use std::fs;
use std::path::Path;

use inflight_checkpoint::AdapterFiles;
use inflight_runner::{ModelSource, PreparedAdapter};
use inflight_text::{ChatTemplates, Conversation, Tokenizer};
use serde_json::json;

use crate::copy::Copy;
use crate::devices::requests;
use crate::family_gguf;
use crate::quantised::with_section_in;
use crate::support::{Served, Setup, fixture, serve};

const MARK: &[u8] = b"\xef\xbb\xbf";

/// Marks all JSON files and templates of a folder and of the folders in it; returns their names.
fn mark(dir: &Path) -> Vec<String> {
    let mut marked = Vec::new();
    for entry in fs::read_dir(dir).expect("a folder") {
        let path = entry.expect("a file").path();
        if path.is_dir() {
            marked.extend(mark(&path));
        } else if path
            .extension()
            .is_some_and(|it| it == "json" || it == "jinja")
        {
            let text = fs::read(&path).expect("a file");
            fs::write(&path, [MARK, &text[..]].concat()).expect("written");
            let name = path.file_name().and_then(|it| it.to_str());
            marked.push(name.expect("a name").to_owned());
        }
    }
    marked
}

fn served(dir: &Path) -> Vec<Served> {
    let setup = Setup::default();
    serve(&mut setup.load_from(dir), &setup, &requests()).0
}

/// Marks the files of a copy, among them `names`, and compares its tokens and logits with those of before.
fn serves_the_same(copy: &Copy, names: &[&str]) {
    let expected = served(copy.dir());
    let marked = mark(copy.dir());
    for name in names {
        assert!(marked.iter().any(|it| it == name), "{name}: {marked:?}");
    }
    assert!(served(copy.dir()) == expected, "{names:?}");
}

#[test]
fn a_model_with_marked_files_gives_the_same_tokens() {
    serves_the_same(
        &Copy::of("sharded"),
        &[
            "config.json",
            "generation_config.json",
            "model.safetensors.index.json",
        ],
    );
    serves_the_same(
        &family_gguf::gguf_with_config("phi3"),
        &["config.json", "generation_config.json"],
    );
    let gptq = "quantised/gptq-act-order";
    let gptq = with_section_in(gptq, "quantize_config.json", |section| section);
    serves_the_same(&gptq, &["config.json", "quantize_config.json"]);
    let awq = with_section_in("quantised/awq", "quant_config.json", |section| {
        json!({
            "zero_point": section["zero_point"], "q_group_size": section["group_size"],
            "w_bit": section["bits"], "version": "GEMM",
        })
    });
    serves_the_same(&awq, &["config.json", "quant_config.json"]);
}

#[test]
fn the_end_of_a_text_is_read_from_a_marked_file() {
    let copy = Copy::of("llama2").json("generation_config.json", json!({"eos_token_id": [7, 9]}));
    mark(copy.dir());
    let source = ModelSource::open(copy.dir()).expect("it opens");
    assert_eq!(source.end_ids(), [7, 9]);
}

#[test]
fn an_embedder_with_marked_files_is_the_same() {
    let open = |dir: &Path| {
        let source = ModelSource::open_embedder(dir, None, None).expect("it opens");
        (source.max_text_tokens(), format!("{:?}", source.spec()))
    };
    let copy = Copy::of("embeddings/qwen3");
    let expected = open(copy.dir());
    let marked = mark(copy.dir());
    for name in ["modules.json", "sentence_bert_config.json"] {
        assert!(marked.iter().any(|it| it == name), "{marked:?}");
    }
    assert_eq!(open(copy.dir()), expected);
}

#[test]
fn an_adapter_with_a_marked_file_is_the_same() {
    let source = ModelSource::open(&fixture("llama3")).expect("the fixture opens");
    let load = |dir: &Path| {
        let files = AdapterFiles::open(dir, 64).expect("the adapter opens");
        let prepared = PreparedAdapter::new(&files, &source).expect("it is for this model");
        prepared.num_bytes()
    };
    let copy = Copy::of("adapters/rank-33");
    let expected = load(copy.dir());
    assert!(
        mark(copy.dir())
            .iter()
            .any(|it| it == "adapter_config.json")
    );
    assert_eq!(load(copy.dir()), expected);
}

#[test]
fn a_draft_head_with_a_marked_file_is_the_same() {
    let copy = Copy::of("draft-heads/right");
    mark(copy.dir());
    let source = ModelSource::open(&copy.path("model")).expect("it opens");
    assert!(source.with_draft_head(&copy.path("head")).is_ok());
}

#[test]
fn a_tokenizer_with_marked_files_is_the_same() {
    let tokens = |dir: &Path| {
        let tokenizer = Tokenizer::load(dir).expect("it loads");
        tokenizer.encode("a b\u{feff}", true).expect("tokens")
    };
    let copy = Copy::of("embeddings/qwen3");
    let expected = tokens(copy.dir());
    assert!(mark(copy.dir()).iter().any(|it| it == "tokenizer.json"));
    assert_eq!(tokens(copy.dir()), expected);
}

#[test]
fn marks_are_not_a_part_of_chat_templates() {
    let copy = Copy::of("llama2");
    let prompt = || {
        let templates = ChatTemplates::load(copy.dir()).expect("they load");
        let rendered = templates.map(|it| it.render(&Conversation::default()));
        rendered.transpose().expect("a prompt")
    };
    let write = |name: &str, text: &str| fs::write(copy.path(name), text).expect("written");
    write(
        "tokenizer_config.json",
        r#"{"bos_token": "<s>", "chat_template": "in the config {{ bos_token }}{{ eos_token }}"}"#,
    );
    write("special_tokens_map.json", r#"{"eos_token": "</s>"}"#);
    mark(copy.dir());
    assert_eq!(prompt().as_deref(), Some("in the config <s></s>"));
    write("chat_template.jinja", "\u{feff}in a file {{ bos_token }}");
    assert_eq!(prompt().as_deref(), Some("in a file <s>"));
}
