//! Filters about texts.

use crate::arguments::{flag, given, int, int_or, required, text};
use crate::error::{Outcome, fail};
use crate::interpreter::Interpreter;
use crate::methods::split::Lines;
use crate::repr::{push_repr, push_str, str_of};
use crate::unicode::{is_alphanumeric, is_space, push_lower};
use crate::value::{Arguments, Items, Iter, Path, Text, Value};

/// The width of `pprint`.
const PRINT_WIDTH: usize = 80;

impl Interpreter<'_> {
    pub(super) fn text_filter(
        &mut self,
        name: &str,
        value: &Value,
        arguments: Arguments,
    ) -> Outcome<Value> {
        match name {
            "capitalize" | "lower" | "upper" | "title" | "string" | "wordcount" => {
                arguments.none(name)?;
                let of = self.soft_text(value)?;
                match name {
                    "capitalize" => self.capitalize(&of),
                    "lower" => self.lower(&of),
                    "upper" => self.upper(&of),
                    "title" => self.title(&of),
                    "wordcount" => Ok(Value::Int(self.num_words(&of)?)),
                    _ => Ok(Value::Str(of)),
                }
            }
            "center" => {
                let [width] = arguments.bind(name, ["width"])?;
                let width = int_or(width.as_ref(), 80, name)?;
                let of = self.soft_text(value)?;
                self.pad(&of, width, &Text::new(" "), name)
            }
            "trim" => {
                let [chars] = arguments.bind(name, ["chars"])?;
                let of = self.soft_text(value)?;
                self.strip(&of, given(chars).as_ref(), name)
            }
            "replace" => {
                let [old, new, count] = arguments.bind(name, ["old", "new", "count"])?;
                let of = str_of(value, &mut self.budget)?;
                let old = str_of(&required(old, name)?, &mut self.budget)?;
                let new = str_of(&required(new, name)?, &mut self.budget)?;
                let count = int_or(given(count).as_ref(), -1, name)?;
                self.replace(&of, &old, &new, count)
            }
            "join" => {
                let [separator, attribute] = arguments.bind(name, ["d", "attribute"])?;
                let separator = str_of(
                    &separator.unwrap_or_else(|| Value::str("")),
                    &mut self.budget,
                )?;
                let path = Path::new(&attribute.unwrap_or(Value::None), false)?;
                self.join_all(value, &separator, &path)
            }
            "format" => {
                let of = self.soft_text(value)?;
                if !arguments.keywords.is_empty() && !arguments.positional.is_empty() {
                    return fail("format: positional and keyword arguments at once");
                }
                let values = if arguments.keywords.is_empty() {
                    Value::tuple(arguments.positional)?
                } else {
                    let mut items = Items::default();
                    for (name, value) in arguments.keywords {
                        self.insert(&mut items, Value::str(name), value)?;
                    }
                    Value::dict(items)?
                };
                self.percent(&Value::Str(of), &values)
            }
            "indent" => {
                let [width, first, blank] = arguments.bind(name, ["width", "first", "blank"])?;
                let of = text(value, name)?.clone();
                self.indent(&of, width, flag(first.as_ref()), flag(blank.as_ref()))
            }
            "truncate" => self.truncate(value, arguments),
            "wordwrap" => self.word_wrap(value, arguments),
            _ => {
                arguments.none(name)?;
                self.pretty(value)
            }
        }
    }

    /// The text of a value: markup stays markup.
    fn soft_text(&mut self, value: &Value) -> Outcome<Text> {
        match value {
            Value::Str(text) => Ok(text.clone()),
            other => str_of(other, &mut self.budget),
        }
    }

    fn title(&mut self, of: &Text) -> Outcome<Value> {
        let chars = self.characters(of)?;
        let mut out = String::new();
        let mut start = 0;
        let begins = |char: char| is_space(char) || "-({[<".contains(char);
        while start < chars.len() {
            let is_separator = begins(chars[start]);
            let length = chars[start..]
                .iter()
                .position(|char| begins(*char) != is_separator);
            let part = &chars[start..length.map_or(chars.len(), |length| start + length)];
            for (at, char) in part.iter().enumerate() {
                match at {
                    0 => out.extend(char.to_uppercase()),
                    _ => push_lower(&mut out, part, at),
                }
            }
            start += part.len();
        }
        Ok(Value::str(out))
    }

    fn num_words(&mut self, of: &Text) -> Outcome<i128> {
        self.budget.read(of.len().saturating_mul(4))?;
        let mut count = 0;
        let mut is_within = false;
        for char in of.chars() {
            let is_word = char == '_' || is_alphanumeric(char);
            count += i128::from(is_word && !is_within);
            is_within = is_word;
        }
        Ok(count)
    }

    fn join_all(&mut self, value: &Value, separator: &str, path: &Path) -> Outcome<Value> {
        let mut iter = Iter::of(value)?;
        let mut out = String::new();
        let mut is_first = true;
        while let Some(item) = iter.next(self)? {
            if !is_first {
                self.budget.make(separator.len())?;
                out.push_str(separator);
            }
            is_first = false;
            let item = path.of(&item, None, self)?;
            push_str(&mut out, &item, &mut self.budget)?;
        }
        Ok(Value::str(out))
    }

    fn indent(
        &mut self,
        of: &Text,
        width: Option<Value>,
        first: bool,
        blank: bool,
    ) -> Outcome<Value> {
        let indention = match width.unwrap_or(Value::Int(4)) {
            Value::Str(indention) => indention,
            width => {
                let width = usize::try_from(int(&width, "indent")?.max(0)).unwrap_or(usize::MAX);
                self.budget.make(width)?;
                Text::new(" ".repeat(width))
            }
        };
        let with_newline = format!("{}\n", &of.text);
        let mut out = String::new();
        for (at, line) in (Lines {
            rest: &with_newline,
            keeps_ends: false,
        })
        .enumerate()
        {
            if at > 0 {
                out.push('\n');
            }
            let is_indented = if at == 0 {
                first
            } else {
                blank || !line.is_empty()
            };
            self.budget
                .make(line.len() + if is_indented { indention.len() + 1 } else { 1 })?;
            if is_indented {
                out.push_str(&indention);
            }
            out.push_str(line);
        }
        Ok(of.with(out))
    }

    fn truncate(&mut self, value: &Value, arguments: Arguments) -> Outcome<Value> {
        let names = ["length", "killwords", "end", "leeway"];
        let [length, killwords, end, leeway] = arguments.bind("truncate", names)?;
        let length = int_or(length.as_ref(), 255, "truncate")?;
        let end = end.unwrap_or_else(|| Value::str("..."));
        let end = text(&end, "truncate")?;
        let leeway = int_or(given(leeway).as_ref(), 5, "truncate")?;
        if length < end.length() as i128 || leeway < 0 {
            return fail(format!(
                "truncate: the length {length} or the leeway {leeway} is too small"
            ));
        }
        // Lists have a length too.
        let is_short = |num: usize| num as i128 <= length.saturating_add(leeway);
        if self.length_of(value).is_some_and(is_short) {
            return Ok(value.clone());
        }
        let of = text(value, "truncate")?;
        let kept = &of[..of.byte_at(length as usize - end.length())];
        let kept = match kept.rfind(' ') {
            Some(at) if !flag(killwords.as_ref()) => &kept[..at],
            _ => kept,
        };
        self.budget.make(kept.len() + end.len())?;
        let kept = of.with(kept);
        self.add(&kept, &Value::Str(end.clone()))
    }

    /// `pprint` for values that fit a line.
    fn pretty(&mut self, value: &Value) -> Outcome<Value> {
        let sorted = self.with_sorted_keys(value)?;
        let mut out = String::new();
        push_repr(&mut out, &sorted, &mut self.budget)?;
        let is_container = matches!(
            sorted,
            Value::List(_) | Value::Tuple(_) | Value::Dict(_) | Value::Str(_)
        );
        if is_container && out.chars().count() > PRINT_WIDTH {
            return fail(format!(
                "the filter 'pprint' is supported for {PRINT_WIDTH} characters at most: use 'tojson'"
            ));
        }
        Ok(Value::str(out))
    }

    fn with_sorted_keys(&mut self, value: &Value) -> Outcome<Value> {
        self.budget.enter()?;
        self.budget.work(1)?;
        let sorted = match value {
            Value::List(items) => {
                let items = items.items.iter().map(|item| self.with_sorted_keys(item));
                Value::list(items.collect::<Outcome<_>>()?)?
            }
            Value::Tuple(items) if !items.is_group => {
                let items = items.items.iter().map(|item| self.with_sorted_keys(item));
                Value::tuple(items.collect::<Outcome<_>>()?)?
            }
            Value::Dict(dict) => {
                let mut pairs: Vec<(&Text, &Value)> = Vec::new();
                for (key, value) in dict.items.values() {
                    pairs.push((text(key, "pprint")?, value));
                }
                pairs.sort_by(|(left, _), (right, _)| left.text.cmp(&right.text));
                let mut items = Items::default();
                for (key, value) in pairs {
                    let value = self.with_sorted_keys(value)?;
                    self.insert(&mut items, Value::Str(key.clone()), value)?;
                }
                Value::dict(items)?
            }
            Value::View(..) | Value::Tuple(_) => {
                return fail("the filter 'pprint' is not supported for this value");
            }
            other => other.clone(),
        };
        self.budget.leave();
        Ok(sorted)
    }
}
