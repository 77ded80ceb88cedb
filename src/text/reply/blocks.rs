//! Calls in blocks behind a mark, in a text that is otherwise content.

use super::mark::{find, first};
use super::{Format, ReplyParts, ToolCall};

/// A format of blocks.
pub(super) trait Block: Clone + Send + Sync + 'static {
    /// What begins a block.
    const OPENERS: &'static [&'static str];

    /// Reads the block that begins `text`; the text only grows from call to call. If it `is_last`, nothing follows.
    fn read(&mut self, text: &str, is_last: bool) -> Progress;
}

/// What is known of a block.
pub(super) enum Progress {
    /// It may go on.
    More,
    /// It has this many bytes, and these are its calls.
    Calls(usize, Vec<ToolCall>),
    /// It is none: this many bytes, at least one, are content.
    Text(usize),
}

/// Reads blocks. White space between them, and behind the last, is no content.
#[derive(Clone, Debug, Default)]
pub(super) struct Blocks<B> {
    /// A block of which nothing was read.
    unread: B,
    block: B,
    state: State,
}

#[derive(Clone, Copy, Debug, Default)]
enum State {
    #[default]
    Outside,
    Inside,
    /// In white space behind a block.
    Behind,
}

impl<B: Block> Blocks<B> {
    /// Blocks that each begin as this one.
    pub(super) fn new(unread: B) -> Self {
        Self {
            block: unread.clone(),
            unread,
            state: State::Outside,
        }
    }
}

impl<B: Block> Format for Blocks<B> {
    fn read(&mut self, text: &str, is_last: bool, parts: &mut ReplyParts) -> usize {
        let mut rest = text;
        while !rest.is_empty() {
            match self.state {
                State::Outside => match find(rest, 0, B::OPENERS) {
                    Ok((start, _)) => {
                        parts.content.push_str(&rest[..start]);
                        rest = &rest[start..];
                        self.state = State::Inside;
                    }
                    Err(end) => {
                        let end = if is_last { rest.len() } else { end };
                        parts.content.push_str(&rest[..end]);
                        rest = &rest[end..];
                        break;
                    }
                },
                State::Inside => {
                    let progress = self.block.read(rest, is_last);
                    let num_bytes = match progress {
                        Progress::More if !is_last => break,
                        Progress::More => rest.len(),
                        Progress::Calls(num_bytes, _) | Progress::Text(num_bytes) => num_bytes,
                    };
                    let (read, next) = rest.split_at(num_bytes);
                    self.state = match progress {
                        Progress::Calls(_, mut calls) => {
                            parts.calls.append(&mut calls);
                            State::Behind
                        }
                        _ => {
                            parts.content.push_str(read);
                            State::Outside
                        }
                    };
                    self.block = self.unread.clone();
                    rest = next;
                }
                State::Behind => {
                    let trimmed = rest.trim_start();
                    match first(trimmed, B::OPENERS) {
                        Some(Some(_)) => {
                            rest = trimmed;
                            self.state = State::Inside;
                        }
                        None if is_last && trimmed.is_empty() => rest = trimmed,
                        None if !is_last => break,
                        _ => self.state = State::Outside,
                    }
                }
            }
        }
        text.len() - rest.len()
    }

    fn fork(&self) -> Box<dyn Format> {
        Box::new(self.clone())
    }
}
