//! Converts EBNF grammars, as used by llama.cpp (GBNF) and XGrammar, to Lark's syntax, which the parser reads.
//!
//! ```text
//! root  ::= "[" item ("," item)* "]"         start: r0
//! item  ::= root | digit+                    r0: T2 r1 (T3 r1)* T4        r1: r0 | T5
//! digit ::= [0-9]                            T5: T1+                      T1: /[\x{30}-\x{39}]/
//! ```
//!
//! Parts without recursion become *terminals*: regular expressions. A terminal always matches the longest text, so
//! parts of an ambiguous grammar may be unreachable; the output always conforms to the grammar. A grammar without any
//! recursion is a single terminal and exact.

mod ambiguity;
mod grammar;
mod lexer;
mod nodes;
mod parser;
mod repair;
mod sizes;
mod source;
mod terminals;
mod writer;

use crate::grammar_error::GrammarError;

/// A grammar in either notation as Lark.
pub(super) fn lark(text: &str) -> Result<String, GrammarError> {
    match is_ebnf(text) {
        true => to_lark(text),
        false => Ok(text.to_owned()),
    }
}

/// Whether a grammar is EBNF instead of Lark.
pub(super) fn is_ebnf(text: &str) -> bool {
    text.contains("::=")
}

/// Converts an EBNF grammar to Lark's syntax.
///
/// # Errors
/// A syntax error with its line, or a grammar that is too large.
pub fn to_lark(text: &str) -> Result<String, GrammarError> {
    writer::write(&parser::parse(text)?)
}

/// Why a grammar is ambiguous, and what to write instead, if that is seen from its rules: a part of a sentence. `None`
/// for Lark's syntax.
pub(super) fn ambiguity(text: &str) -> Option<String> {
    match is_ebnf(text) {
        true => ambiguity::ambiguity(&parser::parse(text).ok()?),
        false => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_non_recursive_grammar_is_one_terminal() {
        let lark = to_lark(
            "# a date\nroot ::= year \"-\" [0-9]{2} |\n  \"to\\u0064ay\"\nyear ::= [1-9] [0-9]{3,}\n",
        );
        assert_eq!(
            lark.expect("good"),
            "start: T0\n\
             T0: ((T1 /\\x{2D}/ (/[\\x{30}-\\x{39}]/){2,2}) | /today/)\n\
             T1: (/[\\x{31}-\\x{39}]/ (/[\\x{30}-\\x{39}]/){3,})\n"
        );
    }

    #[test]
    fn recursive_rules_keep_terminals_between_them() {
        let lark = to_lark(
            "root ::= \"[\" ws item (ws \",\" item)* \"]\"\nitem ::= root | [^a\\]-]+\nws ::= \" \"?",
        );
        assert_eq!(
            lark.expect("good"),
            "start: r0\n\
             T3: (/\\x{5B}/ T1)\n\
             T4: (T1 /\\x{2C}/)\n\
             T5: /\\x{5D}/\n\
             r0: (T3 r2 ((T4 r2))* T5)\n\
             T1: (/ /)?\n\
             T6: (/[^\\x{61}\\x{5D}\\x{2D}]/)+\n\
             r2: (r0 | T6)\n"
        );
    }

    #[test]
    fn errors_name_the_line() {
        let nested = format!("root ::= {}\"a\"{}", "(".repeat(26), ")".repeat(26));
        for (grammar, words) in [
            ("a ::= \"x\"", "no rule 'root'"),
            ("root ::= a", "no rule 'a'"),
            ("root ::= \"a\"\nroot ::= \"b\"", "rule 'root' twice"),
            (
                "root ::= \"a",
                "line 1 of the grammar: a literal has no closing quote",
            ),
            (
                "root ::= \"a\"\n  [",
                "line 2 of the grammar: a character class has no",
            ),
            ("root ::= []", "class is empty"),
            ("root ::= [z-a]", "is empty"),
            ("root ::= * \"a\"", "nothing to repeat"),
            ("root ::= (\"a\"", "parenthesis is not closed"),
            ("root ::= \"a\")", "expected a rule"),
            ("::= \"a\"", "expected a rule"),
            ("root ::= \"\\q\"", "unknown escape '\\q'"),
            ("root ::= \"\\ud800\"", "is not a character"),
            ("root ::= \"a\"{3,2}", "{3,2} is not"),
            ("root ::= \"a\"{100000}", "numbers up to 10000"),
            ("root ::= \"a\" (= \"b\")", "unexpected character '='"),
            ("root := \"a\" ::=", "not followed by ':='"),
            (nested.as_str(), "more than 25 nested parentheses"),
        ] {
            let problem = to_lark(grammar).expect_err(grammar);
            assert!(problem.contains(words), "{grammar}: {problem}");
        }
    }
}
