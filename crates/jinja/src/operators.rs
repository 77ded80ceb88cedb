//! Operators: arithmetic, comparison, membership.

use std::cmp::Ordering;
use std::rc::Rc;

use crate::ast::{Comparison, Operator};
use crate::error::{Bound, Outcome, fail, out_of};
use crate::filters::escaped;
use crate::interpreter::Interpreter;
use crate::value::{Iter, Key, Text, Value};

/// Error of an integer overflow.
const TOO_LARGE: &str = "the result is too large for an integer of 128 bits";

fn unsupported<T>(operator: &str, left: &Value, right: &Value) -> Outcome<T> {
    for value in [left, right] {
        if let Value::Undefined(undefined) = value {
            return fail(&*undefined.message);
        }
    }
    let (left, right) = (left.type_name(), right.type_name());
    fail(format!(
        "unsupported operand type(s) for {operator}: '{left}' and '{right}'"
    ))
}

/// A number as a floating-point one.
pub(crate) fn as_float(value: &Value) -> Option<f64> {
    match value {
        Value::Float(number) => Some(*number),
        other => other.as_int().map(|number| number as f64),
    }
}

impl Interpreter<'_> {
    pub(crate) fn add(&mut self, left: &Value, right: &Value) -> Outcome<Value> {
        match (left, right) {
            (Value::Str(left), Value::Str(right)) => {
                let is_markup = left.is_markup || right.is_markup;
                let left = if is_markup {
                    self.marked(left)?
                } else {
                    left.clone()
                };
                let right = if is_markup {
                    self.marked(right)?
                } else {
                    right.clone()
                };
                self.budget.make(left.len() + right.len())?;
                let mut text = String::with_capacity(left.len() + right.len());
                text.push_str(&left);
                text.push_str(&right);
                Ok(left.with(text))
            }
            (Value::List(first), Value::List(second))
            | (Value::Tuple(first), Value::Tuple(second)) => {
                let length = first.items.len() + second.items.len();
                self.budget.make_many(length, size_of::<Value>())?;
                let items = first.items.iter().chain(&second.items).cloned().collect();
                if matches!(left, Value::List(_)) {
                    Value::list(items)
                } else {
                    Value::tuple(items)
                }
            }
            _ => self.arithmetic(Operator::Add, left, right),
        }
    }

    /// A text as markup.
    fn marked(&mut self, text: &Text) -> Outcome<Text> {
        if text.is_markup {
            return Ok(text.clone());
        }
        let mut text = escaped(text, &mut self.budget)?;
        text.is_markup = true;
        Ok(text)
    }

    pub(crate) fn multiply(&mut self, left: &Value, right: &Value) -> Outcome<Value> {
        let (sequence, count) = match (left, right) {
            (Value::Str(_) | Value::List(_) | Value::Tuple(_), count) => (left, count.as_int()),
            (count, Value::Str(_) | Value::List(_) | Value::Tuple(_)) => (right, count.as_int()),
            _ => return self.arithmetic(Operator::Multiply, left, right),
        };
        let Some(count) = count else {
            return unsupported("*", left, right);
        };
        let Ok(count) = usize::try_from(count.max(0)) else {
            return out_of(Bound::Bytes);
        };
        match sequence {
            Value::Str(text) => {
                self.budget.make_many(count, text.len())?;
                Ok(text.with(text.repeat(count)))
            }
            Value::List(items) | Value::Tuple(items) => {
                self.budget
                    .make_many(count, items.items.len().saturating_mul(size_of::<Value>()))?;
                if items.items.is_empty() {
                    return Ok(sequence.clone());
                }
                let repeated = std::iter::repeat_n(&items.items, count)
                    .flatten()
                    .cloned()
                    .collect();
                if matches!(sequence, Value::List(_)) {
                    Value::list(repeated)
                } else {
                    Value::tuple(repeated)
                }
            }
            _ => unsupported("*", left, right),
        }
    }

    pub(crate) fn arithmetic(
        &mut self,
        operator: Operator,
        left: &Value,
        right: &Value,
    ) -> Outcome<Value> {
        if let (Some(left), Some(right)) = (left.as_int(), right.as_int()) {
            return self.int_arithmetic(operator, left, right);
        }
        let (Some(left), Some(right)) = (as_float(left), as_float(right)) else {
            return unsupported(symbol(operator), left, right);
        };
        float_arithmetic(operator, left, right).map(Value::Float)
    }

    fn int_arithmetic(&mut self, operator: Operator, left: i128, right: i128) -> Outcome<Value> {
        let is_division = matches!(
            operator,
            Operator::Divide | Operator::FloorDivide | Operator::Remainder
        );
        if is_division && right == 0 {
            return fail("division by zero");
        }
        let result = match operator {
            Operator::Add => left.checked_add(right),
            Operator::Subtract => left.checked_sub(right),
            Operator::Multiply => left.checked_mul(right),
            Operator::Divide => return divided(left, right).map(Value::Float),
            Operator::FloorDivide => left.checked_div(right).map(|quotient| {
                let is_inexact = left % right != 0;
                quotient - i128::from(is_inexact && (left < 0) != (right < 0))
            }),
            Operator::Remainder => left.checked_rem(right).map(|rest| {
                if rest != 0 && (rest < 0) != (right < 0) {
                    rest + right
                } else {
                    rest
                }
            }),
            Operator::Power if right < 0 => {
                return float_arithmetic(operator, left as f64, right as f64).map(Value::Float);
            }
            Operator::Power => match left {
                0 | 1 => Some(if right == 0 { 1 } else { left }),
                -1 => Some(if right % 2 == 0 { 1 } else { -1 }),
                _ => u32::try_from(right)
                    .ok()
                    .and_then(|right| left.checked_pow(right)),
            },
        };
        match result {
            Some(result) => Ok(Value::Int(result)),
            None => fail(TOO_LARGE),
        }
    }

    pub(crate) fn negative(&mut self, value: &Value) -> Outcome<Value> {
        match (value, value.as_int()) {
            (_, Some(number)) => match number.checked_neg() {
                Some(number) => Ok(Value::Int(number)),
                None => fail(TOO_LARGE),
            },
            (Value::Float(number), _) => Ok(Value::Float(-number)),
            (Value::Undefined(undefined), _) => fail(&*undefined.message),
            (other, _) => fail(format!(
                "bad operand type for unary -: '{}'",
                other.type_name()
            )),
        }
    }

    pub(crate) fn positive(&mut self, value: &Value) -> Outcome<Value> {
        match (value, value.as_int()) {
            (_, Some(number)) => Ok(Value::Int(number)),
            (Value::Float(number), _) => Ok(Value::Float(*number)),
            (Value::Undefined(undefined), _) => fail(&*undefined.message),
            (other, _) => fail(format!(
                "bad operand type for unary +: '{}'",
                other.type_name()
            )),
        }
    }

    pub(crate) fn compare(
        &mut self,
        comparison: Comparison,
        left: &Value,
        right: &Value,
    ) -> Outcome<bool> {
        let order = |interpreter: &mut Self, is: fn(Ordering) -> bool, symbol| {
            let order = interpreter.order(left, right, symbol)?;
            Ok(order.is_some_and(is))
        };
        match comparison {
            Comparison::Equal => self.equal(left, right),
            Comparison::NotEqual => Ok(!self.equal(left, right)?),
            Comparison::In => self.contains(right, left),
            Comparison::NotIn => Ok(!self.contains(right, left)?),
            Comparison::Less => order(self, Ordering::is_lt, "<"),
            Comparison::LessOrEqual => order(self, Ordering::is_le, "<="),
            Comparison::Greater => order(self, Ordering::is_gt, ">"),
            Comparison::GreaterOrEqual => order(self, Ordering::is_ge, ">="),
        }
    }

    /// `left == right`.
    pub(crate) fn equal(&mut self, left: &Value, right: &Value) -> Outcome<bool> {
        self.budget.work(1)?;
        Ok(match (left, right) {
            (Value::Undefined(_), Value::Undefined(_)) | (Value::None, Value::None) => true,
            (Value::Str(left), Value::Str(right)) => {
                self.budget.read(left.len().min(right.len()))?;
                left.text == right.text
            }
            (Value::List(left), Value::List(right)) | (Value::Tuple(left), Value::Tuple(right)) => {
                if left.items.len() != right.items.len() {
                    return Ok(false);
                }
                for (left, right) in left.items.iter().zip(&right.items) {
                    if !self.equal(left, right)? {
                        return Ok(false);
                    }
                }
                true
            }
            (Value::Dict(left), Value::Dict(right)) => {
                if left.items.len() != right.items.len() {
                    return Ok(false);
                }
                for (key, (_, left)) in &left.items {
                    let Some((_, right)) = right.items.get(key) else {
                        return Ok(false);
                    };
                    if !self.equal(left, right)? {
                        return Ok(false);
                    }
                }
                true
            }
            (Value::Range(left), Value::Range(right)) => {
                left.length == right.length
                    && (left.length == 0
                        || left.start == right.start
                            && (left.length == 1 || left.step == right.step))
            }
            (Value::Object(left), Value::Object(right)) => {
                if let (
                    crate::value::Object::Function(left),
                    crate::value::Object::Function(right),
                ) = (&**left, &**right)
                {
                    return Ok(left == right);
                }
                Rc::ptr_eq(left, right)
            }
            (Value::Iterator(left), Value::Iterator(right)) => Rc::ptr_eq(left, right),
            (Value::View(..), Value::View(..)) => {
                return fail("comparing views of dictionaries is not supported");
            }
            _ => number_order(left, right) == Some(Some(Ordering::Equal)),
        })
    }

    /// The order of two values; none if neither comes before the other nor are they equal.
    pub(crate) fn order(
        &mut self,
        left: &Value,
        right: &Value,
        symbol: &str,
    ) -> Outcome<Option<Ordering>> {
        self.budget.work(1)?;
        match (left, right) {
            (Value::Str(left), Value::Str(right)) => {
                self.budget.read(left.len().min(right.len()))?;
                Ok(Some(left.text.cmp(&right.text)))
            }
            (Value::List(left), Value::List(right)) | (Value::Tuple(left), Value::Tuple(right)) => {
                for (left, right) in left.items.iter().zip(&right.items) {
                    if !self.equal(left, right)? {
                        return self.order(left, right, symbol);
                    }
                }
                Ok(Some(left.items.len().cmp(&right.items.len())))
            }
            _ => match number_order(left, right) {
                Some(order) => Ok(order),
                None => {
                    for value in [left, right] {
                        if let Value::Undefined(undefined) = value {
                            return fail(&*undefined.message);
                        }
                    }
                    let (left, right) = (left.type_name(), right.type_name());
                    fail(format!(
                        "'{symbol}' not supported between instances of '{left}' and '{right}'"
                    ))
                }
            },
        }
    }

    /// `item in container`.
    pub(crate) fn contains(&mut self, container: &Value, item: &Value) -> Outcome<bool> {
        match (container, item) {
            (Value::Str(text), Value::Str(part)) => {
                self.budget.read(text.len() + part.len())?;
                Ok(text.contains(&*part.text))
            }
            (Value::Str(_), other) => fail(format!(
                "'in <string>' requires string as left operand, not {}",
                other.type_name()
            )),
            (Value::Dict(dict), key) | (Value::View(crate::value::View::Keys, dict), key) => {
                let key = self.key(key)?;
                Ok(dict.items.contains_key(&key))
            }
            (container, item) => {
                let mut iter = Iter::of(container)?;
                while let Some(found) = iter.next(self)? {
                    if self.equal(&found, item)? {
                        return Ok(true);
                    }
                }
                Ok(false)
            }
        }
    }

    /// The key under which equal values are found.
    pub(crate) fn key(&mut self, value: &Value) -> Outcome<Key> {
        self.budget.work(1)?;
        Ok(match value {
            Value::Undefined(_) => Key::Undefined,
            Value::None => Key::None,
            Value::Bool(value) => Key::Int(i128::from(*value)),
            Value::Int(number) => Key::Int(*number),
            Value::Float(number) => {
                let whole = *number as i128;
                if whole as f64 == *number && whole != i128::MAX {
                    Key::Int(whole)
                } else {
                    Key::Float(number.to_bits())
                }
            }
            Value::Str(text) => {
                self.budget.read(text.len())?;
                Key::Str(text.text.clone())
            }
            Value::Tuple(items) => {
                self.budget.make_many(items.items.len(), size_of::<Key>())?;
                let keys = items.items.iter().map(|item| self.key(item));
                Key::Tuple(keys.collect::<Outcome<_>>()?)
            }
            Value::Object(object) => Key::Object(Rc::as_ptr(object).cast::<()>() as usize),
            Value::Iterator(iter) => Key::Object(Rc::as_ptr(iter).cast::<()>() as usize),
            Value::Range(_) => return fail("a range as a key is not supported"),
            other => return fail(format!("unhashable type: '{}'", other.type_name())),
        })
    }
}

