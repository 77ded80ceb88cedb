//! Filters about numbers.

use crate::arguments::{flag, given, int_or};
use crate::error::{Outcome, fail};
use crate::interpreter::Interpreter;
use crate::operators::as_float;
use crate::unicode::{decimal_value, is_space};
use crate::value::{Arguments, Iter, Path, Value};

impl Interpreter<'_> {
    pub(super) fn number_filter(
        &mut self,
        name: &str,
        value: &Value,
        arguments: Arguments,
    ) -> Outcome<Value> {
        match name {
            "abs" => {
                arguments.none(name)?;
                match (value, value.as_int()) {
                    (Value::Float(number), _) => Ok(Value::Float(number.abs())),
                    (_, Some(number)) if number < 0 => self.negative(&Value::Int(number)),
                    (_, Some(number)) => Ok(Value::Int(number)),
                    _ => fail(format!(
                        "bad operand type for abs(): '{}'",
                        value.type_name()
                    )),
                }
            }
            "int" => {
                let [default, base] = arguments.bind(name, ["default", "base"])?;
                let base = int_or(base.as_ref(), 10, name)?;
                let number = self.int_of(value, base)?;
                Ok(number.unwrap_or_else(|| default.unwrap_or(Value::Int(0))))
            }
            "float" => {
                let [default] = arguments.bind(name, ["default"])?;
                let number = self.float_of(value)?;
                Ok(number.map_or_else(|| default.unwrap_or(Value::Float(0.0)), Value::Float))
            }
            "round" => {
                let [precision, method] = arguments.bind(name, ["precision", "method"])?;
                let precision = int_or(precision.as_ref(), 0, name)?;
                let method = method.unwrap_or_else(|| Value::str("common"));
                let method = method.as_text().map_or("", |method| &**method).to_owned();
                self.round(value, precision, &method)
            }
            "sum" => {
                let [attribute, start] = arguments.bind(name, ["attribute", "start"])?;
                let path = Path::new(&given(attribute).unwrap_or(Value::None), false)?;
                let mut sum = start.unwrap_or(Value::Int(0));
                if matches!(sum, Value::Str(_)) {
                    return fail("sum() can't sum strings [use ''.join(seq) instead]");
                }
                let mut iter = Iter::of(value)?;
                while let Some(item) = iter.next(self)? {
                    let item = path.of(&item, None, self)?;
                    sum = self.add(&sum, &item)?;
                }
                Ok(sum)
            }
            _ => {
                let [binary] = arguments.bind(name, ["binary"])?;
                let Some(bytes) = self.float_of(value)? else {
                    return fail(format!(
                        "filesizeformat: not a number: '{}'",
                        value.type_name()
                    ));
                };
                Ok(Value::str(file_size(bytes, flag(binary.as_ref()))?))
            }
        }
    }

    /// `float(value)`; none where Python raises.
    fn float_of(&mut self, value: &Value) -> Outcome<Option<f64>> {
        if let Value::Undefined(undefined) = value {
            return fail(&*undefined.message);
        }
        let Value::Str(text) = value else {
            return Ok(as_float(value));
        };
        self.budget.make(text.len())?;
        let text = text.trim_matches(is_space);
        let digits: String = text.chars().map(ascii_digit).collect();
        let Some(digits) = without_underscores(&digits) else {
            return Ok(None);
        };
        let unsigned = digits.trim_start_matches(['+', '-']).to_ascii_lowercase();
        let is_word = ["inf", "infinity", "nan"].contains(&unsigned.as_str());
        if !is_word && !unsigned.starts_with(|char: char| char == '.' || char.is_ascii_digit()) {
            return Ok(None);
        }
        Ok(digits.parse().ok())
    }

    /// `int(value)` as the filter has it; none where it gives the default.
    fn int_of(&mut self, value: &Value, base: i128) -> Outcome<Option<Value>> {
        if let Value::Str(text) = value {
            self.budget.make(text.len())?;
            if let Some(number) = parse_int(text, base)? {
                return Ok(Some(Value::Int(number)));
            }
        } else if let Some(number) = value.as_int() {
            return Ok(Some(Value::Int(number)));
        }
        match self.float_of(value)? {
            Some(number) if number.is_finite() => {
                let whole = number.trunc();
                if whole.abs() >= 2f64.powi(126) {
                    return fail("int: the number is too large for an integer of 128 bits");
                }
                Ok(Some(Value::Int(whole as i128)))
            }
            _ => Ok(None),
        }
    }

    fn round(&mut self, value: &Value, precision: i128, method: &str) -> Outcome<Value> {
        if let Value::Undefined(undefined) = value {
            return fail(&*undefined.message);
        }
        let Some(number) = as_float(value) else {
            return fail(format!("round: not a number: '{}'", value.type_name()));
        };
        let Ok(precision) = i32::try_from(precision) else {
            return fail(format!("round: the precision {precision} is too large"));
        };
        if !(-300..=300).contains(&precision) {
            return fail(format!("round: the precision {precision} is too large"));
        }
        if method == "common" {
            return match value.as_int() {
                Some(number) if precision >= 0 => Ok(Value::Int(number)),
                Some(number) => rounded_int(number, precision.unsigned_abs()),
                None => Ok(Value::Float(rounded(number, precision))),
            };
        }
        let is_up = match method {
            "ceil" => true,
            "floor" => false,
            _ => return fail("round: the method must be 'common', 'ceil' or 'floor'"),
        };
        let factor = 10f64.powi(precision);
        let scaled = number * factor;
        if !scaled.is_finite() {
            return fail("round: the number is too large");
        }
        let whole = if is_up { scaled.ceil() } else { scaled.floor() };
        // An integer of Python has no negative zero.
        Ok(Value::Float((whole + 0.0) / factor))
    }
}

