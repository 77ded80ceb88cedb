//! `/metrics`: the requests that this server has answered, and what tritonserver says of its models, under the names of
//! vLLM's server, too, which gateways and dashboards read.
//!
//! Source of the names: vLLM's "Production Metrics"; the model server protocol of the Gateway API Inference Extension.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, PoisonError};

use axum::extract::{MatchedPath, Request, State};
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::Response;

use crate::triton_metrics::{Sample, samples};

/// The gauge of instances that serve no requests any more.
const FAILED_INSTANCES: &str = "nv_inflight_failed_instances";

/// How many requests were answered, by path and status.
#[derive(Debug, Default)]
pub struct Traffic(Mutex<BTreeMap<(String, u16), u64>>);

/// A metric of vLLM's, and Triton's metrics that it is the sum of.
struct Alias {
    name: &'static str,
    kind: &'static str,
    help: &'static str,
    sources: &'static [Source],
}

/// Samples of one name, if a label has this value.
struct Source {
    name: &'static str,
    label: Option<(&'static str, &'static str)>,
}

impl Source {
    fn has(&self, sample: &Sample<'_>) -> bool {
        let has_label = |(label, value)| sample.label(label) == Some(value);
        self.name == sample.name && self.label.is_none_or(has_label)
    }
}

const fn named(name: &'static str) -> Source {
    Source { name, label: None }
}

const fn labelled(name: &'static str, label: &'static str, value: &'static str) -> Source {
    Source {
        name,
        label: Some((label, value)),
    }
}

const BLOCKS: &str = "nv_trt_llm_kv_cache_block_metrics";
const KIND_OF_BLOCKS: &str = "kv_cache_block_type";

/// Gauges and counters.
const NUMBERS: &[Alias] = &[
    Alias {
        name: "vllm:num_requests_running",
        kind: "gauge",
        help: "Sequences in the last step",
        sources: &[labelled(
            "nv_trt_llm_request_metrics",
            "request_type",
            "scheduled",
        )],
    },
    Alias {
        name: "vllm:num_requests_waiting",
        kind: "gauge",
        help: "Requests that wait in the batch manager or in Triton's queue",
        sources: &[
            labelled("nv_trt_llm_request_metrics", "request_type", "waiting"),
            named("nv_inference_pending_request_count"),
        ],
    },
    Alias {
        name: "vllm:kv_cache_usage_perc",
        kind: "gauge",
        help: "Share of the KV cache blocks that are used, 1 is all",
        sources: &[labelled(BLOCKS, KIND_OF_BLOCKS, "fraction")],
    },
    Alias {
        name: "vllm:prompt_tokens_total",
        kind: "counter",
        help: "Tokens of prompts",
        sources: &[named("nv_llm_input_token_len_sum")],
    },
    Alias {
        name: "vllm:generation_tokens_total",
        kind: "counter",
        help: "Generated tokens",
        sources: &[named("nv_llm_output_token_len_sum")],
    },
    Alias {
        name: "vllm:request_success_total",
        kind: "counter",
        help: "Requests that were answered",
        sources: &[named("nv_inference_request_success")],
    },
    Alias {
        name: "vllm:spec_decode_num_draft_tokens_total",
        kind: "counter",
        help: "Draft tokens",
        sources: &[named("nv_inflight_spec_decode_num_draft_tokens")],
    },
    Alias {
        name: "vllm:spec_decode_num_accepted_tokens_total",
        kind: "counter",
        help: "Draft tokens that were accepted",
        sources: &[named("nv_inflight_spec_decode_num_accepted_tokens")],
    },
];

/// Histograms: vLLM's names and Triton's.
const HISTOGRAMS: &[(&str, &str)] = &[
    (
        "vllm:time_to_first_token_seconds",
        "nv_inflight_time_to_first_token_seconds",
    ),
    (
        "vllm:inter_token_latency_seconds",
        "nv_inflight_time_per_output_token_seconds",
    ),
    (
        "vllm:e2e_request_latency_seconds",
        "nv_inflight_e2e_seconds",
    ),
    (
        "vllm:request_queue_time_seconds",
        "nv_inflight_queue_seconds",
    ),
    ("vllm:request_prompt_tokens", "nv_llm_input_token_len"),
    ("vllm:request_generation_tokens", "nv_llm_output_token_len"),
];

