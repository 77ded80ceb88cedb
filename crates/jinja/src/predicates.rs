//! Jinja's tests: what comes after `is`.

use std::rc::Rc;

use crate::arguments::required;
use crate::ast::{Comparison, Operator};
use crate::error::{Outcome, fail};
use crate::filters;
use crate::interpreter::Interpreter;
use crate::methods::classes::{is_lower, is_upper};
use crate::repr::str_of;
use crate::value::{Arguments, Iter, Object, Value};

const NAMES: [&str; 39] = [
    "odd",
    "even",
    "divisibleby",
    "defined",
    "undefined",
    "filter",
    "test",
    "none",
    "boolean",
    "false",
    "true",
    "integer",
    "float",
    "lower",
    "upper",
    "string",
    "mapping",
    "number",
    "sequence",
    "iterable",
    "callable",
    "sameas",
    "escaped",
    "in",
    "==",
    "eq",
    "equalto",
    "!=",
    "ne",
    ">",
    "gt",
    "greaterthan",
    "ge",
    ">=",
    "<",
    "lt",
    "lessthan",
    "<=",
    "le",
];

/// Whether there is a test of this name.
pub(crate) fn is_known(name: &str) -> bool {
    NAMES.contains(&name)
}

fn comparison(name: &str) -> Option<Comparison> {
    Some(match name {
        "==" | "eq" | "equalto" => Comparison::Equal,
        "!=" | "ne" => Comparison::NotEqual,
        ">" | "gt" | "greaterthan" => Comparison::Greater,
        ">=" | "ge" => Comparison::GreaterOrEqual,
        "<" | "lt" | "lessthan" => Comparison::Less,
        "<=" | "le" => Comparison::LessOrEqual,
        "in" => Comparison::In,
        _ => return None,
    })
}

impl Interpreter<'_> {
    /// Whether a value passes a test.
    pub(crate) fn test(&mut self, name: &str, value: Value, arguments: Arguments) -> Outcome<bool> {
        if let Some(comparison) = comparison(name) {
            let [other] = arguments.bind_positional(name)?;
            let other = required(other, name)?;
            return self.compare(comparison, &value, &other);
        }
        match name {
            "divisibleby" => {
                let [divisor] = arguments.bind(name, ["num"])?;
                let divisor = required(divisor, name)?;
                return self.has_remainder(&value, &divisor, 0);
            }
            "sameas" => {
                let [other] = arguments.bind(name, ["other"])?;
                return self.is_same(&value, &required(other, name)?);
            }
            _ if !is_known(name) => return fail(format!("there is no test '{name}'")),
            _ => arguments.none(name)?,
        }
        Ok(match name {
            "odd" => self.has_remainder(&value, &Value::Int(2), 1)?,
            "even" => self.has_remainder(&value, &Value::Int(2), 0)?,
            "defined" => !matches!(value, Value::Undefined(_)),
            "undefined" => matches!(value, Value::Undefined(_)),
            "filter" | "test" => {
                // A list cannot be looked up.
                self.key(&value)?;
                let known = if name == "filter" {
                    filters::is_known
                } else {
                    is_known
                };
                value.as_text().is_some_and(|name| known(name))
            }
            "none" => matches!(value, Value::None),
            "boolean" => matches!(value, Value::Bool(_)),
            "false" => matches!(value, Value::Bool(false)),
            "true" => matches!(value, Value::Bool(true)),
            "integer" => matches!(value, Value::Int(_)),
            "float" => matches!(value, Value::Float(_)),
            "lower" | "upper" => {
                let text = str_of(&value, &mut self.budget)?;
                self.budget.read(text.len())?;
                if name == "lower" {
                    is_lower(&text)
                } else {
                    is_upper(&text)
                }
            }
            "string" => matches!(value, Value::Str(_)),
            "mapping" => matches!(value, Value::Dict(_)),
            "number" => matches!(value, Value::Bool(_) | Value::Int(_) | Value::Float(_)),
            "sequence" => matches!(
                value,
                Value::Str(_)
                    | Value::List(_)
                    | Value::Tuple(_)
                    | Value::Dict(_)
                    | Value::Range(_)
                    // It has a length, and the look-up of an attribute of this name fails differently.
                    | Value::Undefined(_)
            ),
            "iterable" => match &value {
                Value::Object(object) => matches!(**object, Object::Loop(_)),
                value => Iter::of(value).is_ok(),
            },
            "callable" => match &value {
                Value::Object(object) => object.is_callable(),
                // It has a method that is called and fails.
                Value::Undefined(_) => true,
                _ => false,
            },
            "escaped" => value.as_text().is_some_and(|text| text.is_markup),
            _ => return fail(format!("there is no test '{name}'")),
        })
    }

    fn has_remainder(&mut self, value: &Value, divisor: &Value, rest: i128) -> Outcome<bool> {
        let found = match value {
            Value::Str(_) => self.percent(value, divisor)?,
            value => self.arithmetic(Operator::Remainder, value, divisor)?,
        };
        self.equal(&found, &Value::Int(rest))
    }

    /// Whether two values are one object of Python.
    fn is_same(&mut self, left: &Value, right: &Value) -> Outcome<bool> {
        let is_same = match (left, right) {
            (Value::None, Value::None) => true,
            (Value::Bool(left), Value::Bool(right)) => left == right,
            (Value::Undefined(left), Value::Undefined(right)) => Rc::ptr_eq(left, right),
            (Value::List(left), Value::List(right)) => Rc::ptr_eq(left, right),
            (Value::Dict(left), Value::Dict(right)) => Rc::ptr_eq(left, right),
            (Value::Object(left), Value::Object(right)) => {
                if let (Object::Function(left), Object::Function(right)) = (&**left, &**right) {
                    left == right
                } else {
                    Rc::ptr_eq(left, right)
                }
            }
            (Value::Iterator(left), Value::Iterator(right)) => Rc::ptr_eq(left, right),
            // Python keeps one of each of these.
            (Value::Int(left), Value::Int(right)) if left != right || (-5..=256).contains(left) => {
                left == right
            }
            (Value::Tuple(left), Value::Tuple(right)) if Rc::ptr_eq(left, right) => true,
            (Value::Str(left), Value::Str(right))
                if std::sync::Arc::ptr_eq(&left.text, &right.text) =>
            {
                true
            }
            (left, right) if left.type_name() != right.type_name() => false,
            (left, right) => {
                if self.equal(left, right)? {
                    return fail(
                        "the test 'sameas' is not supported for equal values that may be copies: use '=='",
                    );
                }
                false
            }
        };
        Ok(is_same)
    }
}
