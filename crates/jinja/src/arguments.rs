//! Arguments of a call.

use crate::error::{Outcome, fail};
use crate::value::{Arguments, Text, Value};

impl Arguments {
    /// Gives the arguments to parameters with these names. A parameter without a name takes no keyword.
    pub(crate) fn bind<const N: usize>(
        self,
        what: &str,
        names: [&str; N],
    ) -> Outcome<[Option<Value>; N]> {
        let mut bound = [const { None }; N];
        if self.positional.len() > N {
            let given = self.positional.len();
            return fail(format!(
                "{what} takes at most {N} arguments, {given} are given"
            ));
        }
        for (slot, value) in bound.iter_mut().zip(self.positional) {
            *slot = Some(value);
        }
        for (name, value) in self.keywords {
            let Some(at) = names
                .iter()
                .position(|other| **other == *name && !name.is_empty())
            else {
                return fail(format!("{what} has no argument '{name}'"));
            };
            if bound[at].is_some() {
                return fail(format!("{what}: the argument '{name}' is given twice"));
            }
            bound[at] = Some(value);
        }
        Ok(bound)
    }

    /// Gives the arguments to parameters without names.
    pub(crate) fn bind_positional<const N: usize>(self, what: &str) -> Outcome<[Option<Value>; N]> {
        self.bind(what, [""; N])
    }

    /// Fails if there are any.
    pub(crate) fn none(self, what: &str) -> Outcome<()> {
        self.bind::<0>(what, []).map(drop)
    }
}

/// A required argument.
pub(crate) fn required(argument: Option<Value>, what: &str) -> Outcome<Value> {
    match argument {
        Some(value) => Ok(value),
        None => fail(format!("{what}: an argument is missing")),
    }
}

/// An integer argument.
pub(crate) fn int(value: &Value, what: &str) -> Outcome<i128> {
    match value.as_int() {
        Some(number) => Ok(number),
        None => fail(format!(
            "{what}: '{}' object cannot be interpreted as an integer",
            value.type_name()
        )),
    }
}

/// An integer argument with a default.
pub(crate) fn int_or(value: Option<&Value>, default: i128, what: &str) -> Outcome<i128> {
    value.map_or(Ok(default), |value| int(value, what))
}

/// A text argument.
pub(crate) fn text<'v>(value: &'v Value, what: &str) -> Outcome<&'v Text> {
    match value {
        Value::Str(text) => Ok(text),
        other => fail(format!(
            "{what}: a string is needed, not '{}'",
            other.type_name()
        )),
    }
}

/// Whether an argument is given and true.
pub(crate) fn flag(value: Option<&Value>) -> bool {
    value.is_some_and(Value::is_true)
}

/// Whether an argument that Python takes as an integer is given and not zero.
pub(crate) fn int_flag(value: Option<&Value>, what: &str) -> Outcome<bool> {
    Ok(int_or(value, 0, what)? != 0)
}

/// An argument that is given and not none.
pub(crate) fn given(value: Option<Value>) -> Option<Value> {
    value.filter(|value| !matches!(value, Value::None))
}
