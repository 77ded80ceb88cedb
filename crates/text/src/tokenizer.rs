//! A model's tokenizer: encodes text, and classifies single tokens for decoding.
//!
//! The `tokenizers` library does the encoding. For decoding, this file distinguishes tokens that are *bytes*, which may
//! be part of a character, from tokens that are *text*, which may depend on the token before (the first token
//! loses a leading space). The detokenizer decodes sequences.

use std::path::Path;
use std::sync::OnceLock;

use serde::Deserialize;
use serde_json::{Value, json};
use tokenizers::utils::truncation::{
    TruncationDirection, TruncationParams, TruncationStrategy, truncate_encodings,
};
use tokenizers::{
    DecoderWrapper, Encoding, NormalizerWrapper, OffsetType, PostProcessor, PostProcessorWrapper,
};

use crate::bounded_normalizer::NormalizerSteps;
use crate::byte_alphabet::byte_of;
use crate::coverage;
use crate::declared_tokens::{self, DeclaredTokens};
use crate::encoder::{Encoder, LengthLimit, Problem};
use crate::growth;
use crate::guarded::guarded;
use inflight_base::{LoadError, RequestError, TokenId, read_text};

/// A character placed before a word to find the word's tokens inside a text. Vocabularies do not merge it with words.
const ANCHOR: &str = "\n";

/// A text that ends with an ordinary token, so that the next token decodes as it does inside a text.
const CONTEXT: &str = "a";

/// Assumed maximum length of a token's text for lossy tokenizers, in bytes. Longer than the longest known tokens, which
/// are runs of 128 spaces.
const MAX_BYTES_PER_TOKEN: usize = 256;

/// A tokenizer loaded from `tokenizer.json`; shared by threads.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    encoder: Encoder,
    bytes: ByteTokens,
    max_bytes_per_token: usize,
    context: OnceLock<Context>,
    /// The token that ends a text, if the folder names one.
    end: Option<TokenId>,
}

/// The beginning of a text, behind which a token decodes as it does inside one.
pub(super) struct Context {
    pub tokens: Vec<TokenId>,
    pub text: String,
}

/// The tokens of a text, or of two.
pub struct EncodedTexts {
    /// All tokens.
    pub ids: Vec<TokenId>,
    /// The first one of the second type, which all behind it have, too: where the second text begins, as BERT's
    /// tokenizers have it. `None` if all are of one type.
    pub second_text: Option<usize>,
}

/// The kind of output that a token decodes to.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Piece {
    /// No output: an unknown token, or a skipped special token.
    Nothing,
    /// Bytes, which were appended to the buffer. They may be part of a character.
    Bytes,
    /// Text, which may depend on the token before.
    Text,
}

/// Which tokens of a vocabulary are bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ByteTokens {
    /// None: WordPiece and the like.
    None,
    /// All tokens, with one character per byte, as in GPT-2 (byte-level BPE: Llama 3, Qwen).
    All,
    /// Tokens such as `<0x0A>`, for characters that the vocabulary lacks (SentencePiece: Llama 2).
    Fallback,
}

impl Tokenizer {
    /// Loads `tokenizer.json` from `dir`, with the tokens that the files beside it declare.
    ///
    /// Disables truncation and padding, which are meant for training: truncation would cut prompts.
    ///
    /// # Errors
    /// The file cannot be read or is invalid.
    pub fn load(dir: &Path) -> Result<Self, LoadError> {
        let path = dir.join("tokenizer.json");
        let declared = declared_tokens::read(dir)?;
        let parsed = read_text(&path)
            .map_err(|error| error.to_string())
            .and_then(|json| Self::parse_with(json.as_bytes(), declared));
        parsed.map_err(|reason| LoadError::File { path, reason })
    }

    /// Parses the contents of a tokenizer.json.
    ///
    /// # Errors
    ///
    /// Why it is none that can be served.
    pub fn parse(json: &[u8]) -> Result<Self, String> {
        Self::parse_with(json, DeclaredTokens::default())
    }

