//! The tokenizer that a GGUF file describes, as a `tokenizer.json`.
//!
//! ```text
//! tokenizer.ggml.model   tokens                     words by
//! gpt2                   byte-level BPE             the expressions of tokenizer.ggml.pre (word_splits.rs)
//! llama                  SentencePiece BPE          nothing: a space is a character, U+2581
//! ```
//!
//! A SentencePiece vocabulary has scores instead of merges: two neighbours are merged if both and their union are
//! tokens, those with the best union first, as its own encoder does (Kudo and Richardson 2018, `bpe_model.cc`). Source:
//! ggml's gguf.md, and `llama-vocab.cpp` of llama.cpp for what is missing there: the defaults of the keys.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use crate::Tokenizer;
use crate::word_splits::WordSplit;
use inflight_base::TokenId;

/// The way out where the metadata do not describe a tokenizer.
const REMEDY: &str = "put the model's tokenizer.json beside the file";
const NO_MERGES: &str =
    "has no tokenizer.ggml.merges; put the model's tokenizer.json beside the file";
const NO_TOKENS: &str =
    "has no tokenizer.ggml.tokens; put the model's tokenizer.json beside the file";
/// What SentencePiece writes for a space.
const SPACE: &str = "\u{2581}";
/// Tokens of SentencePiece that are longer are not joined of two others. (The default of its trainer is 16 characters.)
const MAX_JOINED_CHARS: usize = 64;

/// The values under `tokenizer.ggml`.
#[derive(Clone, Debug, Default)]
pub struct GgufVocabulary {
    /// `model`
    pub model: String,
    /// `pre`
    pub pre: Option<String>,
    /// `tokens`, in order of their ids
    pub tokens: Vec<String>,
    /// `scores`, of every token, or empty
    pub scores: Vec<f64>,
    /// `token_type`, of every token, or empty
    pub kinds: Vec<f64>,
    /// `merges`, each of two tokens with a space between them
    pub merges: Vec<String>,
    /// `bos_token_id`
    pub start: Option<TokenId>,
    /// `eos_token_id`
    pub end: Option<TokenId>,
    /// `unknown_token_id`
    pub unknown: Option<TokenId>,
    /// `add_bos_token`
    pub adds_start: Option<bool>,
    /// `add_eos_token`
    pub adds_end: Option<bool>,
    /// `add_space_prefix`
    pub adds_space: Option<bool>,
}

/// What a token is, by its number.
#[derive(Clone, Copy, PartialEq, Eq)]
enum TokenKind {
    Ordinary,
    Unknown,
    /// Names a control token, such as the end of a turn. Not text.
    Control,
    /// Text that is never split.
    UserDefined,
    /// A byte of a character that is no token, or a token that is out of use.
    Other,
}

impl GgufVocabulary {
    /// Among the [`kinds`](GgufVocabulary::kinds), a token of text.
    pub const ORDINARY: f64 = 1.0;
    /// Likewise, a control token.
    pub const CONTROL: f64 = 3.0;

    /// The tokenizer.
    ///
    /// # Errors
    /// It is of a kind that is not supported, or contradicts itself.
    pub fn tokenizer(&self) -> Result<Tokenizer, String> {
        if let Some(problem) = self.problem() {
            return Err(problem);
        }
        let json = match self.model.as_str() {
            "gpt2" => self.byte_level()?,
            _ => self.sentence_piece(),
        };
        Tokenizer::parse(json.to_string().as_bytes())
    }

    /// Why there can be no [tokenizer](GgufVocabulary::tokenizer), as far as the kind and the parts tell; `None` if
    /// nothing is in the way.
    pub fn problem(&self) -> Option<String> {
        match self.model.as_str() {
            "gpt2" if self.merges.is_empty() => Some(NO_MERGES.to_owned()),
            "gpt2" => WordSplit::of(self.pre.as_deref()).err(),
            "llama" if self.tokens.is_empty() => Some(NO_TOKENS.to_owned()),
            "llama" if self.scores.len() != self.tokens.len() => Some(self.odd_scores()),
            "llama" => None,
            "" => Some(format!("has no tokenizer.ggml.model; {REMEDY}")),
            other => Some(format!(
                "tokenizer.ggml.model: '{other}' is not supported (gpt2 and llama are); {REMEDY}"
            )),
        }
    }

