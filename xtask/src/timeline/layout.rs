//! Records arranged as rows, columns and cells on a grid that fits a page.
//!
//! ```text
//!               column 0   column 1   column 2        a column is one step, or as many steps as needed
//! request 7    |context   |generation|generation|     to fit the page
//! request 8    |waiting   |context   |generation|     a row is a request, in order of arrival
//! used blocks  |   12     |    17    |    17    |     a lane is memory of a kind
//! ```

use std::collections::HashMap;
use std::ops::Range;

use inflight_step_records::{Record, Stage};

use crate::Result;

/// Default number of columns: the most that are two pixels wide on a page.
pub const DEFAULT_MAX_COLUMNS: usize = 560;
/// Maximum number of rows on a page.
const MAX_ROWS: usize = 1000;

/// The part of a run to draw.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    /// First and last step, both inclusive; `None` draws all steps.
    pub steps: Option<(u64, u64)>,
    /// Maximum number of columns; not zero.
    pub max_columns: usize,
}

/// One request's cells, from left to right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// The request.
    pub id: u64,
    /// Its cells, one for each column in which it was active.
    pub cells: Vec<Cell>,
}

/// A request's state in a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cell {
    /// The column, from 0.
    pub column: usize,
    /// Its most frequent stage in the column's steps.
    pub stage: Stage,
    /// Number of its tokens computed in these steps.
    pub tokens: u64,
}

impl Cell {
    /// Whether the request runs but computes nothing.
    fn stands_still(&self) -> bool {
        self.tokens == 0 && matches!(self.stage, Stage::Context | Stage::Generation)
    }
}

/// One step, or several consecutive ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Column {
    /// Its first step.
    pub first: u64,
    /// Its last step.
    pub last: u64,
}

/// Memory of a kind, of which some is in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lane {
    /// Its name in the plural.
    pub name: &'static str,
    /// How many there are; not zero.
    pub max: u32,
    /// How many are in use at most, in the steps of each column.
    pub used: Vec<u32>,
}

/// How many are in use of how many.
type Usage = fn(&Record) -> (u32, u32);

/// The kinds of memory, the KV cache first.
const LANES: [(&str, Usage); 4] = [
    ("blocks", |it| (it.used_blocks, it.max_blocks)),
    ("state slots", |it| {
        (it.used_state_slots, it.max_state_slots)
    }),
    ("state snapshots", |it| {
        (it.used_snapshots, it.max_snapshots)
    }),
    ("state snapshots in host memory", |it| {
        (it.used_host_snapshots, it.max_host_snapshots)
    }),
];

/// A run laid out on a grid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timeline {
    /// The requests, in order of arrival.
    pub rows: Vec<Row>,
    /// The steps, in order of time.
    pub columns: Vec<Column>,
    /// Steps per column; the last column may have fewer.
    pub steps_per_column: usize,
    /// The kinds of memory that there are: blocks only if the cache is paged.
    pub lanes: Vec<Lane>,
    /// Number of requests that are not drawn, because there are too many.
    pub num_rows_left_out: usize,
}

impl Timeline {
    /// The part of `run` selected by `view`. A run is the records of one instance, in order.
    ///
    /// # Errors
    /// If there is nothing to show.
    pub fn new(run: &[Record], view: &View) -> Result<Self> {
        let shown = &run[within(run, view.steps)];
        let (Some(first), Some(last)) = (run.first(), run.last()) else {
            return Err("the file has no records".into());
        };
        if shown.is_empty() {
            let (from, to) = view.steps.unwrap_or_default();
            return Err(format!(
                "no steps from {from} to {to}: the file has steps {} to {}",
                first.counter, last.counter
            )
            .into());
        }
        let steps_per_column = shown.len().div_ceil(view.max_columns);
        let mut grid = Grid::default();
        let columns = shown.chunks(steps_per_column).enumerate();
        let columns: Vec<_> = columns
            .map(|(index, steps)| grid.column(index, steps))
            .collect();
        let num_rows = grid.rows.len();
        grid.rows.truncate(MAX_ROWS);
        Ok(Self {
            rows: grid.rows,
            columns,
            steps_per_column,
            lanes: lanes(shown, steps_per_column),
            num_rows_left_out: num_rows.saturating_sub(MAX_ROWS),
        })
    }

