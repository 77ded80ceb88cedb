//! `text % values`.

use crate::error::{Outcome, fail};
use crate::format::spec::{push_padded, shown_float, with_digits};
use crate::interpreter::Interpreter;
use crate::operators::as_float;
use crate::repr::{push_escape, push_repr, str_of};
use crate::value::{Key, Text, Value};

/// Flags, width and precision of a conversion such as `%-5.2f`.
#[derive(Default)]
struct Directive {
    is_left: bool,
    is_zero: bool,
    has_plus: bool,
    has_space: bool,
    is_alternate: bool,
    width: usize,
    precision: Option<usize>,
}

impl Interpreter<'_> {
    /// `text % values`.
    pub(crate) fn percent(&mut self, text: &Value, values: &Value) -> Outcome<Value> {
        let Value::Str(of) = text else {
            return fail("the text to format is not a string");
        };
        if of.is_markup {
            return fail("'%' with a text that is marked as safe is not supported");
        }
        let mut values = Values::of(values);
        let mut out = String::new();
        let mut rest: &str = of;
        while let Some(at) = rest.find('%') {
            self.budget.make(at)?;
            out.push_str(&rest[..at]);
            rest = self.directive(&mut out, &rest[at + 1..], &mut values)?;
        }
        self.budget.make(rest.len())?;
        out.push_str(rest);
        values.check_used()?;
        Ok(Value::str(out))
    }

    /// Formats a value by the directive at the start of a text, and gives what comes after.
    fn directive<'t>(
        &mut self,
        out: &mut String,
        text: &'t str,
        values: &mut Values,
    ) -> Outcome<&'t str> {
        self.budget.work(1)?;
        if let Some(rest) = text.strip_prefix('%') {
            out.push('%');
            return Ok(rest);
        }
        let mut rest = text;
        let mut mapped = None;
        if let Some(name) = rest.strip_prefix('(') {
            let Some(end) = closing(name) else {
                return fail("incomplete format key");
            };
            mapped = Some(values.named(&name[..end])?);
            rest = &name[end + 1..];
        }
        let mut directive = Directive::default();
        while let Some(flag) = rest.chars().next().filter(|flag| "-+ #0".contains(*flag)) {
            match flag {
                '-' => directive.is_left = true,
                '+' => directive.has_plus = true,
                ' ' => directive.has_space = true,
                '#' => directive.is_alternate = true,
                _ => directive.is_zero = true,
            }
            rest = &rest[1..];
        }
        if let Some(after) = rest.strip_prefix('*') {
            let width = star(values)?;
            directive.is_left |= width < 0;
            directive.width = usize::try_from(width.unsigned_abs()).unwrap_or(usize::MAX);
            rest = after;
        } else {
            (directive.width, rest) = number(rest);
        }
        if let Some(after) = rest.strip_prefix('.') {
            let precision;
            if let Some(after) = after.strip_prefix('*') {
                precision = usize::try_from(star(values)?).unwrap_or(0);
                rest = after;
            } else {
                (precision, rest) = number(after);
            }
            directive.precision = Some(precision);
        }
        rest = rest.trim_start_matches(['h', 'l', 'L']);
        let Some(letter) = rest.chars().next() else {
            return fail("incomplete format");
        };
        let after = &rest[letter.len_utf8()..];
        let value = match mapped {
            Some(value) => value,
            None => values.next()?,
        };
        self.format_by(out, letter, &directive, &value)?;
        Ok(after)
    }

    fn format_by(
        &mut self,
        out: &mut String,
        letter: char,
        directive: &Directive,
        value: &Value,
    ) -> Outcome<()> {
        let text = match letter {
            's' | 'r' | 'a' => {
                let mut text = String::new();
                if letter == 's' {
                    text.push_str(&str_of(value, &mut self.budget)?);
                } else {
                    push_repr(&mut text, value, &mut self.budget)?;
                }
                if letter == 'a' {
                    self.budget.make(text.len().saturating_mul(10))?;
                    text = ascii(&text);
                }
                if let Some(precision) = directive.precision {
                    let text_value = Text::new(text);
                    text = text_value[..text_value.byte_at(precision)].to_owned();
                }
                self.budget
                    .make(directive.width.saturating_add(text.len()))?;
                push_padded(
                    out,
                    "",
                    &text,
                    directive.width,
                    ' ',
                    if directive.is_left { '<' } else { '>' },
                );
                return Ok(());
            }
            'c' => {
                let char = match value {
                    Value::Str(text) if text.length() == 1 => text.text.to_string(),
                    value => {
                        let code = value.as_int().and_then(|code| u32::try_from(code).ok());
                        match code.and_then(char::from_u32) {
                            Some(char) => char.to_string(),
                            None => return fail("%c requires int or char"),
                        }
                    }
                };
                self.budget.make(directive.width.saturating_add(4))?;
                push_padded(
                    out,
                    "",
                    &char,
                    directive.width,
                    ' ',
                    if directive.is_left { '<' } else { '>' },
                );
                return Ok(());
            }
            'd' | 'i' | 'u' => match (value.as_int(), value) {
                (Some(number), _) => (number < 0, "", number.unsigned_abs().to_string()),
                (None, Value::Float(number)) if number.is_finite() && number.abs() < 1e38 => {
                    let number = number.trunc() as i128;
                    (number < 0, "", number.unsigned_abs().to_string())
                }
                _ => {
                    return fail(format!(
                        "%{letter} format: a real number is required, not {}",
                        value.type_name()
                    ));
                }
            },
            'x' | 'X' | 'o' => {
                let Some(number) = value.as_int() else {
                    return fail(format!(
                        "%{letter} format: an integer is required, not {}",
                        value.type_name()
                    ));
                };
                let size = number.unsigned_abs();
                let (prefix, digits) = match letter {
                    'x' => ("0x", format!("{size:x}")),
                    'X' => ("0X", format!("{size:X}")),
                    _ => ("0o", format!("{size:o}")),
                };
                (
                    number < 0,
                    if directive.is_alternate { prefix } else { "" },
                    digits,
                )
            }
            'e' | 'E' | 'f' | 'F' | 'g' | 'G' => {
                let Some(number) = as_float(value) else {
                    return fail(format!("must be real number, not {}", value.type_name()));
                };
                let precision = directive.precision.unwrap_or(6);
                self.budget.make(precision.saturating_add(400))?;
                let text = shown_float(number.abs(), letter, precision, directive.is_alternate)?;
                (number.is_sign_negative() && !number.is_nan(), "", text)
            }
            _ => return fail(format!("unsupported format character '{letter}'")),
        };
        let (is_negative, prefix, mut digits) = text;
        if "diuxXo".contains(letter)
            && let Some(precision) = directive.precision
        {
            self.budget.make(precision)?;
            digits = with_digits(&digits, precision);
        }
        let sign = match (is_negative, directive.has_plus, directive.has_space) {
            (true, ..) => "-",
            (_, true, _) => "+",
            (.., true) => " ",
            _ => "",
        };
        self.budget
            .make(directive.width.saturating_add(digits.len()))?;
        let before = format!("{sign}{prefix}");
        let (fill, side) = match (directive.is_left, directive.is_zero) {
            (true, _) => (' ', '<'),
            (_, true) => ('0', '='),
            _ => (' ', '>'),
        };
        push_padded(out, &before, &digits, directive.width, fill, side);
        Ok(())
    }
}

