//! Methods that give another text: stripped, padded, replaced, joined.

use std::borrow::Cow;

use super::{classes, not_supported};
use crate::arguments::{given, int, int_or, required, text};
use crate::error::{Outcome, fail};
use crate::filters::escaped;
use crate::interpreter::Interpreter;
use crate::unicode::is_space;
use crate::value::{Arguments, Iter, Text, Value};

/// Methods of markup that escape their arguments, or give what is no markup.
const NOT_OF_MARKUP: [&str; 14] = [
    "center",
    "escape",
    "format",
    "format_map",
    "join",
    "ljust",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rjust",
    "rpartition",
    "translate",
    "unescape",
];

impl Interpreter<'_> {
    pub(super) fn text_method(
        &mut self,
        of: &Text,
        name: &str,
        arguments: Arguments,
    ) -> Outcome<Value> {
        if of.is_markup && NOT_OF_MARKUP.contains(&name) {
            return fail(format!(
                "the method '{name}' of a text that is marked as safe is not supported"
            ));
        }
        if name.starts_with("is") {
            self.budget.work(of.len() / 4)?;
        }
        if let Some(answer) = classes::answer(of, name) {
            arguments.none(name)?;
            return Ok(Value::Bool(answer));
        }
        if let Some(value) = self.search_method(of, name, &arguments)? {
            return Ok(value);
        }
        if let Some(value) = self.split_method(of, name, &arguments)? {
            return Ok(value);
        }
        match name {
            "lower" | "upper" | "capitalize" | "title" | "swapcase" | "casefold" => {
                arguments.none(name)?;
                match name {
                    "lower" => self.lower(of),
                    "upper" => self.upper(of),
                    "capitalize" => self.capitalize(of),
                    "title" => self.title_method(of),
                    "swapcase" => self.swap_case(of),
                    _ if of.is_ascii => self.lower(of),
                    _ => fail("the method 'casefold' is supported for ASCII only: use 'lower'"),
                }
            }
            "strip" | "lstrip" | "rstrip" => {
                let [chars] = arguments.bind_positional(name)?;
                self.strip(of, given(chars).as_ref(), name)
            }
            "removeprefix" | "removesuffix" => {
                let [part] = arguments.bind_positional(name)?;
                let part = required(part, name)?;
                let part = text(&part, name)?;
                let rest = match name {
                    "removeprefix" => of.strip_prefix(&*part.text),
                    _ => of.strip_suffix(&*part.text),
                };
                self.budget.make(of.len())?;
                Ok(of.with(rest.unwrap_or(of)))
            }
            "replace" => {
                let [old, new, count] = arguments.bind_positional(name)?;
                let (old, new) = (required(old, name)?, required(new, name)?);
                let count = int_or(count.as_ref(), -1, name)?;
                self.replace(of, text(&old, name)?, text(&new, name)?, count)
            }
            "join" => {
                let [items] = arguments.bind_positional(name)?;
                self.join(of, &required(items, name)?)
            }
            "center" | "ljust" | "rjust" => {
                let [width, fill] = arguments.bind_positional(name)?;
                let width = int(&required(width, name)?, name)?;
                let fill = fill.unwrap_or_else(|| Value::str(" "));
                let fill = text(&fill, name)?;
                self.pad(of, width, fill, name)
            }
            "zfill" => {
                let [width] = arguments.bind_positional(name)?;
                let width = int(&required(width, name)?, name)?;
                let sign = if of.starts_with(['+', '-']) { 1 } else { 0 };
                let missing = width.saturating_sub(of.length() as i128).max(0);
                let missing = usize::try_from(missing).unwrap_or(usize::MAX);
                self.budget.make(missing.saturating_add(of.len()))?;
                Ok(of.with(format!(
                    "{}{}{}",
                    &of[..sign],
                    "0".repeat(missing),
                    &of[sign..]
                )))
            }
            "expandtabs" => {
                let [size] = arguments.bind(name, ["tabsize"])?;
                let size = int_or(size.as_ref(), 8, name)?;
                self.expand_tabs(of, usize::try_from(size).unwrap_or(0))
            }
            "translate" => {
                let [table] = arguments.bind_positional(name)?;
                self.translate(of, &required(table, name)?)
            }
            "format" => self.braces(of, &arguments),
            "format_map" => {
                let [map] = arguments.bind_positional(name)?;
                let Some(Value::Dict(map)) = map else {
                    return fail("format_map() needs a dictionary");
                };
                let mut arguments = Arguments::default();
                for (key, value) in map.items.values() {
                    self.budget.make(64)?;
                    if let Value::Str(key) = key {
                        arguments.keywords.push((key.text.clone(), value.clone()));
                    }
                }
                self.braces(of, &arguments)
            }
            _ => not_supported(name, "str"),
        }
    }

    /// A text without some characters at its ends.
    pub(crate) fn strip(&mut self, of: &Text, chars: Option<&Value>, name: &str) -> Outcome<Value> {
        let chars = chars.map(|chars| text(chars, name)).transpose()?;
        if let Some(chars) = chars {
            self.budget
                .work((chars.len() / 16 + 1).saturating_mul(of.len()) / 16)?;
        }
        let is_stripped = |char: char| match chars {
            Some(chars) => chars.contains(char),
            None => is_space(char),
        };
        let mut part: &str = of;
        if name != "rstrip" {
            part = part.trim_start_matches(is_stripped);
        }
        if name != "lstrip" {
            part = part.trim_end_matches(is_stripped);
        }
        self.budget.make(part.len())?;
        Ok(of.with(part))
    }

    /// A text with a part replaced, `count` times at most if that is not negative.
    pub(crate) fn replace(
        &mut self,
        of: &Text,
        old: &str,
        new: &str,
        count: i128,
    ) -> Outcome<Value> {
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        self.budget.read(of.len())?;
        let num = if old.is_empty() {
            of.length() + 1
        } else {
            of.matches(old).count()
        };
        let num = num.min(count);
        let Some(added) = num.checked_mul(new.len()) else {
            return crate::error::out_of(crate::error::Bound::Bytes);
        };
        self.budget.make(of.len().saturating_add(added))?;
        Ok(of.with(of.replacen(old, new, num)))
    }

    fn join(&mut self, of: &Text, items: &Value) -> Outcome<Value> {
        let mut iter = Iter::of(items)?;
        let mut out = String::new();
        let mut at = 0;
        while let Some(item) = iter.next(self)? {
            let Value::Str(item) = &item else {
                let kind = item.type_name();
                return fail(format!(
                    "sequence item {at}: expected str instance, {kind} found"
                ));
            };
            if at > 0 {
                self.budget.make(of.len())?;
                out.push_str(of);
            }
            self.budget.make(item.len())?;
            out.push_str(item);
            at += 1;
        }
        Ok(Value::str(out))
    }

    /// A text padded to a width.
    pub(crate) fn pad(
        &mut self,
        of: &Text,
        width: i128,
        fill: &Text,
        name: &str,
    ) -> Outcome<Value> {
        if fill.length() != 1 {
            return fail(format!(
                "{name}(): the fill character must be exactly one character long"
            ));
        }
        let length = of.length();
        let missing = width.saturating_sub(length as i128).max(0);
        let missing = usize::try_from(missing).unwrap_or(usize::MAX);
        let left = match name {
            "ljust" => 0,
            "rjust" => missing,
            // Python's rule for which side is wider.
            _ => missing / 2 + (missing & (missing.wrapping_add(length)) & 1),
        };
        self.budget
            .make(missing.saturating_mul(fill.len()).saturating_add(of.len()))?;
        let (before, after) = (fill.repeat(left), fill.repeat(missing - left));
        Ok(of.with(format!("{before}{}{after}", &of.text)))
    }

    fn expand_tabs(&mut self, of: &Text, size: usize) -> Outcome<Value> {
        let mut out = String::new();
        let mut column = 0;
        self.budget.make(of.len())?;
        for char in of.chars() {
            match char {
                '\t' => {
                    let spaces = if size == 0 { 0 } else { size - column % size };
                    self.budget.make(spaces)?;
                    out.extend(std::iter::repeat_n(' ', spaces));
                    column += spaces;
                }
                char => {
                    out.push(char);
                    column = if matches!(char, '\n' | '\r') {
                        0
                    } else {
                        column + 1
                    };
                }
            }
        }
        Ok(of.with(out))
    }

    fn translate(&mut self, of: &Text, table: &Value) -> Outcome<Value> {
        let Value::Dict(_) = table else {
            return fail("translate() is supported with a dictionary only");
        };
        let mut out = String::new();
        for char in of.chars() {
            self.budget.work(1)?;
            let code = Value::Int(i128::from(char as u32));
            let key = self.key(&code)?;
            let Value::Dict(dict) = table else {
                continue;
            };
            let new: Cow<'_, str> = match dict.items.get(&key).map(|(_, value)| value) {
                None => Cow::Owned(char.to_string()),
                Some(Value::None) => Cow::Borrowed(""),
                Some(Value::Str(text)) => Cow::Borrowed(&text.text),
                Some(value) => {
                    let char = value
                        .as_int()
                        .and_then(|code| u32::try_from(code).ok())
                        .and_then(char::from_u32);
                    match char {
                        Some(char) => Cow::Owned(char.to_string()),
                        None => return fail("translate(): a value of the table is no character"),
                    }
                }
            };
            self.budget.make(new.len())?;
            out.push_str(&new);
        }
        Ok(Value::str(out))
    }

    /// A text with HTML's characters escaped, unless it is markup.
    pub(crate) fn escape(&mut self, text: &Text) -> Outcome<Value> {
        if text.is_markup {
            return Ok(Value::Str(text.clone()));
        }
        let mut text = escaped(text, &mut self.budget)?;
        text.is_markup = true;
        Ok(Value::Str(text))
    }
}
