//! Python's iterators. They compute an item when it is asked for, and give each once.

use crate::error::{Outcome, fail};
use crate::interpreter::Interpreter;
use crate::value::{Iter, Value, View};

impl Iter {
    /// Iterates over a value, as `iter(value)`.
    pub(crate) fn of(value: &Value) -> Outcome<Self> {
        Ok(match value {
            Value::Undefined(_) => Self::Empty,
            Value::List(items) | Value::Tuple(items) => Self::Items(items.clone(), 0),
            Value::Str(text) => Self::Chars(text.clone(), 0),
            Value::Dict(dict) => Self::Dict(View::Keys, dict.clone(), 0),
            Value::View(view, dict) => Self::Dict(*view, dict.clone(), 0),
            Value::Range(range) => Self::Range(range.clone(), 0),
            Value::Iterator(iter) => Self::Shared(iter.clone()),
            other => return fail(format!("'{}' object is not iterable", other.type_name())),
        })
    }

    /// The next item.
    pub(crate) fn next(&mut self, interpreter: &mut Interpreter<'_>) -> Outcome<Option<Value>> {
        interpreter.budget.work(1)?;
        match self {
            Self::Empty => Ok(None),
            Self::Items(items, at) => {
                let item = items.items.get(*at).cloned();
                *at += 1;
                Ok(item)
            }
            Self::Values(values) => Ok(values.next()),
            Self::Chars(text, at) => {
                let Some(char) = text.text[*at..].chars().next() else {
                    return Ok(None);
                };
                interpreter.budget.make(24)?;
                *at += char.len_utf8();
                let mut buffer = [0; 4];
                // A character of markup is no markup.
                Ok(Some(Value::str(&*char.encode_utf8(&mut buffer))))
            }
            Self::Range(range, at) => {
                let item = (*at < range.length).then(|| range.at(*at));
                *at += 1;
                Ok(item)
            }
            Self::Dict(view, dict, at) => {
                let Some((_, (key, value))) = dict.items.get_index(*at) else {
                    return Ok(None);
                };
                *at += 1;
                Ok(Some(match view {
                    View::Keys => key.clone(),
                    View::Values => value.clone(),
                    View::Items => {
                        interpreter.budget.make(160)?;
                        Value::tuple(vec![key.clone(), value.clone()])?
                    }
                }))
            }
            Self::Shared(iter) => {
                let Ok(mut iter) = iter.try_borrow_mut() else {
                    return fail("a generator asks itself for an item");
                };
                interpreter.budget.enter()?;
                let item = iter.next(interpreter)?;
                interpreter.budget.leave();
                Ok(item)
            }
            Self::Filtered {
                source,
                parsed,
                scope,
            } => {
                while let Some(item) = source.next(interpreter)? {
                    if interpreter.passes(parsed, scope, &item)? {
                        return Ok(Some(item));
                    }
                }
                Ok(None)
            }
            Self::Map { source, mapping } => {
                let Some(item) = source.next(interpreter)? else {
                    return Ok(None);
                };
                interpreter.mapped(mapping, item).map(Some)
            }
            Self::Select {
                source,
                path,
                test,
                expected,
            } => {
                while let Some(item) = source.next(interpreter)? {
                    let tested = match path {
                        Some(path) => path.of(&item, None, interpreter)?,
                        None => item.clone(),
                    };
                    let result = match test {
                        Some((name, arguments)) => {
                            interpreter.test(name, tested, arguments.clone())?
                        }
                        None => tested.is_true(),
                    };
                    if result == *expected {
                        return Ok(Some(item));
                    }
                }
                Ok(None)
            }
            Self::Unique { source, path, seen } => {
                while let Some(item) = source.next(interpreter)? {
                    let key = path.of(&item, None, interpreter)?;
                    let key = interpreter.key(&key)?;
                    interpreter.budget.make(64)?;
                    if seen.insert(key) {
                        return Ok(Some(item));
                    }
                }
                Ok(None)
            }
            Self::Batch { source, size, fill } => {
                let mut batch = Vec::new();
                while batch.len() as i128 != *size {
                    let Some(item) = source.next(interpreter)? else {
                        break;
                    };
                    interpreter.budget.make(48)?;
                    batch.push(item);
                }
                if batch.is_empty() {
                    // A batch without room is given before the first item.
                    return if *size == 0 && source.next(interpreter)?.is_some() {
                        fail("filter 'batch': a size of 0")
                    } else {
                        Ok(None)
                    };
                }
                if !matches!(fill, Value::None) {
                    while (batch.len() as i128) < *size {
                        interpreter.budget.make(48)?;
                        batch.push(fill.clone());
                    }
                }
                Value::list(batch).map(Some)
            }
        }
    }
}
