//! Toy tokenizers of a few hundred tokens for tests: byte-level, SentencePiece and WordPiece.

use serde_json::{Value, json};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

use inflight_base::TokenId;
use inflight_text::Tokenizer;

/// The token with this content.
pub fn id(tokenizer: &Tokenizer, content: &str) -> TokenId {
    tokenizer.id_of(content).expect("in the vocabulary")
}

/// Like GPT-2, Llama 3 and Qwen: every token is bytes.
pub fn byte_level() -> Tokenizer {
    Tokenizer::parse(byte_level_json().to_string().as_bytes()).expect("well formed")
}

/// Like Llama 2: a space is `▁`, a leading space is lost, unknown characters are byte tokens.
pub fn metaspace() -> Tokenizer {
    Tokenizer::parse(metaspace_json().to_string().as_bytes()).expect("well formed")
}

/// Like BERT: words are joined with spaces, `##` continues a word.
pub fn word_piece() -> Tokenizer {
    Tokenizer::parse(word_piece_json().to_string().as_bytes()).expect("well formed")
}

/// The `tokenizer.json` of [`word_piece`].
pub fn word_piece_json() -> Value {
    let words = [
        "[UNK]", "the", "##y", "##s", "they", ",", ".", "don", "'", "t",
    ];
    json!({
        "version": "1.0",
        "added_tokens": [added(0, "[UNK]", true)],
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                  "max_input_chars_per_word": 100, "vocab": vocabulary(words)},
    })
}

/// The `tokenizer.json` of [`byte_level`].
pub fn byte_level_json() -> Value {
    let mut alphabet: Vec<String> = ByteLevel::alphabet().iter().map(char::to_string).collect();
    alphabet.sort();
    // "ðŁĺ" + "Ģ" is 😀 in two parts, "Ìģ" is a combining accent, "Ġ" is a space.
    let longer = [
        "th", "the", "Ġthe", "ĠĠ", "ðŁ", "ðŁĺ", "ĺĢ", "Ìģ", "eÌ", "Ġï", "¿½", "ï¿½", "Ģa",
    ];
    let merges = [["t", "h"], ["th", "e"], ["Ġ", "the"]];
    let contents = alphabet
        .iter()
        .map(String::as_str)
        .chain(longer)
        .collect::<Vec<_>>();
    let num_plain = contents.len();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                            "use_regex": true});
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "added_tokens": [
            added(num_plain, "<|end|>", true),
            added(num_plain + 1, "<tool call>", false),
            added(num_plain + 2, "日本", false),
        ],
        "pre_tokenizer": byte_level, "post_processor": byte_level, "decoder": byte_level,
        "model": bpe(vocabulary(contents), json!(merges), false),
    })
}

/// The `tokenizer.json` of [`metaspace`].
pub fn metaspace_json() -> Value {
    let special = ["<unk>", "<s>", "</s>"];
    let bytes: Vec<String> = (0..=255u8).map(|byte| format!("<0x{byte:02X}>")).collect();
    let pieces = [
        "▁", "t", "h", "e", "th", "the", "▁the", "▁▁", "a", "▁a", "é", "\u{301}", "😀", ".",
    ];
    let merges = [["t", "h"], ["th", "e"], ["▁", "the"], ["▁", "a"]];
    let contents = special
        .into_iter()
        .chain(bytes.iter().map(String::as_str))
        .chain(pieces);
    let added: Vec<Value> = special
        .iter()
        .enumerate()
        .map(|(id, content)| added(id, content, true))
        .collect();
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ]},
        "pre_tokenizer": null,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                       {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}},
                     {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]},
        "model": bpe(vocabulary(contents), json!(merges), true),
    })
}

fn bpe(vocab: Value, merges: Value, byte_fallback: bool) -> Value {
    json!({
        "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
        "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": byte_fallback,
        "ignore_merges": false, "vocab": vocab, "merges": merges,
    })
}

fn vocabulary<'a>(contents: impl IntoIterator<Item = &'a str>) -> Value {
    let ids = contents.into_iter().enumerate();
    ids.map(|(id, content)| (content.to_owned(), Value::from(id)))
        .collect()
}

fn added(id: usize, content: &str, special: bool) -> Value {
    json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
           "normalized": false, "special": special})
}