impl Traffic {
    fn count(&self, path: &str, status: StatusCode) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (path.to_owned(), status.as_u16());
        *counts.entry(key).or_default() += 1;
    }

    /// Its metrics in Prometheus's format, with the prompts in flight, and whether tritonserver's metrics are there.
    pub fn text(&self, num_in_flight: usize, has_triton: Option<bool>) -> String {
        let mut text = "# HELP inflight_openai_requests_total Requests that were answered, streams that have begun\n\
                        # TYPE inflight_openai_requests_total counter\n"
            .to_owned();
        let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for ((path, status), num) in &*counts {
            let labels = format!("{{path=\"{path}\",status=\"{status}\"}}");
            let _ = writeln!(text, "inflight_openai_requests_total{labels} {num}");
        }
        let mut gauge = |name: &str, help: &str, value: usize| {
            let _ = writeln!(
                text,
                "# HELP {name} {help}\n# TYPE {name} gauge\n{name} {value}"
            );
        };
        gauge(
            "inflight_openai_prompts_in_flight",
            "Prompts that tritonserver works on",
            num_in_flight,
        );
        if let Some(has_triton) = has_triton {
            let help = "Whether the metrics of tritonserver are there";
            gauge(
                "inflight_openai_triton_metrics_up",
                help,
                usize::from(has_triton),
            );
        }
        text
    }
}

/// Counts a request when its answer begins.
pub async fn counted(
    State(traffic): State<Arc<Traffic>>,
    request: Request,
    next: Next,
) -> Response {
    // A path that does not exist has no count of its own: a client could name any number of them.
    let path = request.extensions().get::<MatchedPath>().cloned();
    let response = next.run(request).await;
    let path = path.as_ref().map_or("other", MatchedPath::as_str);
    traffic.count(path, response.status());
    response
}

/// The models of which an instance has failed, in order. Older servers call them ready.
pub fn failed_models(text: &str) -> Vec<String> {
    let failed = samples(text).filter(|it| it.name == FAILED_INSTANCES && it.value > 0.0);
    let models: BTreeSet<_> = failed.filter_map(|it| it.label("model")).collect();
    models.into_iter().map(str::to_owned).collect()
}

/// Triton's metrics under vLLM's names.
pub fn aliases(triton: &str) -> String {
    let all: Vec<_> = samples(triton).collect();
    let mut text = String::new();
    for alias in NUMBERS {
        let mut sums: BTreeMap<String, f64> = BTreeMap::new();
        for (index, source) in alias.sources.iter().enumerate() {
            let of_source = all.iter().filter(|sample| source.has(sample));
            for (labels, value) in of_source.filter_map(|it| Some((labels_of_model(it)?, it.value)))
            {
                // The first source has the models of this backend, and Triton's own metrics have others as well.
                match sums.get_mut(&labels) {
                    Some(sum) => *sum += value,
                    None if index == 0 => {
                        sums.insert(labels, value);
                    }
                    None => {}
                }
            }
        }
        head(
            &mut text,
            alias.name,
            alias.kind,
            alias.help,
            !sums.is_empty(),
        );
        for (labels, sum) in sums {
            let _ = writeln!(text, "{}{{{labels}}} {sum}", alias.name);
        }
    }
    for (name, source) in HISTOGRAMS {
        let of_source = all
            .iter()
            .filter_map(|it| Some((it.name.strip_prefix(source)?, it)));
        let of_source: Vec<_> = of_source
            .filter(|(ending, _)| ["_bucket", "_sum", "_count"].contains(ending))
            .collect();
        head(&mut text, name, "histogram", source, !of_source.is_empty());
        for (ending, sample) in of_source {
            let Some(mut labels) = labels_of_model(sample) else {
                continue;
            };
            if let Some(le) = sample.label("le") {
                let _ = write!(labels, ",le=\"{le}\"");
            }
            let _ = writeln!(text, "{name}{ending}{{{labels}}} {}", sample.value);
        }
    }
    text + &cache_config(&all)
}

