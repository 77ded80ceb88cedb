//! A block of one call, with the arguments as texts between marks: qwen_coder.rs, glm.rs.

use std::sync::Arc;

use super::blocks::{Block, Progress};
use super::call::ToolCall;
use super::mark::first;
use super::marked_arguments::MarkedArguments;
use super::parameter_types::ParameterTypes;

const OPEN: &str = "<tool_call>";
pub(super) const CLOSE: &str = "</tool_call>";

/// The most bytes of the name of a function or of a parameter.
pub(super) const MAX_NAME: usize = 256;

/// What a format reads next.
pub(super) trait Place: Clone + Default + Send + Sync + 'static {
    /// Reads on, to the end of the call. If the text `is_last`, nothing follows.
    fn read_on(&mut self, call: &mut MarkedCall, text: &str, is_last: bool) -> Result<(), Stop>;
}

/// What ends the reading of a block, for now or for good.
pub(super) enum Stop {
    /// The text goes on.
    More,
    /// The block is no call.
    NoCall,
}

/// A call as far as it was read.
#[derive(Clone, Debug, Default)]
pub(super) struct MarkedCall {
    types: Arc<ParameterTypes>,
    /// The bytes that were read.
    pub end: usize,
    pub name: String,
    arguments: MarkedArguments,
}

impl MarkedCall {
    /// Adds an argument.
    pub(super) fn set(&mut self, name: String, value: &str) {
        let is_text = self.types.is_text(&self.name, &name);
        self.arguments.set(name, value, is_text);
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct MarkedBlock<P> {
    place: P,
    call: MarkedCall,
}

impl<P: Place> MarkedBlock<P> {
    pub(super) fn new(types: Arc<ParameterTypes>) -> Self {
        Self {
            place: P::default(),
            call: MarkedCall {
                types,
                ..MarkedCall::default()
            },
        }
    }
}

impl<P: Place> Block for MarkedBlock<P> {
    const OPENERS: &'static [&'static str] = &[OPEN];

    fn read(&mut self, text: &str, is_last: bool) -> Progress {
        let Self { place, call } = self;
        call.end = call.end.max(OPEN.len());
        match place.read_on(call, text, is_last) {
            Err(Stop::More) => return Progress::More,
            Err(Stop::NoCall) => return Progress::Text(OPEN.len()),
            Ok(()) => {}
        }
        match ToolCall::new(&call.name, &call.arguments.in_json()) {
            Some(of_block) => Progress::Calls(call.end, vec![of_block]),
            None => Progress::Text(OPEN.len()),
        }
    }
}

/// The mark that `text` begins with.
pub(super) fn mark(text: &str, marks: &[&'static str]) -> Result<&'static str, Stop> {
    match first(text, marks) {
        Some(Some(mark)) => Ok(mark),
        Some(None) => Err(Stop::NoCall),
        None => Err(Stop::More),
    }
}
