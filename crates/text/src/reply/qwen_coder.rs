//! The calls of Qwen3-Coder, and of Seed-OSS in `<seed:tool_call>`: a block a call, with the arguments as texts between
//! marks.
//!
//! ```text
//! <tool_call>
//! <function=weather>
//! <parameter=city>
//! Berlin
//! </parameter>
//! </function>
//! </tool_call>
//! ```
//!
//! Source: the chat template of Qwen3-Coder-30B-A3B-Instruct. It writes texts as they are and everything else as JSON,
//! so the schema of a function says which an argument is.

use super::mark::{find, first};
use super::marked_block::{MAX_NAME, MarkedCall, Place, Stop, mark};

const FUNCTION: &str = "<function=";
const FUNCTION_END: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const PARAMETER_END: &str = "</parameter>";

/// What is read next.
#[derive(Clone, Debug, Default)]
pub(super) enum QwenCoder {
    /// The function.
    #[default]
    Function,
    /// A parameter, or the end of the function.
    Parameter,
    /// The value of this parameter. It does not end before this byte.
    Value(String, usize),
    /// The end of the block.
    Close,
}

impl Place for QwenCoder {
    fn read_on(&mut self, call: &mut MarkedCall, text: &str, is_last: bool) -> Result<(), Stop> {
        loop {
            let rest = &text[call.end..];
            let trimmed = rest.trim_start();
            let start = text.len() - trimmed.len();
            *self = match self {
                Self::Function => {
                    mark(trimmed, &[FUNCTION])?;
                    (call.name, call.end) = name(text, start + FUNCTION.len())?;
                    Self::Parameter
                }
                Self::Parameter => match mark(trimmed, &[PARAMETER, FUNCTION_END])? {
                    PARAMETER => {
                        let (name, end) = name(text, start + PARAMETER.len())?;
                        call.end = end;
                        Self::Value(name, end)
                    }
                    _ => {
                        call.end = start + FUNCTION_END.len();
                        Self::Close
                    }
                },
                Self::Value(name, from) => {
                    let (value_end, _) = find(text, *from, &[PARAMETER_END]).map_err(|end| {
                        *from = end;
                        Stop::More
                    })?;
                    let value = &text[call.end..value_end];
                    let value = value.strip_prefix('\n').unwrap_or(value);
                    let value = value.strip_suffix('\n').unwrap_or(value);
                    call.set(std::mem::take(name), value);
                    call.end = value_end + PARAMETER_END.len();
                    Self::Parameter
                }
                Self::Close => {
                    match first(trimmed, &[call.close]) {
                        Some(Some(close)) => call.end = start + close.len(),
                        Some(None) => return Err(Stop::NoCall),
                        None if is_last => call.end = text.len(),
                        None => return Err(Stop::More),
                    }
                    return Ok(());
                }
            };
        }
    }
}

/// The name at byte `start`, and where the mark that it is in ends.
fn name(text: &str, start: usize) -> Result<(String, usize), Stop> {
    let rest = &text[start..];
    let end = rest.find(['>', '\n', '<']);
    match end {
        Some(end) if end <= MAX_NAME && rest[end..].starts_with('>') => {
            Ok((rest[..end].to_owned(), start + end + 1))
        }
        None if rest.len() <= MAX_NAME => Err(Stop::More),
        _ => Err(Stop::NoCall),
    }
}
