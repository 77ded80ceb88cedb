//! Values as Python prints them: `str` and `repr`.

use std::fmt::Write as _;

use crate::budget::Budget;
use crate::error::{Outcome, fail};
use crate::unicode::is_printable;
use crate::value::{Items, Object, Text, Value, View};

/// `str(value)`.
pub(crate) fn str_of(value: &Value, budget: &mut Budget) -> Outcome<Text> {
    if let Value::Str(text) = value {
        let mut text = text.clone();
        text.is_markup = false;
        return Ok(text);
    }
    let mut out = String::new();
    push_str(&mut out, value, budget)?;
    Ok(Text::new(out))
}

/// Adds `str(value)`.
pub(crate) fn push_str(out: &mut String, value: &Value, budget: &mut Budget) -> Outcome<()> {
    match value {
        Value::Str(text) => {
            budget.make(text.len())?;
            out.push_str(text);
            Ok(())
        }
        Value::Undefined(_) => Ok(()),
        value => push_repr(out, value, budget),
    }
}

/// Adds `repr(value)`.
pub(crate) fn push_repr(out: &mut String, value: &Value, budget: &mut Budget) -> Outcome<()> {
    budget.enter()?;
    budget.make(8)?;
    match value {
        Value::Undefined(_) => out.push_str("Undefined"),
        Value::None => out.push_str("None"),
        Value::Bool(true) => out.push_str("True"),
        Value::Bool(false) => out.push_str("False"),
        Value::Int(number) => drop(write!(out, "{number}")),
        Value::Float(number) => push_float(out, *number),
        Value::Str(text) => {
            if text.is_markup {
                out.push_str("Markup(");
            }
            budget.work(text.len() / 4)?;
            budget.make(text.len())?;
            let before = out.len();
            push_quoted(out, text);
            budget.make((out.len() - before).saturating_sub(text.len()))?;
            if text.is_markup {
                out.push(')');
            }
        }
        Value::List(items) => {
            out.push('[');
            push_items(out, &items.items, budget)?;
            out.push(']');
        }
        Value::Tuple(items) => {
            out.push('(');
            push_items(out, &items.items, budget)?;
            out.push_str(if items.items.len() == 1 { ",)" } else { ")" });
        }
        Value::Dict(dict) => push_dict(out, &dict.items, budget)?,
        Value::View(view, dict) => {
            out.push_str(value.type_name());
            out.push_str("([");
            for (at, (key, value)) in dict.items.values().enumerate() {
                if at > 0 {
                    out.push_str(", ");
                }
                match view {
                    View::Keys => push_repr(out, key, budget)?,
                    View::Values => push_repr(out, value, budget)?,
                    View::Items => {
                        out.push('(');
                        push_repr(out, key, budget)?;
                        out.push_str(", ");
                        push_repr(out, value, budget)?;
                        out.push(')');
                    }
                }
            }
            out.push_str("])");
        }
        Value::Range(range) if range.step == 1 => {
            let _ = write!(out, "range({}, {})", range.start, range.stop);
        }
        Value::Range(range) => drop(write!(
            out,
            "range({}, {}, {})",
            range.start, range.stop, range.step
        )),
        Value::Iterator(_) => {
            return fail(
                "printing a generator, whose text has an address in Python: add the filter 'list'",
            );
        }
        Value::Object(object) => push_object(out, object, budget)?,
    }
    budget.leave();
    Ok(())
}

fn push_items(out: &mut String, items: &[Value], budget: &mut Budget) -> Outcome<()> {
    for (at, item) in items.iter().enumerate() {
        if at > 0 {
            out.push_str(", ");
        }
        push_repr(out, item, budget)?;
    }
    Ok(())
}

fn push_dict(out: &mut String, items: &Items, budget: &mut Budget) -> Outcome<()> {
    out.push('{');
    for (at, (key, value)) in items.values().enumerate() {
        if at > 0 {
            out.push_str(", ");
        }
        push_repr(out, key, budget)?;
        out.push_str(": ");
        push_repr(out, value, budget)?;
    }
    out.push('}');
    Ok(())
}

fn push_object(out: &mut String, object: &Object, budget: &mut Budget) -> Outcome<()> {
    match object {
        Object::Namespace(attributes) => {
            out.push_str("<Namespace ");
            push_dict(out, &attributes.borrow(), budget)?;
            out.push('>');
        }
        Object::Macro(found) => match &found.definition.name {
            Some(name) => {
                out.push_str("<Macro ");
                push_quoted(out, name);
                out.push('>');
            }
            None => out.push_str("<Macro anonymous>"),
        },
        Object::Loop(state) => {
            let known = state
                .try_borrow()
                .ok()
                .and_then(|state| Some((state.index, state.length?)));
            let Some((index, length)) = known else {
                return fail("printing a loop whose length is not known yet: print 'loop.index'");
            };
            let _ = write!(out, "<LoopContext {index}/{length}>");
        }
        Object::Blocks => out.push_str("<TemplateReference None>"),
        other => {
            return fail(format!(
                "printing a {}, whose text has an address in Python",
                other.type_name()
            ));
        }
    }
    Ok(())
}

/// Adds a text in quotes.
pub(crate) fn push_quoted(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') {
        '"'
    } else {
        '\''
    };
    out.push(quote);
    for char in text.chars() {
        match char {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            char if char == quote => {
                out.push('\\');
                out.push(char);
            }
            ' '..='~' => out.push(char),
            char if is_printable(char) => out.push(char),
            char => push_escape(out, char),
        }
    }
    out.push(quote);
}

/// Adds the escape of a character.
pub(crate) fn push_escape(out: &mut String, char: char) {
    let code = char as u32;
    let _ = match code {
        0..=0xff => write!(out, "\\x{code:02x}"),
        0x100..=0xffff => write!(out, "\\u{code:04x}"),
        _ => write!(out, "\\U{code:08x}"),
    };
}

/// Adds a number with the fewest digits that give it back.
pub(crate) fn push_float(out: &mut String, number: f64) {
    if number.is_nan() {
        out.push_str("nan");
        return;
    }
    if number.is_infinite() {
        out.push_str(if number > 0.0 { "inf" } else { "-inf" });
        return;
    }
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let _ = write!(out, "{number:?}");
        return;
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    let _ = write!(out, "{digits}e{sign}{:02}", exponent.abs());
}
