//! Decodes a sequence incrementally: each token adds the complete characters that it yields.
//!
//! A token is either bytes, which are buffered until they form characters, or text that depends only on the token
//! before it and is decoded by comparing the text with and without that token. So the cost per token does not depend on
//! its position, and only incomplete characters are held back.

use crate::Tokenizer;
use crate::tokenizer::{ByteTokens, Piece};
use inflight_base::TokenId;

/// Maximum length of an incomplete UTF-8 character, in bytes.
const MAX_HELD_BYTES: usize = 3;

/// The incremental detokenizer of one sequence.
///
/// The concatenated deltas are the text that the output adds to the prompt: the decoded prompt and output together,
/// less the decoded prompt. Two cases need a rule:
///
/// - If the prompt ends inside a character, that character belongs to the output.
/// - Malformed bytes become U+FFFD. SentencePiece's decoder then also drops adjacent characters made of byte tokens;
///   here they are kept.
#[derive(Clone)]
pub struct Detokenizer {
    /// The last token that was not skipped.
    context: Option<TokenId>,
    /// Bytes of an incomplete character.
    held: Vec<u8>,
    skip_special_tokens: bool,
    /// Whether the last token was an added token. None: spaces between them are kept.
    after_special: Option<bool>,
}

impl Detokenizer {
    /// A detokenizer for the output that follows `prompt`.
    pub fn new(tokenizer: &Tokenizer, prompt: &[TokenId], skip_special_tokens: bool) -> Self {
        let mut detokenizer = Self {
            context: None,
            held: Vec::new(),
            skip_special_tokens,
            after_special: None,
        };
        let tail = prompt_tail(tokenizer, prompt, skip_special_tokens);
        let mut text = String::new();
        for token in tail {
            text.clear();
            detokenizer.push(tokenizer, *token, &mut text);
        }
        detokenizer
    }

    /// Omits the spaces that WordPiece's decoder and similar ones insert between adjacent special tokens (vLLM's
    /// `spaces_between_special_tokens`).
    pub fn without_spaces_between_special_tokens(mut self) -> Self {
        self.after_special = Some(false);
        self
    }

    /// Adds `token`, and appends to `out` the characters that it completes.
    pub fn push(&mut self, tokenizer: &Tokenizer, token: TokenId, out: &mut String) {
        let num_held = self.held.len();
        match tokenizer.piece(token, self.skip_special_tokens, &mut self.held) {
            Piece::Nothing => return,
            // The decoder drops a leading space, even if it is a byte token.
            Piece::Bytes if self.context.is_none() && self.held[num_held..] == *b" " => {
                self.held.truncate(num_held);
                out.push_str(&tokenizer.decode(&[token], self.skip_special_tokens));
            }
            Piece::Bytes => self.drain_characters(tokenizer, out),
            Piece::Text => {
                self.finish(tokenizer, out);
                let added = self
                    .after_special
                    .and_then(|_| tokenizer.added_content(token));
                match added {
                    Some(content) if self.after_special == Some(true) => out.push_str(content),
                    _ => self.text(tokenizer, token, out),
                }
                self.after_special = self.after_special.map(|_| added.is_some());
            }
        }
        self.context = Some(token);
    }

    /// Ends the text. An incomplete character becomes U+FFFD.
    pub fn finish(&mut self, tokenizer: &Tokenizer, out: &mut String) {
        if !self.held.is_empty() {
            replace(tokenizer, self.held.len(), out);
            self.held.clear();
        }
    }

    /// Moves complete characters from `held` to `out`, and keeps an incomplete one.
    fn drain_characters(&mut self, tokenizer: &Tokenizer, out: &mut String) {
        let mut num_taken = 0;
        for chunk in self.held.utf8_chunks() {
            out.push_str(chunk.valid());
            num_taken += chunk.valid().len();
            let invalid = chunk.invalid();
            let may_continue = num_taken + invalid.len() == self.held.len()
                && std::str::from_utf8(invalid).is_err_and(|error| error.error_len().is_none());
            if !invalid.is_empty() && !may_continue {
                replace(tokenizer, invalid.len(), out);
                num_taken += invalid.len();
            }
        }
        self.held.drain(..num_taken);
        debug_assert!(self.held.len() <= MAX_HELD_BYTES);
    }

