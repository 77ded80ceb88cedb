//! The calls of MiniMax M2: a block of calls with their arguments between marks, texts as they are and other values as
//! JSON.
//!
//! ```text
//! <minimax:tool_call>
//! <invoke name="weather">
//! <parameter name="city">Oslo</parameter>
//! <parameter name="days">[1, 2]</parameter>
//! </invoke>
//! </minimax:tool_call>
//! ```
//!
//! Source: the chat template of MiniMax M2; vLLM's parser of this name.

use std::sync::Arc;

use super::ToolCall;
use super::blocks::{Block, MarkEnd, Progress};
use super::mark::first;
use super::marked_arguments::MarkedArguments;
use super::parameter_types::ParameterTypes;

const OPEN: &str = "<minimax:tool_call>";
const CLOSE: &str = "</minimax:tool_call>";
const CALL: (&str, &str) = ("<invoke name=\"", "</invoke>");
const PARAMETER: (&str, &str) = ("<parameter name=\"", "</parameter>");
/// Behind a name.
const END_OF_NAME: &str = "\">";

#[derive(Clone, Debug, Default)]
pub(super) struct MiniMax {
    types: Arc<ParameterTypes>,
    end: MarkEnd,
}

impl MiniMax {
    pub(super) fn new(types: Arc<ParameterTypes>) -> Self {
        Self {
            types,
            end: MarkEnd::default(),
        }
    }

    /// The calls of a whole block, without the marks around it.
    fn calls(&self, mut rest: &str) -> Option<Vec<ToolCall>> {
        let mut calls = Vec::new();
        loop {
            rest = rest.trim_start();
            if rest.is_empty() {
                return Some(calls).filter(|calls| !calls.is_empty());
            }
            let (name, behind) = named(rest, CALL.0)?;
            rest = behind.trim_start();
            let mut arguments = MarkedArguments::default();
            while let Some((parameter, behind)) = named(rest, PARAMETER.0) {
                let (value, behind) = behind.split_once(PARAMETER.1)?;
                let is_text = self.types.is_text(name, parameter);
                arguments.set(parameter.to_owned(), value, is_text);
                rest = behind.trim_start();
            }
            rest = rest.strip_prefix(CALL.1)?;
            calls.push(ToolCall::new(name, &arguments.in_json())?);
        }
    }
}

impl Block for MiniMax {
    const OPENERS: &'static [&'static str] = &[OPEN];

    fn read(&mut self, text: &str, is_last: bool) -> Progress {
        if first(text[OPEN.len()..].trim_start(), &[CALL.0]) == Some(None) {
            return Progress::Text(OPEN.len());
        }
        let Some((end, num_bytes)) = self.end.scan(text, OPEN.len(), CLOSE, is_last) else {
            return Progress::More;
        };
        match self.calls(&text[OPEN.len()..end]) {
            Some(calls) => Progress::Calls(num_bytes, calls),
            None => Progress::Text(OPEN.len()),
        }
    }
}

/// The name behind a mark, and what follows it.
fn named<'t>(text: &'t str, mark: &str) -> Option<(&'t str, &'t str)> {
    text.strip_prefix(mark)?.split_once(END_OF_NAME)
}
