//! Stop words that a client gives as token ids, and reads itself.

use std::sync::Arc;

use crate::base::TokenId;

/// Whether the tokens of one sequence end with any of some runs of tokens.
#[derive(Clone, Debug, Default)]
pub struct StopIds {
    words: Arc<[Vec<TokenId>]>,
    /// The last tokens of the sequence, as many as the longest word has.
    tail: Vec<TokenId>,
}

impl StopIds {
    /// Those of a sequence without tokens yet.
    pub fn new(words: &[Vec<TokenId>]) -> Self {
        let max_len = words.iter().map(Vec::len).max().unwrap_or(0);
        Self {
            words: words.into(),
            tail: Vec::with_capacity(max_len),
        }
    }

    /// Whether there is no word.
    pub fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// Adds the next token. Returns whether it completes a word.
    pub fn push(&mut self, token: TokenId) -> bool {
        let max_len = self.words.iter().map(Vec::len).max().unwrap_or(0);
        if max_len == 0 {
            return false;
        }
        if self.tail.len() == max_len {
            self.tail.remove(0);
        }
        self.tail.push(token);
        self.words.iter().any(|word| self.tail.ends_with(word))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_token_that_completes_a_word_is_found_wherever_the_word_begins() {
        let mut stop = StopIds::new(&[vec![1, 2, 1, 3], vec![9]]);
        let found = |stop: &mut StopIds, tokens: &[TokenId]| {
            tokens.iter().position(|token| stop.push(*token))
        };
        // The word begins within a beginning of itself.
        assert_eq!(found(&mut stop.clone(), &[1, 2, 1, 2, 1, 3, 4]), Some(5));
        assert_eq!(found(&mut stop.clone(), &[1, 2, 3, 9]), Some(3));
        // A fork goes on from where it was.
        assert_eq!(found(&mut stop, &[5, 1, 2]), None);
        assert_eq!(found(&mut stop.clone(), &[1, 3]), Some(1));
        assert_eq!(found(&mut stop, &[3, 1]), None);
    }

    #[test]
    fn without_words_nothing_is_found() {
        let mut none = StopIds::new(&[]);
        assert!(none.is_empty() && !none.push(0));
    }
}
