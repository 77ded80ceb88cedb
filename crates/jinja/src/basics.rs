//! Properties of all values (type, truth, nesting depth), and constructors.

use std::rc::Rc;
use std::sync::Arc;

use crate::error::{Bound, Outcome, fail, out_of};
use crate::value::{Dict, Items, Key, Object, Range, Sequence, Text, Undefined, Value, View};

/// Levels of lists and dictionaries in each other. Freeing a value uses stack for each.
pub(crate) const MAX_LEVELS: u32 = 300;

impl Value {
    pub(crate) fn str(text: impl Into<Arc<str>>) -> Self {
        Self::Str(Text::new(text))
    }

    pub(crate) fn undefined(message: impl Into<String>) -> Self {
        Self::Undefined(Rc::new(Undefined {
            message: message.into(),
        }))
    }

    pub(crate) fn list(items: Vec<Self>) -> Outcome<Self> {
        Ok(Self::List(Rc::new(Sequence::new(items)?)))
    }

    pub(crate) fn tuple(items: Vec<Self>) -> Outcome<Self> {
        Ok(Self::Tuple(Rc::new(Sequence::new(items)?)))
    }

    /// A pair that the filter `groupby` gives.
    pub(crate) fn group(grouper: Self, members: Self) -> Outcome<Self> {
        let mut sequence = Sequence::new(vec![grouper, members])?;
        sequence.is_group = true;
        Ok(Self::Tuple(Rc::new(sequence)))
    }

    pub(crate) fn dict(items: Items) -> Outcome<Self> {
        Ok(Self::Dict(Rc::new(Dict::new(items)?)))
    }

    pub(crate) fn object(object: Object) -> Self {
        Self::Object(Rc::new(object))
    }

    /// Levels of values in each other.
    pub(crate) fn levels(&self) -> u32 {
        match self {
            Self::List(items) | Self::Tuple(items) => items.levels,
            Self::Dict(dict) | Self::View(_, dict) => dict.levels,
            Self::Object(object) => object.levels(),
            _ => 0,
        }
    }

    /// The name of Python's type.
    pub(crate) fn type_name(&self) -> &'static str {
        match self {
            Self::Undefined(_) => "Undefined",
            Self::None => "NoneType",
            Self::Bool(_) => "bool",
            Self::Int(_) => "int",
            Self::Float(_) => "float",
            Self::Str(text) if text.is_markup => "Markup",
            Self::Str(_) => "str",
            Self::List(_) => "list",
            Self::Tuple(items) if items.is_group => "_GroupTuple",
            Self::Tuple(_) => "tuple",
            Self::Dict(_) => "dict",
            Self::View(View::Keys, _) => "dict_keys",
            Self::View(View::Values, _) => "dict_values",
            Self::View(View::Items, _) => "dict_items",
            Self::Range(_) => "range",
            Self::Iterator(_) => "generator",
            Self::Object(object) => object.type_name(),
        }
    }

    /// A number as an integer: booleans are numbers.
    pub(crate) fn as_int(&self) -> Option<i128> {
        match self {
            Self::Int(number) => Some(*number),
            Self::Bool(value) => Some(i128::from(*value)),
            _ => None,
        }
    }

    pub(crate) fn as_text(&self) -> Option<&Text> {
        match self {
            Self::Str(text) => Some(text),
            _ => None,
        }
    }

    /// Whether the value counts as true.
    pub(crate) fn is_true(&self) -> bool {
        match self {
            Self::Undefined(_) | Self::None => false,
            Self::Bool(value) => *value,
            Self::Int(number) => *number != 0,
            Self::Float(number) => *number != 0.0,
            Self::Str(text) => !text.text.is_empty(),
            Self::List(items) | Self::Tuple(items) => !items.items.is_empty(),
            Self::Dict(dict) | Self::View(_, dict) => !dict.items.is_empty(),
            Self::Range(range) => range.length > 0,
            Self::Iterator(_) | Self::Object(_) => true,
        }
    }

    /// A value of the caller's.
    pub(crate) fn from_json(value: &serde_json::Value) -> Outcome<Self> {
        Self::from_json_at(value, 0)
    }

    fn from_json_at(value: &serde_json::Value, level: u32) -> Outcome<Self> {
        use serde_json::Value as Json;
        if level > MAX_LEVELS {
            return out_of(Bound::Recursion);
        }
        Ok(match value {
            Json::Null => Self::None,
            Json::Bool(value) => Self::Bool(*value),
            Json::Number(number) => match (number.as_i64(), number.as_u64(), number.as_f64()) {
                (Some(number), ..) => Self::Int(number.into()),
                (None, Some(number), _) => Self::Int(number.into()),
                (None, None, Some(number)) => Self::Float(number),
                _ => return fail(format!("the number {number} is too large")),
            },
            Json::String(text) => Self::str(text.as_str()),
            Json::Array(items) => {
                let items = items.iter().map(|item| Self::from_json_at(item, level + 1));
                Self::list(items.collect::<Outcome<_>>()?)?
            }
            Json::Object(items) => {
                let mut dict = Items::with_capacity(items.len());
                for (key, value) in items {
                    let key = Text::new(key.as_str());
                    let value = Self::from_json_at(value, level + 1)?;
                    dict.insert(Key::Str(key.text.clone()), (Self::Str(key), value));
                }
                Self::dict(dict)?
            }
        })
    }
}

