//! A model's metrics on the server's metrics page.
//!
//! The gauges have TensorRT-LLM's family names, because dashboards read those, and Triton's HTTP
//! frontend itself builds its load report from `nv_trt_llm_kv_cache_block_metrics`. The latency
//! histograms are our own. A server without metrics has none of it.
//!
//! Metrics are shared by all that reports under the same labels, in the whole process: two objects of
//! Triton's with the same labels are one line of the page, and deleting the first frees the line under
//! the second (server 2.51). A model that is loaded again overlaps with the one that it replaces.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::ops::Add;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use parking_lot::Mutex;

use crate::response::answer::Answer;
use inflight_engine::{AdapterUsage, DraftTotals, KvUsage, LockstepTotals, StepStats};
use inflight_manager::AdapterCacheUsage;
use inflight_manager::sizing::MemoryUsage;
use inflight_triton::{Counter, Error, Gauge, Histogram, MetricFamily};

/// A value of a step record.
type Value = fn(&StepStats) -> f64;

/// The family of an instance's memory usage, which is set at load.
const MEMORY: (&CStr, &CStr, &str) = (
    c"nv_trt_llm_runtime_memory_metrics",
    c"Memory of weights and KV cache, in bytes",
    "memory_type",
);

/// A family of gauges: name, help, the label that tells its values apart, and the values.
type GaugeFamily = (
    &'static CStr,
    &'static CStr,
    &'static str,
    &'static [(&'static str, Value)],
);

/// The families of TensorRT-LLM that apply here, under its names.
const GAUGES: &[GaugeFamily] = &[
    (
        c"nv_trt_llm_request_metrics",
        c"Requests of the batch manager",
        "request_type",
        &[
            ("active", |s| s.num_active as f64),
            ("max", |s| f64::from(s.max_num_active)),
            ("scheduled", |s| s.num_scheduled as f64),
            ("context", |s| s.num_context as f64),
            ("waiting", |s| s.num_waiting as f64),
        ],
    ),
    (
        c"nv_trt_llm_kv_cache_block_metrics",
        c"Blocks of the paged KV cache",
        "kv_cache_block_type",
        &[
            ("max", |s| f64::from(s.kv.num_blocks.0)),
            ("free", |s| f64::from(s.kv.num_free().0)),
            ("used", |s| f64::from(s.kv.num_used.0)),
            ("reused", |s| s.reuse.num_reused_blocks as f64),
            ("host_max", |s| f64::from(s.kv.num_host_blocks.0)),
            ("host_used", |s| f64::from(s.kv.num_host_used.0)),
            ("offloaded", |s| s.reuse.num_offloaded_blocks as f64),
            ("onboarded", |s| s.reuse.num_onboarded_blocks as f64),
            ("tokens_per", |s| f64::from(s.kv.block_size.tokens().0)),
            ("fraction", |s| {
                f64::from(s.kv.num_used.0) / f64::from(s.kv.num_blocks.0.max(1))
            }),
        ],
    ),
    (
        c"nv_trt_llm_inflight_batcher_metrics",
        c"The last step of in-flight batching",
        "inflight_batcher_specific_metric",
        &[
            ("total_context_tokens", |s| {
                f64::from(s.num_context_tokens.0)
            }),
            ("generation_requests", |s| s.num_generation as f64),
            ("micro_batch_id", |s| s.micro_batch as f64),
            ("paused_requests", |s| s.num_paused as f64),
        ],
    ),
    (
        c"nv_trt_llm_v1_metrics",
        c"The last batch in lockstep",
        "v1_specific_metric",
        &[
            ("total_context_tokens", |s| {
                lockstep(s, |batch| batch.num_context_tokens)
            }),
            ("total_generation_tokens", |s| {
                lockstep(s, |batch| batch.num_generated_tokens)
            }),
            ("empty_generation_slots", |s| {
                lockstep(s, |batch| batch.num_empty_slots)
            }),
        ],
    ),
    (
        c"nv_inflight_lora_metrics",
        c"LoRA adapters of the requests in the last step, and their pages",
        "lora_type",
        &[
            ("max_pages", |s| adapters(s, |it| it.num_pages)),
            ("used_pages", |s| adapters(s, |it| it.num_used)),
            ("running_adapters", |s| adapters(s, |it| it.num_adapters)),
            ("waiting_requests", |s| adapters(s, |it| it.num_waiting)),
        ],
    ),
    (
        c"nv_inflight_state_snapshot_metrics",
        c"Snapshots of recurrent states, and the slots of sequences",
        "state_snapshot_type",
        &[
            ("slots_max", |s| f64::from(s.num_state_slots)),
            ("slots_used", |s| f64::from(s.num_state_slots_used)),
            ("max", |s| f64::from(s.kv.num_snapshots)),
            ("used", |s| f64::from(s.kv.num_snapshots_used)),
            ("saved", |s| s.reuse.num_saved_states as f64),
            ("restored", |s| s.reuse.num_restored_states as f64),
            ("host_max", |s| f64::from(s.kv.num_host_snapshots)),
            ("host_used", |s| f64::from(s.kv.num_host_snapshots_used)),
            ("offloaded", |s| s.reuse.num_offloaded_states as f64),
            ("onboarded", |s| s.reuse.num_onboarded_states as f64),
        ],
    ),
    (
        c"nv_trt_llm_general_metrics",
        c"Time of the last step in microseconds since 1970, and the number of steps",
        "general_type",
        &[
            ("timestamp", |_| {
                chrono::Utc::now().timestamp_micros() as f64
            }),
            ("iteration_counter", |s| s.iteration_counter as f64),
        ],
    ),
];

