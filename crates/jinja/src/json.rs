//! The filter `tojson`: Python's `json.dumps`.

use std::fmt::Write as _;

use crate::arguments::{flag, given};
use crate::budget::Budget;
use crate::error::{Outcome, fail};
use crate::interpreter::Interpreter;
use crate::repr::push_float;
use crate::value::{Arguments, Text, Value};

/// How values are written.
struct Style {
    is_ascii: bool,
    indent: Option<String>,
    item_separator: Text,
    key_separator: Text,
    sorts_keys: bool,
}

impl Interpreter<'_> {
    pub(crate) fn json_filter(&mut self, value: &Value, arguments: Arguments) -> Outcome<Value> {
        let names = ["ensure_ascii", "indent", "separators", "sort_keys"];
        let [is_ascii, indent, separators, sorts_keys] = arguments.bind("tojson", names)?;
        let indent = match given(indent) {
            None => None,
            Some(Value::Str(indent)) => Some(indent.text.as_ref().to_owned()),
            Some(other) => {
                let width = crate::arguments::int(&other, "tojson")?;
                let width = usize::try_from(width.max(0)).unwrap_or(usize::MAX);
                self.budget.make(width)?;
                Some(" ".repeat(width))
            }
        };
        let mut item_separator = Text::new(if indent.is_some() { "," } else { ", " });
        let mut key_separator = Text::new(": ");
        if let Some(separators) = given(separators) {
            let separators = self.items_of(&separators)?;
            let [Value::Str(item), Value::Str(key)] = separators.as_slice() else {
                return fail("tojson: the separators must be two strings");
            };
            (item_separator, key_separator) = (item.clone(), key.clone());
        }
        let style = Style {
            is_ascii: flag(is_ascii.as_ref()),
            indent,
            item_separator,
            key_separator,
            sorts_keys: flag(sorts_keys.as_ref()),
        };
        let mut out = String::new();
        style.push(&mut out, value, 0, &mut self.budget)?;
        Ok(Value::str(out))
    }
}

impl Style {
    fn push(
        &self,
        out: &mut String,
        value: &Value,
        level: usize,
        budget: &mut Budget,
    ) -> Outcome<()> {
        budget.enter()?;
        budget.make(8)?;
        match value {
            Value::None => out.push_str("null"),
            Value::Bool(true) => out.push_str("true"),
            Value::Bool(false) => out.push_str("false"),
            Value::Int(number) => drop(write!(out, "{number}")),
            Value::Float(number) => push_json_float(out, *number),
            Value::Str(text) => self.push_text(out, text, budget)?,
            Value::List(items) | Value::Tuple(items) => {
                out.push('[');
                for (at, item) in items.items.iter().enumerate() {
                    self.begin_item(out, at, level + 1, budget)?;
                    self.push(out, item, level + 1, budget)?;
                }
                self.end_items(out, items.items.is_empty(), level, budget)?;
                out.push(']');
            }
            Value::Dict(dict) => {
                let mut items: Vec<(&Value, &Value)> = Vec::new();
                budget.make_many(dict.items.len(), 16)?;
                items.extend(dict.items.values().map(|(key, value)| (key, value)));
                if self.sorts_keys {
                    sort_by_keys(&mut items, budget)?;
                }
                out.push('{');
                for (at, (key, value)) in items.iter().enumerate() {
                    self.begin_item(out, at, level + 1, budget)?;
                    self.push_key(out, key, budget)?;
                    budget.make(self.key_separator.len())?;
                    out.push_str(&self.key_separator);
                    self.push(out, value, level + 1, budget)?;
                }
                self.end_items(out, items.is_empty(), level, budget)?;
                out.push('}');
            }
            other => {
                return fail(format!(
                    "Object of type {} is not JSON serializable",
                    other.type_name()
                ));
            }
        }
        budget.leave();
        Ok(())
    }

    fn push_key(&self, out: &mut String, key: &Value, budget: &mut Budget) -> Outcome<()> {
        let mut text = String::new();
        match key {
            Value::Str(key) => return self.push_text(out, key, budget),
            Value::None => text.push_str("null"),
            Value::Bool(key) => text.push_str(if *key { "true" } else { "false" }),
            Value::Int(key) => drop(write!(text, "{key}")),
            Value::Float(key) => push_json_float(&mut text, *key),
            other => {
                let kind = other.type_name();
                return fail(format!(
                    "keys must be str, int, float, bool or None, not {kind}"
                ));
            }
        }
        self.push_text(out, &text, budget)
    }

    fn begin_item(
        &self,
        out: &mut String,
        at: usize,
        level: usize,
        budget: &mut Budget,
    ) -> Outcome<()> {
        if at > 0 {
            budget.make(self.item_separator.len())?;
            out.push_str(&self.item_separator);
        }
        self.push_line(out, level, budget)
    }

    fn end_items(
        &self,
        out: &mut String,
        is_empty: bool,
        level: usize,
        budget: &mut Budget,
    ) -> Outcome<()> {
        if is_empty {
            return Ok(());
        }
        self.push_line(out, level, budget)
    }

    fn push_line(&self, out: &mut String, level: usize, budget: &mut Budget) -> Outcome<()> {
        if let Some(indent) = &self.indent {
            budget.make(indent.len().saturating_mul(level).saturating_add(1))?;
            out.push('\n');
            (0..level).for_each(|_| out.push_str(indent));
        }
        Ok(())
    }

    fn push_text(&self, out: &mut String, text: &str, budget: &mut Budget) -> Outcome<()> {
        // Most texts need no escapes.
        budget.work(text.len() / 8)?;
        budget.make(text.len() + 2)?;
        let before = out.len();
        out.push('"');
        for char in text.chars() {
            match char {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\x08' => out.push_str("\\b"),
                '\x0c' => out.push_str("\\f"),
                ' '..='~' => out.push(char),
                char if (char as u32) < 0x20 || self.is_ascii => {
                    let mut units = [0; 2];
                    for unit in char.encode_utf16(&mut units) {
                        let _ = write!(out, "\\u{unit:04x}");
                    }
                }
                char => out.push(char),
            }
        }
        out.push('"');
        budget.make((out.len() - before).saturating_sub(text.len() + 2))
    }
}

fn push_json_float(out: &mut String, number: f64) {
    match number {
        number if number.is_nan() => out.push_str("NaN"),
        f64::INFINITY => out.push_str("Infinity"),
        f64::NEG_INFINITY => out.push_str("-Infinity"),
        number => push_float(out, number),
    }
}

/// Sorts items by keys that are all texts or all integers.
fn sort_by_keys(items: &mut [(&Value, &Value)], budget: &mut Budget) -> Outcome<()> {
    for (key, _) in items.iter() {
        budget.read(key.as_text().map_or(1, |key| key.len()).saturating_mul(16))?;
    }
    if items.iter().all(|(key, _)| key.as_text().is_some()) {
        items.sort_by_key(|(key, _)| key.as_text().map(|key| key.text.clone()));
        return Ok(());
    }
    if items.iter().all(|(key, _)| key.as_int().is_some()) {
        items.sort_by_key(|(key, _)| key.as_int());
        return Ok(());
    }
    fail("tojson: sort_keys is supported for keys that are all strings or all integers")
}
