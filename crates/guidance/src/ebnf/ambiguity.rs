//! Why a grammar is ambiguous, as far as its rules show it: texts that can be derived in more and more ways.
//!
//! ```text
//! s ::= [a-z] | s s            begins and ends with itself: "abc" is (ab)c and a(bc)
//! s ::= "a" s | s "b" | "c"    begins or ends with itself: "acb" is a(cb) and (ac)b
//! s ::= "a" s*                 a repetition of what ends with the repetition: "aaa" is a(a)(a) and a(a(a))
//! s ::= "(" s ")" | "(" s ")"
//! ```
//!
//! Parts without recursion are regular expressions, which are never ambiguous for the parser. Whatever is named here is
//! ambiguous; of other ambiguous grammars nothing is named.

use std::collections::HashSet;

use super::grammar::{Expr, Grammar, does_not_recurse, rules_in};
use super::nodes::Nodes;
use super::repair::{parts, repaired};
use super::source;

/// The longest part of a grammar in an error.
const MAX_SHOWN: usize = 100;

/// The first rule that makes `grammar` ambiguous, why, and what to write instead.
pub(super) fn ambiguity(grammar: &Grammar) -> Option<String> {
    let nodes = Nodes::new(grammar);
    let rules = used_rules(grammar);
    let mut rules = rules
        .into_iter()
        .filter(|&rule| !nodes.is_terminal[rule] && nodes.nodes[rule].is_live);
    rules.find_map(|rule| {
        recursion(grammar, &nodes, rule)
            .or_else(|| repetition(grammar, &nodes, rule))
            .or_else(|| duplicate(grammar, &nodes, rule))
    })
}

/// The rules that an output may have, from the root on.
fn used_rules(grammar: &Grammar) -> Vec<usize> {
    let mut is_used = vec![false; grammar.rules.len()];
    let mut found = vec![grammar.root];
    is_used[grammar.root] = true;
    let mut next = 0;
    while let Some(&rule) = found.get(next) {
        next += 1;
        let mut used = Vec::new();
        rules_in(&grammar.rules[rule], &mut used);
        for rule in used {
            if !std::mem::replace(&mut is_used[rule], true) {
                found.push(rule);
            }
        }
    }
    found
}

/// Whether a rule can begin with itself and end with itself.
fn is_recursive_at_both_ends(nodes: &Nodes<'_>, rule: usize) -> bool {
    nodes.begins_with_itself(rule) && nodes.ends_with_itself(rule)
}

fn recursion(grammar: &Grammar, nodes: &Nodes<'_>, rule: usize) -> Option<String> {
    if !is_recursive_at_both_ends(nodes, rule) {
        return None;
    }
    let name = &grammar.names[rule];
    let how = match with_own_ends(&grammar.rules[rule], rule) {
        Some(option) => format!(" ('{}')", shown(source::sequence(option, &grammar.names))),
        None => String::new(),
    };
    let instead = match repair(grammar, rule) {
        Some(body) => format!("write '{name} ::= {body}'"),
        None => "let it refer to itself at one end only".to_owned(),
    };
    Some(format!(
        "its rule '{name}' can begin with itself and end with itself{how}, so that a text is derived in many ways; {instead}"
    ))
}

/// An unambiguous body of equal texts for a rule, if there is a short one.
fn repair(grammar: &Grammar, rule: usize) -> Option<String> {
    let body = repaired(grammar, rule)?;
    let text = source::sequence(parts(&body), &grammar.names);
    let mut rules = grammar.rules.clone();
    rules[rule] = body;
    let grammar = Grammar {
        rules,
        names: grammar.names.clone(),
        root: grammar.root,
    };
    let nodes = Nodes::new(&grammar);
    let is_ambiguous = || {
        is_recursive_at_both_ends(&nodes, rule)
            || repetition(&grammar, &nodes, rule).is_some()
            || duplicate(&grammar, &nodes, rule).is_some()
    };
    (text.len() <= MAX_SHOWN && !is_ambiguous()).then_some(text)
}

