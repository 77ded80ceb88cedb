//! Methods of lists, dictionaries, loops and cyclers.

use std::rc::Rc;

use super::not_supported;
use crate::arguments::{int, required};
use crate::error::{Outcome, fail};
use crate::interpreter::Interpreter;
use crate::value::{Arguments, Dict, Function, Items, Object, Value, View};

impl Interpreter<'_> {
    pub(super) fn sequence_method(
        &mut self,
        of: &Value,
        name: &str,
        arguments: Arguments,
    ) -> Outcome<Value> {
        match name {
            "copy" => {
                arguments.none("copy()")?;
                Value::list(self.items_of(of)?)
            }
            "count" => {
                let [item] = arguments.bind_positional("count()")?;
                let item = required(item, "count()")?;
                let mut count = 0;
                for other in self.items_of(of)? {
                    count += i128::from(self.equal(&other, &item)?);
                }
                Ok(Value::Int(count))
            }
            "index" => {
                let [item, start, stop] = arguments.bind_positional("index()")?;
                let item = required(item, "index()")?;
                let items = self.items_of(of)?;
                let length = items.len() as i128;
                let mut bounds = [0, length];
                for (bound, value) in bounds.iter_mut().zip([start, stop]) {
                    if let Some(value) = value {
                        let at = int(&value, "index()")?;
                        *bound = if at < 0 {
                            at.saturating_add(length).max(0)
                        } else {
                            at
                        };
                    }
                }
                for (at, other) in items.iter().enumerate() {
                    let at = at as i128;
                    if at >= bounds[0] && at < bounds[1] && self.equal(other, &item)? {
                        return Ok(Value::Int(at));
                    }
                }
                fail("index(): the value is not in the list")
            }
            _ => not_supported(name, of.type_name()),
        }
    }

    pub(super) fn dict_method(
        &mut self,
        dict: &Rc<Dict>,
        name: &str,
        arguments: Arguments,
    ) -> Outcome<Value> {
        if let Some(view) = View::named(name) {
            arguments.none(name)?;
            return Ok(Value::View(view, dict.clone()));
        }
        match name {
            "get" => {
                let [key, default] = arguments.bind_positional("get()")?;
                let key = self.key(&required(key, "get()")?)?;
                match dict.items.get(&key) {
                    Some((_, value)) => Ok(value.clone()),
                    None => Ok(default.unwrap_or(Value::None)),
                }
            }
            "copy" => {
                arguments.none("copy()")?;
                self.budget.make_many(dict.items.len(), 160)?;
                Value::dict(dict.items.clone())
            }
            "fromkeys" => self.dict_of_keys(arguments),
            _ => not_supported(name, "dict"),
        }
    }

    fn dict_of_keys(&mut self, arguments: Arguments) -> Outcome<Value> {
        let [keys, value] = arguments.bind_positional("fromkeys()")?;
        let keys = self.items_of(&required(keys, "fromkeys()")?)?;
        let value = value.unwrap_or(Value::None);
        let mut items = Items::default();
        for key in keys {
            self.insert(&mut items, key, value.clone())?;
        }
        Value::dict(items)
    }

    pub(super) fn object_method(
        &mut self,
        object: &Object,
        name: &str,
        arguments: Arguments,
    ) -> Outcome<Value> {
        match (object, name) {
            (Object::Loop(state), "cycle") => {
                let items = arguments.positional;
                if items.is_empty() || !arguments.keywords.is_empty() {
                    return fail("cycle(): no items for cycling given");
                }
                let Ok(state) = state.try_borrow() else {
                    return fail("the loop is asked while it goes on to the next item");
                };
                let at = (state.index + items.len() - 1) % items.len();
                Ok(items[at].clone())
            }
            (Object::Loop(state), "changed") => {
                if !arguments.keywords.is_empty() {
                    return fail("changed() takes no keyword arguments");
                }
                let now = Value::tuple(arguments.positional.clone())?;
                let before = state
                    .try_borrow()
                    .ok()
                    .and_then(|state| state.changed.clone());
                if let Some(before) = before
                    && self.equal(&Value::tuple(before)?, &now)?
                {
                    return Ok(Value::Bool(false));
                }
                if let Ok(mut state) = state.try_borrow_mut() {
                    state.changed = Some(arguments.positional);
                }
                Ok(Value::Bool(true))
            }
            (Object::Cycler { items, at }, "next") => {
                arguments.none("next()")?;
                let current = items.items.get(at.get()).cloned();
                at.set((at.get() + 1) % items.items.len().max(1));
                required(current, "next()")
            }
            (Object::Cycler { at, .. }, "reset") => {
                arguments.none("reset()")?;
                at.set(0);
                Ok(Value::None)
            }
            (Object::Function(Function::Dict), "fromkeys") => self.dict_of_keys(arguments),
            _ => not_supported(name, object.type_name()),
        }
    }
}
