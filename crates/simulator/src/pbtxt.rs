//! A parser for config.pbtxt: protocol buffers in text format, converted to the JSON that Triton passes to a
//! backend.
//!
//! The text format (<https://protobuf.dev/reference/protobuf/textformat-spec/>) does not show which fields
//! are repeated, but JSON must: a repeated field with a single value is still a list. So this file lists the
//! repeated fields and maps of a model configuration. Fields of nested messages are not checked; a server
//! rejects misspelt ones.

use std::fmt;
use std::iter::Peekable;
use std::str::Chars;

use inflight_base::nearest_name;
use serde_json::{Map, Value};

/// The fields of a model configuration.
const FIELDS: &[&str] = &[
    "name",
    "platform",
    "backend",
    "runtime",
    "version_policy",
    "max_batch_size",
    "input",
    "output",
    "batch_input",
    "batch_output",
    "optimization",
    "dynamic_batching",
    "sequence_batching",
    "ensemble_scheduling",
    "instance_group",
    "default_model_filename",
    "cc_model_filenames",
    "metric_tags",
    "parameters",
    "model_warmup",
    "model_operations",
    "model_transaction_policy",
    "model_repository_agents",
    "response_cache",
    "model_metrics",
];

/// Repeated fields, at any depth.
const LISTS: &[&str] = &[
    "agents",
    "batch_input",
    "batch_output",
    "bool_false_true",
    "control",
    "control_input",
    "dims",
    "fp32_false_true",
    "gpus",
    "initial_state",
    "input",
    "instance_group",
    "int32_false_true",
    "metric_control",
    "model_warmup",
    "op_library_filename",
    "output",
    "preferred_batch_size",
    "profile",
    "resources",
    "secondary_devices",
    "shape",
    "source_input",
    "state",
    "step",
    "target_name",
    "versions",
];

/// Map fields: repeated messages of a `key` and a `value`.
const MAPS: &[&str] = &[
    "cc_model_filenames",
    "input_map",
    "inputs",
    "metric_tags",
    "output_map",
    "parameters",
    "priority_queue_policy",
];

/// Maximum nesting depth, so that a file cannot exhaust the stack.
const MAX_DEPTH: usize = 64;

/// A syntax error in a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseError {
    /// Line, from 1.
    pub line: usize,
    /// Character in the line, from 1.
    pub column: usize,
    /// The problem at this place.
    pub problem: String,
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            line,
            column,
            problem,
        } = self;
        write!(f, "line {line}, column {column}: {problem}")
    }
}

impl std::error::Error for ParseError {}

/// Parses a model configuration.
///
/// # Errors
/// The first syntax error, or a field that model configurations do not have.
pub fn parse(text: &str) -> Result<Value, ParseError> {
    let mut parser = Parser {
        tokens: Lexer::new(text).tokens()?,
        next: 0,
    };
    let fields = parser.fields(None, 0)?;
    Ok(Value::Object(fields))
}

#[derive(Clone, Debug, PartialEq)]
enum Token {
    /// A name, or a word used as a value: `true`, `TYPE_FP32`.
    Word(String),
    Number(serde_json::Number),
    Text(String),
    Symbol(char),
    End,
}

#[derive(Clone, Copy)]
struct Place {
    line: usize,
    column: usize,
}

impl Place {
    fn refuse<T>(self, problem: impl Into<String>) -> Result<T, ParseError> {
        Err(ParseError {
            line: self.line,
            column: self.column,
            problem: problem.into(),
        })
    }
}

struct Lexer<'a> {
    rest: Peekable<Chars<'a>>,
    place: Place,
}

impl<'a> Lexer<'a> {
    fn new(text: &'a str) -> Self {
        Self {
            rest: text.chars().peekable(),
            place: Place { line: 1, column: 1 },
        }
    }

    fn tokens(mut self) -> Result<Vec<(Token, Place)>, ParseError> {
        let mut tokens = Vec::new();
        loop {
            self.skip_blanks();
            let place = self.place;
            let token = match self.rest.peek() {
                None => Token::End,
                Some('"' | '\'') => Token::Text(self.text()?),
                Some(c) if c.is_ascii_alphabetic() || *c == '_' => Token::Word(self.word()),
                Some(c) if c.is_ascii_digit() || matches!(c, '-' | '.') => self.number()?,
                Some('{' | '}' | '<' | '>' | '[' | ']' | ':' | ',' | ';') => {
                    Token::Symbol(self.bump().unwrap_or_default())
                }
                Some(c) => return place.refuse(format!("unexpected character '{c}'")),
            };
            let is_end = token == Token::End;
            tokens.push((token, place));
            if is_end {
                return Ok(tokens);
            }
        }
    }

