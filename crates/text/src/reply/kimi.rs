//! The calls of Kimi K2: `<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>{...}<|tool_call_end|>`,
//! with a mark before and behind all of them. What is before the arguments is the id of the call, which the chat
//! template writes into later prompts, so it stays the id.
//!
//! Source: tool_call_guidance.md of MoonshotAI/Kimi-K2.

use super::call::ToolCall;
use super::pieces::CallHead;
use super::sections::Section;

const ARGUMENTS: &str = "<|tool_call_argument_begin|>";

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Kimi;

impl Section for Kimi {
    const OPENERS: &'static [&'static str] = &[Self::FIRST, Self::LAST, Self::OPEN];
    const FIRST: &'static str = "<|tool_calls_section_begin|>";
    const LAST: &'static str = "<|tool_calls_section_end|>";
    const OPEN: &'static str = "<|tool_call_begin|>";
    const CLOSE: &'static str = "<|tool_call_end|>";

    fn head(inside: &str) -> Option<CallHead> {
        let (id, arguments) = inside.split_once(ARGUMENTS)?;
        let id = id.trim();
        let (name, number) = id.rsplit_once(':')?;
        number.parse::<u32>().ok()?;
        let name = name.strip_prefix("functions.").unwrap_or(name);
        Some(CallHead {
            name: name.to_owned(),
            id: Some(id.to_owned()),
            start: inside.len() - arguments.trim_start().len(),
        })
    }

    fn call(inside: &str) -> Option<ToolCall> {
        let CallHead { name, id, start } = Self::head(inside)?;
        let call = ToolCall::new(&name, &inside[start..])?;
        Some(ToolCall { id, ..call })
    }
}