/// The family of the memory for adapters, which the instances of a model share.
const ADAPTERS: (&CStr, &CStr, &str) = (
    c"nv_inflight_lora_cache_metrics",
    c"Memory for LoRA adapters, in pages, and what it is used for",
    "lora_cache_type",
);

/// The gauge of instances that have failed: alerts and the front read it.
const FAILED_INSTANCES: (&CStr, &CStr) = (
    c"nv_inflight_failed_instances",
    c"Instances that have failed, and serve no requests",
);

/// A value that is 0 for models without adapters.
fn adapters(stats: &StepStats, value: fn(&AdapterUsage) -> u32) -> f64 {
    stats.adapters.as_ref().map_or(0, value).into()
}

/// A value that is 0 for what batches in flight.
fn lockstep(stats: &StepStats, value: fn(&LockstepTotals) -> u64) -> f64 {
    stats.lockstep.as_ref().map_or(0, value) as f64
}

/// Upper bounds of the buckets of TensorRT-LLM's token histograms.
const TOKEN_BUCKETS: &[f64] = &[10.0, 50.0, 100.0, 500.0, 1000.0];

/// Upper bounds in seconds for whole requests and their waits.
const REQUEST_BUCKETS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0,
];

/// Upper bounds in seconds for the time between two tokens.
const TOKEN_TIME_BUCKETS: &[f64] = &[
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0,
];

/// The metrics of one model version, all its instances together.
pub struct Metrics {
    gauges: Vec<(Gauge, Value)>,
    /// Host, GPU and pinned host memory.
    memory: [Gauge; 3],
    /// Tokens that were drafted, and those that were accepted.
    draft_tokens: Counter,
    accepted_tokens: Counter,
    /// Pages in all, pages in use, adapters that are kept, and requests that wait for theirs.
    adapters: [Gauge; 4],
    /// Adapters that were loaded, and those that were evicted.
    loaded_adapters: Counter,
    evicted_adapters: Counter,
    input_tokens: Histogram,
    output_tokens: Histogram,
    queue: Histogram,
    time_to_first_token: Histogram,
    time_per_output_token: Histogram,
    e2e: Histogram,
    failed_instances: Gauge,
    num_failed: Mutex<u32>,
    /// The values of each instance; the page shows their sum.
    instances: Mutex<BTreeMap<u64, Shown>>,
    num_instances_seen: AtomicU64,
}

/// The values of one instance.
struct Shown {
    /// Its last record.
    stats: StepStats,
    memory: MemoryUsage,
}

/// A share of a model version's metrics.
#[derive(Clone)]
pub struct SharedMetrics(Arc<Metrics>);

/// A model's handle to its metrics, released with the model or before.
#[derive(Clone, Default)]
pub struct MetricsShare(Arc<Mutex<Option<SharedMetrics>>>);

