//! The calls of Granite 3 and Phi-4-mini: `<|tool_call|>[{"name": ..., "arguments": {...}}, ...]`, in Phi with a mark behind.

use super::blocks::{Block, Progress};
use super::call::ToolCall;
use super::json_end::JsonEnd;

const OPEN: &str = "<|tool_call|>";
const CLOSE: &str = "<|/tool_call|>";

#[derive(Clone, Debug, Default)]
pub(super) struct Granite {
    json: JsonEnd,
}

impl Block for Granite {
    const OPENERS: &'static [&'static str] = &[OPEN];

    fn read(&mut self, text: &str, is_last: bool) -> Progress {
        let start = text.len() - text[OPEN.len()..].trim_start().len();
        let end = match self.json.end_in(text, start) {
            Ok(end) => end,
            Err(progress) => return progress,
        };
        let (json, rest) = (&text[start..end], &text[end..]);
        let num_bytes = match rest.strip_prefix(CLOSE) {
            Some(behind) => text.len() - behind.len(),
            None if CLOSE.starts_with(rest) && !is_last => return Progress::More,
            None => end,
        };
        match ToolCall::list_of_json(json) {
            Some(calls) => Progress::Calls(num_bytes, calls),
            None => Progress::Text(num_bytes),
        }
    }
}
