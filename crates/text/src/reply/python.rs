//! A list of calls in Python, whose arguments are literals with names.

use super::call::{ToolCall, is_valid};
use super::marked_arguments::{MarkedArguments, in_json};

/// Deeper values are no arguments of a function. The parser of calls has the same limit.
const MAX_DEPTH: u32 = 126;

/// Finds the end of a list in a text that arrives in pieces. Checks no more than brackets and strings, and that the
/// first thing in it is a name with a bracket behind.
#[derive(Clone, Debug, Default)]
pub(super) struct ListEnd {
    num_scanned: usize,
    depth: u32,
    quote: Option<u8>,
    is_escaped: bool,
    has_call: bool,
}

impl ListEnd {
    /// Scans what is new of `text`, which begins with the list and only grows from call to call. Returns the byte that
    /// the list ends before, once it is there; an error if the text begins with no list of calls.
    pub(super) fn scan(&mut self, text: &str) -> Result<Option<usize>, ()> {
        for (i, byte) in text.bytes().enumerate().skip(self.num_scanned) {
            if self.step(byte)? {
                return Ok(Some(i + 1));
            }
        }
        self.num_scanned = text.len();
        Ok(None)
    }

    /// Whether the list ends with this byte.
    fn step(&mut self, byte: u8) -> Result<bool, ()> {
        if let Some(quote) = self.quote {
            match byte {
                _ if self.is_escaped => self.is_escaped = false,
                b'\\' => self.is_escaped = true,
                _ if byte == quote => self.quote = None,
                _ => {}
            }
            return Ok(false);
        }
        if self.depth == 1 && !self.has_call {
            let is_name = byte.is_ascii_alphanumeric() || byte >= 0x80;
            match byte {
                b'(' => self.has_call = true,
                _ if is_name || byte.is_ascii_whitespace() || b"_-.:/".contains(&byte) => {
                    return Ok(false);
                }
                _ => return Err(()),
            }
        }
        match byte {
            b'[' if self.depth == 0 => self.depth = 1,
            _ if self.depth == 0 => return Err(()),
            b'(' | b'[' | b'{' if self.depth > MAX_DEPTH => return Err(()),
            b'(' | b'[' | b'{' => self.depth += 1,
            b')' | b']' | b'}' => {
                self.depth -= 1;
                return Ok(self.depth == 0);
            }
            b'"' | b'\'' => self.quote = Some(byte),
            _ => {}
        }
        Ok(false)
    }
}

/// The calls of a list; `None` if it is something else.
pub(super) fn calls(list: &str) -> Option<Vec<ToolCall>> {
    let mut reader = Reader { rest: list };
    reader.take('[')?;
    let mut calls = Vec::new();
    while !reader.has(']') {
        calls.push(reader.call()?);
        if !reader.has(',') {
            reader.take(']')?;
            break;
        }
    }
    reader.rest.is_empty().then_some(calls)
}

/// The calls of a text that has them one behind the other, each on a line of its own; `None` if it has anything else.
pub(super) fn calls_in_lines(text: &str) -> Option<Vec<ToolCall>> {
    let mut reader = Reader { rest: text };
    let mut calls = Vec::new();
    while !reader.rest.trim_start().is_empty() {
        if !calls.is_empty() && !reader.ends_line() {
            return None;
        }
        calls.push(reader.call()?);
    }
    Some(calls)
}

struct Reader<'t> {
    rest: &'t str,
}

impl<'t> Reader<'t> {
    /// Takes a character behind white space, if it is there.
    fn has(&mut self, char: char) -> bool {
        let behind = self.rest.trim_start().strip_prefix(char);
        self.rest = behind.unwrap_or(self.rest);
        behind.is_some()
    }

    /// Whether a line ends here.
    fn ends_line(&self) -> bool {
        let blank = self.rest.len() - self.rest.trim_start().len();
        self.rest[..blank].contains('\n')
    }

    fn take(&mut self, char: char) -> Option<()> {
        self.has(char).then_some(())
    }

