//! Horizontal bar charts in panels. Every bar is labelled, so the reader does not have to tell colours apart.
//!
//! ```text
//! Panel's title
//!    group |#############  label
//!          |##################  label
//!  another |####  label
//! ```

use crate::scale::Scale;
use crate::svg::{Anchor, Rect, Svg, text_width};
use crate::theme::NUM_SERIES;

const WIDTH: f64 = 648.0;
const MARGIN: f64 = 12.0;
const TITLE_Y: f64 = 20.0;
const FIRST_PANEL_Y: f64 = 34.0;
const PANEL_TITLE: f64 = 26.0;
const BAR: f64 = 13.0;
const BAR_GAP: f64 = 1.0;
const GROUP_GAP: f64 = 5.0;
const TEXT_GAP: f64 = 6.0;

/// A picture of panels, stacked vertically.
#[derive(Clone, Debug)]
pub struct Bars {
    /// Title of the picture.
    pub title: String,
    /// The panels, each with its own scale.
    pub panels: Vec<Panel>,
}

/// Groups of bars with comparable values.
#[derive(Clone, Debug)]
pub struct Panel {
    /// The compared quantity, with its unit.
    pub title: String,
    /// The groups, from top to bottom.
    pub groups: Vec<Group>,
}

/// Bars under one name.
#[derive(Clone, Debug)]
pub struct Group {
    /// Label to the left of the bars.
    pub name: String,
    /// The bars, up to [`NUM_SERIES`].
    pub bars: Vec<Bar>,
}

/// One value; not negative.
#[derive(Clone, Debug)]
pub struct Bar {
    /// Length of the bar.
    pub value: f64,
    /// Text behind the end of the bar.
    pub label: String,
}

impl Bars {
    /// The bars as an SVG picture.
    ///
    /// # Panics
    /// If a group has more than [`NUM_SERIES`] bars.
    pub fn draw(&self) -> String {
        let height = FIRST_PANEL_Y + self.panels.iter().map(Panel::height).sum::<f64>() + MARGIN;
        let mut svg = Svg::new(WIDTH, height);
        svg.text("ink", Anchor::Start, MARGIN, TITLE_Y, &self.title);
        let groups = || self.panels.iter().flat_map(|panel| &panel.groups);
        let bars = groups().flat_map(|group| &group.bars);
        let names = widest(groups().map(|group| group.name.as_str()));
        let labels = widest(bars.map(|bar| bar.label.as_str()));
        let left = MARGIN + names + TEXT_GAP;
        let right = WIDTH - MARGIN - labels - TEXT_GAP;
        let mut y = FIRST_PANEL_Y;
        for panel in &self.panels {
            panel.draw(&mut svg, (left, right), y);
            y += panel.height();
        }
        svg.finish(&self.title)
    }
}

impl Panel {
    fn height(&self) -> f64 {
        PANEL_TITLE + self.groups.iter().map(Group::height).sum::<f64>() + GROUP_GAP
    }

    fn draw(&self, svg: &mut Svg, (left, right): (f64, f64), top: f64) {
        svg.text("muted", Anchor::Start, MARGIN, top + 16.0, &self.title);
        let bars = self.groups.iter().flat_map(|group| &group.bars);
        let max = bars.map(|bar| bar.value).fold(0.0, f64::max);
        let scale = Scale::new((0.0, max), (left, right));
        let mut y = top + PANEL_TITLE;
        for group in &self.groups {
            group.draw(svg, &scale, left, y);
            y += group.height();
        }
        svg.line(
            "muted",
            (left, top + PANEL_TITLE - 2.0),
            (left, y - GROUP_GAP + 2.0),
        );
    }
}

impl Group {
    fn height(&self) -> f64 {
        self.bars.len() as f64 * (BAR + BAR_GAP) + GROUP_GAP
    }

    fn draw(&self, svg: &mut Svg, scale: &Scale, left: f64, top: f64) {
        assert!(
            self.bars.len() <= NUM_SERIES,
            "a group has more bars than there are colours"
        );
        let middle = top + (self.height() - GROUP_GAP) / 2.0;
        svg.text(
            "ink",
            Anchor::End,
            left - TEXT_GAP,
            middle + 4.0,
            &self.name,
        );
        for (i, bar) in self.bars.iter().enumerate() {
            let rect = Rect {
                x: left,
                y: top + i as f64 * (BAR + BAR_GAP),
                width: scale.at(bar.value) - left,
                height: BAR,
            };
            let end = left + rect.width + TEXT_GAP;
            svg.rect(&format!("series-{i}"), rect, None);
            svg.text("ink", Anchor::Start, end, rect.y + BAR - 3.0, &bar.label);
        }
    }
}

fn widest<'a>(texts: impl Iterator<Item = &'a str>) -> f64 {
    texts.map(text_width).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(name: &str, values: &[f64]) -> Group {
        let bars = values.iter().map(|&value| Bar {
            value,
            label: format!("{value} s"),
        });
        Group {
            name: name.into(),
            bars: bars.collect(),
        }
    }

    fn draw(groups: Vec<Group>) -> String {
        let panel = Panel {
            title: "latency".into(),
            groups,
        };
        Bars {
            title: "Two schemes".into(),
            panels: vec![panel],
        }
        .draw()
    }

    /// The widths of all bars, in order.
    fn widths(picture: &str) -> Vec<f64> {
        picture
            .lines()
            .filter(|line| line.contains(r#"<rect class="series-"#))
            .map(|line| {
                let (_, rest) = line.split_once(r#" width=""#).expect("a width");
                let (width, _) = rest.split_once('"').expect("its end");
                width.parse().expect("a number")
            })
            .collect()
    }

    #[test]
    fn bar_lengths_are_proportional_to_values_and_all_texts_are_drawn() {
        let picture = draw(vec![group("one", &[1.0, 4.0]), group("other", &[2.0, 8.0])]);
        let widths = widths(&picture);
        assert_eq!(widths.len(), 4, "{picture}");
        for (width, share) in widths.iter().zip([0.125, 0.5, 0.25, 1.0]) {
            assert!((width / widths[3] - share).abs() < 1e-3, "{widths:?}");
        }
        for text in ["Two schemes", "latency", "one", "other", "4 s", "8 s"] {
            assert!(picture.contains(&format!(">{text}</text>")), "no {text}");
        }
    }

    #[test]
    fn the_longest_label_stays_in_the_picture() {
        let picture = draw(vec![group(&"x".repeat(30), &[123456.789])]);
        let label_end = MARGIN
            + text_width(&"x".repeat(30))
            + 2.0 * TEXT_GAP
            + widths(&picture)[0]
            + text_width("123456.789 s");
        assert!(label_end <= WIDTH, "{label_end}");
    }

    #[test]
    fn zero_values_have_zero_length() {
        assert_eq!(widths(&draw(vec![group("none", &[0.0])])), [0.0]);
        assert!(!draw(vec![]).contains("NaN"));
    }
}
