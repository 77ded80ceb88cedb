//! Methods of texts about capitals.

use crate::error::Outcome;
use crate::interpreter::Interpreter;
use crate::unicode::{is_cased, push_lower, push_title};
use crate::value::{Text, Value};

impl Interpreter<'_> {
    /// The text in small letters.
    pub(crate) fn lower(&mut self, text: &Text) -> Outcome<Value> {
        if text.is_ascii {
            self.budget.make(text.len())?;
            return Ok(text.with(text.to_ascii_lowercase()));
        }
        let chars = self.characters(text)?;
        let mut out = String::new();
        (0..chars.len()).for_each(|at| push_lower(&mut out, &chars, at));
        Ok(text.with(out))
    }

    /// The text in capitals.
    pub(crate) fn upper(&mut self, text: &Text) -> Outcome<Value> {
        self.budget
            .make(text.len().saturating_mul(if text.is_ascii { 1 } else { 3 }))?;
        Ok(text.with(text.to_uppercase()))
    }

    /// The text with a capital at its start only.
    pub(crate) fn capitalize(&mut self, text: &Text) -> Outcome<Value> {
        let chars = self.characters(text)?;
        let mut out = String::new();
        for (at, char) in chars.iter().enumerate() {
            if at == 0 {
                push_title(&mut out, *char);
            } else {
                push_lower(&mut out, &chars, at);
            }
        }
        Ok(text.with(out))
    }

    /// `str.title`: a capital after each character without case.
    pub(super) fn title_method(&mut self, text: &Text) -> Outcome<Value> {
        let chars = self.characters(text)?;
        let mut out = String::new();
        let mut is_within = false;
        for (at, char) in chars.iter().enumerate() {
            if is_within {
                push_lower(&mut out, &chars, at);
            } else {
                push_title(&mut out, *char);
            }
            is_within = is_cased(*char);
        }
        Ok(text.with(out))
    }

    pub(super) fn swap_case(&mut self, text: &Text) -> Outcome<Value> {
        let chars = self.characters(text)?;
        let mut out = String::new();
        for (at, char) in chars.iter().enumerate() {
            if char.is_uppercase() {
                push_lower(&mut out, &chars, at);
            } else if char.is_lowercase() {
                out.extend(char.to_uppercase());
            } else {
                out.push(*char);
            }
        }
        Ok(text.with(out))
    }

    /// The characters of a text, with the room for a text of their other forms.
    pub(crate) fn characters(&mut self, text: &Text) -> Outcome<Vec<char>> {
        self.budget.make_many(text.len(), 2 * size_of::<char>())?;
        Ok(text.chars().collect())
    }
}
