//! Tokens that a Hugging Face folder declares outside of tokenizer.json.
//!
//! ```text
//! tokenizer_config.json     added_tokens_decoder: { "32000": { "content": "<tool>", "special": true, ... } }
//!                           eos_token, pad_token, image_token ...; additional_special_tokens, extra_special_tokens
//!                           add_eos_token, split_special_tokens
//! special_tokens_map.json   the same names; read where there is no added_tokens_decoder
//! added_tokens.json         { "<tool>": 32000 }; likewise
//! ```
//!
//! They are added to the tokenizer in the order in which transformers 5 adds them (`TokenizersBackend`), which decides
//! about the ids of those that the vocabulary lacks, and with the same flags. transformers 4 puts the end token behind
//! texts with `add_eos_token`; version 5 leaves that to tokenizer.json. Here version 4 is followed, for whose embedding
//! models the key was written.

use std::fs;
use std::io;
use std::path::Path;

use serde_json::{Map, Value};
use tokenizers::AddedToken;

use inflight_base::{LoadError, TokenId, parse_json, read_text};

/// The most tokens that a folder may declare. Vocabularies have up to a few thousand that are reserved.
const MAX_TOKENS: usize = 1 << 16;
/// The longest of them, in bytes.
const MAX_TOKEN_BYTES: usize = 1 << 12;

const CONFIG: &str = "tokenizer_config.json";
const SPECIAL_TOKENS: &str = "special_tokens_map.json";
const ADDED_TOKENS: &str = "added_tokens.json";
const DECODER: &str = "added_tokens_decoder";
const EXTRA: &str = "extra_special_tokens";
const ADDITIONAL: &str = "additional_special_tokens";
const END: &str = "eos_token";
/// The special tokens that transformers knows by name, in the order in which it adds them.
const NAMED: [&str; 7] = [
    "bos_token",
    END,
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
];

/// The declared tokens of a folder.
#[derive(Debug, Default)]
pub(super) struct DeclaredTokens {
    /// The tokens to add, in this order.
    pub tokens: Vec<AddedToken>,
    /// The ids that the folder gives some of them.
    pub ids: Vec<(String, TokenId)>,
    /// The token that ends a text.
    pub end: Option<String>,
    /// Whether it is added to every text.
    pub adds_end: bool,
    /// Whether special tokens in a text are split like any other.
    pub splits_special: bool,
}

/// Reads the files of `dir`, as far as they are there.
///
/// # Errors
/// A file is not of this form, or declares too much.
pub(super) fn read(dir: &Path) -> Result<DeclaredTokens, LoadError> {
    let fail = |name: &str, reason: String| LoadError::File {
        path: dir.join(name),
        reason,
    };
    let object = |name: &str| {
        let read = read_object(&dir.join(name));
        read.map_err(|reason| fail(name, reason))
    };
    let mut config = object(CONFIG)?;
    let mut declared = DeclaredTokens {
        adds_end: config.get("add_eos_token") == Some(&Value::Bool(true)),
        splits_special: config.get("split_special_tokens") == Some(&Value::Bool(true)),
        ..DeclaredTokens::default()
    };
    let mut by_id: Vec<(TokenId, AddedToken)> = Vec::new();
    match config.remove(DECODER) {
        Some(Value::Object(decoder)) => {
            for (id, token) in &decoder {
                let token = token_of(token, false).zip(id.parse().ok());
                let (token, id) = token.ok_or_else(|| {
                    fail(
                        CONFIG,
                        format!("{DECODER}: {id} is not an id with its token"),
                    )
                })?;
                by_id.push((id, token));
            }
        }
        _ => {
            config.extend(object(SPECIAL_TOKENS)?);
            let special = SpecialTokens::of(&config);
            for (content, id) in object(ADDED_TOKENS)? {
                let id = id.as_u64().and_then(|id| TokenId::try_from(id).ok());
                let id = id.ok_or_else(|| fail(ADDED_TOKENS, format!("'{content}' has no id")))?;
                let is_special = special.contains(&content);
                by_id.push((id, AddedToken::from(content, is_special)));
            }
        }
    }
    by_id.sort_by_key(|(id, _)| *id);
    declared.end = config
        .get(END)
        .and_then(|token| token_of(token, true))
        .map(|it| it.content);
    let SpecialTokens { named, listed } = SpecialTokens::of(&config);
    for (id, mut token) in by_id {
        // Those that are only listed have the flags that they are declared with.
        token.special |= named.iter().any(|named| named.content == token.content);
        declared.ids.push((token.content.clone(), id));
        declared.tokens.push(token);
    }
    declared.tokens.extend(named.into_iter().chain(listed));
    let is_long = |token: &AddedToken| token.content.len() > MAX_TOKEN_BYTES;
    if declared.tokens.len() > MAX_TOKENS || declared.tokens.iter().any(is_long) {
        return Err(fail(
            CONFIG,
            format!(
                "declares {} tokens; at most {MAX_TOKENS} of up to {MAX_TOKEN_BYTES} bytes are possible",
                declared.tokens.len()
            ),
        ));
    }
    Ok(declared)
}

