//! Whether a value that a schema names itself is valid under other parts of it.

use serde_json::{Map, Value};

use super::decimal::Decimal;
use super::document::{Document, Id};
use super::text::Texts;

/// The most references that are followed within each other.
const MAX_DEPTH: usize = 64;

/// Whether two values are equal. Numbers are by what they mean.
pub(super) fn is_equal(one: &Value, other: &Value) -> bool {
    match (one, other) {
        (Value::Number(one), Value::Number(other)) => {
            match (Decimal::of(one), Decimal::of(other)) {
                (Some(one), Some(other)) => one == other,
                _ => one == other,
            }
        }
        (Value::Array(one), Value::Array(other)) => {
            one.len() == other.len()
                && one
                    .iter()
                    .zip(other)
                    .all(|(one, other)| is_equal(one, other))
        }
        (Value::Object(one), Value::Object(other)) => {
            let in_other = |(name, value): (&String, &Value)| {
                other.get(name).is_some_and(|it| is_equal(value, it))
            };
            one.len() == other.len() && one.iter().all(in_other)
        }
        (one, other) => one == other,
    }
}

/// Whether `value` is valid under a schema. What cannot be decided, such as a reference that leads nowhere, counts as
/// valid.
pub(super) fn is_valid(document: &Document<'_>, schema: Id, value: &Value, depth: usize) -> bool {
    let members = match document.value(schema) {
        Value::Bool(is_valid) => return *is_valid,
        Value::Object(members) if depth < MAX_DEPTH => members,
        _ => return true,
    };
    let check = Check {
        document,
        members,
        schema,
        depth,
    };
    members
        .iter()
        .all(|(keyword, argument)| check.keyword(keyword, argument, value))
}

struct Check<'d, 'a> {
    document: &'d Document<'a>,
    members: &'a Map<String, Value>,
    schema: Id,
    depth: usize,
}

