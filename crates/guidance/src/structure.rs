//! Structural tags: free text with parts of a given form, such as calls of functions.
//!
//! The JSON is that of XGrammar, vLLM and OpenAI's `response_format`, in both of its forms:
//!
//! ```text
//! {"type": "structural_tag", "format": {"type": "triggered_tags", ...}}
//! {"type": "structural_tag", "structures": [{"begin", "schema", "end"}, ...], "triggers": ["<function=", ...]}
//! ```

use serde_json::{Map, Value, json};

use crate::ebnf;
use crate::grammar_error::GrammarError;
use crate::json::{left_out, may_leave_out, overlap};

/// The most parts of a structure, each of which is a rule of its grammar.
const MAX_PARTS: usize = 1024;

/// The form of a text, or of a part of it.
#[derive(Clone, Debug, PartialEq)]
pub enum Structure {
    /// This text. Where it is a special token, it is that token.
    Text(String),
    /// Any text without special tokens.
    AnyText,
    /// JSON that is valid under a schema.
    JsonSchema(Value),
    /// JSON that is valid under the schema of a function's arguments, or of one of them.
    Arguments(Arguments),
    /// Text that a regular expression matches.
    Regex(String),
    /// Text of a grammar. One that a structural tag names is EBNF.
    Grammar(String),
    /// One of these texts. They are never special tokens.
    Choice(Vec<String>),
    /// All of these, one behind the other.
    Sequence(Vec<Structure>),
    /// One of these.
    Or(Vec<Structure>),
    /// This or nothing.
    Optional(Box<Structure>),
    /// This, any number of times.
    Star(Box<Structure>),
    /// This, at least once.
    Plus(Box<Structure>),
    /// A part between two texts.
    Tag(Tag),
    /// Any text in which each of some triggers begins a tag.
    Triggered {
        /// Each begins the tags whose begin starts with it.
        triggers: Vec<String>,
        /// The tags.
        tags: Vec<Tag>,
        /// Whether the text begins with a tag.
        at_least_one: bool,
        /// Whether the text ends with the first tag.
        stop_after_first: bool,
    },
    /// Tags with a text between each two.
    Separated {
        /// The tags.
        tags: Vec<Tag>,
        /// The text between two.
        separator: String,
        /// Whether there is one.
        at_least_one: bool,
        /// Whether there is no more than one.
        stop_after_first: bool,
    },
}

/// Arguments of a function.
#[derive(Clone, Debug, PartialEq)]
pub struct Arguments {
    /// The function's name.
    pub function: String,
    /// Their schema.
    pub schema: Value,
    /// What they are instead if the schema cannot be used; `None` if that is an error.
    pub fallback: Option<Value>,
}

/// A part between two texts.
#[derive(Clone, Debug, PartialEq)]
pub struct Tag {
    /// The text before.
    pub begin: String,
    /// The part.
    pub content: Box<Structure>,
    /// The text behind: one of these, at least one.
    pub ends: Vec<String>,
}

impl Structure {
    /// Reads a structural tag.
    ///
    /// # Errors
    /// It is not of a supported form.
    pub fn of_json(value: &Value) -> Result<Self, GrammarError> {
        let members = object(value, "a structural tag")?;
        match members.get("type").and_then(Value::as_str) {
            Some("structural_tag") | None => {}
            Some(other) => return Err(format!("its type is '{other}', not 'structural_tag'")),
        }
        let structure = match members.get("format") {
            Some(format) => of_format(format)?,
            None => of_structures(members)?,
        };
        let num_parts = structure.num_parts();
        if num_parts > MAX_PARTS {
            return Err(format!(
                "it has {num_parts} parts, and may have {MAX_PARTS}"
            ));
        }
        Ok(structure)
    }

    /// The parts that it has, itself included.
    fn num_parts(&self) -> usize {
        1 + self
            .parts()
            .iter()
            .map(|part| part.num_parts())
            .sum::<usize>()
    }

