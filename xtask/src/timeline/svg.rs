//! The picture of a timeline: a grid of requests and steps, with the KV cache and recurrent states below it.

use inflight_charts::{Anchor, Rect, Scale, Svg, short, text_width};
use inflight_step_records::Stage;

use crate::timeline::layout::{Cell, Column, Lane, Row, Timeline};

/// Preferred width of the grid, if the column widths permit it.
const GRID_WIDTH: f64 = 1120.0;
const COLUMN_WIDTHS: (f64, f64) = (2.0, 34.0);
const GRID_HEIGHT: f64 = 900.0;
const ROW_HEIGHTS: (f64, f64) = (3.0, 22.0);
const MIN_WIDTH: f64 = 560.0;
/// Narrower columns have no gaps, and equal neighbours become one rectangle.
const MIN_SEPARATE_WIDTH: f64 = 6.0;
const MARGIN: f64 = 12.0;
const LINE: f64 = 16.0;
const LEGEND_HEIGHT: f64 = 14.0;
/// Distance from the legend to the grid.
const STEP_NUMBERS: f64 = 30.0;
const LANE_GAP: f64 = 26.0;
const LANE_HEIGHT: f64 = 84.0;
/// Numbers below a lane.
const LANE_FOOT: f64 = 22.0;

/// Draws `timeline`; a stand-alone picture has `title` above and `captions` below.
pub fn draw(timeline: &Timeline, title: Option<&str>, captions: &[String]) -> String {
    let geometry = Geometry::of(timeline, if title.is_some() { LINE + 6.0 } else { 0.0 });
    let bottom = match timeline.lanes.len() {
        0 => geometry.y(geometry.num_rows),
        num_lanes => geometry.lane_y(num_lanes - 1) + LANE_HEIGHT + LANE_FOOT,
    };
    let texts = captions.iter().map(String::as_str).chain(title);
    let width = texts
        .map(text_width)
        .fold(geometry.grid_x + geometry.grid_width(), f64::max)
        .max(MIN_WIDTH)
        + 2.0 * MARGIN;
    let height = bottom + LINE * captions.len() as f64 + MARGIN;
    let mut svg = Svg::new(width.ceil(), height.ceil());
    if let Some(title) = title {
        svg.text("ink", Anchor::Start, MARGIN, MARGIN + 8.0, title);
    }
    draw_legend(&mut svg, &geometry, &timeline.lanes);
    draw_step_numbers(&mut svg, &geometry, &timeline.columns);
    for (index, row) in timeline.rows.iter().enumerate() {
        draw_row(&mut svg, &geometry, index, row, &timeline.columns);
    }
    for (index, lane) in timeline.lanes.iter().enumerate() {
        draw_lane(&mut svg, &geometry, index, lane, &timeline.columns);
    }
    for (n, caption) in captions.iter().enumerate() {
        svg.text(
            "muted",
            Anchor::Start,
            MARGIN,
            bottom + LINE * (n + 1) as f64,
            caption,
        );
    }
    svg.finish(&match title {
        Some(title) => format!("{title}: {}", timeline.summary()),
        None => timeline.summary(),
    })
}

/// Positions of the parts, in pixels.
struct Geometry {
    legend_y: f64,
    grid_x: f64,
    column_width: f64,
    row_height: f64,
    num_columns: usize,
    num_rows: usize,
}

impl Geometry {
    /// `heading`: height of everything above the legend.
    fn of(timeline: &Timeline, heading: f64) -> Self {
        let labels = timeline.rows.iter().map(|row| text_width(&row_label(row)));
        let lanes = timeline.lanes.iter();
        let maxima = lanes.map(|lane| text_width(&lane.max.to_string()));
        let (num_columns, num_rows) = (timeline.columns.len(), timeline.rows.len());
        let share = |whole: f64, num: usize, (min, max): (f64, f64)| {
            (whole / num.max(1) as f64).floor().clamp(min, max)
        };
        Self {
            legend_y: MARGIN + heading,
            grid_x: (MARGIN + labels.chain(maxima).fold(text_width("0"), f64::max) + 8.0).ceil(),
            column_width: share(GRID_WIDTH, num_columns, COLUMN_WIDTHS),
            row_height: share(GRID_HEIGHT, num_rows, ROW_HEIGHTS),
            num_columns,
            num_rows,
        }
    }

    fn x(&self, column: usize) -> f64 {
        self.grid_x + self.column_width * column as f64
    }

    fn grid_y(&self) -> f64 {
        self.legend_y + LEGEND_HEIGHT + STEP_NUMBERS
    }

