//! The calls of Llama 3.1 to 3.3: the whole reply is `{"name": ..., "parameters": {...}}`, or several of them with `;`
//! between, with or without `<|python_tag|>` before. A reply that begins in another way is content.

use super::call::ToolCall;
use super::json_end::{JsonEnd, Scan};
use super::mark::{behind, first};
use super::pieces::JsonPieces;
use super::{Format, ReplyParts};

/// The mark before calls, where the model writes it.
const TAG: &str = "<|python_tag|>";

#[derive(Clone, Debug, Default)]
pub(super) struct Llama {
    json: JsonEnd,
    calls: JsonPieces,
    in_pieces: bool,
    state: State,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    /// Before a call, the first or another one behind a separator.
    #[default]
    Before,
    /// Behind a call.
    Behind,
    Content,
}

impl Format for Llama {
    fn read(&mut self, text: &str, is_last: bool, parts: &mut ReplyParts) -> usize {
        let mut rest = text;
        loop {
            match self.state {
                State::Before => {
                    let Some(json) = behind(rest, TAG) else {
                        if !is_last {
                            break;
                        }
                        self.state = State::Content;
                        continue;
                    };
                    let scan = self.json.scan(json);
                    let object = match scan {
                        Scan::More => json,
                        Scan::End(end) | Scan::Bad(end) => &json[..end],
                    };
                    if self.in_pieces && object.starts_with('{') {
                        self.calls.give(object, 0, parts);
                    }
                    let call = match scan {
                        Scan::More if !is_last => break,
                        Scan::End(_) => ToolCall::of_json(object),
                        _ => None,
                    };
                    match call.filter(|_| has_arguments(object)) {
                        Some(call) => {
                            self.calls.pieces.finish(vec![call], parts);
                            rest = &json[object.len()..];
                            self.state = State::Behind;
                        }
                        None => {
                            if self.calls.pieces.end() > 0 {
                                rest = &json[self.calls.pieces.end()..];
                            }
                            self.state = State::Content;
                        }
                    }
                    (self.json, self.calls) = Default::default();
                }
                State::Behind => {
                    let trimmed =
                        rest.trim_start_matches(|char: char| char.is_whitespace() || char == ';');
                    if trimmed.is_empty() {
                        if is_last {
                            rest = trimmed;
                        }
                        break;
                    }
                    self.state = match first(trimmed, &[TAG, "{"]) {
                        None if !is_last => break,
                        Some(Some(_)) => {
                            rest = trimmed;
                            State::Before
                        }
                        _ => State::Content,
                    };
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

/// Whether a JSON object is more than a name: a reply in JSON need not be a call.
fn has_arguments(json: &str) -> bool {
    ["\"parameters\"", "\"arguments\""]
        .iter()
        .any(|name| json.contains(name))
}
