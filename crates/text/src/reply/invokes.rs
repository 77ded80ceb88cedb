//! Blocks of calls with their arguments between marks, texts as they are and other values as JSON:
//!
//! ```text
//! <minimax:tool_call>                        MiniMax M2
//! <invoke name="weather">
//! <parameter name="city">Oslo</parameter>
//! <parameter name="days">[1, 2]</parameter>
//! </invoke>
//! </minimax:tool_call>
//!
//! <｜DSML｜function_calls>                   DeepSeek V3.2; `tool_calls` in V4
//! <｜DSML｜invoke name="weather">
//! <｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>
//! <｜DSML｜parameter name="days" string="false">[1, 2]</｜DSML｜parameter>
//! </｜DSML｜invoke>
//! </｜DSML｜function_calls>
//! ```
//!
//! Sources: the chat template of MiniMax M2; the encoding that DeepSeek publishes with V3.2; vLLM's parsers of these
//! names.

use std::marker::PhantomData;
use std::sync::Arc;

use super::ToolCall;
use super::blocks::{Block, MarkEnd, Progress};
use super::mark::first;
use super::marked_arguments::MarkedArguments;
use super::parameter_types::ParameterTypes;

/// Behind a name.
const END_OF_NAME: &str = "\">";
/// Between the name of an argument and whether it is a text.
const IS_TEXT: &str = "\" string=\"";

/// The marks of a format.
pub(super) trait InvokeMarks: Clone + Default + Send + Sync + 'static {
    /// Before all calls, and behind them with a slash.
    const OPENERS: &'static [&'static str];
    /// Before the name of a call, and behind the call.
    const CALL: (&'static str, &'static str);
    /// Before the name of an argument, and behind its value.
    const PARAMETER: (&'static str, &'static str);
}

#[derive(Clone, Debug, Default)]
pub(super) struct MiniMax;

impl InvokeMarks for MiniMax {
    const OPENERS: &'static [&'static str] = &["<minimax:tool_call>"];
    const CALL: (&'static str, &'static str) = ("<invoke name=\"", "</invoke>");
    const PARAMETER: (&'static str, &'static str) = ("<parameter name=\"", "</parameter>");
}

#[derive(Clone, Debug, Default)]
pub(super) struct Dsml;

impl InvokeMarks for Dsml {
    const OPENERS: &'static [&'static str] = &["<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"];
    const CALL: (&'static str, &'static str) = ("<｜DSML｜invoke name=\"", "</｜DSML｜invoke>");
    const PARAMETER: (&'static str, &'static str) =
        ("<｜DSML｜parameter name=\"", "</｜DSML｜parameter>");
}

#[derive(Clone, Debug, Default)]
pub(super) struct Invokes<M> {
    types: Arc<ParameterTypes>,
    end: MarkEnd,
    marks: PhantomData<M>,
}

impl<M: InvokeMarks> Invokes<M> {
    pub(super) fn new(types: Arc<ParameterTypes>) -> Self {
        Self {
            types,
            end: MarkEnd::default(),
            marks: PhantomData,
        }
    }

    /// The calls of a whole block, without the marks around it.
    fn calls(&self, mut rest: &str) -> Option<Vec<ToolCall>> {
        let mut calls = Vec::new();
        loop {
            rest = rest.trim_start();
            if rest.is_empty() {
                return Some(calls).filter(|calls| !calls.is_empty());
            }
            let (name, behind) = named(rest, M::CALL.0)?;
            rest = behind.trim_start();
            if rest.starts_with('{') {
                let (arguments, behind) = rest.split_once(M::CALL.1)?;
                calls.push(ToolCall::new(name, arguments)?);
                rest = behind;
                continue;
            }
            let mut arguments = MarkedArguments::default();
            while let Some((parameter, behind)) = named(rest, M::PARAMETER.0) {
                let (value, behind) = behind.split_once(M::PARAMETER.1)?;
                let (parameter, is_text) = match parameter.split_once(IS_TEXT) {
                    Some((parameter, flag)) => (parameter, flag == "true"),
                    None => (parameter, self.types.is_text(name, parameter)),
                };
                arguments.set(parameter.to_owned(), value, is_text);
                rest = behind.trim_start();
            }
            rest = rest.strip_prefix(M::CALL.1)?;
            calls.push(ToolCall::new(name, &arguments.in_json())?);
        }
    }
}

impl<M: InvokeMarks> Block for Invokes<M> {
    const OPENERS: &'static [&'static str] = M::OPENERS;

    fn read(&mut self, text: &str, is_last: bool) -> Progress {
        let opener = M::OPENERS.iter().find(|opener| text.starts_with(**opener));
        let opener = *opener.unwrap_or(&M::OPENERS[0]);
        if first(text[opener.len()..].trim_start(), &[M::CALL.0]) == Some(None) {
            return Progress::Text(opener.len());
        }
        let close = format!("</{}", &opener[1..]);
        let Some((end, num_bytes)) = self.end.scan(text, opener.len(), &close, is_last) else {
            return Progress::More;
        };
        match self.calls(&text[opener.len()..end]) {
            Some(calls) => Progress::Calls(num_bytes, calls),
            None => Progress::Text(opener.len()),
        }
    }
}

/// The name behind a mark, and what follows it.
fn named<'t>(text: &'t str, mark: &str) -> Option<(&'t str, &'t str)> {
    text.strip_prefix(mark)?.split_once(END_OF_NAME)
}