    fn parse_with(json: &[u8], declared: DeclaredTokens) -> Result<Self, String> {
        let steps = normalizer_steps(json, &declared)?;
        let mut inner = guarded(|| tokenizers::Tokenizer::from_bytes(json))?;
        guarded(|| inner.with_truncation(None).map(|_| ()))?;
        inner.with_padding(None);
        growth::check(&inner)?;
        let encoder = Encoder::new(steps, &inner);
        let end = declare(&mut inner, &encoder, declared)?;
        let bytes = byte_tokens(inner.get_decoder())?;
        let max_bytes_per_token = coverage::max_bytes_per_token(&inner);
        Ok(Self {
            inner,
            encoder,
            bytes,
            max_bytes_per_token: max_bytes_per_token.unwrap_or(MAX_BYTES_PER_TOKEN),
            context: OnceLock::new(),
            end,
        })
    }

    /// The token that ends a text: `eos_token` of tokenizer_config.json, or of special_tokens_map.json.
    pub fn end_id(&self) -> Option<TokenId> {
        self.end
    }

    /// Maximum length of the text that one token represents, in bytes. A lossy tokenizer has no such limit; the value
    /// then exceeds the average of any meaningful text.
    pub fn max_bytes_per_token(&self) -> usize {
        self.max_bytes_per_token
    }

    /// The tokens of `text`. With `add_special_tokens`, includes the tokenizer's start and end tokens.
    ///
    /// # Errors
    /// The tokenizer cannot encode the text.
    pub fn encode(
        &self,
        text: &str,
        add_special_tokens: bool,
    ) -> Result<Vec<TokenId>, RequestError> {
        let limit = LengthLimit::None;
        let encoded = self.encode_texts(text, None, add_special_tokens, limit)?;
        Ok(encoded.ids)
    }

    /// The tokens of a text, or of a pair as the tokenizer joins them. With [`LengthLimit::Cut`] there are at most as
    /// many, special ones included. What is too much is left out at the end of the text, of a pair at the ends of the
    /// longer text until both are equally long (`longest_first` of transformers). Special tokens stay.
    ///
    /// # Errors
    /// The tokenizer cannot encode the texts, they are too long, or there is no room for a token of each.
    pub fn encode_texts(
        &self,
        first: &str,
        second: Option<&str>,
        add_special_tokens: bool,
        limit: LengthLimit,
    ) -> Result<EncodedTexts, RequestError> {
        let mut encoding = self.encode_whole(first, second, add_special_tokens, limit.most())?;
        if let LengthLimit::Cut(max_tokens) = limit
            && encoding.get_ids().len() > max_tokens
        {
            encoding = self.encode_cut(first, second, add_special_tokens, max_tokens)?;
        }
        let is_second = |&id: &u32| second.is_some() && id != 0;
        Ok(EncodedTexts {
            ids: encoding.get_ids().to_vec(),
            second_text: encoding.get_type_ids().iter().position(is_second),
        })
    }

    fn encode_whole(
        &self,
        first: &str,
        second: Option<&str>,
        add_special_tokens: bool,
        max_tokens: Option<usize>,
    ) -> Result<Encoding, Problem> {
        let encode = |text, type_id, max_tokens| {
            let offsets = OffsetType::None;
            self.encoder
                .encode(&self.inner, text, type_id, offsets, max_tokens)
        };
        let first = encode(first, 0, max_tokens)?;
        let second = match second {
            None => None,
            Some(second) => {
                let num_first = first.len();
                let left = max_tokens.map(|max| max.saturating_sub(num_first));
                let second = encode(second, 1, left);
                Some(second.map_err(|problem| problem.behind(num_first))?)
            }
        };
        let joined = guarded(|| self.inner.post_process(first, second, add_special_tokens));
        Ok(joined?)
    }

