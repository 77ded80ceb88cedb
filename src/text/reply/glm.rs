//! The calls of GLM 4.5 and later: a block a call, with the arguments as texts between marks, on lines of their own or, from GLM 4.7 on,
//! without breaks.
//!
//! ```text
//! <tool_call>weather
//! <arg_key>city</arg_key>
//! <arg_value>Berlin</arg_value>
//! </tool_call>
//! ```
//!
//! Source: the chat templates of GLM-4.5 and GLM-4.7, which write texts as they are and everything else as JSON.

use std::sync::Arc;

use super::blocks::{Block, Progress};
use super::call::ToolCall;
use super::mark::find;
use super::marked_arguments::{MAX_NAME, MarkedArguments, Stop, mark};
use super::parameter_types::ParameterTypes;

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";
const KEY: &str = "<arg_key>";
const KEY_END: &str = "</arg_key>";
const VALUE: &str = "<arg_value>";
const VALUE_END: &str = "</arg_value>";

#[derive(Clone, Debug, Default)]
pub(super) struct Glm {
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
    /// The name of the function.
    #[default]
    Function,
    /// The name of an argument, or the end of the block.
    Key,
    /// The mark in front of the value of this argument.
    BeforeValue(String),
    /// The value of this argument. It does not end before this byte.
    Value(String, usize),
}

impl Glm {
    pub(super) fn new(types: Arc<ParameterTypes>) -> Self {
        Self {
            types,
            ..Self::default()
        }
    }

    /// Reads on, to the end of the call.
    fn read_on(&mut self, text: &str) -> Result<(), Stop> {
        loop {
            let rest = &text[self.end..];
            let trimmed = rest.trim_start();
            let start = text.len() - trimmed.len();
            self.place = match &mut self.place {
                Place::Function => {
                    let end = trimmed.find(['<', '\n']);
                    let name = &trimmed[..end.unwrap_or(trimmed.len())];
                    if name.len() > MAX_NAME || name.starts_with('{') {
                        return Err(Stop::NoCall);
                    }
                    let end = end.ok_or(Stop::More)?;
                    self.name = name.trim_end().to_owned();
                    self.end = start + end;
                    Place::Key
                }
                Place::Key => match mark(trimmed, &[KEY, CLOSE])? {
                    KEY => {
                        let from = start + KEY.len();
                        let (key_end, _) = find(text, from, &[KEY_END]).map_err(|end| {
                            match end > from + MAX_NAME {
                                true => Stop::NoCall,
                                false => Stop::More,
                            }
                        })?;
                        self.end = key_end + KEY_END.len();
                        Place::BeforeValue(text[from..key_end].trim().to_owned())
                    }
                    _ => {
                        self.end = start + CLOSE.len();
                        return Ok(());
                    }
                },
                Place::BeforeValue(name) => {
                    mark(trimmed, &[VALUE])?;
                    self.end = start + VALUE.len();
                    Place::Value(std::mem::take(name), self.end)
                }
                Place::Value(name, from) => {
                    let (value_end, _) = find(text, *from, &[VALUE_END]).map_err(|end| {
                        *from = end;
                        Stop::More
                    })?;
                    let is_text = self.types.is_text(&self.name, name);
                    let value = &text[self.end..value_end];
                    self.arguments.set(std::mem::take(name), value, is_text);
                    self.end = value_end + VALUE_END.len();
                    Place::Key
                }
            };
        }
    }
}

impl Block for Glm {
    const OPENERS: &'static [&'static str] = &[OPEN];

    fn read(&mut self, text: &str, _is_last: bool) -> Progress {
        self.end = self.end.max(OPEN.len());
        match self.read_on(text) {
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
