//! The model's tokens in the form that the parser needs: a trie of their bytes.

use std::sync::Arc;

use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

use inflight_base::RequestError;
use inflight_text::{TokenText, Tokenizer};

/// Maximum length of a token that guides allow, in bytes. The trie's own limit is 1024.
const MAX_TOKEN_BYTES: usize = 512;

/// Maximum vocabulary size: the trie has no more ids.
const MAX_VOCAB_SIZE: u32 = (1 << 24) - 2;

/// The name of the special token for the end of the output. No grammar can produce it.
const END_NAME: &[u8] = b"end of output";

/// A trie of the tokens below `vocab_size`, plus the token `vocab_size` for the end of the output. The real end ids are
/// chosen by each request.
pub(super) fn trie(tokenizer: &Tokenizer, vocab_size: u32) -> Result<TokEnv, RequestError> {
    if vocab_size > MAX_VOCAB_SIZE {
        return Err(RequestError::Invalid(format!(
            "its vocabulary of {vocab_size} tokens exceeds the maximum of {MAX_VOCAB_SIZE}"
        )));
    }
    let texts = tokenizer.token_texts(vocab_size)?;
    let mut words: Vec<Vec<u8>> = texts.into_iter().map(word).collect();
    words.push(special(END_NAME));
    let info = TokRxInfo::new(vocab_size + 1, vocab_size);
    let trie = TokTrie::from(&info, &words);
    Ok(Arc::new(ApproximateTokEnv::new(trie)))
}

/// A token's entry in the trie. Tokens with an empty entry are never allowed.
fn word(text: TokenText) -> Vec<u8> {
    match text {
        TokenText::Nothing => Vec::new(),
        TokenText::Special(name) => special(name.as_bytes()),
        // No UTF-8 text contains this byte, with which the trie marks special tokens.
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