    fn encode_cut(
        &self,
        first: &str,
        second: Option<&str>,
        add_special_tokens: bool,
        max_tokens: usize,
    ) -> Result<Encoding, RequestError> {
        let processor = self.inner.get_post_processor();
        let processor = processor.filter(|_| add_special_tokens);
        let num_special = processor.map_or(0, |it| it.added_tokens(second.is_some()));
        let num_texts = 1 + usize::from(second.is_some());
        if max_tokens < num_special + num_texts {
            return Err(RequestError::Invalid(format!(
                "a prompt of {max_tokens} tokens, of which {num_special} are special, has no token of each text; \
                 allow at least {}",
                num_special + num_texts
            )));
        }
        let params = TruncationParams {
            direction: TruncationDirection::Right,
            max_length: max_tokens - num_special,
            strategy: TruncationStrategy::LongestFirst,
            stride: 0,
        };
        let encode = |text| {
            let encoding = self
                .encoder
                .encode(&self.inner, text, 0, OffsetType::Byte, None)?;
            guarded(|| self.inner.post_process(encoding, None, false)).map_err(Problem::Other)
        };
        let first = encode(first)?;
        let second = second.map(encode).transpose()?;
        let joined = guarded(|| {
            let (first, second) = truncate_encodings(first, second, &params)?;
            self.inner.post_process(first, second, add_special_tokens)
        });
        Ok(joined.map_err(Problem::Other)?)
    }

    /// The distinct encodings of `word` at the start of a text, after another character, and after a space.
    ///
    /// # Errors
    /// See [`Tokenizer::encode`].
    pub fn encode_word_variants(&self, word: &str) -> Result<Vec<Vec<TokenId>>, RequestError> {
        let anchor = self.encode(ANCHOR, false)?;
        let mut variants = vec![self.encode(word, false)?];
        for text in [word.to_owned(), format!(" {word}")] {
            let anchored = self.encode(&format!("{ANCHOR}{text}"), false)?;
            variants.push(match anchored.strip_prefix(anchor.as_slice()) {
                Some(tokens) => tokens.to_vec(),
                // The anchor was merged with the word.
                None => self.encode(&text, false)?,
            });
        }
        let mut unique = Vec::new();
        for variant in variants {
            if !variant.is_empty() && !unique.contains(&variant) {
                unique.push(variant);
            }
        }
        Ok(unique)
    }

    /// The text of a single token, including special tokens. Undecodable bytes become U+FFFD.
    pub fn token_text(&self, token: TokenId) -> String {
        self.decode(&[token], false)
    }

    /// What a token is in the vocabulary; None if it has no such token.
    pub fn content(&self, token: TokenId) -> Option<String> {
        self.inner.id_to_token(token)
    }

    /// The kind of `token`. Appends a byte token's bytes to `bytes`.
    pub(super) fn piece(&self, token: TokenId, skip_special: bool, bytes: &mut Vec<u8>) -> Piece {
        let Some(content) = self.inner.id_to_token(token) else {
            return Piece::Nothing;
        };
        let added = self.inner.get_added_vocabulary();
        if skip_special && added.is_special_token(&content) {
            return Piece::Nothing;
        }
        match self.bytes {
            ByteTokens::None => Piece::Text,
            ByteTokens::All => {
                let start = bytes.len();
                for char in content.chars() {
                    let Some(byte) = byte_of(char) else {
                        // Added tokens may contain any character and are literal text then.
                        bytes.truncate(start);
                        bytes.extend_from_slice(content.as_bytes());
                        break;
                    };
                    bytes.push(byte);
                }
                Piece::Bytes
            }
            ByteTokens::Fallback => match fallback_byte(&content) {
                Some(byte) => {
                    bytes.push(byte);
                    Piece::Bytes
                }
                None => Piece::Text,
            },
        }
    }

    /// The text of `token` if it is an added token, that is, not part of the trained vocabulary.
    pub(super) fn added_content(&self, token: TokenId) -> Option<&str> {
        let added = self.inner.get_added_vocabulary().get_added_tokens_decoder();
        added.get(&token).map(|token| token.content.as_str())
    }

