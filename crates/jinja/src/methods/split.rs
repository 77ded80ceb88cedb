//! Methods that split a text.

use crate::arguments::{given, int_flag, int_or, required, text};
use crate::error::{Outcome, fail};
use crate::interpreter::Interpreter;
use crate::unicode::{is_line_end, is_space};
use crate::value::{Arguments, Text, Value};

impl Interpreter<'_> {
    /// `split` and its like; none for other methods.
    pub(super) fn split_method(
        &mut self,
        of: &Text,
        name: &str,
        arguments: &Arguments,
    ) -> Outcome<Option<Value>> {
        let arguments = arguments.clone();
        Ok(Some(match name {
            "split" | "rsplit" => {
                let [separator, max] = arguments.bind(name, ["sep", "maxsplit"])?;
                let max = int_or(max.as_ref(), -1, name)?;
                let max = usize::try_from(max).unwrap_or(usize::MAX);
                let separator = given(separator);
                let separator = separator
                    .as_ref()
                    .map(|separator| text(separator, name))
                    .transpose()?;
                if separator.is_some_and(|separator| separator.is_empty()) {
                    return fail(format!("{name}(): the separator is empty"));
                }
                let parts = match (separator, name) {
                    (Some(separator), "split") => {
                        let parts = of.splitn(max.saturating_add(1), &*separator.text);
                        self.parts(of, parts)?
                    }
                    (Some(separator), _) => {
                        let parts = of.rsplitn(max.saturating_add(1), &*separator.text);
                        reversed(self.parts(of, parts)?)
                    }
                    (None, "split") => self.parts(of, Words { rest: of, max })?,
                    (None, _) => reversed(self.parts(of, LastWords { rest: of, max })?),
                };
                Value::list(parts)?
            }
            "splitlines" => {
                let [keep] = arguments.bind(name, ["keepends"])?;
                let keeps_ends = int_flag(keep.as_ref(), name)?;
                let parts = self.parts(
                    of,
                    Lines {
                        rest: of,
                        keeps_ends,
                    },
                )?;
                Value::list(parts)?
            }
            "partition" | "rpartition" => {
                let [separator] = arguments.bind_positional(name)?;
                let separator = required(separator, name)?;
                let separator = text(&separator, name)?;
                if separator.is_empty() {
                    return fail(format!("{name}(): the separator is empty"));
                }
                let is_last = name == "rpartition";
                let at = if is_last {
                    of.rfind(&*separator.text)
                } else {
                    of.find(&*separator.text)
                };
                let parts = match at {
                    Some(at) => [&of[..at], separator, &of[at + separator.len()..]],
                    None if is_last => ["", "", of],
                    None => [of, "", ""],
                };
                Value::tuple(self.parts(of, parts.into_iter())?)?
            }
            _ => return Ok(None),
        }))
    }

    fn parts<'p>(
        &mut self,
        of: &Text,
        parts: impl Iterator<Item = &'p str>,
    ) -> Outcome<Vec<Value>> {
        let mut values = Vec::new();
        for part in parts {
            self.budget.make(part.len() + size_of::<Value>() + 16)?;
            values.push(of.with(part));
        }
        Ok(values)
    }
}

fn reversed(mut parts: Vec<Value>) -> Vec<Value> {
    parts.reverse();
    parts
}

/// The words of a text; after `max` of them, the rest.
struct Words<'t> {
    rest: &'t str,
    max: usize,
}

impl<'t> Iterator for Words<'t> {
    type Item = &'t str;

    fn next(&mut self) -> Option<&'t str> {
        let rest = self.rest.trim_start_matches(is_space);
        if rest.is_empty() {
            return None;
        }
        let end = rest
            .find(is_space)
            .filter(|_| self.max > 0)
            .unwrap_or(rest.len());
        self.max = self.max.saturating_sub(1);
        self.rest = &rest[end..];
        Some(&rest[..end])
    }
}

/// The words of a text from the end; after `max` of them, the rest.
struct LastWords<'t> {
    rest: &'t str,
    max: usize,
}

impl<'t> Iterator for LastWords<'t> {
    type Item = &'t str;

    fn next(&mut self) -> Option<&'t str> {
        let rest = self.rest.trim_end_matches(is_space);
        if rest.is_empty() {
            return None;
        }
        let start = match self.max {
            0 => 0,
            _ => rest.trim_end_matches(|char| !is_space(char)).len(),
        };
        self.max = self.max.saturating_sub(1);
        self.rest = &rest[..start];
        Some(&rest[start..])
    }
}

/// The lines of a text.
pub(crate) struct Lines<'t> {
    pub(crate) rest: &'t str,
    pub(crate) keeps_ends: bool,
}

impl<'t> Iterator for Lines<'t> {
    type Item = &'t str;

    fn next(&mut self) -> Option<&'t str> {
        let rest = self.rest;
        if rest.is_empty() {
            return None;
        }
        let end = rest.find(is_line_end).unwrap_or(rest.len());
        let tail = &rest[end..];
        let length = if tail.starts_with("\r\n") {
            2
        } else {
            tail.chars().next().map_or(0, char::len_utf8)
        };
        self.rest = &tail[length..];
        Some(if self.keeps_ends {
            &rest[..end + length]
        } else {
            &rest[..end]
        })
    }
}
