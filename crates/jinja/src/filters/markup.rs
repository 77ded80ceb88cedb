//! Filters about HTML and addresses.

use super::escaped;
use crate::arguments::flag;
use crate::error::{Outcome, fail};
use crate::interpreter::Interpreter;
use crate::repr::str_of;
use crate::unicode::is_space;
use crate::value::{Arguments, Text, Value};

impl Interpreter<'_> {
    pub(super) fn markup_filter(
        &mut self,
        name: &str,
        value: &Value,
        arguments: Arguments,
    ) -> Outcome<Value> {
        match name {
            "e" | "escape" => {
                arguments.none(name)?;
                match value {
                    Value::Str(text) => self.escape(text),
                    other => {
                        let text = str_of(other, &mut self.budget)?;
                        self.escape(&text)
                    }
                }
            }
            "forceescape" => {
                arguments.none(name)?;
                let text = str_of(value, &mut self.budget)?;
                self.escape(&text)
            }
            "safe" => {
                arguments.none(name)?;
                let mut text = str_of(value, &mut self.budget)?;
                text.is_markup = true;
                Ok(Value::Str(text))
            }
            "striptags" => {
                arguments.none(name)?;
                let text = str_of(value, &mut self.budget)?;
                self.strip_tags(&text)
            }
            "urlencode" => {
                arguments.none(name)?;
                self.url_encode(value)
            }
            _ => {
                let [autospace] = arguments.bind(name, ["autospace"])?;
                let has_space = autospace.is_none() || flag(autospace.as_ref());
                self.xml_attributes(value, has_space)
            }
        }
    }

    fn strip_tags(&mut self, text: &Text) -> Outcome<Value> {
        self.budget.make(2 * text.len())?;
        let text = without(text, "<!--", "-->");
        let text = without(&text, "<", ">");
        let words: Vec<&str> = text
            .split(is_space)
            .filter(|word| !word.is_empty())
            .collect();
        let text = words.join(" ");
        let mut out = String::with_capacity(text.len());
        let mut rest = text.as_str();
        while let Some(at) = rest.find('&') {
            out.push_str(&rest[..at]);
            rest = &rest[at..];
            let entities = [
                ("&amp;", "&"),
                ("&lt;", "<"),
                ("&gt;", ">"),
                ("&#34;", "\""),
                ("&quot;", "\""),
                ("&#39;", "'"),
            ];
            if let Some((entity, char)) =
                entities.iter().find(|(entity, _)| rest.starts_with(entity))
            {
                out.push_str(char);
                rest = &rest[entity.len()..];
            } else if rest[1..]
                .starts_with(|char: char| char == '#' || char.is_ascii_alphanumeric())
            {
                return fail(
                    "the filter 'striptags' is not supported for a text with entities of HTML",
                );
            } else {
                out.push('&');
                rest = &rest[1..];
            }
        }
        out.push_str(rest);
        Ok(Value::str(out))
    }

    fn url_encode(&mut self, value: &Value) -> Outcome<Value> {
        let pairs = match value {
            Value::Dict(dict) => dict
                .items
                .values()
                .map(|(key, value)| (key.clone(), value.clone()))
                .collect::<Vec<_>>(),
            Value::Str(_)
            | Value::None
            | Value::Bool(_)
            | Value::Int(_)
            | Value::Float(_)
            | Value::Object(_) => {
                let text = str_of(value, &mut self.budget)?;
                return Ok(Value::str(self.quoted(&text, false)?));
            }
            items => {
                let mut pairs = Vec::new();
                for pair in self.items_of(items)? {
                    let pair = self.items_of(&pair)?;
                    let [key, value] = pair.as_slice() else {
                        return fail("urlencode: an item is not a pair");
                    };
                    pairs.push((key.clone(), value.clone()));
                }
                pairs
            }
        };
        let mut out = String::new();
        for (at, (key, value)) in pairs.iter().enumerate() {
            if at > 0 {
                out.push('&');
            }
            for (part, end) in [(key, "="), (value, "")] {
                let text = str_of(part, &mut self.budget)?;
                out.push_str(&self.quoted(&text, true)?);
                out.push_str(end);
            }
        }
        Ok(Value::str(out))
    }

    fn quoted(&mut self, text: &str, is_query: bool) -> Outcome<String> {
        self.budget.make(text.len().saturating_mul(3))?;
        let mut out = String::new();
        for byte in text.bytes() {
            match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'.' | b'-' | b'~' => {
                    out.push(byte as char)
                }
                b'/' if !is_query => out.push('/'),
                b' ' if is_query => out.push('+'),
                byte => out.push_str(&format!("%{byte:02X}")),
            }
        }
        Ok(out)
    }

    fn xml_attributes(&mut self, value: &Value, has_space: bool) -> Outcome<Value> {
        let Value::Dict(dict) = value else {
            return fail(format!(
                "xmlattr: a dictionary is needed, not '{}'",
                value.type_name()
            ));
        };
        let mut out = String::new();
        for (key, value) in dict.items.values() {
            if matches!(value, Value::None | Value::Undefined(_)) {
                continue;
            }
            let Value::Str(key) = key else {
                return fail("xmlattr: a name is not a string");
            };
            if key.contains(|char| " \t\n\r\x0b\x0c/>=".contains(char)) {
                return fail(format!(
                    "xmlattr: invalid character in attribute name '{}'",
                    &**key
                ));
            }
            if has_space || !out.is_empty() {
                out.push(' ');
            }
            let value = match value {
                Value::Str(text) if text.is_markup => text.clone(),
                value => {
                    let text = str_of(value, &mut self.budget)?;
                    escaped(&text, &mut self.budget)?
                }
            };
            let key = if key.is_markup {
                key.clone()
            } else {
                escaped(key, &mut self.budget)?
            };
            self.budget.make(key.len() + value.len() + 4)?;
            out.push_str(&key);
            out.push_str("=\"");
            out.push_str(&value);
            out.push('"');
        }
        Ok(Value::str(out))
    }
}

/// A text without its parts from `open` to `close`.
fn without(text: &str, open: &str, close: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find(open) {
        let Some(end) = rest[start..].find(close) else {
            break;
        };
        out.push_str(&rest[..start]);
        rest = &rest[start + end + close.len()..];
    }
    out.push_str(rest);
    out
}