    /// The drawn part in words.
    pub fn summary(&self) -> String {
        let (first, last) = match (self.columns.first(), self.columns.last()) {
            (Some(first), Some(last)) => (first.first, last.last),
            _ => (0, 0),
        };
        let num_requests = self.rows.len() + self.num_rows_left_out;
        let s = if num_requests == 1 { "" } else { "s" };
        format!("{num_requests} request{s}, steps {first} to {last}")
    }

    /// Notes that a reader needs to interpret the picture.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if self.steps_per_column > 1 {
            notes.push(format!(
                "One column is {} steps: a cell shows the most frequent stage of its request in these steps, \
                 memory shows the maximum. A smaller range of steps (--steps A..B) shows more detail.",
                self.steps_per_column
            ));
        }
        if self
            .rows
            .iter()
            .flat_map(|row| &row.cells)
            .any(Cell::stands_still)
        {
            notes.push(
                "A slim cell of context or generation: the request runs but computes no tokens."
                    .to_owned(),
            );
        }
        if self.num_rows_left_out > 0 {
            notes.push(format!(
                "The last {} requests to arrive are not drawn. A smaller range of steps (--steps A..B) has \
                 fewer requests.",
                self.num_rows_left_out
            ));
        }
        notes
    }
}

fn lanes(steps: &[Record], steps_per_column: usize) -> Vec<Lane> {
    let lanes = LANES.iter().map(|&(name, usage)| {
        let used = |steps: &[Record]| steps.iter().map(|it| usage(it).0).max();
        let columns = steps.chunks(steps_per_column);
        Lane {
            name,
            max: usage(&steps[0]).1,
            used: columns.filter_map(used).collect(),
        }
    });
    lanes.filter(|lane| lane.max > 0).collect()
}

/// Range of the records whose steps are in `steps`.
fn within(run: &[Record], steps: Option<(u64, u64)>) -> Range<usize> {
    match steps {
        None => 0..run.len(),
        Some((first, last)) => {
            let start = run.partition_point(|record| record.counter < first);
            let end = run.partition_point(|record| record.counter <= last);
            start..end.max(start)
        }
    }
}

/// Number of a request's steps in the current column, by stage.
#[derive(Clone, Copy, Default)]
struct Counts {
    steps: [u32; Stage::ALL.len()],
    tokens: u64,
}

/// Rows under construction, column by column.
#[derive(Default)]
struct Grid {
    rows: Vec<Row>,
    row_of: HashMap<u64, usize>,
    /// By row; all zero between columns.
    counts: Vec<Counts>,
    /// Rows with non-zero counts.
    touched: Vec<usize>,
}

impl Grid {
    /// Adds the column `index`, made of `steps`.
    fn column(&mut self, index: usize, steps: &[Record]) -> Column {
        for share in steps.iter().flat_map(|record| &record.requests) {
            let row = *self.row_of.entry(share.id).or_insert_with(|| {
                self.rows.push(Row {
                    id: share.id,
                    cells: Vec::new(),
                });
                self.counts.push(Counts::default());
                self.rows.len() - 1
            });
            let counts = &mut self.counts[row];
            if counts.steps.iter().all(|&steps| steps == 0) {
                self.touched.push(row);
            }
            counts.steps[share.stage as usize] += 1;
            counts.tokens += u64::from(share.tokens);
        }
        for row in self.touched.drain(..) {
            let Counts { steps, tokens } = std::mem::take(&mut self.counts[row]);
            self.rows[row].cells.push(Cell {
                column: index,
                stage: most_frequent(steps),
                tokens,
            });
        }
        Column {
            first: steps[0].counter,
            last: steps[steps.len() - 1].counter,
        }
    }
}

