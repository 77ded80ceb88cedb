//! Methods of values.

mod case;
pub(crate) mod classes;
mod containers;
mod search;
mod shape;
pub(crate) mod split;

use crate::error::{Outcome, fail};
use crate::interpreter::Interpreter;
use crate::value::{Arguments, Function, Object, Value};

const OF_STR: [&str; 47] = [
    "capitalize",
    "casefold",
    "center",
    "count",
    "encode",
    "endswith",
    "expandtabs",
    "find",
    "format",
    "format_map",
    "index",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "isidentifier",
    "islower",
    "isnumeric",
    "isprintable",
    "isspace",
    "istitle",
    "isupper",
    "join",
    "ljust",
    "lower",
    "lstrip",
    "maketrans",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rindex",
    "rjust",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "swapcase",
    "title",
    "translate",
    "upper",
    "zfill",
];
const OF_MARKUP: [&str; 3] = ["escape", "striptags", "unescape"];
const OF_LIST: [&str; 3] = ["copy", "count", "index"];
const OF_LIST_MUTATING: [&str; 8] = [
    "append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort",
];
const OF_TUPLE: [&str; 2] = ["count", "index"];
const OF_DICT: [&str; 6] = ["copy", "fromkeys", "get", "items", "keys", "values"];
const OF_DICT_MUTATING: [&str; 5] = ["clear", "pop", "popitem", "setdefault", "update"];
const OF_INT: [&str; 6] = [
    "as_integer_ratio",
    "bit_count",
    "bit_length",
    "conjugate",
    "from_bytes",
    "to_bytes",
];
const OF_FLOAT: [&str; 5] = [
    "as_integer_ratio",
    "conjugate",
    "fromhex",
    "hex",
    "is_integer",
];

/// Whether a value has a method, other than those that change the value.
pub(crate) fn has(of: &Value, name: &str) -> bool {
    match of {
        Value::Str(text) => OF_STR.contains(&name) || text.is_markup && OF_MARKUP.contains(&name),
        Value::List(_) => OF_LIST.contains(&name),
        Value::Tuple(_) | Value::Range(_) => OF_TUPLE.contains(&name),
        Value::Dict(_) => OF_DICT.contains(&name),
        Value::View(..) => name == "isdisjoint",
        Value::Bool(_) | Value::Int(_) => OF_INT.contains(&name),
        Value::Float(_) => OF_FLOAT.contains(&name),
        Value::Iterator(_) => ["send", "throw", "close"].contains(&name),
        Value::Undefined(_) | Value::None => false,
        Value::Object(object) => match &**object {
            Object::Loop(_) => ["cycle", "changed"].contains(&name),
            Object::Cycler { .. } => ["next", "reset"].contains(&name),
            Object::Function(Function::Dict) => name == "fromkeys",
            _ => false,
        },
    }
}

/// Whether a value has a method that changes the value, which the sandbox refuses.
pub(crate) fn is_mutating(of: &Value, name: &str) -> bool {
    match of {
        Value::List(_) => OF_LIST_MUTATING.contains(&name),
        Value::Dict(_) => OF_DICT_MUTATING.contains(&name),
        _ => false,
    }
}

/// Calls a method.
pub(crate) fn call(
    interpreter: &mut Interpreter<'_>,
    of: &Value,
    name: &str,
    arguments: Arguments,
) -> Outcome<Value> {
    if let Value::Str(text) = of {
        interpreter.budget.read(text.len())?;
        return interpreter.text_method(text, name, arguments);
    }
    match of {
        Value::List(_) | Value::Tuple(_) | Value::Range(_) => {
            interpreter.sequence_method(of, name, arguments)
        }
        Value::Dict(dict) => interpreter.dict_method(dict, name, arguments),
        Value::Object(object) => interpreter.object_method(object, name, arguments),
        Value::Float(number) if name == "is_integer" => {
            arguments.none("is_integer()")?;
            Ok(Value::Bool(number.fract() == 0.0))
        }
        Value::Bool(_) | Value::Int(_) if name == "bit_length" => {
            arguments.none("bit_length()")?;
            let number = of.as_int().unwrap_or(0).unsigned_abs();
            Ok(Value::Int(i128::from(u128::BITS - number.leading_zeros())))
        }
        other => not_supported(name, other.type_name()),
    }
}

pub(super) fn not_supported<T>(name: &str, kind: &str) -> Outcome<T> {
    fail(format!("the method '{name}' of '{kind}' is not supported"))
}