    /// The name of a special token, such as the end-of-text token. None for tokens that are text.
    pub(super) fn special_name(&self, token: TokenId) -> Option<String> {
        let name = self.inner.id_to_token(token)?;
        let added = self.inner.get_added_vocabulary();
        added.is_special_token(&name).then_some(name)
    }

    /// The special tokens below `vocab_size`, with their texts.
    pub fn special_tokens(&self, vocab_size: u32) -> Vec<(String, TokenId)> {
        let added = self.inner.get_added_vocabulary().get_added_tokens_decoder();
        let special = added
            .iter()
            .filter(|(id, token)| token.special && **id < vocab_size);
        let mut special: Vec<_> = special
            .map(|(id, token)| (token.content.clone(), *id))
            .collect();
        special.sort_by_key(|(_, id)| *id);
        special
    }

    /// The id of the special token with this text.
    pub fn special_id(&self, content: &str) -> Option<TokenId> {
        let added = self.inner.get_added_vocabulary();
        let id = self.inner.token_to_id(content);
        id.filter(|_| added.is_special_token(content))
    }

    /// Whether a token was added to the vocabulary, special or not. No other text becomes part of it.
    pub fn is_added(&self, token: TokenId) -> bool {
        let added = self.inner.get_added_vocabulary();
        added.simple_id_to_token(token).is_some()
    }

    /// The token with this content, as [`Tokenizer::content`] gives it.
    pub fn id_of(&self, content: &str) -> Option<TokenId> {
        self.inner.token_to_id(content)
    }

    /// The beginning of a text.
    pub(super) fn context(&self) -> &Context {
        self.context.get_or_init(|| {
            let tokens = self.encode(CONTEXT, false).unwrap_or_default();
            let text = self.decode(&tokens, false);
            Context { tokens, text }
        })
    }

    pub(super) fn byte_tokens(&self) -> ByteTokens {
        self.bytes
    }

    /// The text of `tokens` on their own. Undecodable bytes become U+FFFD.
    pub(super) fn decode(&self, tokens: &[TokenId], skip_special: bool) -> String {
        guarded(|| self.inner.decode(tokens, skip_special))
            .unwrap_or_else(|_| char::REPLACEMENT_CHARACTER.into())
    }
}

/// The steps of the normalizer in a tokenizer.json. The library normalises the contents of added tokens when it reads
/// the file.
fn normalizer_steps(json: &[u8], declared: &DeclaredTokens) -> Result<NormalizerSteps, String> {
    #[derive(Deserialize)]
    struct Parts {
        normalizer: Option<NormalizerWrapper>,
        #[serde(default)]
        added_tokens: Vec<Added>,
    }
    #[derive(Deserialize)]
    struct Added {
        content: String,
    }
    let parts: Parts = serde_json::from_slice(json).map_err(|error| error.to_string())?;
    let steps = NormalizerSteps::new(parts.normalizer.as_ref());
    let of_file = parts.added_tokens.iter().map(|token| &token.content);
    let beside = declared.tokens.iter().map(|token| &token.content);
    for content in of_file.chain(beside) {
        let checked = steps.check(content);
        checked.map_err(|problem| format!("added token '{}': {problem}", shown(content)))?;
    }
    Ok(steps)
}

/// The beginning of a token's content, for messages.
fn shown(content: &str) -> &str {
    &content[..content.floor_char_boundary(100)]
}

/// Adds tokens, and the end token to every text if it has to be there. Returns the end token.
fn declare(
    inner: &mut tokenizers::Tokenizer,
    encoder: &Encoder,
    declared: DeclaredTokens,
) -> Result<Option<TokenId>, String> {
    let DeclaredTokens {
        tokens,
        ids,
        end,
        adds_end,
        splits_special,
    } = declared;
    let is_there = |inner: &tokenizers::Tokenizer, content: &str| {
        let added = inner.get_added_vocabulary().get_vocab();
        added.contains_key(content)
    };
    let (with_flags, by_name) = tokens.split_at(ids.len());
    guarded(|| inner.add_tokens(with_flags.iter().cloned()))?;
    // Those that are there keep their flags.
    let others = by_name
        .iter()
        .filter(|token| !is_there(inner, &token.content));
    let others: Vec<_> = others.cloned().collect();
    guarded(|| inner.add_tokens(others))?;
    for (content, id) in ids {
        if let Some(actual) = inner.token_to_id(&content).filter(|actual| *actual != id) {
            log::warn!(
                "tokenizer.json makes '{content}' token {actual}, and the files beside it say {id}: {actual} is used"
            );
        }
    }
    inner.set_encode_special_tokens(splits_special);
    let end = end.and_then(|content| Some((inner.token_to_id(&content)?, content)));
    if let Some((id, content)) = end.as_ref().filter(|_| adds_end) {
        add_end(inner, encoder, *id, content)?;
    }
    Ok(end.map(|(id, _)| id))
}