impl MetricsShare {
    /// A handle to these metrics, if there are any.
    pub fn new(metrics: Option<SharedMetrics>) -> Self {
        Self(Arc::new(Mutex::new(metrics)))
    }

    /// The metrics, for an instance; `None` where the server has none.
    pub fn get(&self) -> Option<SharedMetrics> {
        self.0.lock().clone()
    }

    /// Releases the metrics: they are deleted when no instance reports to them any more.
    pub fn release(&self) {
        *self.0.lock() = None;
        SharedMetrics::sweep();
    }
}

/// One instance's part in its model's metrics.
pub struct InstanceMetrics {
    metrics: SharedMetrics,
    id: u64,
}

/// All metrics of the process. Locked while any are created or deleted.
static ALL: Mutex<BTreeMap<(String, u64), SharedMetrics>> = Mutex::new(BTreeMap::new());

impl SharedMetrics {
    /// The metrics of version `version` of `model`; `None` where the server has no metrics.
    ///
    /// # Errors
    /// Triton refuses a family or a metric.
    pub fn of(model: &str, version: u64) -> Result<Option<Self>, Error> {
        let mut all = ALL.lock();
        let key = (model.to_owned(), version);
        if let Some(shared) = all.get(&key) {
            return Ok(Some(shared.clone()));
        }
        let Some(metrics) = Metrics::new(model, version)? else {
            return Ok(None);
        };
        let shared = Self(Arc::new(metrics));
        all.insert(key, shared.clone());
        Ok(Some(shared))
    }

    /// An instance's part, which ends when it is dropped. It starts with `stats`.
    pub fn instance(&self, stats: StepStats, memory: MemoryUsage) -> InstanceMetrics {
        let id = self.0.num_instances_seen.fetch_add(1, Ordering::Relaxed);
        self.0.show(|instances| {
            instances.insert(id, Shown { stats, memory });
        });
        InstanceMetrics {
            metrics: self.clone(),
            id,
        }
    }

    /// An instance that may fail.
    pub fn failure_mark(&self) -> FailureMark {
        FailureMark {
            metrics: self.clone(),
            has_failed: false,
        }
    }

    /// Deletes the metrics that no instance reports to any more.
    pub fn sweep() {
        ALL.lock()
            .retain(|_, shared| Arc::strong_count(&shared.0) > 1);
    }
}

/// Whether an instance has failed, as the metrics show it; one that is dropped has not.
pub struct FailureMark {
    metrics: SharedMetrics,
    has_failed: bool,
}

impl FailureMark {
    /// Says whether the instance has failed.
    pub fn set(&mut self, has_failed: bool) {
        if std::mem::replace(&mut self.has_failed, has_failed) == has_failed {
            return;
        }
        let mut num_failed = self.metrics.0.num_failed.lock();
        *num_failed = match has_failed {
            true => *num_failed + 1,
            false => num_failed.saturating_sub(1),
        };
        let num_failed = f64::from(*num_failed);
        self.metrics.0.failed_instances.set(num_failed);
    }
}

impl Drop for FailureMark {
    fn drop(&mut self) {
        self.set(false);
    }
}

impl InstanceMetrics {
    /// Shows a step, added to the latest steps of the model's other instances.
    pub fn step_done(&self, stats: &StepStats) {
        let mut before = None;
        self.metrics.0.show(|instances| {
            if let Some(shown) = instances.get_mut(&self.id) {
                before = std::mem::replace(&mut shown.stats, stats.clone()).drafts;
            }
        });
        if let (Some(before), Some(now)) = (before, stats.drafts) {
            self.metrics.0.drafted(before, now);
        }
    }

    /// Shows that nothing is active; the last step's values would claim that the cache is in use.
    pub fn idle(&self, kv: KvUsage) {
        self.metrics.0.show(|instances| {
            if let Some(shown) = instances.get_mut(&self.id) {
                shown.stats = shown.stats.idle(kv);
            }
        });
    }

    /// Shows the memory for the model's adapters. `counts` are those that were loaded and evicted since the last time.
    pub fn adapters_used(&self, usage: AdapterCacheUsage, counts: (u64, u64)) {
        self.metrics.0.adapters_used(usage, counts);
    }