/// The order of two numbers; none if they are not numbers; within, none if one is not a number in itself.
fn number_order(left: &Value, right: &Value) -> Option<Option<Ordering>> {
    Some(match (left, right) {
        (Value::Float(left), Value::Float(right)) => left.partial_cmp(right),
        (Value::Float(left), right) => mixed_order(right.as_int()?, *left).map(Ordering::reverse),
        (left, Value::Float(right)) => mixed_order(left.as_int()?, *right),
        (left, right) => Some(left.as_int()?.cmp(&right.as_int()?)),
    })
}

/// The exact order of an integer and a floating-point number.
fn mixed_order(left: i128, right: f64) -> Option<Ordering> {
    if right.is_nan() {
        return None;
    }
    // The cast is exact but for numbers beyond all integers, which it brings to the last ones.
    let whole = right.trunc() as i128;
    if right >= 2f64.powi(127) {
        return Some(Ordering::Less);
    }
    Some(
        left.cmp(&whole)
            .then_with(|| 0.0.partial_cmp(&right.fract()).unwrap_or(Ordering::Equal)),
    )
}

/// The exact quotient, rounded once.
fn divided(left: i128, right: i128) -> Outcome<f64> {
    let is_exact = |number: i128| number.unsigned_abs() <= 1 << 53;
    if is_exact(left) && is_exact(right) {
        return Ok(left as f64 / right as f64);
    }
    if left.checked_rem(right) == Some(0) {
        return Ok((left / right) as f64);
    }
    fail("dividing integers of more than 53 bits is not supported")
}

