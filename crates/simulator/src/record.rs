//! Statistics records of simulated steps, as the backend writes them.

use std::io::Write;

use chrono::DateTime;
use inflight_manager::StepTimes;
use serde::Serialize;

use crate::Result;
use crate::step_loop::Landed;

#[derive(Serialize)]
struct Record<'a, S: Serialize> {
    #[serde(flatten)]
    stats: S,
    #[serde(flatten)]
    times: StepTimes<'a>,
}

/// Appends a step to a statistics file. Simulated time starts at 1970-01-01.
///
/// # Errors
/// If the file cannot be written.
pub fn write_record(file: &mut dyn Write, landed: &Landed) -> Result<()> {
    let Some((stats, began)) = &landed.record else {
        return Ok(());
    };
    let timestamp = DateTime::from_timestamp_nanos(landed.ended.0.cast_signed())
        .format("%m-%d-%Y %H:%M:%S")
        .to_string();
    let model_us = (landed.ended - *began).as_us();
    let record = Record {
        stats: stats.with_timestamp(&timestamp),
        times: StepTimes {
            start_us: began.as_us(),
            step_us: model_us,
            model_us,
            requests: &landed.stages,
        },
    };
    serde_json::to_writer(&mut *file, &record)?;
    file.write_all(b"\n")?;
    Ok(())
}
