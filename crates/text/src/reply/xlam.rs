//! The calls of xLAM: the whole reply is a JSON list, `[{"name": ..., "arguments": {...}}, ...]`, by itself, in a fence
//! of JSON, behind `[TOOL_CALLS]`, or between `<tool_call>` and `</tool_call>`. A reply that begins in another way is
//! content.
//!
//! Source: the chat template of Llama-xLAM-2-8b-fc-r; vLLM's parser `xlam`.

use super::call::ToolCall;
use super::json_end::{JsonEnd, Scan};
use super::mark::first;
use super::pieces::JsonPieces;
use super::{Format, ReplyParts};

/// Optional openers of the list.
const OPENERS: [&str; 3] = ["```json", "[TOOL_CALLS]", "<tool_call>"];
/// Optional closers of the list.
const CLOSERS: [&str; 2] = ["```", "</tool_call>"];

#[derive(Clone, Debug, Default)]
pub(super) struct XLam {
    json: JsonEnd,
    calls: JsonPieces,
    in_pieces: bool,
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

impl Format for XLam {
    fn read(&mut self, text: &str, is_last: bool, parts: &mut ReplyParts) -> usize {
        let mut rest = text;
        loop {
            match self.state {
                State::Before => {
                    let Some(json) = behind_opener(rest) else {
                        if !is_last {
                            break;
                        }
                        self.state = State::Content;
                        continue;
                    };
                    let scan = match may_be_calls(json) {
                        true => self.json.scan(json),
                        false => Scan::Bad(0),
                    };
                    let list = match scan {
                        Scan::More => json,
                        Scan::End(end) | Scan::Bad(end) => &json[..end],
                    };
                    if self.in_pieces && has_arguments(list) {
                        self.calls.give(list, 0, parts);
                    }
                    let calls = match scan {
                        Scan::More if !is_last => break,
                        Scan::End(_) => ToolCall::list_of_json(list),
                        _ => None,
                    };
                    match calls.filter(|calls| !calls.is_empty() && has_arguments(list)) {
                        Some(calls) => {
                            self.calls.pieces.finish(calls, parts);
                            rest = &json[list.len()..];
                            self.state = State::Behind;
                        }
                        None => {
                            if self.calls.pieces.end() > 0 {
                                rest = &json[self.calls.pieces.end()..];
                            }
                            self.state = State::Content;
                        }
                    }
                }
                State::Behind => {
                    let trimmed = rest.trim_start();
                    match first(trimmed, &CLOSERS) {
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

    fn give_pieces(&mut self) {
        self.in_pieces = true;
    }

    fn fork(&self) -> Box<dyn Format> {
        Box::new(self.clone())
    }
}

/// The text behind white space and an opener, which may be missing; `None` while one may go on, or nothing follows.
fn behind_opener(text: &str) -> Option<&str> {
    let text = text.trim_start();
    let behind = match first(text, &OPENERS)? {
        Some(mark) => text[mark.len()..].trim_start(),
        None => text,
    };
    Some(behind).filter(|behind| !behind.is_empty())
}

/// Whether a JSON text may be a list of calls, by its beginning.
fn may_be_calls(json: &str) -> bool {
    let list = json.strip_prefix('[').map(str::trim_start);
    list.is_some_and(|list| list.is_empty() || list.starts_with('{'))
}

/// Whether a list may be one of calls: a reply in JSON need not be.
fn has_arguments(list: &str) -> bool {
    list.contains("\"arguments\"")
}