    fn text(&self, tokenizer: &Tokenizer, token: TokenId, out: &mut String) {
        let skip = self.skip_special_tokens;
        let Some(context) = self.context else {
            out.push_str(&tokenizer.decode(&[token], skip));
            return;
        };
        let before = tokenizer.decode(&[context], skip);
        let both = tokenizer.decode(&[context, token], skip);
        match both.strip_prefix(&before) {
            Some(text) => out.push_str(text),
            // No known decoder changes text that it has already produced. For one that does, decode without context.
            None => out.push_str(&tokenizer.decode(&[token], skip)),
        }
    }
}

/// The suffix of `prompt` on which the text after it can depend: the last token that is not skipped or, if that is
/// bytes, the tokens of up to `MAX_HELD_BYTES` bytes.
///
/// ```text
/// prompt  | ... F0 9F 98 | special |
/// tail          |------------------|   from the third-last byte
/// ```
fn prompt_tail<'a>(tokenizer: &Tokenizer, prompt: &'a [TokenId], skip: bool) -> &'a [TokenId] {
    let mut bytes = Vec::new();
    for (start, token) in prompt.iter().enumerate().rev() {
        match tokenizer.piece(*token, skip, &mut bytes) {
            Piece::Nothing => {}
            Piece::Bytes if bytes.len() < MAX_HELD_BYTES => {}
            Piece::Bytes | Piece::Text => return &prompt[start..],
        }
    }
    prompt
}

