//! Charts of recorded results for the documentation. `docs/src/charts.json` has the figures.

use inflight_charts::{Bar, Bars, Group, Panel, short};
use serde_json::Value;

use crate::Result;

/// The file of the figures, below `docs/src`.
pub const RECORDED: &str = "charts.json";

/// A picture of figures that a page has.
#[derive(Debug)]
pub struct Chart {
    /// The file to draw, below `docs/src`.
    pub picture: String,
    /// The page of the figures, below `docs/src`.
    pub page: String,
    title: String,
    panels: Vec<Panel>,
}

/// Reads the charts.
///
/// # Errors
/// If the text is not JSON, or a field is missing or of another type.
pub fn read(recorded: &str) -> Result<Vec<Chart>> {
    let value: Value = serde_json::from_str(recorded)?;
    list(&value, "charts")?.iter().map(Chart::read).collect()
}

impl Chart {
    fn read(value: &Value) -> Result<Self> {
        let panels = list(value, "panels")?.iter().map(read_panel);
        let (title, place) = (string(value, "title")?, string(value, "where")?);
        Ok(Self {
            picture: string(value, "picture")?,
            page: string(value, "page")?,
            title: format!("{title}: {place}"),
            panels: panels.collect::<Result<_>>()?,
        })
    }

    /// The chart as an SVG picture.
    pub fn draw(&self) -> String {
        let bars = Bars {
            title: self.title.clone(),
            panels: self.panels.clone(),
        };
        bars.draw()
    }
}

fn read_panel(value: &Value) -> Result<Panel> {
    let unit = string(value, "unit")?;
    let groups = list(value, "bars")?.iter().map(|bar| {
        let named = bar.as_array().map(Vec::as_slice);
        let Some([Value::String(name), Value::Number(figure)]) = named else {
            return Err(format!("{bar} is not a name and a figure").into());
        };
        let figure = figure.as_f64().filter(|&figure| figure >= 0.0);
        let figure = figure.ok_or_else(|| format!("{bar} has no figure from 0 on"))?;
        Ok(Group {
            name: name.clone(),
            bars: vec![Bar {
                value: figure,
                label: short(figure) + &unit,
            }],
        })
    });
    Ok(Panel {
        title: string(value, "title")?,
        groups: groups.collect::<Result<_>>()?,
    })
}

fn string(value: &Value, name: &str) -> Result<String> {
    let text = value.get(name).and_then(Value::as_str);
    Ok(text.ok_or_else(|| format!("no {name} in {value}"))?.into())
}

fn list<'a>(value: &'a Value, name: &str) -> Result<&'a Vec<Value>> {
    let list = value.get(name).and_then(Value::as_array);
    Ok(list.ok_or_else(|| format!("no list {name} in {value}"))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOCS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/src");

    fn file(name: &str) -> String {
        std::fs::read_to_string(format!("{DOCS}/{name}")).expect(name)
    }

    fn recorded() -> Vec<Chart> {
        read(&file(RECORDED)).expect("charts")
    }

    #[test]
    fn the_committed_pictures_are_what_the_command_draws() {
        for chart in recorded() {
            assert!(
                chart.draw() == file(&chart.picture),
                "docs/src/{} is out of date: run cargo xtask pictures",
                chart.picture
            );
        }
    }

    /// The cells of the tables of a page, and the figures in each.
    fn figures(page: &str) -> Vec<Vec<&str>> {
        let rows = page.lines().filter(|line| line.starts_with('|'));
        let cells = rows.flat_map(|row| row.split('|'));
        cells.map(|cell| cell.split([' ', ',']).collect()).collect()
    }

    #[test]
    fn pages_show_their_pictures_and_have_the_figures_of_these() {
        for chart in recorded() {
            let page = file(&chart.page);
            assert!(page.contains(&format!("({})", chart.picture)), "{chart:?}");
            let cells = figures(&page);
            let groups = chart.panels.iter().flat_map(|panel| &panel.groups);
            for bar in groups.flat_map(|group| &group.bars) {
                let shown = bar.value.to_string();
                let is_there = cells.iter().any(|cell| cell.contains(&&*shown));
                assert!(is_there, "{} has no {shown}", chart.page);
            }
        }
    }

    #[test]
    fn what_is_not_a_chart_is_refused_with_its_reason() {
        let with = |bars: &str| {
            let panel = format!(r#"{{"title": "t", "unit": "", "bars": {bars}}}"#);
            let head = r#""picture": "p", "page": "q", "title": "t", "where": "w""#;
            read(&format!(
                r#"{{"charts": [{{{head}, "panels": [{panel}]}}]}}"#
            ))
        };
        let charts = with(r#"[["a", 1], ["b", 2.5]]"#).expect("a chart");
        assert_eq!(charts[0].panels[0].groups[1].bars[0].label, "2.5");
        for (bars, reason) in [
            (r#"[["a", "1"]]"#, "is not a name and a figure"),
            (r#"[["a", 1, 2]]"#, "is not a name and a figure"),
            (r#"[["a", -1]]"#, "no figure from 0 on"),
            ("7", "no list bars"),
        ] {
            let error = with(bars).expect_err(bars).to_string();
            assert!(error.contains(reason), "{error}");
        }
        let error = read("{}").expect_err("nothing").to_string();
        assert!(error.contains("no list charts"), "{error}");
    }
}
