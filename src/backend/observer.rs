//! Who looks at steps and requests: the metrics page, Triton's verbose log, the statistics file, and the
//! ledger of the machine's memory.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::time::{Duration, SystemTime};

use chrono::{DateTime, Local};
use serde::Serialize;

use crate::backend::answer::Answer;
use crate::backend::host_memory::{InstanceMemory, MemoryUsage};
use crate::backend::metrics::{InstanceMetrics, SharedMetrics};
use crate::base::LoadError;
use crate::engine::{KvUsage, RequestStage, StepStats};
use crate::manager::LandedStep;
use crate::triton;

/// A step as it is written down.
#[derive(Clone, Debug)]
pub struct StepRecord {
    /// The batch manager's figures.
    pub landed: LandedStep,
    /// When the Execute call ended, on the wall's clock.
    pub ended_at: SystemTime,
    /// When the Execute call began, after the instance was loaded.
    pub start: Duration,
    /// How long the Execute call took.
    pub step: Duration,
}

/// The record's JSON: the Batch Manager's fields, and where the time went.
#[derive(Serialize)]
struct JsonRecord<'a, S: Serialize> {
    #[serde(flatten)]
    stats: S,
    #[serde(flatten)]
    memory: MemoryUsage,
    /// What the Batch Manager spends on moving blocks between machines: here they stay.
    #[serde(rename = "KV cache transfer time")]
    kv_transfer_time: f64,
    #[serde(rename = "Step Start (us)")]
    start_us: f64,
    #[serde(rename = "Step Duration (us)")]
    step_us: f64,
    #[serde(rename = "Model Duration (us)")]
    model_us: f64,
    #[serde(rename = "Requests")]
    requests: &'a [RequestStage],
}

/// Writes down what happens in one instance.
pub struct Observer {
    memory: InstanceMemory,
    metrics: Option<InstanceMetrics>,
    stats_file: Option<File>,
    /// What is being written; kept for its memory.
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
    ) -> Result<Self, LoadError> {
        let open = |path: &Path| {
            OpenOptions::new()
                .create(true)
                .append(true)
                .open(path)
                .map_err(|e| LoadError::File {
                    path: path.to_owned(),
                    reason: format!("the statistics file cannot be written: {e}"),
                })
        };
        Ok(Self {
            metrics: metrics.map(|metrics| metrics.instance(stats, memory.usage())),
            stats_file: stats_file.map(open).transpose()?,
            memory,
            lines: Vec::new(),
        })
    }

    /// Writes steps down, in their order. The page shows the last of them.
    pub fn steps_done(&mut self, records: &[StepRecord]) {
        let mut steps = records.iter().map(|record| &record.landed.stats);
        if let Some(used) = steps.clone().map(|stats| stats.kv.num_used).max() {
            self.memory.uses(used);
        }
        if let (Some(metrics), Some(last)) = (&self.metrics, steps.next_back()) {
            metrics.step_done(last);
        }
        let verbose = triton::verbose_enabled();
        if !verbose && self.stats_file.is_none() {
            return;
        }
        let memory = self.memory.usage();
        self.lines.clear();
        for record in records {
            let start = self.lines.len();
            if let Err(error) = write_json(record, memory, &mut self.lines) {
                log::warn!("a statistics record has no JSON form: {error}");
                self.lines.truncate(start);
                continue;
            }
            if verbose {
                log::debug!("{}", String::from_utf8_lossy(&self.lines[start..]));
            }
            self.lines.push(b'\n');
        }
        if let Some(file) = &mut self.stats_file
            && let Err(error) = file.write_all(&self.lines)
        {
            log::warn!("the statistics file is closed, it cannot be written: {error}");
            self.stats_file = None;
        }
    }

    /// Shows that nothing is active. There is no record of it: a record is a step.
    pub fn idle(&mut self, kv: KvUsage) {
        if let Some(metrics) = &self.metrics {
            metrics.idle(kv);
        }
    }

    /// Counts a request that has ended; a failed one has no latency worth knowing.
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
    record: &StepRecord,
    memory: MemoryUsage,
    line: &mut Vec<u8>,
) -> serde_json::Result<()> {
    let ended_at = DateTime::<Local>::from(record.ended_at);
    let timestamp = ended_at.format("%m-%d-%Y %H:%M:%S%.6f").to_string();
    let json = JsonRecord {
        stats: record.landed.stats.with_timestamp(&timestamp),
        memory,
        kv_transfer_time: 0.0,
        start_us: micros(record.start),
        step_us: micros(record.step),
        model_us: micros(record.landed.model),
        requests: &record.landed.stages,
    };
    serde_json::to_writer(line, &json)
}

fn micros(duration: Duration) -> f64 {
    duration.as_nanos() as f64 / 1e3
}
