//! The calls of DeepSeek V3 and R1,
//! `<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n{...}\n```<｜tool▁call▁end｜>`, and of V3.1,
//! `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`, with a mark before and behind all of them.

use super::call::ToolCall;
use super::pieces::CallHead;
use super::sections::Section;

const SEPARATOR: &str = "<｜tool▁sep｜>";
const FENCE: &str = "```json";

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct DeepSeek;

impl Section for DeepSeek {
    const OPENERS: &'static [&'static str] = &[Self::FIRST, Self::LAST, Self::OPEN];
    const FIRST: &'static str = "<｜tool▁calls▁begin｜>";
    const LAST: &'static str = "<｜tool▁calls▁end｜>";
    const OPEN: &'static str = "<｜tool▁call▁begin｜>";
    const CLOSE: &'static str = "<｜tool▁call▁end｜>";

    fn head(inside: &str) -> Option<CallHead> {
        let (kind, rest) = inside.split_once(SEPARATOR)?;
        let (name, arguments) = match rest.trim_start().starts_with('{') {
            true => (kind, rest),
            false => rest.split_once(FENCE)?,
        };
        Some(CallHead {
            name: name.trim().to_owned(),
            id: None,
            start: inside.len() - arguments.trim_start().len(),
        })
    }

    fn call(inside: &str) -> Option<ToolCall> {
        let CallHead { name, start, .. } = Self::head(inside)?;
        let (before, mut arguments) = inside.split_at(start);
        if before.trim_end().ends_with(FENCE) {
            arguments = arguments.trim_end().strip_suffix("```")?;
        }
        ToolCall::new(&name, arguments)
    }
}
