//! How byte-level tokenizers split a text into words, by the names that GGUF files have for it.
//!
//! The expressions come from the models' own tokenizer.json; the names are llama.cpp's (`llama-vocab.cpp`).

use serde_json::{Value, json};

/// A way to split a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Style {
    Gpt2,
    /// As GPT-2, with every digit by itself.
    Digits,
    Falcon,
    Llama3,
    Qwen2,
    Qwen35,
    Tekken,
    Gpt4o,
    Bloom,
    DeepSeekV3,
    ExaoneMoe,
}

use Style::{
    Bloom, DeepSeekV3, Digits, ExaoneMoe, Falcon, Gpt2, Gpt4o, Llama3, Qwen2, Qwen35, Tekken,
};

/// The names, and their styles. The same style may go with other settings: see [`WordSplit`].
const NAMES: [(&str, Style); 46] = [
    ("gpt-2", Gpt2),
    ("phi-2", Gpt2),
    ("mpt", Gpt2),
    ("olmo", Gpt2),
    ("jais", Gpt2),
    ("exaone4", Gpt2),
    ("trillion", Gpt2),
    ("mellum", Gpt2),
    ("gigachat", Gpt2),
    ("a.x-4.0", Gpt2),
    ("granite-docling", Gpt2),
    ("starcoder", Digits),
    ("refact", Digits),
    ("command-r", Digits),
    ("smollm", Digits),
    ("codeshell", Digits),
    ("exaone", Digits),
    ("minerva-7b", Digits),
    ("falcon", Falcon),
    ("llama3", Llama3),
    ("llama-v3", Llama3),
    ("llama-bpe", Llama3),
    ("falcon3", Llama3),
    ("falcon-h1", Llama3),
    ("pixtral", Llama3),
    ("midm-2.0", Llama3),
    ("lfm2", Llama3),
    ("dbrx", Llama3),
    ("smaug-bpe", Llama3),
    ("glm4", Llama3),
    ("chatglm-bpe", Llama3),
    ("qwen2", Qwen2),
    ("deepseek-r1-qwen", Qwen2),
    ("stablelm2", Qwen2),
    ("hunyuan", Qwen2),
    ("megrez", Qwen2),
    ("solar-open", Qwen2),
    ("qwen35", Qwen35),
    ("tekken", Tekken),
    ("gpt-4o", Gpt4o),
    ("llama4", Gpt4o),
    ("minimax-m2", Gpt4o),
    ("bloom", Bloom),
    ("deepseek-v3", DeepSeekV3),
    ("hunyuan-dense", DeepSeekV3),
    ("exaone-moe", ExaoneMoe),
];

/// Names of [`Llama3`] whose tokenizers have merges for every word of the vocabulary, and no start token of their own.
const PLAIN_LLAMA3: [&str; 4] = ["dbrx", "smaug-bpe", "glm4", "chatglm-bpe"];

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT_4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const BLOOM: &str = r" ?[^(\s|.,!?…。，、।۔،)]+";
const DEEPSEEK_V3: [&str; 3] = [
    r"\p{N}{1,3}",
    r"[一-龥\u3040-ゟ゠-ヿ]+",
    r#"[!"\#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"#,
];
const EXAONE_MOE: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+";

/// How the tokenizer of a GGUF file splits words, and what goes with it.
#[derive(Clone, Copy, Debug)]
pub struct WordSplit<'a> {
    name: &'a str,
    style: Style,
}

impl<'a> WordSplit<'a> {
    /// By the value of `tokenizer.ggml.pre`.
    ///
    /// # Errors
    /// It is missing or unknown.
    pub fn of(name: Option<&'a str>) -> Result<Self, String> {
        let remedy = "put the model's tokenizer.json beside the file";
        let Some(name) = name else {
            return Err(format!(
                "has no tokenizer.ggml.pre, as files of before May 2024; {remedy}"
            ));
        };
        match NAMES.iter().find(|(known, _)| *known == name) {
            Some(&(_, style)) => Ok(Self { name, style }),
            None => Err(format!(
                "tokenizer.ggml.pre: '{name}' is not supported; {remedy}"
            )),
        }
    }

