//! The filter `wordwrap`: Python's `textwrap`.

use crate::arguments::{given, int_or, text};
use crate::error::{Outcome, fail};
use crate::interpreter::Interpreter;
use crate::methods::split::Lines;
use crate::value::{Arguments, Text, Value};

/// The white space that `textwrap` splits at.
fn is_blank(char: char) -> bool {
    matches!(char, '\t' | '\n' | '\x0b' | '\x0c' | '\r' | ' ')
}

impl Interpreter<'_> {
    pub(super) fn word_wrap(&mut self, value: &Value, arguments: Arguments) -> Outcome<Value> {
        let names = [
            "width",
            "break_long_words",
            "wrapstring",
            "break_on_hyphens",
        ];
        let [width, long_words, newline, hyphens] = arguments.bind("wordwrap", names)?;
        let width = int_or(width.as_ref(), 79, "wordwrap")?;
        let breaks_words = long_words.is_none_or(|value| value.is_true());
        let breaks_hyphens = hyphens.is_none_or(|value| value.is_true());
        let newline = given(newline).unwrap_or_else(|| Value::str("\n"));
        let newline = text(&newline, "wordwrap")?;
        let of = text(value, "wordwrap")?;
        if breaks_hyphens && of.contains(['-', '\u{2014}']) {
            return fail(
                "the filter 'wordwrap' is not supported for texts with hyphens: give break_on_hyphens=false",
            );
        }
        let Some(width) = usize::try_from(width).ok().filter(|width| *width > 0) else {
            return fail(format!("wordwrap: invalid width {width} (must be > 0)"));
        };
        let mut out = String::new();
        for (at, line) in (Lines {
            rest: of,
            keeps_ends: false,
        })
        .enumerate()
        {
            if at > 0 {
                self.budget.make(newline.len())?;
                out.push_str(newline);
            }
            self.wrap_line(&mut out, line, width, breaks_words, newline)?;
        }
        Ok(of.with(out))
    }

    fn wrap_line(
        &mut self,
        out: &mut String,
        line: &str,
        width: usize,
        breaks_words: bool,
        newline: &Text,
    ) -> Outcome<()> {
        self.budget.make(line.len().saturating_mul(8))?;
        let mut chunks = chunks(line);
        let mut is_first = true;
        while !chunks.is_empty() {
            // A line does not begin with white space, except the first.
            if !is_first
                && chunks
                    .last()
                    .is_some_and(|chunk| chunk.iter().all(|char| is_blank(*char)))
            {
                chunks.pop();
                if chunks.is_empty() {
                    break;
                }
            }
            let mut current: Vec<Vec<char>> = Vec::new();
            let mut length = 0;
            while let Some(chunk) = chunks.pop_if(|chunk| length + chunk.len() <= width) {
                length += chunk.len();
                current.push(chunk);
            }
            if let Some(chunk) = chunks.last_mut()
                && chunk.len() > width
            {
                if breaks_words {
                    self.budget.read(4 * chunk.len())?;
                    let rest = chunk.split_off(width - length);
                    let part = std::mem::replace(chunk, rest);
                    current.push(part);
                } else if current.is_empty() {
                    current.extend(chunks.pop());
                }
            }
            if current
                .last()
                .is_some_and(|chunk| chunk.iter().all(|char| is_blank(*char)))
            {
                current.pop();
            }
            if current.is_empty() {
                continue;
            }
            if !is_first {
                self.budget.make(newline.len())?;
                out.push_str(newline);
            }
            is_first = false;
            self.budget.work(current.len())?;
            out.extend(current.iter().flatten());
        }
        Ok(())
    }
}

/// Words and the white space between them, the last first.
fn chunks(line: &str) -> Vec<Vec<char>> {
    let mut chunks: Vec<Vec<char>> = Vec::new();
    for char in line.chars() {
        match chunks.last_mut() {
            Some(chunk) if is_blank(chunk[0]) == is_blank(char) => chunk.push(char),
            _ => chunks.push(vec![char]),
        }
    }
    chunks.reverse();
    chunks
}
