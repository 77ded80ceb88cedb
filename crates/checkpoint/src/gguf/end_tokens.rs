//! The tokens that end a text in a GGUF file.
//!
//! Files name one to three of them, and chat models have more, such as the end of a turn. llama.cpp finds those by what
//! they are called, whatever type the file gives them (`special_eog_ids` of llama-vocab.cpp).

use super::folder::GgufFolder;
use super::metadata::MetadataValue;
use inflight_base::{LoadError, TokenId};

/// The keys of end tokens.
const KEYS: [&str; 3] = ["eos_token_id", "eot_token_id", "eom_token_id"];

/// What end tokens are called.
const NAMES: [&str; 22] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<\u{ff5c}end\u{2581}of\u{2581}sentence\u{ff5c}>",
    "[e~[",
];

/// Tokens that pad, name a repository, or separate files where a model fills in code: each by its key, and else by what
/// it is called. They end a text, too.
const OF_CODE: [(&str, &[&str]); 3] = [
    (
        "fim_pad_token_id",
        &["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"],
    ),
    (
        "fim_rep_token_id",
        &[
            "<|fim_repo|>",
            "<|repo_name|>",
            "<fim-repo>",
            "<REPO>",
            "<reponame>",
        ],
    ),
    ("fim_sep_token_id", &["<|file_sep|>"]),
];

/// `<|end|>` ends a part of an answer, and not the answer, in vocabularies with all tokens of one of these lists.
const END_OF_PART: &str = "<|end|>";
const WITH_PARTS: [&[&str]; 3] = [
    &["<|return|>", "<|call|>"],
    &["<|call|>", "<|flush|>"],
    &["<|calls|>", "<|flush|>"],
];

impl GgufFolder {
    /// The tokens that end a text, each once: first the ones that the metadata name, then the ones that `tokens` call
    /// so.
    ///
    /// # Errors
    /// The vocabulary cannot be read.
    pub fn end_tokens(&self) -> Result<Vec<TokenId>, LoadError> {
        let tokens = self.texts("tokenizer.ggml.tokens")?.unwrap_or_default();
        let named = |key: &str| match self.metadata(&format!("tokenizer.ggml.{key}")) {
            Some(&MetadataValue::Unsigned(id)) => TokenId::try_from(id).ok(),
            _ => None,
        };
        let mut ends: Vec<_> = KEYS.iter().filter_map(|key| named(key)).collect();
        let called = ends_called_so(&tokens, |key| named(key).is_some());
        ends.extend(called);
        ends.extend(OF_CODE.iter().filter_map(|(key, _)| named(key)));
        let mut seen = Vec::new();
        ends.retain(|id| {
            let is_new = !seen.contains(id);
            seen.push(*id);
            is_new
        });
        Ok(ends)
    }
}

/// The tokens that end a text by what they are called, in order of their ids. `has_key` says whether the metadata name
/// a token.
fn ends_called_so(tokens: &[String], has_key: impl Fn(&str) -> bool) -> Vec<TokenId> {
    let has = |name: &&str| tokens.iter().any(|token| token == name);
    let has_parts = WITH_PARTS.iter().any(|all| all.iter().all(has));
    let mut names: Vec<&str> = NAMES.to_vec();
    names.retain(|name| !(has_parts && *name == END_OF_PART));
    let of_code = OF_CODE.iter().filter(|(key, _)| !has_key(key));
    names.extend(of_code.flat_map(|(_, names)| names.iter()));
    let ids = tokens.iter().zip(0..);
    let ends = ids.filter(|(token, _)| names.contains(&token.as_str()));
    ends.map(|(_, id)| id).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends(tokens: &[&str], keys: &[&str]) -> Vec<TokenId> {
        let tokens: Vec<_> = tokens.iter().map(|&token| token.to_owned()).collect();
        ends_called_so(&tokens, |key| keys.contains(&key))
    }

    #[test]
    fn tokens_end_a_text_by_what_they_are_called() {
        for name in NAMES {
            assert_eq!(ends(&["a", name, "<|im_start|>"], &[]), [1], "{name}");
        }
        assert_eq!(ends(&["<|end", "end", "<eos >", "<|END|>"], &[]), [0; 0]);
        assert_eq!(ends(&["</s>", "b", "<|im_end|>"], &[]), [0, 2]);
    }

    #[test]
    fn the_end_of_a_part_is_none_where_there_are_parts() {
        let harmony = ["<|return|>", "<|end|>", "<|call|>"];
        assert_eq!(ends(&harmony, &[]), [0, 2]);
        assert_eq!(ends(&harmony[..2], &[]), [0, 1]);
        assert_eq!(ends(&["<|flush|>", "<|end|>", "<|calls|>"], &[]), [0, 2]);
    }

    #[test]
    fn tokens_of_code_are_found_unless_the_metadata_name_another() {
        let tokens = ["<|fim_pad|>", "<|file_sep|>", "<|repo_name|>"];
        assert_eq!(ends(&tokens, &[]), [0, 1, 2]);
        assert_eq!(ends(&tokens, &["fim_sep_token_id"]), [0, 2]);
    }
}
