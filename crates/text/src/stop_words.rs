//! Ends a streamed text before its first stop word, even if the word spans several deltas.
//!
//! Each word is matched byte by byte with its own prefix table (Knuth, Morris, Pratt: Fast Pattern Matching in Strings,
//! 1977), so the text to hold back is the longest prefix of a word that the text ends with. Each byte of text is
//! examined only once.

use std::sync::Arc;

/// The stop words of one sequence, and how much of each its text matches so far.
///
/// The word that ends first ends the text. Of words that end with the same byte, the one that starts first counts. The
/// sequence's text is the text before the word.
#[derive(Clone)]
pub struct StopWords {
    words: Vec<Word>,
    /// Whether the text includes the word that ends it.
    included: bool,
    /// Text held back because it may be the start of a stop word.
    held: String,
    /// Index of the word that ended the text.
    stopped_by: Option<usize>,
}

impl StopWords {
    /// A matcher for a new text. Ignores empty words, which would end any text.
    pub fn new(words: Vec<String>) -> Self {
        let words = words.into_iter().filter(|word| !word.is_empty());
        Self {
            words: words.map(Word::new).collect(),
            included: false,
            held: String::new(),
            stopped_by: None,
        }
    }

    /// Sets whether the text includes the word that ends it. No text is held back then.
    pub fn included(mut self, included: bool) -> Self {
        self.included = included;
        self
    }

    /// Whether there are no stop words.
    pub fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// Adds `delta` and appends to `ready` the text that cannot be part of a stop word. Returns whether a stop word has
    /// ended the text; later deltas are ignored.
    pub fn push(&mut self, delta: &str, ready: &mut String) -> bool {
        if self.stopped_by.is_some() {
            return true;
        }
        let num_held = self.held.len();
        for (i, byte) in delta.bytes().enumerate() {
            let words = self.words.iter_mut().enumerate();
            let completed = words.filter_map(|(which, word)| Some((word.push(byte)?, which)));
            if let Some((num_matched, which)) = completed.max() {
                self.stopped_by = Some(which);
                if self.included {
                    ready.push_str(&delta[..=i]);
                    return true;
                }
                //   held      delta
                // |--------|----------------|
                //      |num_matched|        the rest is dropped
                self.held.push_str(delta);
                ready.push_str(&self.held[..num_held + i + 1 - num_matched]);
                self.held.clear();
                return true;
            }
        }
        if self.included {
            ready.push_str(delta);
            return false;
        }
        let num_kept = self.words.iter().map(|word| word.num_matched).max();
        let end = num_held + delta.len() - num_kept.unwrap_or(0);
        // Words consist of complete characters, so a matched prefix starts at a character boundary.
        if end < num_held {
            ready.push_str(&self.held[..end]);
            self.held.drain(..end);
            self.held.push_str(delta);
        } else {
            ready.push_str(&self.held);
            ready.push_str(&delta[..end - num_held]);
            self.held.clear();
            self.held.push_str(&delta[end - num_held..]);
        }
        false
    }

    /// The word that ended the text.
    pub fn matched(&self) -> Option<&str> {
        let word = &self.words[self.stopped_by?];
        std::str::from_utf8(&word.bytes).ok()
    }

    /// Ends the text, and appends the text held back to `ready`.
    pub fn finish(&mut self, ready: &mut String) {
        ready.push_str(&self.held);
        self.held.clear();
    }
}

#[derive(Clone)]
struct Word {
    bytes: Arc<[u8]>,
    /// `borders[n]`: the longest proper prefix of the word that its first `n + 1` bytes end with.
    borders: Arc<[usize]>,
    /// Length of the longest prefix of the word that the text ends with, in bytes. Less than the word's length.
    num_matched: usize,
}

impl Word {
    fn new(word: String) -> Self {
        let bytes = word.into_bytes();
        let mut borders = vec![0; bytes.len()];
        for n in 1..bytes.len() {
            borders[n] = extended(&bytes, &borders, borders[n - 1], bytes[n]);
        }
        Self {
            bytes: bytes.into(),
            borders: borders.into(),
            num_matched: 0,
        }
    }

    /// Adds a byte of text. Returns the word's length if the byte completes the word.
    fn push(&mut self, byte: u8) -> Option<usize> {
        self.num_matched = extended(&self.bytes, &self.borders, self.num_matched, byte);
        (self.num_matched == self.bytes.len()).then_some(self.num_matched)
    }
}

