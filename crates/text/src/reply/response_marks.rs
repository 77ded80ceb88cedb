//! Content between `<response>` and `</response>`, as ERNIE 4.5 and X1 write it. The marks and the line breaks within
//! them are left out.
//!
//! Source: the chat template of ERNIE-4.5-21B-A3B-Thinking; vLLM's parsers `ernie45`.

use super::mark::find;
use super::{Format, ReplyParts};

const OPEN: &str = "<response>";
const CLOSE: &str = "</response>";

#[derive(Clone, Debug, Default)]
pub(super) struct ResponseMarks {
    /// Whether the text is in line breaks behind the first mark.
    is_opening: bool,
}

impl Format for ResponseMarks {
    fn read(&mut self, text: &str, is_last: bool, parts: &mut ReplyParts) -> usize {
        let mut rest = text;
        loop {
            if self.is_opening {
                rest = rest.trim_start_matches('\n');
                if rest.is_empty() {
                    break;
                }
                self.is_opening = false;
            }
            match find(rest, 0, &[OPEN, CLOSE]) {
                Ok((end, mark)) => {
                    let content = &rest[..end];
                    parts.content.push_str(match mark {
                        CLOSE => content.trim_end_matches('\n'),
                        _ => content,
                    });
                    rest = &rest[end + mark.len()..];
                    self.is_opening = mark == OPEN;
                }
                Err(_) if is_last => {
                    parts.content.push_str(rest);
                    return text.len();
                }
                Err(end) => {
                    // They may stand before the second mark.
                    let content = rest[..end].trim_end_matches('\n');
                    parts.content.push_str(content);
                    rest = &rest[content.len()..];
                    break;
                }
            }
        }
        text.len() - rest.len()
    }

    fn fork(&self) -> Box<dyn Format> {
        Box::new(self.clone())
    }
}
