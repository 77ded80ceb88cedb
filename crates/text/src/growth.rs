//! Tokenizers whose parts multiply what they are given are refused at load: a pre-tokenizer that makes long words of
//! short ones, a decoder that makes long texts of tokens, a post-processor that repeats the text.
//!
//! A sequence multiplies what each part makes of the part before, so a file of a few kilobytes could ask for more than
//! all memory. What the normalizer makes depends on the text: see `bounded_normalizer`.

use serde::Serialize;
use serde_json::Value;
use tokenizers::{PostProcessor, Tokenizer};

/// The most bytes that one byte may become. Known tokenizers make up to 4.
const MAX_GROWTH: usize = 64;

/// How often a post-processor may write a text.
const MAX_REPETITIONS: usize = 8;

/// Special tokens that a post-processor may add.
const MAX_SPECIAL_TOKENS: usize = 1 << 16;

/// Refuses a tokenizer of which a part multiplies what it is given.
///
/// # Errors
/// The part, and what it makes.
pub(super) fn check(tokenizer: &Tokenizer) -> Result<(), String> {
    let pre_tokenizer = of_pre_tokenizer(&json(tokenizer.get_pre_tokenizer()));
    let decoder = of_decoder(&json(tokenizer.get_decoder()));
    for (name, growth) in [("pre_tokenizer", pre_tokenizer), ("decoder", decoder)] {
        if growth > MAX_GROWTH {
            return Err(format!(
                "{name}: its parts can make {growth} bytes of one, at most {MAX_GROWTH} are served; leave out those \
                 that make texts longer"
            ));
        }
    }
    let Some(processor) = tokenizer.get_post_processor() else {
        return Ok(());
    };
    let num_times = repetitions(&json(Some(processor)));
    if num_times > MAX_REPETITIONS {
        return Err(format!(
            "post_processor: its templates write a text {num_times} times, at most {MAX_REPETITIONS} are served; \
             leave out those that repeat it"
        ));
    }
    let num_special = processor
        .added_tokens(false)
        .max(processor.added_tokens(true));
    if num_special > MAX_SPECIAL_TOKENS {
        return Err(format!(
            "post_processor: adds {num_special} special tokens to a text, at most {MAX_SPECIAL_TOKENS} are served; \
             give it fewer"
        ));
    }
    Ok(())
}

fn json(part: Option<&impl Serialize>) -> Value {
    serde_json::to_value(part).unwrap_or(Value::Null)
}

/// The parts of a sequence, or the part itself.
fn parts<'a>(part: &'a Value, name: &str) -> &'a [Value] {
    match part[name].as_array() {
        Some(parts) => parts,
        None => std::slice::from_ref(part),
    }
}

fn product(parts: &[Value], growth: fn(&Value) -> usize) -> usize {
    parts.iter().map(growth).fold(1, usize::saturating_mul)
}

fn of_pre_tokenizer(part: &Value) -> usize {
    match part["type"].as_str() {
        Some("Sequence") => product(parts(part, "pretokenizers"), of_pre_tokenizer),
        // A byte becomes a character of two, and a space may come before a word.
        Some("ByteLevel") => 3,
        // A space becomes a character, which may also come before a word.
        Some("Metaspace") => 4,
        _ => 1,
    }
}

fn of_decoder(part: &Value) -> usize {
    let is_empty = |name: &str| part[name].as_str() == Some("");
    match part["type"].as_str() {
        Some("Sequence") => product(parts(part, "decoders"), of_decoder),
        Some("Replace") => {
            let content = part["content"].as_str().map_or(0, str::len);
            match part["pattern"]["String"].as_str().map_or(0, str::len) {
                // The pattern can match before and behind every character.
                0 => content.saturating_mul(2).saturating_add(1),
                pattern => content.div_ceil(pattern).max(1),
            }
        }
        // A space before and behind every character.
        Some("BPEDecoder") if is_empty("suffix") => 3,
        Some("CTC") if is_empty("word_delimiter_token") => 3,
        // A space before a token.
        Some("WordPiece") => 2,
        // A byte that is no character becomes one of three.
        Some("ByteLevel") => 3,
        _ => 1,
    }
}

