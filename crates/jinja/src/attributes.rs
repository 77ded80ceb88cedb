//! Attributes and items of values, as the sandbox gives them.

use std::sync::Arc;

use crate::error::{Outcome, fail};
use crate::interpreter::Interpreter;
use crate::methods;
use crate::value::{Key, Object, Range, Text, Value, View};

/// Attributes that every object of Python has, which the sandbox hides.
const HIDDEN: [&str; 24] = [
    "__class__",
    "__delattr__",
    "__dir__",
    "__doc__",
    "__eq__",
    "__format__",
    "__ge__",
    "__getattribute__",
    "__getstate__",
    "__gt__",
    "__hash__",
    "__init__",
    "__init_subclass__",
    "__le__",
    "__lt__",
    "__ne__",
    "__new__",
    "__reduce__",
    "__reduce_ex__",
    "__repr__",
    "__setattr__",
    "__sizeof__",
    "__str__",
    "__subclasshook__",
];
/// Hidden attributes of containers.
const HIDDEN_OF_CONTAINERS: [&str; 13] = [
    "__contains__",
    "__getitem__",
    "__iter__",
    "__len__",
    "__add__",
    "__mul__",
    "__rmul__",
    "__mod__",
    "__rmod__",
    "__setitem__",
    "__delitem__",
    "__reversed__",
    "__getnewargs__",
];

/// Result of an attribute lookup.
enum Found {
    Value(Value),
    /// One that the sandbox does not give.
    Unsafe,
    Nothing,
}

