//! Methods that look for a part of a text.

use crate::arguments::{int, required, text};
use crate::error::{Outcome, fail};
use crate::interpreter::Interpreter;
use crate::value::{Arguments, Text, Value};

impl Interpreter<'_> {
    /// `find`, `count` and their like; none for other methods.
    pub(super) fn search_method(
        &mut self,
        of: &Text,
        name: &str,
        arguments: &Arguments,
    ) -> Outcome<Option<Value>> {
        if !matches!(
            name,
            "find" | "rfind" | "index" | "rindex" | "count" | "startswith" | "endswith"
        ) {
            return Ok(None);
        }
        let [part, start, stop] = arguments.clone().bind_positional(name)?;
        let part = required(part, name)?;
        let length = of.length();
        let first = bound(start.as_ref(), 0, length, name)?;
        let last = bound(stop.as_ref(), length, length, name)?;
        // Beyond the end, not even an empty text is found.
        let is_inside = first <= last && first <= length;
        let last = last.min(length);
        let from = of.byte_at(first.min(length));
        let to = of.byte_at(last).max(from);
        let within = &of[from..to];
        if name == "startswith" || name == "endswith" {
            let is_found = |part: &str| {
                is_inside
                    && if name == "startswith" {
                        within.starts_with(part)
                    } else {
                        within.ends_with(part)
                    }
            };
            let mut answer = false;
            match &part {
                Value::Tuple(parts) => {
                    for part in &parts.items {
                        self.budget.work(1)?;
                        answer = answer || is_found(text(part, name)?);
                    }
                }
                part => answer = is_found(text(part, name)?),
            }
            return Ok(Some(Value::Bool(answer)));
        }
        let part = text(&part, name)?;
        self.budget.read(part.len() + within.len())?;
        if name == "count" {
            let count = match part.len() {
                _ if !is_inside => 0,
                0 => last - first + 1,
                _ => within.matches(&*part.text).count(),
            };
            return Ok(Some(Value::Int(count as i128)));
        }
        let found = if name.starts_with('r') {
            within.rfind(&*part.text)
        } else {
            within.find(&*part.text)
        };
        let found = found.filter(|_| is_inside);
        let Some(at) = found else {
            if name.ends_with("index") {
                return fail("substring not found");
            }
            return Ok(Some(Value::Int(-1)));
        };
        let before = &of[..from + at];
        let at = if of.is_ascii {
            before.len()
        } else {
            before.chars().count()
        };
        Ok(Some(Value::Int(at as i128)))
    }
}

/// A bound of the part to look in, in characters.
fn bound(value: Option<&Value>, default: usize, length: usize, what: &str) -> Outcome<usize> {
    match value {
        None | Some(Value::None) => Ok(default),
        Some(value) => {
            let at = int(value, what)?;
            let at = if at < 0 {
                at.saturating_add(length as i128).max(0)
            } else {
                at
            };
            Ok(usize::try_from(at).unwrap_or(usize::MAX))
        }
    }
}
