//! A reader for the backend's statistics file (`stats_file`): one JSON object per line, one line per step.
//!
//! Only the fields that timelines and cost-model fits use are read; a record may have more.

use std::io::{self, BufRead};

use serde::Deserialize;
use thiserror::Error;

/// A request's stage in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stage {
    /// The step computes known tokens: the prompt, or all tokens again after a pause.
    Context,
    /// The step computes the token that was sampled last.
    Generation,
    /// Paused: its blocks are free, and it waits to be resumed.
    Paused,
    /// Waits to be admitted, or for its next chunk.
    Waiting,
}

impl Stage {
    /// All stages, the computing ones first.
    pub const ALL: [Self; 4] = [Self::Context, Self::Generation, Self::Paused, Self::Waiting];

    /// The stage's name in a record.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Context => "context",
            Self::Generation => "generation",
            Self::Paused => "paused",
            Self::Waiting => "waiting",
        }
    }
}

/// One request's part in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct Share {
    /// The backend's own id of the request.
    pub id: u64,
    /// The request's stage.
    pub stage: Stage,
    /// Number of its tokens in this step; 0 if it is paused or waiting.
    pub tokens: u32,
}

/// One step.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct Record {
    /// Step number of an instance, from 1.
    #[serde(rename = "Iteration Counter")]
    pub counter: u64,
    /// Number of KV cache blocks; 0 if the cache is not paged.
    #[serde(rename = "Max KV cache blocks", default)]
    pub max_blocks: u32,
    /// Number of blocks in use during the step.
    #[serde(rename = "Used KV cache blocks", default)]
    pub used_blocks: u32,
    /// Slots of recurrent states: 0 if sequences have none, or reuse no prefixes.
    #[serde(rename = "Max state slots", default)]
    pub max_state_slots: u32,
    /// Slots that running sequences have.
    #[serde(rename = "Used state slots", default)]
    pub used_state_slots: u32,
    /// Snapshots of recurrent states.
    #[serde(rename = "Max state snapshots", default)]
    pub max_snapshots: u32,
    /// Snapshots that sequences can begin with.
    #[serde(rename = "Used state snapshots", default)]
    pub used_snapshots: u32,
    /// Snapshots in host memory.
    #[serde(rename = "Max host state snapshots", default)]
    pub max_host_snapshots: u32,
    /// Snapshots in host memory that sequences can begin with.
    #[serde(rename = "Used host state snapshots", default)]
    pub used_host_snapshots: u32,
    /// Start of the step, in microseconds after the instance was loaded.
    #[serde(rename = "Step Start (us)")]
    pub start_us: f64,
    /// Duration of the model call, in microseconds.
    #[serde(rename = "Model Duration (us)")]
    pub model_us: f64,
    /// Every active request, in order of arrival.
    #[serde(rename = "Requests")]
    pub requests: Vec<Share>,
}

/// An error while reading a statistics file.
#[derive(Debug, Error)]
pub enum ReadError {
    /// A line that is not a record.
    #[error("line {line}: {problem}")]
    Line {
        /// Line number, from 1.
        line: usize,
        /// The problem, with the field's name.
        problem: String,
    },
    /// The file cannot be read.
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// Reads all records in file order. Empty lines are skipped.
///
/// # Errors
/// The first line that is not a record, with the bad field.
pub fn read(lines: impl BufRead) -> Result<Vec<Record>, ReadError> {
    let mut records = Vec::new();
    for (index, text) in lines.lines().enumerate() {
        let text = text?;
        if !text.trim().is_empty() {
            records.push(parse(&text).map_err(|problem| ReadError::Line {
                line: index + 1,
                problem,
            })?);
        }
    }
    Ok(records)
}

/// The records of each run, in order. A reloaded backend appends to the same file and counts from 1 again.
pub fn runs(records: &[Record]) -> Vec<&[Record]> {
    records
        .chunk_by(|before, after| before.counter < after.counter)
        .collect()
}

fn parse(text: &str) -> Result<Record, String> {
    let mut json = serde_json::Deserializer::from_str(text);
    serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = error.path().to_string();
        // The parser sees a single line, so its line number is meaningless; the caller adds the real one.
        let reason = error.inner().to_string();
        let reason = reason.split(" at line ").next().unwrap_or(&reason);
        if path == "." {
            reason.to_owned()
        } else {
            format!("field '{path}': {reason}")
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = concat!(
        r#"{"Timestamp":"11-21-2026 03:15:07","Iteration Counter":42,"#,
        r#""Max KV cache blocks":2048,"Used KV cache blocks":7,"Step Start (us)":812345.1,"#,
        r#""Step Duration (us)":5312.4,"Model Duration (us)":5240.9,"Requests":["#,
        r#"{"id":7,"stage":"context","tokens":8},{"id":9,"stage":"waiting","tokens":0}]}"#,
    );

    fn error_of(text: &str) -> String {
        read(text.as_bytes()).expect_err("not a record").to_string()
    }

    #[test]
    fn reads_every_request_of_a_record() {
        let text = format!("{GOOD}\n\n{GOOD}\n");
        let records = read(text.as_bytes()).expect("good records");
        let shares = [(7, Stage::Context, 8), (9, Stage::Waiting, 0)];
        for record in &records {
            assert_eq!(
                (record.counter, record.max_blocks, record.used_blocks),
                (42, 2048, 7)
            );
            assert_eq!((record.start_us, record.model_us), (812345.1, 5240.9));
            let found = record.requests.iter().map(|s| (s.id, s.stage, s.tokens));
            assert!(found.eq(shares));
        }
        assert_eq!(records.len(), 2);
    }

    #[test]
    fn errors_name_the_line_and_the_field() {
        let bad = |from: &str, to: &str| error_of(&format!("{GOOD}\n{}", GOOD.replace(from, to)));
        for (error, expected) in [
            (
                bad(r#""Requests""#, r#""Others""#),
                "line 2: missing field `Requests`",
            ),
            (
                bad("waiting", "asleep"),
                "line 2: field 'Requests[1].stage': unknown variant `asleep`, expected one of \
                 `context`, `generation`, `paused`, `waiting`",
            ),
            (
                bad(r#"blocks":7"#, r#"blocks":"7""#),
                "line 2: field 'Used KV cache blocks': invalid type: string \"7\", expected u32",
            ),
            (
                bad("]}", ""),
                "line 2: field 'Requests': EOF while parsing a list",
            ),
            (error_of("step"), "line 1: expected value"),
        ] {
            assert_eq!(error, expected);
        }
    }

    #[test]
    fn a_counter_that_restarts_begins_another_run() {
        let record = |counter| Record {
            counter,
            max_blocks: 1,
            ..Record::default()
        };
        let records = [1, 2, 5, 1, 1, 2].map(record);
        let lengths: Vec<_> = runs(&records).iter().map(|run| run.len()).collect();
        assert_eq!(lengths, [3, 1, 2]);
        assert!(runs(&[]).is_empty());
    }
}
