//! Log-probabilities as vLLM's backend writes them: one JSON list, an object for each token.

use std::io::{self, Write};

use inflight_base::TokenId;
use inflight_sampling::{TokenLogProb, TokenLogProbs};
use inflight_text::Tokenizer;

/// Stands for minus infinity, which JSON cannot express; vLLM's API writes the same.
const IMPOSSIBLE: f32 = -9999.0;

/// The most bytes of an entry without its decoded text: id and rank of ten digits, and the longest number.
const MAX_ENTRY_BYTES: usize =
    r#""4294967295":{"logprob":-1.1754943508222875e-38,"rank":4294967295,"decoded_token":null},"#
        .len();

/// `[{"<id>": {"logprob": -0.1, "rank": 1, "decoded_token": " a"}, ...}, ...]`: for each position the chosen token
/// first, then the most likely ones by rank. Where the decoded token is not what it adds to a text, such as a part of a
/// character, the entry has its bytes, too: `"bytes": [240, 159]`.
///
/// # Errors
/// Those of the writer.
pub fn write<'a>(
    mut out: impl Write,
    tokens: impl IntoIterator<Item = &'a TokenLogProbs>,
    tokenizer: Option<&Tokenizer>,
) -> io::Result<()> {
    out.write_all(b"[")?;
    for (i, token) in tokens.into_iter().enumerate() {
        if i > 0 {
            out.write_all(b",")?;
        }
        write_token(&mut out, token, tokenizer)?;
    }
    out.write_all(b"]")
}

fn write_token(
    mut out: impl Write,
    token: &TokenLogProbs,
    tokenizer: Option<&Tokenizer>,
) -> io::Result<()> {
    out.write_all(b"{")?;
    write_entry(&mut out, &token.chosen, tokenizer)?;
    let others = token.top.iter().filter(|it| it.token != token.chosen.token);
    for other in others {
        out.write_all(b",")?;
        write_entry(&mut out, other, tokenizer)?;
    }
    out.write_all(b"}")
}

fn write_entry(
    mut out: impl Write,
    it: &TokenLogProb,
    tokenizer: Option<&Tokenizer>,
) -> io::Result<()> {
    write!(out, "\"{}\":{{\"logprob\":", it.token)?;
    serde_json::to_writer(&mut out, &f64::from(it.log_prob.max(IMPOSSIBLE)))?;
    write!(out, ",\"rank\":{},\"decoded_token\":", it.rank)?;
    write_text(&mut out, it.token, tokenizer)?;
    out.write_all(b"}")
}

/// The decoded token, and its bytes if they are others.
fn write_text(
    mut out: impl Write,
    token: TokenId,
    tokenizer: Option<&Tokenizer>,
) -> io::Result<()> {
    let Some(tokenizer) = tokenizer else {
        return out.write_all(b"null");
    };
    let text = tokenizer.token_text(token);
    serde_json::to_writer(&mut out, &text)?;
    if let Some(bytes) = tokenizer.other_bytes(token, &text) {
        out.write_all(b",\"bytes\":")?;
        serde_json::to_writer(&mut out, &bytes)?;
    }
    Ok(())
}

/// The same list for a prompt. The first token follows nothing, so it has no log-probability: `{"<id>": {"logprob":
/// null, "rank": null, "decoded_token": "Once"}}`.
///
/// # Errors
/// Those of the writer.
pub fn write_prompt(
    mut out: impl Write,
    first: TokenId,
    others: &[TokenLogProbs],
    tokenizer: Option<&Tokenizer>,
) -> io::Result<()> {
    write!(
        out,
        "[{{\"{first}\":{{\"logprob\":null,\"rank\":null,\"decoded_token\":"
    )?;
    write_text(&mut out, first, tokenizer)?;
    out.write_all(b"}}")?;
    for token in others {
        out.write_all(b",")?;
        write_token(&mut out, token, tokenizer)?;
    }
    out.write_all(b"]")
}

/// The number of bytes that [`write()`] writes.
pub fn num_bytes<'a>(
    tokens: impl IntoIterator<Item = &'a TokenLogProbs>,
    tokenizer: Option<&Tokenizer>,
) -> usize {
    let mut counter = Counter(0);
    // Counting never fails.
    let _ = write(&mut counter, tokens, tokenizer);
    counter.0
}

/// The most bytes of one entry with its decoded text, over all tokens below `vocab_size`.
pub fn max_entry_bytes(tokenizer: Option<&Tokenizer>, vocab_size: u32) -> usize {
    let text_bytes = |token: TokenId| {
        let mut counter = Counter(0);
        let _ = write_text(&mut counter, token, tokenizer);
        counter.0
    };
    let tokens = 0..tokenizer.map_or(0, |_| vocab_size);
    MAX_ENTRY_BYTES + tokens.map(text_bytes).max().unwrap_or_default()
}

