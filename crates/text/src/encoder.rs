//! The way from a text to tokens, in the steps of the `tokenizers` library, with bounds on what they make.
//!
//! ```text
//! text -> added tokens, and parts between them -> normalised -> words -> tokens
//!                                                 |             |        |
//!                                                 bounded       |        counted, word by word
//!                                                               the fewest that the parts can have
//! ```
//!
//! A text that is too long is recognised by the fewest tokens that it can have, where each of its bytes is in some
//! token, or else when so many have been made. The rest of it is not tokenised.

use std::cell::Cell;
use std::sync::OnceLock;

use tokenizers::{
    Encoding, Model, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, Tokenizer,
};

use crate::bounded_normalizer::NormalizerSteps;
use crate::coverage;
use crate::guarded::guarded;
use crate::token_cover::{Alphabet, TokenCover};
use inflight_base::RequestError;

/// How a prompt with more tokens than a limit is handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LengthLimit {
    /// There is no limit.
    None,
    /// The text is cut.
    Cut(usize),
    /// It is refused, and the rest of it is not tokenised. The limit is the longest sequence of the model.
    Refuse(usize),
}

impl LengthLimit {
    /// The most tokens of a text that is not refused.
    pub(super) fn most(self) -> Option<usize> {
        match self {
            Self::Refuse(max_tokens) => Some(max_tokens),
            Self::None | Self::Cut(_) => None,
        }
    }
}

/// Encodes texts with a tokenizer.
pub(super) struct Encoder {
    steps: NormalizerSteps,
    /// How the parts of a text are written in tokens, if each byte of them is in one.
    alphabet: Option<Alphabet>,
    /// Made for the first text that is long enough to be refused.
    cover: OnceLock<Option<TokenCover>>,
}

/// Why a text has no tokens.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Problem {
    /// It has at least `at_least` tokens, more than `max_tokens`.
    TooLong { at_least: usize, max_tokens: usize },
    /// The text cannot be tokenised.
    Other(String),
}

impl Problem {
    /// Of a text behind another one with `num_tokens`, which its limit leaves out.
    pub fn behind(self, num_tokens: usize) -> Self {
        match self {
            Self::TooLong {
                at_least,
                max_tokens,
            } => Self::TooLong {
                at_least: at_least + num_tokens,
                max_tokens: max_tokens + num_tokens,
            },
            other => other,
        }
    }
}

impl From<String> for Problem {
    fn from(problem: String) -> Self {
        Self::Other(problem)
    }
}

impl From<Problem> for RequestError {
    fn from(problem: Problem) -> Self {
        Self::Invalid(match problem {
            Problem::TooLong {
                at_least,
                max_tokens,
            } => format!(
                "the prompt has at least {at_least} tokens, more than max_seq_len = {max_tokens}: shorten the prompt"
            ),
            Problem::Other(problem) => format!("the text cannot be tokenised: {problem}"),
        })
    }
}

impl Encoder {
    /// An encoder of texts that are normalised in `steps`, the tokenizer's.
    pub fn new(steps: NormalizerSteps, tokenizer: &Tokenizer) -> Self {
        Self {
            steps,
            alphabet: coverage::alphabet(tokenizer),
            cover: OnceLock::new(),
        }
    }

