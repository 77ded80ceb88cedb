//! A sequence's text as it grows: tokens in, text out that is whole and holds no stop word.

use std::sync::Arc;

use crate::base::TokenId;
use crate::text::{Detokenizer, StopWords, Tokenizer};

/// Tokens in, text out.
pub struct TextStream {
    tokenizer: Arc<Tokenizer>,
    detokenizer: Detokenizer,
    stop_words: StopWords,
    /// Text that may be sent.
    ready: String,
    /// Whole text on its way from the detokenizer to the stop words; empty between calls.
    whole: String,
}

impl TextStream {
    /// The stream of a sequence that follows `prompt`.
    pub fn new(
        tokenizer: Arc<Tokenizer>,
        prompt: &[TokenId],
        skip_special_tokens: bool,
        stop_words: Vec<String>,
    ) -> Self {
        Self {
            detokenizer: Detokenizer::new(&tokenizer, prompt, skip_special_tokens),
            tokenizer,
            stop_words: StopWords::new(stop_words),
            ready: String::new(),
            whole: String::new(),
        }
    }

    /// Whether the text alone can end the sequence.
    pub fn has_stop_words(&self) -> bool {
        !self.stop_words.is_empty()
    }

    /// Adds a token. Returns whether its text completes a stop word.
    pub fn push(&mut self, token: TokenId) -> bool {
        self.whole.clear();
        self.detokenizer
            .push(&self.tokenizer, token, &mut self.whole);
        self.stop_words.push(&self.whole, &mut self.ready)
    }

    /// The stop word that the text has ended with.
    pub fn stop_word(&self) -> Option<&str> {
        self.stop_words.matched()
    }

    /// Ends the text: what was held back comes out, unless a stop word cut it off.
    pub fn finish(&mut self) {
        self.whole.clear();
        self.detokenizer.finish(&self.tokenizer, &mut self.whole);
        if !self.stop_words.push(&self.whole, &mut self.ready) {
            self.stop_words.finish(&mut self.ready);
        }
    }

    /// Takes the text that may be sent.
    pub fn take_ready(&mut self) -> String {
        std::mem::take(&mut self.ready)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::toys;

    /// The text that a sequence of these tokens sends, token by token, then at its end; and after which token
    /// a stop word was complete.
    fn sent(contents: &[&str], stop_words: &[&str]) -> (Vec<String>, Option<usize>) {
        let tokenizer = Arc::new(toys::byte_level());
        let words = stop_words.iter().map(|word| (*word).to_owned()).collect();
        let mut stream = TextStream::new(tokenizer.clone(), &[], true, words);
        let mut stopped = None;
        let mut sent = Vec::new();
        for (i, content) in contents.iter().enumerate() {
            if stream.push(toys::id(&tokenizer, content)) {
                stopped.get_or_insert(i);
            }
            sent.push(stream.take_ready());
        }
        stream.finish();
        sent.push(stream.take_ready());
        (sent, stopped)
    }

    #[test]
    fn half_a_character_waits_for_its_other_half_or_for_the_end() {
        // 😀 is the tokens ðŁĺ and Ģ.
        let whole = sent(&["a", "ðŁĺ", "Ģ", "b"], &[]);
        assert_eq!(whole.0, ["a", "", "😀", "b", ""]);
        let (cut, _) = sent(&["a", "ðŁĺ"], &[]);
        assert_eq!(cut, ["a", "", "\u{fffd}"]);
    }

    #[test]
    fn what_may_become_a_stop_word_waits_for_the_next_token_or_for_the_end() {
        assert_eq!(
            sent(&["a", "the", "b"], &["there"]).0,
            ["a", "", "theb", ""]
        );
        assert_eq!(
            sent(&["a", "the"], &["there"]),
            (vec!["a".into(), String::new(), "the".into()], None)
        );
    }

    #[test]
    fn nothing_follows_a_stop_word_neither_tokens_nor_what_was_held_back() {
        let (texts, stopped) = sent(&["a", "th", "e", "b", "ðŁĺ"], &["the"]);
        assert_eq!(texts, ["a", "", "", "", "", ""]);
        assert_eq!(stopped, Some(2));
    }

    #[test]
    fn a_stop_word_that_only_the_end_completes_is_cut_off_too() {
        // The half character becomes the word's last character when no other half can follow.
        let (texts, stopped) = sent(&["a", "the", "ðŁĺ"], &["the\u{fffd}"]);
        assert_eq!(texts.concat(), "a");
        assert_eq!(stopped, None, "no token has completed it");
    }
}
