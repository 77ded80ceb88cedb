//! Incremental detokenisation of a sequence, cut at stop words, and taken apart.

use std::sync::Arc;

use inflight_base::TokenId;
use inflight_sampling::ReadText;
use inflight_text::{
    Detokenizer, ParameterTypes, ReplyFormat, ReplyParts, ReplyReader, ReplyStart, StopWords,
    Tokenizer,
};

/// Turns tokens into text that may be sent.
#[derive(Clone)]
pub struct TextStream {
    tokenizer: Arc<Tokenizer>,
    detokenizer: Detokenizer,
    stop_words: StopWords,
    /// Tokens that end the sequence and are not shown.
    silent: Vec<TokenId>,
    /// Special tokens that are text although others are not, with their text.
    marks: Vec<(TokenId, &'static str)>,
    /// Takes the text apart; `None` if all of it is content.
    reply: Option<ReplyReader>,
    /// Text that may be sent, before it is taken apart.
    ready: String,
    /// What is known of the parts, and not taken yet.
    parts: ReplyParts,
    /// The tokens of the reasoning, if they are counted.
    thoughts: Option<ThoughtCount>,
    /// Buffer between the detokenizer and the stop words; empty between calls.
    whole: String,
}

/// How tokens become text, and what ends it.
#[derive(Clone, Debug)]
pub struct TextRules {
    /// Whether special tokens are left out.
    pub skip_special_tokens: bool,
    /// Whether the tokenizer's spaces between consecutive special tokens are kept.
    pub spaces_between_special_tokens: bool,
    /// Texts that end the sequence.
    pub stop_words: Vec<String>,
    /// Tokens that end the sequence.
    pub last_tokens: Vec<TokenId>,
    /// Whether the stop word, or the last token, is part of the text.
    pub include_stop: bool,
    /// Takes the text apart, if that is wanted.
    pub reply: Option<ReplyRules>,
}

/// How a text is taken apart.
#[derive(Clone, Debug)]
pub struct ReplyRules {
    /// The format of its parts.
    pub format: ReplyFormat,
    /// Where it begins.
    pub start: ReplyStart,
    /// The arguments of the functions that it may call.
    pub parameters: Arc<ParameterTypes>,
    /// Whether calls are given in pieces.
    pub in_pieces: bool,
    /// Whether the tokens of the reasoning are counted.
    pub counts_tokens: bool,
}

/// Counts tokens of the reasoning. A token whose text is held back, or is a mark, belongs to the part that grows next.
#[derive(Clone, Debug, Default)]
struct ThoughtCount {
    num_tokens: usize,
    num_held: usize,
}

impl ReplyRules {
    fn reader(&self) -> ReplyReader {
        let reader = self.format.reader_with(self.start, &self.parameters);
        match self.in_pieces {
            true => reader.in_pieces(),
            false => reader,
        }
    }
}

impl TextStream {
    /// The stream of a sequence that follows `prompt`.
    pub fn new(tokenizer: Arc<Tokenizer>, prompt: &[TokenId], rules: TextRules) -> Self {
        let mut detokenizer = Detokenizer::new(&tokenizer, prompt, rules.skip_special_tokens);
        if !rules.spaces_between_special_tokens {
            detokenizer = detokenizer.without_spaces_between_special_tokens();
        }
        let marks = rules.reply.iter().flat_map(|reply| reply.format.marks());
        let marks = marks.filter_map(|mark| Some((tokenizer.special_id(mark)?, mark)));
        Self {
            detokenizer,
            marks: match rules.skip_special_tokens {
                true => marks.collect(),
                false => Vec::new(),
            },
            reply: rules.reply.as_ref().map(ReplyRules::reader),
            parts: ReplyParts::default(),
            thoughts: rules
                .reply
                .as_ref()
                .filter(|reply| reply.counts_tokens)
                .map(|_| ThoughtCount::default()),
            tokenizer,
            stop_words: StopWords::new(rules.stop_words).included(rules.include_stop),
            silent: match rules.include_stop {
                true => Vec::new(),
                false => rules.last_tokens,
            },
            ready: String::new(),
            whole: String::new(),
        }
    }

    /// Whether the text can end the sequence.
    pub fn has_stop_words(&self) -> bool {
        !self.stop_words.is_empty()
    }

    /// Adds a token. Returns whether its text completes a stop word.
    pub fn push(&mut self, token: TokenId) -> bool {
        if self.silent.contains(&token) {
            return false;
        }
        self.whole.clear();
        match self.marks.iter().find(|(mark, _)| *mark == token) {
            None => self
                .detokenizer
                .push(&self.tokenizer, token, &mut self.whole),
            Some((_, text)) => {
                self.detokenizer.finish(&self.tokenizer, &mut self.whole);
                self.whole.push_str(text);
            }
        }
        let is_stopped = self.stop_words.push(&self.whole, &mut self.ready);
        if let Some(thoughts) = &mut self.thoughts {
            thoughts.num_held += 1;
            self.take_apart(false);
        }
        is_stopped
    }

