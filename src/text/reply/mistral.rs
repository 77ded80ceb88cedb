//! The calls of Mistral's models: `[TOOL_CALLS]` before a list `[{"name": ..., "arguments": {...}}, ...]`, and, from tokenizer version
//! 11 on, before each call: `[TOOL_CALLS]name[ARGS]{...}`, in some with a `[CALL_ID]` between.

use super::blocks::{Block, Progress};
use super::call::ToolCall;
use super::json_end::JsonEnd;

const OPEN: &str = "[TOOL_CALLS]";
const CALL_ID: &str = "[CALL_ID]";
const ARGUMENTS: &str = "[ARGS]";

/// The longest name and id together.
const MAX_NAME_BYTES: usize = 512;

#[derive(Clone, Debug, Default)]
pub(super) struct Mistral {
    json: JsonEnd,
}

impl Block for Mistral {
    const OPENERS: &'static [&'static str] = &[OPEN];

    fn read(&mut self, text: &str, _is_last: bool) -> Progress {
        let inside = text[OPEN.len()..].trim_start();
        let name_at = text.len() - inside.len();
        let name_end = match inside.starts_with('[') {
            true => Some(0),
            false => inside.find('{'),
        };
        let name_len = name_end.unwrap_or(inside.len());
        let name = &inside[..name_len];
        if name_len > MAX_NAME_BYTES || name.contains('\n') {
            return Progress::Text(OPEN.len());
        }
        if name_end.is_none() {
            return Progress::More;
        }
        let start = name_at + name_len;
        let end = match self.json.end_in(text, start) {
            Ok(end) => end,
            Err(progress) => return progress,
        };
        let json = &text[start..end];
        let calls = match name_len {
            0 => ToolCall::list_of_json(json),
            _ => ToolCall::new(plain(name), json).map(|call| vec![call]),
        };
        match calls {
            Some(calls) => Progress::Calls(end, calls),
            None => Progress::Text(end),
        }
    }
}

/// The name before an id and the mark of the arguments.
fn plain(name: &str) -> &str {
    let name = name.trim_end();
    let name = name.strip_suffix(ARGUMENTS).unwrap_or(name);
    name.split(CALL_ID).next().unwrap_or_default().trim_end()
}
