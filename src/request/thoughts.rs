//! Guides of replies that may begin with reasoning: the model thinks freely, and what is guided begins behind the
//! thought.

use inflight_config::ToolCallFormat;
use inflight_guidance::{GuideSpec, Structure};
use inflight_text::{ReplyFormat, ReplyStart, Thinking};

/// A reply behind the reasoning that may come before it.
pub(super) fn behind_thoughts(reply: Structure, thinking: Thinking) -> Structure {
    let breaks = Structure::Or(vec![text("\n\n"), text("\n")]);
    let up_to = |mark: &str| {
        let breaks = Structure::Optional(Box::new(breaks));
        vec![Structure::AnyText, text(mark), breaks]
    };
    let thoughts = match thinking {
        Thinking::Never => return reply,
        Thinking::Begun(end) => Structure::Sequence(up_to(end)),
        Thinking::Perhaps(start, end) => {
            let thoughts = [vec![text(start)], up_to(end)].concat();
            Structure::Optional(Box::new(Structure::Sequence(thoughts)))
        }
    };
    Structure::Sequence(vec![thoughts, reply])
}

/// The guide of a reply that begins at `start` and whose content is guided, in an answer that takes replies of this
/// format apart. A guide that writes the marks of thoughts itself is for the whole reply.
pub(super) fn guided_content(
    guide: GuideSpec,
    format: ReplyFormat,
    start: ReplyStart,
) -> GuideSpec {
    let thinking = format.thinking(start);
    let header = format.content_header(start);
    let is_whole = thinking == Thinking::Never && header.is_none();
    if is_whole || format.thought_marks().iter().any(|mark| guide.names(mark)) {
        return guide;
    }
    let content = guide.into_structure();
    let content = match header {
        None => content,
        Some(header) => Structure::Sequence(vec![text(header), content]),
    };
    GuideSpec::Structure(behind_thoughts(content, thinking))
}

/// How a reply with guided content is taken apart, in a model with this format of replies. What looks like a call in
/// JSON of the client's own schema is content.
pub(super) fn format_of_guided(guide: &GuideSpec, format: ReplyFormat) -> ReplyFormat {
    let is_data = matches!(
        guide,
        GuideSpec::Json | GuideSpec::JsonObject | GuideSpec::JsonSchema(_)
    );
    // Messages of channels are read as they are.
    let has_calls = |calls: &ToolCallFormat| !is_data || *calls == ToolCallFormat::Harmony;
    ReplyFormat {
        tool_calls: format.tool_calls.filter(has_calls),
        ..format
    }
}

