//! `text.format(...)`.

use crate::error::{Outcome, fail};
use crate::format::percent::ascii;
use crate::format::spec::formatted;
use crate::interpreter::Interpreter;
use crate::repr::{push_repr, str_of};
use crate::value::{Arguments, Text, Value};

/// Which positional argument the next field without a name takes, if fields have no names.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Numbering {
    Unknown,
    Automatic(usize),
    Manual,
}

impl Interpreter<'_> {
    /// `text.format(...)`.
    pub(crate) fn braces(&mut self, of: &Text, arguments: &Arguments) -> Outcome<Value> {
        let mut numbering = Numbering::Unknown;
        let text = self.fields(of, arguments, &mut numbering, 2)?;
        Ok(Value::str(text))
    }

    /// Replaces the fields of a text, and the fields within their formats.
    fn fields(
        &mut self,
        text: &str,
        arguments: &Arguments,
        numbering: &mut Numbering,
        levels: usize,
    ) -> Outcome<String> {
        if levels == 0 {
            return fail("Max string recursion exceeded");
        }
        let mut out = String::new();
        let mut rest = text;
        while let Some(at) = rest.find(['{', '}']) {
            self.budget.make(at + 1)?;
            out.push_str(&rest[..at]);
            let brace = rest.as_bytes()[at];
            let after = &rest[at + 1..];
            if after.as_bytes().first() == Some(&brace) {
                out.push(brace as char);
                rest = &after[1..];
                continue;
            }
            if brace == b'}' {
                return fail("Single '}' encountered in format string");
            }
            let Some(end) = field_end(after) else {
                return fail("expected '}' before end of string");
            };
            let field = self.field(&after[..end], arguments, numbering, levels)?;
            self.budget.make(field.len())?;
            out.push_str(&field);
            rest = &after[end + 1..];
        }
        self.budget.make(rest.len())?;
        out.push_str(rest);
        Ok(out)
    }

    fn field(
        &mut self,
        field: &str,
        arguments: &Arguments,
        numbering: &mut Numbering,
        levels: usize,
    ) -> Outcome<String> {
        let (name, conversion, spec) = parts(field)?;
        let first_end = name.find(['.', '[']).unwrap_or(name.len());
        let (first, mut path) = name.split_at(first_end);
        let is_number = !first.is_empty() && first.bytes().all(|byte| byte.is_ascii_digit());
        let mut value = if is_number || name.is_empty() {
            let at = match (name.is_empty(), *numbering) {
                (true, Numbering::Manual) => {
                    return fail(
                        "cannot switch from manual field specification to automatic field numbering",
                    );
                }
                (true, Numbering::Automatic(at)) => at,
                (true, Numbering::Unknown) => 0,
                // Python looks at names that are a number only.
                (false, Numbering::Automatic(_)) if path.is_empty() => {
                    return fail(
                        "cannot switch from automatic field numbering to manual field specification",
                    );
                }
                (false, _) => match first.parse() {
                    Ok(at) => at,
                    Err(_) => return fail("Too many decimal digits in format string"),
                },
            };
            if name.is_empty() {
                *numbering = Numbering::Automatic(at + 1);
            } else if path.is_empty() {
                *numbering = Numbering::Manual;
            }
            match arguments.positional.get(at) {
                Some(value) => value.clone(),
                None => {
                    return fail(format!(
                        "Replacement index {at} out of range for positional args tuple"
                    ));
                }
            }
        } else {
            self.budget.work(arguments.keywords.len())?;
            match arguments.keywords.iter().find(|(name, _)| **name == *first) {
                Some((_, value)) => value.clone(),
                None => return fail(format!("format(): '{first}' is not given")),
            }
        };
        while !path.is_empty() {
            self.budget.work(1)?;
            if let Some(attribute) = path.strip_prefix('.') {
                let end = attribute.find(['.', '[']).unwrap_or(attribute.len());
                if end == 0 {
                    return fail("Empty attribute in format string");
                }
                value = self.attribute(&value, &attribute[..end].into())?;
                path = &attribute[end..];
            } else if let Some((index, after)) = path
                .strip_prefix('[')
                .and_then(|index| index.split_once(']'))
            {
                if index.is_empty() {
                    return fail("Empty attribute in format string");
                }
                let is_number = index.bytes().all(|byte| byte.is_ascii_digit());
                let index = match index.parse().ok().filter(|_| is_number) {
                    Some(index) => Value::Int(index),
                    None => Value::str(index),
                };
                value = self.item(&value, &index)?;
                path = after;
            } else {
                return fail("Only '.' or '[' may follow ']' in format field specifier");
            }
        }
        let value = match conversion {
            None => value,
            Some('s') => Value::Str(str_of(&value, &mut self.budget)?),
            Some(conversion @ ('r' | 'a')) => {
                let mut text = String::new();
                push_repr(&mut text, &value, &mut self.budget)?;
                if conversion == 'a' {
                    self.budget.make(text.len().saturating_mul(10))?;
                    text = ascii(&text);
                }
                Value::str(text)
            }
            Some(other) => return fail(format!("Unknown conversion specifier '{other}'")),
        };
        let spec = if spec.contains(['{', '}']) {
            self.fields(spec, arguments, numbering, levels - 1)?
        } else {
            spec.to_owned()
        };
        formatted(&value, &spec, &mut self.budget)
    }
}

/// The place of the brace that closes a field.
fn field_end(text: &str) -> Option<usize> {
    let mut depth = 1;
    let mut is_indexed = false;
    for (at, char) in text.char_indices() {
        match char {
            '[' => is_indexed = true,
            ']' => is_indexed = false,
            '{' if !is_indexed => depth += 1,
            '}' if !is_indexed => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(at);
        }
    }
    None
}

/// The name, the conversion and the format of a field.
fn parts(field: &str) -> Outcome<(&str, Option<char>, &str)> {
    let mut is_indexed = false;
    let mut end = field.len();
    for (at, char) in field.char_indices() {
        match char {
            '[' => is_indexed = true,
            ']' => is_indexed = false,
            '{' | '}' => return fail("unexpected '{' in field name"),
            '!' | ':' if !is_indexed => {
                end = at;
                break;
            }
            _ => {}
        }
    }
    let name = &field[..end];
    let Some(conversion) = field[end..].strip_prefix('!') else {
        return Ok((name, None, field[end..].strip_prefix(':').unwrap_or("")));
    };
    let mut chars = conversion.chars();
    let Some(letter) = chars.next() else {
        return fail("end of string while looking for conversion specifier");
    };
    match chars.as_str() {
        "" => Ok((name, Some(letter), "")),
        rest => match rest.strip_prefix(':') {
            Some(spec) => Ok((name, Some(letter), spec)),
            None => fail("expected ':' after conversion specifier"),
        },
    }
}