    fn bump(&mut self) -> Option<char> {
        let c = self.rest.next()?;
        if c == '\n' {
            self.place.line += 1;
            self.place.column = 1;
        } else {
            self.place.column += 1;
        }
        Some(c)
    }

    fn skip_blanks(&mut self) {
        while let Some(&c) = self.rest.peek() {
            if c == '#' {
                while self.rest.peek().is_some_and(|&c| c != '\n') {
                    self.bump();
                }
            } else if c.is_whitespace() {
                self.bump();
            } else {
                return;
            }
        }
    }

    fn word(&mut self) -> String {
        let mut word = String::new();
        while let Some(&c) = self.rest.peek() {
            if !c.is_ascii_alphanumeric() && c != '_' && c != '.' && c != '+' && c != '-' {
                break;
            }
            word.push(c);
            self.bump();
        }
        word
    }

    fn number(&mut self) -> Result<Token, ParseError> {
        let place = self.place;
        let word = self.word();
        let (sign, digits) = match word.strip_prefix('-') {
            Some(digits) => (-1, digits),
            None => (1, word.as_str()),
        };
        let lower = digits.to_ascii_lowercase();
        let integer = if let Some(hex) = lower.strip_prefix("0x") {
            i128::from_str_radix(hex, 16).ok()
        } else if digits.len() > 1 && digits.starts_with('0') {
            i128::from_str_radix(digits, 8).ok()
        } else {
            digits.parse().ok()
        };
        let float = || digits.trim_end_matches(['f', 'F']).parse::<f64>().ok();
        let number = match integer {
            Some(integer) => serde_json::Number::from_i128(sign * integer),
            None => float().and_then(|float| serde_json::Number::from_f64(float * sign as f64)),
        };
        match number {
            Some(number) => Ok(Token::Number(number)),
            None => place.refuse(format!("'{word}' is not a number")),
        }
    }

    fn text(&mut self) -> Result<String, ParseError> {
        let opened = self.place;
        let quote = self.bump();
        let mut bytes = Vec::new();
        loop {
            let place = self.place;
            match self.bump() {
                None | Some('\n') => return opened.refuse("this string has no closing quote"),
                c if c == quote => break,
                Some('\\') => self.escape(place, &mut bytes)?,
                Some(c) => bytes.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
            }
        }
        String::from_utf8(bytes).or_else(|_| opened.refuse("this string is not UTF-8"))
    }

    fn escape(&mut self, place: Place, bytes: &mut Vec<u8>) -> Result<(), ParseError> {
        let c = self.bump().unwrap_or_default();
        let byte = match c {
            'n' => b'\n',
            'r' => b'\r',
            't' => b'\t',
            'a' => 0x07,
            'b' => 0x08,
            'f' => 0x0c,
            'v' => 0x0b,
            '\\' | '\'' | '"' | '?' => c as u8,
            '0'..='7' => self.code(c.to_string(), 8, 3, place)? as u8,
            'x' | 'X' => self.code(String::new(), 16, 2, place)? as u8,
            'u' | 'U' => {
                let length = if c == 'u' { 4 } else { 8 };
                let code = self.code(String::new(), 16, length, place)?;
                let Some(c) = char::from_u32(code) else {
                    return place.refuse("this escape is not a valid character");
                };
                bytes.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes());
                return Ok(());
            }
            _ => return place.refuse(format!("unknown escape '\\{c}'")),
        };
        bytes.push(byte);
        Ok(())
    }

    /// The code of an escape that starts with `digits` and has up to `length` of them.
    fn code(
        &mut self,
        mut digits: String,
        radix: u32,
        length: usize,
        place: Place,
    ) -> Result<u32, ParseError> {
        while digits.len() < length && self.rest.peek().is_some_and(|c| c.is_digit(radix)) {
            digits.extend(self.bump());
        }
        u32::from_str_radix(&digits, radix).or_else(|_| place.refuse("this escape has no digits"))
    }
}

struct Parser {
    /// Always ends with [`Token::End`].
    tokens: Vec<(Token, Place)>,
    next: usize,
}

impl Parser {
    fn peek(&self) -> (&Token, Place) {
        let (token, place) = &self.tokens[self.next.min(self.tokens.len() - 1)];
        (token, *place)
    }

    fn bump(&mut self) -> (Token, Place) {
        let (token, place) = self.peek();
        let token = token.clone();
        self.next += 1;
        (token, place)
    }

    fn takes(&mut self, symbol: char) -> bool {
        let is_there = *self.peek().0 == Token::Symbol(symbol);
        self.next += usize::from(is_there);
        is_there
    }

