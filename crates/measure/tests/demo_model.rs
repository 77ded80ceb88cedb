//! The program on the demo model: its rows and its errors.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

fn measure(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_inflight-measure"))
        .args(arguments)
        .arg("--model")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../model_repository/stories/1"))
        .output()
        .expect("the program starts")
}

fn rows(output: &Output) -> Vec<Value> {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    let text = String::from_utf8(output.stdout.clone()).expect("UTF-8");
    let row = |line| serde_json::from_str(line).expect("one JSON object a line");
    text.lines().map(row).collect()
}

#[test]
fn engine_prints_rows_for_the_prompt_each_concurrency_and_long_contexts() {
    let arguments = [
        "engine",
        "--json",
        "--rounds=1",
        "--concurrency=1,4",
        "--input=16",
        "--output=8",
        "--prompt=32",
        "--long-context=40",
    ];
    let rows = rows(&measure(&arguments));
    assert_eq!(rows[0]["row"], "limits");
    let concurrencies: Vec<_> = rows[1..].iter().map(|row| &row["concurrency"]).collect();
    assert_eq!(concurrencies, [1, 1, 4, 8], "{rows:?}");
    for row in &rows[1..] {
        let figure = |name: &str| {
            row[name]
                .as_f64()
                .unwrap_or_else(|| panic!("{name}: {row}"))
        };
        let rate = match row["row"].as_str() {
            Some("prompt") => figure("prompt_tokens_per_s"),
            _ => figure("output_tokens_per_s"),
        };
        assert_eq!(row["precision"], "bf16");
        assert!(rate > 0.0, "{row}");
        let share = rate / figure("roofline_tokens_per_s");
        assert!(
            (share / figure("roofline_share") - 1.0).abs() < 0.01,
            "{row}"
        );
    }
}

#[test]
fn engine_prints_its_rows_as_a_table_without_json() {
    let arguments = [
        "engine",
        "--rounds=1",
        "--precision=int4",
        "--concurrency=2",
        "--input=8",
        "--output=4",
        "--prompt=8",
        "--long-context=0",
    ];
    let output = measure(&arguments);
    let text = String::from_utf8_lossy(&output.stdout);
    let rows: Vec<_> = text
        .lines()
        .filter(|line| line.starts_with("| int4"))
        .collect();
    assert_eq!(rows.len(), 2, "{text}");
    assert!(rows[1].starts_with("| int4 | 2 | 8 | 4 |"), "{text}");
}

#[test]
fn profile_prints_every_operation_and_the_shares_add_up_to_one() {
    let arguments = [
        "profile",
        "--json",
        "--concurrency=2",
        "--steps=2",
        "--contexts=1",
        "--max-num-tokens=64",
    ];
    let rows = rows(&measure(&arguments));
    let kinds: Vec<_> = rows[1..].iter().map(|row| &row["step"]).collect();
    assert_eq!(kinds, [["generation"; 12], ["context"; 12]].concat());
    for kind in rows[1..].chunks(12) {
        let sum: f64 = kind
            .iter()
            .filter_map(|row| row["step_share"].as_f64())
            .sum();
        assert!((sum - 1.0).abs() < 0.01, "{kind:?}");
        let of = |operation: &str| kind.iter().find(|row| row["operation"] == operation);
        for operation in ["qkv", "attention", "o", "gate_up", "down", "lm_head"] {
            let row = of(operation).expect("a row for each operation");
            for figure in ["us", "bytes", "operations", "limit_share"] {
                assert!(row[figure].as_f64() > Some(0.0), "{figure} of {row}");
            }
        }
        assert!(of("engine").is_some());
    }
}