/// Puts the end token behind every text, unless it is there.
fn add_end(
    inner: &mut tokenizers::Tokenizer,
    encoder: &Encoder,
    id: TokenId,
    content: &str,
) -> Result<(), String> {
    let encoding = encoder.encode(inner, CONTEXT, 0, OffsetType::None, None);
    let encoding = encoding.map_err(|problem| RequestError::from(problem).to_string())?;
    let encoding = guarded(|| inner.post_process(encoding, None, true))?;
    if encoding.get_ids().last() == Some(&id) {
        return Ok(());
    }
    let processor = inner.get_post_processor().map(serde_json::to_value);
    let processor = processor.transpose().map_err(|error| error.to_string())?;
    // A sequence of processors, or one.
    let mut processors = match processor {
        None => Vec::new(),
        Some(mut processor) => match processor.get_mut("processors").map(Value::take) {
            Some(Value::Array(processors)) => processors,
            _ => vec![processor],
        },
    };
    let is_template = |processor: &Value| processor["type"] == "TemplateProcessing";
    if !processors.iter().any(is_template) {
        let sequence = |id: &str| json!({"Sequence": {"id": id, "type_id": 0}});
        processors.push(json!({
            "type": "TemplateProcessing", "single": [sequence("A")], "pair": [sequence("A"), sequence("B")],
            "special_tokens": {},
        }));
    }
    let mut templates = processors.iter_mut().filter(|it| is_template(it));
    let template = templates.next().ok_or("post_processor: has no template")?;
    let end = json!({"SpecialToken": {"id": content, "type_id": 0}});
    for kind in ["single", "pair"] {
        let pieces = template[kind]
            .as_array_mut()
            .ok_or("post_processor: has no list of pieces")?;
        pieces.push(end.clone());
    }
    template["special_tokens"][content] = json!({"id": content, "ids": [id], "tokens": [content]});
    let sequence = json!({"type": "Sequence", "processors": processors});
    let sequence: PostProcessorWrapper =
        serde_json::from_value(sequence).map_err(|error| error.to_string())?;
    inner.with_post_processor(Some(sequence));
    Ok(())
}

fn byte_tokens(decoder: Option<&DecoderWrapper>) -> Result<ByteTokens, String> {
    let Some(decoder) = decoder else {
        return Ok(ByteTokens::None);
    };
    let mut parts = Vec::new();
    flatten(decoder, &mut parts);
    let is_fuse = |part: &&DecoderWrapper| matches!(part, DecoderWrapper::Fuse(_));
    let is_byte_level = |part: &DecoderWrapper| matches!(part, DecoderWrapper::ByteLevel(_));
    parts.retain(|part| !is_fuse(part));
    if parts.iter().any(|part| is_byte_level(part)) {
        return match parts[..] {
            [_] => Ok(ByteTokens::All),
            _ => Err(
                "decoder: ByteLevel combined with other decoders cannot be decoded token by token; \
                      use ByteLevel alone"
                    .to_owned(),
            ),
        };
    }
    let has_fallback = parts
        .iter()
        .any(|part| matches!(part, DecoderWrapper::ByteFallback(_)));
    Ok(if has_fallback {
        ByteTokens::Fallback
    } else {
        ByteTokens::None
    })
}