    /// The structures in it.
    pub(super) fn parts(&self) -> Vec<&Structure> {
        match self {
            Self::Text(_)
            | Self::AnyText
            | Self::JsonSchema(_)
            | Self::Arguments(_)
            | Self::Regex(_)
            | Self::Grammar(_)
            | Self::Choice(_) => Vec::new(),
            Self::Sequence(parts) | Self::Or(parts) => parts.iter().collect(),
            Self::Optional(part) | Self::Star(part) | Self::Plus(part) => vec![part],
            Self::Tag(tag) => vec![&tag.content],
            Self::Triggered { tags, .. } | Self::Separated { tags, .. } => {
                tags.iter().map(|tag| &*tag.content).collect()
            }
        }
    }

    /// Whether this text is in it, other than in a schema.
    pub(super) fn names(&self, text: &str) -> bool {
        let in_tag =
            |tag: &Tag| tag.begin.contains(text) || tag.ends.iter().any(|end| end.contains(text));
        let is_own = match self {
            Self::Text(own) | Self::Regex(own) | Self::Grammar(own) => own.contains(text),
            Self::Choice(texts) => texts.iter().any(|it| it.contains(text)),
            Self::Tag(tag) => in_tag(tag),
            Self::Triggered { tags, .. } | Self::Separated { tags, .. } => tags.iter().any(in_tag),
            _ => false,
        };
        is_own || self.parts().iter().any(|part| part.names(text))
    }

    /// The schemas in it that are not wholly enforced: whose each is, and what of it is left out.
    pub(super) fn left_out(&self) -> Vec<String> {
        match self {
            Self::JsonSchema(schema) if may_leave_out(schema) => {
                left_out(schema).unwrap_or_default()
            }
            Self::Arguments(arguments) => {
                let of = format!("function '{}'", arguments.function);
                match left_out(&arguments.schema) {
                    Ok(places) => places
                        .iter()
                        .map(|place| format!("{of}: {place}"))
                        .collect(),
                    Err(problem) => vec![format!("{of}: its whole schema, because {problem}")],
                }
            }
            _ => self.parts().into_iter().flat_map(Self::left_out).collect(),
        }
    }

    /// Why the output of one of its grammars or schemas can be derived in many ways, where that is certain.
    pub(super) fn ambiguity(&self) -> Option<String> {
        match self {
            Self::Grammar(text) => ebnf::ambiguity(text),
            Self::JsonSchema(schema) => overlap(schema),
            Self::Arguments(arguments) => overlap(&arguments.schema)
                .map(|it| format!("in function '{}', {it}", arguments.function)),
            _ => self.parts().into_iter().find_map(Self::ambiguity),
        }
    }

    /// Whether it has a grammar in Lark's syntax.
    pub(super) fn has_lark(&self) -> bool {
        match self {
            Self::Grammar(text) => !ebnf::is_ebnf(text),
            _ => self.parts().into_iter().any(Self::has_lark),
        }
    }

    /// Bytes of the texts that are written into its grammar as they are.
    pub(super) fn num_text_bytes(&self) -> usize {
        let of_tag = |tag: &Tag| tag.begin.len() + tag.ends.iter().map(String::len).sum::<usize>();
        let own = match self {
            Self::Text(text) => text.len(),
            Self::Tag(tag) => of_tag(tag),
            Self::Triggered { triggers, tags, .. } => {
                let triggers = triggers.iter().map(String::len);
                triggers.chain(tags.iter().map(of_tag)).sum()
            }
            Self::Separated {
                tags, separator, ..
            } => separator.len() + tags.iter().map(of_tag).sum::<usize>(),
            _ => 0,
        };
        own + self
            .parts()
            .iter()
            .map(|part| part.num_text_bytes())
            .sum::<usize>()
    }
}

/// The older form: JSON between two texts, wherever a trigger occurs.
fn of_structures(members: &Map<String, Value>) -> Result<Structure, GrammarError> {
    let mut tags = Vec::new();
    for value in list(members, "structures")? {
        let structure = object(value, "a structure")?;
        let schema = structure
            .get("schema")
            .cloned()
            .unwrap_or_else(|| json!({}));
        tags.push(Tag {
            begin: text(structure, "begin")?,
            content: Box::new(Structure::JsonSchema(schema)),
            ends: vec![text(structure, "end")?],
        });
    }
    triggered(members, tags)
}