    /// The tokens of a text, without special tokens around it.
    ///
    /// # Errors
    /// It cannot be tokenised, or has more tokens than `max_tokens`.
    pub fn encode(
        &self,
        tokenizer: &Tokenizer,
        text: &str,
        type_id: u32,
        offsets: OffsetType,
        max_tokens: Option<usize>,
    ) -> Result<Encoding, Problem> {
        let normalizer = self.steps.for_text(text.len());
        let mut words = guarded(|| {
            let vocabulary = tokenizer.get_added_vocabulary();
            Ok(vocabulary.extract_and_normalize(Some(&normalizer), text))
        })?;
        if let Some(refusal) = normalizer.refusal() {
            return Err(Problem::Other(refusal));
        }
        let max_tokens = max_tokens.unwrap_or(usize::MAX);
        let num_tokens = Cell::new(self.fewest_tokens(tokenizer, &words, max_tokens));
        let too_long = |at_least| Problem::TooLong {
            at_least,
            max_tokens,
        };
        if num_tokens.get() > max_tokens {
            return Err(too_long(num_tokens.get()));
        }
        num_tokens.set(0);
        let encoding = guarded(|| {
            if let Some(pre_tokenizer) = tokenizer.get_pre_tokenizer() {
                pre_tokenizer.pre_tokenize(&mut words)?;
            }
            words.tokenize(|word| {
                let left = max_tokens - num_tokens.get();
                let fewest = self.fewest_tokens_of_word(tokenizer, word.get(), left);
                let tokens = match fewest > left {
                    true => Vec::new(),
                    false => tokenizer.get_model().tokenize(word.get())?,
                };
                let num_here = tokens.len().max(fewest);
                num_tokens.set(num_tokens.get() + num_here);
                match num_here > left {
                    true => Err("too long".into()),
                    false => Ok(tokens),
                }
            })?;
            words.into_encoding(None, type_id, offsets)
        });
        match num_tokens.get() > max_tokens {
            true => Err(too_long(num_tokens.get())),
            false => Ok(encoding?),
        }
    }

    /// The fewest tokens that a text can have, before it is split into words; 0 if that is not known.
    fn fewest_tokens(
        &self,
        tokenizer: &Tokenizer,
        parts: &PreTokenizedString,
        max_tokens: usize,
    ) -> usize {
        let parts = parts.get_splits(OffsetReferential::Normalized, OffsetType::None);
        // A token is at least a byte.
        let num_bytes: usize = parts.iter().map(|(part, _, _)| part.len()).sum();
        if self.alphabet.is_none() || num_bytes <= max_tokens {
            return 0;
        }
        let Some(cover) = self.cover(tokenizer) else {
            return 0;
        };
        let mut num_tokens = 0;
        for (part, _, tokens) in parts {
            if num_tokens > max_tokens {
                break;
            }
            num_tokens += match tokens {
                Some(tokens) => tokens.len(),
                None => cover.fewest(part, max_tokens - num_tokens),
            };
        }
        num_tokens
    }

    /// The fewest tokens that a word can have, if that was not asked of the text; 0 if that is not known.
    fn fewest_tokens_of_word(&self, tokenizer: &Tokenizer, word: &str, max_tokens: usize) -> usize {
        match self.alphabet.is_some() || word.len() <= max_tokens {
            true => 0,
            false => {
                let cover = self.cover(tokenizer);
                cover.map_or(0, |cover| cover.fewest(word, max_tokens))
            }
        }
    }

