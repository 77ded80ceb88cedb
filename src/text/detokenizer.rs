//! A sequence's tokens become text as they come, in whole characters.
//!
//! The one idea: a token is either bytes, which are collected until they are characters, or text
//! that depends on at most the token before, which is decoded with and without it and compared. So
//! a token costs the same wherever it stands, and nothing but a begun character is ever held back.

use crate::base::TokenId;
use crate::text::Tokenizer;
use crate::text::tokenizer::{ByteTokens, Piece};

/// Bytes of the longest character that is not complete.
const MAX_HELD_BYTES: usize = 3;

/// The text of one sequence, token by token.
///
/// The deltas together are the text that the sequence adds to its prompt: what decoding prompt and
/// output as one gives, less what decoding the prompt gives. Two cases need a rule:
///
/// - A prompt that ends inside a character leaves that character to the output.
/// - Bytes that are no character are U+FFFD. SentencePiece's decoder then also loses the characters
///   right before and after them, as long as they are byte tokens too; here they stay.
#[derive(Clone)]
pub struct Detokenizer {
    /// The last token that stands for something.
    context: Option<TokenId>,
    /// The bytes of a begun character.
    held: Vec<u8>,
    skip_special_tokens: bool,
    /// Where no space is wanted between special tokens: whether the last token was one.
    after_special: Option<bool>,
}

impl Detokenizer {
    /// The text that follows `prompt`.
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

    /// The same text, but special tokens that follow one another are written as they are, without the
    /// space that WordPiece's decoder and the like put before each token (vLLM's
    /// `spaces_between_special_tokens`).
    pub fn without_spaces_between_special_tokens(mut self) -> Self {
        self.after_special = Some(false);
        self
    }

    /// Adds `token`, and appends to `out` the characters that are whole by it.
    pub fn push(&mut self, tokenizer: &Tokenizer, token: TokenId, out: &mut String) {
        let num_held = self.held.len();
        match tokenizer.piece(token, self.skip_special_tokens, &mut self.held) {
            Piece::Nothing => return,
            // A space that begins a text is lost also when it is a byte.
            Piece::Bytes if self.context.is_none() && self.held[num_held..] == *b" " => {
                self.held.truncate(num_held);
                out.push_str(&tokenizer.decode(&[token], self.skip_special_tokens));
            }
            Piece::Bytes => self.take_whole(tokenizer, out),
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

    /// Ends the text: a begun character comes out as U+FFFD.
    pub fn finish(&mut self, tokenizer: &Tokenizer, out: &mut String) {
        if !self.held.is_empty() {
            replace(tokenizer, self.held.len(), out);
            self.held.clear();
        }
    }

    /// Moves whole characters from the bytes to `out`, and leaves a begun one.
    fn take_whole(&mut self, tokenizer: &Tokenizer, out: &mut String) {
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
            // No decoder known to us changes what it has written; a strange one loses the context.
            None => out.push_str(&tokenizer.decode(&[token], skip)),
        }
    }
}

/// The tokens of `prompt` that the text after it can depend on: the last that stands for something,
/// and where those are bytes, as many as a begun character can have.
///
/// ```text
/// prompt  | ... F0 9F 98 | special |
/// tail          |------------------|   from the third last byte on
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

/// Writes what stands for bytes that are no character, as the library's decoders do: one U+FFFD for
/// all in byte-level vocabularies, one for each in those with byte tokens.
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
    use crate::text::toys;
    use proptest::prelude::*;

    /// The deltas of `output`, then what `finish` adds.
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
        // A special token that nobody sees must not take a space with it.
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
        // A replacement character that the prompt really has is whole.
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

    /// Whether byte tokens in a row are not whole characters.
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

    /// The text of `prompt` without a character that it begins and does not end.
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
        // Every second is one of the last, which are the special and the longer ones; two are none.
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
                    // A byte token's id is its byte after the three special ones.
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
            // Where the prompt ends and the output begins makes no difference.
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
