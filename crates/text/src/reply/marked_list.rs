//! Calls in a JSON list behind a mark, with a mark behind the list or without:
//!
//! ```text
//! <|tool_call|>[{"name": ..., "arguments": {...}}, ...]                                  Granite 3, Phi-4-mini
//! <tool_calls>[{"name": ..., "arguments": {...}}, ...]</tool_calls>                      Hunyuan A13B, Jamba
//! <TOOLCALL>[{"name": ..., "arguments": {...}}, ...]</TOOLCALL>                          Nemotron Nano 2
//! <|START_ACTION|>[{"tool_name": ..., "parameters": {...}}, ...]<|END_ACTION|>           Command A, Command R7B
//! <|tools_prefix|>[{NAME: {...}}, ...]<|tools_suffix|>                                   Apertus
//! ```
//!
//! Sources: the chat templates of these models; llama.cpp's parsers (common/chat.cpp).

use std::marker::PhantomData;

use super::ReplyParts;
use super::blocks::{Block, Progress, end_of_json, start_behind};
use super::call::ToolCall;
use super::json_end::JsonEnd;
use super::pieces::{JsonPieces, Pieces};

/// The marks of a format, and its calls.
pub(super) trait List: Clone + Default + Send + Sync + 'static {
    /// The mark before the list.
    const OPENERS: &'static [&'static str];
    /// The mark behind it.
    const CLOSE: &'static str;
    /// Whether the name of a call stands in front of its arguments, as a member of its own.
    const HAS_NAMES: bool = true;

    /// The calls in a list.
    fn calls(json: &str) -> Option<Vec<ToolCall>> {
        ToolCall::list_of_json(json)
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct Granite;

impl List for Granite {
    const OPENERS: &'static [&'static str] = &["<|tool_call|>"];
    const CLOSE: &'static str = "<|/tool_call|>";
}

#[derive(Clone, Debug, Default)]
pub(super) struct Hunyuan;

impl List for Hunyuan {
    const OPENERS: &'static [&'static str] = &["<tool_calls>"];
    const CLOSE: &'static str = "</tool_calls>";
}

#[derive(Clone, Debug, Default)]
pub(super) struct Nemotron;

impl List for Nemotron {
    const OPENERS: &'static [&'static str] = &["<TOOLCALL>"];
    const CLOSE: &'static str = "</TOOLCALL>";
}

#[derive(Clone, Debug, Default)]
pub(super) struct Command;

impl List for Command {
    const OPENERS: &'static [&'static str] = &["<|START_ACTION|>"];
    const CLOSE: &'static str = "<|END_ACTION|>";
}

#[derive(Clone, Debug, Default)]
pub(super) struct Apertus;

impl List for Apertus {
    const OPENERS: &'static [&'static str] = &["<|tools_prefix|>"];
    const CLOSE: &'static str = "<|tools_suffix|>";
    const HAS_NAMES: bool = false;

    fn calls(json: &str) -> Option<Vec<ToolCall>> {
        ToolCall::list_of_named(json)
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct MarkedList<L> {
    json: JsonEnd,
    calls: JsonPieces,
    list: PhantomData<L>,
}

impl<L: List> Block for MarkedList<L> {
    const OPENERS: &'static [&'static str] = L::OPENERS;

    fn read(&mut self, text: &str, is_last: bool) -> Progress {
        let start = start_behind(text, L::OPENERS[0]);
        let end = match end_of_json(&mut self.json, text, start) {
            Ok(end) => end,
            Err(progress) => return progress,
        };
        let (json, rest) = (&text[start..end], text[end..].trim_start());
        let num_bytes = match rest.strip_prefix(L::CLOSE) {
            Some(behind) => text.len() - behind.len(),
            None if L::CLOSE.starts_with(rest) && !is_last => return Progress::More,
            None => end,
        };
        match L::calls(json) {
            Some(calls) => Progress::Calls(num_bytes, calls),
            None => Progress::Text(num_bytes),
        }
    }

    fn give<'b>(&'b mut self, text: &str, parts: &mut ReplyParts) -> Option<&'b mut Pieces> {
        if !L::HAS_NAMES {
            return None;
        }
        let start = start_behind(text, L::OPENERS[0]);
        self.calls.give(text, start, parts);
        Some(&mut self.calls.pieces)
    }
}
