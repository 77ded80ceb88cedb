//! The calls of Qwen3-Coder: a block a call, with the arguments as texts between marks.
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
//! Source: the chat template of Qwen3-Coder-30B-A3B-Instruct. It writes texts as they are and everything else as JSON, so the schema
//! of a function says which an argument is.

use std::sync::Arc;

use super::blocks::{Block, Progress};
use super::call::ToolCall;
use super::mark::{find, first};
use super::marked_arguments::{MAX_NAME, MarkedArguments, Stop, mark};
use super::parameter_types::ParameterTypes;

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";
const FUNCTION: &str = "<function=";
const FUNCTION_END: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const PARAMETER_END: &str = "</parameter>";

#[derive(Clone, Debug, Default)]
pub(super) struct QwenCoder {
    types: Arc<ParameterTypes>,
    /// The bytes that were read.
    end: usize,
    place: Place,
    name: String,
    arguments: MarkedArguments,
}

/// What is read next.
#[derive(Clone, Debug, Default)]
enum Place {
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

impl QwenCoder {
    pub(super) fn new(types: Arc<ParameterTypes>) -> Self {
        Self {
            types,
            ..Self::default()
        }
    }

    /// Reads on, to the end of the call.
    fn read_on(&mut self, text: &str, is_last: bool) -> Result<(), Stop> {
        loop {
            let rest = &text[self.end..];
            let trimmed = rest.trim_start();
            let start = text.len() - trimmed.len();
            self.place = match &mut self.place {
                Place::Function => {
                    mark(trimmed, &[FUNCTION])?;
                    (self.name, self.end) = name(text, start + FUNCTION.len())?;
                    Place::Parameter
                }
                Place::Parameter => match mark(trimmed, &[PARAMETER, FUNCTION_END])? {
                    PARAMETER => {
                        let (name, end) = name(text, start + PARAMETER.len())?;
                        self.end = end;
                        Place::Value(name, end)
                    }
                    _ => {
                        self.end = start + FUNCTION_END.len();
                        Place::Close
                    }
                },
                Place::Value(name, from) => {
                    let (value_end, _) = find(text, *from, &[PARAMETER_END]).map_err(|end| {
                        *from = end;
                        Stop::More
                    })?;
                    let value = &text[self.end..value_end];
                    let value = value.strip_prefix('\n').unwrap_or(value);
                    let value = value.strip_suffix('\n').unwrap_or(value);
                    let is_text = self.types.is_text(&self.name, name);
                    self.arguments.set(std::mem::take(name), value, is_text);
                    self.end = value_end + PARAMETER_END.len();
                    Place::Parameter
                }
                Place::Close => {
                    match first(trimmed, &[CLOSE]) {
                        Some(Some(close)) => self.end = start + close.len(),
                        Some(None) => return Err(Stop::NoCall),
                        None if is_last => self.end = text.len(),
                        None => return Err(Stop::More),
                    }
                    return Ok(());
                }
            };
        }
    }
}

impl Block for QwenCoder {
    const OPENERS: &'static [&'static str] = &[OPEN];

    fn read(&mut self, text: &str, is_last: bool) -> Progress {
        self.end = self.end.max(OPEN.len());
        match self.read_on(text, is_last) {
            Err(Stop::More) => return Progress::More,
            Err(Stop::NoCall) => return Progress::Text(OPEN.len()),
            Ok(()) => {}
        }
        match ToolCall::new(&self.name, &self.arguments.in_json()) {
            Some(call) => Progress::Calls(self.end, vec![call]),
            None => Progress::Text(OPEN.len()),
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
