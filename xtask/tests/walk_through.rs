//! The walk-through's pictures in the documentation are drawn from real runs. `UPDATE_DOCS=1 cargo test
//! --package xtask --test walk_through` redraws them.

#[path = "../../crates/engine/tests/suite/documented_runs/mod.rs"]
mod walk_through;

use inflight_step_records::read;
use xtask::timeline::{DEFAULT_MAX_COLUMNS, Timeline, View, picture};

const DOCS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/src");

fn assert_committed(name: &str, enable_chunked_context: bool, title: &str) {
    let file = walk_through::statistics_file(enable_chunked_context);
    let records = read(file.as_bytes()).expect("a statistics file");
    let view = View {
        steps: None,
        max_columns: DEFAULT_MAX_COLUMNS,
    };
    let timeline = Timeline::new(&records, &view).expect("records");
    let drawn = picture(&timeline, title);
    let path = format!("{DOCS}/{name}");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, drawn).expect("docs is writable");
        return;
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        drawn == committed,
        "docs/src/{name} is out of date: run UPDATE_DOCS=1 cargo test --package xtask --test \
         walk_through"
    );
}

#[test]
fn the_committed_picture_without_chunking_is_up_to_date() {
    let title = "Whole contexts: at most 4 requests and 12 tokens in a step";
    assert_committed("walk-through.svg", false, title);
}

#[test]
fn the_committed_picture_with_chunking_is_up_to_date() {
    let title = "Chunked context: at most 4 requests and 12 tokens in a step, blocks of 2 tokens";
    assert_committed("walk-through-chunked.svg", true, title);
}
