//! Calls in blocks behind a mark, in a text that is otherwise content.

use super::json_end::{JsonEnd, Scan};
use super::mark::{find, first};
use super::pieces::Pieces;
use super::{Format, ReplyParts, ToolCall};

/// A format of blocks.
pub(super) trait Block: Clone + Send + Sync + 'static {
    /// What begins a block.
    const OPENERS: &'static [&'static str];

    /// Reads the block that begins `text`; the text only grows from call to call. If it `is_last`, nothing follows.
    fn read(&mut self, text: &str, is_last: bool) -> Progress;

    /// The calls in a block of which no more than `text` was read, as far as they are certain: adds what is new of them
    /// to `parts`. `None` if the calls of the format are given whole.
    fn give<'b>(&'b mut self, _text: &str, _parts: &mut ReplyParts) -> Option<&'b mut Pieces> {
        None
    }
}

/// What is known of a block.
pub(super) enum Progress {
    /// The block may go on.
    More,
    /// The block has this many bytes, and these are its calls.
    Calls(usize, Vec<ToolCall>),
    /// The text is no block: this many bytes, at least one, are content.
    Text(usize),
}

/// Where what follows the mark of a block begins, behind white space.
pub(super) fn start_behind(block: &str, mark: &str) -> usize {
    block.len() - block[mark.len()..].trim_start().len()
}

/// Where a block that ends with a mark ends, without the mark and with it. A text that `is_last` may lack the mark.
#[derive(Clone, Debug, Default)]
pub(super) struct MarkEnd {
    /// The bytes of the block in which no mark begins.
    num_scanned: usize,
}

impl MarkEnd {
    /// Scans what is new of `block` for `mark`, from byte `start` on. The block only grows from call to call.
    pub(super) fn scan(
        &mut self,
        block: &str,
        start: usize,
        mark: &str,
        is_last: bool,
    ) -> Option<(usize, usize)> {
        let from = self.num_scanned.max(start);
        if let Some(place) = block[from..].find(mark) {
            return Some((from + place, from + place + mark.len()));
        }
        self.num_scanned = block.floor_char_boundary(block.len().saturating_sub(mark.len()));
        is_last.then_some((block.len(), block.len()))
    }
}

/// The end of the JSON value that begins at `start` of a block, or what that makes of the block. `start` is the same in
/// all calls.
pub(super) fn end_of_json(
    json: &mut JsonEnd,
    block: &str,
    start: usize,
) -> Result<usize, Progress> {
    match json.scan(&block[start..]) {
        Scan::More => Err(Progress::More),
        Scan::Bad(end) => Err(Progress::Text(start + end)),
        Scan::End(end) => Ok(start + end),
    }
}

/// Reads blocks. White space between them, and behind the last, is no content.
#[derive(Clone, Debug, Default)]
pub(super) struct Blocks<B> {
    /// A block of which nothing was read.
    unread: B,
    block: B,
    state: State,
    in_pieces: bool,
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
            in_pieces: false,
        }
    }

    /// Adds what is certain of the calls in a block to `parts`, if they are given in pieces.
    fn give(&mut self, text: &str, parts: &mut ReplyParts) -> Option<&mut Pieces> {
        match self.in_pieces {
            true => self.block.give(text, parts),
            false => None,
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
                        Progress::More if !is_last => {
                            self.give(rest, parts);
                            break;
                        }
                        Progress::More => rest.len(),
                        Progress::Calls(num_bytes, _) | Progress::Text(num_bytes) => num_bytes,
                    };
                    let (read, next) = rest.split_at(num_bytes);
                    let pieces = self.give(read, parts);
                    self.state = match progress {
                        Progress::Calls(_, mut calls) => {
                            match pieces {
                                None => parts.calls.append(&mut calls),
                                Some(pieces) => pieces.finish(calls, parts),
                            }
                            State::Behind
                        }
                        _ => {
                            let num_given = pieces.map_or(0, |pieces| pieces.end());
                            parts.content.push_str(&read[num_given..]);
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

    fn give_pieces(&mut self) {
        self.in_pieces = true;
    }

    fn fork(&self) -> Box<dyn Format> {
        Box::new(self.clone())
    }
}
