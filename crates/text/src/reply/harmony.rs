//! The replies of GPT-OSS (harmony, <https://cookbook.openai.com/articles/openai-harmony>): messages of several
//! channels.
//!
//! ```text
//! <|channel|>analysis<|message|>...<|end|>                                                        reasoning
//! <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>   a call
//! <|start|>assistant<|channel|>commentary<|message|>...<|end|>                                    content
//! <|start|>assistant<|channel|>final<|message|>...<|return|>                                      content
//! ```
//!
//! The recipient of a call may also stand before the channel. The prompt ends with `<|start|>assistant`.

use super::call::ToolCall;
use super::mark::{find, first};
use super::pieces::{CallHead, Pieces};
use super::{Format, ReplyParts, ReplyStart};

const START: &str = "<|start|>";
const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
const RECIPIENT: &str = "to=";

/// What begins a header.
const OPENERS: &[&str] = &[START, CHANNEL, " to="];
/// What ends a message. A header can follow without one.
const ENDS: &[&str] = &["<|end|>", "<|call|>", "<|return|>", START, CHANNEL];

/// The longest header. A longer one is content.
const MAX_HEADER_BYTES: usize = 1024;

/// What else an answer returns: what it does not stays in the content, as it is.
#[derive(Clone, Copy, Debug)]
pub(super) struct HarmonyParts {
    pub reasoning: bool,
    pub calls: bool,
}

#[derive(Clone, Debug)]
pub(super) struct Harmony {
    wanted: HarmonyParts,
    in_pieces: bool,
    state: State,
    /// Whether a message of reasoning, or of content, has come before.
    has_reasoning: bool,
    has_content: bool,
}

#[derive(Clone, Debug)]
enum State {
    /// Before a header.
    Between,
    /// In a message that is reasoning or content.
    Reasoning,
    Content,
    /// In a call of this function, whose message begins with its header of this length.
    Call {
        name: String,
        header_len: usize,
        num_scanned: usize,
        pieces: Pieces,
    },
}

impl Harmony {
    pub(super) fn new(wanted: HarmonyParts, start: ReplyStart) -> Self {
        Self {
            wanted,
            in_pieces: false,
            state: match start {
                ReplyStart::Beginning => State::Between,
                ReplyStart::Reasoning => State::Reasoning,
                ReplyStart::Content => State::Content,
            },
            has_reasoning: false,
            has_content: false,
        }
    }

    /// The state in the message that follows a header; `None` if the header is content, as it is.
    fn message(&mut self, header: &str, parts: &mut ReplyParts) -> Option<State> {
        let word = |mark: &str| {
            let (_, rest) = header.split_once(mark)?;
            rest.split([' ', '<']).next()
        };
        if let Some(recipient) = word(RECIPIENT) {
            let name = recipient.strip_prefix("functions.").unwrap_or(recipient);
            return self.wanted.calls.then(|| State::Call {
                name: name.to_owned(),
                header_len: header.len(),
                num_scanned: 0,
                pieces: Pieces::default(),
            });
        }
        if word(CHANNEL) == Some("analysis") {
            if !self.wanted.reasoning {
                return None;
            }
            if std::mem::replace(&mut self.has_reasoning, true) {
                parts.reasoning.push('\n');
            }
            return Some(State::Reasoning);
        }
        if std::mem::replace(&mut self.has_content, true) {
            parts.content.push('\n');
        }
        Some(State::Content)
    }
}

impl Format for Harmony {
    fn read(&mut self, text: &str, is_last: bool, parts: &mut ReplyParts) -> usize {
        let mut rest = text;
        while !rest.is_empty() {
            match &mut self.state {
                State::Between => match first(rest, OPENERS) {
                    None if !is_last => break,
                    Some(Some(_)) => {
                        let found = find(rest, 0, &[MESSAGE]);
                        let header_len = found.map_or_else(|end| end, |(start, _)| start);
                        if header_len <= MAX_HEADER_BYTES && found.is_err() && !is_last {
                            break;
                        }
                        let next = match found {
                            Ok((end, mark)) if end <= MAX_HEADER_BYTES => {
                                let (header, behind) = rest.split_at(end + mark.len());
                                self.message(header, parts).map(|state| (state, behind))
                            }
                            _ => None,
                        };
                        match next {
                            Some((state @ State::Call { .. }, _)) => self.state = state,
                            Some((state, behind)) => {
                                self.state = state;
                                rest = behind;
                            }
                            None => {
                                // Its first mark cannot begin a header again.
                                let mark = first(rest, OPENERS).flatten().unwrap_or(rest);
                                parts.content.push_str(mark);
                                rest = &rest[mark.len()..];
                                self.state = State::Content;
                            }
                        }
                    }
                    _ => self.state = State::Content,
                },
                State::Reasoning | State::Content => {
                    let found = find(rest, 0, ENDS);
                    let end = match found {
                        Ok((end, _)) => end,
                        Err(_) if is_last => rest.len(),
                        Err(end) => end,
                    };
                    match self.state {
                        State::Reasoning => parts.reasoning.push_str(&rest[..end]),
                        _ => parts.content.push_str(&rest[..end]),
                    }
                    rest = &rest[end..];
                    match found {
                        Ok((_, mark)) => {
                            rest = behind(rest, mark);
                            self.state = State::Between;
                        }
                        Err(_) => break,
                    }
                }
                State::Call {
                    name,
                    header_len,
                    num_scanned,
                    pieces,
                } => {
                    let found = find(rest, (*header_len).max(*num_scanned), ENDS);
                    let (end, next) = match found {
                        Ok((end, mark)) => (end, behind(&rest[end..], mark)),
                        Err(_) if is_last => (rest.len(), ""),
                        Err(end) => (end, rest),
                    };
                    *num_scanned = end;
                    if self.in_pieces {
                        let head = |text: &str| {
                            Some(CallHead {
                                name: name.clone(),
                                id: None,
                                start: text.len() - text[*header_len..].trim_start().len(),
                            })
                        };
                        pieces.give(&rest[..end], head, parts);
                    }
                    if found.is_err() && !is_last {
                        break;
                    }
                    match ToolCall::new(name, &rest[*header_len..end]) {
                        Some(call) => pieces.finish(vec![call], parts),
                        None => {
                            let text = &rest[pieces.end()..rest.len() - next.len()];
                            parts.content.push_str(text);
                        }
                    }
                    rest = next;
                    self.state = State::Between;
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

/// What follows the end of a message. A mark that begins the next header belongs to that.
fn behind<'a>(rest: &'a str, end: &str) -> &'a str {
    match end {
        START | CHANNEL => rest,
        _ => &rest[end.len()..],
    }
}