/// Counts the bytes written to it.
struct Counter(usize);

impl Write for Counter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranked(token: u32, log_prob: f32, rank: u32) -> TokenLogProb {
        TokenLogProb {
            token,
            log_prob,
            rank,
        }
    }

    /// The JSON that is written. A tree of it must be written the same.
    fn json(tokens: &[TokenLogProbs], tokenizer: Option<&Tokenizer>) -> String {
        let mut written = Vec::new();
        write(&mut written, tokens, tokenizer).expect("room for all");
        assert_eq!(written.len(), num_bytes(tokens, tokenizer));
        let written = String::from_utf8(written).expect("UTF-8");
        let tree: serde_json::Value = serde_json::from_str(&written).expect("JSON");
        assert_eq!(tree.to_string(), written);
        written
    }

    #[test]
    fn no_entry_is_longer_than_was_said() {
        let tokenizer = crate::toys::byte_level();
        let num_tokens = 300;
        for (tokenizer, expected) in [(Some(&tokenizer), 0), (None, 0)] {
            let max = max_entry_bytes(tokenizer, num_tokens);
            let longest = (0..num_tokens).map(|token| {
                let token = if tokenizer.is_some() { token } else { u32::MAX };
                let it = TokenLogProbs {
                    chosen: ranked(token, -f32::MIN_POSITIVE, u32::MAX),
                    top: vec![],
                };
                // Brackets around it, and no comma after it.
                num_bytes([&it], tokenizer) - 4 + 1
            });
            assert!((expected..=max).contains(&longest.max().expect("tokens")));
        }
    }

    #[test]
    fn the_bytes_of_all_tokens_are_those_of_the_text() {
        for tokenizer in [crate::toys::byte_level(), crate::toys::metaspace()] {
            let text = "a \u{1f98a} and \u{e9}";
            let tokens = tokenizer.encode(text, false).expect("tokens");
            let of = |token: &TokenId| TokenLogProbs {
                chosen: ranked(*token, -1.0, 1),
                top: vec![],
            };
            let tokens: Vec<_> = tokens.iter().map(of).collect();
            let written: serde_json::Value =
                serde_json::from_str(&json(&tokens, Some(&tokenizer))).expect("JSON");
            let mut joined = Vec::new();
            let mut num_parts = 0;
            for entry in written.as_array().expect("a list") {
                let entry = entry.as_object().expect("an object").values().next();
                let entry = entry.expect("a token");
                match entry["bytes"].as_array() {
                    Some(bytes) => {
                        let bytes = bytes
                            .iter()
                            .map(|byte| byte.as_u64().expect("a byte") as u8);
                        joined.extend(bytes);
                        num_parts += 1;
                    }
                    None => joined.extend(entry["decoded_token"].as_str().expect("a text").bytes()),
                }
            }
            let joined = String::from_utf8(joined).expect("whole characters");
            assert_eq!(joined.trim_start(), text);
            assert!(num_parts >= 4);
        }
    }

    #[test]
    fn the_chosen_token_comes_first_and_once() {
        let tokens = [
            TokenLogProbs {
                chosen: ranked(7, -0.5, 2),
                top: vec![ranked(9, -0.25, 1), ranked(7, -0.5, 2)],
            },
            TokenLogProbs {
                chosen: ranked(3, f32::NEG_INFINITY, 8),
                top: vec![],
            },
        ];
        assert_eq!(
            json(&tokens, None),
            r#"[{"7":{"logprob":-0.5,"rank":2,"decoded_token":null},"9":{"logprob":-0.25,"rank":1,"decoded_token":null}},{"3":{"logprob":-9999.0,"rank":8,"decoded_token":null}}]"#
        );
        assert_eq!(json(&[], None), "[]");
        let unknown = [TokenLogProbs {
            chosen: ranked(3, f32::NAN, 1),
            top: vec![],
        }];
        assert!(json(&unknown, None).contains("-9999.0"));
    }

    #[test]
    fn the_first_token_of_a_prompt_has_no_log_probability() {
        let others = [TokenLogProbs {
            chosen: ranked(7, -0.5, 2),
            top: vec![ranked(9, -0.25, 1)],
        }];
        let mut written = Vec::new();
        write_prompt(&mut written, 5, &others, None).expect("room for all");
        let first = r#"[{"5":{"logprob":null,"rank":null,"decoded_token":null}},"#;
        let expected = [first, &json(&others, None)[1..]].concat();
        assert_eq!(String::from_utf8(written), Ok(expected));
    }
}
