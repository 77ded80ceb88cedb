//! The library's log lines.

use std::sync::{Mutex, Once};

use log::{Level, LevelFilter, Log, Metadata, Record};

static LINES: Mutex<Vec<(Level, String)>> = Mutex::new(Vec::new());

struct Collector;

impl Log for Collector {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        let line = (record.level(), record.args().to_string());
        LINES.lock().expect("no panic").push(line);
    }

    fn flush(&self) {}
}

/// Starts collecting lines.
pub fn collect() {
    static START: Once = Once::new();
    START.call_once(|| {
        log::set_logger(&Collector).expect("the only one");
        log::set_max_level(LevelFilter::Info);
    });
}

/// Takes the lines that contain `part`, in order.
pub fn take(part: &str) -> Vec<(Level, String)> {
    let mut lines = LINES.lock().expect("no panic");
    lines
        .extract_if(.., |(_, line)| line.contains(part))
        .collect()
}
