//! The rules of a grammar, one for each goal, of which only what leads to an end is written.

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;

use serde_json::Value;

use super::branches::{self, Kinds, Term};
use super::schema::{Problem, Schema};
use super::text::Texts;

/// Number of a rule.
pub(super) type RuleId = usize;

/// A part of a rule.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Part {
    /// This text.
    Text(String),
    /// A terminal in Lark's syntax, which has a text.
    Terminal(String),
    /// A schema for the parser's library, which has a text.
    Library(Value),
    Rule(RuleId),
    Sequence(Vec<Part>),
    Choice(Vec<Part>),
    Optional(Box<Part>),
    Repeat {
        part: Box<Part>,
        min: u64,
        max: Option<u64>,
    },
}

impl Part {
    /// What has no text.
    pub fn nothing() -> Self {
        Self::Choice(Vec::new())
    }

    /// The empty text.
    pub fn empty() -> Self {
        Self::Sequence(Vec::new())
    }
}

/// What a grammar is built of.
pub(super) struct Grammar<'a> {
    pub schema: Schema<'a>,
    rules: Vec<Part>,
    of_goal: HashMap<Vec<Term>, RuleId>,
    /// Goals whose rules are not written yet.
    open: Vec<(Vec<Term>, RuleId)>,
    terminals: HashMap<Texts, bool>,
}

impl<'a> Grammar<'a> {
    /// A grammar with a rule for a whole schema, which is not written yet.
    pub fn new(schema: &'a Value, max_steps: usize) -> Result<Self, Problem> {
        let mut grammar = Self {
            schema: Schema::new(schema, max_steps),
            rules: Vec::new(),
            of_goal: HashMap::new(),
            open: Vec::new(),
            terminals: HashMap::new(),
        };
        grammar.goal(vec![Term {
            schema: 0,
            is_negated: false,
        }])?;
        Ok(grammar)
    }

    /// A goal whose rule is not written yet.
    pub fn next_open(&mut self) -> Option<(Vec<Term>, RuleId)> {
        self.open.pop()
    }

    /// Writes a rule.
    pub fn set_rule(&mut self, rule: RuleId, part: Part) {
        self.rules[rule] = part;
    }

    /// The rule of a goal.
    pub fn goal(&mut self, mut goal: Vec<Term>) -> Result<Part, Problem> {
        goal.sort_unstable();
        goal.dedup();
        // What says nothing makes no difference.
        goal.retain(|term| {
            term.is_negated || !says_nothing(self.schema.document.value(term.schema))
        });
        if let Some(rule) = self.of_goal.get(&goal) {
            return Ok(Part::Rule(*rule));
        }
        let rule = self.add_rule(Part::nothing())?;
        self.of_goal.insert(goal.clone(), rule);
        self.open.push((goal, rule));
        Ok(Part::Rule(rule))
    }

    pub fn add_rule(&mut self, part: Part) -> Result<RuleId, Problem> {
        self.schema.spend(2)?;
        self.rules.push(part);
        Ok(self.rules.len() - 1)
    }

    /// A terminal, or nothing if the set has no text.
    pub fn terminal(&mut self, texts: &Texts, is_quoted: bool) -> Result<Option<String>, Problem> {
        self.schema.spend(1)?;
        let has_any = match self.terminals.get(texts) {
            Some(has_any) => *has_any,
            None => {
                self.schema.spend(5)?;
                let has_any = texts.has_any().ok_or_else(too_much_work)?;
                self.terminals.insert(texts.clone(), has_any);
                has_any
            }
        };
        let quotes = if is_quoted { "\"\\\"\" " } else { "" };
        let behind = if is_quoted { " \"\\\"\"" } else { "" };
        Ok(has_any.then(|| format!("{quotes}{}{behind}", texts.terminal())))
    }

    /// The values of a goal, if they are few and each of them is one that the schema lists, `true`, `false` or null.
    pub fn values(&mut self, goal: &[Term], max: usize) -> Result<Option<Vec<Value>>, Problem> {
        let mut values: Vec<Value> = Vec::new();
        for branch in branches::branches(&mut self.schema, goal)? {
            if branch.is_listed {
                values.extend(self.schema.listed(&branch, goal).into_iter().cloned());
                continue;
            }
            if [Kinds::NUMBER, Kinds::STRING, Kinds::ARRAY, Kinds::OBJECT]
                .iter()
                .any(|it| branch.kinds.has(*it))
            {
                return Ok(None);
            }
            let all = [
                (Kinds::NULL, Value::Null),
                (Kinds::BOOLEAN, true.into()),
                (Kinds::BOOLEAN, false.into()),
            ];
            let own = all.into_iter().filter(|(kind, value)| {
                branch.kinds.has(*kind) && !branch.excluded.contains(&value)
            });
            values.extend(own.map(|(_, value)| value));
        }
        let mut distinct: Vec<Value> = Vec::new();
        for value in values {
            if !distinct
                .iter()
                .any(|it| super::matches::is_equal(it, &value))
            {
                distinct.push(value);
            }
        }
        Ok((distinct.len() <= max).then_some(distinct))
    }

    /// Writes the grammar in Lark's syntax, behind a head. `None` if it has no text.
    pub fn write(&self, head: &str) -> Option<String> {
        let live = self.live_rules();
        let writer = Writer { live: &live };
        let mut out = head.to_owned();
        let mut written = HashSet::new();
        let mut open = vec![0];
        let mut bodies = String::new();
        while let Some(rule) = open.pop() {
            if !written.insert(rule) {
                continue;
            }
            let mut terminals = Vec::new();
            let body = writer.part(&self.rules[rule], &mut open, &mut terminals);
            let body = if live[rule] { body? } else { return None };
            let mut body = if body.is_empty() {
                "\"\"".to_owned()
            } else {
                body
            };
            for (index, terminal) in terminals.iter().enumerate() {
                let name = format!("T{rule}_{index}");
                _ = writeln!(bodies, "{name}: {terminal}");
                body = body.replacen('\u{0}', &name, 1);
            }
            _ = writeln!(bodies, "r{rule}: {body}");
        }
        out.push_str("start: r0\n");
        out.push_str(&bodies);
        Some(out)
    }

