//! The built-in post-processors, which every model has.

use std::fmt::Write as _;
use std::sync::Arc;

use serde::Deserialize;

use inflight_base::TokenId;
use inflight_sampling::{
    LogitsProcessor, ProcessLogits, SampleError, SamplingInput, forbid, forbid_all_but,
};

/// A built-in post-processor.
pub(super) struct BuiltIn {
    pub name: &'static str,
    /// The format of its arguments, as an example.
    pub arguments: &'static str,
    /// Description for the documentation.
    pub doc: &'static str,
    /// Creates a processor from a request's arguments and the vocabulary size.
    pub start: fn(&str, u32) -> Result<LogitsProcessor, String>,
}

/// All built-in post-processors, in the order of the documentation.
pub(super) const BUILT_IN: &[BuiltIn] = &[
    BuiltIn {
        name: "force_tokens",
        arguments: r#"{"tokens": [ID, ...], "start": 0}"#,
        doc: "Forces the output to contain these tokens consecutively, starting at output token `start`.",
        start: |arguments, vocab_size| {
            let ForceTokens { tokens, start } = parsed(arguments)?;
            check(&tokens, vocab_size)?;
            Ok(shared(ForceTokens { tokens, start }))
        },
    },
    BuiltIn {
        name: "ban_tokens",
        arguments: r#"{"tokens": [ID, ...]}"#,
        doc: "Bans these tokens from the output.",
        start: |arguments, vocab_size| {
            let AllTokens { tokens } = parsed(arguments)?;
            let ban = Rule::Ban(tokens);
            rule_for(ban, u32::MAX, vocab_size)
        },
    },
    BuiltIn {
        name: "ban_first_tokens",
        arguments: r#"{"tokens": [ID, ...], "count": 1}"#,
        doc: "Bans these tokens from the first `count` tokens of the output.",
        start: |arguments, vocab_size| {
            let FirstTokens { tokens, count } = parsed(arguments)?;
            rule_for(Rule::Ban(tokens), count, vocab_size)
        },
    },
    BuiltIn {
        name: "allow_first_tokens",
        arguments: r#"{"tokens": [ID, ...], "count": 1}"#,
        doc: "Allows only these tokens as the first `count` tokens of the output; later tokens are unrestricted.",
        start: |arguments, vocab_size| {
            let FirstTokens { mut tokens, count } = parsed(arguments)?;
            tokens.sort_unstable();
            tokens.dedup();
            rule_for(Rule::Allow(tokens), count, vocab_size)
        },
    },
];