    /// The pre-tokenizers of tokenizer.json.
    pub fn pre_tokenizers(self) -> Vec<Value> {
        let bytes = |has_words| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": has_words});
        let split = |expression: &str| json!({"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": false});
        match self.style {
            Gpt2 => vec![bytes(true)],
            Digits => vec![
                json!({"type": "Digits", "individual_digits": true}),
                bytes(true),
            ],
            Falcon => vec![
                json!({"type": "Punctuation", "behavior": "Contiguous"}),
                bytes(true),
                json!({"type": "Digits", "individual_digits": false}),
                split("[0-9][0-9][0-9]"),
            ],
            Llama3 => vec![split(LLAMA3), bytes(false)],
            Qwen2 => vec![split(QWEN2), bytes(false)],
            Qwen35 => vec![split(QWEN35), bytes(false)],
            Tekken => vec![split(TEKKEN), bytes(false)],
            Gpt4o => vec![split(GPT_4O), bytes(false)],
            Bloom => vec![split(BLOOM), bytes(false)],
            ExaoneMoe => vec![split(EXAONE_MOE), bytes(false)],
            DeepSeekV3 => DEEPSEEK_V3
                .into_iter()
                .map(split)
                .chain([bytes(false)])
                .collect(),
        }
    }

    /// The normalizer of tokenizer.json: Qwen's composes characters.
    pub fn normalizer(self) -> Value {
        match self.name {
            "qwen2" | "qwen35" => json!({"type": "NFC"}),
            _ => Value::Null,
        }
    }

    /// Whether a word that is a token need not be merged together from others.
    pub fn ignores_merges(self) -> bool {
        match self.style {
            Llama3 => !PLAIN_LLAMA3.contains(&self.name),
            Tekken => true,
            _ => false,
        }
    }

    /// Whether texts begin with a start token unless the file says something else.
    pub fn adds_start(self) -> bool {
        self.ignores_merges()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenizers::{
        OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, PreTokenizerWrapper,
    };

    fn split(name: &str) -> WordSplit<'_> {
        WordSplit::of(Some(name)).expect("a known name")
    }

    #[test]
    fn a_name_decides_how_digits_and_words_are_split() {
        for (name, expected) in [
            ("gpt-2", "it|'s| 12345| (|a|)"),
            ("starcoder", "it|'s| |1|2|3|4|5| (|a|)"),
            ("falcon", "it|'|s| |123|45| |(|a|)"),
            ("llama-bpe", "it|'s| |123|45| (|a|)"),
            ("qwen2", "it|'s| |1|2|3|4|5| (|a|)"),
            ("qwen35", "it|'s| |1|2|3|4|5| (|a|)"),
            ("tekken", "it|'s| |1|2|3|4|5| (|a|)"),
            ("gpt-4o", "it's| |123|45| (|a|)"),
            ("bloom", "it's| 12345| (|a|)"),
            ("deepseek-v3", "it|'s| |123|45| (|a|)"),
            ("exaone-moe", "it|'s| |1|2|3|4|5| (|a|)"),
        ] {
            let pre_tokenizer =
                json!({"type": "Sequence", "pretokenizers": split(name).pre_tokenizers()});
            let pre_tokenizer: PreTokenizerWrapper =
                serde_json::from_value(pre_tokenizer).expect("a pre-tokenizer");
            let text = "it's 12345 (a)";
            let mut words = PreTokenizedString::from(text);
            pre_tokenizer.pre_tokenize(&mut words).expect("words");
            let words = words.get_splits(OffsetReferential::Original, OffsetType::Byte);
            let words: Vec<_> = words
                .iter()
                .map(|(_, (start, end), _)| &text[*start..*end])
                .collect();
            assert_eq!(words.join("|"), expected, "{name}");
        }
    }

    #[test]
    fn every_name_has_pre_tokenizers() {
        for (name, _) in NAMES {
            for part in split(name).pre_tokenizers() {
                let parsed = serde_json::from_value::<PreTokenizerWrapper>(part);
                assert!(parsed.is_ok(), "{name}");
            }
        }
    }

    #[test]
    fn some_names_compose_characters_or_keep_whole_words() {
        for (name, is_composed, ignores_merges) in [
            ("gpt-2", false, false),
            ("qwen2", true, false),
            ("qwen35", true, false),
            ("deepseek-r1-qwen", false, false),
            ("llama-bpe", false, true),
            ("dbrx", false, false),
            ("glm4", false, false),
            ("tekken", false, true),
            ("gpt-4o", false, false),
        ] {
            let split = split(name);
            assert_eq!(
                split.normalizer() == json!({"type": "NFC"}),
                is_composed,
                "{name}"
            );
            assert_eq!(split.normalizer().is_null(), !is_composed, "{name}");
            assert_eq!(split.ignores_merges(), ignores_merges, "{name}");
            assert_eq!(split.adds_start(), ignores_merges, "{name}");
        }
    }

    #[test]
    fn other_names_are_refused() {
        for (name, problem) in [
            (None, "before May 2024"),
            (Some("gpt"), "'gpt' is not supported"),
        ] {
            let error = WordSplit::of(name).expect_err("refused");
            assert!(error.contains(problem), "{error}");
        }
    }
}
