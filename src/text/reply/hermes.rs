//! The calls of Hermes 2 Pro, Qwen 2.5 and Qwen 3: `<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>`, one block a
//! call.

use super::blocks::{Block, Progress};
use super::call::ToolCall;
use super::json_end::{JsonEnd, Scan};

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";

#[derive(Clone, Debug, Default)]
pub(super) struct Hermes {
    json: JsonEnd,
}

impl Block for Hermes {
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
        let rest = rest.trim_start();
        let num_bytes = match rest.strip_prefix(CLOSE) {
            Some(behind) => text.len() - behind.len(),
            None if !CLOSE.starts_with(rest) => return Progress::Text(start + end),
            None if is_last => text.len(),
            None => return Progress::More,
        };
        match ToolCall::of_json(json) {
            Some(call) => Progress::Calls(num_bytes, vec![call]),
            None => Progress::Text(num_bytes),
        }
    }
}
