//! Reports steps and requests to the metrics page, Triton's verbose log, the statistics file, and the account of the
//! machine's memory.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use serde::Serialize;

use crate::observe::metrics::{InstanceMetrics, SharedMetrics};
use crate::observe::stats_file::StatsFile;
use crate::response::answer::Answer;
use inflight_base::LoadError;
use inflight_engine::{KvUsage, RequestStage, StepStats};
use inflight_manager::sizing::{InstanceMemory, MemoryUsage};
use inflight_manager::{AdapterCacheUsage, AdapterStore, LandedStep, StepTimes, timestamp};

/// A step, as it is recorded.
#[derive(Clone, Debug)]
pub struct StepRecord {
    /// The batch manager's figures.
    pub landed: LandedStep,
    /// When the Execute call ended, by wall-clock time.
    pub ended_at: SystemTime,
    /// When the Execute call began, after the instance was loaded.
    pub start: Duration,
    /// How long the Execute call took.
    pub step: Duration,
}

/// The time and the requests of a record: of a step, or in lockstep of a batch.
#[derive(Default)]
struct Span {
    /// When its first step began; `None` before it.
    start: Option<Duration>,
    end: Duration,
    model: Duration,
    requests: Vec<RequestStage>,
}

impl Span {
    fn add(&mut self, record: &StepRecord) {
        let landed = &record.landed;
        self.start.get_or_insert(record.start);
        self.end = record.start + record.step;
        self.model += landed.model;
        if landed.stats.lockstep.is_none() || self.requests.is_empty() {
            self.requests.clone_from(&landed.stages);
            return;
        }
        for stage in &landed.stages {
            match self.requests.iter_mut().find(|it| it.id == stage.id) {
                Some(known) => {
                    known.stage = stage.stage;
                    known.tokens += stage.tokens;
                }
                None => self.requests.push(*stage),
            }
        }
    }
}

/// The record as JSON: the Batch Manager's fields, and the times.
#[derive(Serialize)]
struct JsonRecord<'a, S: Serialize> {
    #[serde(flatten)]
    stats: S,
    #[serde(flatten)]
    memory: MemoryUsage,
    #[serde(flatten)]
    adapters: Option<AdapterCacheUsage>,
    /// The Batch Manager's time for moving blocks between machines, which is always 0 here.
    #[serde(rename = "KV cache transfer time")]
    kv_transfer_time: f64,
    #[serde(flatten)]
    times: StepTimes<'a>,
}

/// Records the steps and requests of one instance.
pub struct Observer {
    memory: InstanceMemory,
    /// The model's adapters, if it has any.
    adapters: Option<Arc<AdapterStore>>,
    metrics: Option<InstanceMetrics>,
    stats_file: Option<StatsFile>,
    /// The record of a lockstep batch that is not complete yet.
    span: Span,
    /// Buffer of the lines that are being written.
    lines: Vec<u8>,
}

impl Observer {
    /// An observer that also appends to `stats_file`, where there is one. The metrics start with `stats`.
    ///
    /// # Errors
    /// The file cannot be opened for writing.
    pub fn new(
        metrics: Option<&SharedMetrics>,
        stats_file: Option<&Path>,
        stats: StepStats,
        memory: InstanceMemory,
        adapters: Option<Arc<AdapterStore>>,
    ) -> Result<Self, LoadError> {
        let observer = Self {
            metrics: metrics.map(|metrics| metrics.instance(stats, memory.usage())),
            stats_file: stats_file.map(StatsFile::open).transpose()?,
            memory,
            adapters,
            span: Span::default(),
            lines: Vec::new(),
        };
        if let Some(metrics) = &observer.metrics {
            observer.show_adapters(metrics);
        }
        Ok(observer)
    }

    /// Records steps in order. The metrics page shows the last one.
    pub fn steps_done(&mut self, records: &[StepRecord]) {
        let mut steps = records.iter().map(|record| {
            let landed = &record.landed;
            landed.ended.as_ref().unwrap_or(&landed.stats)
        });
        let used = |stats: &StepStats| stats.kv.num_used + stats.kv.num_host_used;
        if let Some(used) = steps.clone().map(used).max() {
            self.memory.mark_used(used);
        }
        if let (Some(metrics), Some(last)) = (&self.metrics, steps.next_back()) {
            self.show_adapters(metrics);
            metrics.step_done(last);
        }
        let verbose = inflight_triton::verbose_enabled();
        if !verbose && self.stats_file.is_none() {
            return;
        }
        let memory = self.memory.usage();
        self.lines.clear();
        for record in records {
            let landed = &record.landed;
            let at = record.ended_at;
            self.write(landed.ended_before.as_ref(), at, memory, verbose);
            self.span.add(record);
            let own = landed.stats.lockstep.is_none().then_some(&landed.stats);
            self.write(landed.ended.as_ref().or(own), at, memory, verbose);
        }
        if let Some(file) = &mut self.stats_file {
            file.write(&self.lines, Instant::now());
        }
    }

    /// Appends a record to the lines, if there is one. The next one begins after it.
    fn write(
        &mut self,
        stats: Option<&StepStats>,
        ended_at: SystemTime,
        memory: MemoryUsage,
        verbose: bool,
    ) {
        let Some(stats) = stats else {
            return;
        };
        let start = self.lines.len();
        let adapters = self.adapters.as_ref().map(|adapters| adapters.usage());
        let usage = (memory, adapters);
        let written = write_json(stats, &self.span, ended_at, usage, &mut self.lines);
        self.span.start = None;
        self.span.model = Duration::ZERO;
        self.span.requests.clear();
        if let Err(error) = written {
            log::warn!("a statistics record has no JSON form: {error}");
            return self.lines.truncate(start);
        }
        if verbose {
            log::debug!("{}", String::from_utf8_lossy(&self.lines[start..]));
        }
        self.lines.push(b'\n');
    }

    /// Shows that nothing is active. There is no record of it: a record is a step.
    pub fn idle(&mut self, kv: KvUsage) {
        if let Some(metrics) = &self.metrics {
            self.show_adapters(metrics);
            metrics.idle(kv);
        }
    }

    fn show_adapters(&self, metrics: &InstanceMetrics) {
        if let Some(adapters) = &self.adapters {
            metrics.adapters_used(adapters.usage(), adapters.take_counts());
        }
    }

    /// Counts a request that has ended. Requests that failed have no latency.
    pub fn request_ended(&mut self, answer: &Answer) {
        if let Some(metrics) = &self.metrics
            && !answer.has_error()
        {
            metrics.request_ended(answer);
        }
    }
}

/// Appends the record's line, without its end.
fn write_json(
    stats: &StepStats,
    span: &Span,
    ended_at: SystemTime,
    (memory, adapters): (MemoryUsage, Option<AdapterCacheUsage>),
    line: &mut Vec<u8>,
) -> serde_json::Result<()> {
    let timestamp = timestamp(ended_at);
    let start = span.start.unwrap_or(span.end);
    let json = JsonRecord {
        stats: stats.with_timestamp(&timestamp),
        memory,
        adapters,
        kv_transfer_time: 0.0,
        times: StepTimes {
            start_us: micros(start),
            step_us: micros(span.end - start),
            model_us: micros(span.model),
            requests: &span.requests,
        },
    };
    serde_json::to_writer(line, &json)
}

fn micros(duration: Duration) -> f64 {
    duration.as_nanos() as f64 / 1e3
}
