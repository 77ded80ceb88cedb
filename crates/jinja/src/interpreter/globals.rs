//! Functions that every template has.

use std::cell::{Cell, RefCell};

use super::Interpreter;
use crate::arguments::{self, required};
use crate::error::{Failure, Outcome, fail};
use crate::repr::str_of;
use crate::value::{Arguments, Function, Items, Object, Range, Value};

/// The sandbox's largest range.
const MAX_RANGE: usize = 100_000;

impl Interpreter<'_> {
    pub(super) fn call_function(
        &mut self,
        function: Function,
        arguments: Arguments,
    ) -> Outcome<Value> {
        match function {
            Function::Range => range(arguments),
            Function::Dict => {
                let items = self.items_from("dict()", arguments)?;
                Value::dict(items)
            }
            Function::Namespace => {
                let items = self.items_from("namespace()", arguments)?;
                for (key, _) in items.values() {
                    if let Value::Str(name) = key
                        && name.starts_with('_')
                    {
                        return fail(format!(
                            "'{}': a namespace takes no names with '_' at the start",
                            &**name
                        ));
                    }
                }
                Ok(Value::Object(
                    self.hold_object(Object::Namespace(RefCell::new(items)))?,
                ))
            }
            Function::Cycler => {
                if !arguments.keywords.is_empty() {
                    return fail("cycler() takes no keyword arguments");
                }
                if arguments.positional.is_empty() {
                    return fail("cycler(): at least one item has to be provided");
                }
                let Value::Tuple(items) = Value::tuple(arguments.positional)? else {
                    return fail("cycler(): no tuple");
                };
                self.budget.make(128)?;
                Ok(Value::object(Object::Cycler {
                    items,
                    at: Cell::new(0),
                }))
            }
            Function::Joiner => {
                let [separator] = arguments.bind("joiner()", ["sep"])?;
                let separator = separator.unwrap_or_else(|| Value::str(", "));
                // A tuple's levels are bounded.
                Value::tuple(vec![separator.clone()])?;
                self.budget.make(128)?;
                Ok(Value::object(Object::Joiner {
                    separator,
                    is_used: Cell::new(false),
                }))
            }
            Function::Lipsum => fail("the function 'lipsum' is not supported: its text is random"),
            Function::RaiseException => {
                let [message] = arguments.bind("raise_exception()", ["message"])?;
                let message = required(message, "raise_exception()")?;
                let message = str_of(&message, &mut self.budget)?;
                Err(Box::new(Failure::Raised(message.text.as_ref().to_owned())))
            }
            Function::StrftimeNow => {
                let [format] = arguments.bind("strftime_now()", ["format"])?;
                let format = required(format, "strftime_now()")?;
                let format = arguments::text(&format, "strftime_now()")?;
                // A directive is two characters, and gives a few dozens at most.
                self.budget.make(format.len().saturating_mul(32))?;
                match (self.clock)(format) {
                    Ok(text) => Ok(Value::str(text)),
                    Err(problem) => fail(format!("strftime_now(): {problem}")),
                }
            }
        }
    }

    /// The items of `dict(...)`.
    fn items_from(&mut self, what: &str, arguments: Arguments) -> Outcome<Items> {
        let mut items = Items::default();
        if arguments.positional.len() > 1 {
            return fail(format!("{what} takes at most 1 positional argument"));
        }
        match arguments.positional.first() {
            None => {}
            Some(Value::Dict(dict)) => {
                self.budget.make_many(dict.items.len(), 160)?;
                items.clone_from(&dict.items);
            }
            Some(Value::Object(object)) if matches!(**object, Object::Namespace(_)) => {
                return fail(format!("{what}: a namespace is not a mapping"));
            }
            Some(Value::Undefined(undefined)) => return fail(&*undefined.message),
            Some(pairs) => {
                for pair in self.items_of(pairs)? {
                    let pair = self.items_of(&pair)?;
                    let [key, value] = pair.as_slice() else {
                        return fail(format!("{what}: an item is not a pair"));
                    };
                    self.insert(&mut items, key.clone(), value.clone())?;
                }
            }
        }
        for (name, value) in arguments.keywords {
            self.insert(&mut items, Value::str(name), value)?;
        }
        Ok(items)
    }
}

fn range(arguments: Arguments) -> Outcome<Value> {
    let [first, second, third] = arguments.bind_positional("range()")?;
    let first = arguments::int(&required(first, "range()")?, "range()")?;
    let step = arguments::int_or(third.as_ref(), 1, "range()")?;
    let (start, stop) = match second {
        Some(second) => (first, arguments::int(&second, "range()")?),
        None => (0, first),
    };
    if step == 0 {
        return fail("range(): the step must not be zero");
    }
    match Range::new(start, stop, step) {
        Some(range) if range.length <= MAX_RANGE => Ok(Value::Range(range.into())),
        _ => fail(format!(
            "range(): the sandbox allows {MAX_RANGE} numbers at most"
        )),
    }
}
