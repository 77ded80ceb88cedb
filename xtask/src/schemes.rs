//! Results of `bench schemes`, as a table and as a picture for the documentation.

use std::fmt::Write;

use inflight_charts::{Bar, Bars, Group, Panel, short};
use serde_json::{Map, Value};

use crate::Result;

/// Columns of the table: heading and figures.
const COLUMNS: &[(&str, &[&str])] = &[
    ("requests/s", &["requests_per_s"]),
    ("output tokens/s", &["output_tokens_per_s"]),
    ("first token p50 / p99 ms", &["ttft_ms_p50", "ttft_ms_p99"]),
    (
        "latency mean / p50 / p99 ms",
        &["latency_ms_mean", "latency_ms_p50", "latency_ms_p99"],
    ),
    ("requests a step", &["requests_per_step"]),
    ("empty slots", &["empty_slot_share"]),
];

/// Result of one scheme under one load.
#[derive(Clone, Debug)]
pub struct Row(Map<String, Value>);

/// Reads rows, one JSON object per line.
///
/// # Errors
/// If a line is not a row, or lacks a field.
pub fn read(lines: &str) -> Result<Vec<Row>> {
    lines.lines().map(Row::read).collect()
}

/// The rows as Markdown.
pub fn table(rows: &[Row]) -> String {
    let mut table = String::from("| load | scheme | policy |");
    for (title, _) in COLUMNS {
        let _ = write!(table, " {title} |");
    }
    table += "\n|---|---|---|";
    table += &"---|".repeat(COLUMNS.len());
    table.push('\n');
    for row in rows {
        let names = ["scheme", "policy"].map(|name| row.text(name));
        let _ = write!(
            table,
            "| {} | `{}` | `{}` |",
            row.load(),
            names[0],
            names[1]
        );
        for (_, figures) in COLUMNS {
            let figures: Vec<_> = figures.iter().map(|name| row.shown(name)).collect();
            let _ = write!(table, " {} |", figures.join(" / "));
        }
        table.push('\n');
    }
    table
}

/// The rows as an SVG picture: maximum throughput, and latencies at a given load.
pub fn draw(rows: &[Row]) -> String {
    let panel = |load: &str, title: &str, figures: &[(&str, f64, &str)]| {
        let of_load: Vec<_> = rows.iter().filter(|row| row.text("load") == load).collect();
        let load = of_load.first().map(|row| row.load()).unwrap_or_default();
        let groups = of_load.iter().map(|row| Group {
            name: row.name().into(),
            bars: figures
                .iter()
                .map(|&(figure, factor, unit)| row.bar(figure, factor, unit))
                .collect(),
        });
        Panel {
            title: format!("{title}; load: {load}"),
            groups: groups.collect(),
        }
    };
    let ttft = [
        ("ttft_ms_p50", 1e-3, "s p50"),
        ("ttft_ms_p99", 1e-3, "s p99"),
    ];
    let latency = [
        ("latency_ms_p50", 1e-3, "s p50"),
        ("latency_ms_p99", 1e-3, "s p99"),
    ];
    let throughput = [("output_tokens_per_s", 1.0, "tokens/s")];
    Bars {
        title: "Batching schemes under one workload of mixed lengths".into(),
        panels: vec![
            panel("closed", "Throughput (more is better)", &throughput),
            panel("open", "Time to first token (less is better)", &ttft),
            panel("open", "Time to whole answer (less is better)", &latency),
        ],
    }
    .draw()
}

impl Row {
    fn read(line: &str) -> Result<Self> {
        let row = Self(serde_json::from_str(line)?);
        let figures = COLUMNS.iter().flat_map(|(_, figures)| *figures);
        let lacks = |name: &&str| !row.0.get(*name).is_some_and(Value::is_number);
        if let Some(name) = figures.copied().find(|name| lacks(name)) {
            return Err(format!("no {name} in {line}").into());
        }
        let lacks = |name: &&str| !row.0.get(*name).is_some_and(Value::is_string);
        if let Some(name) = ["scheme", "policy", "load"]
            .into_iter()
            .find(|name| lacks(name))
        {
            return Err(format!("no {name} in {line}").into());
        }
        Ok(row)
    }

    fn text(&self, name: &str) -> &str {
        self.0[name].as_str().unwrap_or_default()
    }

    fn figure(&self, name: &str) -> f64 {
        self.0[name].as_f64().unwrap_or_default()
    }

    /// A figure as printed in the table.
    fn shown(&self, name: &str) -> String {
        let figure = self.figure(name);
        if name.ends_with("_share") {
            format!("{:.0} %", figure * 100.0)
        } else if figure < 100.0 {
            short(figure)
        } else {
            format!("{figure:.0}")
        }
    }

    /// The load in words.
    fn load(&self) -> String {
        match self.0.get("offered_requests_per_s").and_then(Value::as_f64) {
            Some(rate) => format!("open, {} requests/s", short(rate)),
            None => "closed".into(),
        }
    }

    /// The row's label: the scheme, or its policy if that is not the common one.
    fn name(&self) -> &str {
        match self.text("policy") {
            "static_batch" => "static_batch",
            _ => self.text("scheme"),
        }
    }

    fn bar(&self, figure: &str, factor: f64, unit: &str) -> Bar {
        let value = self.figure(figure) * factor;
        Bar {
            value,
            label: format!("{} {unit}", short(value)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(policy: &str, load: &str, offered: &str) -> String {
        format!(
            r#"{{"scheme": "V1", "policy": "{policy}", "load": "{load}", "offered_requests_per_s": {offered},
            "requests_per_s": 9.8137, "output_tokens_per_s": 2629.9, "ttft_ms_p50": 30.8, "ttft_ms_p99": 128.4,
            "latency_ms_mean": 1243.7, "latency_ms_p50": 1265.9, "latency_ms_p99": 2666.4,
            "requests_per_step": 14.9, "empty_slot_share": 0.4737}}"#
        )
        .replace('\n', " ")
    }

    #[test]
    fn the_table_names_the_load_and_rounds_figures() {
        let lines = [
            line("guaranteed_no_evict", "closed", "null"),
            line("static_batch", "open", "17.9"),
        ];
        let table = table(&read(&lines.join("\n")).expect("rows"));
        let rows: Vec<_> = table.lines().skip(2).collect();
        assert_eq!(
            rows[0],
            "| closed | `V1` | `guaranteed_no_evict` | 9.81 | 2630 | 30.8 / 128 | \
             1244 / 1266 / 2666 | 14.9 | 47 % |"
        );
        assert!(
            rows[1].starts_with("| open, 17.9 requests/s | `V1` | `static_batch` |"),
            "{table}"
        );
    }

    #[test]
    fn the_picture_shows_throughput_of_the_closed_load_and_latencies_of_the_open_load() {
        let lines = [
            line("guaranteed_no_evict", "closed", "null"),
            line("static_batch", "open", "17.9"),
        ];
        let picture = draw(&read(&lines.join("\n")).expect("rows"));
        for text in [
            "2630 tokens/s",
            "0.128 s p99",
            "2.67 s p99",
            "V1",
            "static_batch",
        ] {
            assert!(
                picture.contains(&format!(">{text}</text>")),
                "{text}: {picture}"
            );
        }
        assert_eq!(picture.matches(r#"class="series-"#).count(), 5);
    }

    #[test]
    fn rejects_a_row_without_a_figure_and_names_the_figure() {
        let without = line("static_batch", "open", "17.9").replace("ttft_ms_p99", "ttft");
        let error = read(&without).expect_err("a figure is missing").to_string();
        assert!(error.starts_with("no ttft_ms_p99 in {"), "{error}");
    }
}