fn of_format(value: &Value) -> Result<Structure, GrammarError> {
    let members = object(value, "a format")?;
    let kind = text(members, "type")?;
    let elements = || {
        let elements = list(members, "elements")?.iter().map(of_format);
        elements.collect::<Result<Vec<_>, _>>()
    };
    let content = || member(members, "content").and_then(of_format).map(Box::new);
    match kind.as_str() {
        "const_string" => Ok(Structure::Text(text(members, "value")?)),
        "any_text" => {
            let excludes = members.get("excludes").and_then(Value::as_array);
            match excludes.is_none_or(Vec::is_empty) {
                true => Ok(Structure::AnyText),
                false => Err(
                    "'excludes' of any_text is not supported; end the text with the 'end' of a tag"
                        .to_owned(),
                ),
            }
        }
        "json_schema" => {
            let style = members.get("style").and_then(Value::as_str);
            match style {
                None | Some("json") => Ok(Structure::JsonSchema(
                    member(members, "json_schema")?.clone(),
                )),
                Some(style) => Err(format!(
                    "the style '{style}' of a json_schema is not supported; write JSON"
                )),
            }
        }
        "regex" => Ok(Structure::Regex(text(members, "pattern")?)),
        "grammar" => {
            let grammar = text(members, "grammar")?;
            match ebnf::is_ebnf(&grammar) {
                true => Ok(Structure::Grammar(grammar)),
                false => Err("a grammar in it is EBNF, with rules 'root ::= ...'".to_owned()),
            }
        }
        "sequence" => Ok(Structure::Sequence(elements()?)),
        "or" => Ok(Structure::Or(not_empty(elements()?, "elements")?)),
        "optional" => content().map(Structure::Optional),
        "star" => content().map(Structure::Star),
        "plus" => content().map(Structure::Plus),
        "tag" => Ok(Structure::Tag(of_tag(members)?)),
        "triggered_tags" => triggered(members, tags(members)?),
        "tags_with_separator" => Ok(Structure::Separated {
            tags: not_empty(tags(members)?, "tags")?,
            separator: text(members, "separator")?,
            at_least_one: is_set(members, "at_least_one"),
            stop_after_first: is_set(members, "stop_after_first"),
        }),
        other => Err(format!(
            "the format '{other}' is not supported; the formats are const_string, any_text, json_schema, regex, grammar, \
             sequence, or, optional, star, plus, tag, triggered_tags and tags_with_separator"
        )),
    }
}

fn triggered(members: &Map<String, Value>, tags: Vec<Tag>) -> Result<Structure, GrammarError> {
    let triggers = list(members, "triggers")?.iter();
    let triggers: Option<Vec<_>> = triggers.map(|it| it.as_str().map(str::to_owned)).collect();
    let triggers = triggers.ok_or("its triggers are not texts")?;
    if triggers.iter().any(String::is_empty) {
        return Err("a trigger is empty".to_owned());
    }
    let begins = |tag: &&Tag| {
        !triggers
            .iter()
            .any(|trigger| tag.begin.starts_with(trigger))
    };
    if let Some(tag) = tags.iter().find(begins) {
        return Err(format!("no trigger begins the tag '{}'", tag.begin));
    }
    Ok(Structure::Triggered {
        triggers: not_empty(triggers, "triggers")?,
        tags: not_empty(tags, "tags")?,
        at_least_one: is_set(members, "at_least_one"),
        stop_after_first: is_set(members, "stop_after_first"),
    })
}

fn tags(members: &Map<String, Value>) -> Result<Vec<Tag>, GrammarError> {
    let tags = list(members, "tags")?.iter();
    tags.map(|tag| of_tag(object(tag, "a tag")?)).collect()
}

fn of_tag(members: &Map<String, Value>) -> Result<Tag, GrammarError> {
    let ends = match member(members, "end")? {
        Value::String(end) => vec![end.clone()],
        Value::Array(ends) => {
            let ends = ends.iter().map(|end| end.as_str().map(str::to_owned));
            not_empty(
                ends.collect::<Option<Vec<_>>>()
                    .ok_or("an 'end' is no text")?,
                "end",
            )?
        }
        _ => return Err("'end' is neither a text nor a list of texts".to_owned()),
    };
    Ok(Tag {
        begin: text(members, "begin")?,
        content: Box::new(of_format(member(members, "content")?)?),
        ends,
    })
}

