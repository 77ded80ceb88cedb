//! The fewest tokens that a text can have, without tokenising it: a model joins pieces of a word to tokens in an order
//! of its own, but a vocabulary can only cover the text with so few.
//!
//! ```text
//! vocabulary  a b ab aba    text  a b a b a a b    at least 3: aba, ba and what follows, ab
//! ```
//!
//! From each place reaches the longest token that begins there. With one token more, the text is covered at most up to
//! where a token from any place before reaches. Places inside of tokens count, too, so this is a lower bound.

use tokenizers::{Model, ModelWrapper};

use crate::byte_alphabet::byte_of;

/// The contents of the tokens that texts are put together from.
pub(super) struct TokenCover {
    /// Sorted.
    contents: Vec<Box<[u8]>>,
    /// Whether a byte where no token begins is a token of its own. Otherwise it may be dropped, or be a part of an
    /// unknown token of any length.
    has_bytes: bool,
}

/// How a text is written in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Alphabet {
    /// As it is.
    Characters,
    /// A character stands for each byte.
    Bytes,
}

impl TokenCover {
    /// The cover of the words that a model is given; `None` if tokens are not parts of words as they are written.
    pub fn of(model: &ModelWrapper, alphabet: Alphabet) -> Option<Self> {
        let falls_back = match model {
            ModelWrapper::BPE(bpe) => {
                let is_bare =
                    bpe.continuing_subword_prefix.is_none() && bpe.end_of_word_suffix.is_none();
                is_bare.then_some(bpe.byte_fallback)?
            }
            // One unknown token may stand for neighbours.
            ModelWrapper::Unigram(_) => false,
            ModelWrapper::WordPiece(_) | ModelWrapper::WordLevel(_) => return None,
        };
        let has_byte = |byte: u8| model.token_to_id(&format!("<0x{byte:02X}>")).is_some();
        let has_bytes =
            alphabet == Alphabet::Characters && falls_back && (0..=u8::MAX).all(has_byte);
        let written = |content: String| match alphabet {
            Alphabet::Characters => Some(content.into_bytes()),
            // What is not written in the alphabet is no part of a word.
            Alphabet::Bytes => content.chars().map(byte_of).collect(),
        };
        let contents = model.get_vocab().into_keys().filter_map(written);
        let mut contents: Vec<Box<[u8]>> = contents
            .filter(|content| !content.is_empty())
            .map(Vec::into_boxed_slice)
            .collect();
        contents.sort_unstable();
        Some(Self {
            contents,
            has_bytes,
        })
    }

    /// The fewest tokens of `text`, or `max_tokens` + 1 if they are more. Looks at no more of it than these can cover.
    pub fn fewest(&self, text: &str, max_tokens: usize) -> usize {
        let bytes = text.as_bytes();
        // With `num_tokens`, all before `end` is covered; with one more, all before `next`.
        let (mut num_tokens, mut end, mut next) = (0, 0, 0);
        for place in 0..bytes.len() {
            let longest = self.longest(&bytes[place..]);
            next = next.max(place + longest.max(usize::from(self.has_bytes)));
            if place >= end && next > place {
                num_tokens += 1;
                end = next;
            }
            if num_tokens > max_tokens {
                break;
            }
        }
        num_tokens
    }

    /// The length of the longest token that `bytes` begin with.
    fn longest(&self, bytes: &[u8]) -> usize {
        let (mut longest, mut num_bytes) = (0, 0);
        let mut within = &self.contents[..];
        while let (Some(byte), [first, .., last]) = (bytes.get(num_bytes), within) {
            // All of these begin with the bytes up to here; those that end here are first.
            let at = |content: &[u8]| content.get(num_bytes).copied();
            if at(first) != Some(*byte) || at(last) != Some(*byte) {
                let start = within.partition_point(|content| at(content) < Some(*byte));
                within = &within[start..];
                let len = within.partition_point(|content| at(content) <= Some(*byte));
                within = &within[..len];
            }
            num_bytes += 1;
            if within.first().is_some_and(|first| first.len() == num_bytes) {
                longest = num_bytes;
            }
        }
        match within {
            [only] if bytes.starts_with(only) => only.len(),
            _ => longest,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::toys;

    fn cover(json: &serde_json::Value) -> TokenCover {
        let tokenizer: tokenizers::Tokenizer = json.to_string().parse().expect("well formed");
        TokenCover::of(tokenizer.get_model(), Alphabet::Characters).expect("a cover")
    }

    #[test]
    fn counts_the_longest_tokens() {
        let cover = cover(&toys::metaspace_json());
        let cases = [
            ("", 0),
            ("t", 1),
            ("the", 1),
            ("▁the▁the", 2),
            // "th" and "he" is no token: the longest at "t" is "the".
            ("tht", 2),
            ("▁▁▁", 2),
            // A byte each.
            ("日本", 6),
            ("日the", 4),
        ];
        for (word, expected) in cases {
            assert_eq!(cover.fewest(word, 99), expected, "{word}");
        }
    }

    #[test]
    fn counts_bytes_in_an_alphabet_of_bytes() {
        let tokenizer: tokenizers::Tokenizer = toys::byte_level_json()
            .to_string()
            .parse()
            .expect("well formed");
        let cover = TokenCover::of(tokenizer.get_model(), Alphabet::Bytes).expect("a cover");
        for (text, expected) in [("the the", 2), ("  ", 1), ("日", 3), ("😀a", 2)] {
            assert_eq!(cover.fewest(text, 99), expected, "{text}");
        }
        assert_eq!(cover.fewest(&"the".repeat(99), 10), 11, "it stops there");
    }

    #[test]
    fn characters_that_may_be_dropped_count_nothing() {
        let mut json = toys::metaspace_json();
        json["model"]["byte_fallback"] = false.into();
        let cover = cover(&json);
        for (word, expected) in [
            ("日本", 0),
            ("日the日", 1),
            ("the日the", 2),
            ("the日本the", 2),
        ] {
            assert_eq!(cover.fewest(word, 99), expected, "{word}");
        }
    }

    #[test]
    fn without_a_token_for_each_byte_characters_may_be_dropped() {
        let mut json = toys::metaspace_json();
        let vocabulary = json["model"]["vocab"].as_object_mut().expect("an object");
        vocabulary.remove("<0xFF>").expect("in the vocabulary");
        assert_eq!(cover(&json).fewest("日本", 99), 0);
    }

    proptest! {
        #[test]
        fn the_longest_token_is_found(
            contents in prop::collection::btree_set("[abc]{1,4}", 0..12), text in "[abcd]{0,6}",
        ) {
            let longest = contents.iter().filter(|content| text.starts_with(&content[..]));
            let expected = longest.map(String::len).max().unwrap_or(0);
            let contents = contents.into_iter().map(|content| content.into_bytes().into());
            let cover = TokenCover { contents: contents.collect(), has_bytes: false };
            prop_assert_eq!(cover.longest(text.as_bytes()), expected);
        }
    }

    #[test]
    fn a_vocabulary_of_continued_words_has_no_cover() {
        let mut json = toys::metaspace_json();
        json["model"]["end_of_word_suffix"] = "</w>".into();
        let tokenizer: tokenizers::Tokenizer = json.to_string().parse().expect("well formed");
        assert!(TokenCover::of(tokenizer.get_model(), Alphabet::Characters).is_none());
    }
}
