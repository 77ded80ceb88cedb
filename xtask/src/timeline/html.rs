//! The HTML page of a timeline: no scripts and no external resources.

use inflight_charts::{escape, theme};

/// A page that shows `picture`, an SVG element, which scrolls if the window is narrower.
pub fn page(title: &str, summary: &str, notes: &[String], picture: &str) -> String {
    let notes: String = notes
        .iter()
        .map(|note| format!("<p class=\"note\">{}</p>\n", escape(note)))
        .collect();
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n<title>{title}</title>\n\
         <style>\n{style}</style>\n</head>\n<body>\n<h1>{title}</h1>\n<p>{summary}</p>\n{notes}\
         <div class=\"picture\" tabindex=\"0\">\n{picture}</div>\n\
         <p class=\"hint\">Point at a cell, or at the memory below, to see its numbers.</p>\n\
         </body>\n</html>\n",
        title = escape(title),
        summary = escape(summary),
        style = style(),
    )
}

fn style() -> String {
    let colors = |pick: fn(&(&str, theme::Rgb, theme::Rgb)) -> theme::Rgb| {
        let color = |name: &str| {
            let found = theme::FRAME.iter().find(|(class, ..)| *class == name);
            theme::hex(found.map_or([0; 3], pick))
        };
        format!(
            "html{{background:{};color:{}}}p{{color:{}}}\n",
            color("surface"),
            color("ink"),
            color("muted")
        )
    };
    let (light, dark) = (colors(|entry| entry.1), colors(|entry| entry.2));
    format!(
        "html{{color-scheme:light dark}}\n\
         body{{font:14px/1.4 system-ui,sans-serif;margin:1rem}}\n\
         h1{{font-size:1.2rem;overflow-wrap:anywhere}}p{{max-width:70ch;margin:.4rem 0}}\n\
         .picture{{overflow-x:auto}}svg{{display:block}}\n\
         {light}@media (prefers-color-scheme:dark){{\n{dark}}}\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_title_and_notes_are_escaped() {
        let page = page("<b>", "1 request", &["a & b".into()], "<svg/>");
        assert!(page.contains("<title>&lt;b&gt;</title>") && page.contains("<h1>&lt;b&gt;</h1>"));
        assert!(page.contains("<p class=\"note\">a &amp; b</p>"), "{page}");
    }
}
