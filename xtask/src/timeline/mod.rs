//! `cargo xtask timeline`: a picture of every request in every step of a run, drawn from its statistics file.
//!
//! ```text
//! layout.rs   records as rows, columns and cells
//! svg.rs      the picture
//! html.rs     the page around it
//! ```

mod html;
mod layout;
mod svg;

use std::fs::{self, File};
use std::io::BufReader;
use std::path::{Path, PathBuf};

use clap::Args;
use inflight_step_records::{Record, read, runs};

use crate::Result;
pub use layout::{DEFAULT_MAX_COLUMNS, Timeline, View};

/// The command's arguments.
#[derive(Args)]
pub struct Options {
    /// The statistics file of one model instance (parameter `stats_file`)
    stats: PathBuf,
    /// The page or picture to write: a file name that ends in .html or .svg
    out: PathBuf,
    /// The steps to draw, both inclusive; either end may be omitted [default: all]
    #[arg(long, value_name = "A..B", value_parser = parse_steps)]
    steps: Option<(u64, u64)>,
    /// Maximum number of columns; in a longer run, each column has several steps
    #[arg(long, value_name = "N", default_value_t = DEFAULT_MAX_COLUMNS, value_parser = parse_columns)]
    max_columns: usize,
    /// Title of the picture [default: the statistics file's name]
    #[arg(long)]
    title: Option<String>,
}

/// Draws a statistics file.
pub fn run(options: &Options) -> Result<()> {
    let extension = options
        .out
        .extension()
        .and_then(|extension| extension.to_str());
    let form = match extension {
        Some("html") => page,
        Some("svg") => picture,
        _ => {
            let out = options.out.display();
            return Err(format!("{out}: the name must end in .html or .svg").into());
        }
    };
    let records = read_file(&options.stats)?;
    let runs = runs(&records);
    if runs.len() > 1 {
        eprintln!("the file has {} runs: drawing the last one", runs.len());
    }
    let view = View {
        steps: options.steps,
        max_columns: options.max_columns,
    };
    let last = runs.last().copied().unwrap_or_default();
    let timeline = Timeline::new(last, &view)
        .map_err(|error| format!("{}: {error}", options.stats.display()))?;
    let name = options
        .stats
        .file_name()
        .unwrap_or_default()
        .to_string_lossy();
    let title = options.title.as_deref().unwrap_or(&name);
    fs::write(&options.out, form(&timeline, title))
        .map_err(|error| format!("{}: {error}", options.out.display()).into())
}

/// The timeline as a self-contained HTML page.
pub fn page(timeline: &Timeline, title: &str) -> String {
    let picture = svg::draw(timeline, None, &[]);
    html::page(title, &timeline.summary(), &timeline.notes(), &picture)
}

/// The timeline as an SVG picture.
pub fn picture(timeline: &Timeline, title: &str) -> String {
    svg::draw(timeline, Some(title), &timeline.notes())
}

fn read_file(path: &Path) -> Result<Vec<Record>> {
    let file = File::open(path).map_err(|error| format!("{}: {error}", path.display()))?;
    read(BufReader::new(file)).map_err(|error| format!("{}: {error}", path.display()).into())
}

fn parse_steps(text: &str) -> std::result::Result<(u64, u64), String> {
    let bound = |text: &str, default: u64| match text {
        "" => Some(default),
        text => text.parse().ok(),
    };
    let (first, last) = text.split_once("..").unwrap_or((text, text));
    match (bound(first, 0), bound(last, u64::MAX)) {
        (Some(first), Some(last)) if first <= last => Ok((first, last)),
        _ => Err("write two numbers, the lower one first: 100..200, 100.. or ..200".into()),
    }
}

fn parse_columns(text: &str) -> std::result::Result<usize, String> {
    match text.parse() {
        Ok(columns @ 1..=10_000) => Ok(columns),
        _ => Err("write a number from 1 to 10000".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn either_end_of_a_step_range_can_be_omitted() {
        for (text, steps) in [
            ("3..9", (3, 9)),
            ("3..", (3, u64::MAX)),
            ("..9", (0, 9)),
            ("7", (7, 7)),
        ] {
            assert_eq!(parse_steps(text), Ok(steps));
        }
        for text in ["9..3", "a..b", "1-2", "-1..2"] {
            assert!(parse_steps(text).is_err(), "{text}");
        }
    }
}
