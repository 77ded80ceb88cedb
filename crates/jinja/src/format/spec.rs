//! Format specifications: `>10.2f` in `{:>10.2f}`.

use std::fmt::Write as _;

use crate::budget::Budget;
use crate::error::{Outcome, fail};
use crate::operators::as_float;
use crate::repr::{push_float, str_of};
use crate::value::{Text, Value};

/// The largest precision of a number.
const MAX_PRECISION: usize = 10_000;

#[derive(Default)]
struct Spec {
    fill: Option<char>,
    align: Option<char>,
    sign: Option<char>,
    is_alternate: bool,
    width: usize,
    grouping: Option<char>,
    precision: Option<usize>,
    kind: Option<char>,
}

/// `format(value, spec)`.
pub(super) fn formatted(value: &Value, spec: &str, budget: &mut Budget) -> Outcome<String> {
    let is_plain = matches!(
        value,
        Value::Str(_) | Value::Bool(_) | Value::Int(_) | Value::Float(_)
    );
    if spec.is_empty() {
        return Ok(str_of(value, budget)?.text.as_ref().to_owned());
    }
    if !is_plain {
        return fail(format!(
            "unsupported format string passed to {}.__format__",
            value.type_name()
        ));
    }
    let Some(spec) = parse(spec) else {
        return fail(format!("invalid format specifier '{spec}'"));
    };
    budget.make(spec.width)?;
    match value {
        Value::Str(text) => format_text(text, &spec, budget),
        value => format_number(value, &spec, budget),
    }
}

fn parse(text: &str) -> Option<Spec> {
    let mut spec = Spec::default();
    let mut chars: Vec<char> = text.chars().collect();
    chars.reverse();
    let is_align = |char: Option<&char>| char.is_some_and(|char| "<>=^".contains(*char));
    if chars.len() > 1 && is_align(chars.get(chars.len() - 2)) {
        spec.fill = chars.pop();
        spec.align = chars.pop();
    } else if is_align(chars.last()) {
        spec.align = chars.pop();
    }
    spec.sign = chars.pop_if(|char| "+- ".contains(*char));
    // 'z', which drops the sign of zero, is not supported: it is an unknown letter.
    spec.is_alternate = chars.pop_if(|char| *char == '#').is_some();
    if chars.pop_if(|char| *char == '0').is_some() {
        spec.fill = spec.fill.or(Some('0'));
        spec.align = spec.align.or(Some('='));
    }
    spec.width = digits(&mut chars)?.unwrap_or(0);
    spec.grouping = chars.pop_if(|char| ",_".contains(*char));
    if chars.pop_if(|char| *char == '.').is_some() {
        spec.precision = Some(digits(&mut chars)??);
    }
    spec.kind = chars.pop();
    chars.is_empty().then_some(spec)
}

/// A number at the end of reversed characters; none if it is too large.
fn digits(chars: &mut Vec<char>) -> Option<Option<usize>> {
    let mut number: Option<usize> = None;
    while let Some(digit) = chars.last().and_then(|char| char.to_digit(10)) {
        chars.pop();
        number = Some(
            number
                .unwrap_or(0)
                .checked_mul(10)?
                .checked_add(digit as usize)?,
        );
    }
    Some(number)
}

fn format_text(text: &Text, spec: &Spec, budget: &mut Budget) -> Outcome<String> {
    if spec.kind.is_some_and(|kind| kind != 's') {
        return fail(format!(
            "unknown format code '{}' for object of type 'str'",
            spec.kind.unwrap_or(' ')
        ));
    }
    if spec.sign.is_some() || spec.is_alternate || spec.grouping.is_some() {
        return fail("a sign, '#' or a grouping is not allowed in the format of a string");
    }
    let mut align = spec.align.unwrap_or('<');
    if align == '=' {
        // A zero before the width means this side only if it was not asked for.
        if spec.fill != Some('0') {
            return fail("'=' alignment not allowed in string format specifier");
        }
        align = '<';
    }
    let part = &text[..text.byte_at(spec.precision.unwrap_or(usize::MAX))];
    let fill = spec.fill.unwrap_or(' ');
    budget.make(
        spec.width
            .saturating_mul(fill.len_utf8())
            .saturating_add(part.len()),
    )?;
    let mut out = String::new();
    push_padded(&mut out, "", part, spec.width, fill, align);
    Ok(out)
}