    /// Counts a request that has ended, and each sequence that it has generated.
    pub fn request_ended(&self, answer: &Answer) {
        self.metrics.0.request_ended(answer);
    }
}

impl Drop for InstanceMetrics {
    /// An instance that has failed, or is unloaded, has no requests, no blocks and no memory.
    fn drop(&mut self) {
        let mut gone = None;
        self.metrics.0.show(|instances| {
            gone = instances.remove(&self.id);
        });
        if let Some(gone) = gone {
            self.metrics.0.show_none_left(&gone.stats.gone());
        }
    }
}

impl Metrics {
    fn new(model: &str, version: u64) -> Result<Option<Self>, Error> {
        let version = version.to_string();
        let labels = |extra: (&'static str, &'static str)| {
            [("model", model), ("version", version.as_str()), extra]
        };
        let mut gauges = Vec::new();
        for (name, help, label, values) in GAUGES {
            let Some(family) = MetricFamily::gauges(name, help)? else {
                return Ok(None);
            };
            for (kind, value) in *values {
                gauges.push((family.gauge(&labels((label, kind)))?, *value));
            }
        }
        let (name, help, label) = MEMORY;
        let Some(family) = MetricFamily::gauges(name, help)? else {
            return Ok(None);
        };
        let memory = |kind| family.gauge(&labels((label, kind)));
        let memory = [memory("cpu")?, memory("gpu")?, memory("pinned")?];
        let counter = |name, help| {
            let plain = [("model", model), ("version", version.as_str())];
            let family = MetricFamily::counters(name, help)?;
            family.map(|family| family.counter(&plain)).transpose()
        };
        let (name, help, label) = ADAPTERS;
        let Some(family) = MetricFamily::gauges(name, help)? else {
            return Ok(None);
        };
        let adapters = |kind| family.gauge(&labels((label, kind)));
        let adapters = [
            adapters("max_pages")?,
            adapters("used_pages")?,
            adapters("kept_adapters")?,
            adapters("loading_requests")?,
        ];
        let (
            Some(draft_tokens),
            Some(accepted_tokens),
            Some(loaded_adapters),
            Some(evicted_adapters),
        ) = (
            counter(
                c"nv_inflight_spec_decode_num_draft_tokens",
                c"Draft tokens that were computed",
            )?,
            counter(
                c"nv_inflight_spec_decode_num_accepted_tokens",
                c"Draft tokens that were accepted",
            )?,
            counter(
                c"nv_inflight_lora_num_loaded",
                c"LoRA adapters that were loaded",
            )?,
            counter(
                c"nv_inflight_lora_num_evicted",
                c"LoRA adapters that left the memory for others",
            )?,
        )
        else {
            return Ok(None);
        };
        let (name, help) = FAILED_INSTANCES;
        let Some(family) = MetricFamily::gauges(name, help)? else {
            return Ok(None);
        };
        let failed_instances = family.gauge(&[("model", model), ("version", version.as_str())])?;
        failed_instances.set(0.0);
        let histogram = |name, help, extra: Option<(&'static str, &'static str)>, buckets| {
            let Some(family) = MetricFamily::histograms(name, help)? else {
                return Ok(None);
            };
            let plain = [("model", model), ("version", version.as_str())];
            match extra {
                Some(extra) => family.histogram(&labels(extra), buckets).map(Some),
                None => family.histogram(&plain, buckets).map(Some),
            }
        };
        let (
            Some(input_tokens),
            Some(output_tokens),
            Some(queue),
            Some(time_to_first_token),
            Some(time_per_output_token),
            Some(e2e),
        ) = (
            histogram(
                c"nv_llm_input_token_len",
                c"Tokens of a request's prompt",
                Some(("response_metric_type", "total_input_tokens")),
                TOKEN_BUCKETS,
            )?,
            histogram(
                c"nv_llm_output_token_len",
                c"Tokens of a sequence that a request has generated",
                Some(("response_metric_type", "total_output_tokens")),
                TOKEN_BUCKETS,
            )?,
            histogram(
                c"nv_inflight_queue_seconds",
                c"From a request's first step in the backend to its first step in the batch",
                None,
                REQUEST_BUCKETS,
            )?,
            histogram(
                c"nv_inflight_time_to_first_token_seconds",
                c"From a request's first step in the backend to its first token",
                None,
                REQUEST_BUCKETS,
            )?,
            histogram(
                c"nv_inflight_time_per_output_token_seconds",
                c"Mean time between two tokens of a sequence, one observation a sequence",
                None,
                TOKEN_TIME_BUCKETS,
            )?,
            histogram(
                c"nv_inflight_e2e_seconds",
                c"From a request's first step in the backend to its last token",
                None,
                REQUEST_BUCKETS,
            )?,
        )
        else {
            return Ok(None);
        };
        Ok(Some(Self {
            gauges,
            memory,
            draft_tokens,
            accepted_tokens,
            adapters,
            loaded_adapters,
            evicted_adapters,
            input_tokens,
            output_tokens,
            queue,
            time_to_first_token,
            time_per_output_token,
            e2e,
            failed_instances,
            num_failed: Mutex::default(),
            instances: Mutex::default(),
            num_instances_seen: AtomicU64::new(0),
        }))
    }

