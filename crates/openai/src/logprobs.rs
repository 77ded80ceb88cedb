//! Log-probabilities in the messages of conversations and responses.

use serde::Serialize;

use crate::generation::{Candidate, Position};

/// A token, and the most likely ones in its place.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Token {
    #[serde(flatten)]
    token: Entry,
    top_logprobs: Vec<Entry>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
struct Entry {
    token: String,
    logprob: f64,
    bytes: Vec<u8>,
}

/// The tokens of an answer, with `num_candidates` of each position.
pub fn tokens(positions: &[Position], num_candidates: u32) -> Vec<Token> {
    let entry = |candidate: &Candidate| Entry {
        token: candidate.text.clone(),
        logprob: candidate.logprob,
        bytes: candidate.text.clone().into_bytes(),
    };
    let num = num_candidates as usize;
    let token = |position: &Position| Token {
        token: entry(&position.token),
        top_logprobs: position.ranked.iter().take(num).map(entry).collect(),
    };
    positions.iter().map(token).collect()
}

/// The last tokens, from the one that `text` begins with; all of them if their texts are not it.
pub fn from_text_on(tokens: Vec<Token>, text: &str) -> Vec<Token> {
    let has_text = |first: usize| {
        let texts = tokens[first..].iter().map(|it| &it.token.token[..]);
        texts.collect::<String>().contains(text)
    };
    // The more tokens, the more text.
    let (mut first, mut end) = (0, tokens.len());
    while end - first > 1 {
        let middle = first.midpoint(end);
        match has_text(middle) {
            true => first = middle,
            false => end = middle,
        }
    }
    let mut tokens = tokens;
    tokens.split_off(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_has_the_tokens_from_the_beginning_of_its_text() {
        let named = |texts: &[&str]| -> Vec<_> {
            let position = |text: &&str| Position {
                token: Candidate {
                    text: (*text).to_owned(),
                    logprob: -1.0,
                },
                ranked: Vec::new(),
            };
            tokens(&texts.iter().map(position).collect::<Vec<_>>(), 0)
        };
        let all = ["<think>", "a fox", "</think>", "a", " fox", "!", "</s>"];
        for (text, from) in [
            ("a fox!", 3),
            ("a fox", 3),
            ("!", 5),
            ("a bear", 0),
            ("<think>", 0),
        ] {
            assert_eq!(
                from_text_on(named(&all), text),
                named(&all[from..]),
                "{text}"
            );
        }
        assert_eq!(from_text_on(Vec::new(), "a"), []);
    }
}