/// The most frequent stage; of equally frequent ones, the one that computes most.
fn most_frequent(steps: [u32; Stage::ALL.len()]) -> Stage {
    let mut best = Stage::Context;
    for stage in Stage::ALL {
        if steps[stage as usize] > steps[best as usize] {
            best = stage;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use inflight_step_records::Share;

    use super::*;

    /// A run from lines of `id:stage`; each request has the step's number of tokens.
    fn run(steps: &[&[(u64, Stage)]]) -> Vec<Record> {
        let records = (1..).zip(steps).map(|(counter, shares)| Record {
            counter,
            max_blocks: 10,
            used_blocks: counter as u32 % 4,
            max_host_snapshots: 7,
            used_host_snapshots: counter as u32,
            requests: shares
                .iter()
                .map(|&(id, stage)| Share {
                    id,
                    stage,
                    tokens: counter as u32,
                })
                .collect(),
            ..Record::default()
        });
        records.collect()
    }

    /// A request, and the column, stage and tokens of its cells.
    type RowCells = (u64, Vec<(usize, Stage, u64)>);

    fn cells(timeline: &Timeline) -> Vec<RowCells> {
        let row = |row: &Row| {
            let cells = row.cells.iter();
            (
                row.id,
                cells.map(|c| (c.column, c.stage, c.tokens)).collect(),
            )
        };
        timeline.rows.iter().map(row).collect()
    }

    use Stage::{Context, Generation, Paused, Waiting};

    fn five_steps() -> Vec<Record> {
        run(&[
            &[(7, Context)],
            &[(7, Generation), (9, Waiting)],
            &[(7, Generation), (9, Context)],
            &[(9, Paused)],
            &[(9, Context), (8, Waiting)],
        ])
    }

    fn view(steps: Option<(u64, u64)>, max_columns: usize) -> View {
        View { steps, max_columns }
    }

    #[test]
    fn each_step_is_a_column_if_all_fit() {
        let timeline = Timeline::new(&five_steps(), &view(None, 5)).expect("records");
        assert_eq!(
            cells(&timeline),
            [
                (
                    7,
                    vec![(0, Context, 1), (1, Generation, 2), (2, Generation, 3)]
                ),
                (
                    9,
                    vec![
                        (1, Waiting, 2),
                        (2, Context, 3),
                        (3, Paused, 4),
                        (4, Context, 5)
                    ]
                ),
                (8, vec![(4, Waiting, 5)]),
            ]
        );
        assert_eq!(timeline.columns.len(), 5);
        assert_eq!(timeline.summary(), "3 requests, steps 1 to 5");
        assert_eq!(timeline.notes(), Vec::<String>::new());
    }

    #[test]
    fn several_steps_share_a_column_if_they_do_not_fit() {
        let timeline = Timeline::new(&five_steps(), &view(None, 2)).expect("records");
        assert_eq!(
            cells(&timeline),
            [
                (7, vec![(0, Generation, 6)]),
                // Of two equally frequent stages, the one that computes more.
                (9, vec![(0, Context, 5), (1, Context, 9)]),
                (8, vec![(1, Waiting, 5)]),
            ]
        );
        let column = |first, last| Column { first, last };
        assert_eq!(timeline.columns, [column(1, 3), column(4, 5)]);
        let lane = |name, max, used: [u32; 2]| Lane {
            name,
            max,
            used: used.into(),
        };
        let lanes = [
            lane("blocks", 10, [3, 1]),
            lane("state snapshots in host memory", 7, [3, 5]),
        ];
        assert_eq!(timeline.lanes, lanes);
        assert!(
            timeline.notes()[0].contains("3 steps"),
            "{:?}",
            timeline.notes()
        );
    }

    #[test]
    fn a_range_of_steps_has_only_its_own_requests() {
        let timeline = Timeline::new(&five_steps(), &view(Some((4, 9)), 9)).expect("records");
        assert_eq!(
            cells(&timeline),
            [
                (9, vec![(0, Paused, 4), (1, Context, 5)]),
                (8, vec![(1, Waiting, 5)])
            ]
        );
        let error = Timeline::new(&five_steps(), &view(Some((6, 9)), 9)).expect_err("no such step");
        assert_eq!(
            error.to_string(),
            "no steps from 6 to 9: the file has steps 1 to 5"
        );
        let error = Timeline::new(&[], &view(None, 9)).expect_err("no record");
        assert_eq!(error.to_string(), "the file has no records");
    }

    #[test]
    fn a_running_request_without_computed_tokens_is_marked() {
        let mut records = run(&[&[(1, Generation), (2, Waiting)]]);
        let notes = |records: &[Record]| {
            let timeline = Timeline::new(records, &view(None, 9)).expect("a record");
            timeline.notes()
        };
        assert_eq!(notes(&records), Vec::<String>::new());
        records[0].requests[0].tokens = 0;
        assert!(notes(&records)[0].starts_with("A slim cell"));
    }

    #[test]
    fn rows_are_limited_and_the_notes_name_the_rest() {
        let shares: Vec<_> = (0..MAX_ROWS as u64 + 5).map(|id| (id, Waiting)).collect();
        let timeline = Timeline::new(&run(&[&shares]), &view(None, 9)).expect("a record");
        assert_eq!(
            (timeline.rows.len(), timeline.num_rows_left_out),
            (MAX_ROWS, 5)
        );
        assert!(timeline.summary().starts_with("1005 requests"));
        assert!(timeline.notes()[0].contains("last 5 requests"));
    }
}