    /// Shows `gone`, the last record of the instance that has just gone, if it was the last.
    fn show_none_left(&self, gone: &StepStats) {
        let instances = self.instances.lock();
        if instances.is_empty() {
            for (gauge, value) in &self.gauges {
                gauge.set(value(gone));
            }
            let gone = self.memory.iter().chain(&self.adapters);
            gone.for_each(|gauge| gauge.set(0.0));
        }
    }

    fn show(&self, change: impl FnOnce(&mut BTreeMap<u64, Shown>)) {
        let mut instances = self.instances.lock();
        change(&mut instances);
        let Some(together) = StepStats::together(instances.values().map(|shown| &shown.stats))
        else {
            return;
        };
        for (gauge, value) in &self.gauges {
            gauge.set(value(&together));
        }
        let memory = instances
            .values()
            .map(|shown| shown.memory)
            .fold(MemoryUsage::default(), MemoryUsage::add);
        let bytes = [memory.host_bytes, memory.gpu_bytes, memory.pinned_bytes];
        for (gauge, bytes) in self.memory.iter().zip(bytes) {
            gauge.set(bytes as f64);
        }
    }

    /// Shows the memory for adapters, and counts those that were loaded and evicted.
    fn adapters_used(&self, usage: AdapterCacheUsage, (num_loaded, num_evicted): (u64, u64)) {
        let values = [
            usage.num_pages,
            usage.num_used,
            usage.num_kept,
            usage.num_loading,
        ];
        for (gauge, value) in self.adapters.iter().zip(values) {
            gauge.set(value.into());
        }
        self.loaded_adapters.add(num_loaded);
        self.evicted_adapters.add(num_evicted);
    }

    /// Counts the drafts between two records of an instance.
    fn drafted(&self, before: DraftTotals, now: DraftTotals) {
        let more = |now: u64, before: u64| now.saturating_sub(before);
        self.draft_tokens
            .add(more(now.num_drafted, before.num_drafted));
        self.accepted_tokens
            .add(more(now.num_accepted, before.num_accepted));
    }

    fn request_ended(&self, answer: &Answer) {
        // One without a prompt only stopped another.
        if answer.format.num_prompt_tokens == 0 || answer.is_warm_up {
            return;
        }
        let arrival = answer.times.arrival;
        let seconds = |to: Instant| to.saturating_duration_since(arrival).as_secs_f64();
        self.input_tokens
            .observe(answer.format.num_prompt_tokens as f64);
        if let Some(admission) = answer.times.admission {
            self.queue.observe(seconds(admission));
        }
        if let (Some(first), Some(last)) = (answer.first_token(), answer.last_token()) {
            self.time_to_first_token.observe(seconds(first));
            self.e2e.observe(seconds(last));
        }
        for row in answer.rows() {
            let num_tokens = row.tokens().len();
            self.output_tokens.observe(num_tokens as f64);
            if let (Some(first), Some(last)) = (row.first_token(), row.last_token())
                && num_tokens > 1
            {
                let time = last.saturating_duration_since(first).as_secs_f64();
                self.time_per_output_token
                    .observe(time / (num_tokens - 1) as f64);
            }
        }
    }
}