    /// The text of a token.
    pub fn text(&self, token: TokenId) -> Option<&str> {
        self.tokens.get(token as usize).map(String::as_str)
    }

    fn byte_level(&self) -> Result<Value, String> {
        let split = WordSplit::of(self.pre.as_deref())?;
        let merges = self.merges.iter().map(|merge| {
            // The first part may begin with a space, where the vocabulary has such a token.
            let space = merge.char_indices().skip(1).find(|(_, char)| *char == ' ');
            let (at, _) = space
                .ok_or_else(|| format!("tokenizer.ggml.merges: '{merge}' is not two tokens"))?;
            Ok(json!([merge[..at], merge[at + 1..]]))
        });
        let merges: Vec<Value> = merges.collect::<Result<_, String>>()?;
        let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
        Ok(json!({
            "version": "1.0",
            "added_tokens": self.added_tokens(false),
            "normalizer": split.normalizer(),
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": split.pre_tokenizers()},
            "post_processor": self.template(split.adds_start()),
            "decoder": byte_level,
            "model": {
                "type": "BPE", "vocab": self.vocabulary(), "merges": merges, "ignore_merges": split.ignores_merges(),
            },
        }))
    }

    fn odd_scores(&self) -> String {
        format!(
            "has {} tokenizer.ggml.scores for {} tokens; it is damaged",
            self.scores.len(),
            self.tokens.len()
        )
    }