/// How often a text is written.
fn repetitions(processor: &Value) -> usize {
    match processor["type"].as_str() {
        Some("Sequence") => product(parts(processor, "processors"), repetitions),
        Some("TemplateProcessing") => {
            let times = |template: &str, text: &str| {
                let pieces = processor[template].as_array().into_iter().flatten();
                let texts = pieces.filter(|piece| piece["Sequence"]["id"] == text);
                texts.count()
            };
            let of_each = [
                ("single", "A"),
                ("single", "B"),
                ("pair", "A"),
                ("pair", "B"),
            ];
            let times = of_each.map(|(template, text)| times(template, text));
            times.into_iter().max().unwrap_or(1).max(1)
        }
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::toys;

    fn refusal(json: &Value) -> Option<String> {
        check(&json.to_string().parse().expect("well formed")).err()
    }

    #[test]
    fn known_tokenizers_are_served() {
        for json in [toys::byte_level_json(), toys::metaspace_json()] {
            assert_eq!(refusal(&json), None);
        }
    }

    #[test]
    fn parts_make_a_few_bytes_of_one() {
        let sequence = |name: &str, parts: &[Value]| json!({"type": "Sequence", name: parts});
        let byte_level = json!({"type": "ByteLevel"});
        let metaspace = json!({"type": "Metaspace"});
        let inner = sequence(
            "pretokenizers",
            &[metaspace.clone(), json!({"type": "Digits"})],
        );
        for (part, expected) in [
            (sequence("pretokenizers", &[byte_level.clone(), inner]), 12),
            (byte_level.clone(), 3),
            (metaspace, 4),
            (json!({"type": "Digits"}), 1),
            (Value::Null, 1),
        ] {
            assert_eq!(of_pre_tokenizer(&part), expected, "{part}");
        }
        let replace = |pattern: Value, content: &str| json!({"type": "Replace", "pattern": pattern, "content": content});
        let word_piece = json!({"type": "WordPiece"});
        for (part, expected) in [
            (
                sequence("decoders", &[byte_level.clone(), word_piece.clone()]),
                6,
            ),
            (byte_level, 3),
            (word_piece, 2),
            (replace(json!({"String": "▁"}), " "), 1),
            (replace(json!({"String": "ab"}), "abcde"), 3),
            (replace(json!({"String": ""}), "ab"), 5),
            (replace(json!({"Regex": "a*"}), "ab"), 5),
            (json!({"type": "BPEDecoder", "suffix": ""}), 3),
            (json!({"type": "BPEDecoder", "suffix": "</w>"}), 1),
            (json!({"type": "CTC", "word_delimiter_token": ""}), 3),
            (json!({"type": "CTC", "word_delimiter_token": "|"}), 1),
            (json!({"type": "Fuse"}), 1),
        ] {
            assert_eq!(of_decoder(&part), expected, "{part}");
        }
    }

    #[test]
    fn a_template_writes_a_text_as_often_as_it_names_it() {
        let text = |id: &str| json!({"Sequence": {"id": id, "type_id": 0}});
        let start = json!({"SpecialToken": {"id": "<s>", "type_id": 0}});
        let template = |single: &[Value], pair: &[Value]| json!({"type": "TemplateProcessing", "single": single, "pair": pair});
        let (a, b) = (text("A"), text("B"));
        let once = template(&[start.clone(), start, a.clone()], &[a.clone(), b.clone()]);
        let thrice = template(
            std::slice::from_ref(&a),
            &[a.clone(), b.clone(), b.clone(), b],
        );
        let both = json!({"type": "Sequence", "processors": [thrice, once, {"type": "ByteLevel"}, thrice]});
        for (processor, expected) in [(once, 1), (thrice, 3), (both, 9), (Value::Null, 1)] {
            assert_eq!(repetitions(&processor), expected, "{processor}");
        }
    }

    #[test]
    fn parts_up_to_the_limits_are_served() {
        let word_piece = json!({"type": "WordPiece", "prefix": "##", "cleanup": true});
        let metaspace = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": true});
        let mut json = toys::metaspace_json();
        json["pre_tokenizer"] =
            json!({"type": "Sequence", "pretokenizers": vec![metaspace.clone(); 3]});
        json["decoder"] = json!({"type": "Sequence", "decoders": vec![word_piece.clone(); 6]});
        let start = json!({"SpecialToken": {"id": "<s>", "type_id": 0}});
        json["post_processor"]["single"] = vec![start; 256].into();
        json["post_processor"]["special_tokens"]["<s>"] =
            json!({"id": "<s>", "ids": vec![1; 256], "tokens": vec!["<s>"; 256]});
        assert_eq!(refusal(&json), None);
        json["decoder"] = json!({"type": "Sequence", "decoders": vec![word_piece; 7]});
        let problem = refusal(&json).expect("refused");
        assert!(problem.contains("make 128 bytes of one"), "{problem}");
        json["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": vec![metaspace; 4]});
        let problem = refusal(&json).expect("refused");
        assert!(problem.contains("make 256 bytes of one"), "{problem}");
    }

    #[test]
    fn parts_that_multiply_are_refused() {
        let byte_level = || json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
        let mut chained = toys::byte_level_json();
        chained["pre_tokenizer"] =
            json!({"type": "Sequence", "pretokenizers": vec![byte_level(); 40]});
        let problem = refusal(&chained).expect("refused");
        assert!(problem.starts_with("pre_tokenizer: "), "{problem}");

        let replace = |pattern: Value| json!({"type": "Replace", "pattern": pattern, "content": "a".repeat(40)});
        for pattern in [
            json!({"String": "a"}),
            json!({"String": ""}),
            json!({"Regex": "a*"}),
        ] {
            let mut decoder = toys::metaspace_json();
            decoder["decoder"] =
                json!({"type": "Sequence", "decoders": vec![replace(pattern); 20]});
            let problem = refusal(&decoder).expect("refused");
            assert!(problem.starts_with("decoder: "), "{problem}");
        }

        let mut repeated = toys::metaspace_json();
        let mut twice = repeated["post_processor"].clone();
        let text = json!({"Sequence": {"id": "A", "type_id": 0}});
        twice["single"] = json!([text, text]);
        repeated["post_processor"] =
            json!({"type": "Sequence", "processors": vec![twice.clone(); 3]});
        assert_eq!(refusal(&repeated), None);
        repeated["post_processor"] = json!({"type": "Sequence", "processors": vec![twice; 40]});
        let problem = refusal(&repeated).expect("refused");
        assert!(
            problem.contains("write a text 1099511627776 times"),
            "{problem}"
        );

        let mut special = toys::metaspace_json();
        let start = json!({"SpecialToken": {"id": "<s>", "type_id": 0}});
        special["post_processor"]["single"] = vec![start; 1000].into();
        special["post_processor"]["special_tokens"]["<s>"] =
            json!({"id": "<s>", "ids": vec![1; 1000], "tokens": vec!["<s>"; 1000]});
        let problem = refusal(&special).expect("refused");
        assert!(problem.contains("adds 1000000 special tokens"), "{problem}");
    }
}
