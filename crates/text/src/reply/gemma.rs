//! Calls with arguments in braces, whose texts stand between quotes of their own and have no escapes:
//!
//! ```text
//! <|tool_call>call:weather{city:<|"|>Oslo<|"|>,days:[1,2]}<tool_call|>                         Gemma 4
//! <start_function_call>call:weather{city:<escape>Oslo<escape>}<end_function_call>              FunctionGemma
//! ```
//!
//! A value is such a text, an object of bare keys, a list, or a word: a number, `true`, `false`, `null`, or otherwise a
//! text. JSON's own texts are read too.
//!
//! Sources: the chat templates of both models; vLLM's parsers `gemma4` and `functiongemma`.

use std::collections::HashSet;
use std::marker::PhantomData;

use serde_json::Deserializer;

use super::ToolCall;
use super::blocks::{Block, MarkEnd, Progress};
use super::call::is_valid;
use super::mark::first;
use super::marked_arguments::in_json;

/// In front of a name.
const CALL: &str = "call:";
/// Values within values.
const MAX_DEPTH: usize = 32;

/// The marks of a format.
pub(super) trait GemmaMarks: Clone + Default + Send + Sync + 'static {
    /// Before a call.
    const OPENERS: &'static [&'static str];
    /// Behind a call.
    const CLOSE: &'static str;
    /// Before and behind a text.
    const QUOTE: &'static str;
}

#[derive(Clone, Debug, Default)]
pub(super) struct Gemma4;

impl GemmaMarks for Gemma4 {
    const OPENERS: &'static [&'static str] = &["<|tool_call>"];
    const CLOSE: &'static str = "<tool_call|>";
    const QUOTE: &'static str = "<|\"|>";
}

#[derive(Clone, Debug, Default)]
pub(super) struct FunctionGemma;

impl GemmaMarks for FunctionGemma {
    const OPENERS: &'static [&'static str] = &["<start_function_call>"];
    const CLOSE: &'static str = "<end_function_call>";
    const QUOTE: &'static str = "<escape>";
}

#[derive(Clone, Debug, Default)]
pub(super) struct Braces<M> {
    end: MarkEnd,
    marks: PhantomData<M>,
}

impl<M: GemmaMarks> Block for Braces<M> {
    const OPENERS: &'static [&'static str] = M::OPENERS;

    fn read(&mut self, text: &str, is_last: bool) -> Progress {
        let start = M::OPENERS[0].len();
        if first(text[start..].trim_start(), &[CALL]) == Some(None) {
            return Progress::Text(start);
        }
        let Some((end, num_bytes)) = self.end.scan(text, start, M::CLOSE, is_last) else {
            return Progress::More;
        };
        match call::<M>(text[start..end].trim()) {
            Some(call) => Progress::Calls(num_bytes, vec![call]),
            None => Progress::Text(start),
        }
    }
}

/// The call between two marks.
fn call<M: GemmaMarks>(inside: &str) -> Option<ToolCall> {
    let inside = inside.strip_prefix(CALL)?;
    let brace = inside.find('{')?;
    let (arguments, rest) = Reader::<M>::default().value(&inside[brace..], 0)?;
    let is_whole = rest.trim_start().is_empty();
    let call = ToolCall::new(inside[..brace].trim(), &arguments)?;
    is_whole.then_some(call)
}

/// Reads values in the quotes of a format.
#[derive(Default)]
struct Reader<M>(PhantomData<M>);