    /// How many of its tokens are reasoning, if they are counted.
    pub fn num_reasoning_tokens(&self) -> usize {
        self.thoughts.as_ref().map_or(0, |it| it.num_tokens)
    }

    /// The stop word that the text has ended with.
    pub fn stop_word(&self) -> Option<&str> {
        self.stop_words.matched()
    }

    /// Ends the text: releases what was held back, unless a stop word cut it off.
    pub fn finish(&mut self) {
        self.whole.clear();
        self.detokenizer.finish(&self.tokenizer, &mut self.whole);
        if !self.stop_words.push(&self.whole, &mut self.ready) {
            self.stop_words.finish(&mut self.ready);
        }
        self.take_apart(true);
    }

    /// Takes the text that may be sent apart, into the parts that are not taken yet. If the text `is_last`, nothing
    /// follows.
    fn take_apart(&mut self, is_last: bool) {
        let Some(reply) = &mut self.reply else {
            return;
        };
        let before = self.thoughts.is_some().then(|| size(&self.parts));
        reply.push(&self.ready, &mut self.parts);
        self.ready.clear();
        if is_last {
            reply.finish(&mut self.parts);
        }
        if let (Some(thoughts), Some(before)) = (&mut self.thoughts, before) {
            thoughts.note(before, size(&self.parts));
        }
    }

    /// Adds the text that may be sent to `parts`.
    pub fn take_ready(&mut self, parts: &mut ReplyParts) {
        self.take_apart(false);
        parts.append(std::mem::take(&mut self.parts));
        parts.content.push_str(&self.ready);
        self.ready.clear();
    }
}

impl ThoughtCount {
    /// Notes how the parts have grown: bytes of the reasoning, and of all else.
    fn note(&mut self, before: (usize, usize), after: (usize, usize)) {
        if after.0 > before.0 {
            self.num_tokens += std::mem::take(&mut self.num_held);
        } else if after.1 > before.1 {
            self.num_held = 0;
        }
    }
}

/// Bytes of the reasoning, and of all else.
fn size(parts: &ReplyParts) -> (usize, usize) {
    let calls = parts.calls.iter();
    let of_calls = calls.map(|call| 1 + call.arguments.len()).sum::<usize>();
    (parts.reasoning.len(), parts.content.len() + of_calls)
}

/// The text of a beam, which ends with its first stop word.
pub struct BeamText(TextStream);

impl BeamText {
    /// The text of a beam without tokens yet.
    pub fn new(text: TextStream) -> Self {
        Self(text)
    }
}

impl ReadText for BeamText {
    fn push(&mut self, token: TokenId) -> bool {
        // No response carries this text: a hypothesis's text is made of its tokens.
        self.0.ready.clear();
        self.0.push(token)
    }

