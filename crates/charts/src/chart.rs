//! Lines and areas over two axes.

use crate::scale::{Scale, short};
use crate::svg::{Anchor, Rect, Svg, text_width};
use crate::theme::NUM_SERIES;

const PLOT: Rect = Rect {
    x: 64.0,
    y: 58.0,
    width: 560.0,
    height: 220.0,
};
const WIDTH: f64 = 648.0;
const HEIGHT: f64 = 324.0;
const LEGEND_Y: f64 = 42.0;

/// How a series is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Straight lines from point to point, and a dot at each.
    Dots,
    /// A step line: each value holds until the next point.
    Steps,
    /// A step line with the area below it filled.
    Area,
}

/// One line or area.
#[derive(Clone, Debug)]
pub struct Series {
    /// Name in the legend.
    pub name: String,
    /// How it is drawn.
    pub shape: Shape,
    /// Its points, in order of the horizontal axis.
    pub points: Vec<(f64, f64)>,
}

/// A chart: up to six series over the same axes, which start at zero.
#[derive(Clone, Debug)]
pub struct Chart {
    /// Title of the chart.
    pub title: String,
    /// Label of the horizontal axis, with its unit.
    pub x_label: String,
    /// Label of the vertical axis, with its unit.
    pub y_label: String,
    /// An upper limit drawn across the chart, and its label.
    pub limit: Option<(f64, String)>,
    /// The lines and areas, the first at the back.
    pub series: Vec<Series>,
}

impl Chart {
    /// The chart as an SVG picture.
    ///
    /// # Panics
    /// If there are more than [`NUM_SERIES`] series.
    pub fn draw(&self) -> String {
        assert!(
            self.series.len() <= NUM_SERIES,
            "the chart has more series than there are colours"
        );
        let mut svg = Svg::new(WIDTH, HEIGHT);
        let points = || self.series.iter().flat_map(|series| &series.points);
        let max_x = points().map(|point| point.0).fold(0.0, f64::max);
        let limit = self.limit.as_ref().map_or(0.0, |(limit, _)| *limit);
        let max_y = points().map(|point| point.1).fold(limit, f64::max);
        let x = Scale::new((0.0, or_one(max_x)), (PLOT.x, PLOT.x + PLOT.width));
        // Leave a margin above the highest value.
        let y = Scale::new((0.0, or_one(max_y) * 1.05), (PLOT.y + PLOT.height, PLOT.y));

        svg.text("ink", Anchor::Start, 12.0, 20.0, &self.title);
        self.axes(&mut svg, &x, &y);
        for (i, series) in self.series.iter().enumerate() {
            draw_series(&mut svg, &format!("series-{i}"), series, &x, &y);
        }
        if let Some((limit, name)) = &self.limit {
            let (left, right) = (PLOT.x, PLOT.x + PLOT.width);
            svg.line("muted dashed", (left, y.at(*limit)), (right, y.at(*limit)));
            svg.text("muted", Anchor::End, right, y.at(*limit) - 4.0, name);
        }
        self.legend(&mut svg);
        svg.finish(&self.title)
    }

    fn axes(&self, svg: &mut Svg, x: &Scale, y: &Scale) {
        let (left, right) = (PLOT.x, PLOT.x + PLOT.width);
        let (top, bottom) = (PLOT.y, PLOT.y + PLOT.height);
        for tick in y.ticks(6) {
            svg.line("grid", (left, y.at(tick)), (right, y.at(tick)));
            svg.text(
                "muted",
                Anchor::End,
                left - 6.0,
                y.at(tick) + 4.0,
                &short(tick),
            );
        }
        for tick in x.ticks(10) {
            svg.line("muted", (x.at(tick), bottom), (x.at(tick), bottom + 4.0));
            svg.text(
                "muted",
                Anchor::Middle,
                x.at(tick),
                bottom + 16.0,
                &short(tick),
            );
        }
        svg.line("muted", (left, bottom), (right, bottom));
        svg.text("muted", Anchor::End, right, bottom + 34.0, &self.x_label);
        svg.text("muted", Anchor::Start, 12.0, top - 10.0, &self.y_label);
    }