fn object<'a>(value: &'a Value, what: &str) -> Result<&'a Map<String, Value>, GrammarError> {
    value
        .as_object()
        .ok_or_else(|| format!("{what} is not a JSON object"))
}

fn member<'a>(members: &'a Map<String, Value>, name: &str) -> Result<&'a Value, GrammarError> {
    members
        .get(name)
        .ok_or_else(|| format!("it has no '{name}' where one is needed"))
}

fn text(members: &Map<String, Value>, name: &str) -> Result<String, GrammarError> {
    let text = member(members, name)?.as_str();
    text.map(str::to_owned)
        .ok_or_else(|| format!("a '{name}' is not a text"))
}

fn list<'a>(members: &'a Map<String, Value>, name: &str) -> Result<&'a Vec<Value>, GrammarError> {
    let list = member(members, name)?.as_array();
    list.ok_or_else(|| format!("'{name}' is not a list"))
}

fn not_empty<T>(list: Vec<T>, name: &str) -> Result<Vec<T>, GrammarError> {
    match list.is_empty() {
        true => Err(format!("'{name}' is an empty list")),
        false => Ok(list),
    }
}

fn is_set(members: &Map<String, Value>, name: &str) -> bool {
    members.get(name) == Some(&Value::Bool(true))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tag(begin: &str, schema: Value, end: &str) -> Tag {
        Tag {
            begin: begin.to_owned(),
            content: Box::new(Structure::JsonSchema(schema)),
            ends: vec![end.to_owned()],
        }
    }

    #[test]
    fn both_forms_mean_the_same() {
        let old = json!({
            "type": "structural_tag", "triggers": ["<f="],
            "structures": [{"begin": "<f=a>", "schema": {"type": "object"}, "end": "</f>"}],
        });
        let new = json!({"type": "structural_tag", "format": {
            "type": "triggered_tags", "triggers": ["<f="], "at_least_one": false, "stop_after_first": false,
            "tags": [{"type": "tag", "begin": "<f=a>", "end": "</f>",
                      "content": {"type": "json_schema", "json_schema": {"type": "object"}}}],
        }});
        let expected = Structure::Triggered {
            triggers: vec!["<f=".to_owned()],
            tags: vec![tag("<f=a>", json!({"type": "object"}), "</f>")],
            at_least_one: false,
            stop_after_first: false,
        };
        assert_eq!(Structure::of_json(&old), Ok(expected.clone()));
        assert_eq!(Structure::of_json(&new), Ok(expected));
    }

    #[test]
    fn a_structure_that_is_not_supported_is_refused_with_the_reason() {
        let format = |format: Value| json!({"type": "structural_tag", "format": format});
        let many = vec![json!({"type": "any_text"}); 1025];
        for (value, words) in [
            (json!([]), "not a JSON object"),
            (json!({"type": "json_schema"}), "not 'structural_tag'"),
            (json!({"type": "structural_tag"}), "no 'structures'"),
            (
                json!({"structures": [], "triggers": ["a"]}),
                "'tags' is an empty list",
            ),
            (
                json!({"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ["<b"]}),
                "no trigger begins the tag '<a>'",
            ),
            (
                json!({"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": [""]}),
                "a trigger is empty",
            ),
            (
                format(json!({"type": "qwen_xml_parameter"})),
                "'qwen_xml_parameter' is not supported",
            ),
            (
                format(json!({"type": "any_text", "excludes": ["a"]})),
                "'excludes'",
            ),
            (
                format(json!({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"})),
                "'qwen_xml'",
            ),
            (
                format(json!({"type": "grammar", "grammar": "start: \"a\""})),
                "EBNF",
            ),
            (
                format(json!({"type": "or", "elements": []})),
                "'elements' is an empty list",
            ),
            (
                format(json!({"type": "tag", "begin": "a", "content": {"type": "any_text"}})),
                "no 'end'",
            ),
            (
                format(json!({"type": "sequence", "elements": many})),
                "1026 parts",
            ),
        ] {
            let error = Structure::of_json(&value).expect_err(words);
            assert!(error.contains(words), "{error}");
        }
    }
}
