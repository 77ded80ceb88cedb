//! The calls of MiniMax M1: a line of JSON for each, `{"name": ..., "arguments": {...}}`, between `<tool_calls>` and
//! `</tool_calls>`.
//!
//! Source: the chat template of MiniMax-M1; vLLM's parser `minimax`.

use super::blocks::{Block, MarkEnd, Progress};
use super::call::ToolCall;
use super::mark::first;

const OPEN: &str = "<tool_calls>";
const CLOSE: &str = "</tool_calls>";

#[derive(Clone, Debug, Default)]
pub(super) struct JsonLines {
    end: MarkEnd,
}

impl Block for JsonLines {
    const OPENERS: &'static [&'static str] = &[OPEN];

    fn read(&mut self, text: &str, is_last: bool) -> Progress {
        if first(text[OPEN.len()..].trim_start(), &["{"]) == Some(None) {
            return Progress::Text(OPEN.len());
        }
        let Some((end, num_bytes)) = self.end.scan(text, OPEN.len(), CLOSE, is_last) else {
            return Progress::More;
        };
        match ToolCall::lines_of_json(&text[OPEN.len()..end]) {
            Some(calls) => Progress::Calls(num_bytes, calls),
            None => Progress::Text(OPEN.len()),
        }
    }
}
