//! The formats of replies by name, and the one that a chat template is written for.

use std::sync::Arc;

use super::blocks::Blocks;
use super::deepseek::DeepSeek;
use super::gemma::{Braces, FunctionGemma, Gemma4};
use super::glm::Glm;
use super::harmony::{Harmony, HarmonyParts};
use super::invokes::{Dsml, Invokes, MiniMax};
use super::json_lines::JsonLines;
use super::kimi::Kimi;
use super::llama::Llama;
use super::marked_block::{MarkedBlock, Seed};
use super::marked_json::{GigaChat, Granite20b, Hermes, InternLm, LongCat, MarkedJson};
use super::marked_list::{Apertus, Command, Granite, Hunyuan, MarkedList, Nemotron};
use super::marked_python::{Lfm2, MarkedPython, Olmo3};
use super::mistral::Mistral;
use super::parameter_types::ParameterTypes;
use super::pythonic::Pythonic;
use super::qwen_coder::QwenCoder;
use super::response_marks::ResponseMarks;
use super::sections::Sections;
use super::thought::{Thought, ThoughtMarks};
use super::xlam::XLam;
use super::{Format, ReplyReader, ReplyStart};
use inflight_config::{ReasoningFormat, ReplyParser, ToolCallFormat};

/// How the replies of a model are taken apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplyFormat {
    /// How reasoning is written; `None` if it is content.
    pub reasoning: Option<ReasoningFormat>,
    /// How calls are written; `None` if they are content.
    pub tool_calls: Option<ToolCallFormat>,
}

/// The reasoning that a reply may begin with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Thinking {
    /// No reasoning.
    Never,
    /// No reasoning, or some between these marks.
    Perhaps(&'static str, &'static str),
    /// Some, up to this mark.
    Begun(&'static str),
}

