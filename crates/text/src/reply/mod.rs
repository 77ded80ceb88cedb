//! The parts of a reply: what the model thought, what it says, and which functions it calls.
//!
//! ```text
//! text --> Thought: reasoning | rest --> Blocks<MarkedJson>, Llama, ...: calls | content
//!     \--> Harmony: reasoning | calls | content
//!
//! formats.rs  the formats, and the one that a chat template is written for
//! thought.rs  reasoning between two marks, at the beginning
//! blocks.rs   calls behind a mark: marked_json.rs, mistral.rs, marked_list.rs, json_lines.rs, gemma.rs
//!             with arguments between marks, marked_block.rs: qwen_coder.rs, glm.rs
//!             with marks around all calls, sections.rs: deepseek.rs, kimi.rs; invokes.rs
//!             in Python, marked_python.rs
//! llama.rs    calls that are the whole reply; xlam.rs
//! pythonic.rs the same in Python, python.rs
//! harmony.rs  messages of several channels
//! response_marks.rs  marks around what a model says
//! pieces.rs   calls that are given before they are complete
//! function_names.rs  which names of functions can be read back
//! ```
//!
//! Text arrives in pieces of any size, and the parts do not depend on where it is cut. What may be the beginning of a
//! mark or of a call waits; what turns out not to be a call in its format is content. A call is given when it is
//! complete, or in pieces, see [`ReplyReader::in_pieces`]. The text that waits is no longer than the reply, and is read
//! once.

mod blocks;
mod call;
mod deepseek;
mod formats;
mod function_names;
mod gemma;
mod glm;
mod harmony;
mod invokes;
mod json_end;
mod json_lines;
mod kimi;
mod llama;
mod mark;
mod marked_arguments;
mod marked_block;
mod marked_json;
mod marked_list;
mod marked_python;
mod mistral;
mod parameter_types;
mod pieces;
mod python;
mod pythonic;
mod qwen_coder;
mod response_marks;
mod sections;
mod thought;
mod xlam;

pub use call::ToolCall;
pub use formats::{ReplyFormat, Thinking};
pub use function_names::can_be_read_back;
pub use parameter_types::{ParameterTypes, is_text_schema};

/// What a reply consists of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReplyParts {
    /// What it says.
    pub content: String,
    /// What the model thought before.
    pub reasoning: String,
    /// The functions that it calls.
    pub calls: Vec<ToolCall>,
}

impl ReplyParts {
    /// Adds the parts that follow.
    pub fn append(&mut self, next: Self) {
        self.content.push_str(&next.content);
        self.reasoning.push_str(&next.reasoning);
        next.calls.into_iter().for_each(|call| self.add_call(call));
    }

    /// Adds a call, or what is new of the last one.
    fn add_call(&mut self, call: ToolCall) {
        match self.calls.last_mut() {
            Some(last) if !call.begins() => {
                last.arguments.push_str(&call.arguments);
                last.is_whole = call.is_whole;
            }
            _ if !call.begins() && call.arguments.is_empty() && !call.is_whole => {}
            _ => self.calls.push(call),
        }
    }
}

/// Where a reply begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReplyStart {
    /// At its beginning: reasoning may follow.
    #[default]
    Beginning,
    /// Within its reasoning, which the prompt has begun.
    Reasoning,
    /// Within or before its content: the prompt has ended the reasoning.
    Content,
}

/// A format of replies, or of a part of them.
trait Format: Send + Sync {
    /// Reads from the beginning of `text`, which is all that arrived and was not consumed yet, and adds to `parts`.
    /// Returns how many bytes it has consumed: all of them if the text `is_last`.
    fn read(&mut self, text: &str, is_last: bool, parts: &mut ReplyParts) -> usize;

    /// Lets it give calls in pieces, where it can.
    fn give_pieces(&mut self) {}

    /// A copy.
    fn fork(&self) -> Box<dyn Format>;
}

/// Takes a reply apart while it arrives.
pub struct ReplyReader {
    stages: Vec<Stage>,
}

/// A format, and the text that it has not consumed.
struct Stage {
    format: Box<dyn Format>,
    held: String,
}

impl ReplyReader {
    /// A reader whose formats each read the content of the one before.
    fn new(formats: Vec<Box<dyn Format>>) -> Self {
        let stage = |format| Stage {
            format,
            held: String::new(),
        };
        Self {
            stages: formats.into_iter().map(stage).collect(),
        }
    }

    /// Lets it give the arguments of calls as they arrive, in formats that have them as JSON. No piece ends within a
    /// character or an escape, and all of them together are the call as it is given whole. A call that has begun is
    /// one: if what follows is not well-formed, or missing, the call stays as it was given, and that is content.
    pub fn in_pieces(mut self) -> Self {
        let stages = self.stages.iter_mut();
        stages.for_each(|stage| stage.format.give_pieces());
        self
    }

    /// Adds text to the reply, and to `parts` what is certain.
    pub fn push(&mut self, text: &str, parts: &mut ReplyParts) {
        self.read(text, false, parts);
    }

    /// Ends the reply: adds what was held back to `parts`.
    pub fn finish(&mut self, parts: &mut ReplyParts) {
        self.read("", true, parts);
    }

    fn read(&mut self, text: &str, is_last: bool, parts: &mut ReplyParts) {
        let mut content = text.to_owned();
        for stage in &mut self.stages {
            stage.held.push_str(&content);
            let mut found = ReplyParts::default();
            let num_bytes = stage.format.read(&stage.held, is_last, &mut found);
            stage.held.drain(..num_bytes);
            content = std::mem::take(&mut found.content);
            parts.append(found);
        }
        parts.content.push_str(&content);
    }
}

impl Clone for ReplyReader {
    fn clone(&self) -> Self {
        let stage = |stage: &Stage| Stage {
            format: stage.format.fork(),
            held: stage.held.clone(),
        };
        Self {
            stages: self.stages.iter().map(stage).collect(),
        }
    }
}

#[cfg(test)]
mod tests;
