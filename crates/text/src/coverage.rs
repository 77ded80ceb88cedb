//! Bound on the text that one token can represent, so that an oversized text is rejected before it is tokenised.
//!
//! For a lossless tokenizer, which puts every byte of the text into some token, the bound is the longest token of
//! the vocabulary. A lossy tokenizer has no such bound: a normaliser may drop or merge characters, a pre-tokeniser may
//! drop white space, a model may map many characters to one unknown token. A component that is not known to be
//! lossless counts as lossy.

use serde::Serialize;
use serde_json::Value;
use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{Model, ModelWrapper, Tokenizer};

use crate::token_cover::Alphabet;

/// Length of the longest text that one token can represent, in bytes. None for lossy tokenizers.
pub(super) fn max_bytes_per_token(tokenizer: &Tokenizer) -> Option<usize> {
    let normalizer = json(tokenizer.get_normalizer())?;
    let pre_tokenizer = json(tokenizer.get_pre_tokenizer())?;
    let ModelWrapper::BPE(model) = tokenizer.get_model() else {
        return None;
    };
    let is_byte_level = mentions_byte_level(&normalizer) || mentions_byte_level(&pre_tokenizer);
    if !normalizer_is_lossless(&normalizer)
        || !pre_tokenizer_is_lossless(&pre_tokenizer)
        || !model_is_lossless(model, is_byte_level)
    {
        return None;
    }
    let added = tokenizer.get_added_tokens_decoder();
    if added.values().any(|token| token.lstrip || token.rstrip) {
        return None;
    }
    let vocabulary = model.get_vocab();
    let lengths = vocabulary.keys().map(|content| match is_byte_level {
        // Each character of a byte-level token encodes one byte of text.
        true => content.chars().count(),
        false => content.len(),
    });
    lengths
        .chain(added.values().map(|token| token.content.len()))
        // The longest UTF-8 character, for the unknown token.
        .chain([4])
        .max()
}

/// How a normalised text is written in tokens, if the words that the pre-tokenizer makes of it are all of it, and
/// nothing else. `None` if words lack something, or have a space in front that the text has not.
pub(super) fn alphabet(tokenizer: &Tokenizer) -> Option<Alphabet> {
    let pre_tokenizer = json(tokenizer.get_pre_tokenizer())?;
    let is_byte_level = mentions_byte_level(&pre_tokenizer);
    let is_whole = pre_tokenizer_is_lossless(&pre_tokenizer) && !changes_words(&pre_tokenizer);
    is_whole.then_some(match is_byte_level {
        true => Alphabet::Bytes,
        false => Alphabet::Characters,
    })
}

/// Whether words are written differently, beside their bytes as characters.
fn changes_words(pre_tokenizer: &Value) -> bool {
    pre_tokenizer["type"] == "Metaspace"
        || pre_tokenizer["type"] == "ByteLevel" && pre_tokenizer["add_prefix_space"] != false
        || parts(pre_tokenizer).any(changes_words)
        || num_byte_levels(pre_tokenizer) > 1
}

fn num_byte_levels(part: &Value) -> usize {
    usize::from(part["type"] == "ByteLevel") + parts(part).map(num_byte_levels).sum::<usize>()
}

fn json(part: Option<&impl Serialize>) -> Option<Value> {
    serde_json::to_value(part).ok()
}

fn mentions_byte_level(part: &Value) -> bool {
    part["type"] == "ByteLevel" || parts(part).any(mentions_byte_level)
}

/// The parts of a sequence; empty for other components.
fn parts(part: &Value) -> impl Iterator<Item = &Value> {
    [&part["normalizers"], &part["pretokenizers"]]
        .into_iter()
        .filter_map(Value::as_array)
        .flatten()
}

