//! One JSON file and one table, written again after every row, so that a run that is cut off keeps what it has.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};

use crate::Result;
use crate::figures::four_digits;

/// The name of the JSON file.
const JSON: &str = "gpu-check.json";
/// The name of the table.
const TABLE: &str = "gpu-check.txt";

/// Rows of figures and outcomes.
pub struct Report {
    folder: PathBuf,
    start: Instant,
    stage: &'static str,
    rows: Vec<Row>,
    /// What stages have taken.
    times: Vec<(&'static str, Duration)>,
}

struct Row {
    stage: &'static str,
    name: String,
    outcome: Outcome,
    /// Seconds since the start when it was written.
    at_s: f64,
}

enum Outcome {
    Figures(Map<String, Value>),
    Passed(String),
    Failed(String),
    Skipped(String),
}

impl Report {
    /// An empty report, to be written into a folder.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn new(folder: &Path) -> Result<Self> {
        let report = Self {
            folder: folder.to_owned(),
            start: Instant::now(),
            stage: "",
            rows: Vec::new(),
            times: Vec::new(),
        };
        report.write()?;
        Ok(report)
    }

    /// Later rows belong to this stage.
    pub fn begin(&mut self, stage: &'static str) {
        self.stage = stage;
        eprintln!("{:>4.0} s  {stage}", self.start.elapsed().as_secs_f64());
    }

    /// Figures, as a JSON object.
    ///
    /// # Errors
    /// The report cannot be written.
    pub fn figures(&mut self, name: &str, figures: Value) -> Result<()> {
        let figures = match figures {
            Value::Object(figures) => figures,
            other => Map::from_iter([("value".to_owned(), other)]),
        };
        self.add(name, Outcome::Figures(figures))
    }

    /// A check that has succeeded, with what it says.
    ///
    /// # Errors
    /// As above.
    pub fn passed(&mut self, name: &str, text: &str) -> Result<()> {
        self.add(name, Outcome::Passed(text.to_owned()))
    }

    /// A check that has failed, and why.
    ///
    /// # Errors
    /// As above.
    pub fn failed(&mut self, name: &str, reason: &str) -> Result<()> {
        self.add(name, Outcome::Failed(reason.to_owned()))
    }

    /// The rest of this stage is not run, and why.
    ///
    /// # Errors
    /// As above.
    pub fn skipped(&mut self, reason: &str) -> Result<()> {
        self.add("stage", Outcome::Skipped(reason.to_owned()))
    }

    /// This stage has taken so long.
    ///
    /// # Errors
    /// The report cannot be written.
    pub fn ended(&mut self, time: Duration) -> Result<()> {
        self.times.push((self.stage, time));
        self.write()
    }

    /// Whether nothing has failed.
    pub fn has_succeeded(&self) -> bool {
        let failed = |row: &Row| matches!(row.outcome, Outcome::Failed(_));
        !self.rows.iter().any(failed)
    }

    /// All rows as text.
    pub fn table(&self) -> String {
        let lines = self.rows.iter().map(|row| {
            let text = match &row.outcome {
                Outcome::Figures(figures) => {
                    let pairs = figures.iter().map(|(key, value)| format!("{key} {value}"));
                    pairs.collect::<Vec<_>>().join("  ")
                }
                Outcome::Passed(text) => format!("passed: {text}"),
                Outcome::Failed(reason) => format!("FAILED: {reason}"),
                Outcome::Skipped(reason) => format!("skipped: {reason}"),
            };
            format!("{:<10}  {:<34}  {text}\n", row.stage, row.name)
        });
        let times = self.times.iter().map(|(stage, time)| {
            let seconds = time.as_secs_f64();
            format!("{stage:<10}  {:<34}  {seconds:.1} s\n", "took")
        });
        lines.chain(times).collect()
    }

    fn add(&mut self, name: &str, outcome: Outcome) -> Result<()> {
        self.rows.push(Row {
            stage: self.stage,
            name: name.to_owned(),
            outcome,
            at_s: self.start.elapsed().as_secs_f64(),
        });
        self.write()
    }

    fn write(&self) -> Result<()> {
        let rows: Vec<Value> = self.rows.iter().map(Row::json).collect();
        let times = self.times.iter().map(|(stage, time)| {
            let seconds = four_digits(time.as_secs_f64());
            json!({ "stage": stage, "seconds": seconds })
        });
        let times: Vec<Value> = times.collect();
        let text = serde_json::to_string_pretty(&json!({ "rows": rows, "stages": times }))?;
        for (name, text) in [(JSON, text), (TABLE, self.table())] {
            // A run that is cut off must not leave half of a file.
            let path = self.folder.join(name);
            let new = path.with_extension("new");
            fs::write(&new, text)?;
            fs::rename(new, path)?;
        }
        Ok(())
    }
}

impl Row {
    fn json(&self) -> Value {
        let mut row =
            json!({ "stage": self.stage, "name": self.name, "at_s": four_digits(self.at_s) });
        match &self.outcome {
            Outcome::Figures(figures) => row["figures"] = Value::Object(figures.clone()),
            Outcome::Passed(text) => row["passed"] = json!(text),
            Outcome::Failed(reason) => row["failed"] = json!(reason),
            Outcome::Skipped(reason) => row["skipped"] = json!(reason),
        }
        row
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_complete_after_every_row() {
        let folder = std::env::temp_dir().join(format!("gpu-check-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder");
        let mut report = Report::new(&folder).expect("written");
        report.begin("machine");
        report
            .figures("copy", json!({"gb_per_s": four_digits(4312.34)}))
            .expect("written");
        assert!(report.has_succeeded());
        report.begin("kernels");
        report.failed("rope", "wrong").expect("written");
        report.skipped("no time is left").expect("written");
        assert!(!report.has_succeeded());
        report.ended(Duration::from_millis(2500)).expect("written");
        let text = fs::read_to_string(folder.join(JSON)).expect("there");
        let written: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(written["rows"][0]["figures"]["gb_per_s"], 4312.0);
        assert_eq!(written["rows"][1]["failed"], "wrong");
        assert_eq!(written["rows"][2]["stage"], "kernels");
        assert_eq!(
            written["stages"],
            json!([{"stage": "kernels", "seconds": 2.5}])
        );
        let table = fs::read_to_string(folder.join(TABLE)).expect("there");
        assert_eq!(table, report.table());
        assert!(table.contains("FAILED: wrong") && table.contains("gb_per_s 4312"));
        assert!(table.ends_with("2.5 s\n"), "{table}");
        fs::remove_dir_all(folder).expect("there");
    }
}