/// The values of a formatting.
struct Values {
    given: Value,
    next: usize,
    is_mapped: bool,
}

impl Values {
    fn of(given: &Value) -> Self {
        Self {
            given: given.clone(),
            next: 0,
            is_mapped: false,
        }
    }

    fn next(&mut self) -> Outcome<Value> {
        let at = self.next;
        self.next += 1;
        let value = match &self.given {
            Value::Tuple(items) => items.items.get(at).cloned(),
            value => (at == 0).then(|| value.clone()),
        };
        match value {
            Some(value) => Ok(value),
            None => fail("not enough arguments for format string"),
        }
    }

    fn named(&mut self, name: &str) -> Outcome<Value> {
        self.is_mapped = true;
        let Value::Dict(dict) = &self.given else {
            return fail("format requires a mapping");
        };
        match dict.items.get(&Key::Str(name.into())) {
            Some((_, value)) => Ok(value.clone()),
            None => fail(format!("the format names '{name}', which is not given")),
        }
    }

    /// Fails if values are left over. A list or a dictionary may be.
    fn check_used(&self) -> Outcome<()> {
        let is_used = match &self.given {
            Value::Tuple(items) => self.next >= items.items.len(),
            // Python takes these for mappings.
            Value::Dict(_) | Value::List(_) | Value::Range(_) | Value::Undefined(_) => true,
            _ => self.next > 0,
        };
        if is_used || self.is_mapped {
            return Ok(());
        }
        fail("not all arguments converted during string formatting")
    }
}

fn star(values: &mut Values) -> Outcome<i128> {
    match values.next()?.as_int() {
        Some(number) => Ok(number),
        None => fail("* wants int"),
    }
}

/// The number at the start of a text, and what comes after.
fn number(text: &str) -> (usize, &str) {
    let rest = text.trim_start_matches(|char: char| char.is_ascii_digit());
    let digits = &text[..text.len() - rest.len()];
    (
        if digits.is_empty() {
            0
        } else {
            digits.parse().unwrap_or(usize::MAX)
        },
        rest,
    )
}

/// The place of the parenthesis that closes one.
fn closing(text: &str) -> Option<usize> {
    let mut depth = 1;
    for (at, char) in text.char_indices() {
        match char {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(at);
        }
    }
    None
}

/// A text with escapes for all but ASCII.
pub(super) fn ascii(text: &str) -> String {
    let mut out = String::new();
    for char in text.chars() {
        if char.is_ascii() {
            out.push(char);
        } else {
            push_escape(&mut out, char);
        }
    }
    out
}
