//! Structures as grammars of `llguidance`: a Lark grammar, with a grammar of its own for each schema, expression and
//! grammar in it.
//!
//! ```text
//! any text up to "<f="          r0[lazy]: /(.|\n)*<f=/         the first occurrence ends it
//! any text without "<f="        T1: /(.|\n)*/ & ~/(.|\n)*<f=(.|\n)*/
//! a schema                      @g0
//! "a<|tool|>b"                  "a" <[42]> "b"                 <|tool|> is the special token 42
//! ```

use std::fmt::Write as _;

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};

use crate::ebnf::lark;
use crate::grammar_error::GrammarError;
use crate::json::of_schema;
use crate::limits::{MAX_REGEX_BYTES, MAX_SCHEMA_BYTES, longest_regex};
use crate::regex::{choice, complete, escaped};
use crate::structure::{Arguments, Structure, Tag};
use inflight_base::TokenId;

/// A special token: its text and id.
pub(super) type SpecialToken = (String, TokenId);

/// The grammar of a structure, for a model with these special tokens.
///
/// # Errors
/// A part cannot be written as a grammar.
pub(super) fn grammar(
    structure: &Structure,
    special_tokens: &[SpecialToken],
) -> Result<TopLevelGrammar, GrammarError> {
    let mut writer = Writer {
        special_tokens,
        rules: String::from("TEXT: /(.|\\n)*/\n"),
        num_rules: 0,
        grammars: Vec::new(),
        num_argument_bytes: 0,
    };
    let start = writer.expression(structure)?;
    let lark = format!("start: {start}\n{}", writer.rules);
    let mut grammars = vec![GrammarWithLexer::from_lark(lark)];
    grammars.append(&mut writer.grammars);
    Ok(TopLevelGrammar {
        grammars,
        max_tokens: None,
    })
}

struct Writer<'a> {
    special_tokens: &'a [SpecialToken],
    rules: String,
    num_rules: usize,
    grammars: Vec<GrammarWithLexer>,
    num_argument_bytes: usize,
}

