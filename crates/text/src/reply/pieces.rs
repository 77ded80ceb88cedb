//! Calls that are given in pieces: the name when the arguments begin, and the arguments, a JSON object, as the text
//! goes on.

use super::ReplyParts;
use super::call::{ToolCall, is_name, name_and_arguments};
use super::json_end::{JsonEnd, Scan};

/// The longest text in front of arguments. Calls with a longer one are given when they are complete.
const MAX_HEAD_BYTES: usize = 1024;

/// What is in front of the arguments of a call.
pub(super) struct CallHead {
    pub name: String,
    pub id: Option<String>,
    /// Where the arguments begin.
    pub start: usize,
}

/// The calls in a text that only grows, as far as they were given.
#[derive(Clone, Debug, Default)]
pub(super) struct Pieces {
    /// How many were given whole.
    num_whole: usize,
    /// The one that was not.
    open: Option<OpenCall>,
    /// The bytes of the text that what was given ends before.
    end: usize,
}

#[derive(Clone, Debug)]
struct OpenCall {
    /// Where its arguments begin.
    start: usize,
    json: JsonEnd,
}

impl Pieces {
    /// Adds what is new of a call whose arguments may be incomplete to `parts`. `head` finds them.
    pub(super) fn give(
        &mut self,
        text: &str,
        head: impl FnOnce(&str) -> Option<CallHead>,
        parts: &mut ReplyParts,
    ) {
        let head = match self.open {
            Some(_) => None,
            None => match head(text) {
                Some(head) if is_name(&head.name) && text[head.start..].starts_with('{') => {
                    self.end = head.start;
                    Some(head)
                }
                _ => return,
            },
        };
        let open = self.open.get_or_insert_with(|| OpenCall {
            start: self.end,
            json: JsonEnd::default(),
        });
        let end = open.start + open.json.certain_len(&text[open.start..]);
        let arguments = text[self.end..end].to_owned();
        self.end = end;
        let (name, id) = head.map_or_else(Default::default, |head| (head.name, head.id));
        parts.add_call(ToolCall {
            name,
            arguments,
            id,
            is_whole: false,
        });
    }

    /// Adds the calls of the whole text to `parts`, as far as they were not given.
    pub(super) fn finish(&mut self, calls: Vec<ToolCall>, parts: &mut ReplyParts) {
        for call in calls.into_iter().skip(self.num_whole) {
            self.complete(call, parts);
        }
    }

    /// Adds what was not given of the next call.
    fn complete(&mut self, call: ToolCall, parts: &mut ReplyParts) {
        self.num_whole += 1;
        parts.add_call(match self.open.take() {
            None => call,
            Some(open) => ToolCall {
                name: String::new(),
                arguments: call.arguments[self.end - open.start..].to_owned(),
                id: None,
                is_whole: true,
            },
        });
    }

    /// The bytes of the text that are not behind what was given.
    pub(super) fn end(&self) -> usize {
        self.end
    }
}

/// The calls in a JSON object, or in a list of them, as far as they were given.
#[derive(Clone, Debug, Default)]
pub(super) struct JsonPieces {
    pub(super) pieces: Pieces,
    /// Where the call begins that is incomplete, and its end.
    call: Option<(usize, JsonEnd)>,
    /// Where the last complete one ends.
    last_end: usize,
    /// Whether no call follows.
    is_over: bool,
}

impl JsonPieces {
    /// Adds what is new of the calls in `text`, from byte `from` on, to `parts`. `from` is the same in all calls.
    pub(super) fn give(&mut self, text: &str, from: usize, parts: &mut ReplyParts) {
        self.last_end = self.last_end.max(from);
        while !self.is_over {
            if self.call.is_none() {
                let Some(start) = next_call(text, from, self.last_end) else {
                    return;
                };
                self.call = Some((start, JsonEnd::default()));
            }
            let Some((start, json)) = &mut self.call else {
                return;
            };
            let start = *start;
            self.pieces.give(text, |text| head(text, start), parts);
            let Scan::End(len) = json.scan(&text[start..]) else {
                return;
            };
            let end = start + len;
            match ToolCall::of_json(&text[start..end]) {
                Some(call) => {
                    self.pieces.complete(call, parts);
                    self.pieces.end = end;
                    self.is_over = start == from;
                }
                None => self.is_over = true,
            }
            (self.call, self.last_end) = (None, end);
        }
    }
}

/// Where the next call behind byte `last_end` begins, in an object or a list that begins at `from`.
fn next_call(text: &str, from: usize, last_end: usize) -> Option<usize> {
    let rest = &text[last_end..];
    let before = match last_end == from {
        true if rest.starts_with('{') => return Some(from),
        true => '[',
        false => ',',
    };
    let rest = rest.trim_start().strip_prefix(before)?.trim_start();
    rest.starts_with('{').then(|| text.len() - rest.len())
}

/// What is in front of the arguments in the JSON object at byte `start`.
fn head(text: &str, start: usize) -> Option<CallHead> {
    let max_end = text.floor_char_boundary(start + MAX_HEAD_BYTES);
    let (name, arguments) = name_and_arguments(&text[start..max_end])?;
    Some(CallHead {
        name,
        id: None,
        start: max_end - arguments.len(),
    })
}
