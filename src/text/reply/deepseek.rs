//! The calls of DeepSeek V3 and R1, `<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n{...}\n```<｜tool▁call▁end｜>`, and of V3.1,
//! `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`, with a mark before and behind all of them.

use super::blocks::{Block, Progress};
use super::call::ToolCall;
use super::mark::find;

const FIRST: &str = "<｜tool▁calls▁begin｜>";
const LAST: &str = "<｜tool▁calls▁end｜>";
const OPEN: &str = "<｜tool▁call▁begin｜>";
const SEPARATOR: &str = "<｜tool▁sep｜>";
const CLOSE: &str = "<｜tool▁call▁end｜>";

#[derive(Clone, Debug, Default)]
pub(super) struct DeepSeek {
    num_scanned: usize,
}

impl Block for DeepSeek {
    const OPENERS: &'static [&'static str] = &[FIRST, LAST, OPEN];

    fn read(&mut self, text: &str, _is_last: bool) -> Progress {
        if let Some(mark) = [FIRST, LAST].iter().find(|mark| text.starts_with(**mark)) {
            return Progress::Calls(mark.len(), Vec::new());
        }
        let from = self.num_scanned.max(OPEN.len());
        match find(text, from, &[CLOSE, OPEN]) {
            Err(end) => {
                self.num_scanned = end;
                Progress::More
            }
            Ok((end, OPEN)) => Progress::Text(end),
            Ok((end, mark)) => {
                let num_bytes = end + mark.len();
                match call(&text[OPEN.len()..end]) {
                    Some(call) => Progress::Calls(num_bytes, vec![call]),
                    None => Progress::Text(num_bytes),
                }
            }
        }
    }
}

/// The call between two marks.
fn call(inside: &str) -> Option<ToolCall> {
    let (kind, rest) = inside.split_once(SEPARATOR)?;
    if rest.trim_start().starts_with('{') {
        return ToolCall::new(kind.trim(), rest);
    }
    let (name, fenced) = rest.split_once("```json")?;
    let arguments = fenced.trim_end().strip_suffix("```")?;
    ToolCall::new(name.trim(), arguments)
}
