//! Calls in JSON behind a mark, one a block, with a mark behind each or without:
//!
//! ```text
//! <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>                             Hermes 2 Pro, Qwen 2.5 and 3, ERNIE
//! <longcat_tool_call>\n{"name": ..., "arguments": {...}}\n</longcat_tool_call>             LongCat Flash
//! <|action_start|><|plugin|>\n{"name": ..., "parameters": {...}}<|action_end|>             InternLM 2.5 and 3
//! <function_call> {"name": ..., "arguments": {...}}                                       Granite 20B
//! function call<|role_sep|>\n{"name": ..., "arguments": {...}}                             GigaChat 3
//! <|function_call|>{"name": ..., "arguments": {...}}                                      GigaChat 3.1
//! ```
//!
//! Sources: the chat templates of these models; vLLM's parsers of these names.

use std::marker::PhantomData;

use super::ReplyParts;
use super::blocks::{Block, Progress, end_of_json, start_behind};
use super::call::ToolCall;
use super::json_end::JsonEnd;
use super::pieces::{JsonPieces, Pieces};

/// The marks of a format.
pub(super) trait JsonMarks: Clone + Default + Send + Sync + 'static {
    /// Optional text before a call.
    const OPENERS: &'static [&'static str];
    /// The mark behind a call; empty if there is none.
    const CLOSE: &'static str;
}

#[derive(Clone, Debug, Default)]
pub(super) struct Hermes;

impl JsonMarks for Hermes {
    const OPENERS: &'static [&'static str] = &["<tool_call>"];
    const CLOSE: &'static str = "</tool_call>";
}

#[derive(Clone, Debug, Default)]
pub(super) struct LongCat;

impl JsonMarks for LongCat {
    const OPENERS: &'static [&'static str] = &["<longcat_tool_call>"];
    const CLOSE: &'static str = "</longcat_tool_call>";
}

#[derive(Clone, Debug, Default)]
pub(super) struct InternLm;

impl JsonMarks for InternLm {
    const OPENERS: &'static [&'static str] = &["<|action_start|><|plugin|>"];
    const CLOSE: &'static str = "<|action_end|>";
}

#[derive(Clone, Debug, Default)]
pub(super) struct Granite20b;

impl JsonMarks for Granite20b {
    const OPENERS: &'static [&'static str] = &["<function_call>"];
    const CLOSE: &'static str = "";
}

#[derive(Clone, Debug, Default)]
pub(super) struct GigaChat;

impl JsonMarks for GigaChat {
    const OPENERS: &'static [&'static str] = &["function call<|role_sep|>", "<|function_call|>"];
    const CLOSE: &'static str = "";
}

#[derive(Clone, Debug, Default)]
pub(super) struct MarkedJson<M> {
    json: JsonEnd,
    calls: JsonPieces,
    marks: PhantomData<M>,
}

impl<M: JsonMarks> MarkedJson<M> {
    /// Where the JSON of a block begins.
    fn start(text: &str) -> usize {
        let mut openers = M::OPENERS.iter();
        let opener = openers.find(|opener| text.starts_with(**opener));
        start_behind(text, opener.unwrap_or(&M::OPENERS[0]))
    }
}

impl<M: JsonMarks> Block for MarkedJson<M> {
    const OPENERS: &'static [&'static str] = M::OPENERS;

    fn read(&mut self, text: &str, is_last: bool) -> Progress {
        let start = Self::start(text);
        let end = match end_of_json(&mut self.json, text, start) {
            Ok(end) => end,
            Err(progress) => return progress,
        };
        let (json, rest) = (&text[start..end], text[end..].trim_start());
        let num_bytes = match rest.strip_prefix(M::CLOSE) {
            Some(_) if M::CLOSE.is_empty() => end,
            Some(behind) => text.len() - behind.len(),
            None if !M::CLOSE.starts_with(rest) => return Progress::Text(end),
            None if is_last => text.len(),
            None => return Progress::More,
        };
        match ToolCall::of_json(json) {
            Some(call) => Progress::Calls(num_bytes, vec![call]),
            None => Progress::Text(num_bytes),
        }
    }

    fn give<'b>(&'b mut self, text: &str, parts: &mut ReplyParts) -> Option<&'b mut Pieces> {
        let start = Self::start(text);
        if text[start..].starts_with('{') {
            self.calls.give(text, start, parts);
        }
        Some(&mut self.calls.pieces)
    }
}
