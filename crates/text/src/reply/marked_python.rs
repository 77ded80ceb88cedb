//! Calls in Python between marks: LFM2 writes a list, `<|tool_call_start|>[weather(city='Oslo'), time()]<|tool_call_end|>`,
//! and OLMo 3 a line for each, `<function_calls>\nweather(city="Oslo")\ntime()\n</function_calls>`.
//!
//! Source: the chat templates of LFM2 and OLMo 3; vLLM's parsers of these names.

use std::marker::PhantomData;

use super::ToolCall;
use super::blocks::{Block, MarkEnd, Progress};
use super::python::{calls, calls_in_lines};

/// The marks around calls, and what is between them.
pub(super) trait PythonMarks: Clone + Default + Send + Sync + 'static {
    const OPENERS: &'static [&'static str];
    const CLOSE: &'static str;

    /// Whether calls may begin with this character.
    fn may_begin(char: char) -> bool;

    /// The calls between the marks; `None` if something else is there.
    fn calls(text: &str) -> Option<Vec<ToolCall>>;
}

#[derive(Clone, Debug, Default)]
pub(super) struct Lfm2;

impl PythonMarks for Lfm2 {
    const OPENERS: &'static [&'static str] = &["<|tool_call_start|>"];
    const CLOSE: &'static str = "<|tool_call_end|>";

    fn may_begin(char: char) -> bool {
        char == '['
    }

    fn calls(text: &str) -> Option<Vec<ToolCall>> {
        calls(text)
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct Olmo3;

impl PythonMarks for Olmo3 {
    const OPENERS: &'static [&'static str] = &["<function_calls>"];
    const CLOSE: &'static str = "</function_calls>";

    fn may_begin(char: char) -> bool {
        char.is_alphanumeric() || char == '_'
    }

    fn calls(text: &str) -> Option<Vec<ToolCall>> {
        calls_in_lines(text)
    }
}

/// A block of calls.
#[derive(Clone, Debug, Default)]
pub(super) struct MarkedPython<M> {
    end: MarkEnd,
    marks: PhantomData<M>,
}

impl<M: PythonMarks> Block for MarkedPython<M> {
    const OPENERS: &'static [&'static str] = M::OPENERS;

    fn read(&mut self, text: &str, is_last: bool) -> Progress {
        let start = M::OPENERS[0].len();
        let begin = text[start..].trim_start().chars().next();
        if !begin.is_none_or(M::may_begin) {
            return Progress::Text(start);
        }
        let Some((end, num_bytes)) = self.end.scan(text, start, M::CLOSE, is_last) else {
            return Progress::More;
        };
        match M::calls(text[start..end].trim()) {
            Some(calls) if !calls.is_empty() => Progress::Calls(num_bytes, calls),
            _ => Progress::Text(start),
        }
    }
}