    /// The fields of a message up to `closing`; with `None`, of the whole file.
    fn fields(
        &mut self,
        closing: Option<char>,
        depth: usize,
    ) -> Result<Map<String, Value>, ParseError> {
        let mut fields = Map::new();
        loop {
            let (token, place) = self.bump();
            let name = match token {
                Token::Word(name) => name,
                Token::End if closing.is_none() => return Ok(fields),
                Token::Symbol(symbol) if Some(symbol) == closing => return Ok(fields),
                token => {
                    let wanted = closing.map_or("a field's name".to_owned(), |closing| {
                        format!("a field's name or '{closing}'")
                    });
                    return place.refuse(format!("expected {wanted}, got {}", describe(&token)));
                }
            };
            if depth == 0 {
                check_name(&name, place)?;
            }
            let has_colon = self.takes(':');
            let value = self.value(has_colon, depth)?;
            add(&mut fields, &name, value, place)?;
            let _ = self.takes(',') || self.takes(';');
        }
    }

    fn value(&mut self, has_colon: bool, depth: usize) -> Result<Value, ParseError> {
        let (token, place) = self.bump();
        match token {
            Token::Symbol(opening @ ('{' | '<')) => {
                if depth == MAX_DEPTH {
                    return place.refuse("messages are nested too deeply");
                }
                let closing = if opening == '{' { '}' } else { '>' };
                Ok(Value::Object(self.fields(Some(closing), depth + 1)?))
            }
            Token::Symbol('[') => self.list(depth),
            token if !has_colon => {
                place.refuse(format!("expected ':' or '{{', got {}", describe(&token)))
            }
            Token::Text(mut text) => {
                while let (Token::Text(more), _) = self.peek() {
                    text.push_str(more);
                    self.next += 1;
                }
                Ok(Value::String(text))
            }
            Token::Number(number) => Ok(Value::Number(number)),
            Token::Word(word) => Ok(match word.as_str() {
                "true" | "True" | "t" => Value::Bool(true),
                "false" | "False" | "f" => Value::Bool(false),
                _ => Value::String(word),
            }),
            token => place.refuse(format!("expected a value, got {}", describe(&token))),
        }
    }

    fn list(&mut self, depth: usize) -> Result<Value, ParseError> {
        if depth == MAX_DEPTH {
            return self.peek().1.refuse("lists are nested too deeply");
        }
        let mut values = Vec::new();
        while !self.takes(']') {
            if !values.is_empty() && !self.takes(',') {
                let (token, place) = self.peek();
                return place.refuse(format!("expected ',' or ']', got {}", describe(token)));
            }
            values.push(self.value(true, depth + 1)?);
        }
        Ok(Value::Array(values))
    }
}

fn check_name(name: &str, place: Place) -> Result<(), ParseError> {
    if FIELDS.contains(&name) {
        return Ok(());
    }
    let hint = nearest_name(name, FIELDS.iter().copied())
        .map(|nearest| format!("; did you mean '{nearest}'?"))
        .unwrap_or_default();
    place.refuse(format!("a model configuration has no field '{name}'{hint}"))
}

/// Adds a field. Only a repeated field may have been set before.
fn add(
    fields: &mut Map<String, Value>,
    name: &str,
    value: Value,
    place: Place,
) -> Result<(), ParseError> {
    let values = match value {
        Value::Array(values) => values,
        value => vec![value],
    };
    if MAPS.contains(&name) {
        let empty = || Value::Object(Map::new());
        let map = fields.entry(name).or_insert_with(empty);
        for entry in values {
            let (key, value) = entry_of(entry, name, place)?;
            map[key] = value;
        }
    } else if LISTS.contains(&name) {
        let list = fields.entry(name).or_insert_with(|| Value::Array(vec![]));
        if let Value::Array(list) = list {
            list.extend(values);
        }
    } else {
        let mut values = values.into_iter();
        let (Some(value), None) = (values.next(), values.next()) else {
            return place.refuse(format!("'{name}' takes a single value"));
        };
        if fields.insert(name.to_owned(), value).is_some() {
            return place.refuse(format!("'{name}' is set twice"));
        }
    }
    Ok(())
}

/// Key and value of a map entry.
fn entry_of(entry: Value, name: &str, place: Place) -> Result<(String, Value), ParseError> {
    let Value::Object(mut entry) = entry else {
        return place.refuse(format!(
            "'{name}' takes entries of the form {{ key: ... value: ... }}"
        ));
    };
    let key = match entry.remove("key") {
        Some(Value::String(key)) => key,
        Some(Value::Number(key)) => key.to_string(),
        _ => return place.refuse(format!("an entry of '{name}' has no key")),
    };
    Ok((key, entry.remove("value").unwrap_or(Value::Null)))
}

