//! The calls of Hermes 2 Pro, Qwen 2.5 and Qwen 3: `<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>`, one
//! block a call.

use super::ReplyParts;
use super::blocks::{Block, Progress, end_of_json, start_behind};
use super::call::ToolCall;
use super::json_end::JsonEnd;
use super::pieces::{JsonPieces, Pieces};

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";

#[derive(Clone, Debug, Default)]
pub(super) struct Hermes {
    json: JsonEnd,
    calls: JsonPieces,
}

impl Block for Hermes {
    const OPENERS: &'static [&'static str] = &[OPEN];

    fn read(&mut self, text: &str, is_last: bool) -> Progress {
        let start = start_behind(text, OPEN);
        let end = match end_of_json(&mut self.json, text, start) {
            Ok(end) => end,
            Err(progress) => return progress,
        };
        let (json, rest) = (&text[start..end], &text[end..]);
        let rest = rest.trim_start();
        let num_bytes = match rest.strip_prefix(CLOSE) {
            Some(behind) => text.len() - behind.len(),
            None if !CLOSE.starts_with(rest) => return Progress::Text(end),
            None if is_last => text.len(),
            None => return Progress::More,
        };
        match ToolCall::of_json(json) {
            Some(call) => Progress::Calls(num_bytes, vec![call]),
            None => Progress::Text(num_bytes),
        }
    }

    fn give<'b>(&'b mut self, text: &str, parts: &mut ReplyParts) -> Option<&'b mut Pieces> {
        let start = start_behind(text, OPEN);
        if text[start..].starts_with('{') {
            self.calls.give(text, start, parts);
        }
        Some(&mut self.calls.pieces)
    }
}