/// The special tokens of a config.
struct SpecialTokens {
    /// Tokens with names, in the order of transformers.
    named: Vec<AddedToken>,
    /// The others.
    listed: Vec<AddedToken>,
}

impl SpecialTokens {
    fn of(config: &Map<String, Value>) -> Self {
        let known = NAMED.iter().filter_map(|name| config.get(*name));
        let own = config
            .iter()
            .filter(|(name, _)| name.ends_with("_token") && !NAMED.contains(&name.as_str()));
        let own = own.map(|(_, token)| token);
        let is_given = |value: &&Value| match value {
            Value::Array(list) => !list.is_empty(),
            Value::Object(members) => !members.is_empty(),
            _ => false,
        };
        let mut others = [EXTRA, ADDITIONAL]
            .into_iter()
            .filter_map(|key| config.get(key));
        let (list, members) = match others.find(is_given) {
            Some(Value::Array(list)) => (Some(list), None),
            Some(Value::Object(members)) => (None, Some(members)),
            _ => (None, None),
        };
        let members = members.into_iter().flat_map(|members| members.values());
        let token = |token: &Value| token_of(token, true);
        Self {
            named: known.chain(own).chain(members).filter_map(token).collect(),
            listed: list.into_iter().flatten().filter_map(token).collect(),
        }
    }

    fn contains(&self, content: &str) -> bool {
        let mut all = self.named.iter().chain(&self.listed);
        all.any(|token| token.content == content)
    }
}

/// A token: its text, or an object with its flags. `is_special` is what one without flags is.
fn token_of(value: &Value, is_special: bool) -> Option<AddedToken> {
    if let Some(content) = value.as_str() {
        return (!content.is_empty()).then(|| AddedToken::from(content, is_special));
    }
    let content = value.get("content")?.as_str()?;
    let flag = |name: &str| value.get(name).and_then(Value::as_bool);
    let is_special = is_special || flag("special").unwrap_or(false);
    Some(
        AddedToken::from(content, is_special)
            .single_word(flag("single_word").unwrap_or(false))
            .lstrip(flag("lstrip").unwrap_or(false))
            .rstrip(flag("rstrip").unwrap_or(false))
            .normalized(flag("normalized").unwrap_or(!is_special)),
    )
}