impl ReplyFormat {
    /// The format that the parameters of a model name, or else the one of its chat templates.
    pub fn new<'a>(
        reasoning: ReplyParser<ReasoningFormat>,
        tool_calls: ReplyParser<ToolCallFormat>,
        templates: impl Iterator<Item = &'a str> + Clone,
    ) -> Self {
        Self {
            reasoning: match reasoning {
                ReplyParser::Auto => templates.clone().find_map(reasoning_of),
                ReplyParser::None => None,
                ReplyParser::Named(format) => Some(format),
            },
            tool_calls: match tool_calls {
                ReplyParser::Auto => templates.clone().find_map(tool_calls_of),
                ReplyParser::None => None,
                ReplyParser::Named(format) => Some(format),
            },
        }
    }

    /// Where the reply to a prompt begins.
    pub fn start_after(&self, prompt: &str) -> ReplyStart {
        let Some(marks) = self.reasoning.and_then(marks) else {
            return ReplyStart::Beginning;
        };
        let prompt = prompt.trim_end();
        if prompt.ends_with(marks.start) {
            ReplyStart::Reasoning
        } else if prompt.ends_with(marks.end) {
            ReplyStart::Content
        } else {
            ReplyStart::Beginning
        }
    }

    /// Where the reply begins that continues a message with this content.
    pub fn start_within(&self, content: &str) -> ReplyStart {
        let Some(marks) = self.reasoning.and_then(marks) else {
            return ReplyStart::Content;
        };
        match (content.rfind(marks.start), content.rfind(marks.end)) {
            (Some(start), Some(end)) if start > end => ReplyStart::Reasoning,
            (Some(_), None) => ReplyStart::Reasoning,
            _ => ReplyStart::Content,
        }
    }

    /// The reasoning of a reply that begins at `start`.
    pub fn thinking(&self, start: ReplyStart) -> Thinking {
        if self.reasoning == Some(ReasoningFormat::Harmony) {
            const FIRST: &str = "<|channel|>analysis<|message|>";
            const LAST: &str = "<|end|><|start|>assistant";
            return match start {
                ReplyStart::Beginning => Thinking::Perhaps(FIRST, LAST),
                ReplyStart::Reasoning => Thinking::Begun(LAST),
                ReplyStart::Content => Thinking::Never,
            };
        }
        let Some(marks) = self.reasoning.and_then(marks) else {
            return Thinking::Never;
        };
        match start {
            ReplyStart::Content => Thinking::Never,
            ReplyStart::Beginning if !marks.is_assumed => Thinking::Perhaps(marks.start, marks.end),
            _ => Thinking::Begun(marks.end),
        }
    }

    /// What stands before the content of a reply that begins at `start`, behind its reasoning.
    pub fn content_header(&self, start: ReplyStart) -> Option<&'static str> {
        let is_harmony = self.reasoning == Some(ReasoningFormat::Harmony)
            || self.tool_calls == Some(ToolCallFormat::Harmony);
        (is_harmony && start != ReplyStart::Content).then_some("<|channel|>final<|message|>")
    }

    /// A reader of replies that begin at `start`, whose calls have texts as arguments where the format does not show
    /// what they are.
    pub fn reader(&self, start: ReplyStart) -> ReplyReader {
        self.reader_with(start, &Arc::default())
    }

    /// The same, with arguments of these types.
    pub fn reader_with(&self, start: ReplyStart, types: &Arc<ParameterTypes>) -> ReplyReader {
        let mut formats: Vec<Box<dyn Format>> = Vec::new();
        let wanted = HarmonyParts {
            reasoning: self.reasoning == Some(ReasoningFormat::Harmony),
            calls: self.tool_calls == Some(ToolCallFormat::Harmony),
        };
        if wanted.reasoning || wanted.calls {
            formats.push(Box::new(Harmony::new(wanted, start)));
        }
        if let Some(marks) = self.reasoning.and_then(marks) {
            formats.push(Box::new(Thought::new(marks, start)));
        }
        match self.tool_calls {
            None | Some(ToolCallFormat::Harmony) => {}
            Some(ToolCallFormat::Hermes) => {
                formats.push(Box::new(Blocks::<MarkedJson<Hermes>>::default()));
            }
            Some(ToolCallFormat::Ernie) => {
                formats.push(Box::new(ResponseMarks::default()));
                formats.push(Box::new(Blocks::<MarkedJson<Hermes>>::default()));
            }
            Some(ToolCallFormat::LongCat) => {
                formats.push(Box::new(Blocks::<MarkedJson<LongCat>>::default()));
            }
            Some(ToolCallFormat::InternLm) => {
                formats.push(Box::new(Blocks::<MarkedJson<InternLm>>::default()));
            }
            Some(ToolCallFormat::Granite20b) => {
                formats.push(Box::new(Blocks::<MarkedJson<Granite20b>>::default()));
            }
            Some(ToolCallFormat::GigaChat) => {
                formats.push(Box::new(Blocks::<MarkedJson<GigaChat>>::default()));
            }
            Some(ToolCallFormat::MiniMaxM1) => {
                formats.push(Box::new(Blocks::<JsonLines>::default()));
            }
            Some(ToolCallFormat::XLam) => formats.push(Box::new(XLam::default())),
            Some(ToolCallFormat::SeedOss) => {
                let block = MarkedBlock::<QwenCoder, Seed>::new(Arc::clone(types));
                formats.push(Box::new(Blocks::new(block)));
            }
            Some(ToolCallFormat::QwenCoder) => {
                let block = MarkedBlock::<QwenCoder>::new(Arc::clone(types));
                formats.push(Box::new(Blocks::new(block)));
            }
            Some(ToolCallFormat::Mistral) => formats.push(Box::new(Blocks::<Mistral>::default())),
            Some(ToolCallFormat::Granite) => {
                formats.push(Box::new(Blocks::<MarkedList<Granite>>::default()));
            }
            Some(ToolCallFormat::Hunyuan) => {
                formats.push(Box::new(Blocks::<MarkedList<Hunyuan>>::default()));
            }
            Some(ToolCallFormat::Nemotron) => {
                formats.push(Box::new(Blocks::<MarkedList<Nemotron>>::default()));
            }
            Some(ToolCallFormat::Command) => {
                formats.push(Box::new(Blocks::<MarkedList<Command>>::default()));
            }
            Some(ToolCallFormat::Apertus) => {
                formats.push(Box::new(Blocks::<MarkedList<Apertus>>::default()));
            }
            Some(ToolCallFormat::Gemma4) => {
                formats.push(Box::new(Blocks::<Braces<Gemma4>>::default()));
            }
            Some(ToolCallFormat::FunctionGemma) => {
                formats.push(Box::new(Blocks::<Braces<FunctionGemma>>::default()));
            }
            Some(ToolCallFormat::DeepSeek) => {
                formats.push(Box::new(Blocks::<Sections<DeepSeek>>::default()));
            }
            Some(ToolCallFormat::Kimi) => {
                formats.push(Box::new(Blocks::<Sections<Kimi>>::default()));
            }
            Some(ToolCallFormat::Glm) => {
                let block = MarkedBlock::<Glm>::new(Arc::clone(types));
                formats.push(Box::new(Blocks::new(block)));
            }
            Some(ToolCallFormat::Llama3) => formats.push(Box::new(Llama::default())),
            Some(ToolCallFormat::Pythonic) => formats.push(Box::new(Pythonic::default())),
            Some(ToolCallFormat::Lfm2) => {
                formats.push(Box::new(Blocks::<MarkedPython<Lfm2>>::default()));
            }
            Some(ToolCallFormat::Olmo3) => {
                formats.push(Box::new(Blocks::<MarkedPython<Olmo3>>::default()));
            }
            Some(ToolCallFormat::MiniMax) => {
                let block = Invokes::<MiniMax>::new(Arc::clone(types));
                formats.push(Box::new(Blocks::new(block)));
            }
            Some(ToolCallFormat::Dsml) => {
                let block = Invokes::<Dsml>::new(Arc::clone(types));
                formats.push(Box::new(Blocks::new(block)));
            }
        }
        ReplyReader::new(formats)
    }

    /// Whether the types of arguments are only in the schemas of functions, see [`ReplyFormat::reader_with`].
    pub fn needs_parameter_types(&self) -> bool {
        matches!(
            self.tool_calls,
            Some(
                ToolCallFormat::QwenCoder
                    | ToolCallFormat::SeedOss
                    | ToolCallFormat::Glm
                    | ToolCallFormat::MiniMax
            )
        )
    }

    /// The texts around reasoning.
    pub fn thought_marks(&self) -> Vec<&'static str> {
        let is_harmony = self.reasoning == Some(ReasoningFormat::Harmony)
            || self.tool_calls == Some(ToolCallFormat::Harmony);
        match self.reasoning.and_then(marks) {
            Some(marks) => vec![marks.start, marks.end],
            None if is_harmony => vec!["<|channel|>"],
            None => Vec::new(),
        }
    }

    /// The texts that the format is made of. Where they are special tokens, they must be in the text that a reader
    /// gets.
    pub fn marks(&self) -> Vec<&'static str> {
        let mut all = Vec::new();
        if let Some(marks) = self.reasoning.and_then(marks) {
            all.extend([marks.start, marks.end]);
        }
        let is_harmony = self.reasoning == Some(ReasoningFormat::Harmony)
            || self.tool_calls == Some(ToolCallFormat::Harmony);
        if is_harmony {
            all.extend([
                "<|start|>",
                "<|channel|>",
                "<|constrain|>",
                "<|message|>",
                "<|end|>",
                "<|call|>",
                "<|return|>",
            ]);
        }
        all.extend_from_slice(match self.tool_calls {
            None | Some(ToolCallFormat::Harmony) => &[],
            Some(ToolCallFormat::Hermes) => &["<tool_call>", "</tool_call>"],
            Some(ToolCallFormat::Ernie) => {
                &["<tool_call>", "</tool_call>", "<response>", "</response>"]
            }
            Some(ToolCallFormat::LongCat) => &["<longcat_tool_call>", "</longcat_tool_call>"],
            Some(ToolCallFormat::InternLm) => &["<|action_start|>", "<|plugin|>", "<|action_end|>"],
            Some(ToolCallFormat::Granite20b) => &["<function_call>"],
            Some(ToolCallFormat::GigaChat) => &[
                "function call<|role_sep|>",
                "<|role_sep|>",
                "<|function_call|>",
            ],
            Some(ToolCallFormat::MiniMaxM1) => &["<tool_calls>", "</tool_calls>"],
            Some(ToolCallFormat::XLam) => &[
                "[TOOL_CALLS]",
                "<tool_call>",
                "</tool_call>",
                "```json",
                "```",
            ],
            Some(ToolCallFormat::SeedOss) => &[
                "<seed:tool_call>",
                "<function=",
                "<parameter=",
                "</parameter>",
                "</function>",
                "</seed:tool_call>",
            ],
            Some(ToolCallFormat::QwenCoder) => &[
                "<tool_call>",
                "<function=",
                "<parameter=",
                "</parameter>",
                "</function>",
                "</tool_call>",
            ],
            Some(ToolCallFormat::Mistral) => &["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"],
            Some(ToolCallFormat::Granite) => &["<|tool_call|>", "<|/tool_call|>"],
            Some(ToolCallFormat::Hunyuan) => &["<tool_calls>", "</tool_calls>"],
            Some(ToolCallFormat::Nemotron) => &["<TOOLCALL>", "</TOOLCALL>"],
            Some(ToolCallFormat::Command) => &["<|START_ACTION|>", "<|END_ACTION|>"],
            Some(ToolCallFormat::Apertus) => &["<|tools_prefix|>", "<|tools_suffix|>"],
            Some(ToolCallFormat::Gemma4) => &["<|tool_call>", "<tool_call|>", "<|\"|>"],
            Some(ToolCallFormat::FunctionGemma) => {
                &["<start_function_call>", "<end_function_call>", "<escape>"]
            }
            Some(ToolCallFormat::Dsml) => &[
                // The special token in the other marks.
                "｜DSML｜",
                "<｜DSML｜function_calls>",
                "</｜DSML｜function_calls>",
                "<｜DSML｜tool_calls>",
                "</｜DSML｜tool_calls>",
                "<｜DSML｜invoke name=\"",
                "<｜DSML｜parameter name=\"",
                "</｜DSML｜parameter>",
                "</｜DSML｜invoke>",
            ],
            Some(ToolCallFormat::Llama3) => &["<|python_tag|>"],
            Some(ToolCallFormat::Pythonic) => &["<|python_start|>", "<|python_end|>"],
            Some(ToolCallFormat::Lfm2) => &["<|tool_call_start|>", "<|tool_call_end|>"],
            Some(ToolCallFormat::Olmo3) => &["<function_calls>", "</function_calls>"],
            Some(ToolCallFormat::MiniMax) => &[
                "<minimax:tool_call>",
                "<invoke name=\"",
                "<parameter name=\"",
                "</parameter>",
                "</invoke>",
                "</minimax:tool_call>",
            ],
            Some(ToolCallFormat::Glm) => &[
                "<tool_call>",
                "<arg_key>",
                "</arg_key>",
                "<arg_value>",
                "</arg_value>",
                "</tool_call>",
            ],
            Some(ToolCallFormat::Kimi) => &[
                "<|tool_calls_section_begin|>",
                "<|tool_calls_section_end|>",
                "<|tool_call_begin|>",
                "<|tool_call_argument_begin|>",
                "<|tool_call_end|>",
            ],
            Some(ToolCallFormat::DeepSeek) => &[
                "<｜tool▁calls▁begin｜>",
                "<｜tool▁calls▁end｜>",
                "<｜tool▁call▁begin｜>",
                "<｜tool▁sep｜>",
                "<｜tool▁call▁end｜>",
            ],
        });
        all
    }
}