impl<M: GemmaMarks> Reader<M> {
    /// The value that `text` begins with, as JSON, and what follows it. Numbers keep their digits.
    fn value<'t>(&self, text: &'t str, depth: usize) -> Option<(String, &'t str)> {
        let text = text.trim_start();
        match text.chars().next()? {
            _ if depth > MAX_DEPTH => None,
            _ if text.starts_with(M::QUOTE) || text.starts_with('"') => {
                let (text, rest) = Self::quoted(text)?;
                Some((in_json(&text), rest))
            }
            '{' => self.object(&text[1..], depth),
            '[' => self.list(&text[1..], depth),
            _ => word(text),
        }
    }

    /// The text between quotes that `text` begins with.
    fn quoted(text: &str) -> Option<(String, &str)> {
        match text.strip_prefix(M::QUOTE) {
            Some(inside) => {
                let (inside, rest) = inside.split_once(M::QUOTE)?;
                Some((inside.to_owned(), rest))
            }
            None => {
                let mut values = Deserializer::from_str(text).into_iter::<String>();
                let inside = values.next()?.ok()?;
                Some((inside, &text[values.byte_offset()..]))
            }
        }
    }

    /// The rest of an object behind its brace.
    fn object<'t>(&self, text: &'t str, depth: usize) -> Option<(String, &'t str)> {
        let mut keys = HashSet::new();
        let mut members = Vec::new();
        let mut rest = text.trim_start();
        loop {
            if let Some(behind) = rest.strip_prefix('}') {
                return Some((format!("{{{}}}", members.join(",")), behind));
            }
            let (key, behind) = match rest.starts_with(M::QUOTE) || rest.starts_with('"') {
                true => {
                    let (key, behind) = Self::quoted(rest)?;
                    (key, behind.trim_start().strip_prefix(':')?)
                }
                false => {
                    let (key, behind) = rest.split_once(':')?;
                    (key.trim().to_owned(), behind)
                }
            };
            let (value, behind) = self.value(behind, depth + 1)?;
            members.push(format!("{}:{value}", in_json(&key)));
            if key.is_empty() || !keys.insert(key) {
                return None;
            }
            rest = behind_separator(behind, '}')?;
        }
    }

    /// The rest of a list behind its bracket.
    fn list<'t>(&self, text: &'t str, depth: usize) -> Option<(String, &'t str)> {
        let mut values = Vec::new();
        let mut rest = text.trim_start();
        loop {
            if let Some(behind) = rest.strip_prefix(']') {
                return Some((format!("[{}]", values.join(",")), behind));
            }
            let (value, behind) = self.value(rest, depth + 1)?;
            values.push(value);
            rest = behind_separator(behind, ']')?;
        }
    }
}

/// The rest behind a value: the next value, behind a comma, or the closing bracket.
fn behind_separator(text: &str, end: char) -> Option<&str> {
    let text = text.trim_start();
    match text.strip_prefix(',') {
        Some(behind) => Some(behind.trim_start()),
        None => text.starts_with(end).then_some(text),
    }
}

/// A value without quotes, as JSON: JSON's, Python's `None`, or a text.
fn word(text: &str) -> Option<(String, &str)> {
    let end = text.find([',', '}', ']'])?;
    let word = text[..end].trim();
    let value = match word {
        "" => return None,
        "None" => "null".to_owned(),
        _ if is_valid(word) => word.to_owned(),
        _ => in_json(word),
    };
    Some((value, &text[end..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(text: &str) -> Option<String> {
        call::<Gemma4>(&format!("call:f{text}")).map(|call| call.arguments)
    }

    #[test]
    fn arguments_become_json() {
        for (text, expected) in [
            ("{}", "{}"),
            (
                "{a:1,b:true,c:null,d:None}",
                r#"{"a":1,"b":true,"c":null,"d":null}"#,
            ),
            (r#"{a:<|"|>x, {y}: "z"<|"|>}"#, r#"{"a":"x, {y}: \"z\""}"#),
            (
                r#"{a:{b:[1,<|"|>c<|"|>,[]]},d:{}}"#,
                r#"{"a":{"b":[1,"c",[]]},"d":{}}"#,
            ),
            (
                r#"{ a : "x\n" , <|"|>b c<|"|>:-1.5e3 }"#,
                r#"{"a":"x\n","b c":-1.5e3}"#,
            ),
            ("{city:New York}", r#"{"city":"New York"}"#),
            (
                "{a:[12345678901234567890123,0.10000000000000000001]}",
                r#"{"a":[12345678901234567890123,0.10000000000000000001]}"#,
            ),
        ] {
            assert_eq!(arguments(text).as_deref(), Some(expected), "{text}");
        }
    }

    #[test]
    fn what_is_no_object_is_no_call() {
        let deep = format!("{{a:{}1{}}}", "[".repeat(40), "]".repeat(40));
        for text in [
            "",
            "{",
            "{a}",
            "{a:}",
            "{:1}",
            "{a:1,a:2}",
            "{a:1}x",
            "[1]",
            r#"{a:<|"|>x}"#,
            r#"{a:"x}"#,
            "{a:[1}",
            &deep,
        ] {
            assert_eq!(arguments(text), None, "{text}");
        }
    }
}
