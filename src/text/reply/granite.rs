//! The calls of Granite 3 and Phi-4-mini: `<|tool_call|>[{"name": ..., "arguments": {...}}, ...]`, in Phi with a mark behind.

use super::blocks::{Block, Progress};
use super::call::ToolCall;
use super::json_end::{JsonEnd, Scan};

const OPEN: &str = "<|tool_call|>";
const CLOSE: &str = "<|/tool_call|>";

#[derive(Clone, Debug, Default)]
pub(super) struct Granite {
    json: JsonEnd,
}

impl Block for Granite {
    const OPENERS: &'static [&'static str] = &[OPEN];

    fn read(&mut self, text: &str, is_last: bool) -> Progress {
        let json = text[OPEN.len()..].trim_start();
        let start = text.len() - json.len();
        let end = match self.json.scan(json) {
            Scan::More => return Progress::More,
            Scan::Bad(end) => return Progress::Text(start + end),
            Scan::End(end) => end,
        };
        let (json, rest) = json.split_at(end);
        let num_bytes = match rest.strip_prefix(CLOSE) {
            Some(behind) => text.len() - behind.len(),
            None if CLOSE.starts_with(rest) && !is_last => return Progress::More,
            None => start + end,
        };
        match ToolCall::list_of_json(json) {
            Some(calls) => Progress::Calls(num_bytes, calls),
            None => Progress::Text(num_bytes),
        }
    }
}