    fn legend(&self, svg: &mut Svg) {
        // A single series needs no legend: the title names it.
        if self.series.len() < 2 {
            return;
        }
        let entry_width = |series: &Series| 14.0 + text_width(&series.name) + 16.0;
        let width: f64 = self.series.iter().map(entry_width).sum();
        let mut x = PLOT.x + PLOT.width - width;
        for (i, series) in self.series.iter().enumerate() {
            let swatch = Rect {
                x,
                y: LEGEND_Y - 9.0,
                width: 10.0,
                height: 10.0,
            };
            svg.rect(&format!("series-{i}"), swatch, None);
            svg.text("ink", Anchor::Start, x + 14.0, LEGEND_Y, &series.name);
            x += entry_width(series);
        }
    }
}

fn draw_series(svg: &mut Svg, class: &str, series: &Series, x: &Scale, y: &Scale) {
    let at = |&(across, up): &(f64, f64)| (x.at(across), y.at(up));
    match series.shape {
        Shape::Dots => {
            svg.polyline(class, series.points.iter().map(at));
            for point in &series.points {
                let title = format!("{}: {} at {}", series.name, short(point.1), short(point.0));
                svg.dot(class, at(point), Some(&title));
            }
        }
        Shape::Steps => svg.polyline(class, steps(&series.points).iter().map(at)),
        Shape::Area => {
            let steps = steps(&series.points);
            if let (Some(first), Some(last)) = (steps.first(), steps.last()) {
                let ground = [(last.0, 0.0), (first.0, 0.0)];
                svg.polygon(class, steps.iter().chain(&ground).map(at));
            }
        }
    }
}

/// The corners of a line that holds each value until the next point.
fn steps(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let mut corners = Vec::with_capacity(2 * points.len());
    for (i, &point) in points.iter().enumerate() {
        if i > 0 {
            corners.push((point.0, points[i - 1].1));
        }
        corners.push(point);
    }
    corners
}

fn or_one(max: f64) -> f64 {
    if max > 0.0 { max } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(series: Vec<Series>) -> String {
        Chart {
            title: "Latency over load".into(),
            x_label: "requests/s".into(),
            y_label: "ms".into(),
            limit: Some((50.0, "limit".into())),
            series,
        }
        .draw()
    }

    fn series(name: &str, shape: Shape, points: &[(f64, f64)]) -> Series {
        Series {
            name: name.into(),
            shape,
            points: points.to_vec(),
        }
    }

    #[test]
    fn a_value_holds_until_the_next_point() {
        assert_eq!(
            steps(&[(0.0, 1.0), (2.0, 5.0), (3.0, 0.0)]),
            [(0.0, 1.0), (2.0, 1.0), (2.0, 5.0), (3.0, 5.0), (3.0, 0.0)]
        );
    }

    #[test]
    fn every_series_is_drawn_and_named() {
        let picture = chart(vec![
            series("mean", Shape::Dots, &[(1.0, 10.0), (2.0, 40.0)]),
            series("p99", Shape::Steps, &[(1.0, 20.0), (2.0, 70.0)]),
            series("used", Shape::Area, &[(1.0, 5.0), (2.0, 6.0)]),
        ]);
        assert_eq!(picture.matches("<circle").count(), 2);
        assert_eq!(picture.matches("<polyline").count(), 2);
        assert_eq!(picture.matches("<polygon").count(), 1);
        for name in ["mean", "p99", "used", "limit", "requests/s", "ms"] {
            assert!(picture.contains(&format!(">{name}</text>")), "no {name}");
        }
    }

    #[test]
    fn a_chart_without_series_is_empty() {
        let picture = chart(vec![series("none", Shape::Area, &[])]);
        assert!(
            !picture.contains("<polygon") && !picture.contains("NaN"),
            "{picture}"
        );
    }
}