/// An alternative that begins and ends with the rule.
fn with_own_ends(body: &Expr, rule: usize) -> Option<&[Expr]> {
    let options = match body {
        Expr::Any(options) => options,
        _ => std::slice::from_ref(body),
    };
    let own = Expr::Rule(rule);
    let mut options = options.iter().map(parts);
    options.find(|parts| parts.first() == Some(&own) && parts.last() == Some(&own))
}

fn repetition(grammar: &Grammar, nodes: &Nodes<'_>, rule: usize) -> Option<String> {
    let of_rule = nodes.nodes.iter().enumerate();
    let of_rule = of_rule.filter(|(_, node)| node.rule == rule && node.is_live);
    let (repetition, why) = of_rule
        .filter_map(|(number, node)| Some((number, node.repetition?)))
        .find_map(|(number, repetition)| {
            let why = if nodes.repeats_a_repetition(number) {
                "repeats what is a repetition itself; repeat it once"
            } else if nodes.repeats_nothing(number) {
                "repeats what may be empty; let it have a text"
            } else if nodes.begins_with_itself(number) || nodes.ends_with_itself(number) {
                "repeats what begins or ends with the repetition itself; put a literal between the two"
            } else {
                return None;
            };
            Some((repetition, why))
        })?;
    let text = shown(source::part(repetition, &grammar.names));
    let name = &grammar.names[rule];
    Some(format!(
        "'{text}' in its rule '{name}' {why}, or a text is derived in many ways"
    ))
}

fn duplicate(grammar: &Grammar, nodes: &Nodes<'_>, rule: usize) -> Option<String> {
    let twice = twice(&grammar.rules[rule], grammar, nodes)?;
    let name = &grammar.names[rule];
    let text = shown(source::alternatives(
        std::slice::from_ref(twice),
        &grammar.names,
    ));
    Some(format!(
        "its rule '{name}' has the alternative '{text}' twice; leave one out"
    ))
}

/// An alternative that is there twice.
fn twice<'a>(expr: &'a Expr, grammar: &Grammar, nodes: &Nodes<'_>) -> Option<&'a Expr> {
    if does_not_recurse(expr, &nodes.is_terminal) {
        return None;
    }
    match expr {
        Expr::Any(options) => {
            let mut seen = HashSet::new();
            let again = options.iter().find(|option| {
                !seen.insert(source::part(option, &grammar.names)) && nodes.is_live(option)
            });
            again.or_else(|| options.iter().find_map(|it| twice(it, grammar, nodes)))
        }
        Expr::All(parts) => parts.iter().find_map(|it| twice(it, grammar, nodes)),
        Expr::Repeat(inner, ..) => twice(inner, grammar, nodes),
        Expr::Rule(_) | Expr::Regex(_) => None,
    }
}