impl Interpreter<'_> {
    /// `of.name`: an attribute, or else an item.
    pub(crate) fn attribute(&mut self, of: &Value, name: &Arc<str>) -> Outcome<Value> {
        match self.own_attribute(of, name)? {
            Found::Value(value) => Ok(value),
            Found::Unsafe => Ok(hidden(of, name)),
            Found::Nothing => {
                if let Value::Dict(dict) = of
                    && let Some(value) = dict.get(name)
                {
                    return Ok(value.clone());
                }
                Ok(Value::undefined(missing(of, name)))
            }
        }
    }

    /// `of[index]`: an item, or else an attribute.
    pub(crate) fn item(&mut self, of: &Value, index: &Value) -> Outcome<Value> {
        if let Some(value) = self.own_item(of, index)? {
            return Ok(value);
        }
        let Value::Str(name) = index else {
            let kind = of.type_name();
            return Ok(Value::undefined(format!(
                "{kind} object has no such element"
            )));
        };
        match self.own_attribute(of, &name.text)? {
            Found::Value(value) => Ok(value),
            Found::Unsafe => Ok(hidden(of, name)),
            Found::Nothing => Ok(Value::undefined(missing(of, name))),
        }
    }

    /// An attribute, and no item: what the filter `attr` gives.
    pub(crate) fn attribute_only(&mut self, of: &Value, name: &Arc<str>) -> Outcome<Value> {
        match self.own_attribute(of, name)? {
            Found::Value(value) => Ok(value),
            Found::Unsafe => Ok(hidden(of, name)),
            Found::Nothing => Ok(Value::undefined(missing(of, name))),
        }
    }

    fn own_item(&mut self, of: &Value, index: &Value) -> Outcome<Option<Value>> {
        Ok(match of {
            Value::Undefined(undefined) => return fail(&*undefined.message),
            Value::Dict(dict) => {
                if matches!(index, Value::List(_) | Value::Dict(_)) {
                    return Ok(None);
                }
                let key = self.key(index)?;
                dict.items.get(&key).map(|(_, value)| value.clone())
            }
            Value::List(items) | Value::Tuple(items) => {
                position(index, items.items.len()).map(|at| items.items[at].clone())
            }
            Value::Range(range) => position(index, range.length).map(|at| range.at(at)),
            Value::Str(text) => {
                self.budget.make(24)?;
                if !text.is_ascii {
                    self.budget.read(2 * text.len())?;
                }
                position(index, text.length()).map(|at| {
                    let start = text.byte_at(at);
                    let char = text[start..].chars().next().map_or(0, char::len_utf8);
                    text.with(&text[start..start + char])
                })
            }
            Value::Object(object) if matches!(**object, Object::Blocks) => {
                let name = index.as_text().filter(|name| self.has_block(name));
                name.map(|name| Value::object(Object::Block(name.text.clone())))
            }
            _ => None,
        })
    }

    fn own_attribute(&mut self, of: &Value, name: &Arc<str>) -> Outcome<Found> {
        if let Value::Undefined(undefined) = of {
            return fail(&*undefined.message);
        }
        if let Value::Object(object) = of
            && let Object::Namespace(attributes) = &**object
        {
            if &**name == "__class__" {
                return Ok(Found::Unsafe);
            }
            let found = attributes
                .borrow()
                .get(&Key::Str(name.clone()))
                .map(|(_, value)| value.clone());
            return Ok(match found {
                Some(_) if name.starts_with('_') => Found::Unsafe,
                Some(value) => Found::Value(value),
                None => Found::Nothing,
            });
        }
        if name.starts_with('_') {
            let is_container = !matches!(
                of,
                Value::None | Value::Bool(_) | Value::Int(_) | Value::Float(_)
            );
            let is_hidden = HIDDEN.contains(&&**name)
                || is_container && HIDDEN_OF_CONTAINERS.contains(&&**name);
            return Ok(if is_hidden {
                Found::Unsafe
            } else {
                Found::Nothing
            });
        }
        if methods::is_mutating(of, name) {
            return Ok(Found::Unsafe);
        }
        if methods::has(of, name) {
            self.budget.make(64)?;
            let of = of.clone();
            // Levels are bounded by those of a list.
            let method = Value::object(Object::Method {
                of,
                name: name.clone(),
            });
            Value::list(vec![method.clone()])?;
            return Ok(Found::Value(method));
        }
        let value = match of {
            Value::Tuple(items) if items.is_group => match &**name {
                "grouper" => items.items.first().cloned(),
                "list" => items.items.get(1).cloned(),
                _ => None,
            },
            Value::Int(_) | Value::Bool(_) | Value::Float(_) => match &**name {
                "real" => self.positive(of).map(Some)?,
                "imag" if matches!(of, Value::Float(_)) => Some(Value::Float(0.0)),
                "imag" => Some(Value::Int(0)),
                "numerator" if !matches!(of, Value::Float(_)) => self.positive(of).map(Some)?,
                "denominator" if !matches!(of, Value::Float(_)) => Some(Value::Int(1)),
                _ => None,
            },
            Value::Range(range) => match &**name {
                "start" => Some(Value::Int(range.start)),
                "stop" => Some(Value::Int(range.stop)),
                "step" => Some(Value::Int(range.step)),
                _ => None,
            },
            Value::View(..) if &**name == "mapping" => {
                return fail("the attribute 'mapping' is not supported");
            }
            Value::Object(object) => self.object_attribute(object, name)?,
            _ => None,
        };
        Ok(value.map_or(Found::Nothing, Found::Value))
    }

    fn object_attribute(&mut self, object: &Object, name: &Arc<str>) -> Outcome<Option<Value>> {
        Ok(match object {
            Object::Loop(state) => {
                let Ok(mut state) = state.try_borrow_mut() else {
                    return fail("the loop is asked while it goes on to the next item");
                };
                let index = state.index;
                let number = |number: usize| Some(Value::Int(number as i128));
                match &**name {
                    "index" => number(index),
                    "index0" => Some(Value::Int(index as i128 - 1)),
                    "revindex" => Some(Value::Int(state.length(self)? as i128 - index as i128 + 1)),
                    "revindex0" => Some(Value::Int(state.length(self)? as i128 - index as i128)),
                    "first" => Some(Value::Bool(index == 1)),
                    "last" => Some(Value::Bool(state.peek(self)?.is_none())),
                    "length" => number(state.length(self)?),
                    "depth" => number(state.depth0 + 1),
                    "depth0" => number(state.depth0),
                    "previtem" => Some(match &state.before {
                        Some(before) if index > 1 => before.clone(),
                        _ => Value::undefined("there is no previous item"),
                    }),
                    "nextitem" => {
                        let next = state.peek(self)?;
                        Some(next.unwrap_or_else(|| Value::undefined("there is no next item")))
                    }
                    _ => None,
                }
            }
            Object::Cycler { items, at } => match &**name {
                "current" => items.items.get(at.get()).cloned(),
                "pos" => Some(Value::Int(at.get() as i128)),
                "items" => Some(Value::Tuple(items.clone())),
                _ => None,
            },
            Object::Joiner { separator, is_used } => match &**name {
                "sep" => Some(separator.clone()),
                "used" => Some(Value::Bool(is_used.get())),
                _ => None,
            },
            Object::Macro(found) => {
                let definition = &found.definition;
                match &**name {
                    "name" => Some(definition.name.clone().map_or(Value::None, Value::str)),
                    "arguments" => {
                        let names = definition.parameters.iter().cloned().map(Value::str);
                        Some(Value::tuple(names.collect())?)
                    }
                    "caller" => Some(Value::Bool(definition.takes_caller)),
                    "catch_kwargs" => Some(Value::Bool(definition.takes_kwargs)),
                    "catch_varargs" => Some(Value::Bool(definition.takes_varargs)),
                    "explicit_caller" => Some(Value::Bool(
                        definition.parameters.iter().any(|name| &**name == "caller"),
                    )),
                    _ => None,
                }
            }
            Object::Blocks => self
                .has_block(name)
                .then(|| Value::object(Object::Block(name.clone()))),
            Object::Block(_) if &**name == "super" => {
                Some(Value::undefined("there is no parent block"))
            }
            Object::Block(_) if &**name == "name" => {
                return fail("the attribute 'name' of a block is not supported");
            }
            _ => None,
        })
    }

    /// `of[start:stop:step]`.
    pub(crate) fn slice(
        &mut self,
        of: &Value,
        start: &Value,
        stop: &Value,
        step: &Value,
    ) -> Outcome<Value> {
        let length = match of {
            Value::Undefined(undefined) => return fail(&*undefined.message),
            Value::Str(_) | Value::List(_) | Value::Tuple(_) | Value::Range(_) => {
                self.length_of(of).unwrap_or(0)
            }
            other => {
                return fail(format!("'{}' object has no slices", other.type_name()));
            }
        };
        for value in [start, stop, step] {
            if !matches!(value, Value::None) && value.as_int().is_none() {
                return fail("slice indices must be integers or None");
            }
        }
        let step = step.as_int().unwrap_or(1);
        if step == 0 {
            return fail("slice step cannot be zero");
        }
        let length = length as i128;
        let (lowest, highest) = if step > 0 {
            (0, length)
        } else {
            (-1, length - 1)
        };
        let bound = |value: &Value, default: i128| match value.as_int() {
            Some(at) if at < 0 => at.saturating_add(length).max(lowest),
            Some(at) => at.min(highest),
            None => default,
        };
        let first = bound(start, if step > 0 { lowest } else { highest });
        let last = bound(stop, if step > 0 { highest } else { lowest });
        let Some(range) = Range::new(first, last, step) else {
            return fail("a slice is too large");
        };
        let index = |at: usize| (range.start + at as i128 * range.step) as usize;
        match of {
            Value::Str(text) => self.text_slice(text, &range),
            Value::List(items) | Value::Tuple(items) => {
                self.budget.make_many(range.length, size_of::<Value>())?;
                let part = (0..range.length)
                    .map(|at| items.items[index(at)].clone())
                    .collect();
                if matches!(of, Value::List(_)) {
                    Value::list(part)
                } else {
                    Value::tuple(part)
                }
            }
            Value::Range(of) => {
                let at = |index: i128| of.start.saturating_add(index.saturating_mul(of.step));
                match Range::new(
                    at(range.start),
                    at(range.stop),
                    of.step.saturating_mul(range.step),
                ) {
                    Some(range) => Ok(Value::Range(range.into())),
                    None => fail("a slice is too large"),
                }
            }
            _ => fail("a slice of another value"),
        }
    }

    fn text_slice(&mut self, text: &Text, range: &Range) -> Outcome<Value> {
        if !text.is_ascii {
            self.budget.read(3 * text.len())?;
        }
        if range.step == 1 {
            let start = text.byte_at(range.start as usize);
            let end = text.byte_at(range.start as usize + range.length);
            self.budget.make(end - start)?;
            return Ok(text.with(&text[start..end]));
        }
        self.budget.make_many(text.len(), size_of::<char>())?;
        let chars: Vec<char> = text.chars().collect();
        self.budget.make_many(range.length, size_of::<char>())?;
        let part: String = (0..range.length)
            .map(|at| chars[(range.start + at as i128 * range.step) as usize])
            .collect();
        Ok(text.with(part))
    }
}

/// The position that an index means, if there is one.
fn position(index: &Value, length: usize) -> Option<usize> {
    let index = index.as_int()?;
    let length = length as i128;
    let index = if index < 0 {
        index.checked_add(length)?
    } else {
        index
    };
    (0..length).contains(&index).then_some(index as usize)
}

fn missing(of: &Value, name: &str) -> String {
    match of {
        Value::None => format!("'None' has no attribute '{name}'"),
        other => format!("'{} object' has no attribute '{name}'", other.type_name()),
    }
}

fn hidden(of: &Value, name: &str) -> Value {
    let kind = of.type_name();
    Value::undefined(format!(
        "access to attribute '{name}' of '{kind}' object is unsafe."
    ))
}

impl View {
    /// The name of the method that gives the view.
    pub(crate) fn named(name: &str) -> Option<Self> {
        match name {
            "keys" => Some(Self::Keys),
            "values" => Some(Self::Values),
            "items" => Some(Self::Items),
            _ => None,
        }
    }
}
