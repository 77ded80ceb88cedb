//! Attributes of attributes, as filters name them: `function.name`, `0.text`.

use std::sync::Arc;

use crate::error::{Outcome, fail};
use crate::interpreter::Interpreter;
use crate::value::{Path, Text, Value};

impl Path {
    /// The path that an argument names; none is the value itself.
    pub(crate) fn new(attribute: &Value, ignores_case: bool) -> Outcome<Self> {
        let parts = match attribute {
            Value::None => Vec::new(),
            Value::Str(text) => text.split('.').map(Self::part).collect::<Outcome<_>>()?,
            other => vec![other.clone()],
        };
        Ok(Self {
            parts,
            ignores_case,
        })
    }

    /// The paths that an argument names, with commas between them.
    pub(crate) fn several(attribute: &Value, ignores_case: bool) -> Outcome<Vec<Self>> {
        match attribute {
            Value::Str(text) => {
                let paths = text
                    .split(',')
                    .map(|path| Self::new(&Value::str(path), ignores_case));
                paths.collect()
            }
            other => Ok(vec![Self::new(other, ignores_case)?]),
        }
    }

    fn part(part: &str) -> Outcome<Value> {
        if part.is_empty() || !part.bytes().all(|byte| byte.is_ascii_digit()) {
            return Ok(Value::Str(Text::new(Arc::from(part))));
        }
        match part.parse() {
            Ok(index) => Ok(Value::Int(index)),
            Err(_) => fail(format!("the index {part} is too large")),
        }
    }

    /// The value at the path.
    pub(crate) fn of(
        &self,
        value: &Value,
        default: Option<&Value>,
        interpreter: &mut Interpreter<'_>,
    ) -> Outcome<Value> {
        let mut value = value.clone();
        for part in &self.parts {
            interpreter.budget.work(1)?;
            value = interpreter.item(&value, part)?;
            if let Some(default) = default
                && matches!(value, Value::Undefined(_))
            {
                value = default.clone();
            }
        }
        if self.ignores_case
            && let Value::Str(text) = &value
        {
            return interpreter.lower(text);
        }
        Ok(value)
    }
}