impl<'a> Check<'_, 'a> {
    fn holds(&self, schema: &'a Value, value: &Value) -> bool {
        is_valid(
            self.document,
            self.document.id(schema),
            value,
            self.depth + 1,
        )
    }

    fn keyword(&self, keyword: &str, argument: &'a Value, value: &Value) -> bool {
        let list = || argument.as_array().map(Vec::as_slice).unwrap_or_default();
        match keyword {
            _ if argument.is_null() && keyword != "const" => true,
            "enum" => list().iter().any(|it| is_equal(it, value)),
            "const" => is_equal(argument, value),
            "type" => match argument {
                Value::Array(types) => types.iter().any(|it| has_type(value, it)),
                single => has_type(value, single),
            },
            "allOf" => list().iter().all(|it| self.holds(it, value)),
            "anyOf" => list().iter().any(|it| self.holds(it, value)),
            "oneOf" => list().iter().filter(|it| self.holds(it, value)).count() == 1,
            "not" => !self.holds(argument, value),
            "if" => {
                let branch = if self.holds(argument, value) {
                    "then"
                } else {
                    "else"
                };
                self.members
                    .get(branch)
                    .is_none_or(|it| self.holds(it, value))
            }
            "$ref" => {
                let target = argument
                    .as_str()
                    .map(|it| self.document.referred(self.schema, it));
                target.is_none_or(|it| {
                    it.map_or(true, |id| {
                        is_valid(self.document, id, value, self.depth + 1)
                    })
                })
            }
            _ => match value {
                Value::Number(number) => {
                    Decimal::of(number).is_none_or(|it| self.number(keyword, argument, &it))
                }
                Value::String(text) => self.text(keyword, argument, text),
                Value::Array(items) => self.array(keyword, argument, items),
                Value::Object(members) => self.object(keyword, argument, members),
                _ => true,
            },
        }
    }

    fn number(&self, keyword: &str, argument: &Value, number: &Decimal) -> bool {
        let Some(bound) = argument.as_number().and_then(Decimal::of) else {
            return true;
        };
        let is_set = |name: &str| self.members.get(name) == Some(&Value::Bool(true));
        match keyword {
            "minimum" => *number > bound || *number == bound && !is_set("exclusiveMinimum"),
            "maximum" => *number < bound || *number == bound && !is_set("exclusiveMaximum"),
            "exclusiveMinimum" => *number > bound,
            "exclusiveMaximum" => *number < bound,
            "multipleOf" => {
                let num_decimals = number.num_decimals().max(bound.num_decimals());
                match (number.scaled(num_decimals), bound.scaled(num_decimals)) {
                    (Some(number), Some(bound)) if bound != 0 => number % bound == 0,
                    _ => true,
                }
            }
            _ => true,
        }
    }

    fn text(&self, keyword: &str, argument: &Value, text: &str) -> bool {
        let count = || text.chars().count() as u64;
        match (keyword, argument.as_u64()) {
            ("minLength", Some(min)) => count() >= min,
            ("maxLength", Some(max)) => count() <= max,
            ("pattern", _) => {
                let texts = argument.as_str().and_then(|it| Texts::with_match(it).ok());
                texts.and_then(|it| it.has(text)).unwrap_or(true)
            }
            _ => true,
        }
    }

    fn array(&self, keyword: &str, argument: &'a Value, items: &[Value]) -> bool {
        let num = items.len() as u64;
        let prefix = |name: &str| {
            self.members
                .get(name)
                .and_then(Value::as_array)
                .map_or(0, Vec::len)
        };
        let from = |first: usize| items.iter().skip(first).all(|it| self.holds(argument, it));
        match (keyword, argument) {
            ("minItems", _) => argument.as_u64().is_none_or(|min| num >= min),
            ("maxItems", _) => argument.as_u64().is_none_or(|max| num <= max),
            ("prefixItems" | "items", Value::Array(schemas)) => items
                .iter()
                .zip(schemas)
                .all(|(item, schema)| self.holds(schema, item)),
            ("items", _) => from(prefix("prefixItems")),
            ("additionalItems", _) => match self.members.get("items") {
                Some(Value::Array(_)) => from(prefix("items")),
                _ => true,
            },
            ("uniqueItems", Value::Bool(true)) => {
                (1..items.len()).all(|i| !items[..i].iter().any(|it| is_equal(it, &items[i])))
            }
            ("contains", _) => {
                let bound = |name: &str| self.members.get(name).and_then(Value::as_u64);
                let num = items.iter().filter(|it| self.holds(argument, it)).count() as u64;
                num >= bound("minContains").unwrap_or(1)
                    && bound("maxContains").is_none_or(|max| num <= max)
            }
            _ => true,
        }
    }

    fn object(&self, keyword: &str, argument: &'a Value, members: &Map<String, Value>) -> bool {
        let num = members.len() as u64;
        let matches = |pattern: &str, name: &str| {
            Texts::with_match(pattern)
                .ok()
                .and_then(|it| it.has(name))
                .unwrap_or(true)
        };
        let entries = || argument.as_object().into_iter().flatten();
        let has_all = |names: &Value| {
            let names = names
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(Value::as_str);
            names.into_iter().all(|name| members.contains_key(name))
        };
        match keyword {
            "minProperties" => argument.as_u64().is_none_or(|min| num >= min),
            "maxProperties" => argument.as_u64().is_none_or(|max| num <= max),
            "required" => has_all(argument),
            "properties" => entries()
                .all(|(name, schema)| members.get(name).is_none_or(|it| self.holds(schema, it))),
            "patternProperties" => entries().all(|(pattern, schema)| {
                members
                    .iter()
                    .all(|(name, value)| !matches(pattern, name) || self.holds(schema, value))
            }),
            "additionalProperties" => members.iter().all(|(name, value)| {
                let in_own = |keyword: &str| self.members.get(keyword).and_then(Value::as_object);
                let is_named = in_own("properties").is_some_and(|it| it.contains_key(name));
                let patterns = in_own("patternProperties").into_iter().flatten();
                is_named
                    || patterns.into_iter().any(|(it, _)| matches(it, name))
                    || self.holds(argument, value)
            }),
            "propertyNames" => members
                .keys()
                .all(|name| self.holds(argument, &Value::from(name.as_str()))),
            "dependentRequired" | "dependentSchemas" | "dependencies" => {
                entries().all(|(name, needed)| {
                    !members.contains_key(name)
                        || match needed {
                            Value::Array(_) => has_all(needed),
                            schema => self.holds(schema, &Value::Object(members.clone())),
                        }
                })
            }
            _ => true,
        }
    }
}

fn has_type(value: &Value, name: &Value) -> bool {
    match name.as_str() {
        Some("null") => value.is_null(),
        Some("boolean") => value.is_boolean(),
        Some("number") => value.is_number(),
        Some("integer") => value
            .as_number()
            .is_some_and(|it| Decimal::of(it).is_none_or(|it| it.is_integer())),
        Some("string") => value.is_string(),
        Some("array") => value.is_array(),
        Some("object") => value.is_object(),
        _ => true,
    }
}
