//! Reasoning between two marks at the beginning of a reply: `<think>`, Mistral's `[THINK]`, and Granite's sentences.

use super::mark::{find, first};
use super::{Format, ReplyParts, ReplyStart};

/// The marks around the reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ThoughtMarks {
    pub start: &'static str,
    pub end: &'static str,
    /// Whether a reply begins with reasoning even without the first mark, which the prompt may have.
    pub is_assumed: bool,
}

/// Reads the reasoning. The line breaks around it are no part of it, nor of the content.
#[derive(Clone, Debug)]
pub(super) struct Thought {
    marks: ThoughtMarks,
    state: State,
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// The first mark may come; if it does not, this is reasoning or not.
    Before {
        is_reasoning: bool,
    },
    /// In line breaks behind the first mark.
    Opening,
    Inside,
    /// In line breaks behind the second mark.
    Closing,
    After,
}

impl Thought {
    pub(super) fn new(marks: ThoughtMarks, start: ReplyStart) -> Self {
        let state = match start {
            ReplyStart::Beginning => State::Before {
                is_reasoning: marks.is_assumed,
            },
            // The model may repeat a mark with which the prompt ends.
            ReplyStart::Reasoning => State::Before { is_reasoning: true },
            ReplyStart::Content => State::After,
        };
        Self { marks, state }
    }
}

impl Format for Thought {
    fn read(&mut self, text: &str, is_last: bool, parts: &mut ReplyParts) -> usize {
        let mut rest = text;
        loop {
            match self.state {
                State::Before { is_reasoning } => {
                    let trimmed = rest.trim_start();
                    match first(trimmed, &[self.marks.start]) {
                        None if !is_last => break,
                        Some(Some(mark)) => {
                            rest = &trimmed[mark.len()..];
                            self.state = State::Opening;
                        }
                        _ if is_reasoning => self.state = State::Opening,
                        _ => self.state = State::After,
                    }
                }
                State::Opening | State::Closing => {
                    rest = rest.trim_start_matches('\n');
                    if rest.is_empty() {
                        break;
                    }
                    self.state = match self.state {
                        State::Opening => State::Inside,
                        _ => State::After,
                    };
                }
                State::Inside => {
                    let found = find(rest, 0, &[self.marks.end]);
                    let end = match found {
                        Ok((end, _)) => end,
                        Err(_) if is_last => rest.len(),
                        Err(end) => end,
                    };
                    let thought = rest[..end].trim_end_matches('\n');
                    parts.reasoning.push_str(thought);
                    match found {
                        Ok((end, mark)) => {
                            rest = &rest[end + mark.len()..];
                            self.state = State::Closing;
                        }
                        Err(_) if is_last => return text.len(),
                        Err(_) => {
                            rest = &rest[thought.len()..];
                            break;
                        }
                    }
                }
                State::After => {
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
