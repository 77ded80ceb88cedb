//! Steps as Prometheus metrics and as statistics records.

pub mod metrics;
pub mod observer;
mod stats_file;
