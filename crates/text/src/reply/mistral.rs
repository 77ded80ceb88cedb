//! The calls of Mistral's models: `[TOOL_CALLS]` before a list `[{"name": ..., "arguments": {...}}, ...]`, and, from
//! tokenizer version 11 on, before each call: `[TOOL_CALLS]name[ARGS]{...}`, in some with a `[CALL_ID]` between.

use super::ReplyParts;
use super::blocks::{Block, Progress, end_of_json, start_behind};
use super::call::ToolCall;
use super::json_end::JsonEnd;
use super::pieces::{CallHead, JsonPieces, Pieces};

const OPEN: &str = "[TOOL_CALLS]";
const CALL_ID: &str = "[CALL_ID]";
const ARGUMENTS: &str = "[ARGS]";

/// The longest name and id together.
const MAX_NAME_BYTES: usize = 512;

#[derive(Clone, Debug, Default)]
pub(super) struct Mistral {
    json: JsonEnd,
    calls: JsonPieces,
}

impl Block for Mistral {
    const OPENERS: &'static [&'static str] = &[OPEN];

    fn read(&mut self, text: &str, _is_last: bool) -> Progress {
        let (name, start) = match name_and_json(text) {
            Ok(found) => found,
            Err(progress) => return progress,
        };
        let end = match end_of_json(&mut self.json, text, start) {
            Ok(end) => end,
            Err(progress) => return progress,
        };
        let json = &text[start..end];
        let calls = match name.is_empty() {
            true => ToolCall::list_of_json(json),
            false => ToolCall::new(plain(name), json).map(|call| vec![call]),
        };
        match calls {
            Some(calls) => Progress::Calls(end, calls),
            None => Progress::Text(end),
        }
    }

    fn give<'b>(&'b mut self, text: &str, parts: &mut ReplyParts) -> Option<&'b mut Pieces> {
        match name_and_json(text) {
            Ok(("", start)) => self.calls.give(text, start, parts),
            Ok((name, start)) => {
                let head = CallHead {
                    name: plain(name).to_owned(),
                    id: None,
                    start,
                };
                self.calls.pieces.give(text, |_| Some(head), parts);
            }
            Err(_) => {}
        }
        Some(&mut self.calls.pieces)
    }
}

/// What is in front of the JSON of a block, and where that begins.
fn name_and_json(text: &str) -> Result<(&str, usize), Progress> {
    let start = start_behind(text, OPEN);
    let inside = &text[start..];
    let name_len = match inside.starts_with('[') {
        true => Some(0),
        false => inside.find('{'),
    };
    let name = &inside[..name_len.unwrap_or(inside.len())];
    if name.len() > MAX_NAME_BYTES || name.contains('\n') {
        return Err(Progress::Text(OPEN.len()));
    }
    match name_len {
        None => Err(Progress::More),
        Some(len) => Ok((name, start + len)),
    }
}

/// The name before an id and the mark of the arguments.
fn plain(name: &str) -> &str {
    let name = name.trim_end();
    let name = name.strip_suffix(ARGUMENTS).unwrap_or(name);
    name.split(CALL_ID).next().unwrap_or_default().trim_end()
}