    /// Takes the characters behind white space that are of a kind.
    fn word(&mut self, is_part: impl Fn(char) -> bool) -> &'t str {
        let text = self.rest.trim_start();
        let end = text.find(|char: char| !is_part(char)).unwrap_or(text.len());
        self.rest = &text[end..];
        &text[..end]
    }

    fn call(&mut self) -> Option<ToolCall> {
        let name = self.word(|char| char.is_alphanumeric() || "_-.:/".contains(char));
        self.take('(')?;
        let mut arguments = MarkedArguments::default();
        while !self.has(')') {
            let name = self.word(|char| char.is_alphanumeric() || char == '_');
            if name.is_empty() {
                return None;
            }
            self.take('=')?;
            let value = self.value(0)?;
            arguments.set(name.to_owned(), &value, false);
            if !self.has(',') {
                self.take(')')?;
                break;
            }
        }
        ToolCall::new(name, &arguments.in_json())
    }

    /// The JSON of a literal.
    fn value(&mut self, depth: u32) -> Option<String> {
        let text = self.rest.trim_start();
        match text.chars().next()? {
            '[' | '(' | '{' if depth >= MAX_DEPTH => None,
            '"' | '\'' => self.string().map(|text| in_json(&text)),
            '[' => self.list('[', ']', depth),
            '(' => self.list('(', ')', depth),
            '{' => self.object(depth),
            _ => {
                let word = self.word(|char| char.is_ascii_alphanumeric() || "+-._".contains(char));
                match word {
                    "True" | "true" => Some("true".to_owned()),
                    "False" | "false" => Some("false".to_owned()),
                    "None" | "null" => Some("null".to_owned()),
                    _ => number(word),
                }
            }
        }
    }

    fn list(&mut self, open: char, close: char, depth: u32) -> Option<String> {
        self.take(open)?;
        let mut elements = Vec::new();
        while !self.has(close) {
            elements.push(self.value(depth + 1)?);
            if !self.has(',') {
                self.take(close)?;
                break;
            }
        }
        Some(format!("[{}]", elements.join(", ")))
    }

    fn object(&mut self, depth: u32) -> Option<String> {
        self.take('{')?;
        let mut members = Vec::new();
        while !self.has('}') {
            let key = self.string()?;
            self.take(':')?;
            let value = self.value(depth + 1)?;
            members.push(format!("{}: {value}", in_json(&key)));
            if !self.has(',') {
                self.take('}')?;
                break;
            }
        }
        Some(format!("{{{}}}", members.join(", ")))
    }

    /// The text of a string, with Python's escapes.
    fn string(&mut self) -> Option<String> {
        let text = self.rest.trim_start();
        let quote = text.chars().next().filter(|char| "\"'".contains(*char))?;
        let mut chars = text[1..].chars();
        let mut string = String::new();
        loop {
            let char = match chars.next()? {
                char if char == quote => break,
                '\\' => match chars.next()? {
                    'n' => '\n',
                    't' => '\t',
                    'r' => '\r',
                    'b' => '\u{8}',
                    'f' => '\u{c}',
                    '\n' => continue,
                    '/' => '/',
                    'x' => coded(&mut chars, 2)?,
                    'u' => coded(&mut chars, 4)?,
                    'U' => coded(&mut chars, 8)?,
                    char @ ('\\' | '\'' | '"') => char,
                    other => {
                        string.push('\\');
                        other
                    }
                },
                char => char,
            };
            string.push(char);
        }
        self.rest = chars.as_str();
        Some(string)
    }
}

/// The character with a number of so many hexadecimal digits, or of two that UTF-16 makes one of.
fn coded(chars: &mut std::str::Chars<'_>, num_digits: usize) -> Option<char> {
    let mut digits = || {
        let code = chars.as_str().get(..num_digits)?;
        *chars = chars.as_str()[num_digits..].chars();
        u32::from_str_radix(code, 16).ok()
    };
    let code = digits()?;
    if !(0xd800..0xdc00).contains(&code) || num_digits != 4 {
        return char::from_u32(code);
    }
    let behind = chars.as_str().strip_prefix("\\u")?;
    *chars = behind.chars();
    let low = u32::from_str_radix(chars.as_str().get(..4)?, 16).ok()?;
    *chars = chars.as_str()[4..].chars();
    let low = low.checked_sub(0xdc00).filter(|low| *low < 0x400)?;
    char::from_u32(0x10000 + ((code - 0xd800) << 10) + low)
}

