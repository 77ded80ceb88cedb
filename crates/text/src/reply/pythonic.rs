//! The calls of Llama 4 as Python: the whole reply is a list of calls, `[weather(city="Berlin", days=[1, 2]), time()]`,
//! with or without `<|python_start|>` before and `<|python_end|>` behind. A reply that begins in another way is
//! content.
//!
//! Source: "Llama 4 model cards and prompt formats" of Meta; vLLM's parsers of the same names.

use super::call::ToolCall;
use super::mark::{behind, first};
use super::python::{ListEnd, calls};
use super::{Format, ReplyParts};

const START: &str = "<|python_start|>";
const END: &str = "<|python_end|>";

#[derive(Clone, Debug, Default)]
pub(super) struct Pythonic {
    list: ListEnd,
    state: State,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Before,
    /// Behind the calls.
    Behind,
    Content,
}

impl Format for Pythonic {
    fn read(&mut self, text: &str, is_last: bool, parts: &mut ReplyParts) -> usize {
        let mut rest = text;
        loop {
            match self.state {
                State::Before => {
                    let list = behind(rest, START);
                    let end = list.map(|list| self.list.scan(list));
                    match (list, end) {
                        (Some(list), Some(Ok(Some(end)))) => match list_calls(&list[..end]) {
                            Some(mut found) => {
                                parts.calls.append(&mut found);
                                rest = &list[end..];
                                self.state = State::Behind;
                            }
                            None => self.state = State::Content,
                        },
                        (_, Some(Err(()))) => self.state = State::Content,
                        _ if is_last => self.state = State::Content,
                        _ => break,
                    }
                }
                State::Behind => {
                    let trimmed = rest.trim_start();
                    match first(trimmed, &[END]) {
                        Some(Some(mark)) => rest = &trimmed[mark.len()..],
                        None if trimmed.is_empty() => {
                            if is_last {
                                rest = trimmed;
                            }
                            break;
                        }
                        None if !is_last => break,
                        _ => self.state = State::Content,
                    }
                }
                State::Content => {
                    parts.content.push_str(rest);
                    return text.len();
                }
            }
        }
        text.len() - rest.len()
    }

    fn fork(&self) -> Box<dyn Format> {
        Box::new(self.clone())
    }
}

/// The calls of a list, if it has any.
fn list_calls(list: &str) -> Option<Vec<ToolCall>> {
    calls(list).filter(|calls| !calls.is_empty())
}