/// The reference table of the built-in post-processors, in Markdown.
pub fn reference_table() -> String {
    let mut table = String::from("| name | arguments | what it does |\n|---|---|---|\n");
    for BuiltIn {
        name,
        arguments,
        doc,
        ..
    } in BUILT_IN
    {
        // Writing to a String cannot fail.
        let _ = writeln!(table, "| `{name}` | `{arguments}` | {doc} |");
    }
    table
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AllTokens {
    tokens: Vec<TokenId>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FirstTokens {
    tokens: Vec<TokenId>,
    #[serde(default = "one")]
    count: u32,
}

fn one() -> u32 {
    1
}

/// Forces one token at each of several positions of the output.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ForceTokens {
    /// The forced tokens. The first is output token `start`.
    tokens: Vec<TokenId>,
    #[serde(default)]
    start: u32,
}

impl ProcessLogits for ForceTokens {
    fn process(&self, logits: &mut [f32], input: SamplingInput<'_>) -> Result<(), SampleError> {
        let index = input.generated().len().checked_sub(self.start as usize);
        let Some(&token) = index.and_then(|index| self.tokens.get(index)) else {
            return Ok(());
        };
        forbid_all_but(logits, &[token]);
        // Force the token even if the model rules it out.
        if let Some(logit) = logits.get_mut(token as usize)
            && *logit == f32::NEG_INFINITY
        {
            *logit = 0.0;
        }
        Ok(())
    }
}

/// Restricts the first `count` tokens of an output.
struct FirstRule {
    rule: Rule,
    count: usize,
}

enum Rule {
    /// All tokens but these.
    Ban(Vec<TokenId>),
    /// Only these tokens. Sorted.
    Allow(Vec<TokenId>),
}

impl ProcessLogits for FirstRule {
    fn process(&self, logits: &mut [f32], input: SamplingInput<'_>) -> Result<(), SampleError> {
        if input.generated().len() < self.count {
            match &self.rule {
                Rule::Ban(tokens) => tokens.iter().for_each(|&token| forbid(logits, token)),
                Rule::Allow(tokens) => forbid_all_but(logits, tokens),
            }
        }
        Ok(())
    }
}

fn rule_for(rule: Rule, count: u32, vocab_size: u32) -> Result<LogitsProcessor, String> {
    let (Rule::Ban(tokens) | Rule::Allow(tokens)) = &rule;
    check(tokens, vocab_size)?;
    if count == 0 {
        return Err("'count' is 0, which would have no effect".to_owned());
    }
    let count = count as usize;
    Ok(shared(FirstRule { rule, count }))
}

fn shared(processor: impl ProcessLogits + 'static) -> LogitsProcessor {
    LogitsProcessor(Arc::new(processor))
}

fn parsed<'a, T: Deserialize<'a>>(arguments: &'a str) -> Result<T, String> {
    serde_json::from_str(arguments).map_err(|error| error.to_string())
}

fn check(tokens: &[TokenId], vocab_size: u32) -> Result<(), String> {
    if tokens.is_empty() {
        return Err("'tokens' is empty".to_owned());
    }
    match tokens.iter().find(|token| **token >= vocab_size) {
        Some(token) => Err(format!(
            "token {token} is not in the vocabulary, 0 to {}",
            vocab_size - 1
        )),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use inflight_sampling::{Owner, SamplingParams};

    const OUT: f32 = f32::NEG_INFINITY;

    /// Processes the logits 0, 1, 2, 3 and `-inf`, after a prompt of two tokens and `num_generated` output tokens.
    fn processed(name: &str, arguments: &str, num_generated: usize) -> Vec<f32> {
        let built_in = BUILT_IN.iter().find(|built_in| built_in.name == name);
        let start = built_in.expect("a name").start;
        let processor = start(arguments, 5).expect("good arguments");
        let mut logits = [0.0, 1.0, 2.0, 3.0, OUT];
        let params = SamplingParams::default();
        let input = SamplingInput {
            params: &params,
            tokens: &[0; 9][..2 + num_generated],
            num_prompt_tokens: 2,
            beam: 0,
            owner: Owner::default(),
        };
        processor.0.process(&mut logits, input).expect("it can");
        logits.to_vec()
    }

    #[test]
    fn forces_tokens_at_their_positions() {
        const FREE: [f32; 5] = [0.0, 1.0, 2.0, 3.0, OUT];
        let forced = r#"{"tokens": [2, 4], "start": 1}"#;
        for (num_generated, expected) in [
            (0, FREE),
            (1, [OUT, OUT, 2.0, OUT, OUT]),
            (2, [OUT, OUT, OUT, OUT, 0.0]),
            (3, FREE),
        ] {
            assert_eq!(processed("force_tokens", forced, num_generated), expected);
        }
        let at_once = processed("force_tokens", r#"{"tokens": [3]}"#, 0);
        assert_eq!(at_once, [OUT, OUT, OUT, 3.0, OUT]);
    }

    #[test]
    fn bans_and_allows_tokens_for_count_tokens() {
        let free = [0.0, 1.0, 2.0, 3.0, OUT];
        let banned = [0.0, OUT, 2.0, OUT, OUT];
        let allowed = [OUT, 1.0, OUT, 3.0, OUT];
        let two = r#"{"tokens": [3, 1, 3], "count": 2}"#;
        let one = r#"{"tokens": [3, 1]}"#;
        for (name, arguments, while_few, after, num_first) in [
            ("ban_tokens", one, banned, banned, 0),
            ("ban_first_tokens", one, banned, free, 1),
            ("ban_first_tokens", two, banned, free, 2),
            ("allow_first_tokens", one, allowed, free, 1),
            ("allow_first_tokens", two, allowed, free, 2),
        ] {
            for num_generated in 0..4 {
                let expected = if num_generated < num_first {
                    while_few
                } else {
                    after
                };
                let got = processed(name, arguments, num_generated);
                assert_eq!(got, expected, "{name} {arguments} after {num_generated}");
            }
        }
    }

    #[test]
    fn keeps_nan_and_infinity_visible() {
        let start = BUILT_IN[0].start;
        let processor = start(r#"{"tokens": [1]}"#, 3).expect("good arguments");
        let params = SamplingParams::default();
        let input = SamplingInput {
            params: &params,
            tokens: &[0],
            num_prompt_tokens: 1,
            beam: 0,
            owner: Owner::default(),
        };
        let mut logits = [f32::NAN, 0.0, f32::INFINITY];
        processor.0.process(&mut logits, input).expect("it can");
        assert!(logits[0].is_nan() && logits[2] == f32::INFINITY);
    }
}
