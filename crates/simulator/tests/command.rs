//! The `inflight-sim` command line.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

const CONFIG: &str = r#"
backend: "inflight"
max_batch_size: 8
parameters { key: "runner" value { string_value: "synthetic" } }
parameters { key: "synthetic_step_us" value { string_value: "1000" } }
parameters { key: "synthetic_token_us" value { string_value: "10" } }
"#;

/// A new folder with this config.pbtxt.
fn folder(name: &str, config: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).expect("a folder below target");
    std::fs::write(folder.join("config.pbtxt"), config).expect("a file in it");
    folder
}

fn sim(folder: &Path, arguments: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_inflight-sim"))
        .current_dir(folder)
        .args(arguments.split_whitespace())
        .output()
        .expect("it starts")
}

/// One report per load.
fn reports(output: &Output) -> Vec<Value> {
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let lines = String::from_utf8_lossy(&output.stdout);
    let objects = lines.lines().map(serde_json::from_str);
    objects
        .collect::<Result<_, _>>()
        .expect("a JSON object a line")
}

#[test]
fn a_sweep_of_loads_writes_a_report_for_each_and_the_plots() {
    let folder = folder("sweep", CONFIG);
    let sweep = "--config config.pbtxt --rate 20,200 --num-requests 300 --input uniform:8..64 --output \
                 lognormal:20,90 --json --plots plots --stats-file stats.jsonl";
    let output = sim(&folder, sweep);
    let found = reports(&output);
    assert_eq!(found.len(), 2);
    let mean = |report: &Value| report["report"]["time_to_first_token_ms"]["mean"].as_f64();
    assert!(
        mean(&found[0]) < mean(&found[1]),
        "a higher load is slower: {found:?}"
    );
    assert_eq!(
        output.stdout,
        sim(&folder, sweep).stdout,
        "the same every time"
    );
    for plot in [
        "kv-cache",
        "requests",
        "time-to-first-token",
        "time-per-output-token",
    ] {
        let drawn = std::fs::read_to_string(folder.join("plots").join(format!("{plot}.svg")));
        assert!(drawn.expect(plot).starts_with("<svg"));
    }

    let fitted = "--config config.pbtxt --fit stats.jsonl --concurrency 4 --json";
    let cost = &reports(&sim(&folder, fitted))[0]["cost"];
    for (name, expected) in [
        ("step_us", 1000.0),
        ("token_us", 10.0),
        ("overhead_us", 100.0),
    ] {
        let found = cost[name].as_f64().expect(name);
        assert!((found - expected).abs() < 0.1, "{name} is {found}");
    }
}

#[test]
fn a_trace_is_replayed_at_its_times_or_by_clients() {
    let folder = folder("trace", CONFIG);
    let trace = "arrival,input,output\n0,5,4\n2.5,5,4\n";
    std::fs::write(folder.join("trace.csv"), trace).expect("a file");
    let duration = |arguments: &str| {
        let output = sim(
            &folder,
            &format!("--config config.pbtxt --trace trace.csv --json {arguments}"),
        );
        reports(&output)[0]["report"]["duration_s"]
            .as_f64()
            .expect("a number")
    };
    assert!((2.5..2.6).contains(&duration("")));
    assert!(duration("--concurrency 1") < 0.1);
}

#[test]
fn prints_the_report_as_text_without_json() {
    let folder = folder("text", CONFIG);
    let output = sim(
        &folder,
        "--config config.pbtxt --concurrency 3 --num-requests 30",
    );
    let text = String::from_utf8_lossy(&output.stdout);
    for words in [
        "3 clients",
        "throughput",
        "time to first token, ms",
        "KV cache, blocks",
    ] {
        assert!(text.contains(words), "no '{words}' in\n{text}");
    }
}

#[test]
fn rejects_what_it_cannot_simulate() {
    let real = CONFIG.replace("synthetic\"", "huggingface\"");
    for (config, arguments, expected) in [
        (CONFIG, "--config other --rate 1", "other: No such file"),
        (
            "max_batch_sise: 4",
            "--config config.pbtxt --rate 1",
            "did you mean 'max_batch_size'?",
        ),
        (CONFIG, "--config config.pbtxt", "--rate"),
        (
            CONFIG,
            "--config config.pbtxt --rate 0",
            "write a number above 0",
        ),
        (
            CONFIG,
            "--config config.pbtxt --rate 1 --input normal:3",
            "lognormal:MEDIAN,P99",
        ),
        (
            CONFIG,
            "--config config.pbtxt --rate 1 --trace t",
            "cannot be used with",
        ),
        (
            CONFIG,
            "--config config.pbtxt --rate 1 --fit config.pbtxt",
            "line 2: ",
        ),
        (
            real.as_str(),
            "--config config.pbtxt --rate 1 --step-us 9",
            "config.json",
        ),
    ] {
        let output = sim(&folder("errors", config), arguments);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(
            !output.status.success() && errors.contains(expected),
            "{arguments}: {errors}"
        );
    }
}
