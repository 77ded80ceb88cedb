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
        token: candidate.text.shown().into_owned(),
        logprob: candidate.logprob,
        bytes: candidate.text.bytes().to_vec(),
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
        let bytes: Vec<_> = tokens[first..]
            .iter()
            .map(|it| &it.token.bytes[..])
            .collect();
        // Characters may be in several tokens.
        String::from_utf8_lossy(&bytes.concat()).contains(text)
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
    use crate::token_text::TokenText;

    #[test]
    fn a_message_has_the_tokens_from_the_beginning_of_its_text() {
        let named = |texts: &[&str]| -> Vec<_> {
            let position = |text: &&str| Position {
                token: Candidate {
                    text: (*text).into(),
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
        let parts: [&[u8]; 3] = [b"a ", b"\xf0\x9f\xa6", b"\x8a"];
        let position = |part: &[u8]| Position {
            token: Candidate {
                text: TokenText::of(part.to_vec()),
                logprob: -1.0,
            },
            ranked: Vec::new(),
        };
        let parts = tokens(&parts.map(position), 0);
        let joined: Vec<_> = parts
            .iter()
            .flat_map(|part| part.token.bytes.clone())
            .collect();
        assert_eq!(String::from_utf8(joined), Ok("a \u{1f98a}".to_owned()));
        assert_eq!(from_text_on(parts.clone(), "\u{1f98a}"), parts[1..]);
    }
}