/// The sizes of the KV caches, as labels.
fn cache_config(all: &[Sample<'_>]) -> String {
    let mut sizes: BTreeMap<String, (Option<f64>, Option<f64>)> = BTreeMap::new();
    for sample in all.iter().filter(|it| it.name == BLOCKS) {
        let Some(labels) = labels_of_model(sample) else {
            continue;
        };
        let (block_size, num_blocks) = sizes.entry(labels).or_default();
        match sample.label(KIND_OF_BLOCKS) {
            Some("tokens_per") => *block_size = Some(sample.value),
            Some("max") => *num_blocks = Some(sample.value),
            _ => {}
        }
    }
    let name = "vllm:cache_config_info";
    let mut text = String::new();
    head(
        &mut text,
        name,
        "gauge",
        "Tokens of a KV cache block, and blocks",
        !sizes.is_empty(),
    );
    for (labels, size) in sizes {
        if let (Some(block_size), Some(num_blocks)) = size {
            let sizes = format!("block_size=\"{block_size}\",num_gpu_blocks=\"{num_blocks}\"");
            let _ = writeln!(text, "{name}{{{labels},{sizes}}} 1");
        }
    }
    text
}

fn head(text: &mut String, name: &str, kind: &str, help: &str, has_samples: bool) {
    if has_samples {
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }
}

/// The model and version of a sample, under vLLM's name; `None` if it has no model.
fn labels_of_model(sample: &Sample<'_>) -> Option<String> {
    let model = sample.label("model")?;
    let version = sample.label("version").unwrap_or_default();
    Some(format!("model_name=\"{model}\",version=\"{version}\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_with_a_failed_instance_is_named_once() {
        let text = "# TYPE nv_inflight_failed_instances gauge\n\
            nv_inflight_failed_instances{model=\"b\",version=\"1\"} 1.000000\n\
            nv_inflight_failed_instances{model=\"b\",version=\"2\"} 2\n\
            nv_inflight_failed_instances{model=\"a\",version=\"1\"} 0\n\
            nv_inference_count{model=\"a\",version=\"1\"} 7\n";
        assert_eq!(failed_models(text), ["b"]);
        assert_eq!(failed_models("404 Not Found"), [""; 0]);
    }

    #[test]
    fn metrics_of_models_have_the_names_of_vllm() {
        let text = "nv_trt_llm_request_metrics{model=\"m\",request_type=\"waiting\",version=\"1\"} 2\n\
            nv_trt_llm_request_metrics{model=\"m\",request_type=\"scheduled\",version=\"1\"} 5\n\
            nv_inference_pending_request_count{model=\"m\",version=\"1\"} 3\n\
            nv_inference_pending_request_count{model=\"other_backend\",version=\"1\"} 4\n\
            nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=\"fraction\",model=\"m\",version=\"1\"} 0.25\n\
            nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=\"tokens_per\",model=\"m\",version=\"1\"} 32\n\
            nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=\"max\",model=\"m\",version=\"1\"} 100\n\
            nv_inflight_e2e_seconds_bucket{model=\"m\",version=\"1\",le=\"0.1\"} 1\n\
            nv_inflight_e2e_seconds_sum{model=\"m\",version=\"1\"} 0.05\n\
            nv_inflight_e2e_seconds_count{model=\"m\",version=\"1\"} 1\n\
            nv_gpu_utilization 0.5\n";
        let found = aliases(text);
        let lines: Vec<_> = found
            .lines()
            .filter(|line| !line.starts_with('#'))
            .collect();
        let of_model = "model_name=\"m\",version=\"1\"";
        let expected = [
            format!("vllm:num_requests_running{{{of_model}}} 5"),
            format!("vllm:num_requests_waiting{{{of_model}}} 5"),
            format!("vllm:kv_cache_usage_perc{{{of_model}}} 0.25"),
            format!("vllm:e2e_request_latency_seconds_bucket{{{of_model},le=\"0.1\"}} 1"),
            format!("vllm:e2e_request_latency_seconds_sum{{{of_model}}} 0.05"),
            format!("vllm:e2e_request_latency_seconds_count{{{of_model}}} 1"),
            format!(
                "vllm:cache_config_info{{{of_model},block_size=\"32\",num_gpu_blocks=\"100\"}} 1"
            ),
        ];
        assert_eq!(lines, expected);
        let heads = found.lines().filter(|line| line.starts_with("# TYPE"));
        assert_eq!(heads.count(), 5);
        assert_eq!(aliases(""), "");
    }
}