fn flatten<'a>(decoder: &'a DecoderWrapper, parts: &mut Vec<&'a DecoderWrapper>) {
    match decoder {
        DecoderWrapper::Sequence(sequence) => {
            for part in sequence.get_decoders() {
                flatten(part, parts);
            }
        }
        part => parts.push(part),
    }
}

/// The byte of a token like `<0x0A>`.
fn fallback_byte(content: &str) -> Option<u8> {
    let hex = content.strip_prefix("<0x")?.strip_suffix('>')?;
    (hex.len() == 2)
        .then(|| u8::from_str_radix(hex, 16).ok())
        .flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::toys;

    #[test]
    fn special_tokens_in_text_are_encoded_as_tokens() {
        let tokenizer = toys::metaspace();
        let eos = toys::id(&tokenizer, "</s>");
        let bos = toys::id(&tokenizer, "<s>");
        let plain = tokenizer.encode("the</s>", false).expect("tokens");
        assert_eq!(plain.last(), Some(&eos));
        assert!(!plain.contains(&bos));
        let with = tokenizer.encode("the</s>", true).expect("tokens");
        assert_eq!(with[0], bos);
        assert_eq!(with[1..], plain[..]);
    }

    #[test]
    fn ignores_truncation_and_padding_of_the_file() {
        let mut json = toys::byte_level_json();
        json["truncation"] = serde_json::json!({
            "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0
        });
        json["padding"] = serde_json::json!({
            "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": null,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "!"
        });
        let tokenizer = Tokenizer::parse(json.to_string().as_bytes()).expect("loads");
        assert_eq!(tokenizer.encode("xyz", false).expect("tokens").len(), 3);
    }

    #[test]
    fn word_variants_cover_text_start_inside_and_after_a_space() {
        let tokenizer = toys::metaspace();
        let id = |content| toys::id(&tokenizer, content);
        let variants = tokenizer.encode_word_variants("the").expect("tokens");
        assert_eq!(variants, [vec![id("▁the")], vec![id("the")]]);

        let tokenizer = toys::byte_level();
        let id = |content| toys::id(&tokenizer, content);
        let variants = tokenizer.encode_word_variants("the").expect("tokens");
        assert_eq!(variants, [vec![id("the")], vec![id("Ġthe")]]);
    }

    #[test]
    fn a_bad_file_is_reported_with_path_and_reason() {
        let dir = std::env::temp_dir().join(format!("inflight-tokenizer-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a folder");
        let problem = || Tokenizer::load(&dir).err().expect("refused").to_string();
        assert!(problem().contains("tokenizer.json: No such file"));
        let nested = "[".repeat(100_000);
        let mut no_model = toys::byte_level_json();
        no_model["model"] = serde_json::Value::Null;
        let mut bad_merge = toys::byte_level_json();
        bad_merge["model"]["merges"] = serde_json::json!([["no", "such"]]);
        let mut mixed = toys::byte_level_json();
        mixed["decoder"] = serde_json::json!({"type": "Sequence", "decoders": [
            {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]});
        let files = [
            "".to_owned(),
            "{}".to_owned(),
            "\u{0}".to_owned(),
            nested,
            no_model.to_string(),
            bad_merge.to_string(),
            mixed.to_string(),
        ];
        for file in files {
            std::fs::write(dir.join("tokenizer.json"), &file).expect("a file");
            assert!(problem().contains("tokenizer.json: "), "{file}");
        }
        assert!(problem().contains("ByteLevel combined with other decoders"));
        std::fs::remove_dir_all(&dir).expect("removed");
    }

    #[test]
    fn a_file_that_multiplies_its_own_tokens_is_refused() {
        let mut json = toys::metaspace_json();
        let eight = json!({"type": "Replace", "pattern": {"String": "s"}, "content": "ssssssss"});
        json["normalizer"] = json!({"type": "Sequence", "normalizers": vec![eight; 30]});
        let problem = Tokenizer::parse(json.to_string().as_bytes())
            .err()
            .expect("refused");
        assert!(
            problem.starts_with("added token '<s>': 'Replace' of the normalizer"),
            "{problem}"
        );
    }

    #[test]
    fn a_text_or_a_pair_that_is_too_long_is_refused() {
        let tokenizer = toys::metaspace();
        let refused = |first: &str, second: Option<&str>| {
            let encoded = tokenizer.encode_texts(first, second, true, LengthLimit::Refuse(10));
            encoded.err().map(|error| error.to_string())
        };
        let ten = "a ".repeat(5);
        assert_eq!(refused(&ten[..9], None), None);
        assert_eq!(refused(&ten[..9], Some("a a a a a")), None);
        let problem =
            "the prompt has at least 11 tokens, more than max_seq_len = 10: shorten the prompt";
        let long = "a ".repeat(500);
        assert_eq!(refused(&long, None).as_deref(), Some(problem));
        assert_eq!(refused("a", Some(&long)).as_deref(), Some(problem));
        let kept = tokenizer.encode_texts(&long, None, true, LengthLimit::Cut(10));
        assert_eq!(kept.expect("cut").ids.len(), 10);
    }

    #[test]
    fn a_cut_prompt_keeps_its_special_tokens_and_the_beginning_of_each_text() {
        let tokenizer = toys::metaspace();
        let cut = |first: &str, second: Option<&str>, max_tokens| {
            tokenizer.encode_texts(first, second, true, LengthLimit::Cut(max_tokens))
        };
        for (first, second, max_tokens, expected, second_text) in [
            ("the a the", None, 9, "<s>▁the▁a▁the", None),
            ("the a the", None, 3, "<s>▁the▁a", None),
            ("the a the", None, 2, "<s>▁the", None),
            ("", None, 1, "<s>", None),
            ("the a", Some("a a"), 4, "▁the▁a▁a▁a", Some(2)),
            ("the a", Some("a a"), 3, "▁the▁a▁a", Some(1)),
            ("the a", Some("a a"), 2, "▁the▁a", Some(1)),
        ] {
            let encoded = cut(first, second, max_tokens).expect("there is room");
            let contents = encoded.ids.iter().filter_map(|id| tokenizer.content(*id));
            assert_eq!(contents.collect::<String>(), expected);
            assert_eq!(encoded.second_text, second_text, "{expected}");
        }
        for (first, second, num_special) in [("the a the", None, 1), ("the a", Some("a a"), 0)] {
            let error = cut(first, second, 1).err().expect("refused").to_string();
            let expected = format!(
                "of 1 tokens, of which {num_special} are special, has no token of each text; allow at least 2"
            );
            assert!(error.ends_with(&expected), "{error}");
        }
    }

    #[test]
    fn tokens_are_known_by_their_contents() {
        let tokenizer = toys::byte_level();
        let [end, tool, the] =
            ["<|end|>", "<tool call>", "Ġthe"].map(|it| tokenizer.id_of(it).expect("a token"));
        assert_eq!(tokenizer.id_of("<none>"), None);
        assert_eq!(tokenizer.content(the).as_deref(), Some("Ġthe"));
        assert_eq!(tokenizer.content(9999), None);
        assert_eq!(tokenizer.token_text(the), " the");
        assert_eq!(tokenizer.token_text(end), "<|end|>");
        assert_eq!(tokenizer.special_id("<|end|>"), Some(end));
        for other in ["<tool call>", "Ġthe", "<none>"] {
            assert_eq!(tokenizer.special_id(other), None, "{other}");
        }
        let special = vec![("<|end|>".to_owned(), end)];
        assert_eq!(tokenizer.special_tokens(end + 1), special);
        assert_eq!(tokenizer.special_tokens(u32::MAX), special);
        assert_eq!(tokenizer.special_tokens(end), Vec::new());
        assert_eq!(tokenizer.added_content(tool), Some("<tool call>"));
        assert_eq!(tokenizer.added_content(the), None);
        assert_eq!(tokenizer.end_id(), None);
    }

    #[test]
    fn a_token_has_at_most_the_bytes_of_the_longest_one() {
        assert_eq!(
            toys::byte_level().max_bytes_per_token(),
            "<tool call>".len()
        );
        assert_eq!(toys::word_piece().max_bytes_per_token(), 256);
    }

    #[test]
    fn variants_of_a_word_are_never_empty() {
        let variants = |word| {
            toys::byte_level()
                .encode_word_variants(word)
                .expect("tokens")
        };
        assert_eq!(variants(""), [vec![toys::id(&toys::byte_level(), "Ġ")]]);
    }

    #[test]
    fn an_end_token_that_is_not_there_is_put_behind_texts() {
        let template = toys::metaspace_json()["post_processor"].clone();
        let byte_level = toys::byte_level_json()["post_processor"].clone();
        let sequence = json!({"type": "Sequence", "processors": [byte_level, template]});
        let mut ended = template.clone();
        let end = json!({"SpecialToken": {"id": "</s>", "type_id": 0}});
        ended["single"].as_array_mut().expect("pieces").push(end);
        ended["special_tokens"]["</s>"] = json!({"id": "</s>", "ids": [2], "tokens": ["</s>"]});
        for (processor, expected, of_pair) in [
            (template, "<s>▁the</s>", "▁the▁the</s>"),
            (sequence, "<s>▁the</s>", "▁the▁the</s>"),
            (ended, "<s>▁the</s>", "▁the▁the"),
            (Value::Null, "▁the</s>", "▁the▁the</s>"),
        ] {
            let mut json = toys::metaspace_json();
            json["post_processor"] = processor.clone();
            let declared = DeclaredTokens {
                end: Some("</s>".to_owned()),
                adds_end: true,
                ..DeclaredTokens::default()
            };
            let json = json.to_string();
            let tokenizer = Tokenizer::parse_with(json.as_bytes(), declared).expect("loads");
            for (second, expected) in [(None, expected), (Some("the"), of_pair)] {
                let encoded = tokenizer.encode_texts("the", second, true, LengthLimit::None);
                let ids = encoded.expect("tokens").ids;
                let contents: Vec<_> = ids.iter().filter_map(|id| tokenizer.content(*id)).collect();
                assert_eq!(contents.concat(), expected, "{processor}");
            }
        }
    }

    #[test]
    fn the_kind_of_tokens_comes_from_the_decoder() {
        let kind = |decoder: Value| {
            let decoder = serde_json::from_value(decoder).expect("a decoder");
            byte_tokens(Some(&decoder))
        };
        let byte_level = || json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
        let fuse = || json!({"type": "Fuse"});
        let sequence = |parts: Vec<Value>| json!({"type": "Sequence", "decoders": parts});
        assert_eq!(byte_tokens(None), Ok(ByteTokens::None));
        for (decoder, expected) in [
            (byte_level(), ByteTokens::All),
            (
                sequence(vec![fuse(), sequence(vec![byte_level()])]),
                ByteTokens::All,
            ),
            (json!({"type": "ByteFallback"}), ByteTokens::Fallback),
            (
                sequence(vec![json!({"type": "ByteFallback"}), fuse()]),
                ByteTokens::Fallback,
            ),
            (fuse(), ByteTokens::None),
        ] {
            assert_eq!(kind(decoder), Ok(expected));
        }
        assert!(
            kind(sequence(vec![
                byte_level(),
                json!({"type": "ByteFallback"})
            ]))
            .is_err()
        );
    }

    #[test]
    fn tokens_of_bytes_have_two_hexadecimal_digits() {
        for (content, byte) in [
            ("<0x0A>", Some(10)),
            ("<0xff>", Some(255)),
            ("<0xA>", None),
            ("<0x0AB>", None),
            ("<0xGG>", None),
            ("0x0A", None),
        ] {
            assert_eq!(fallback_byte(content), byte, "{content}");
        }
    }

    #[test]
    fn tokenizer_is_send_and_sync() {
        fn shared<T: Send + Sync>() {}
        shared::<Tokenizer>();
    }
}