    fn cover(&self, tokenizer: &Tokenizer) -> Option<&TokenCover> {
        let alphabet = self.alphabet.unwrap_or(Alphabet::Characters);
        let cover = || TokenCover::of(tokenizer.get_model(), alphabet);
        self.cover.get_or_init(cover).as_ref()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;
    use crate::toys;

    /// The tokenizers of the tests, variants of them that join or drop more, and tokenizers of checkpoints.
    static TOKENIZERS: LazyLock<Vec<Tokenizer>> = LazyLock::new(|| {
        let of_checkpoint = |name: &str| {
            let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures");
            let path = format!("{fixtures}/{name}/tokenizer.json");
            let mut tokenizer = Tokenizer::from_file(path).expect("a tokenizer");
            tokenizer.with_truncation(None).expect("none");
            tokenizer
        };
        let checkpoints = ["classes/bert", "classes/xlm-roberta"];
        let checkpoints = checkpoints.map(of_checkpoint);
        toy_tokenizers().into_iter().chain(checkpoints).collect()
    });

    fn toy_tokenizers() -> Vec<Tokenizer> {
        let mut composed = toys::byte_level_json();
        composed["normalizer"] = json!({"type": "NFKC"});
        let mut unfused = toys::metaspace_json();
        unfused["model"]["byte_fallback"] = false.into();
        unfused["model"]["unk_token"] = "<unk>".into();
        let mut fused = unfused.clone();
        fused["model"]["fuse_unk"] = true.into();
        let mut split = toys::metaspace_json();
        split["normalizer"] = Value::Null;
        split["pre_tokenizer"] = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": true});
        let mut prefixed = toys::byte_level_json();
        prefixed["pre_tokenizer"]["add_prefix_space"] = true.into();
        let mut isolated = toys::byte_level_json();
        isolated["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": "the"}, "behavior": "Isolated", "invert": false},
            {"type": "Digits", "individual_digits": true},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        ]});
        let mut removed = isolated.clone();
        removed["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "Removed".into();
        let mut unigram = toys::metaspace_json();
        let pieces = [
            ("<unk>", 0.0),
            ("▁", -2.0),
            ("t", -3.0),
            ("th", -2.5),
            ("▁the", -2.0),
            ("e", -3.0),
        ];
        unigram["model"] =
            json!({"type": "Unigram", "unk_id": 0, "byte_fallback": false, "vocab": pieces});
        let json = [
            toys::byte_level_json(),
            toys::metaspace_json(),
            composed,
            unfused,
            fused,
            split,
            unigram,
            prefixed,
            isolated,
            removed,
            toys::word_piece_json(),
        ];
        let parse = |json: Value| json.to_string().parse().expect("well formed");
        json.into_iter().map(parse).collect()
    }

    fn encode(tokenizer: &Tokenizer, text: &str, max: Option<usize>) -> Result<Vec<u32>, Problem> {
        let steps = NormalizerSteps::new(tokenizer.get_normalizer());
        let encoder = Encoder::new(steps, tokenizer);
        let encoding = encoder.encode(tokenizer, text, 0, OffsetType::None, max);
        encoding.map(|encoding| encoding.get_ids().to_vec())
    }

    fn texts() -> impl Strategy<Value = String> {
        let part = prop_oneof![
            Just("the ".to_owned()),
            Just("▁the▁▁".to_owned()),
            Just("<s>".to_owned()),
            Just("<|end|>".to_owned()),
            Just("they's don't ".to_owned()),
            Just("日本😀e\u{301}ﬁ".to_owned()),
            "[a-et ]{0,12}",
            any::<String>(),
        ];
        prop::collection::vec(part, 0..12).prop_map(|parts| parts.concat())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        #[test]
        fn tokens_are_those_of_the_library(text in texts()) {
            for tokenizer in TOKENIZERS.iter() {
                let expected = tokenizer.encode_fast(&text[..], false).expect("tokens");
                prop_assert_eq!(encode(tokenizer, &text, None).expect("tokens"), expected.get_ids());
            }
        }

        #[test]
        fn only_texts_with_more_tokens_are_refused(text in texts(), max in 0usize..60) {
            for tokenizer in TOKENIZERS.iter() {
                let all = encode(tokenizer, &text, None).expect("tokens");
                match encode(tokenizer, &text, Some(max)) {
                    Ok(tokens) => prop_assert_eq!(tokens, all),
                    Err(problem) => match problem {
                        Problem::TooLong { at_least, max_tokens } => {
                            prop_assert_eq!(max_tokens, max);
                            prop_assert!(at_least > max && all.len() >= at_least, "{:?}", text);
                        }
                        Problem::Other(problem) => prop_assert!(false, "{}", problem),
                    },
                }
            }
        }

        #[test]
        fn no_text_has_fewer_tokens_than_its_bytes_allow(text in texts()) {
            for tokenizer in TOKENIZERS.iter() {
                if let Some(max_bytes) = crate::coverage::max_bytes_per_token(tokenizer) {
                    let tokens = encode(tokenizer, &text, None).expect("tokens");
                    prop_assert!(tokens.len() * max_bytes >= text.len(), "{:?}", text);
                }
            }
        }
    }

    #[test]
    fn the_rest_of_a_text_that_is_too_long_is_not_tokenised() {
        // Without words, all of a text is one: its cover says that it is too long.
        let [byte_level, metaspace]: [Tokenizer; 2] =
            [toys::byte_level_json(), toys::metaspace_json()]
                .map(|json| json.to_string().parse().expect("well formed"));
        let too_long =
            |tokenizer, text: &str| encode(tokenizer, text, Some(100)).expect_err("refused");
        let exactly = Problem::TooLong {
            at_least: 101,
            max_tokens: 100,
        };
        assert_eq!(too_long(&metaspace, &"the ".repeat(100_000)), exactly);
        assert_eq!(too_long(&byte_level, &"the ".repeat(100_000)), exactly);
        // Otherwise the cover of each word does.
        let mut json = toys::byte_level_json();
        json["pre_tokenizer"]["add_prefix_space"] = true.into();
        let prefixed: Tokenizer = json.to_string().parse().expect("well formed");
        assert_eq!(too_long(&prefixed, &"the".repeat(100_000)), exactly);
        let unknown = "日".repeat(100_000);
        assert_eq!(too_long(&metaspace, &unknown), exactly);
        let error = RequestError::from(exactly).to_string();
        assert_eq!(
            error,
            "the prompt has at least 101 tokens, more than max_seq_len = 100: shorten the prompt"
        );
    }

    #[test]
    fn what_a_pre_tokenizer_removes_has_no_tokens() {
        let mut json = toys::byte_level_json();
        json["pre_tokenizer"] = json!({"type": "Split", "pattern": {"String": "the"}, "behavior": "Removed", "invert": false});
        let tokenizer: Tokenizer = json.to_string().parse().expect("well formed");
        let text = format!("{}a", "the".repeat(500));
        let tokens = encode(&tokenizer, &text, Some(100)).expect("tokens");
        assert_eq!(tokens.len(), 1);
    }

    #[test]
    fn added_tokens_count_like_the_text_between_them() {
        let tokenizer: Tokenizer = toys::metaspace_json()
            .to_string()
            .parse()
            .expect("well formed");
        for (text, at_least) in [
            ("<s>".repeat(101), Some(101)),
            ("<s>".repeat(100), None),
            (format!("{}<s>the the", "the ".repeat(49)), None),
            (
                format!("{}<s>{}", "the ".repeat(49), "the ".repeat(999)),
                Some(101),
            ),
            (format!("{}<s>the", "<s>".repeat(99)), Some(101)),
            (format!("{}the", "<s>".repeat(99)), None),
        ] {
            let problem = encode(&tokenizer, &text, Some(100)).err();
            let expected = at_least.map(|at_least| Problem::TooLong {
                at_least,
                max_tokens: 100,
            });
            assert_eq!(problem, expected, "{text}");
        }
    }

    #[test]
    fn a_text_that_the_normalizer_multiplies_is_refused_and_others_are_not() {
        let mut json = toys::metaspace_json();
        let eight = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaa"});
        json["normalizer"] = json!({"type": "Sequence", "normalizers": vec![eight; 30]});
        let tokenizer: Tokenizer = json.to_string().parse().expect("well formed");
        let problem = encode(&tokenizer, "the a", None).expect_err("refused");
        let problem = RequestError::from(problem).to_string();
        assert!(
            problem.starts_with("the text cannot be tokenised: 'Replace' of the normalizer"),
            "{problem}"
        );
        assert!(encode(&tokenizer, "the", None).is_ok());
        // Added tokens are not normalised, and neither is what comes before them made good.
        assert!(encode(&tokenizer, "a<s>the", None).is_err());
    }
}
