//! The calls of Granite 3 and Phi-4-mini: `<|tool_call|>[{"name": ..., "arguments": {...}}, ...]`, in Phi with a mark
//! behind.

use super::ReplyParts;
use super::blocks::{Block, Progress, end_of_json, start_behind};
use super::call::ToolCall;
use super::json_end::JsonEnd;
use super::pieces::{JsonPieces, Pieces};

const OPEN: &str = "<|tool_call|>";
const CLOSE: &str = "<|/tool_call|>";

#[derive(Clone, Debug, Default)]
pub(super) struct Granite {
    json: JsonEnd,
    calls: JsonPieces,
}

impl Block for Granite {
    const OPENERS: &'static [&'static str] = &[OPEN];

    fn read(&mut self, text: &str, is_last: bool) -> Progress {
        let start = start_behind(text, OPEN);
        let end = match end_of_json(&mut self.json, text, start) {
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

    fn give<'b>(&'b mut self, text: &str, parts: &mut ReplyParts) -> Option<&'b mut Pieces> {
        self.calls.give(text, start_behind(text, OPEN), parts);
        Some(&mut self.calls.pieces)
    }
}
