//! The variable `loop`.

use crate::error::Outcome;
use crate::interpreter::Interpreter;
use crate::value::{Iter, Loop, Value};

impl Loop {
    /// Goes to the next item.
    pub(crate) fn advance(&mut self, interpreter: &mut Interpreter<'_>) -> Outcome<Option<Value>> {
        let item = match self.after.take() {
            Some(item) => item,
            None => self.iter.next(interpreter)?,
        };
        if let Some(item) = &item {
            self.index += 1;
            self.before = self.current.replace(item.clone());
        }
        Ok(item)
    }

    /// The next item, without going there.
    pub(crate) fn peek(&mut self, interpreter: &mut Interpreter<'_>) -> Outcome<Option<Value>> {
        if self.after.is_none() {
            self.after = Some(self.iter.next(interpreter)?);
        }
        Ok(self.after.clone().flatten())
    }

    /// The number of items, for which the rest may have to be computed.
    pub(crate) fn length(&mut self, interpreter: &mut Interpreter<'_>) -> Outcome<usize> {
        if let Some(length) = self.length {
            return Ok(length);
        }
        let rest = interpreter.drain(&mut self.iter)?;
        let ahead = usize::from(matches!(self.after, Some(Some(_))));
        let length = rest.len() + self.index + ahead;
        self.iter = Iter::Values(rest.into_iter());
        self.length = Some(length);
        Ok(length)
    }

    /// Drops the values that it holds.
    pub(crate) fn clear(&mut self) {
        self.iter = Iter::Empty;
        self.after = None;
        self.current = None;
        self.before = None;
        self.changed = None;
        self.recursion = None;
    }
}