fn format_number(value: &Value, spec: &Spec, budget: &mut Budget) -> Outcome<String> {
    let int = value.as_int();
    let kind = spec.kind;
    let unknown = |kind: char| {
        fail(format!(
            "unknown format code '{kind}' for object of type '{}'",
            value.type_name()
        ))
    };
    let (is_negative, prefix, digits) = match (int, kind) {
        (Some(number), None | Some('d' | 'x' | 'X' | 'o' | 'b' | 'n')) => {
            if spec.precision.is_some() {
                return fail("precision not allowed in integer format specifier");
            }
            let size = number.unsigned_abs();
            let (prefix, digits) = match kind {
                Some('x') => ("0x", format!("{size:x}")),
                Some('X') => ("0X", format!("{size:X}")),
                Some('o') => ("0o", format!("{size:o}")),
                Some('b') => ("0b", format!("{size:b}")),
                _ => ("", size.to_string()),
            };
            let group = if kind.is_none_or(|kind| "dn".contains(kind)) {
                3
            } else {
                4
            };
            if group == 4 && spec.grouping == Some(',') {
                return fail("cannot specify ',' with this format");
            }
            let prefix = if spec.is_alternate { prefix } else { "" };
            (number < 0, prefix, grouped(&digits, spec, group, budget)?)
        }
        (Some(number), Some('c')) => {
            let char = u32::try_from(number).ok().and_then(char::from_u32);
            let Some(char) = char.filter(|_| spec.sign.is_none() && spec.precision.is_none())
            else {
                return fail("%c arg not in range");
            };
            (false, "", char.to_string())
        }
        (_, Some(kind)) if !"eEfFgG%".contains(kind) => return unknown(kind),
        (_, kind) => {
            let number = as_float(value).unwrap_or(f64::NAN);
            let size = number.abs();
            budget.make(spec.precision.unwrap_or(0).saturating_add(400))?;
            let text = match (kind, spec.precision) {
                (None, None) => {
                    let mut text = String::new();
                    push_float(&mut text, size);
                    text
                }
                (None, Some(_)) => {
                    return fail(
                        "a float's precision without a letter is not supported: add 'g' or 'f'",
                    );
                }
                (Some('%'), precision) => format!(
                    "{}%",
                    shown_float(size * 100.0, 'f', precision.unwrap_or(6), false)?
                ),
                (Some(kind), precision) => {
                    shown_float(size, kind, precision.unwrap_or(6), spec.is_alternate)?
                }
            };
            let is_negative = number.is_sign_negative() && !number.is_nan();
            (is_negative, "", grouped(&text, spec, 3, budget)?)
        }
    };
    let sign = match spec.sign {
        _ if is_negative => "-",
        Some('+') => "+",
        Some(' ') => " ",
        _ => "",
    };
    let align = spec.align.unwrap_or('>');
    let fill = spec.fill.unwrap_or(' ');
    budget.make(
        spec.width
            .saturating_mul(fill.len_utf8())
            .saturating_add(digits.len() + 8),
    )?;
    let mut out = String::new();
    push_padded(
        &mut out,
        &format!("{sign}{prefix}"),
        &digits,
        spec.width,
        fill,
        align,
    );
    Ok(out)
}

