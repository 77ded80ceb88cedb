//! Calls between special tokens, each with its name before its arguments, and marks before and behind all of them:
//! deepseek.rs, kimi.rs.

use std::marker::PhantomData;

use super::ReplyParts;
use super::blocks::{Block, Progress};
use super::call::ToolCall;
use super::mark::find;
use super::pieces::{CallHead, Pieces};

/// The marks of a format, and what is between the marks of a call.
pub(super) trait Section: Clone + Default + Send + Sync + 'static {
    /// What may begin a block: the mark before all calls, and the mark before one.
    const OPENERS: &'static [&'static str];
    const FIRST: &'static str;
    const LAST: &'static str;
    const OPEN: &'static str;
    const CLOSE: &'static str;

    /// What is in front of the arguments of the call between two marks; its end may be missing.
    fn head(inside: &str) -> Option<CallHead>;

    /// The call between two marks.
    fn call(inside: &str) -> Option<ToolCall>;
}

#[derive(Clone, Debug, Default)]
pub(super) struct Sections<S> {
    num_scanned: usize,
    pieces: Pieces,
    section: PhantomData<S>,
}

impl<S: Section> Block for Sections<S> {
    const OPENERS: &'static [&'static str] = S::OPENERS;

    fn read(&mut self, text: &str, _is_last: bool) -> Progress {
        let around = [S::FIRST, S::LAST];
        if let Some(mark) = around.iter().find(|mark| text.starts_with(**mark)) {
            return Progress::Calls(mark.len(), Vec::new());
        }
        let from = self.num_scanned.max(S::OPEN.len());
        let found = find(text, from, &[S::CLOSE, S::OPEN]);
        self.num_scanned = found.map_or_else(|end| end, |(end, _)| end);
        match found {
            Err(_) => Progress::More,
            Ok((end, mark)) if mark == S::OPEN => Progress::Text(end),
            Ok((end, mark)) => {
                let num_bytes = end + mark.len();
                match S::call(&text[S::OPEN.len()..end]) {
                    Some(call) => Progress::Calls(num_bytes, vec![call]),
                    None => Progress::Text(num_bytes),
                }
            }
        }
    }

    fn give<'b>(&'b mut self, text: &str, parts: &mut ReplyParts) -> Option<&'b mut Pieces> {
        let head = |text: &str| {
            let head = S::head(text.get(S::OPEN.len()..)?)?;
            Some(CallHead {
                start: S::OPEN.len() + head.start,
                ..head
            })
        };
        let inside = &text[..self.num_scanned];
        self.pieces.give(inside, head, parts);
        Some(&mut self.pieces)
    }
}
