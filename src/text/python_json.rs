//! JSON formatted as by Python's `json.dumps`, for the `tojson` filter of chat templates.

use std::io;

use minijinja::value::Kwargs;
use minijinja::{Error, ErrorKind, Value};
use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};

/// The filter `tojson(indent=none, separators=none, sort_keys=false, ensure_ascii=false)` as
/// defined by Hugging Face transformers. Unlike Jinja's own filter, it does not escape for HTML.
pub(super) fn filter(value: &Value, options: Kwargs) -> Result<String, Error> {
    let problem = |text: String| Error::new(ErrorKind::InvalidOperation, format!("tojson: {text}"));
    let indent: Option<usize> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let sort_keys: Option<bool> = options.get("sort_keys")?;
    let ensure_ascii: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    if value.is_undefined() {
        return Err(problem("the value is undefined".to_owned()));
    }
    if ensure_ascii == Some(true) {
        return Err(problem("ensure_ascii=true is not supported".to_owned()));
    }
    if indent.is_some_and(|indent| indent > MAX_INDENT) {
        return Err(problem(format!("indent is more than {MAX_INDENT}")));
    }
    let (item, key) = match separators.as_deref() {
        // Python's defaults: with line breaks, no space follows a comma.
        None if indent.is_some() => (",", ": "),
        None => (", ", ": "),
        Some([item, key]) => (item.as_str(), key.as_str()),
        Some(_) => {
            return Err(problem(
                "separators must be a list of two strings".to_owned(),
            ));
        }
    };
    let mut value = serde_json::to_value(value).map_err(|error| problem(error.to_string()))?;
    if sort_keys == Some(true) {
        value.sort_all_objects();
    }
    let layout = Layout {
        indent,
        item,
        key,
        depth: 0,
        is_empty: true,
    };
    let mut json = Vec::new();
    value
        .serialize(&mut Serializer::with_formatter(&mut json, layout))
        .map_err(|error| problem(error.to_string()))?;
    String::from_utf8(json).map_err(|error| problem(error.to_string()))
}

/// Maximum indentation per level. Bounds the output: each nesting level adds this many bytes to every line.
const MAX_INDENT: usize = 64;

struct Layout<'a> {
    indent: Option<usize>,
    item: &'a str,
    key: &'a str,
    depth: usize,
    /// Whether the current list or object has no items yet.
    is_empty: bool,
}

impl Layout<'_> {
    fn begin<W: ?Sized + io::Write>(&mut self, out: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth += 1;
        self.is_empty = true;
        out.write_all(bracket)
    }

    fn next<W: ?Sized + io::Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.is_empty = false;
        if !first {
            out.write_all(self.item.as_bytes())?;
        }
        self.line(out)
    }

    fn end<W: ?Sized + io::Write>(&mut self, out: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if !std::mem::take(&mut self.is_empty) {
            self.line(out)?;
        }
        out.write_all(bracket)
    }

    fn line<W: ?Sized + io::Write>(&self, out: &mut W) -> io::Result<()> {
        match self.indent {
            Some(indent) => write!(out, "\n{:1$}", "", indent * self.depth),
            None => Ok(()),
        }
    }
}

impl Formatter for Layout<'_> {
    fn begin_array<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.begin(out, b"[")
    }

    fn end_array<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.end(out, b"]")
    }

    fn begin_array_value<W: ?Sized + io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.next(out, first)
    }

    fn begin_object<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.begin(out, b"{")
    }

    fn end_object<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.end(out, b"}")
    }

    fn begin_object_key<W: ?Sized + io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.next(out, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(self.key.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use minijinja::{Environment, context};

    fn dumped(call: &str) -> Result<String, String> {
        let mut environment = Environment::new();
        environment.add_filter("tojson", super::filter);
        let x =
            serde_json::json!({"b": [1, 2.5, null, true], "a": {}, "c": [], "d": {"<é>": "'\n"}});
        environment
            .render_str(
                &format!("{{{{ x | {call} }}}}"),
                context! { x => minijinja::value::Serde(x) },
            )
            .map_err(|error| error.to_string())
    }

    // The expected texts are the output of Python's json.dumps(x, ensure_ascii=False, ...).
    #[test]
    fn json_is_formatted_as_in_python() {
        let cases = [
            (
                "tojson",
                r#"{"b": [1, 2.5, null, true], "a": {}, "c": [], "d": {"<é>": "'\n"}}"#,
            ),
            (
                "tojson(separators=[',', ':'], sort_keys=true)",
                r#"{"a":{},"b":[1,2.5,null,true],"c":[],"d":{"<é>":"'\n"}}"#,
            ),
            (
                "tojson(indent=2)",
                "{\n  \"b\": [\n    1,\n    2.5,\n    null,\n    true\n  ],\n  \"a\": {},\n  \
                 \"c\": [],\n  \"d\": {\n    \"<é>\": \"'\\n\"\n  }\n}",
            ),
        ];
        for (call, expected) in cases {
            assert_eq!(dumped(call).as_deref(), Ok(expected), "{call}");
        }
    }

    #[test]
    fn rejects_unsupported_options() {
        for call in [
            "ensure_ascii=true",
            "indent=1000",
            "separators=['a']",
            "colour=1",
        ] {
            assert!(dumped(&format!("tojson({call})")).is_err(), "{call}");
        }
        assert!(dumped("attr('none') | tojson").is_err());
    }
}