    fn fork(&self) -> Box<dyn ReadText> {
        Box::new(Self(self.0.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::toys;
    use inflight_config::ReasoningFormat;

    /// The text that a sequence of these tokens sends, token by token, then at its end; and after which token
    /// a stop word was complete.
    fn sent(contents: &[&str], stop_words: &[&str]) -> (Vec<String>, Option<usize>) {
        let stop_words = stop_words.iter().map(|word| (*word).to_owned()).collect();
        sent_by(
            contents,
            TextRules {
                stop_words,
                ..rules()
            },
        )
    }

    fn rules() -> TextRules {
        TextRules {
            skip_special_tokens: true,
            spaces_between_special_tokens: true,
            stop_words: Vec::new(),
            last_tokens: Vec::new(),
            include_stop: false,
            reply: None,
        }
    }

    fn content_of(stream: &mut TextStream) -> String {
        let mut parts = ReplyParts::default();
        stream.take_ready(&mut parts);
        parts.content
    }

    fn sent_by(contents: &[&str], rules: TextRules) -> (Vec<String>, Option<usize>) {
        let tokenizer = Arc::new(toys::byte_level());
        let mut stream = TextStream::new(tokenizer.clone(), &[], rules);
        let mut stopped = None;
        let mut sent = Vec::new();
        for (i, content) in contents.iter().enumerate() {
            if stream.push(toys::id(&tokenizer, content)) {
                stopped.get_or_insert(i);
            }
            sent.push(content_of(&mut stream));
        }
        stream.finish();
        sent.push(content_of(&mut stream));
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
    fn the_token_that_ends_a_sequence_is_no_text_unless_it_is_included() {
        let last_tokens = vec![toys::id(&toys::byte_level(), "Ġthe")];
        let silent = TextRules {
            last_tokens,
            ..rules()
        };
        assert_eq!(sent_by(&["a", "Ġthe"], silent.clone()).0.concat(), "a");
        // An incomplete character before it is still written, as a replacement character.
        let half = sent_by(&["ðŁĺ", "Ġthe"], silent.clone());
        assert_eq!(half.0, ["", "", "\u{fffd}"]);
        let included = TextRules {
            include_stop: true,
            ..silent
        };
        assert_eq!(sent_by(&["a", "Ġthe"], included).0.concat(), "a the");
    }

    #[test]
    fn a_stop_word_can_be_part_of_the_text() {
        let included = TextRules {
            stop_words: vec!["eb".to_owned()],
            include_stop: true,
            ..rules()
        };
        let (texts, stopped) = sent_by(&["a", "the", "b", "c"], included);
        assert_eq!((texts.concat().as_str(), stopped), ("atheb", Some(2)));
    }

    #[test]
    fn a_beam_ends_where_its_text_does_and_its_forks_go_their_own_ways() {
        let tokenizer = Arc::new(toys::byte_level());
        let id = |content| toys::id(&tokenizer, content);
        let stop_words = vec!["eb".to_owned()];
        let rules = TextRules {
            stop_words,
            ..rules()
        };
        let text = TextStream::new(tokenizer.clone(), &[], rules);
        let text = BeamText::new(text);
        let mut first: Box<dyn ReadText> = Box::new(text);
        assert!(!first.push(id("a")) && !first.push(id("the")));
        let mut second = first.fork();
        assert!(!second.push(id("a")));
        assert!(
            first.push(id("b")),
            "the first half was in the token before"
        );
        assert!(!second.push(id("b")));
        assert!(!second.push(id("e")) && second.fork().push(id("b")));
        assert!(!second.push(id("a")), "what a fork reads is its own");
    }

    #[test]
    fn special_tokens_are_shown_where_they_are_wanted() {
        let shown = TextRules {
            skip_special_tokens: false,
            ..rules()
        };
        assert_eq!(sent_by(&["a", "<|end|>"], shown).0.concat(), "a<|end|>");
    }

    #[test]
    fn marks_that_are_special_tokens_are_read_and_others_are_left_out() {
        let tokenizer = Arc::new(toys::metaspace());
        let format = ReplyFormat {
            reasoning: Some(ReasoningFormat::Think),
            tool_calls: None,
        };
        let start = ReplyStart::Reasoning;
        let rules = TextRules {
            reply: Some(ReplyRules {
                format,
                start,
                parameters: Arc::default(),
                in_pieces: false,
                counts_tokens: true,
            }),
            ..rules()
        };
        let mut stream = TextStream::new(tokenizer.clone(), &[], rules);
        stream.marks = vec![(toys::id(&tokenizer, "</s>"), "</think>")];
        let mut parts = ReplyParts::default();
        for content in ["▁the", "<s>", "<0xF0>", "</s>", "<s>", "▁the"] {
            stream.push(toys::id(&tokenizer, content));
            stream.take_ready(&mut parts);
        }
        stream.finish();
        stream.take_ready(&mut parts);
        let found = (&parts.reasoning[..], &parts.content[..]);
        assert_eq!(found, ("the\u{fffd}", " the"));
        // `▁the`, `<s>`, the byte, and the mark, with which the byte becomes a replacement character.
        assert_eq!(stream.num_reasoning_tokens(), 4);
    }

    #[test]
    fn tokens_of_the_reasoning_are_counted_however_they_are_read() {
        let tokenizer = Arc::new(toys::byte_level());
        let count = |contents: &[&str], start, reads_each: bool| {
            let rules = TextRules {
                reply: Some(ReplyRules {
                    format: ReplyFormat {
                        reasoning: Some(ReasoningFormat::Think),
                        tool_calls: None,
                    },
                    start,
                    parameters: Arc::default(),
                    in_pieces: true,
                    counts_tokens: true,
                }),
                ..rules()
            };
            let mut stream = TextStream::new(tokenizer.clone(), &[], rules);
            for content in contents {
                stream.push(toys::id(&tokenizer, content));
                if reads_each {
                    stream.take_ready(&mut ReplyParts::default());
                }
            }
            stream.finish();
            stream.num_reasoning_tokens()
        };
        let letters: Vec<_> = "<think>ab</think>ab"
            .split("")
            .filter(|letter| !letter.is_empty())
            .collect();
        for reads_each in [true, false] {
            // The first mark and the two letters; the second mark belongs to the answer behind it.
            assert_eq!(count(&letters, ReplyStart::Beginning, reads_each), 9);
            assert_eq!(count(&letters[..9], ReplyStart::Beginning, reads_each), 9);
            assert_eq!(count(&["a", "b"], ReplyStart::Reasoning, reads_each), 2);
            // Half a mark at the end is of the thought.
            assert_eq!(
                count(&["a", "<", "/"], ReplyStart::Reasoning, reads_each),
                3
            );
            assert_eq!(count(&["a", "b"], ReplyStart::Content, reads_each), 0);
        }
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