/// Appends the replacement of malformed bytes, like the library's decoders: one U+FFFD for all bytes in byte-level
/// vocabularies, one for each byte in vocabularies with byte tokens.
fn replace(tokenizer: &Tokenizer, num_bytes: usize, out: &mut String) {
    let count = match tokenizer.byte_tokens() {
        ByteTokens::Fallback => num_bytes,
        ByteTokens::All | ByteTokens::None => 1,
    };
    out.extend(std::iter::repeat_n(char::REPLACEMENT_CHARACTER, count));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::toys;
    use proptest::prelude::*;

    /// The deltas of `output`, and of `finish` as the last.
    fn deltas(
        tokenizer: &Tokenizer,
        prompt: &[TokenId],
        output: &[TokenId],
        skip: bool,
    ) -> Vec<String> {
        let mut detokenizer = Detokenizer::new(tokenizer, prompt, skip);
        let mut out = Vec::new();
        for token in output {
            let mut delta = String::new();
            detokenizer.push(tokenizer, *token, &mut delta);
            assert!(detokenizer.held.len() <= MAX_HELD_BYTES);
            out.push(delta);
        }
        let mut delta = String::new();
        detokenizer.finish(tokenizer, &mut delta);
        out.push(delta);
        out
    }

    fn ids(tokenizer: &Tokenizer, contents: &[&str]) -> Vec<TokenId> {
        contents.iter().map(|c| toys::id(tokenizer, c)).collect()
    }

    #[test]
    fn an_emoji_split_over_tokens_comes_out_whole() {
        let tokenizer = toys::byte_level();
        let output = ids(&tokenizer, &["the", "ðŁ", "ĺĢ", "Ġthe", "ðŁĺ", "Ģa"]);
        assert_eq!(
            deltas(&tokenizer, &[], &output, true),
            ["the", "", "😀", " the", "", "😀a", ""]
        );
        let tokenizer = toys::metaspace();
        let output = ids(
            &tokenizer,
            &["<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "▁the"],
        );
        assert_eq!(
            deltas(&tokenizer, &output[4..], &output, true),
            ["", "", "", "😀", " the", ""]
        );
    }

    #[test]
    fn an_incomplete_character_is_replaced() {
        let tokenizer = toys::byte_level();
        let output = ids(&tokenizer, &["ðŁĺ", "the", "ðŁ"]);
        assert_eq!(
            deltas(&tokenizer, &[], &output, true),
            ["", "\u{fffd}the", "", "\u{fffd}"]
        );
    }

    #[test]
    fn only_the_first_token_loses_its_space() {
        let tokenizer = toys::metaspace();
        let the = ids(&tokenizer, &["▁the", "▁the"]);
        assert_eq!(deltas(&tokenizer, &[], &the, true), ["the", " the", ""]);
        let space = ids(&tokenizer, &["<0x20>", "▁the"]);
        assert_eq!(deltas(&tokenizer, &[], &space, true), ["", " the", ""]);
        assert_eq!(deltas(&tokenizer, &the, &the, true), [" the", " the", ""]);
        let bos = ids(&tokenizer, &["<s>"]);
        assert_eq!(deltas(&tokenizer, &bos, &the, true), ["the", " the", ""]);
        // A skipped special token must not swallow a space.
        let ended = ids(&tokenizer, &["▁the", "</s>"]);
        assert_eq!(deltas(&tokenizer, &ended, &the, true), [" the", " the", ""]);
    }

    #[test]
    fn special_tokens_are_shown_or_skipped() {
        let tokenizer = toys::byte_level();
        let output = ids(&tokenizer, &["ðŁ", "<|end|>", "ĺĢ", "日本", "<tool call>"]);
        assert_eq!(
            deltas(&tokenizer, &[], &output, true).concat(),
            "😀日本<tool call>"
        );
        assert_eq!(
            deltas(&tokenizer, &[], &output, false).concat(),
            "\u{fffd}<|end|>\u{fffd}\u{fffd}日本<tool call>"
        );
    }

    #[test]
    fn a_character_begun_in_the_prompt_belongs_to_the_output() {
        let tokenizer = toys::byte_level();
        let prompt = ids(&tokenizer, &["the", "ðŁ", "<|end|>"]);
        let output = ids(&tokenizer, &["ĺĢ"]);
        assert_eq!(deltas(&tokenizer, &prompt, &output, true), ["😀", ""]);
        let bytes = toys::metaspace();
        let prompt = ids(&bytes, &["▁the", "<0xC2>"]);
        let output = ids(&bytes, &["<0x80>"]);
        assert_eq!(deltas(&bytes, &prompt, &output, true), ["\u{80}", ""]);
        // A replacement character in the prompt itself is complete.
        let prompt = ids(&tokenizer, &["ï¿½"]);
        assert_eq!(
            deltas(&tokenizer, &prompt, &ids(&tokenizer, &["the"]), true),
            ["the", ""]
        );
    }

    #[test]
    fn adjacent_special_tokens_can_omit_spaces() {
        let tokenizer = toys::word_piece();
        let output = ids(
            &tokenizer,
            &["the", "[UNK]", "[UNK]", "[UNK]", "they", "[UNK]"],
        );
        assert_eq!(
            deltas(&tokenizer, &[], &output, false).concat(),
            "the [UNK] [UNK] [UNK] they [UNK]"
        );
        let mut detokenizer =
            Detokenizer::new(&tokenizer, &[], false).without_spaces_between_special_tokens();
        let mut text = String::new();
        for token in output {
            detokenizer.push(&tokenizer, token, &mut text);
        }
        assert_eq!(text, "the [UNK][UNK][UNK] they [UNK]");
    }

    #[test]
    fn an_output_depends_on_the_last_characters_of_its_prompt() {
        let tokenizer = toys::byte_level();
        let tail = |contents: &[&str], skip| {
            let prompt = ids(&tokenizer, contents);
            let tail = prompt_tail(&tokenizer, &prompt, skip).to_vec();
            assert!(prompt.ends_with(&tail));
            tail.len()
        };
        assert_eq!(tail(&["the", "the"], true), 1, "three bytes");
        assert_eq!(tail(&["the", "Ġthe", "ðŁ"], true), 2);
        assert_eq!(tail(&["the", "ðŁ", "<|end|>", "<|end|>"], true), 4);
        assert_eq!(
            tail(&["the", "ðŁ", "<|end|>"], false),
            1,
            "its name is bytes"
        );
        assert_eq!(tail(&["a", "ðŁ"], true), 2);
        assert_eq!(tail(&["a"], true), 1);
        let tokenizer = toys::metaspace();
        let prompt = ids(&tokenizer, &["the", "▁the", "<0xC2>", "</s>"]);
        assert_eq!(prompt_tail(&tokenizer, &prompt, true), &prompt[1..]);
        assert_eq!(prompt_tail(&tokenizer, &prompt, false), &prompt[3..]);
    }

    #[test]
    fn ids_outside_the_vocabulary_add_no_text() {
        let tokenizer = toys::byte_level();
        assert_eq!(
            deltas(&tokenizer, &[u32::MAX], &[u32::MAX, 1 << 20], true),
            ["", "", ""]
        );
    }

    #[test]
    fn an_endless_run_of_malformed_bytes_is_emitted_as_it_grows() {
        let tokenizer = toys::byte_level();
        let output = vec![toys::id(&tokenizer, "ĺĢ"); 10_000];
        let out = deltas(&tokenizer, &[], &output, true);
        assert!(
            out[..10_000]
                .iter()
                .all(|delta| delta == "\u{fffd}\u{fffd}")
        );
    }

    /// Whether `tokens` contain a run of byte tokens that is not valid UTF-8.
    fn has_malformed_run(tokenizer: &Tokenizer, tokens: &[TokenId], skip: bool) -> bool {
        let mut run = Vec::new();
        let mut malformed = false;
        for token in tokens {
            if tokenizer.piece(*token, skip, &mut run) == Piece::Text {
                malformed |= std::str::from_utf8(&run).is_err();
                run.clear();
            }
        }
        malformed || std::str::from_utf8(&run).is_err()
    }

    /// The text of `prompt` without an incomplete character at its end.
    fn whole_prompt(tokenizer: &Tokenizer, prompt: &[TokenId], skip: bool) -> String {
        let held = Detokenizer::new(tokenizer, prompt, skip).held;
        let mut text = tokenizer.decode(prompt, skip);
        if !held.is_empty() {
            assert!(text.ends_with(char::REPLACEMENT_CHARACTER));
            text.pop();
        }
        text
    }

    fn tokens(num_tokens: u32) -> impl Strategy<Value = Vec<TokenId>> {
        // Half of them are among the last 18 ids, the special and longer tokens, and two ids beyond the vocabulary.
        let token = prop_oneof![0..num_tokens + 2, num_tokens - 18..num_tokens + 2];
        prop::collection::vec(token, 0..24)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]

        #[test]
        fn byte_level_deltas_match_full_decoding(
            prompt in tokens(272), output in tokens(272), skip: bool,
        ) {
            let tokenizer = toys::byte_level();
            let all = tokenizer.decode(&[&prompt[..], &output].concat(), skip);
            let before = whole_prompt(&tokenizer, &prompt, skip);
            let text = deltas(&tokenizer, &prompt, &output, skip).concat();
            prop_assert_eq!(before + &text, all);
        }

        #[test]
        fn metaspace_deltas_match_full_decoding(
            prompt in tokens(273), output in prop::collection::vec(prop_oneof![
                tokens(273),
                prop::char::any().prop_map(|char| {
                    // A byte token's id is its byte plus 3, for the three special tokens.
                    char.to_string().bytes().map(|byte| TokenId::from(byte) + 3).collect()
                }),
            ], 0..6),
            skip: bool,
        ) {
            let tokenizer = toys::metaspace();
            let output = output.concat();
            let together = [&prompt[..], &output].concat();
            let all = tokenizer.decode(&together, skip);
            let text = deltas(&tokenizer, &prompt, &output, skip).concat();
            // The boundary between prompt and output makes no difference.
            let from_nothing = deltas(&tokenizer, &[], &together, skip).concat();
            let mut before = deltas(&tokenizer, &[], &prompt, skip);
            before.pop();
            prop_assert_eq!(before.concat() + &text, from_nothing.as_str());
            if has_malformed_run(&tokenizer, &together, skip) {
                // Nothing but the malformed runs may differ.
                let num_bad = |text: &str| text.matches(char::REPLACEMENT_CHARACTER).count();
                prop_assert!(num_bad(&from_nothing) > 0 && num_bad(&all) >= num_bad(&from_nothing));
            } else {
                prop_assert_eq!(from_nothing, all);
            }
        }

        #[test]
        fn word_piece_deltas_match_full_decoding(
            prompt in prop::collection::vec(0u32..10, 0..8),
            output in prop::collection::vec(0u32..10, 0..8),
            skip: bool,
        ) {
            let tokenizer = toys::word_piece();
            let all = tokenizer.decode(&[&prompt[..], &output].concat(), skip);
            let before = tokenizer.decode(&prompt, skip);
            let text = deltas(&tokenizer, &prompt, &output, skip).concat();
            prop_assert_eq!(before + &text, all);
        }
    }
}
