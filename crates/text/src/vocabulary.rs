//! The text of every token of the vocabulary, for guided decoding.

use crate::Tokenizer;
use crate::tokenizer::{ByteTokens, Piece};
use inflight_base::{RequestError, TokenId};

/// The text that a token adds to the text before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenText {
    /// No text: the token does not exist.
    Nothing,
    /// A special token with this name.
    Special(String),
    /// Bytes, which may start or end inside a character.
    Bytes(Vec<u8>),
}

impl Tokenizer {
    /// The texts of the tokens below `vocab_size`, in the order of their ids.
    ///
    /// # Errors
    /// The text of a token depends on its neighbours, as with WordPiece.
    pub fn token_texts(&self, vocab_size: u32) -> Result<Vec<TokenText>, RequestError> {
        if self.byte_tokens() == ByteTokens::None {
            return Err(RequestError::Invalid(
                "the text of this model's tokens depends on their neighbours (its tokenizer.json has \
                 neither a ByteLevel nor a ByteFallback decoder)"
                    .to_owned(),
            ));
        }
        let text = |token| match self.special_name(token) {
            Some(name) => TokenText::Special(name),
            None => self.text_within(token),
        };
        Ok((0..vocab_size).map(text).collect())
    }

    /// The bytes that a token adds to a text, if [`Tokenizer::token_text`] has others: a part of a character, or
    /// with a space that only the first token of a text loses. `None`, too, if they depend on the neighbours.
    pub fn other_bytes(&self, token: TokenId, text: &str) -> Option<Vec<u8>> {
        if self.byte_tokens() == ByteTokens::None || self.special_name(token).is_some() {
            return None;
        }
        match self.text_within(token) {
            TokenText::Bytes(bytes) => (bytes != text.as_bytes()).then_some(bytes),
            TokenText::Nothing | TokenText::Special(_) => None,
        }
    }

    fn text_within(&self, token: TokenId) -> TokenText {
        let mut bytes = Vec::new();
        match self.piece(token, false, &mut bytes) {
            Piece::Nothing => TokenText::Nothing,
            Piece::Bytes => TokenText::Bytes(bytes),
            Piece::Text => {
                let context = self.context();
                let both = self.decode(&[&context.tokens[..], &[token]].concat(), false);
                match both.strip_prefix(&context.text[..]) {
                    Some(text) => TokenText::Bytes(text.as_bytes().to_vec()),
                    None => TokenText::Nothing,
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Detokenizer, toys};

    fn text_of(tokenizer: &Tokenizer, texts: &[TokenText], content: &str) -> TokenText {
        texts[toys::id(tokenizer, content) as usize].clone()
    }

    fn bytes(text: &[u8]) -> TokenText {
        TokenText::Bytes(text.to_vec())
    }

    #[test]
    fn byte_level_tokens_are_their_bytes() {
        let tokenizer = toys::byte_level();
        let texts = tokenizer.token_texts(300).expect("texts");
        let text = |content| text_of(&tokenizer, &texts, content);
        assert_eq!(text("Ġthe"), bytes(b" the"));
        assert_eq!(text("ðŁĺ"), bytes(&[0xf0, 0x9f, 0x98]));
        assert_eq!(text("<tool call>"), bytes(b"<tool call>"));
        assert_eq!(text("<|end|>"), TokenText::Special("<|end|>".to_owned()));
        assert_eq!(texts[299], TokenText::Nothing);
    }

    #[test]
    fn sentence_piece_tokens_are_text_or_single_bytes() {
        let tokenizer = toys::metaspace();
        let texts = tokenizer.token_texts(280).expect("texts");
        let text = |content| text_of(&tokenizer, &texts, content);
        assert_eq!(text("▁the"), bytes(b" the"));
        assert_eq!(text("the"), bytes(b"the"));
        assert_eq!(text("<0xFF>"), bytes(&[0xff]));
        assert_eq!(text("</s>"), TokenText::Special("</s>".to_owned()));
    }

    /// Guides must see the text that clients get, so each text is compared with the detokenizer's.
    #[test]
    fn other_bytes_are_those_that_a_text_alone_does_not_have() {
        for tokenizer in [toys::byte_level(), toys::metaspace()] {
            let texts = tokenizer.token_texts(300).expect("texts");
            let mut num_others = 0;
            for (token, text) in texts.iter().enumerate() {
                let alone = tokenizer.token_text(token as TokenId);
                let other = tokenizer.other_bytes(token as TokenId, &alone);
                num_others += usize::from(other.is_some());
                let bytes = other.unwrap_or_else(|| alone.into_bytes());
                if let TokenText::Bytes(expected) = text {
                    assert_eq!(bytes, *expected, "{token}");
                }
            }
            assert!(num_others > 100, "every byte of no whole character");
        }
        let byte_level = toys::byte_level();
        let end = toys::id(&byte_level, "<|end|>");
        assert_eq!(byte_level.other_bytes(end, ""), None);
        let word_piece = toys::word_piece();
        assert_eq!(word_piece.other_bytes(5, ""), None);
    }

    #[test]
    fn token_texts_match_the_detokenizer() {
        for tokenizer in [toys::byte_level(), toys::metaspace()] {
            let context = &tokenizer.context().tokens;
            let texts = tokenizer.token_texts(300).expect("texts");
            let mut num_compared = 0;
            for (token, text) in (0..).zip(&texts) {
                let TokenText::Bytes(bytes) = text else {
                    continue;
                };
                let Ok(text) = std::str::from_utf8(bytes) else {
                    continue;
                };
                let mut written = String::new();
                Detokenizer::new(&tokenizer, context, true).push(&tokenizer, token, &mut written);
                assert_eq!(written, text, "token {token}");
                num_compared += 1;
            }
            assert!(num_compared > 100, "{num_compared}");
        }
    }

    #[test]
    fn rejects_tokenizers_with_context_dependent_tokens() {
        let error = toys::word_piece().token_texts(10).expect_err("refused");
        assert!(error.to_string().contains("neighbours"), "{error}");
    }
}