impl Text {
    pub(crate) fn new(text: impl Into<Arc<str>>) -> Self {
        let text = text.into();
        Self {
            is_ascii: text.is_ascii(),
            text,
            is_markup: false,
        }
    }

    /// The number of characters.
    pub(crate) fn length(&self) -> usize {
        if self.is_ascii {
            self.text.len()
        } else {
            self.text.chars().count()
        }
    }

    /// The place in bytes of a character.
    pub(crate) fn byte_at(&self, char: usize) -> usize {
        if self.is_ascii {
            return char.min(self.text.len());
        }
        let mut indices = self.text.char_indices();
        indices.nth(char).map_or(self.text.len(), |(at, _)| at)
    }

    /// A text with new contents, marked as markup if this one is.
    pub(crate) fn with(&self, text: impl Into<Arc<str>>) -> Value {
        let mut text = Self::new(text);
        text.is_markup = self.is_markup;
        Value::Str(text)
    }
}

impl std::ops::Deref for Text {
    type Target = str;

    fn deref(&self) -> &str {
        &self.text
    }
}

impl Sequence {
    fn new(items: Vec<Value>) -> Outcome<Self> {
        Ok(Self {
            levels: levels_above(items.iter())?,
            items,
            is_group: false,
        })
    }
}

impl Dict {
    fn new(items: Items) -> Outcome<Self> {
        Ok(Self {
            levels: levels_above(items.values().map(|(_, value)| value))?,
            items,
        })
    }

    /// The value under a text.
    pub(crate) fn get(&self, key: &Arc<str>) -> Option<&Value> {
        self.items
            .get(&Key::Str(key.clone()))
            .map(|(_, value)| value)
    }
}

fn levels_above<'v>(values: impl Iterator<Item = &'v Value>) -> Outcome<u32> {
    let levels = 1 + values.map(Value::levels).max().unwrap_or(0);
    if levels > MAX_LEVELS {
        return out_of(Bound::Recursion);
    }
    Ok(levels)
}

impl Range {
    /// None if the step is zero.
    pub(crate) fn new(start: i128, stop: i128, step: i128) -> Option<Self> {
        let distance = if step > 0 {
            stop.checked_sub(start)?
        } else {
            start.checked_sub(stop)?
        };
        let step_size = i128::try_from(step.unsigned_abs())
            .ok()
            .filter(|size| *size > 0)?;
        let length = if distance > 0 {
            (distance - 1) / step_size + 1
        } else {
            0
        };
        Some(Self {
            start,
            stop,
            step,
            length: usize::try_from(length).ok()?,
        })
    }

    pub(crate) fn at(&self, index: usize) -> Value {
        Value::Int(self.start + index as i128 * self.step)
    }
}