fn describe(token: &Token) -> String {
    match token {
        Token::Word(word) => format!("'{word}'"),
        Token::Number(number) => format!("the number {number}"),
        Token::Text(_) => "a string".to_owned(),
        Token::Symbol(symbol) => format!("'{symbol}'"),
        Token::End => "the end of the file".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn converts_a_configuration_to_the_json_that_a_backend_gets() {
        let text = r#"
            # The demo, as a user may write it.
            backend: "inflight"
            max_batch_size: 64   input [{
                name: "input_ids" data_type: TYPE_INT32, dims: [ -1 ];
                allow_ragged_batch: true
            }]
            sequence_batching {
                iterative_sequence: true
                max_sequence_idle_microseconds: 3600000000
                direct: < minimum_slot_utilization: 0.5f >
            }
            parameters { key: "max_seq_len" value: { string_value: "4096" } }
            parameters: [ { key: 'runner' value { string_value: 'syn' "thetic" } } ]
        "#;
        let expected = json!({
            "backend": "inflight",
            "max_batch_size": 64,
            "input": [{
                "name": "input_ids",
                "data_type": "TYPE_INT32",
                "dims": [-1],
                "allow_ragged_batch": true,
            }],
            "sequence_batching": {
                "iterative_sequence": true,
                "max_sequence_idle_microseconds": 3_600_000_000u64,
                "direct": { "minimum_slot_utilization": 0.5 },
            },
            "parameters": {
                "max_seq_len": { "string_value": "4096" },
                "runner": { "string_value": "synthetic" },
            },
        });
        assert_eq!(parse(text), Ok(expected));
    }

    #[test]
    fn a_repeated_field_is_a_list_with_one_value_or_more() {
        let expected = Ok(json!({ "output": [{ "dims": [1, 2] }, { "dims": [3] }] }));
        for text in [
            "output { dims: 1 dims: 2 } output { dims: 3 }",
            "output [{ dims: [1, 2] }, { dims: [3] }]",
            "output [{ dims: [1] dims: 2 }] output: { dims: 3 }",
        ] {
            assert_eq!(parse(text), expected, "{text}");
        }
        assert_eq!(parse("output []"), Ok(json!({ "output": [] })));
    }

    #[test]
    fn reads_every_notation_of_numbers_and_strings() {
        let numbers = "version_policy { a: 0x1F b: 017 c: -5 d: 1e3 e: .5 f: -2.5f g: 0 }";
        assert_eq!(
            parse(numbers),
            Ok(json!({ "version_policy": {
                "a": 31, "b": 15, "c": -5, "d": 1000.0, "e": 0.5, "f": -2.5, "g": 0,
            } }))
        );
        let text = r#"name: "a\"\\\n\t\x41\101\u00e4" '"' "\303\244""#;
        assert_eq!(
            parse(text),
            Ok(json!({ "name": "a\"\\\n\tAA\u{e4}\"\u{e4}" }))
        );
    }

    #[test]
    fn errors_name_the_line_and_the_column() {
        let deep = format!("optimization {}", "{ a ".repeat(100));
        for (text, expected) in [
            (
                "backend: \"x\"\nmax_batch_sise: 4",
                "line 2, column 1: a model configuration has no field 'max_batch_sise'; did you mean \
                 'max_batch_size'?",
            ),
            (
                "name \"x\"",
                "line 1, column 6: expected ':' or '{', got a string",
            ),
            (
                "name: \"x\nbackend: \"y\"",
                "line 1, column 7: this string has no closing quote",
            ),
            ("name: \"\\q\"", "line 1, column 8: unknown escape '\\q'"),
            (
                "max_batch_size: 1 max_batch_size: 2",
                "line 1, column 19: 'max_batch_size' is set twice",
            ),
            (
                "max_batch_size: [1, 2]",
                "line 1, column 1: 'max_batch_size' takes a single value",
            ),
            (
                "max_batch_size: 12x",
                "line 1, column 17: '12x' is not a number",
            ),
            (
                "input { dims: [1 2] }",
                "line 1, column 18: expected ',' or ']', got the number 2",
            ),
            (
                "input {",
                "line 1, column 8: expected a field's name or '}', got the end of the file",
            ),
            (
                "parameters { value { } }",
                "line 1, column 1: an entry of 'parameters' has no key",
            ),
            ("name: @", "line 1, column 7: unexpected character '@'"),
            (
                "name:",
                "line 1, column 6: expected a value, got the end of the file",
            ),
            (&deep, "line 1, column 270: messages are nested too deeply"),
        ] {
            let error = parse(text).expect_err(text).to_string();
            assert_eq!(error, expected, "{text}");
        }
    }
}
