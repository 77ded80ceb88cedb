//! Charts of a simulation's results.

use inflight_charts::{Chart, Series, Shape};

use crate::report::{Latency, Report};
use crate::simulation::{Outcome, Setup, StepLog};

/// Maximum number of points in a line; a chart has no pixels for more.
const MAX_POINTS: usize = 500;

/// Blocks of the KV cache in use, over time.
pub fn kv_cache(setup: &Setup, outcome: &Outcome) -> String {
    Chart {
        title: "KV cache over time".into(),
        x_label: "s".into(),
        y_label: "blocks in use".into(),
        limit: Some((f64::from(setup.engine.num_blocks.0), "all blocks".into())),
        series: vec![series("in use", Shape::Area, outcome, |step| {
            step.num_used_blocks
        })],
    }
    .draw()
}

/// Requests at the server and in a step, over time.
pub fn requests(outcome: &Outcome) -> String {
    Chart {
        title: "Requests over time".into(),
        x_label: "s".into(),
        y_label: "requests".into(),
        limit: None,
        series: vec![
            series("at the server", Shape::Area, outcome, |step| {
                step.num_active
            }),
            series("in a step", Shape::Steps, outcome, |step| {
                step.num_scheduled
            }),
        ],
    }
    .draw()
}

/// A latency over the load; `load_label` names the load's unit.
pub fn latency(
    title: &str,
    load_label: &str,
    reports: &[(f64, Report)],
    which: fn(&Report) -> Latency,
) -> String {
    let series = |name: &str, value: fn(Latency) -> f64| Series {
        name: name.into(),
        shape: Shape::Dots,
        points: reports
            .iter()
            .map(|(load, report)| (*load, value(which(report))))
            .collect(),
    };
    Chart {
        title: title.into(),
        x_label: load_label.into(),
        y_label: "ms".into(),
        limit: None,
        series: vec![
            series("mean", |latency| latency.mean),
            series("p50", |latency| latency.p50),
            series("p90", |latency| latency.p90),
            series("p99", |latency| latency.p99),
        ],
    }
    .draw()
}

/// The maximum in each of `MAX_POINTS` intervals, so that short peaks stay visible.
fn series(name: &str, shape: Shape, outcome: &Outcome, value: fn(&StepLog) -> u32) -> Series {
    let steps = &outcome.steps;
    let steps_per_point = steps.len().div_ceil(MAX_POINTS).max(1);
    let point = |steps: &[StepLog]| {
        let most = steps.iter().map(value).max().unwrap_or(0);
        (steps[0].began.as_s(), f64::from(most))
    };
    let mut points: Vec<_> = steps.chunks(steps_per_point).map(point).collect();
    if let (Some(last), Some(&(_, value))) = (steps.last(), points.last()) {
        points.push((last.ended.as_s(), value));
    }
    Series {
        name: name.into(),
        shape,
        points,
    }
}