fn text(text: &str) -> Structure {
    Structure::Text(text.to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::request::guide_toys::Toy;
    use inflight_config::ReasoningFormat;
    use inflight_text::ReplyParts;

    const THINK: ReplyFormat = ReplyFormat {
        reasoning: Some(ReasoningFormat::Think),
        tool_calls: None,
    };

    /// Guides of every kind, each with a text that it allows.
    fn guides() -> Vec<(GuideSpec, &'static str)> {
        vec![
            (GuideSpec::JsonSchema(json!({"enum": [7]})), "7"),
            (GuideSpec::Json, "[1]"),
            (GuideSpec::JsonObject, "{}"),
            (
                GuideSpec::Choice(vec!["a".to_owned(), "<b>".to_owned()]),
                "<b>",
            ),
            (GuideSpec::Regex("x{2}".to_owned()), "xx"),
            (GuideSpec::Grammar("root ::= \"y\"+".to_owned()), "yyy"),
            (GuideSpec::Grammar("start: \"z\"".to_owned()), "z"),
            (
                GuideSpec::Structure(Structure::Sequence(vec![
                    Structure::Text("<t>".to_owned()),
                    Structure::AnyText,
                ])),
                "<t>any",
            ),
        ]
    }

    /// A reply, read in two pieces that meet at every place.
    fn read(format: ReplyFormat, start: ReplyStart, text: &str) -> ReplyParts {
        let whole = |cut: usize| {
            let mut reader = format.reader(start);
            let mut parts = ReplyParts::default();
            reader.push(&text[..cut], &mut parts);
            reader.push(&text[cut..], &mut parts);
            reader.finish(&mut parts);
            parts
        };
        let parts = whole(0);
        let cuts = (0..text.len()).filter(|cut| text.is_char_boundary(*cut));
        cuts.for_each(|cut| assert_eq!(whole(cut), parts, "{text} cut at {cut}"));
        parts
    }

    #[test]
    fn every_kind_of_guide_begins_behind_the_thought_and_is_the_content() {
        let toy = Toy::new();
        for (guide, content) in guides() {
            for start in [
                ReplyStart::Beginning,
                ReplyStart::Reasoning,
                ReplyStart::Content,
            ] {
                let compiled = toy.guide(guided_content(guide.clone(), THINK, start));
                let open = if start == ReplyStart::Beginning {
                    "<think>\n"
                } else {
                    ""
                };
                let thought = format!("{open}I {{\"think\"}}.\n</think>\n\n{content}");
                let thinks = start != ReplyStart::Content;
                let is_plain = start != ReplyStart::Reasoning;
                assert_eq!(
                    toy.allows(&compiled, &thought),
                    thinks,
                    "{guide:?} {start:?}"
                );
                assert_eq!(
                    toy.allows(&compiled, content),
                    is_plain,
                    "{guide:?} {start:?}"
                );
                let unfinished = format!("{open}I think");
                assert!(!toy.allows(&compiled, &unfinished), "{guide:?} {start:?}");
                if thinks {
                    let parts = read(THINK, start, &thought);
                    assert_eq!(parts.content, content);
                    assert_eq!(parts.reasoning, "I {\"think\"}.");
                }
                if is_plain {
                    assert_eq!(read(THINK, start, content).content, content);
                }
            }
        }
    }

    #[test]
    fn the_content_of_harmony_is_guided_in_its_final_message() {
        let toy = Toy::new();
        let header = "<|channel|>final<|message|>";
        let thought = "<|channel|>analysis<|message|>so<|end|><|start|>assistant";
        let both = [Some(ReasoningFormat::Harmony), None];
        for (reasoning, (guide, content)) in both
            .into_iter()
            .flat_map(|it| guides().into_iter().map(move |guide| (it, guide)))
        {
            let format = ReplyFormat {
                reasoning,
                tool_calls: Some(ToolCallFormat::Harmony),
            };
            let start = ReplyStart::Beginning;
            let compiled = toy.guide(guided_content(guide.clone(), format, start));
            let plain = format!("{header}{content}");
            let whole = format!("{thought}{plain}");
            assert!(toy.allows(&compiled, &plain), "{guide:?}");
            assert_eq!(
                toy.allows(&compiled, &whole),
                reasoning.is_some(),
                "{guide:?}"
            );
            assert!(!toy.allows(&compiled, content), "{guide:?}");
            assert_eq!(read(format, start, &plain).content, content);
            if reasoning.is_some() {
                let parts = read(format, start, &whole);
                assert_eq!((&*parts.content, &*parts.reasoning), (content, "so"));
            }
        }
    }

    #[test]
    fn guided_data_that_looks_like_a_call_is_content() {
        let call = "{\"name\": \"f\", \"parameters\": {}}";
        let mark = "[\"<tool_call>\\n{\\\"name\\\": 1}\"]";
        let schema = GuideSpec::JsonSchema(json!({}));
        let regex = GuideSpec::Regex(".*".to_owned());
        for (calls, content) in [
            (ToolCallFormat::Llama3, call),
            (ToolCallFormat::Hermes, mark),
        ] {
            let format = ReplyFormat {
                reasoning: None,
                tool_calls: Some(calls),
            };
            let start = ReplyStart::Beginning;
            let parts = read(format_of_guided(&schema, format), start, content);
            assert_eq!((&*parts.content, parts.calls.len()), (content, 0));
            assert_eq!(format_of_guided(&regex, format), format);
        }
    }

    #[test]
    fn a_guide_that_writes_the_marks_of_thoughts_is_for_the_whole_reply() {
        let thought = "<think>\nso\n</think>\n\n7".to_owned();
        let tag = Structure::Tag(inflight_guidance::Tag {
            begin: "<think>".to_owned(),
            content: Box::new(Structure::AnyText),
            ends: vec!["</think>".to_owned()],
        });
        for guide in [
            GuideSpec::Choice(vec!["7".to_owned(), thought.clone()]),
            GuideSpec::Regex(r"(?s)<think>.*</think>\s*[0-9]".to_owned()),
            GuideSpec::Grammar("root ::= \"<think>\" [^<]* \"</think>\" [0-9]".to_owned()),
            GuideSpec::Structure(Structure::Sequence(vec![tag, Structure::AnyText])),
        ] {
            assert_eq!(
                guided_content(guide.clone(), THINK, ReplyStart::Beginning),
                guide
            );
        }
    }

    #[test]
    fn a_guide_is_for_the_whole_output_where_no_reasoning_is_taken_out() {
        for (guide, _) in guides() {
            let format = ReplyFormat::default();
            let found = guided_content(guide.clone(), format, ReplyStart::Beginning);
            assert_eq!(found, guide);
        }
    }
}
