//! Microseconds per token of a guide, over a vocabulary of Llama 3's size.
//!
//! `cargo bench --bench guidance`. *Worked out* is the part that overlaps the model: computing which tokens
//! may follow an output that has grown by one token. *Applied* is the part that the sampler waits for. Each
//! figure is the mean over one output of the guide, from its first token to its last. *Step* is the
//! computation for several sequences of one request in a step that adds one token to each: the mean over
//! outputs of 128 tokens.

use std::collections::BTreeSet;
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use inflight_guidance::{Compiler, GuideSpec};
use inflight_sampling::Guide;
use inflight_text::Tokenizer;
use serde_json::{Value, json};

const VOCAB_SIZE: usize = 128_256;
const END_ID: u32 = 0;
const OUTPUT_LEN: usize = 128;

fn guidance(criterion: &mut Criterion) {
    let dir = tokenizer_folder();
    let tokenizer = Arc::new(Tokenizer::load(&dir).expect("it loads"));
    let compiler = Compiler::new(tokenizer.clone(), VOCAB_SIZE as u32);
    let schema = json!({"type": "object", "required": ["name", "age", "tags"], "properties": {
        "name": {"type": "string"}, "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}}}});
    let json_ebnf = "root ::= value\nvalue ::= object | array | string | number | \"true\" | \"null\"\n\
        object ::= \"{\" ws (member (\",\" ws member)*)? \"}\" ws\nmember ::= string \":\" ws value\n\
        array ::= \"[\" ws (value (\",\" ws value)*)? \"]\" ws\n\
        string ::= \"\\\"\" [^\"\\\\\\n]* \"\\\"\" ws\nnumber ::= \"-\"? [0-9]+ ws\nws ::= [ \\n]*";
    let object = r#"{"name": "a brave fox named Finn", "age": 7, "tags": ["red", "blue"]}"#;
    let cases = [
        ("JSON schema", GuideSpec::JsonSchema(schema), object),
        (
            "JSON as EBNF",
            GuideSpec::Grammar(json_ebnf.to_owned()),
            object,
        ),
        (
            "regex",
            GuideSpec::Regex(r"([a-z]+ )+[a-z]+\.".to_owned()),
            "the quick brown fox jumps.",
        ),
        (
            "choice",
            GuideSpec::Choice(vec!["yes".into(), "no".into(), "perhaps".into()]),
            "perhaps",
        ),
    ];
    for (name, spec, text) in cases {
        let tokens = tokenizer.encode(text, false).expect("tokens");
        let start = Instant::now();
        drop(guide(&compiler, &spec));
        eprintln!(
            "{name}: compiled in {} us, {} tokens",
            start.elapsed().as_micros(),
            tokens.len()
        );
        let mut group = criterion.benchmark_group(name);
        group.bench_function("worked out", |bencher| {
            bencher.iter_custom(|num| timed(num, &guide(&compiler, &spec), &tokens, false));
        });
        group.bench_function("applied", |bencher| {
            bencher.iter_custom(|num| timed(num, &guide(&compiler, &spec), &tokens, true));
        });
        group.finish();
    }
    let words = GuideSpec::Regex(r"([a-z]+ )+[a-z]+\.".to_owned());
    let mut group = criterion.benchmark_group("step");
    group.sample_size(10);
    for num_sequences in [1, 16, 17, 64] {
        let outputs = outputs(&tokenizer, num_sequences);
        group.bench_function(format!("{num_sequences} sequences"), |bencher| {
            bencher.iter_custom(|num| steps(num, || guide(&compiler, &words), &outputs));
        });
    }
    group.finish();
    let _ = std::fs::remove_dir_all(dir);
}

/// `num` texts of words, all different, `OUTPUT_LEN` tokens each.
fn outputs(tokenizer: &Tokenizer, num: usize) -> Vec<Vec<u32>> {
    let words = ["fox", "tree", "little", "quick", "house", "dragon", "girl"];
    let text = |sequence: usize| -> String {
        let word = |n: usize| words[(n * (1 + sequence % 6) + n / 7 + sequence / 6) % 7];
        let all: Vec<_> = (0..OUTPUT_LEN + 1).map(word).collect();
        all.join(" ")
    };
    let tokens = |sequence| tokenizer.encode(&text(sequence), false).expect("tokens");
    (0..num).map(|n| tokens(n)[..OUTPUT_LEN].to_vec()).collect()
}

/// Mean time of the steps of all `outputs`, times `num`. Each step computes the masks of all outputs after
/// one more token.
fn steps(num: u64, guide: impl Fn() -> Guide, outputs: &[Vec<u32>]) -> Duration {
    let mut time = Duration::ZERO;
    for _ in 0..num {
        let guide = guide();
        let guides: Vec<_> = outputs.iter().map(|_| guide.0.fresh()).collect();
        let start = Instant::now();
        for n in 0..OUTPUT_LEN {
            for (guide, output) in guides.iter().zip(outputs) {
                guide.0.prepare(&output[..n], &[]);
            }
        }
        time += start.elapsed();
    }
    time / OUTPUT_LEN as u32
}

/// Time of `num` tokens, one output after the other, for one half of the work.
fn timed(num: u64, guide: &Guide, tokens: &[u32], applied: bool) -> Duration {
    let mut logits = vec![0.0f32; VOCAB_SIZE];
    let mut time = Duration::ZERO;
    for n in 0..num as usize {
        let generated = &tokens[..n % (tokens.len() + 1)];
        logits.fill(0.0);
        let start = Instant::now();
        guide.0.prepare(generated, &[]);
        let prepared = start.elapsed();
        guide
            .0
            .restrict(black_box(&mut logits), generated)
            .expect("the mask has the size of the vocabulary");
        time += if applied {
            start.elapsed() - prepared
        } else {
            prepared
        };
        if let Some(&token) = tokens.get(generated.len()) {
            assert_eq!(logits[token as usize], 0.0, "the next token is allowed");
        }
    }
    time
}

fn guide(compiler: &Compiler, spec: &GuideSpec) -> Guide {
    let now = Instant::now();
    let compilation = compiler
        .compile(spec.clone(), vec![END_ID], now)
        .expect("good");
    compiler.wait(|| compilation.is_done(), Duration::from_secs(60));
    compilation
        .poll(now)
        .expect("in time")
        .expect("a good guide")
}

/// A byte-level tokenizer with `VOCAB_SIZE` words, whole and in parts, with and without a leading space.
fn tokenizer_folder() -> PathBuf {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("model_repository/stories/1/tokenizer.json");
    let text = std::fs::read_to_string(path).expect("the demo model's");
    let mut tokenizer: Value = serde_json::from_str(&text).expect("JSON");
    let vocabulary = tokenizer["model"]["vocab"]
        .as_object()
        .expect("a vocabulary")
        .clone();
    let old: Vec<String> = vocabulary.keys().cloned().collect();
    let mut known: BTreeSet<String> = old.iter().cloned().collect();
    let mut ids = vocabulary;
    'all: for first in &old[260..] {
        for second in &old[260..] {
            if ids.len() == VOCAB_SIZE {
                break 'all;
            }
            let word = format!("{first}{}", second.trim_start_matches('Ġ'));
            if known.insert(word.clone()) {
                let id = ids.len();
                ids.insert(word, id.into());
            }
        }
    }
    assert_eq!(ids.len(), VOCAB_SIZE);
    tokenizer["model"]["vocab"] = Value::Object(ids);
    let dir = std::env::temp_dir().join(format!("inflight-guidance-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a folder");
    std::fs::write(dir.join("tokenizer.json"), tokenizer.to_string()).expect("a file");
    dir
}

criterion_group!(benches, guidance);
criterion_main!(benches);