/// Length of the longest prefix of `word` that the text ends with, given its length `num_matched` before `byte`.
fn extended(word: &[u8], borders: &[usize], mut num_matched: usize, byte: u8) -> usize {
    loop {
        if word[num_matched] == byte {
            return num_matched + 1;
        }
        if num_matched == 0 {
            return 0;
        }
        num_matched = borders[num_matched - 1];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn words(words: &[&str]) -> StopWords {
        StopWords::new(words.iter().map(|word| (*word).to_owned()).collect())
    }

    /// The ready text after each delta and after `finish`, and whether a word ended the text.
    fn deltas(mut stop: StopWords, texts: &[&str]) -> (Vec<String>, bool) {
        let mut stopped = false;
        let mut out = Vec::new();
        for text in texts {
            let mut ready = String::new();
            stopped = stop.push(text, &mut ready);
            out.push(ready);
        }
        let mut ready = String::new();
        stop.finish(&mut ready);
        out.push(ready);
        (out, stopped)
    }

    fn strings(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|text| (*text).to_owned()).collect()
    }

    #[test]
    fn holds_back_a_possible_prefix_until_it_is_decided() {
        let (out, stopped) = deltas(words(&["END"]), &["a E", "N", "x EN", "D more"]);
        assert_eq!(out, strings(&["a ", "", "ENx ", "", ""]));
        assert!(stopped);
        let (out, stopped) = deltas(words(&["END"]), &["a EN"]);
        assert_eq!(out, strings(&["a ", "EN"]));
        assert!(!stopped);
    }

    #[test]
    fn earliest_end_wins_then_earliest_start() {
        assert_eq!(
            deltas(words(&["abcd", "bc"]), &["xabcd"]).0,
            strings(&["xa", ""])
        );
        assert_eq!(
            deltas(words(&["c", "abc"]), &["xabc"]).0,
            strings(&["x", ""])
        );
    }

    #[test]
    fn the_word_that_ended_the_text_is_known() {
        for included in [false, true] {
            let mut stop = words(&["END", "é."]).included(included);
            let mut ready = String::new();
            assert!(!stop.push("an EN", &mut ready));
            assert_eq!(stop.matched(), None);
            assert!(stop.push("é.END", &mut ready));
            assert_eq!(stop.matched(), Some("é."));
        }
    }

    #[test]
    fn text_after_a_stop_word_is_ignored() {
        let (out, stopped) = deltas(words(&["."]), &["one. two", " three."]);
        assert_eq!(out, strings(&["one", "", ""]));
        assert!(stopped);
    }

    #[test]
    fn never_matches_inside_a_character() {
        // é is C3 A9, © is C2 A9: the second byte alone must not match.
        let (out, stopped) = deltas(words(&["©"]), &["é", "Ã", "©"]);
        assert_eq!(out, strings(&["é", "Ã", "", ""]));
        assert!(stopped);
    }

    #[test]
    fn included_words_end_the_text_and_hold_nothing_back() {
        let included = words(&["END", "NDX"]).included(true);
        let (out, stopped) = deltas(included, &["a E", "N", "x EN", "D more", "y"]);
        assert_eq!(out, strings(&["a E", "N", "x EN", "D", "", ""]));
        assert!(stopped);
    }

    #[test]
    fn no_words_or_empty_words_pass_everything_at_once() {
        assert!(words(&[""]).is_empty() && !words(&["", "a"]).is_empty());
        assert_eq!(
            deltas(words(&[]), &["a", "b"]),
            (strings(&["a", "b", ""]), false)
        );
    }

    /// The definition, over the complete text: the match with the smallest end, then the smallest start.
    fn first_stop(text: &str, words: &[String]) -> Option<usize> {
        let matches = words.iter().flat_map(|word| {
            let starts = text.char_indices().map(|(start, _)| start);
            starts.filter_map(move |start| {
                let end = start + word.len();
                text[start..].starts_with(word).then_some((end, start))
            })
        });
        matches.min().map(|(_, start)| start)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        // Few letters, of one, two and four bytes, so that words overlap, nest and nearly match.
        #[test]
        fn text_ends_before_the_first_stop_word_for_any_deltas(
            words in prop::collection::vec("[ab é😀]{1,5}", 0..5),
            texts in prop::collection::vec("[ab é😀]{0,6}", 0..12),
        ) {
            let whole: String = texts.concat();
            let expected = first_stop(&whole, &words);
            let mut stop = StopWords::new(words.clone());
            let mut ready = String::new();
            let mut num_pushed = 0;
            for text in &texts {
                num_pushed += text.len();
                let stopped = stop.push(text, &mut ready);
                let seen = first_stop(&whole[..num_pushed], &words);
                prop_assert_eq!(stopped, seen.is_some());
                if !stopped {
                    // Only the longest suffix that is a prefix of a word is held back.
                    let held = &whole[ready.len()..num_pushed];
                    let longest = whole[..num_pushed].char_indices().find(|(at, _)| {
                        words.iter().any(|word| word.starts_with(&whole[*at..num_pushed]))
                    });
                    prop_assert_eq!(held.len(), longest.map_or(0, |(at, _)| num_pushed - at));
                }
            }
            stop.finish(&mut ready);
            prop_assert_eq!(ready, &whole[..expected.unwrap_or(whole.len())]);
        }
    }
}