    /// Position of the step numbers: high enough above the grid that the first row's label, which may be
    /// taller than its row, does not touch them.
    fn step_numbers_y(&self) -> f64 {
        self.grid_y() - 11.0
    }

    fn y(&self, row: usize) -> f64 {
        self.grid_y() + self.row_height * row as f64
    }

    fn grid_width(&self) -> f64 {
        self.column_width * self.num_columns as f64
    }

    fn lane_y(&self, lane: usize) -> f64 {
        let first = self.y(self.num_rows) + LANE_GAP;
        first + (LANE_HEIGHT + LANE_FOOT + LANE_GAP) * lane as f64
    }

    fn columns_are_separate(&self) -> bool {
        self.column_width >= MIN_SEPARATE_WIDTH
    }
}

/// Height of a stage's rectangle as a share of its row. Stages that do not compute are slimmer, so that the
/// stages can be told apart without colours.
fn share_of_row(stage: Stage, computes: bool) -> f64 {
    match stage {
        Stage::Context | Stage::Generation if computes => 1.0,
        Stage::Context | Stage::Generation | Stage::Paused => 0.6,
        Stage::Waiting => 0.25,
    }
}

fn row_label(row: &Row) -> String {
    format!("R{}", row.id)
}

fn draw_legend(svg: &mut Svg, geometry: &Geometry, lanes: &[Lane]) {
    let (mut x, y) = (MARGIN, geometry.legend_y);
    let kv = lanes.first().map(|lane| {
        let is_only = lanes.len() == 1 && lane.name == "blocks";
        let name = if is_only {
            "KV blocks in use"
        } else {
            "memory in use"
        };
        ("kv", name, 1.0)
    });
    let stages = Stage::ALL.map(|stage| (stage.name(), stage.name(), share_of_row(stage, true)));
    for (class, name, share) in stages.into_iter().chain(kv) {
        let swatch = bar(x, y, LEGEND_HEIGHT, LEGEND_HEIGHT, share);
        svg.rect(&format!("{class} swatch"), swatch, None);
        svg.text("ink", Anchor::Start, x + 19.0, y + 11.0, name);
        x += 19.0 + text_width(name) + 16.0;
    }
}

fn draw_step_numbers(svg: &mut Svg, geometry: &Geometry, columns: &[Column]) {
    let widest = columns
        .iter()
        .map(|column| text_width(&column.first.to_string()));
    let step = spacing(widest.fold(0.0, f64::max) + 6.0, geometry.column_width);
    svg.text(
        "muted",
        Anchor::End,
        geometry.grid_x - 8.0,
        geometry.step_numbers_y(),
        "step",
    );
    for (index, column) in columns.iter().enumerate().step_by(step) {
        let (x, y) = (geometry.x(index), geometry.step_numbers_y());
        let number = column.first.to_string();
        if step == 1 {
            svg.text(
                "muted",
                Anchor::Middle,
                x + geometry.column_width / 2.0,
                y,
                &number,
            );
        } else {
            svg.line("grid", (x, y - 8.0), (x, geometry.grid_y()));
            // The last number may have no room to its right.
            if x + text_width(&number) <= geometry.grid_x + geometry.grid_width() + MARGIN {
                svg.text("muted", Anchor::Start, x + 3.0, y, &number);
            }
        }
    }
}

fn draw_row(svg: &mut Svg, geometry: &Geometry, index: usize, row: &Row, columns: &[Column]) {
    let y = geometry.y(index);
    if index.is_multiple_of(spacing(13.0, geometry.row_height)) {
        let middle = y + geometry.row_height / 2.0;
        svg.text(
            "ink",
            Anchor::End,
            geometry.grid_x - 8.0,
            middle + 4.0,
            &row_label(row),
        );
    }
    let separate = geometry.columns_are_separate();
    let runs = row
        .cells
        .chunk_by(|a, b| !separate && a.stage == b.stage && a.column + 1 == b.column);
    for cells in runs {
        let (first, last) = (&cells[0], &cells[cells.len() - 1]);
        let tokens: u64 = cells.iter().map(|cell| cell.tokens).sum();
        let x = geometry.x(first.column);
        let gap = if separate { 1.0 } else { 0.0 };
        let width = geometry.x(last.column + 1) - x - gap;
        let height = geometry.row_height - if geometry.row_height >= 6.0 { 1.0 } else { 0.0 };
        let title = title_of(
            row,
            first,
            columns[first.column].first,
            columns[last.column].last,
            tokens,
        );
        let share = share_of_row(first.stage, tokens > 0);
        svg.rect(
            first.stage.name(),
            bar(x, y, width, height, share),
            Some(&title),
        );
        let label = tokens.to_string();
        if tokens > 0 && height >= 13.0 && text_width(&label) <= width - 2.0 {
            let class = format!("on-{}", first.stage.name());
            svg.text(
                &class,
                Anchor::Middle,
                x + width / 2.0,
                y + height / 2.0 + 4.0,
                &label,
            );
        }
    }
}