fn normalizer_is_lossless(normalizer: &Value) -> bool {
    match normalizer["type"].as_str() {
        None => normalizer.is_null(),
        Some("Sequence") => parts(normalizer).all(normalizer_is_lossless),
        Some("Replace") => {
            let old = normalizer["pattern"]["String"].as_str();
            let new = normalizer["content"].as_str();
            matches!((old, new), (Some(old), Some(new)) if old.len() <= new.len())
        }
        Some(kind) => ["ByteLevel", "Prepend"].contains(&kind),
    }
}

fn pre_tokenizer_is_lossless(pre_tokenizer: &Value) -> bool {
    match pre_tokenizer["type"].as_str() {
        None => pre_tokenizer.is_null(),
        Some("Sequence") => parts(pre_tokenizer).all(pre_tokenizer_is_lossless),
        Some("Split" | "Punctuation") => pre_tokenizer["behavior"] != "Removed",
        Some(kind) => ["ByteLevel", "Metaspace", "Digits"].contains(&kind),
    }
}

/// Whether the model drops no character and never merges several into one unknown token.
fn model_is_lossless(model: &BPE, is_byte_level: bool) -> bool {
    let has = |content: &str| model.token_to_id(content).is_some();
    let is_bare = model.continuing_subword_prefix.is_none() && model.end_of_word_suffix.is_none();
    let has_all_bytes = is_byte_level
        && ByteLevel::alphabet()
            .iter()
            .all(|byte| has(byte.encode_utf8(&mut [0; 4])));
    let falls_back =
        model.byte_fallback && (0..=255).all(|byte: u8| has(&format!("<{byte:#04X}>")));
    is_bare && (has_all_bytes || falls_back || model.unk_token.is_some() && !model.fuse_unk)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::toys;

    fn of(json: &Value) -> Option<usize> {
        max_bytes_per_token(&json.to_string().parse().expect("well formed"))
    }

    #[test]
    fn is_the_longest_token_of_a_lossless_tokenizer() {
        assert_eq!(of(&toys::byte_level_json()), Some("<tool call>".len()));
        assert_eq!(of(&toys::metaspace_json()), Some("<0x00>".len()));
    }

    #[test]
    fn counts_the_bytes_that_a_byte_level_token_encodes() {
        let mut json = toys::byte_level_json();
        let blanks = "Ġ".repeat(30);
        json["model"]["vocab"][blanks] = 5000.into();
        assert_eq!(of(&json), Some(30));
    }

    #[test]
    fn no_text_has_fewer_tokens_than_the_bound() {
        let texts = [
            "the the  the",
            " \u{301}é😀日本<|end|><tool call>",
            &" ".repeat(99),
            &"the".repeat(99),
            "\0\u{feff}<unk>",
        ];
        for json in [toys::byte_level_json(), toys::metaspace_json()] {
            let max_bytes = of(&json).expect("lossless");
            let tokenizer: Tokenizer = json.to_string().parse().expect("well formed");
            for text in texts {
                let encoding = tokenizer.encode_fast(text, false).expect("encoded");
                assert!(encoding.len() * max_bytes >= text.len(), "{text:?}");
            }
        }
    }

    /// A description, and a change to the byte-level tokenizer's file.
    type Case = (&'static str, fn(&mut Value));

    #[test]
    fn lossy_tokenizers_have_no_bound() {
        let cases: &[Case] = &[
            ("a normaliser that merges characters", |j| {
                j["normalizer"] = json!({ "type": "NFC" })
            }),
            ("a normaliser that drops characters", |j| {
                j["normalizer"] = json!({ "type": "Sequence", "normalizers": [
                    { "type": "Strip", "strip_left": true, "strip_right": true }] });
            }),
            ("a normaliser that shortens", |j| {
                j["normalizer"] =
                    json!({ "type": "Replace", "pattern": { "String": "  " }, "content": " " });
            }),
            ("a normaliser that replaces a pattern", |j| {
                j["normalizer"] =
                    json!({ "type": "Replace", "pattern": { "Regex": " +" }, "content": "▁" });
            }),
            ("a pre-tokeniser that drops characters", |j| {
                j["pre_tokenizer"] = json!({ "type": "Sequence", "pretokenizers": [
                    { "type": "WhitespaceSplit" }, j["pre_tokenizer"]] });
            }),
            ("a pre-tokeniser that removes separators", |j| {
                j["pre_tokenizer"] = json!({ "type": "Split", "pattern": { "String": " " },
                    "behavior": "Removed", "invert": false });
            }),
            ("an added token that strips white space", |j| {
                j["added_tokens"][0]["lstrip"] = true.into()
            }),
            ("a model that marks the ends of words", |j| {
                j["model"]["end_of_word_suffix"] = "</w>".into()
            }),
            ("a model that marks continued words", |j| {
                j["model"]["continuing_subword_prefix"] = "##".into();
                j["model"]["merges"] = json!([]);
            }),
            ("a byte without a token", |j| {
                let vocabulary = j["model"]["vocab"].as_object_mut().expect("an object");
                let id = vocabulary.remove("a").expect("in the vocabulary");
                vocabulary.insert("aa".to_owned(), id);
            }),
        ];
        assert!(of(&toys::byte_level_json()).is_some());
        for (name, change) in cases {
            let mut json = toys::byte_level_json();
            change(&mut json);
            assert_eq!(of(&json), None, "{name}");
        }
        let word_piece = json!({
            "version": "1.0", "added_tokens": [], "pre_tokenizer": null,
            "model": { "type": "WordPiece", "unk_token": "?", "continuing_subword_prefix": "##",
                       "max_input_chars_per_word": 100, "vocab": { "?": 0 } },
        });
        assert_eq!(of(&word_piece), None);
    }

    #[test]
    fn words_that_are_the_text_have_an_alphabet() {
        let bytes = |has_space: bool| json!({"type": "ByteLevel", "add_prefix_space": has_space, "trim_offsets": true, "use_regex": true});
        let split = |behavior: &str| json!({"type": "Split", "pattern": {"String": " "}, "behavior": behavior, "invert": false});
        let sequence = |parts: &[Value]| json!({"type": "Sequence", "pretokenizers": parts});
        let isolated = split("Isolated");
        for (pre_tokenizer, expected) in [
            (bytes(false), Some(Alphabet::Bytes)),
            (bytes(true), None),
            (Value::Null, Some(Alphabet::Characters)),
            (isolated.clone(), Some(Alphabet::Characters)),
            (split("Removed"), None),
            (
                json!({"type": "Digits", "individual_digits": true}),
                Some(Alphabet::Characters),
            ),
            (json!({"type": "Punctuation", "behavior": "Removed"}), None),
            (json!({"type": "WhitespaceSplit"}), None),
            (
                json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": true}),
                None,
            ),
            (
                sequence(&[isolated.clone(), bytes(false)]),
                Some(Alphabet::Bytes),
            ),
            (sequence(&[isolated, bytes(true)]), None),
            (sequence(&[bytes(false), bytes(false)]), None),
            (sequence(&[sequence(&[bytes(false)]), bytes(false)]), None),
        ] {
            let mut json = toys::byte_level_json();
            json["pre_tokenizer"] = pre_tokenizer.clone();
            let tokenizer: Tokenizer = json.to_string().parse().expect("well formed");
            assert_eq!(alphabet(&tokenizer), expected, "{pre_tokenizer}");
        }
    }

    #[test]
    fn one_unknown_token_per_character_is_lossless() {
        let mut json = toys::metaspace_json();
        json["model"]["byte_fallback"] = false.into();
        assert_eq!(of(&json), None, "unknown characters are dropped");
        json["model"]["unk_token"] = "<unk>".into();
        assert!(of(&json).is_some());
        json["model"]["fuse_unk"] = true.into();
        assert_eq!(of(&json), None);
    }
}
