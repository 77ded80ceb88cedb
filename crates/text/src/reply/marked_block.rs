//! A block of one call, with the arguments as texts between marks: qwen_coder.rs, glm.rs.

use std::marker::PhantomData;
use std::sync::Arc;

use super::blocks::{Block, Progress};
use super::call::ToolCall;
use super::mark::first;
use super::marked_arguments::MarkedArguments;
use super::parameter_types::ParameterTypes;

/// The marks around a block.
pub(super) trait BlockMarks: Clone + Default + Send + Sync + 'static {
    /// The mark before the block.
    const OPENERS: &'static [&'static str];
    /// The mark behind it.
    const CLOSE: &'static str;
}

/// `<tool_call>`, of most models.
#[derive(Clone, Debug, Default)]
pub(super) struct Plain;

impl BlockMarks for Plain {
    const OPENERS: &'static [&'static str] = &["<tool_call>"];
    const CLOSE: &'static str = "</tool_call>";
}

/// `<seed:tool_call>`, of Seed-OSS.
#[derive(Clone, Debug, Default)]
pub(super) struct Seed;

impl BlockMarks for Seed {
    const OPENERS: &'static [&'static str] = &["<seed:tool_call>"];
    const CLOSE: &'static str = "</seed:tool_call>";
}

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
    /// The mark behind the block.
    pub close: &'static str,
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
pub(super) struct MarkedBlock<P, M = Plain> {
    place: P,
    call: MarkedCall,
    marks: PhantomData<M>,
}

impl<P: Place, M: BlockMarks> MarkedBlock<P, M> {
    pub(super) fn new(types: Arc<ParameterTypes>) -> Self {
        Self {
            place: P::default(),
            call: MarkedCall {
                types,
                close: M::CLOSE,
                ..MarkedCall::default()
            },
            marks: PhantomData,
        }
    }
}

impl<P: Place, M: BlockMarks> Block for MarkedBlock<P, M> {
    const OPENERS: &'static [&'static str] = M::OPENERS;

    fn read(&mut self, text: &str, is_last: bool) -> Progress {
        let Self { place, call, .. } = self;
        let open = M::OPENERS[0];
        call.end = call.end.max(open.len());
        match place.read_on(call, text, is_last) {
            Err(Stop::More) => return Progress::More,
            Err(Stop::NoCall) => return Progress::Text(open.len()),
            Ok(()) => {}
        }
        match ToolCall::new(&call.name, &call.arguments.in_json()) {
            Some(of_block) => Progress::Calls(call.end, vec![of_block]),
            None => Progress::Text(open.len()),
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
