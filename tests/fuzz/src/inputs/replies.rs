//! The reply of a model, taken apart. The first byte is the format, the second where the reply begins and the length of
//! the pieces in which it arrives; the rest is the text.

use inflight_config::{ReasoningFormat, ToolCallFormat};
use inflight_text::{ReplyFormat, ReplyParts, ReplyStart};

use super::Input;

const REASONING: [Option<ReasoningFormat>; 7] = [
    None,
    Some(ReasoningFormat::Think),
    Some(ReasoningFormat::DeepSeekR1),
    Some(ReasoningFormat::Mistral),
    Some(ReasoningFormat::SeedOss),
    Some(ReasoningFormat::Granite),
    Some(ReasoningFormat::Harmony),
];

const TOOL_CALLS: [Option<ToolCallFormat>; 8] = [
    None,
    Some(ToolCallFormat::Hermes),
    Some(ToolCallFormat::QwenCoder),
    Some(ToolCallFormat::Llama3),
    Some(ToolCallFormat::Mistral),
    Some(ToolCallFormat::DeepSeek),
    Some(ToolCallFormat::Granite),
    Some(ToolCallFormat::Harmony),
];

const STARTS: [ReplyStart; 3] = [
    ReplyStart::Beginning,
    ReplyStart::Reasoning,
    ReplyStart::Content,
];

/// The parts of a text that arrives in these pieces.
fn parts<'a>(
    format: &ReplyFormat,
    start: ReplyStart,
    pieces: impl Iterator<Item = &'a str>,
) -> ReplyParts {
    let (mut reader, mut parts) = (format.reader(start), ReplyParts::default());
    for piece in pieces {
        reader.push(piece, &mut parts);
    }
    reader.finish(&mut parts);
    parts
}

/// Runs one input.
pub fn run(input: &[u8]) -> Input {
    let [format, place, text @ ..] = input else {
        return Input::Useless;
    };
    let Ok(text) = std::str::from_utf8(text) else {
        return Input::Useless;
    };
    let format = ReplyFormat {
        reasoning: REASONING[usize::from(*format) % REASONING.len()],
        tool_calls: TOOL_CALLS[usize::from(*format) / REASONING.len() % TOOL_CALLS.len()],
    };
    let start = STARTS[usize::from(*place) % STARTS.len()];
    let len = 1 + usize::from(*place) / STARTS.len();
    let ends = text.char_indices().map(|(end, _)| end).step_by(len);
    let ends: Vec<_> = ends.chain([text.len()]).collect();
    let pieces = ends.windows(2).map(|ends| &text[ends[0]..ends[1]]);
    let whole = parts(&format, start, std::iter::once(text));
    assert_eq!(parts(&format, start, pieces), whole);
    assert!(whole.content.len() + whole.reasoning.len() <= text.len());
    Input::Useful
}