fn float_arithmetic(operator: Operator, left: f64, right: f64) -> Outcome<f64> {
    let is_division = matches!(
        operator,
        Operator::Divide | Operator::FloorDivide | Operator::Remainder
    );
    if is_division && right == 0.0 {
        return fail("float division by zero");
    }
    Ok(match operator {
        Operator::Add => left + right,
        Operator::Subtract => left - right,
        Operator::Multiply => left * right,
        Operator::Divide => left / right,
        Operator::FloorDivide => floor_division(left, right).0,
        Operator::Remainder => floor_division(left, right).1,
        Operator::Power => {
            if left == 0.0 && right < 0.0 {
                return fail("0.0 cannot be raised to a negative power");
            }
            if left < 0.0 && right.fract() != 0.0 {
                return fail("complex numbers are not supported");
            }
            let power = left.powf(right);
            if power.is_infinite() && left.is_finite() && right.is_finite() {
                return fail("the result is too large");
            }
            power
        }
    })
}

/// Python's quotient and remainder: the remainder has the sign of the divisor.
fn floor_division(left: f64, right: f64) -> (f64, f64) {
    let mut rest = left % right;
    let mut quotient = (left - rest) / right;
    if rest != 0.0 {
        if (right < 0.0) != (rest < 0.0) {
            rest += right;
            quotient -= 1.0;
        }
    } else {
        rest = 0f64.copysign(right);
    }
    if quotient == 0.0 {
        return (0f64.copysign(left / right), rest);
    }
    let floor = quotient.floor();
    (
        if quotient - floor > 0.5 {
            floor + 1.0
        } else {
            floor
        },
        rest,
    )
}

fn symbol(operator: Operator) -> &'static str {
    match operator {
        Operator::Add => "+",
        Operator::Subtract => "-",
        Operator::Multiply => "*",
        Operator::Divide => "/",
        Operator::FloorDivide => "//",
        Operator::Remainder => "%",
        Operator::Power => "**",
    }
}