/// The marks around reasoning, where there are two.
fn marks(format: ReasoningFormat) -> Option<ThoughtMarks> {
    let (start, end, is_assumed) = match format {
        ReasoningFormat::Think => ("<think>", "</think>", false),
        ReasoningFormat::DeepSeekR1 => ("<think>", "</think>", true),
        ReasoningFormat::Mistral => ("[THINK]", "[/THINK]", false),
        ReasoningFormat::SeedOss => ("<seed:think>", "</seed:think>", false),
        ReasoningFormat::Command => ("<|START_THINKING|>", "<|END_THINKING|>", false),
        ReasoningFormat::Apertus => ("<|inner_prefix|>", "<|inner_suffix|>", false),
        ReasoningFormat::Gemma4 => ("<|channel>thought", "<channel|>", false),
        ReasoningFormat::Granite => ("Here is my thought process:", "Here is my response:", false),
        ReasoningFormat::Harmony => return None,
    };
    Some(ThoughtMarks {
        start,
        end,
        is_assumed,
    })
}

/// The format of reasoning that a template is written for.
fn reasoning_of(template: &str) -> Option<ReasoningFormat> {
    let has = |mark: &str| template.contains(mark);
    if has("<|channel|>analysis") {
        return Some(ReasoningFormat::Harmony);
    }
    let formats = [
        ("[THINK]", ReasoningFormat::Mistral),
        ("</seed:think>", ReasoningFormat::SeedOss),
        ("<|END_THINKING|>", ReasoningFormat::Command),
        ("<|inner_suffix|>", ReasoningFormat::Apertus),
        ("<|channel>thought", ReasoningFormat::Gemma4),
        ("</think>", ReasoningFormat::Think),
        ("Here is my thought process:", ReasoningFormat::Granite),
    ];
    let format = formats.iter().find(|(mark, _)| has(mark));
    format.map(|(_, format)| *format)
}

