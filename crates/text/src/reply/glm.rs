//! The calls of GLM 4.5 and later: a block a call, with the arguments as texts between marks, on lines of their own or,
//! from GLM 4.7 on, without breaks.
//!
//! ```text
//! <tool_call>weather
//! <arg_key>city</arg_key>
//! <arg_value>Berlin</arg_value>
//! </tool_call>
//! ```
//!
//! Source: the chat templates of GLM-4.5 and GLM-4.7, which write texts as they are and everything else as JSON.

use super::mark::find;
use super::marked_block::{MAX_NAME, MarkedCall, Place, Stop, mark};

const KEY: &str = "<arg_key>";
const KEY_END: &str = "</arg_key>";
const VALUE: &str = "<arg_value>";
const VALUE_END: &str = "</arg_value>";

/// What is read next.
#[derive(Clone, Debug, Default)]
pub(super) enum Glm {
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

impl Place for Glm {
    fn read_on(&mut self, call: &mut MarkedCall, text: &str, _is_last: bool) -> Result<(), Stop> {
        loop {
            let rest = &text[call.end..];
            let trimmed = rest.trim_start();
            let start = text.len() - trimmed.len();
            *self = match self {
                Self::Function => {
                    let end = trimmed.find(['<', '\n']);
                    let name = &trimmed[..end.unwrap_or(trimmed.len())];
                    if name.len() > MAX_NAME || name.starts_with('{') {
                        return Err(Stop::NoCall);
                    }
                    let end = end.ok_or(Stop::More)?;
                    call.name = name.trim_end().to_owned();
                    call.end = start + end;
                    Self::Key
                }
                Self::Key => match mark(trimmed, &[KEY, call.close])? {
                    KEY => {
                        let from = start + KEY.len();
                        let (key_end, _) = find(text, from, &[KEY_END]).map_err(|end| {
                            match end > from + MAX_NAME {
                                true => Stop::NoCall,
                                false => Stop::More,
                            }
                        })?;
                        call.end = key_end + KEY_END.len();
                        Self::BeforeValue(text[from..key_end].trim().to_owned())
                    }
                    _ => {
                        call.end = start + call.close.len();
                        return Ok(());
                    }
                },
                Self::BeforeValue(name) => {
                    mark(trimmed, &[VALUE])?;
                    call.end = start + VALUE.len();
                    Self::Value(std::mem::take(name), call.end)
                }
                Self::Value(name, from) => {
                    let (value_end, _) = find(text, *from, &[VALUE_END]).map_err(|end| {
                        *from = end;
                        Stop::More
                    })?;
                    let value = &text[call.end..value_end];
                    call.set(std::mem::take(name), value);
                    call.end = value_end + VALUE_END.len();
                    Self::Key
                }
            };
        }
    }
}