fn title_of(row: &Row, cell: &Cell, first: u64, last: u64, tokens: u64) -> String {
    let steps = if first == last {
        format!("step {first}")
    } else {
        format!("steps {first} to {last}")
    };
    let stage = cell.stage.name();
    let tokens = match tokens {
        0 => String::new(),
        1 => ", 1 token".to_owned(),
        tokens => format!(", {tokens} tokens"),
    };
    format!("request {}, {steps}: {stage}{tokens}", row.id)
}

/// Draws memory in use. The blocks of the KV cache need no caption.
fn draw_lane(svg: &mut Svg, geometry: &Geometry, index: usize, lane: &Lane, columns: &[Column]) {
    let (top, bottom) = (geometry.lane_y(index), geometry.lane_y(index) + LANE_HEIGHT);
    let (left, right) = (geometry.grid_x, geometry.grid_x + geometry.grid_width());
    let &Lane { name, max, .. } = lane;
    if name != "blocks" {
        svg.text("muted", Anchor::Start, left, top - 7.0, name);
    }
    let y = Scale::new((0.0, f64::from(max)), (bottom, top));
    let columns = || columns.iter().zip(&lane.used).enumerate();
    let tops = columns().flat_map(|(index, (_, &used))| {
        let y = y.at(f64::from(used));
        [(geometry.x(index), y), (geometry.x(index + 1), y)]
    });
    svg.polygon("kv", tops.chain([(right, bottom), (left, bottom)]));
    svg.line("muted dashed", (left, top), (right, top));
    svg.line("muted", (left, bottom), (right, bottom));
    svg.text(
        "muted",
        Anchor::End,
        left - 8.0,
        top + 4.0,
        &max.to_string(),
    );
    svg.text("muted", Anchor::End, left - 8.0, bottom + 4.0, "0");

    let numbers = columns().map(|(_, (_, used))| text_width(&used.to_string()));
    let has_room = numbers.fold(0.0, f64::max) + 4.0 <= geometry.column_width;
    for (index, (column, &used)) in columns() {
        let target = Rect {
            x: geometry.x(index),
            y: top,
            width: geometry.column_width,
            height: LANE_HEIGHT,
        };
        let percent = short(100.0 * f64::from(used) / f64::from(max));
        let title = if column.first == column.last {
            format!(
                "step {}: {used} of {max} {name} in use, {percent} %",
                column.first
            )
        } else {
            format!(
                "steps {} to {}: up to {used} of {max} {name} in use, {percent} %",
                column.first, column.last
            )
        };
        svg.rect("target", target, Some(&title));
        if has_room {
            let middle = target.x + geometry.column_width / 2.0;
            svg.text(
                "muted",
                Anchor::Middle,
                middle,
                bottom + LINE,
                &used.to_string(),
            );
        }
    }
}

/// A rectangle with a height of `share` of the row, centred, and at least one pixel high.
fn bar(x: f64, y: f64, width: f64, height: f64, share: f64) -> Rect {
    let slim = (height * share).round().max(1.0);
    Rect {
        x,
        y: y + ((height - slim) / 2.0).floor(),
        width,
        height: slim,
    }
}

/// Interval between labels that need `room` each, for items of `size`.
fn spacing(room: f64, size: f64) -> usize {
    let needed = (room / size).ceil().max(1.0) as usize;
    let power = 10usize.pow(needed.ilog10());
    let nice = [power, 2 * power, 5 * power, 10 * power];
    nice.into_iter().find(|&n| n >= needed).unwrap_or(needed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_spaced_by_round_numbers() {
        for (room, size, expected) in [
            (10.0, 34.0, 1),
            (30.0, 10.0, 5),
            (30.0, 2.0, 20),
            (13.0, 3.0, 5),
            (100.0, 10.0, 10),
            (110.0, 10.0, 20),
        ] {
            assert_eq!(spacing(room, size), expected, "{room} of {size}");
        }
    }

    #[test]
    fn a_waiting_request_is_visible_even_in_the_lowest_row() {
        for stage in Stage::ALL {
            let rect = bar(0.0, 10.0, 2.0, ROW_HEIGHTS.0, share_of_row(stage, false));
            assert!(
                rect.height >= 1.0 && rect.y >= 10.0 && rect.y + rect.height <= 13.0,
                "{rect:?}"
            );
        }
    }
}