impl Writer<'_> {
    /// A structure as an expression of Lark.
    fn expression(&mut self, structure: &Structure) -> Result<String, GrammarError> {
        match structure {
            Structure::Text(text) => Ok(self.literal(text)),
            Structure::AnyText => Ok("TEXT".to_owned()),
            Structure::JsonSchema(schema) => {
                let grammar = of_schema(schema)?;
                Ok(self.inner(grammar))
            }
            Structure::Arguments(arguments) => self.arguments(arguments),
            Structure::Regex(regex) => {
                let grammar = GrammarWithLexer::from_regex(complete(regex)?);
                Ok(self.inner(grammar))
            }
            Structure::Grammar(text) => {
                let grammar = GrammarWithLexer::from_lark(lark(text)?);
                Ok(self.inner(grammar))
            }
            Structure::Choice(texts) => {
                let grammar = GrammarWithLexer::from_regex(&choice(texts));
                Ok(self.inner(grammar))
            }
            Structure::Sequence(parts) => self.sequence(parts),
            Structure::Or(parts) => {
                let parts: Result<Vec<_>, _> =
                    parts.iter().map(|part| self.expression(part)).collect();
                Ok(any(&parts?))
            }
            Structure::Optional(part) => Ok(format!("({})?", self.expression(part)?)),
            Structure::Star(part) => Ok(format!("({})*", self.expression(part)?)),
            Structure::Plus(part) => Ok(format!("({})+", self.expression(part)?)),
            Structure::Tag(tag) => self.tag(tag, &tag.begin),
            Structure::Separated {
                tags,
                separator,
                at_least_one,
                stop_after_first,
            } => {
                let tags = self.tags(tags.iter().map(|tag| (tag, &tag.begin[..])))?;
                let separator = self.literal(separator);
                let all = match stop_after_first {
                    true => tags,
                    false => format!("{tags} ({separator} {tags})*"),
                };
                Ok(match at_least_one {
                    true => format!("({all})"),
                    false => format!("({all})?"),
                })
            }
            Structure::Triggered {
                triggers,
                tags,
                at_least_one,
                stop_after_first,
            } => self.triggered(triggers, tags, *at_least_one, *stop_after_first),
        }
    }

    /// Arguments by their schema, or by what stands in for it. Schemas of all functions together have a limit.
    fn arguments(&mut self, arguments: &Arguments) -> Result<String, GrammarError> {
        let Arguments {
            function,
            schema,
            fallback,
        } = arguments;
        let num_bytes = schema.to_string().len();
        let fits = self.num_argument_bytes + num_bytes <= MAX_SCHEMA_BYTES
            && longest_regex(schema) <= MAX_REGEX_BYTES;
        let grammar = match (of_schema(schema), fallback) {
            (Ok(grammar), _) if fits || fallback.is_none() => {
                self.num_argument_bytes += num_bytes;
                grammar
            }
            (_, Some(fallback)) => of_schema(fallback)?,
            (Err(problem), None) => {
                return Err(format!("the schema of function '{function}': {problem}"));
            }
            (Ok(grammar), None) => grammar,
        };
        Ok(self.inner(grammar))
    }

    /// Parts behind each other. Free text ends where the text behind it begins.
    fn sequence(&mut self, parts: &[Structure]) -> Result<String, GrammarError> {
        let mut all = Vec::new();
        let mut rest = parts;
        while let Some((part, behind)) = rest.split_first() {
            rest = behind;
            match (part, behind.first()) {
                (Structure::AnyText, Some(Structure::Text(end))) if !end.is_empty() => {
                    all.push(self.text_up_to(std::slice::from_ref(end)));
                    rest = &behind[1..];
                }
                _ => all.push(self.expression(part)?),
            }
        }
        Ok(match all.is_empty() {
            true => "\"\"".to_owned(),
            false => format!("({})", all.join(" ")),
        })
    }

    /// Grammar of a tag whose opening text is exactly `begin`.
    fn tag(&mut self, tag: &Tag, begin: &str) -> Result<String, GrammarError> {
        let begin = self.literal(begin);
        let is_open = tag.ends.iter().all(|end| !end.is_empty());
        if *tag.content == Structure::AnyText && is_open {
            return Ok(format!("{begin} {}", self.text_up_to(&tag.ends)));
        }
        let content = self.expression(&tag.content)?;
        let ends: Vec<_> = tag.ends.iter().map(|end| self.literal(end)).collect();
        Ok(format!("{begin} {content} {}", any(&ends)))
    }

    fn tags<'a>(
        &mut self,
        tags: impl Iterator<Item = (&'a Tag, &'a str)>,
    ) -> Result<String, GrammarError> {
        let tags: Result<Vec<_>, _> = tags.map(|(tag, begin)| self.tag(tag, begin)).collect();
        Ok(any(&tags?))
    }

    fn triggered(
        &mut self,
        triggers: &[String],
        tags: &[Tag],
        at_least_one: bool,
        stop_after_first: bool,
    ) -> Result<String, GrammarError> {
        // Tags behind text that ends with their trigger.
        let mut found = Vec::new();
        for (i, trigger) in triggers.iter().enumerate() {
            let first = |tag: &Tag| triggers.iter().position(|it| tag.begin.starts_with(it));
            let of_trigger = tags.iter().filter(|tag| first(tag) == Some(i));
            let rests = of_trigger.map(|tag| (tag, &tag.begin[trigger.len()..]));
            if rests.clone().next().is_some() {
                let tags = self.tags(rests)?;
                let text = self.text_up_to(std::slice::from_ref(trigger));
                found.push(format!("{text} {tags}"));
            }
        }
        let found = any(&found);
        let tail = self.text_without(triggers);
        let first = self.tags(tags.iter().map(|tag| (tag, &tag.begin[..])))?;
        Ok(match (at_least_one, stop_after_first) {
            (true, true) => first,
            (true, false) => format!("({first} {found}* {tail})"),
            (false, true) => format!("({found} | {tail})"),
            (false, false) => format!("({found}* {tail})"),
        })
    }

    /// Text in which special tokens are themselves.
    fn literal(&self, text: &str) -> String {
        let mut parts = Vec::new();
        let mut rest = text;
        while let Some((start, name, id)) = self.first_special(rest) {
            parts.push(quoted(&rest[..start]));
            parts.push(format!("<[{id}]>"));
            rest = &rest[start + name.len()..];
        }
        parts.push(quoted(rest));
        parts.retain(|part| part != "\"\"");
        match parts.is_empty() {
            true => "\"\"".to_owned(),
            false => parts.join(" "),
        }
    }

    /// The first special token in a text; of those that begin there, the longest.
    fn first_special(&self, text: &str) -> Option<(usize, &str, TokenId)> {
        let found = self.special_tokens.iter().filter_map(|(name, id)| {
            let start = text.find(name.as_str())?;
            Some((start, name.as_str(), *id))
        });
        found.min_by_key(|(start, name, _)| (*start, usize::MAX - name.len()))
    }

    /// Any text up to the first of `ends`, which are not empty, and that.
    fn text_up_to(&mut self, ends: &[String]) -> String {
        let mut all = Vec::new();
        let mut texts = Vec::new();
        for end in ends {
            match self.first_special(end) {
                // Free text has no special tokens, so that one ends it.
                Some((0, ..)) => all.push(format!("TEXT {}", self.literal(end))),
                Some((start, ..)) => {
                    let rule = self.lazy(&end[..start]);
                    all.push(format!("{rule} {}", self.literal(&end[start..])));
                }
                None => texts.push(pattern(end)),
            }
        }
        if !texts.is_empty() {
            let texts = texts.join("|");
            all.push(self.rule("r", "[lazy]", &format!("/(.|\\n)*({texts})/")));
        }
        any(&all)
    }

    fn lazy(&mut self, end: &str) -> String {
        self.rule("r", "[lazy]", &format!("/(.|\\n)*{}/", pattern(end)))
    }

    /// Any text that has none of `triggers` in it.
    fn text_without(&mut self, triggers: &[String]) -> String {
        let is_text = |trigger: &&String| self.first_special(trigger).is_none();
        let patterns: Vec<_> = triggers
            .iter()
            .filter(is_text)
            .map(|it| pattern(it))
            .collect();
        match patterns.is_empty() {
            true => "TEXT".to_owned(),
            false => {
                let patterns = patterns.join("|");
                self.rule(
                    "T",
                    "",
                    &format!("/(.|\\n)*/ & ~/(.|\\n)*({patterns})(.|\\n)*/"),
                )
            }
        }
    }

    /// Adds a rule, or a terminal if `kind` is a capital, and returns its name.
    fn rule(&mut self, kind: &str, attributes: &str, body: &str) -> String {
        let name = format!("{kind}{}", self.num_rules);
        self.num_rules += 1;
        // Writing to a String cannot fail.
        let _ = writeln!(self.rules, "{name}{attributes}: {body}");
        name
    }

    /// Adds a grammar, and returns how it is referred to.
    fn inner(&mut self, mut grammar: GrammarWithLexer) -> String {
        let name = format!("g{}", self.grammars.len());
        grammar.name = Some(name.clone());
        self.grammars.push(grammar);
        format!("@{name}")
    }
}

fn any(parts: &[String]) -> String {
    format!("({})", parts.join(" | "))
}

/// A text as a literal of Lark, which has JSON's escapes.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

fn pattern(text: &str) -> String {
    text.chars().map(escaped).collect()
}