    fn sentence_piece(&self) -> Value {
        let adds_space = self.adds_space.unwrap_or(true);
        let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE});
        let prepend = json!({"type": "Prepend", "prepend": SPACE});
        let normalizers = match adds_space {
            true => vec![prepend, replace],
            false => vec![replace],
        };
        let mut decoders = vec![
            json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        if adds_space {
            decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        let unknown = self.unknown.or_else(|| self.first_of(TokenKind::Unknown));
        json!({
            "version": "1.0",
            // SentencePiece replaces spaces before it looks for them.
            "added_tokens": self.added_tokens(!adds_space),
            "normalizer": {"type": "Sequence", "normalizers": normalizers},
            "pre_tokenizer": null,
            "post_processor": self.template(true),
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": {
                "type": "BPE", "vocab": self.vocabulary(), "merges": self.merges_by_score(), "byte_fallback": true,
                "fuse_unk": true, "unk_token": unknown.and_then(|token| self.text(token)),
            },
        })
    }

    /// All pairs of tokens whose union is a token, the best union first.
    fn merges_by_score(&self) -> Vec<Value> {
        let ids: HashMap<&str, usize> = self.tokens.iter().map(String::as_str).zip(0..).collect();
        let mut merges = Vec::new();
        for (id, token) in self.tokens.iter().enumerate() {
            let is_long = token.len() > MAX_JOINED_CHARS * char::MAX.len_utf8();
            if self.kind(id) != TokenKind::Ordinary
                || is_long
                || ids.get(token.as_str()) != Some(&id)
            {
                continue;
            }
            for (at, _) in token.char_indices().skip(1) {
                let (first, second) = token.split_at(at);
                if let (Some(&first), Some(&second)) = (ids.get(first), ids.get(second)) {
                    merges.push((self.scores[id], first, second));
                }
            }
        }
        merges.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
        let merges = merges.into_iter();
        merges
            .map(|(_, first, second)| json!([self.tokens[first], self.tokens[second]]))
            .collect()
    }

    fn vocabulary(&self) -> Map<String, Value> {
        let ids = 0..self.tokens.len();
        self.tokens
            .iter()
            .cloned()
            .zip(ids.map(Value::from))
            .collect()
    }

    /// The tokens that are found before anything is split. `is_text_normalized`: in the normalised text, those that
    /// are text.
    fn added_tokens(&self, is_text_normalized: bool) -> Vec<Value> {
        let tokens = self.tokens.iter().enumerate();
        let added = tokens.filter_map(|(id, content)| {
            let is_special = match self.kind(id) {
                TokenKind::Ordinary | TokenKind::Other => return None,
                TokenKind::Unknown | TokenKind::Control => true,
                TokenKind::UserDefined => false,
            };
            Some(json!({
                "id": id, "content": content, "special": is_special, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": is_text_normalized && !is_special,
            }))
        });
        added.collect()
    }

    /// The start and end tokens around a text; null if there are none.
    fn template(&self, adds_start: bool) -> Value {
        let special = |token: Option<TokenId>, is_added: bool| {
            let token = token.filter(|_| is_added)?;
            Some((token, self.text(token)?))
        };
        let start = special(self.start, self.adds_start.unwrap_or(adds_start));
        let end = special(self.end, self.adds_end.unwrap_or(false));
        if start.is_none() && end.is_none() {
            return Value::Null;
        }
        let piece = |token: Option<(TokenId, &str)>| {
            token.map(|(_, text)| json!({"SpecialToken": {"id": text, "type_id": 0}}))
        };
        let sequence = |id: &str| Some(json!({"Sequence": {"id": id, "type_id": 0}}));
        let single: Vec<Value> = [piece(start), sequence("A"), piece(end)]
            .into_iter()
            .flatten()
            .collect();
        let pair: Vec<Value> = [
            piece(start),
            sequence("A"),
            piece(end),
            piece(start),
            sequence("B"),
            piece(end),
        ]
        .into_iter()
        .flatten()
        .collect();
        let tokens: Map<String, Value> = [start, end]
            .into_iter()
            .flatten()
            .map(|(id, text)| {
                (
                    text.to_owned(),
                    json!({"id": text, "ids": [id], "tokens": [text]}),
                )
            })
            .collect();
        json!({"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens})
    }

    fn first_of(&self, kind: TokenKind) -> Option<TokenId> {
        let mut ids = 0..self.tokens.len();
        ids.find(|id| self.kind(*id) == kind)
            .map(|id| id as TokenId)
    }

    fn kind(&self, id: usize) -> TokenKind {
        match self.kinds.get(id).map(|kind| *kind as i64) {
            Some(2) => TokenKind::Unknown,
            Some(3) => TokenKind::Control,
            Some(4) => TokenKind::UserDefined,
            Some(5 | 6) => TokenKind::Other,
            _ => TokenKind::Ordinary,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LengthLimit;

    const ORDINARY: f64 = GgufVocabulary::ORDINARY;
    const CONTROL: f64 = GgufVocabulary::CONTROL;
    const UNKNOWN: f64 = 2.0;
    const USER_DEFINED: f64 = 4.0;
    const UNUSED: f64 = 5.0;
    const BYTE: f64 = 6.0;

    fn strings(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|text| (*text).to_owned()).collect()
    }

    /// A vocabulary of tokens with their kinds and scores.
    fn vocabulary(model: &str, tokens: &[(&str, f64, f64)]) -> GgufVocabulary {
        GgufVocabulary {
            model: model.to_owned(),
            tokens: tokens
                .iter()
                .map(|(token, _, _)| (*token).to_owned())
                .collect(),
            kinds: tokens.iter().map(|(_, kind, _)| *kind).collect(),
            scores: tokens.iter().map(|(_, _, score)| *score).collect(),
            ..GgufVocabulary::default()
        }
    }

    fn byte_level() -> GgufVocabulary {
        let ordinary = ["t", "h", "e", "Ġ", "th", "the"].map(|token| (token, ORDINARY, 0.0));
        let others = [
            ("<s>", CONTROL, 0.0),
            ("</s>", CONTROL, 0.0),
            ("<tool>", USER_DEFINED, 0.0),
        ];
        GgufVocabulary {
            pre: Some("gpt-2".to_owned()),
            merges: strings(&["t h", "th e"]),
            start: Some(6),
            end: Some(7),
            ..vocabulary("gpt2", &[&ordinary[..], &others].concat())
        }
    }

    fn sentence_piece() -> GgufVocabulary {
        GgufVocabulary {
            start: Some(0),
            end: Some(2),
            ..vocabulary(
                "llama",
                &[
                    ("<s>", CONTROL, 0.0),
                    ("<unk>", UNKNOWN, 0.0),
                    ("</s>", CONTROL, 0.0),
                    ("\u{2581}", ORDINARY, -9.0),
                    ("t", ORDINARY, -9.0),
                    ("h", ORDINARY, -9.0),
                    ("e", ORDINARY, -9.0),
                    ("he", ORDINARY, -1.0),
                    ("th", ORDINARY, -2.0),
                    ("the", ORDINARY, -3.0),
                    ("tt", UNUSED, -1.0),
                    ("hh", BYTE, -1.0),
                    ("\u{2581}t", ORDINARY, -4.0),
                    ("<tool>", USER_DEFINED, 0.0),
                ],
            )
        }
    }

    fn contents(vocabulary: &GgufVocabulary, text: &str, adds_special: bool) -> String {
        let tokenizer = vocabulary.tokenizer().expect("a tokenizer");
        let ids = tokenizer.encode(text, adds_special).expect("tokens");
        let contents = ids.iter().map(|id| vocabulary.text(*id).expect("a token"));
        contents.collect::<Vec<_>>().join("|")
    }

    #[test]
    fn byte_level_tokens_are_merged_in_the_order_of_the_file() {
        let mut vocabulary = byte_level();
        assert_eq!(contents(&vocabulary, "the th", false), "the|Ġ|th");
        assert_eq!(
            contents(&vocabulary, "th<tool>e</s>", false),
            "th|<tool>|e|</s>"
        );
        vocabulary.merges = strings(&["t h"]);
        assert_eq!(contents(&vocabulary, "the", false), "th|e");
        // The first token of a merge may begin with a space.
        vocabulary.tokens.extend(strings(&[" t", " th"]));
        vocabulary.merges = strings(&["t h", " t h"]);
        assert!(vocabulary.tokenizer().is_ok());
        vocabulary.merges = strings(&["th"]);
        let error = vocabulary.tokenizer().err().expect("refused");
        assert_eq!(error, "tokenizer.ggml.merges: 'th' is not two tokens");
    }

    #[test]
    fn texts_have_the_tokens_around_them_that_the_file_says() {
        let mut vocabulary = byte_level();
        assert_eq!(contents(&vocabulary, "the", true), "the");
        vocabulary.adds_start = Some(true);
        assert_eq!(contents(&vocabulary, "the", true), "<s>|the");
        vocabulary.adds_end = Some(true);
        assert_eq!(contents(&vocabulary, "the", true), "<s>|the|</s>");
        let tokenizer = vocabulary.tokenizer().expect("a tokenizer");
        let pair = tokenizer.encode_texts("the", Some("th"), true, LengthLimit::None);
        assert_eq!(pair.expect("tokens").ids, [6, 5, 7, 6, 4, 7]);
        vocabulary.adds_start = Some(false);
        assert_eq!(contents(&vocabulary, "the", true), "the|</s>");
        vocabulary.end = None;
        assert_eq!(contents(&vocabulary, "the", true), "the");
        assert_eq!(contents(&sentence_piece(), "t", true), "<s>|\u{2581}t");
    }

    #[test]
    fn sentence_piece_merges_the_best_union_first() {
        let mut vocabulary = sentence_piece();
        assert_eq!(
            contents(&vocabulary, "the t", false),
            "\u{2581}|the|\u{2581}t"
        );
        vocabulary.adds_space = Some(false);
        assert_eq!(contents(&vocabulary, "thethe", false), "the|the");
        // Tokens out of use and tokens of bytes are never joined.
        assert_eq!(contents(&vocabulary, "tthh", false), "t|th|h");
        // "the" is "t" and "he" or "th" and "e".
        vocabulary.scores[8] = 0.0;
        vocabulary.scores[9] = -99.0;
        assert_eq!(contents(&vocabulary, "the", false), "the");
        vocabulary.tokens[9] = "xyz".to_owned();
        assert_eq!(contents(&vocabulary, "the", false), "th|e");
        // Of two tokens with one text, the last counts.
        vocabulary.tokens[9] = "he".to_owned();
        vocabulary.scores[7] = 1.0;
        assert_eq!(contents(&vocabulary, "the", false), "th|e");
        vocabulary.scores[9] = 1.0;
        assert_eq!(contents(&vocabulary, "the", false), "t|he");
    }

    #[test]
    fn tokens_of_more_than_256_bytes_are_not_joined() {
        let powers: Vec<String> = (0..10).map(|power| "a".repeat(1 << power)).collect();
        let tokens: Vec<_> = powers
            .iter()
            .map(|token| (&token[..], ORDINARY, 0.0))
            .collect();
        let vocabulary = GgufVocabulary {
            adds_space: Some(false),
            ..vocabulary("llama", &tokens)
        };
        assert_eq!(contents(&vocabulary, &powers[8], false), powers[8]);
        let twice = [&powers[8][..], &powers[8]].join("|");
        assert_eq!(contents(&vocabulary, &powers[9], false), twice);
    }

    #[test]
    fn unknown_text_is_the_token_of_that_kind_or_the_one_that_is_named() {
        let mut vocabulary = sentence_piece();
        vocabulary.adds_space = Some(false);
        assert_eq!(contents(&vocabulary, "thx", false), "th|<unk>");
        vocabulary.unknown = Some(2);
        assert_eq!(contents(&vocabulary, "thx", false), "th|</s>");
    }

    #[test]
    fn only_control_tokens_are_special() {
        let vocabulary = sentence_piece();
        let tokenizer = vocabulary.tokenizer().expect("a tokenizer");
        let special = tokenizer
            .special_tokens(99)
            .into_iter()
            .map(|(content, _)| content);
        assert_eq!(special.collect::<Vec<_>>(), ["<s>", "<unk>", "</s>"]);
        let text = tokenizer.encode("t<tool>t</s>t", false).expect("tokens");
        assert!([13, 2].iter().all(|id| text.contains(id)), "{text:?}");
        assert_eq!(vocabulary.text(13), Some("<tool>"));
        assert_eq!(vocabulary.text(14), None);
    }

    #[test]
    fn what_is_no_tokenizer_is_refused_with_a_remedy() {
        assert_eq!(byte_level().problem(), None);
        assert_eq!(sentence_piece().problem(), None);
        let without = |change: fn(&mut GgufVocabulary)| {
            let mut vocabularies = [byte_level(), sentence_piece()];
            vocabularies.iter_mut().for_each(change);
            vocabularies.map(|vocabulary| vocabulary.tokenizer().err())
        };
        let [gpt2, llama] = without(|it| it.merges.clear());
        assert_eq!((gpt2.as_deref(), llama), (Some(NO_MERGES), None));
        let [gpt2, llama] = without(|it| it.pre = None);
        assert!(gpt2.expect("refused").contains("has no tokenizer.ggml.pre"));
        assert_eq!(llama, None);
        let [_, llama] = without(|it| it.tokens.clear());
        assert_eq!(llama.as_deref(), Some(NO_TOKENS));
        let [_, llama] = without(|it| it.scores.truncate(3));
        let odd = "has 3 tokenizer.ggml.scores for 14 tokens; it is damaged";
        assert_eq!(llama.as_deref(), Some(odd));
        for (model, problem) in [
            ("", "has no tokenizer.ggml.model"),
            ("bert", "'bert' is not supported"),
        ] {
            let error = vocabulary(model, &[]).problem().expect("refused");
            assert!(
                error.contains(problem) && error.ends_with(REMEDY),
                "{error}"
            );
        }
    }
}