#[test]
fn quality_prints_the_cost_of_each_rounding_and_of_other_checkpoints() {
    let text = Path::new(env!("CARGO_TARGET_TMPDIR")).join("quality.txt");
    let story =
        "Once upon a time, there was a kind fox named Pip. He lived by the shore of a wide lake. ";
    fs::write(&text, story.repeat(8)).expect("a file");
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../model_repository/stories/1");
    let text = format!("--text={}", text.display());
    let beside = format!("--beside=the same={}", demo.display());
    let lacking = format!("--beside=lacking={}", without_a_tenth(&demo).display());
    let rows = rows(&measure(&[
        "quality",
        "--json",
        "--context=64",
        "--pieces=2",
        &text,
        &beside,
        &lacking,
    ]));
    let names: Vec<_> = rows.iter().map(|row| row["weights"].as_str()).collect();
    let int8 = ["int8, groups of 128", "int8, groups of 32"];
    let int4 = "int4, groups of 32";
    let expected = ["bf16", int8[0], int8[1], int4, "the same", "lacking"].map(Some);
    assert_eq!(names, expected);
    for row in &rows {
        // In the second half of each piece, every position but the last counts.
        assert_eq!(row["tokens"], 2 * 31, "{row}");
    }
    // In nats for each token. Measured with AVX-512; other sets add in another order.
    let loss = |index: usize| rows[index]["perplexity"].as_f64().expect("a number").ln();
    assert!((loss(0) - 8.514_f64.ln()).abs() < 0.02, "{rows:?}");
    assert_eq!(loss(4), loss(0));
    let kl = |index: usize| rows[index]["kl_mean"].as_f64().expect("a number");
    assert!(
        rows[0].get("kl_mean").is_none(),
        "the reference has no divergence"
    );
    // Rounding may make a text more likely as well.
    let is_near = |index: usize, max_change: f64, max_divergence: f64| {
        let change = (loss(index) - loss(0)).abs();
        let same_top = rows[index]["same_top_share"].as_f64();
        change < max_change && kl(index) < max_divergence && same_top > Some(0.9)
    };
    for (index, max_change, max_divergence) in [(1, 0.02, 0.002), (2, 0.02, 0.002), (3, 0.2, 0.1)] {
        assert!(is_near(index, max_change, max_divergence), "{rows:?}");
        assert!(loss(index) != loss(0) && kl(index) > 0.0, "{rows:?}");
        assert!(!is_near(5, max_change, max_divergence), "{rows:?}");
    }
    assert_eq!(
        (kl(4), rows[4]["same_top_share"].as_f64()),
        (0.0, Some(1.0))
    );
    let bits = |index: usize| rows[index]["bits_per_weight"].as_f64().expect("a number");
    // The embedding keeps 16 bits; the output layer has 8.
    assert!(bits(0) == 16.0 && bits(3) < bits(1) && bits(1) < bits(2));
}

/// A copy of a checkpoint in which every tenth weight is zero.
fn without_a_tenth(checkpoint: &Path) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("without-a-tenth");
    fs::create_dir_all(&folder).expect("a folder");
    for entry in fs::read_dir(checkpoint).expect("the demo model") {
        let path = entry.expect("a file").path();
        let mut bytes = fs::read(&path).expect("a file");
        let name = path.file_name().expect("a name");
        if name == "model.safetensors" {
            let (len, _) = bytes.split_first_chunk().expect("the length of the header");
            let start = 8 + u64::from_le_bytes(*len) as usize;
            let weights = bytes[start..].chunks_exact_mut(2);
            weights.step_by(10).for_each(|weight| weight.fill(0));
        }
        fs::write(folder.join(name), bytes).expect("a file");
    }
    folder
}

#[test]
fn quality_rejects_a_text_shorter_than_one_piece() {
    let output = measure(&[
        "quality",
        "--context=512",
        "--text=Cargo.toml",
        "--beside=nothing",
    ]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("NAME=DIR"));
    let output = measure(&["quality", "--context=1024", "--text=../../rustfmt.toml"]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("one piece needs 1022"), "{error}");
}

#[test]
fn rejects_bad_options_and_names_the_allowed_values() {
    for (arguments, known) in [
        (["engine", "--concurrency=0"], "not in 1.."),
        (["engine", "--instructions=sse9"], "avx2"),
        (["engine", "--kv-cache-dtype=fp8"], "int8"),
        (["engine", "--rounds=0"], "not in 1.."),
        (["engine", "--output=1"], "not in 2.."),
    ] {
        let output = measure(&arguments);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{arguments:?}");
        assert!(error.contains(known), "{arguments:?}: {error}");
    }
}

#[test]
fn adapters_prints_a_row_for_none_and_for_each_number() {
    let arguments = [
        "adapters",
        "--json",
        "--rounds=1",
        "--concurrency=4",
        "--adapters=1,4",
        "--rank=5",
        "--input=8",
        "--output=6",
    ];
    let rows = rows(&measure(&arguments));
    let adapters: Vec<_> = rows.iter().map(|row| &row["adapters"]).collect();
    assert_eq!(adapters, [0, 1, 4], "{rows:?}");
    assert_eq!(rows[0]["times_none"], 1.0);
    for row in &rows {
        assert!(row["step_ms"].as_f64().is_some_and(|ms| ms > 0.0), "{row}");
    }
}