/// The format of calls that a template is written for.
fn tool_calls_of(template: &str) -> Option<ToolCallFormat> {
    let has = |mark: &str| template.contains(mark);
    if has("<|channel|>commentary") {
        return Some(ToolCallFormat::Harmony);
    }
    if has("<tool_call>") && has("</tool_call>") {
        // The formats with the same marks around other texts than JSON.
        if has("<function=") && has("<parameter=") {
            return Some(ToolCallFormat::QwenCoder);
        }
        if has("<arg_key>") {
            return Some(ToolCallFormat::Glm);
        }
        if has("<response>") {
            return Some(ToolCallFormat::Ernie);
        }
        if !has("<function=") {
            return Some(ToolCallFormat::Hermes);
        }
    }
    let is_olmo = has("<function_calls>") && !has("<invoke");
    if is_olmo {
        return Some(ToolCallFormat::Olmo3);
    }
    let formats = [
        ("<minimax:tool_call>", ToolCallFormat::MiniMax),
        ("<seed:tool_call>", ToolCallFormat::SeedOss),
        ("<longcat_tool_call>", ToolCallFormat::LongCat),
        ("<|action_start|><|plugin|>", ToolCallFormat::InternLm),
        ("function call<|role_sep|>", ToolCallFormat::GigaChat),
        ("<|function_call|>", ToolCallFormat::GigaChat),
        ("｜DSML｜", ToolCallFormat::Dsml),
        ("<|START_ACTION|>", ToolCallFormat::Command),
        ("<|tools_prefix|>", ToolCallFormat::Apertus),
        ("<start_function_call>", ToolCallFormat::FunctionGemma),
        ("<tool_call|>", ToolCallFormat::Gemma4),
        ("</tool_calls>", ToolCallFormat::Hunyuan),
        ("<TOOLCALL>", ToolCallFormat::Nemotron),
        ("<|tool_call_start|>", ToolCallFormat::Lfm2),
        // The template of LFM2 names tools by this mark, and leaves the mark of calls to the model.
        ("<|tool_list_start|>", ToolCallFormat::Lfm2),
        ("<｜tool▁call▁begin｜>", ToolCallFormat::DeepSeek),
        ("[TOOL_CALLS]", ToolCallFormat::Mistral),
        ("<|tool_call|>", ToolCallFormat::Granite),
        ("<|tool_calls_section_begin|>", ToolCallFormat::Kimi),
        // The words of Meta's instructions for Llama 4.
        ("func_name1(params_name1=", ToolCallFormat::Pythonic),
    ];
    if let Some((_, format)) = formats.iter().find(|(mark, _)| has(mark)) {
        return Some(*format);
    }
    let has_header = has("<|start_header_id|>") || has("<|header_start|>");
    let is_llama = has_header && (has("<|python_tag|>") || has("\"parameters\""));
    is_llama.then_some(ToolCallFormat::Llama3)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ReplyStart::{Beginning, Content, Reasoning};

    const HARMONY_MARKS: [&str; 7] = [
        "<|start|>",
        "<|channel|>",
        "<|constrain|>",
        "<|message|>",
        "<|end|>",
        "<|call|>",
        "<|return|>",
    ];

    fn format(
        reasoning: Option<ReasoningFormat>,
        tool_calls: Option<ToolCallFormat>,
    ) -> ReplyFormat {
        ReplyFormat {
            reasoning,
            tool_calls,
        }
    }

    #[test]
    fn a_reply_has_the_reasoning_that_its_prompt_leaves_to_it() {
        use ReasoningFormat::{DeepSeekR1, Harmony, Think};
        use Thinking::{Begun, Never, Perhaps};
        let analysis = "<|channel|>analysis<|message|>";
        let next = "<|end|><|start|>assistant";
        for (reasoning, start, expected) in [
            (None, Beginning, Never),
            (None, Reasoning, Never),
            (Some(Think), Beginning, Perhaps("<think>", "</think>")),
            (Some(Think), Reasoning, Begun("</think>")),
            (Some(Think), Content, Never),
            (Some(DeepSeekR1), Beginning, Begun("</think>")),
            (Some(DeepSeekR1), Content, Never),
            (Some(Harmony), Beginning, Perhaps(analysis, next)),
            (Some(Harmony), Reasoning, Begun(next)),
            (Some(Harmony), Content, Never),
        ] {
            let format = format(reasoning, Some(ToolCallFormat::Hermes));
            assert_eq!(format.thinking(start), expected, "{reasoning:?}, {start:?}");
        }
    }

    #[test]
    fn only_messages_of_channels_have_a_header() {
        let header = Some("<|channel|>final<|message|>");
        let harmony = [
            format(Some(ReasoningFormat::Harmony), None),
            format(None, Some(ToolCallFormat::Harmony)),
            format(
                Some(ReasoningFormat::Harmony),
                Some(ToolCallFormat::Harmony),
            ),
        ];
        for format in harmony {
            assert_eq!(format.content_header(Beginning), header, "{format:?}");
            assert_eq!(format.content_header(Reasoning), header, "{format:?}");
            assert_eq!(format.content_header(Content), None, "{format:?}");
            assert_eq!(format.marks(), HARMONY_MARKS, "{format:?}");
            assert_eq!(format.thought_marks(), ["<|channel|>"], "{format:?}");
        }
        for reasoning in [None, Some(ReasoningFormat::Think)] {
            for tool_calls in [None, Some(ToolCallFormat::Hermes)] {
                let format = format(reasoning, tool_calls);
                for start in [Beginning, Reasoning, Content] {
                    assert_eq!(format.content_header(start), None, "{format:?}");
                }
            }
        }
    }

    #[test]
    fn marks_are_of_reasoning_and_of_calls() {
        let both = format(Some(ReasoningFormat::Mistral), Some(ToolCallFormat::Llama3));
        assert_eq!(both.marks(), ["[THINK]", "[/THINK]", "<|python_tag|>"]);
        assert_eq!(both.thought_marks(), ["[THINK]", "[/THINK]"]);
        let calls = format(None, Some(ToolCallFormat::Hermes));
        assert_eq!(calls.marks(), ["<tool_call>", "</tool_call>"]);
        assert!(calls.thought_marks().is_empty());
        let mixed = format(Some(ReasoningFormat::Think), Some(ToolCallFormat::Harmony));
        assert_eq!(mixed.marks()[..2], ["<think>", "</think>"]);
        assert_eq!(mixed.marks()[2..], HARMONY_MARKS);
        assert!(ReplyFormat::default().marks().is_empty());
    }

    #[test]
    fn texts_between_marks_need_the_types_of_parameters() {
        use ToolCallFormat::{Glm, Hermes, Pythonic, QwenCoder};
        for (tool_calls, expected) in [
            (None, false),
            (Some(Hermes), false),
            (Some(Pythonic), false),
            (Some(QwenCoder), true),
            (Some(Glm), true),
        ] {
            let format = format(None, tool_calls);
            assert_eq!(format.needs_parameter_types(), expected, "{tool_calls:?}");
        }
    }

    #[test]
    fn without_marks_of_reasoning_a_reply_begins_where_its_message_does() {
        for reasoning in [None, Some(ReasoningFormat::Harmony)] {
            let format = format(reasoning, None);
            assert_eq!(format.start_after("<think>"), Beginning);
            assert_eq!(format.start_within("<think>"), Content);
        }
        let think = format(Some(ReasoningFormat::Think), None);
        assert_eq!(think.start_within("<think>a</think>b<think>c"), Reasoning);
        assert_eq!(think.start_within("a</think>b"), Content);
    }

    #[test]
    fn a_mark_alone_is_no_format() {
        for (template, expected) in [
            ("[THINK]", Some(ReasoningFormat::Mistral)),
            ("</seed:think></think>", Some(ReasoningFormat::SeedOss)),
            (
                "Here is my thought process:",
                Some(ReasoningFormat::Granite),
            ),
            (
                "<|channel|>analysis</think>",
                Some(ReasoningFormat::Harmony),
            ),
            ("<think>", None),
        ] {
            assert_eq!(reasoning_of(template), expected, "{template}");
        }
        for (template, expected) in [
            ("<tool_call>", None),
            ("</tool_call>", None),
            ("<tool_call><function=f></tool_call>", None),
            ("<tool_call>[TOOL_CALLS]", Some(ToolCallFormat::Mistral)),
            ("<|tool_call|>", Some(ToolCallFormat::Granite)),
            ("<｜tool▁call▁begin｜>", Some(ToolCallFormat::DeepSeek)),
            (
                "<|start_header_id|><|python_tag|>",
                Some(ToolCallFormat::Llama3),
            ),
            ("<|start_header_id|>", None),
            ("<|python_tag|>", None),
            ("\"parameters\"", None),
        ] {
            assert_eq!(tool_calls_of(template), expected, "{template}");
        }
    }
}
