//! A writer of SVG elements.

use std::fmt::Write;

use crate::theme;

/// Font size of all text, in pixels.
pub(crate) const FONT_SIZE: f64 = 11.0;
/// Width of the widest digits and letters of common sans-serif fonts, as a share of the font size.
const WIDTH_PER_CHAR: f64 = 0.64;

/// Upper bound of the width of `text` in pixels, for any common sans-serif font.
pub fn text_width(text: &str) -> f64 {
    text.chars().count() as f64 * WIDTH_PER_CHAR * FONT_SIZE
}

/// A rectangle: upper left corner and size, in pixels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rect {
    /// Left edge.
    pub x: f64,
    /// Upper edge.
    pub y: f64,
    /// Extent to the right.
    pub width: f64,
    /// Extent downwards.
    pub height: f64,
}

/// The part of a text that is aligned with its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Anchor {
    /// The beginning of the text.
    Start,
    /// The middle of the text.
    Middle,
    /// The end of the text.
    End,
}

/// A picture under construction.
pub struct Svg {
    width: f64,
    height: f64,
    body: String,
}

impl Svg {
    /// An empty picture; width and height in pixels.
    pub fn new(width: f64, height: f64) -> Self {
        Self {
            width,
            height,
            body: String::new(),
        }
    }

    /// Draws a rectangle with an optional tooltip.
    pub fn rect(&mut self, class: &str, rect: Rect, title: Option<&str>) {
        let Rect {
            x,
            y,
            width,
            height,
        } = rect;
        let (x, y, width, height) = (short(x), short(y), short(width), short(height));
        let _ = write!(
            self.body,
            r#"<rect class="{class}" x="{x}" y="{y}" width="{width}" height="{height}""#
        );
        self.close("rect", title);
    }

    /// Draws a line of text.
    pub fn text(&mut self, class: &str, anchor: Anchor, x: f64, y: f64, text: &str) {
        let anchor = match anchor {
            Anchor::Start => "",
            Anchor::Middle => r#" text-anchor="middle""#,
            Anchor::End => r#" text-anchor="end""#,
        };
        let (x, y, text) = (short(x), short(y), escape(text));
        let _ = writeln!(
            self.body,
            r#"<text class="{class}" x="{x}" y="{y}"{anchor}>{text}</text>"#
        );
    }

    /// Draws a straight line.
    pub fn line(&mut self, class: &str, from: (f64, f64), to: (f64, f64)) {
        let _ = writeln!(
            self.body,
            r#"<line class="{class}" x1="{}" y1="{}" x2="{}" y2="{}"/>"#,
            short(from.0),
            short(from.1),
            short(to.0),
            short(to.1)
        );
    }

    /// Draws a line through `points`, in order.
    pub fn polyline(&mut self, class: &str, points: impl IntoIterator<Item = (f64, f64)>) {
        self.points("polyline", class, points);
    }

    /// Fills the area enclosed by `points`, in order.
    pub fn polygon(&mut self, class: &str, points: impl IntoIterator<Item = (f64, f64)>) {
        self.points("polygon", class, points);
    }

    /// Draws a dot with an optional tooltip.
    pub fn dot(&mut self, class: &str, center: (f64, f64), title: Option<&str>) {
        let (x, y) = (short(center.0), short(center.1));
        let _ = write!(
            self.body,
            r#"<circle class="{class}" cx="{x}" cy="{y}" r="3""#
        );
        self.close("circle", title);
    }

    /// The finished picture; `label` is its accessible name.
    pub fn finish(self, label: &str) -> String {
        let (width, height) = (short(self.width), short(self.height));
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" role=\"img\" aria-label=\"{label}\" \
             width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\">\n\
             <style>\n{style}</style>\n\
             <rect class=\"surface\" width=\"{width}\" height=\"{height}\"/>\n\
             {body}</svg>\n",
            label = escape(label),
            style = theme::style(),
            body = self.body,
        )
    }

    fn points(&mut self, element: &str, class: &str, points: impl IntoIterator<Item = (f64, f64)>) {
        let _ = write!(self.body, r#"<{element} class="{class}" points=""#);
        for (i, (x, y)) in points.into_iter().enumerate() {
            let blank = if i == 0 { "" } else { " " };
            let _ = write!(self.body, "{blank}{},{}", short(x), short(y));
        }
        self.body += "\"/>\n";
    }

    fn close(&mut self, element: &str, title: Option<&str>) {
        let _ = match title {
            Some(title) => writeln!(self.body, "><title>{}</title></{element}>", escape(title)),
            None => writeln!(self.body, "/>"),
        };
    }
}

/// Escapes `text` for XML and HTML.
pub fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped += "&amp;",
            '<' => escaped += "&lt;",
            '>' => escaped += "&gt;",
            '"' => escaped += "&quot;",
            c => escaped.push(c),
        }
    }
    escaped
}

/// A coordinate, rounded to a hundredth of a pixel, without trailing zeros.
fn short(number: f64) -> String {
    let text = format!("{number:.2}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text == "-0" { "0" } else { text }.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coordinates_are_short() {
        for (number, text) in [
            (0.0, "0"),
            (-0.001, "0"),
            (10.0, "10"),
            (1.5, "1.5"),
            (2.0 / 3.0, "0.67"),
        ] {
            assert_eq!(short(number), text);
        }
    }

    #[test]
    fn text_is_escaped_and_cannot_add_elements() {
        let mut svg = Svg::new(10.0, 10.0);
        let rect = Rect {
            x: 0.0,
            y: 0.0,
            width: 1.0,
            height: 1.0,
        };
        svg.rect("context", rect, Some("<a> & \"b\""));
        svg.text("muted", Anchor::End, 1.0, 2.0, "</svg>");
        let picture = svg.finish("a \"picture\"");
        assert!(
            picture.contains("<title>&lt;a&gt; &amp; &quot;b&quot;</title>"),
            "{picture}"
        );
        assert!(
            picture.contains(r#"text-anchor="end">&lt;/svg&gt;</text>"#),
            "{picture}"
        );
        assert!(
            picture.contains(r#"aria-label="a &quot;picture&quot;""#),
            "{picture}"
        );
    }
}