/// The beginning of a part of a grammar.
fn shown(text: String) -> String {
    match text.char_indices().nth(MAX_SHOWN) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use crate::ebnf::ambiguity;

    #[test]
    fn names_the_rule_and_what_to_write_instead() {
        let recursive = |name: &str, how: &str, instead: &str| {
            format!(
                "its rule '{name}' can begin with itself and end with itself{how}, so that a text is derived in many ways; \
                 {instead}"
            )
        };
        for (grammar, expected) in [
            (
                "root ::= s\ns ::= [a-zA-Z ,.] | s s",
                recursive("s", " ('s s')", "write 's ::= [a-zA-Z ,.]+'"),
            ),
            (
                "root ::= s\ns ::= [^\"\\n\\]] | s s | s s s",
                recursive("s", " ('s s')", "write 's ::= [^\"\\n\\]]+'"),
            ),
            (
                "root ::= s\ns ::= [a-zA-Z ,.] | s s | s s s | \"(\" s \")\" | t\nt ::= s t | t s | s | [a-z]",
                recursive("s", " ('s s')", "let it refer to itself at one end only"),
            ),
            (
                "root ::= s\ns ::= [a-z] | s s | \"(\" s \")\" | t\nt ::= \"<\" t \">\" | \"t\"",
                recursive(
                    "s",
                    " ('s s')",
                    "write 's ::= ([a-z] | \"(\" s \")\" | t)+'",
                ),
            ),
            (
                "root ::= e\ne ::= e \"+\" e | e [*\\-] e | \"(\" e \")\" | [0-9]+",
                recursive(
                    "e",
                    " ('e \"+\" e')",
                    "write 'e ::= (\"(\" e \")\" | [0-9]+) ((\"+\" | [*\\-]) (\"(\" e \")\" | [0-9]+))*'",
                ),
            ),
            (
                "root ::= \"a\" root | root \"\\\"\\\\\" | \"c\"",
                recursive(
                    "root",
                    "",
                    "write 'root ::= \"a\"* \"c\" \"\\\"\\\\\"*'",
                ),
            ),
            (
                "root ::= s\ns ::= t t | \"a\"\nt ::= s | \"b\"",
                recursive("s", "", "let it refer to itself at one end only"),
            ),
            (
                "root ::= s\ns ::= n s \"x\" s n | \"y\"\nn ::= \" \"?",
                recursive("s", "", "let it refer to itself at one end only"),
            ),
            (
                "root ::= s\ns ::= \"a\" | s s s",
                recursive("s", " ('s s s')", "let it refer to itself at one end only"),
            ),
            (
                "root ::= list+\nlist ::= item*\nitem ::= \"(\" root \")\"",
                "'list+' in its rule 'root' repeats what is a repetition itself; repeat it once, or a text is derived in \
                 many ways"
                    .to_owned(),
            ),
            (
                "root ::= item*\nitem ::= (\"(\" root \")\")?",
                "'item*' in its rule 'root' repeats what may be empty; let it have a text, or a text is derived in many ways"
                    .to_owned(),
            ),
            (
                "root ::= \"a\" root*",
                "'root*' in its rule 'root' repeats what begins or ends with the repetition itself; put a literal between \
                 the two, or a text is derived in many ways"
                    .to_owned(),
            ),
            (
                "root ::= \"(\" root \")\" | . | \"(\" root \")\"",
                "its rule 'root' has the alternative '\"(\" root \")\"' twice; leave one out".to_owned(),
            ),
        ] {
            assert_eq!(ambiguity(grammar), Some(expected), "{grammar}");
        }
    }

    #[test]
    fn blames_no_unambiguous_grammar() {
        for grammar in [
            // The grammar of JSON, as in llama.cpp.
            "root ::= object\nvalue ::= object | array | string | number | (\"true\" | \"false\" | \"null\") ws\n\
             object ::= \"{\" ws (string \":\" ws value (\",\" ws string \":\" ws value)*)? \"}\" ws\n\
             array ::= \"[\" ws (value (\",\" ws value)*)? \"]\" ws\n\
             string ::= \"\\\"\" ([^\"\\\\\\x7F\\x00-\\x1F] | \"\\\\\" [\"\\\\bfnrt])* \"\\\"\" ws\n\
             number ::= (\"-\"? ([0-9] | [1-9] [0-9]{0,15})) (\".\" [0-9]+)? ws\nws ::= | \" \" | \"\\n\" [ \\t]{0,20}",
            // Arithmetic with precedence.
            "root ::= sum\nsum ::= product ((\"+\" | \"-\") product)*\nproduct ::= atom (\"*\" atom)*\n\
             atom ::= [0-9]+ | \"(\" sum \")\"",
            "root ::= s\ns ::= [a-zA-Z ,.]+",
            "root ::= s\ns ::= ([a-z] | \"(\" s \")\")+",
            "root ::= s\ns ::= s [a-z] | [a-z] | \"(\" s \")\"",
            "root ::= s\ns ::= [a-z] s | \"(\" s \")\" | \"\"",
            // Two references in one alternative.
            "root ::= \"a\" root root | \"b\"",
            "root ::= \"(\" root \",\" root \")\" | \"x\"",
            // Regular expressions are not ambiguous.
            "root ::= (([a-z]*)* | \"a\" | \"a\")*",
            // A rule that no output has, and one without a text.
            "root ::= \"a\"\nother ::= other other | \"b\"",
            "root ::= \"a\" | \"(\" root \")\" | other\nother ::= other other",
            "root ::= \"(\" root \")\" | \"x\" | (root root){0}",
            // Lark is not read, nor is what is wrong.
            "start: s\ns: s s | /a/",
            "root ::= (",
        ] {
            assert_eq!(ambiguity(grammar), None, "{grammar}");
        }
    }
}