    /// The rules that have a text.
    fn live_rules(&self) -> Vec<bool> {
        let mut live = vec![false; self.rules.len()];
        loop {
            let mut has_changed = false;
            // Rules are added before those that they refer to.
            for (index, rule) in self.rules.iter().enumerate().rev() {
                if !live[index] && is_live(rule, &live) {
                    live[index] = true;
                    has_changed = true;
                }
            }
            if !has_changed {
                return live;
            }
        }
    }
}

fn is_live(part: &Part, live: &[bool]) -> bool {
    match part {
        Part::Text(_) | Part::Terminal(_) | Part::Library(_) | Part::Optional(_) => true,
        Part::Rule(rule) => live[*rule],
        Part::Sequence(parts) => parts.iter().all(|it| is_live(it, live)),
        Part::Choice(parts) => parts.iter().any(|it| is_live(it, live)),
        Part::Repeat { part, min, .. } => *min == 0 || is_live(part, live),
    }
}

struct Writer<'g> {
    live: &'g [bool],
}

impl Writer<'_> {
    /// What of a part has a text. Terminals are written apart: a zero byte stands for each.
    fn part(
        &self,
        part: &Part,
        rules: &mut Vec<RuleId>,
        terminals: &mut Vec<String>,
    ) -> Option<String> {
        match part {
            _ if !is_live(part, self.live) => None,
            Part::Text(text) => Some(quoted(text)),
            Part::Terminal(terminal) => {
                terminals.push(terminal.clone());
                Some("\u{0}".to_owned())
            }
            Part::Library(schema) => Some(format!("%json {schema}")),
            Part::Rule(rule) => {
                rules.push(*rule);
                Some(format!("r{rule}"))
            }
            Part::Sequence(parts) => {
                let parts = parts
                    .iter()
                    .filter_map(|it| self.part(it, rules, terminals));
                let parts: Vec<_> = parts.filter(|it| !it.is_empty()).collect();
                Some(parts.join(" "))
            }
            Part::Choice(parts) => {
                let parts = parts
                    .iter()
                    .filter_map(|it| self.part(it, rules, terminals));
                let mut parts: Vec<_> = parts
                    .map(|it| if it.is_empty() { "\"\"".to_owned() } else { it })
                    .collect();
                match parts.len() {
                    1 => parts.pop(),
                    _ => Some(format!("({})", parts.join(" | "))),
                }
            }
            Part::Optional(part) => Some(match self.part(part, rules, terminals) {
                Some(part) if !part.is_empty() => format!("({part})?"),
                _ => String::new(),
            }),
            Part::Repeat { max: Some(0), .. } => Some(String::new()),
            Part::Repeat { part, min, max } => Some(match self.part(part, rules, terminals) {
                None => String::new(),
                Some(part) => match (min, max) {
                    (0, None) => format!("({part})*"),
                    (1, None) => format!("({part})+"),
                    (min, None) => format!("({part}){{{min},}}"),
                    (min, Some(max)) => format!("({part}){{{min},{max}}}"),
                },
            }),
        }
    }
}

fn too_much_work() -> Problem {
    Problem::Wrong(
        "it is too much work to find out whether a value meets all patterns, lengths and bounds in it together; write fewer, \
         or shorter ones"
            .to_owned(),
    )
}

fn says_nothing(schema: &Value) -> bool {
    match schema {
        Value::Bool(all) => *all,
        Value::Object(members) => !members
            .keys()
            .any(|it| super::keywords::ASSERTIONS.contains(&it.as_str())),
        _ => false,
    }
}

/// A text as a literal of Lark.
pub(super) fn quoted(text: &str) -> String {
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

/// A scalar in JSON.
pub(super) fn scalar_text(value: &Value) -> Result<String, Problem> {
    match value {
        Value::Number(number) => match super::decimal::Decimal::of(number) {
            Some(decimal) if number.as_f64().is_some_and(|it| it.abs() < 1e21) => {
                Ok(decimal.text())
            }
            Some(_) => Ok(number.to_string()),
            None => Err(Problem::Wrong(format!(
                "its number {number} has more digits than are kept; write an integer of 64 bits, or at most 16 digits"
            ))),
        },
        other => Ok(other.to_string().replace('\u{7f}', "\\u007f")),
    }
}

/// A value that a schema lists.
pub(super) fn literal(value: &Value) -> Result<Part, Problem> {
    let comma = || Part::Text(",".to_owned());
    Ok(match value {
        Value::Array(items) => {
            let mut parts = vec![Part::Text("[".to_owned())];
            for (index, item) in items.iter().enumerate() {
                if index > 0 {
                    parts.push(comma());
                }
                parts.push(literal(item)?);
            }
            parts.push(Part::Text("]".to_owned()));
            Part::Sequence(parts)
        }
        Value::Object(members) => {
            let mut parts = vec![Part::Text("{".to_owned())];
            for (index, (name, value)) in members.iter().enumerate() {
                if index > 0 {
                    parts.push(comma());
                }
                let name = scalar_text(&Value::from(name.as_str()))?;
                parts.extend([
                    Part::Text(name),
                    Part::Text(":".to_owned()),
                    literal(value)?,
                ]);
            }
            parts.push(Part::Text("}".to_owned()));
            Part::Sequence(parts)
        }
        scalar => Part::Text(scalar_text(scalar)?),
    })
}