/// Digits with separators.
fn grouped(digits: &str, spec: &Spec, size: usize, budget: &mut Budget) -> Outcome<String> {
    let Some(separator) = spec.grouping else {
        return Ok(digits.to_owned());
    };
    if spec.align == Some('=') && spec.fill == Some('0') {
        return fail("a grouping with zeros before the number is not supported");
    }
    budget.make(2 * digits.len())?;
    let whole = digits
        .find(|char: char| !char.is_ascii_hexdigit())
        .unwrap_or(digits.len());
    let whole = digits[..whole].find('e').unwrap_or(whole);
    let mut out = String::new();
    for (at, digit) in digits[..whole].chars().enumerate() {
        if at > 0 && (whole - at).is_multiple_of(size) {
            out.push(separator);
        }
        out.push(digit);
    }
    out.push_str(&digits[whole..]);
    Ok(out)
}

/// A number that is not negative, by `e`, `f` or `g`.
pub(super) fn shown_float(
    number: f64,
    kind: char,
    precision: usize,
    is_alternate: bool,
) -> Outcome<String> {
    if precision > MAX_PRECISION {
        return fail(format!(
            "a precision of more than {MAX_PRECISION} digits is not supported"
        ));
    }
    let text = if number.is_nan() {
        "nan".to_owned()
    } else if number.is_infinite() {
        "inf".to_owned()
    } else {
        match kind.to_ascii_lowercase() {
            'e' => scientific(number, precision, is_alternate),
            'f' => {
                let point = if is_alternate && precision == 0 {
                    "."
                } else {
                    ""
                };
                format!("{number:.precision$}{point}")
            }
            _ => general(number, precision.max(1), is_alternate),
        }
    };
    Ok(if kind.is_ascii_uppercase() {
        text.to_ascii_uppercase()
    } else {
        text
    })
}

fn scientific(number: f64, precision: usize, is_alternate: bool) -> String {
    let text = format!("{number:.precision$e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let point = if is_alternate && precision == 0 {
        "."
    } else {
        ""
    };
    let mut out = format!("{digits}{point}e");
    out.push(if exponent < 0 { '-' } else { '+' });
    let _ = write!(out, "{:02}", exponent.abs());
    out
}

fn general(number: f64, precision: usize, is_alternate: bool) -> String {
    let rounded = format!("{number:.*e}", precision - 1);
    let exponent: i32 = rounded
        .split_once('e')
        .and_then(|(_, exponent)| exponent.parse().ok())
        .unwrap_or(0);
    let is_scientific = exponent < -4 || exponent >= i32::try_from(precision).unwrap_or(i32::MAX);
    let text = if is_scientific {
        scientific(number, precision - 1, is_alternate)
    } else {
        let decimals = usize::try_from(precision as i64 - 1 - i64::from(exponent)).unwrap_or(0);
        format!("{number:.decimals$}")
    };
    if is_alternate {
        return text;
    }
    let (digits, end) = match text.find('e') {
        Some(at) => text.split_at(at),
        None => (text.as_str(), ""),
    };
    let digits = if digits.contains('.') {
        digits.trim_end_matches('0').trim_end_matches('.')
    } else {
        digits
    };
    format!("{digits}{end}")
}

/// Digits with zeros before them, up to a number of digits.
pub(super) fn with_digits(digits: &str, precision: usize) -> String {
    format!(
        "{}{digits}",
        "0".repeat(precision.saturating_sub(digits.len()))
    )
}

/// Adds a text padded to a width; with '=', between its sign and its digits. The caller has taken the bytes.
pub(super) fn push_padded(
    out: &mut String,
    before: &str,
    text: &str,
    width: usize,
    fill: char,
    align: char,
) {
    let length = before.chars().count() + text.chars().count();
    let missing = width.saturating_sub(length);
    let (left, inner, right) = match align {
        '<' => (0, 0, missing),
        '^' => (missing / 2, 0, missing - missing / 2),
        '=' => (0, missing, 0),
        _ => (missing, 0, 0),
    };
    out.extend(std::iter::repeat_n(fill, left));
    out.push_str(before);
    out.extend(std::iter::repeat_n(fill, inner));
    out.push_str(text);
    out.extend(std::iter::repeat_n(fill, right));
}
