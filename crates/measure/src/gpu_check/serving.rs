//! Models inside a tritonserver: their answers, and tokens per second.

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use cudarc::driver::CudaContext;
use serde_json::{Value, json};

use super::budget::Budget;
use super::check::Check;
use super::checkpoint;
use super::prompts::{Case, cases, prompt};
use super::report::Report;
use super::server::{Programs, Server, add_model, parameter};
use crate::Result;
use crate::figures::four_digits;

const PROMPTS: [&str; 4] = [
    "Once upon a time",
    "The fox",
    "A little girl named",
    "One day, the dog",
];

/// Serves the demo model on the CPU and on the GPU, and compares their answers.
pub fn check_answers(check: &Check, budget: &Budget, report: &mut Report) -> Result<()> {
    let stories = check.bundle.join("model_repository/stories/1");
    let Some(programs) = Programs::find(check).filter(|_| stories.is_dir()) else {
        return report.skipped("the bundle has no tritonserver and demo model");
    };
    let repository = repository(check, "answers")?;
    // Two models share its memory.
    let small = parameter("max_tokens_in_paged_kv_cache", "16384");
    let gpu = on_gpu(check) + &parameter("deterministic", "true");
    // Few and small blocks: sequences are paused and computed again.
    let tight: String = [
        ("batch_scheduler_policy", "max_utilization"),
        ("max_num_requests", "8"),
        ("max_num_tokens", "48"),
        ("tokens_per_block", "4"),
        ("max_seq_len", "256"),
        ("max_tokens_in_paged_kv_cache", "320"),
    ]
    .map(|(key, value)| parameter(key, value))
    .concat();
    add_model(&repository, "cpu", &stories, "")?;
    add_model(&repository, "gpu", &stories, &(gpu.clone() + &small))?;
    add_model(&repository, "gpu_tight", &stories, &(gpu.clone() + &tight))?;
    let server = Server::start(&programs, &repository, budget)?;
    let together = |model: &str| answers(&server, model, &PROMPTS, budget);
    let [cpu, gpu, paused] = [together("cpu")?, together("gpu")?, together("gpu_tight")?];
    let begin = |text: &String| {
        text.split_whitespace()
            .take(3)
            .collect::<Vec<_>>()
            .join(" ")
    };
    expect(
        report,
        "answers begin as on the CPU",
        &cpu.iter().map(begin).collect::<Vec<_>>(),
        &gpu.iter().map(begin).collect::<Vec<_>>(),
    )?;
    let mut alone = Vec::new();
    for prompt in PROMPTS {
        alone.extend(answers(&server, "gpu", &[prompt], budget)?);
    }
    expect(report, "the same alone as together", &alone, &gpu)?;
    expect(report, "the same if paused", &gpu, &paused)
}

/// Output tokens per second with all requests sent at once, by the lengths of prompts and outputs.
pub fn throughput(check: &Check, budget: &Budget, report: &mut Report) -> Result<()> {
    measure(check, "throughput", "", budget, report)
}

/// The same with weights, activations, keys and values in FP8.
pub fn fp8_throughput(check: &Check, budget: &Budget, report: &mut Report) -> Result<()> {
    const MIN_CAPABILITY: (i32, i32) = (8, 9);
    if CudaContext::new(check.options.gpu)?.compute_capability()? < MIN_CAPABILITY {
        return report.skipped("the GPU does not multiply FP8");
    }
    let parameters = [
        parameter("weight_only_precision", "fp8"),
        parameter("fp8_activations", "true"),
        parameter("kv_cache_dtype", "fp8"),
    ];
    measure(check, "fp8", &parameters.concat(), budget, report)
}

fn measure(
    check: &Check,
    stage: &str,
    parameters: &str,
    budget: &Budget,
    report: &mut Report,
) -> Result<()> {
    let Some(programs) = Programs::find(check) else {
        return report.skipped("the bundle has no tritonserver");
    };
    let cases = cases(check.options.quick);
    let repository = repository(check, stage)?;
    let config = on_gpu(check) + &served(cases, check.options.quick) + parameters;
    let checkpoint = checkpoint::folder(check, report)?;
    add_model(&repository, "measured", &checkpoint, &config)?;
    let start = Instant::now();
    let server = Server::start(&programs, &repository, budget)?;
    report.figures(
        "load",
        json!({ "seconds": four_digits(start.elapsed().as_secs_f64()) }),
    )?;
    let mut num_sent = 0;
    for (index, case) in cases.iter().enumerate() {
        // What is left is shared by the cases that are left.
        let share = budget.left() / (cases.len() - index) as u32;
        let part = budget.part(share);
        let name = format!("{} x {}/{}", case.num_requests, case.input, case.output);
        if part.is_over() {
            report.failed(&name, "not run: no time was left")?;
            continue;
        }
        let figures = load(&server, case, num_sent, &part)?;
        num_sent += case.num_requests;
        report.figures(&name, figures)?;
    }
    Ok(())
}