/// A digit of any script as one of ASCII.
fn ascii_digit(char: char) -> char {
    decimal_value(char)
        .and_then(|digit| char::from_digit(digit, 10))
        .unwrap_or(char)
}

/// A number without its underscores, which are allowed between digits only.
fn without_underscores(text: &str) -> Option<String> {
    let bytes = text.as_bytes();
    let is_digit = |at: Option<usize>| {
        at.and_then(|at| bytes.get(at))
            .is_some_and(u8::is_ascii_alphanumeric)
    };
    for (at, _) in text.match_indices('_') {
        if !is_digit(at.checked_sub(1)) || !is_digit(Some(at + 1)) {
            return None;
        }
    }
    Some(text.replace('_', ""))
}

/// `int(text, base)`; none where Python raises `ValueError`.
fn parse_int(text: &str, base: i128) -> Outcome<Option<i128>> {
    if base != 0 && !(2..=36).contains(&base) {
        return Ok(None);
    }
    let text: String = text
        .trim_matches(is_space)
        .chars()
        .map(ascii_digit)
        .collect();
    let (is_negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text.strip_prefix('+').unwrap_or(&text)),
    };
    let lower = digits.to_ascii_lowercase();
    let mut radix = base;
    let mut digits = lower.as_str();
    for (prefix, of) in [("0x", 16), ("0o", 8), ("0b", 2)] {
        if (base == 0 || base == of)
            && let Some(rest) = lower.strip_prefix(prefix)
        {
            radix = of;
            digits = rest.strip_prefix('_').unwrap_or(rest);
        }
    }
    if radix == 0 {
        radix = 10;
        if digits.len() > 1
            && digits.starts_with('0')
            && digits.bytes().any(|byte| !b"0_".contains(&byte))
        {
            return Ok(None);
        }
    }
    let Some(digits) = without_underscores(digits) else {
        return Ok(None);
    };
    let radix = u32::try_from(radix).unwrap_or(10);
    if digits.is_empty() || !digits.chars().all(|char| char.is_digit(radix)) {
        return Ok(None);
    }
    match i128::from_str_radix(&digits, radix) {
        Ok(number) => Ok(Some(if is_negative { -number } else { number })),
        Err(_) => fail("int: the number is too large for an integer of 128 bits"),
    }
}

/// The nearest number with so many digits after the point, the even one of two.
fn rounded(number: f64, precision: i32) -> f64 {
    if !number.is_finite() {
        return number;
    }
    if precision >= 0 {
        return format!("{number:.*}", precision.unsigned_abs() as usize)
            .parse()
            .unwrap_or(number);
    }
    // As many digits of the number as lie above the precision, computed exactly.
    let digits = format!("{number:.0}");
    let (sign, digits) = digits
        .strip_prefix('-')
        .map_or(("", digits.as_str()), |digits| ("-", digits));
    let dropped = precision.unsigned_abs() as usize;
    let padded = format!("{digits:0>width$}", width = dropped + 1);
    let (kept, rest) = padded.split_at(padded.len() - dropped);
    let half = format!("5{}", "0".repeat(dropped - 1));
    let mut kept: Vec<u8> = format!("0{kept}").into_bytes();
    let is_odd = kept.last().is_some_and(|digit| digit % 2 == 1);
    let has_fraction = number.fract() != 0.0;
    if *rest > *half || *rest == *half && (is_odd || has_fraction) {
        for digit in kept.iter_mut().rev() {
            *digit += 1;
            if *digit <= b'9' {
                break;
            }
            *digit = b'0';
        }
    }
    let kept = String::from_utf8_lossy(&kept).into_owned();
    format!("{sign}{kept}e{dropped}").parse().unwrap_or(number)
}

/// An integer rounded to a power of ten, to the even one of two.
fn rounded_int(number: i128, dropped: u32) -> Outcome<Value> {
    let Some(unit) = 10i128.checked_pow(dropped).filter(|unit| *unit < 1 << 120) else {
        return Ok(Value::Int(0));
    };
    let quotient = number.div_euclid(unit);
    let rest = number.rem_euclid(unit);
    let is_up = 2 * rest > unit || 2 * rest == unit && quotient % 2 != 0;
    match (quotient + i128::from(is_up)).checked_mul(unit) {
        Some(number) => Ok(Value::Int(number)),
        None => fail("round: the number is too large for an integer of 128 bits"),
    }
}

/// A number of bytes with a unit.
fn file_size(bytes: f64, is_binary: bool) -> Outcome<String> {
    let base: f64 = if is_binary { 1024.0 } else { 1000.0 };
    let units = if is_binary {
        ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB", "ZiB", "YiB"]
    } else {
        ["kB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB"]
    };
    if bytes == 1.0 {
        return Ok("1 Byte".to_owned());
    }
    if bytes < base {
        if !bytes.is_finite() || bytes.abs() > 1e30 {
            return fail("filesizeformat: the number is too large");
        }
        return Ok(format!("{} Bytes", bytes as i128));
    }
    if !bytes.is_finite() {
        return fail("filesizeformat: the number is not finite");
    }
    for (at, unit) in units.iter().enumerate() {
        let size = base.powi(at as i32 + 2);
        if bytes < size || at + 1 == units.len() {
            return Ok(format!("{:.1} {unit}", base * bytes / size));
        }
    }
    fail("filesizeformat: the number is too large")
}
