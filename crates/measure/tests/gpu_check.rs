//! The check on the stand-in for a GPU, with sizes that it can compute.

use std::path::Path;
use std::process::Command;

use inflight_cuda_stand_in::StandIn;
use serde_json::Value;

#[test]
fn a_quick_check_writes_a_row_for_everything() {
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("gpu-check");
    let output = run(&out, &["machine", "steps", "operations"]);
    if output.contains("built without CUDA kernels") {
        eprintln!("skipped: {output}");
        return;
    }
    let rows = rows(&out);
    for (stage, name, figure) in [
        ("machine", "copy on the GPU", "gb_per_s"),
        ("machine", "bf16 product", "tflop_per_s"),
        ("steps", "generation 4 x 8/4", "roofline_share"),
        ("steps", "host gap, batch of 4", "graph_ms"),
        ("steps", "prompt of 60", "first_token_ms"),
        (
            "operations",
            "paged_attention, batch of 3",
            "share_of_limit",
        ),
        ("operations", "paged_attention, prompt of 60", "tflop_per_s"),
        ("operations", "sample, penalties, batch of 3", "gb_per_s"),
        ("operations", "lm_head, batch of 1", "gb_per_s"),
    ] {
        let row = rows
            .iter()
            .find(|row| row["stage"] == stage && row["name"] == name);
        let row = row.unwrap_or_else(|| panic!("no {name}:\n{output}"));
        let number = row["figures"][figure].as_f64();
        assert!(number.is_some_and(|number| number > 0.0), "{row}");
    }
    assert!(!output.contains("FAILED"), "{output}");
}

#[test]
fn sums_over_gpus_are_measured_where_there_are_several() {
    for (num_gpus, counts) in [(1, &[][..]), (4, &[2, 4])] {
        let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("gpu-check-of-{num_gpus}"));
        let stand_in = StandIn::new().set("DEVICES", num_gpus);
        let output = run_on(&stand_in, &out, &["machine", "all-reduce"]);
        if output.contains("built without CUDA kernels") {
            eprintln!("skipped: {output}");
            return;
        }
        let mut rows = rows(&out);
        rows.retain(|row| row["stage"] == "all-reduce");
        let has_figures = |name: &str, figure: &str| {
            let row = rows.iter().find(|row| row["name"] == name);
            let number = row.and_then(|row| row["figures"][figure].as_f64());
            assert!(
                number.is_some_and(|number| number > 0.0),
                "{name}:\n{output}"
            );
        };
        for num_ranks in counts {
            has_figures("copy from GPU 0 to GPU 1", "gb_per_s");
            for order in ["by NCCL", "in pairs"] {
                let name = format!("768 bytes of {num_ranks} GPUs, {order}");
                has_figures(&name, "us");
                has_figures(&name, "share_of_copy");
            }
        }
        let skipped = "a sum needs several GPUs, and the machine has 1";
        assert_eq!(rows[0]["skipped"] == skipped, num_gpus == 1, "{output}");
        assert_eq!(rows.len(), if num_gpus == 1 { 1 } else { 1 + 2 * 2 * 2 });
        assert!(!output.contains("FAILED"), "{output}");
    }
}

#[test]
fn a_wrong_sum_over_gpus_fails() {
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("gpu-check-of-wrong-sums");
    // Before it, two ranks sum and collect once each when they meet.
    let stand_in = StandIn::new().set("DEVICES", 2).set("SPOIL_COLLECTIVE", 5);
    let output = run_on(&stand_in, &out, &["machine", "all-reduce"]);
    if output.contains("built without CUDA kernels") {
        eprintln!("skipped: {output}");
        return;
    }
    let rows = rows(&out);
    let row_of = |name: &str| rows.iter().find(|row| row["name"] == name).expect(name);
    let failed = row_of("256 bytes of 2 GPUs, by NCCL")["failed"].as_str();
    let failed = failed.unwrap_or_else(|| panic!("{output}"));
    assert!(failed.contains(": column 0 of row 0 is "), "{failed}");
    assert!(
        row_of("256 bytes of 2 GPUs, in pairs")["figures"].is_object(),
        "{output}"
    );
}

#[test]
fn without_time_everything_is_skipped_and_said_so() {
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("gpu-check-late");
    run(&out, &["--seconds=0"]);
    let rows = rows(&out);
    assert_eq!(rows.len(), 9);
    assert!(
        rows.iter().all(|row| row["skipped"] == "no time is left"),
        "{rows:?}"
    );
}

fn run(out: &Path, arguments: &[&str]) -> String {
    run_on(&StandIn::new(), out, arguments)
}

fn run_on(stand_in: &StandIn, out: &Path, arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpu-check"));
    command.arg("--quick").arg("--out").arg(out).args(arguments);
    let output = stand_in.apply(&mut command).output().expect("it starts");
    let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    format!("{out}{err}")
}

fn rows(out: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(out.join("gpu-check.json")).expect("a report");
    let report: Value = serde_json::from_str(&text).expect("JSON");
    report["rows"].as_array().expect("rows").clone()
}
