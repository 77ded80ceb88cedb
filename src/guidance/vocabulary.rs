//! The model's tokens in the terms of the parser: a trie of their bytes.

use std::sync::Arc;

use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

use crate::base::RequestError;
use crate::text::{TokenText, Tokenizer};

/// The longest token that a guide lets through, in bytes. The trie holds no longer ones than 1024.
const MAX_TOKEN_BYTES: usize = 512;

/// The largest vocabulary that the trie has ids for.
const MAX_VOCAB_SIZE: u32 = (1 << 24) - 2;

/// The name of the token that stands for the end of the output; no character of a grammar makes it.
const END_NAME: &[u8] = b"end of output";

/// A trie of the tokens below `vocab_size`, and one more, `vocab_size` itself, which stands for the end
/// of the output: which of the model's tokens end it is each request's own choice.
pub(super) fn trie(tokenizer: &Tokenizer, vocab_size: u32) -> Result<TokEnv, RequestError> {
    if vocab_size > MAX_VOCAB_SIZE {
        return Err(RequestError::Invalid(format!(
            "this model's vocabulary of {vocab_size} tokens is above {MAX_VOCAB_SIZE}"
        )));
    }
    let texts = tokenizer.token_texts(vocab_size)?;
    let mut words: Vec<Vec<u8>> = texts.into_iter().map(word).collect();
    words.push(special(END_NAME));
    let info = TokRxInfo::new(vocab_size + 1, vocab_size);
    let trie = TokTrie::from(&info, &words);
    Ok(Arc::new(ApproximateTokEnv::new(trie)))
}

/// A token's entry in the trie; an empty one is never let through.
fn word(text: TokenText) -> Vec<u8> {
    match text {
        TokenText::Nothing => Vec::new(),
        TokenText::Special(name) => special(name.as_bytes()),
        // No text has this byte, and the trie takes it for the beginning of a special token.
        TokenText::Bytes(bytes) if bytes.first() == Some(&TokTrie::SPECIAL_TOKEN_MARKER) => {
            Vec::new()
        }
        TokenText::Bytes(bytes) if bytes.len() > MAX_TOKEN_BYTES => Vec::new(),
        TokenText::Bytes(bytes) => bytes,
    }
}

fn special(name: &[u8]) -> Vec<u8> {
    let mut word = vec![TokTrie::SPECIAL_TOKEN_MARKER];
    word.extend_from_slice(&name[..name.len().min(MAX_TOKEN_BYTES)]);
    word
}
