//! The statistics file of the real backend in the fake server: it has every step once, in order, and without
//! delay.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::served::{ClientRequest, Server};

/// A statistics file that is deleted after the test.
struct StatsFile(PathBuf);

impl StatsFile {
    fn of(test: &str) -> Self {
        let name = format!("inflight-{test}-{}.jsonl", std::process::id());
        Self(std::env::temp_dir().join(name))
    }

    fn load(&self, step_us: &str) -> Server {
        let path = self
            .0
            .to_str()
            .expect("a temporary directory of plain text");
        Server::load(&[("stats_file", path), ("synthetic_step_us", step_us)])
    }

    fn records(&self) -> Vec<Value> {
        let text = fs::read_to_string(&self.0).expect("the file is there from the load on");
        text.lines()
            .map(|line| serde_json::from_str(line).expect("whole lines of JSON"))
            .collect()
    }

    /// Waits for `count` records.
    fn has(&self, count: usize) -> bool {
        let deadline = Instant::now() + Duration::from_secs(10);
        while Instant::now() < deadline {
            if self.records().len() >= count {
                return true;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        false
    }
}

impl Drop for StatsFile {
    fn drop(&mut self) {
        // If the test failed before the load, there is no file.
        let _ = fs::remove_file(&self.0);
    }
}

fn is_counted_from_one(records: &[Value]) -> bool {
    records
        .iter()
        .zip(1..)
        .all(|(record, count)| record["Iteration Counter"] == count)
}

#[test]
fn quick_steps_are_all_recorded_in_order_with_and_without_streaming() {
    let file = StatsFile::of("quick");
    let mut server = file.load("0");
    let requests =
        [false, true].map(|stream| server.request(&ClientRequest::of_lengths(5, 700, stream)));
    server.finish(&requests);
    server.unload();
    let records = file.records();
    assert_eq!(records.len(), 700);
    assert!(is_counted_from_one(&records));
    let starts = records.iter().map(|r| r["Step Start (us)"].as_f64());
    assert!(starts.is_sorted());
    let moments = records.iter().map(|r| r["Timestamp"].as_str());
    assert!(
        moments.is_sorted(),
        "the time of the step, not of the writing"
    );
}

#[test]
fn records_of_many_quick_steps_are_written_before_the_end() {
    let file = StatsFile::of("many");
    let mut server = file.load("0");
    let request = server.request(&ClientRequest::of_lengths(5, 1000, false));
    for _ in 0..600 {
        assert_eq!(server.execute(&[request]), Ok(()));
    }
    // The responder is woken when 256 records wait; there may be fewer that arrive after it has read them.
    assert!(file.has(600 - 255));
    server.finish(&[request]);
    server.unload();
}

#[test]
fn a_slow_steps_record_does_not_wait_for_the_next_step() {
    let file = StatsFile::of("slow");
    let mut server = file.load("110000");
    let request = server.request(&ClientRequest::of_lengths(5, 3, false));
    for count in 1..=2 {
        assert_eq!(server.execute(&[request]), Ok(()));
        assert!(file.has(count), "the record of step {count}");
    }
    server.finish(&[request]);
    server.unload();
}

#[test]
fn the_last_steps_records_are_written_after_their_answers() {
    let file = StatsFile::of("last");
    let mut server = file.load("0");
    let request = server.request(&ClientRequest::of_lengths(5, 4, false));
    server.finish(&[request]);
    assert!(file.has(4), "nothing is in flight any more");
    server.unload();
}