/// Reads a JSON object; empty if there is no file.
fn read_object(path: &Path) -> Result<Map<String, Value>, String> {
    match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Map::new()),
        other => other.map_err(|error| format!("cannot be read: {error}"))?,
    };
    let text = read_text(path).map_err(|error| format!("cannot be read: {error}"))?;
    match parse_json(&text) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) => Err("is not a JSON object".to_owned()),
        Err(error) => Err(format!("is not JSON: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::{Tokenizer, toys};

    /// The byte-level tokenizer with these files beside it.
    fn load(test: &str, files: &[(&str, Value)]) -> Tokenizer {
        let id = std::process::id();
        let dir = std::env::temp_dir().join(format!("inflight-declared-{id}-{test}"));
        fs::create_dir_all(&dir).expect("a folder");
        let tokenizer = toys::byte_level_json().to_string();
        fs::write(dir.join("tokenizer.json"), tokenizer).expect("written");
        for (name, value) in files {
            fs::write(dir.join(name), value.to_string()).expect("written");
        }
        let loaded = Tokenizer::load(&dir);
        fs::remove_dir_all(&dir).expect("removed");
        loaded.expect("loaded")
    }

    fn contents(tokenizer: &Tokenizer, text: &str, adds_special: bool) -> Vec<String> {
        let ids = tokenizer.encode(text, adds_special).expect("tokens");
        let contents = ids.into_iter().filter_map(|id| tokenizer.content(id));
        contents.collect()
    }

    #[test]
    fn tokens_are_found_wherever_they_are_declared() {
        let both = json!(["<extra>", "<tool>"]);
        let token =
            |content: &str| json!({"content": content, "special": false, "normalized": false});
        for (index, (file, value)) in [
            (
                CONFIG,
                json!({DECODER: {"901": token("<tool>"), "900": token("<extra>")}}),
            ),
            (CONFIG, json!({ADDITIONAL: both})),
            (CONFIG, json!({EXTRA: both})),
            (
                CONFIG,
                json!({EXTRA: {"x_token": "<extra>", "y_token": "<tool>"}}),
            ),
            (
                CONFIG,
                json!({"image_token": "<extra>", "pad_token": token("<tool>")}),
            ),
            (
                SPECIAL_TOKENS,
                json!({ADDITIONAL: [token("<extra>"), "<tool>"]}),
            ),
            (ADDED_TOKENS, json!({"<extra>": 900, "<tool>": 901})),
        ]
        .into_iter()
        .enumerate()
        {
            let tokenizer = load(&format!("found-{index}"), &[(file, value)]);
            let found = contents(&tokenizer, "a<extra>b<tool>", false);
            assert_eq!(found, ["a", "<extra>", "b", "<tool>"], "{index}");
        }
    }

    /// The declared tokens of a folder with these files.
    fn declared(test: &str, files: &[(&str, Value)]) -> Result<DeclaredTokens, String> {
        let id = std::process::id();
        let dir = std::env::temp_dir().join(format!("inflight-declared-{id}-{test}"));
        fs::create_dir_all(&dir).expect("a folder");
        for (name, value) in files {
            fs::write(dir.join(name), value.to_string()).expect("written");
        }
        let declared = read(&dir).map_err(|error| error.to_string());
        fs::remove_dir_all(&dir).expect("removed");
        declared
    }

    fn special_contents(declared: &DeclaredTokens) -> Vec<&str> {
        let special = declared.tokens.iter().filter(|token| token.special);
        special.map(|token| &token.content[..]).collect()
    }

    #[test]
    fn tokens_are_special_where_they_have_a_name_or_say_so() {
        let token = |content: &str, special: bool| json!({"content": content, "special": special});
        let config = json!({
            DECODER: {"1": token("<extra>", true), "2": token("<tool>", false), "3": token("<pad>", false)},
            "pad_token": "<pad>", "mask_token": "", "image_token": "<image>", "add_bos_token": true,
            "chat_template": "no token", ADDITIONAL: ["<tool>"],
        });
        let with_ids = declared("special", &[(CONFIG, config)]).expect("tokens");
        let ids: Vec<_> = with_ids
            .ids
            .iter()
            .map(|(content, id)| (&content[..], *id))
            .collect();
        assert_eq!(ids, [("<extra>", 1), ("<tool>", 2), ("<pad>", 3)]);
        assert_eq!(
            with_ids.tokens[..3]
                .iter()
                .map(|it| it.special)
                .collect::<Vec<_>>(),
            [true, false, true]
        );
        let names = with_ids.tokens[3..].iter().map(|it| &it.content[..]);
        assert_eq!(names.collect::<Vec<_>>(), ["<pad>", "<image>", "<tool>"]);
        let files = [
            (SPECIAL_TOKENS, json!({ADDITIONAL: ["<extra>"]})),
            (ADDED_TOKENS, json!({"<extra>": 900, "<tool>": 901})),
        ];
        let by_name = declared("special-map", &files).expect("tokens");
        assert_eq!(special_contents(&by_name), ["<extra>", "<extra>"]);
    }

    #[test]
    fn an_empty_list_of_special_tokens_is_none() {
        for empty in [json!([]), json!({}), json!(null), json!("text")] {
            let config = json!({EXTRA: empty, ADDITIONAL: ["<extra>"]});
            let declared = declared("empty", &[(CONFIG, config)]).expect("tokens");
            assert_eq!(special_contents(&declared), ["<extra>"], "{empty}");
        }
    }

    #[test]
    fn a_token_is_found_in_normalised_text_unless_it_is_special() {
        for (token, is_special, expected) in [
            (json!({"content": "a"}), false, (false, true)),
            (json!({"content": "a"}), true, (true, false)),
            (
                json!({"content": "a", "special": true}),
                false,
                (true, false),
            ),
            (
                json!({"content": "a", "special": false}),
                true,
                (true, false),
            ),
            (
                json!({"content": "a", "normalized": false}),
                false,
                (false, false),
            ),
            (json!("a"), true, (true, false)),
            (json!("a"), false, (false, true)),
        ] {
            let found = token_of(&token, is_special).expect("a token");
            assert_eq!((found.special, found.normalized), expected, "{token}");
        }
        let flags = json!({"content": "a", "single_word": true, "lstrip": true, "rstrip": true});
        let found = token_of(&flags, false).expect("a token");
        assert!(found.single_word && found.lstrip && found.rstrip);
        for token in [
            json!(""),
            json!(5),
            json!({"special": true}),
            json!({"content": 5}),
        ] {
            assert_eq!(token_of(&token, true), None, "{token}");
        }
    }

    #[test]
    fn a_folder_declares_so_many_tokens() {
        let listed = |num: usize, num_bytes: usize| {
            let tokens = vec!["x".repeat(num_bytes); num];
            declared("many", &[(CONFIG, json!({ADDITIONAL: tokens}))]).map(|it| it.tokens.len())
        };
        assert_eq!(listed(65_536, 1), Ok(65_536));
        let problem = listed(65_537, 1).expect_err("refused");
        assert!(problem.contains("declares 65537 tokens"), "{problem}");
        assert_eq!(listed(1, 4096), Ok(1));
        let problem = listed(1, 4097).expect_err("refused");
        assert!(problem.contains("up to 4096 bytes"), "{problem}");
    }

    #[test]
    fn a_file_that_is_no_declaration_is_refused_by_name() {
        for (file, value, problem) in [
            (CONFIG, json!([]), "is not a JSON object"),
            (
                CONFIG,
                json!({DECODER: {"x": {"content": "a"}}}),
                "x is not an id",
            ),
            (
                CONFIG,
                json!({DECODER: {"1": {"special": true}}}),
                "1 is not an id",
            ),
            (ADDED_TOKENS, json!({"<tool>": -1}), "'<tool>' has no id"),
        ] {
            let found = declared("refused", &[(file, value)]).expect_err("refused");
            assert!(found.contains(file) && found.contains(problem), "{found}");
        }
        let path = std::env::temp_dir().join(format!("inflight-declared-{}", std::process::id()));
        fs::write(&path, "").expect("written");
        let found = read(&path).expect_err("no folder").to_string();
        fs::remove_file(&path).expect("removed");
        assert!(found.contains("cannot be read"), "{found}");
    }

    #[test]
    fn tokens_have_the_flags_that_they_are_declared_with() {
        let end = json!({"content": "<|end|>", "lstrip": true, "rstrip": true, "special": true});
        let tokenizer = load("flags", &[(CONFIG, json!({DECODER: {"3": end}}))]);
        assert_eq!(
            contents(&tokenizer, "a <|end|> b", false),
            ["a", "<|end|>", "b"]
        );
        let tokenizer = load("split", &[(CONFIG, json!({"split_special_tokens": true}))]);
        assert!(contents(&tokenizer, "<|end|>", false).len() > 1);
    }

    #[test]
    fn the_end_token_is_known_and_added_where_texts_are_to_have_it() {
        let end = toys::id(&toys::byte_level(), "<|end|>");
        let tokenizer = load("end", &[(CONFIG, json!({END: "<|end|>"}))]);
        assert_eq!(tokenizer.end_id(), Some(end));
        assert_eq!(contents(&tokenizer, "the", true), ["the"]);
        let tokenizer = load(
            "end-map",
            &[(SPECIAL_TOKENS, json!({END: {"content": "<|end|>"}}))],
        );
        assert_eq!(tokenizer.end_id(), Some(end));
        let config = json!({END: "<|end|>", "add_eos_token": true});
        let tokenizer = load("end-added", &[(CONFIG, config)]);
        assert_eq!(contents(&tokenizer, "the", true), ["the", "<|end|>"]);
        assert_eq!(contents(&tokenizer, "the", false), ["the"]);
    }
}