/// The fields of a model that these loads measure: it computes every token of them.
fn served(cases: &[Case], is_quick: bool) -> String {
    let slots = cases.iter().map(|case| case.num_requests).max();
    let longest = cases.iter().map(|case| case.input + case.output).max();
    let parameters = [
        ("max_seq_len", &*longest.unwrap_or(1).to_string()),
        ("max_num_tokens", if is_quick { "32" } else { "8192" }),
        ("enable_chunked_context", "true"),
        ("enable_kv_cache_reuse", "false"),
    ];
    format!(
        "max_batch_size: {}\ninput [{{ name: \"input_ids\" data_type: TYPE_INT32 dims: [ -1 ] \
         allow_ragged_batch: true }}]\n{}",
        slots.unwrap_or(1).min(512),
        parameters
            .map(|(key, value)| parameter(key, value))
            .concat()
    )
}

/// Sends all requests at once, and counts the tokens that arrive in time. The server has had `num_sent` before.
fn load(server: &Server, case: &Case, num_sent: usize, budget: &Budget) -> Result<Value> {
    /// Threads of clients need little.
    const STACK_BYTES: usize = 256 << 10;
    let (num_tokens, num_ended) = (AtomicU64::new(0), AtomicU64::new(0));
    let start = Instant::now();
    let mut errors = Vec::new();
    thread::scope(|scope| {
        let clients: Vec<_> = (num_sent..num_sent + case.num_requests)
            .map(|number| {
                let (num_tokens, num_ended) = (&num_tokens, &num_ended);
                let client = move || {
                    let body = json!({
                        "input_ids": prompt(number, case.input), "max_tokens": case.output, "ignore_eos": true,
                        "stream": true, "stream_interval": 16, "exclude_input_in_output": true,
                    });
                    let done = server.generate("measured", &body, budget, |response| {
                        num_tokens.fetch_add(num_ids(response), Ordering::Relaxed);
                    });
                    num_ended.fetch_add(u64::from(done.is_ok()), Ordering::Relaxed);
                    done.err().map(|error| error.to_string())
                };
                thread::Builder::new()
                    .stack_size(STACK_BYTES)
                    .spawn_scoped(scope, client)
            })
            .collect();
        for client in clients {
            match client.map(|client| client.join()) {
                Ok(Ok(None)) => {}
                Ok(Ok(Some(error))) => errors.push(error),
                Ok(Err(_)) => errors.push("a client panicked".to_owned()),
                Err(error) => errors.push(error.to_string()),
            }
        }
    });
    let seconds = start.elapsed().as_secs_f64();
    let num_tokens = num_tokens.into_inner();
    let num_ended = num_ended.into_inner();
    let is_late = budget.is_over();
    if let Some(error) = errors.first().filter(|_| !is_late) {
        return Err(format!("{} requests failed: {error}", errors.len()).into());
    }
    Ok(json!({
        "tokens_per_s": four_digits(num_tokens as f64 / seconds),
        "tokens": num_tokens,
        "requests_ended": num_ended,
        "seconds": four_digits(seconds),
        "cut_off": is_late,
    }))
}

/// How many tokens a response has. A tensor of one element is a number.
fn num_ids(response: &Value) -> u64 {
    match &response["output_ids"] {
        Value::Array(ids) => ids.len() as u64,
        Value::Number(_) => 1,
        _ => 0,
    }
}

/// The texts for some prompts, asked for at once.
fn answers(server: &Server, model: &str, prompts: &[&str], budget: &Budget) -> Result<Vec<String>> {
    let ask = |prompt: &str| {
        let body = json!({ "text_input": prompt, "max_tokens": 24, "stream": true });
        let mut text = String::new();
        let done = server.generate(model, &body, budget, |response| {
            text += response["text_output"].as_str().unwrap_or_default();
        });
        done.map(|()| text).map_err(|error| error.to_string())
    };
    thread::scope(|scope| {
        let clients: Vec<_> = prompts
            .iter()
            .map(|prompt| scope.spawn(move || ask(prompt)))
            .collect();
        clients
            .into_iter()
            .map(|client| match client.join() {
                Ok(answer) => Ok(answer?),
                Err(_) => Err("a client panicked".into()),
            })
            .collect()
    })
}

fn expect(report: &mut Report, name: &str, expected: &[String], actual: &[String]) -> Result<()> {
    match expected == actual {
        true => report.passed(name, &format!("{} answers", actual.len())),
        false => report.failed(name, &format!("{actual:?} instead of {expected:?}")),
    }
}

fn on_gpu(check: &Check) -> String {
    parameter("gpu_device_ids", &check.options.gpu.to_string())
}

/// An empty repository.
fn repository(check: &Check, name: &str) -> Result<PathBuf> {
    let folder = std::path::absolute(check.options.out.join("repositories").join(name))?;
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    fs::create_dir_all(&folder)?;
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_whose_throughput_is_measured_reuses_nothing() {
        let switch = parameter("enable_kv_cache_reuse", "false");
        for is_quick in [true, false] {
            let config = served(cases(is_quick), is_quick);
            assert!(config.contains(&switch), "{config}");
        }
    }
}