/// A number in JSON. Python writes some in ways that JSON has not.
fn number(word: &str) -> Option<String> {
    // Rust parses words, too: `inf` and `nan`.
    if !word.bytes().any(|byte| byte.is_ascii_digit()) {
        return None;
    }
    if is_valid(word) {
        return Some(word.to_owned());
    }
    let value: f64 = word.parse().ok()?;
    serde_json::Number::from_f64(value).map(|number| number.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_ends_with_its_last_bracket() {
        for list in [
            "[f()]",
            "[ server.a-b:c/d_1 (x=[1, {'a': (2,)}])]",
            "[fé(a='é')]",
            r#"[f(a=']', b="]'", c=')')]"#,
            r"[f(a='\', b='']')]",
        ] {
            let text = format!("{list} ]");
            assert_eq!(
                ListEnd::default().scan(&text),
                Ok(Some(list.len())),
                "{list}"
            );
            let mut scan = ListEnd::default();
            for (end, _) in list.char_indices() {
                assert_eq!(scan.scan(&list[..end]), Ok(None), "{list}");
            }
            assert_eq!(scan.scan(list), Ok(Some(list.len())), "{list}");
        }
        for text in [
            "f()", " [f()]", "[1 + 2]", "[f, g]", "[]", "['f']", "[[f()]]",
        ] {
            assert_eq!(ListEnd::default().scan(text), Err(()), "{text}");
        }
        let nested = |num: usize| format!("[f({}{})]", "[".repeat(num), "]".repeat(num));
        let deep = nested(125);
        assert_eq!(ListEnd::default().scan(&deep), Ok(Some(deep.len())));
        assert_eq!(ListEnd::default().scan(&nested(126)), Err(()));
    }

    #[test]
    fn arguments_have_names() {
        let found = calls("[f(a_1=1, é='x',), server.g ( ) ,]").expect("calls");
        let shown = found
            .iter()
            .map(|call| format!("{}({})", call.name, call.arguments));
        assert_eq!(
            shown.collect::<Vec<_>>(),
            [r#"f({"a_1": 1, "é": "x"})"#, "server.g({})"]
        );
        for list in [
            "[f(a-b=1)]",
            "[f(=1)]",
            "[f(a)]",
            "[f(a=1 b=2)]",
            "[f(a=1)",
            "[f(a=1)] x",
        ] {
            assert_eq!(calls(list), None, "{list}");
        }
    }

    #[test]
    fn values_are_no_deeper_than_their_parser_reads() {
        for (open, close) in [("[", "]"), ("(", ")"), ("{'a': ", "}")] {
            let list = |num: usize| format!("[f(x={}1{})]", open.repeat(num), close.repeat(num));
            assert_eq!(
                calls(&list(126)).map(|calls| calls.len()),
                Some(1),
                "{open}"
            );
            for num in [127, 200_000] {
                assert_eq!(calls(&list(num)), None, "{open}");
            }
        }
    }

    #[test]
    fn literals_become_json() {
        for (python, json) in [
            ("1", "1"),
            ("-1.50", "-1.50"),
            (".5", "0.5"),
            ("+1e3", "1000.0"),
            ("1.", "1.0"),
            ("True", "true"),
            ("False", "false"),
            ("None", "null"),
            ("null", "null"),
            (r#""a'\"b""#, r#""a'\"b""#),
            (
                r"'a\'\n\x41\u00e9\U0001f600\q'",
                "\"a'\\nA\u{e9}\u{1f600}\\\\q\"",
            ),
            (r#""\ud83d\ude00""#, "\"\u{1f600}\""),
            ("[1, 'a', [True,]]", r#"[1, "a", [true]]"#),
            ("(1, 2)", "[1, 2]"),
            (
                "{'a': {\"b\": None}, 'c': []}",
                r#"{"a": {"b": null}, "c": []}"#,
            ),
        ] {
            let found = calls(&format!("[f(x={python})]")).expect(python);
            assert_eq!(found[0].arguments, format!("{{\"x\": {json}}}"), "{python}");
        }
        for python in [
            "a",
            "1 + 2",
            "f(1)",
            "{1: 2}",
            "'a",
            r"'\ud83d'",
            r"'\ud83d\u0041'",
            r"'\ud83d\ue000'",
            "[1 2]",
            "{'a': 1 'b': 2}",
            "--1",
            "-",
            "nan",
            "inf",
            "1_0",
        ] {
            assert_eq!(calls(&format!("[f(x={python})]")), None, "{python}");
        }
    }
}
