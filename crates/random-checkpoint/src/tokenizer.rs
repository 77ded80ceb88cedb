//! Tokenizers of any number of tokens.

use serde_json::{Map, Value, json};

use crate::Result;

pub const BEGIN_ID: usize = 0;
pub const END_ID: usize = 1;
/// The first tokens of every vocabulary, in order of id.
const SPECIAL_TOKENS: [&str; 2] = ["<s>", "</s>"];

pub fn generation_config() -> Value {
    json!({"bos_token_id": BEGIN_ID, "eos_token_id": END_ID, "do_sample": false})
}

pub fn tokenizer_config() -> Value {
    json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BEGIN_ID],
        "eos_token": SPECIAL_TOKENS[END_ID],
        "clean_up_tokenization_spaces": false,
    })
}

/// A byte-level BPE with exactly `vocab` tokens that encodes any text without loss: the special tokens, the
/// 256 bytes, all pairs of lower-case letters, then pairs of these pairs until the vocabulary is full.
pub fn tokenizer(vocab: usize) -> Result<Value> {
    let bytes: Vec<char> = (0..=u8::MAX).map(byte_char).collect();
    let letters: Vec<char> = ('a'..='z').collect();
    let space = byte_char(b' ');
    // Words may start with a space; no token ends with one.
    let firsts = [&[space], letters.as_slice()].concat();
    let pairs: Vec<[String; 2]> = firsts
        .iter()
        .flat_map(|a| letters.iter().map(|b| [a.to_string(), b.to_string()]))
        .collect();
    let quads = pairs.iter().flat_map(|a| {
        let inner = pairs.iter().skip(letters.len());
        inner.map(|b| [a.concat(), b.concat()])
    });
    let num_single = SPECIAL_TOKENS.len() + bytes.len();
    let Some(num_merges) = vocab.checked_sub(num_single) else {
        return Err(format!(
            "a vocabulary of {vocab} tokens is smaller than the minimum of {num_single}"
        )
        .into());
    };
    let merges: Vec<[String; 2]> = pairs
        .iter()
        .cloned()
        .chain(quads)
        .take(num_merges)
        .collect();
    if merges.len() < num_merges {
        let most = num_single + merges.len();
        return Err(
            format!("a vocabulary of {vocab} tokens is larger than the maximum of {most}").into(),
        );
    }
    let tokens = SPECIAL_TOKENS
        .iter()
        .map(|token| token.to_string())
        .chain(bytes.iter().map(char::to_string))
        .chain(merges.iter().map(|merge| merge.concat()));
    let vocab: Map<String, Value> = tokens.zip((0..).map(Value::from)).collect();
    let added_tokens: Vec<Value> = SPECIAL_TOKENS
        .iter()
        .enumerate()
        .map(|(id, content)| {
            json!({
                "id": id, "content": content, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": true,
            })
        })
        .collect();
    let byte_level = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true,
    });
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added_tokens,
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": false, "vocab": vocab, "merges": merges,
        },
    }))
}

/// The character for a byte in a byte-level vocabulary (GPT-2): the byte's own character if it is printable,
/// otherwise the next one from U+0100.
fn byte_char(byte: u8) -> char {
    let is_printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if is_printable(byte) {
        return char::from(byte);
    }
    let num_before = (0..byte).filter(|&before| !is_printable(before)).count();
    char::from_u32(0x100 + num_before as u32).expect("a character")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vocabularies_have_the_right_size_and_every_merge_is_a_token() {
        for num_tokens in [512, 32_000, 128_256] {
            let tokenizer = tokenizer(num_tokens).expect("a tokenizer");
            let vocab = tokenizer["model"]["vocab"].as_object().expect("a map");
            assert_eq!(vocab.len(), num_tokens, "no token is there twice");
            for merge in tokenizer["model"]["merges"].as_array().expect("a list") {
                let [a, b] = [0, 1].map(|i| merge[i].as_str().expect("text"));
                assert!(vocab.contains_key(a) && vocab.contains_key(b));
                assert!(vocab.contains_key(&format!("{a}{b}")));
            }
        }
        assert!(tokenizer(100).is_err());
        assert!(tokenizer(1 << 20).is_err());
    }
}
