//! The calls of DeepSeek V3 and R1, `<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n{...}\n```<｜tool▁call▁end｜>`, and of V3.1,
//! `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`, with a mark before and behind all of them.

use super::call::ToolCall;
use super::sections::Section;

const SEPARATOR: &str = "<｜tool▁sep｜>";

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct DeepSeek;

impl Section for DeepSeek {
    const OPENERS: &'static [&'static str] = &[Self::FIRST, Self::LAST, Self::OPEN];
    const FIRST: &'static str = "<｜tool▁calls▁begin｜>";
    const LAST: &'static str = "<｜tool▁calls▁end｜>";
    const OPEN: &'static str = "<｜tool▁call▁begin｜>";
    const CLOSE: &'static str = "<｜tool▁call▁end｜>";

    fn call(inside: &str) -> Option<ToolCall> {
        let (kind, rest) = inside.split_once(SEPARATOR)?;
        if rest.trim_start().starts_with('{') {
            return ToolCall::new(kind.trim(), rest);
        }
        let (name, fenced) = rest.split_once("```json")?;
        let arguments = fenced.trim_end().strip_suffix("```")?;
        ToolCall::new(name.trim(), arguments)
    }
}
