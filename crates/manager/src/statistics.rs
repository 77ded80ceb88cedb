//! The statistics record as JSON, as the Batch Manager returns it.

use std::time::SystemTime;

use chrono::{DateTime, Local};
use serde::Serialize;

use inflight_engine::{RequestStage, StepStats};

/// The fields of a line of a statistics file that the Batch Manager does not have.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct StepTimes<'a> {
    /// When the step began, since the start of the instance.
    #[serde(rename = "Step Start (us)")]
    pub start_us: f64,
    /// How long it took.
    #[serde(rename = "Step Duration (us)")]
    pub step_us: f64,
    /// How long the model took.
    #[serde(rename = "Model Duration (us)")]
    pub model_us: f64,
    /// The stage of each request in it.
    #[serde(rename = "Requests")]
    pub requests: &'a [RequestStage],
}

/// A time as the Batch Manager writes it: local time, `%m-%d-%Y %H:%M:%S`.
pub fn timestamp(at: SystemTime) -> String {
    let at = DateTime::<Local>::from(at);
    at.format("%m-%d-%Y %H:%M:%S").to_string()
}

/// A record as one line of JSON, with the field names of TensorRT-LLM's Batch Manager; `at` is its `Timestamp`.
pub fn statistics_json(stats: &StepStats, at: SystemTime) -> String {
    let timestamp = timestamp(at);
    let record = stats.with_timestamp(&timestamp);
    // Numbers and a string can always be serialised.
    serde_json::to_string(&record).unwrap_or_default()
}
