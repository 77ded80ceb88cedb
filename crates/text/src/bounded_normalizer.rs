//! A tokenizer's normalizer that cannot multiply a text: what it makes, and what it makes on the way, is a few times as
//! long as the text at most.
//!
//! ```text
//! "normalizer": Sequence [ Replace a -> aaaaaaaa, Replace a -> aaaaaaaa, ... ]     8, 64, 512 ... times the text
//! ```
//!
//! The steps of a sequence run one after the other. Before each, the size of its result is bounded; after each, it is
//! known.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use parking_lot::Mutex;
use serde_json::Value;
use tokenizers::{NormalizedString, Normalizer, NormalizerWrapper};

/// A normalised text has at most this many times the bytes of the text, and [`FREE_BYTES`]. White space that becomes
/// visible (3 bytes), or bytes that become characters (2), are the most that known tokenizers do.
const MAX_GROWTH: usize = 8;

/// Growth limit for the worst case of a step whose output size is estimated, not counted.
const MAX_GROWTH_OF_STEP: usize = 64;

/// Bytes that any text may grow by, however short it is.
const FREE_BYTES: usize = 64 << 10;

/// The steps of a tokenizer's normalizer.
#[derive(Default)]
pub(super) struct NormalizerSteps(Vec<Step>);

struct Step {
    normalizer: NormalizerWrapper,
    /// Its type in tokenizer.json.
    name: String,
    growth: Growth,
}

/// How long the result of a step can be.
enum Growth {
    /// At most this many bytes for each byte.
    Factor(usize),
    /// These bytes more.
    Added(usize),
    /// `content` bytes for each `pattern`.
    Literal { pattern: String, content: usize },
    /// Looked up in a table, by the character and a few bytes behind it.
    Table,
}

/// The normalizer for one text.
pub(super) struct BoundedNormalizer<'a> {
    steps: &'a [Step],
    num_text_bytes: usize,
    /// Bytes of the parts of the text that are normalised.
    num_bytes: AtomicUsize,
    refusal: Mutex<Option<String>>,
}

impl NormalizerSteps {
    /// The steps of a normalizer; of none, if there is none.
    pub fn new(normalizer: Option<&NormalizerWrapper>) -> Self {
        let mut steps = Vec::new();
        if let Some(normalizer) = normalizer {
            add_steps(normalizer, &mut steps);
        }
        Self(steps)
    }

    /// The normalizer for a text of `num_text_bytes`.
    pub fn for_text(&self, num_text_bytes: usize) -> BoundedNormalizer<'_> {
        BoundedNormalizer {
            steps: &self.0,
            num_text_bytes,
            num_bytes: AtomicUsize::new(0),
            refusal: Mutex::default(),
        }
    }

    /// Refuses a normalizer that multiplies a text of the tokenizer's own, such as the content of an added token.
    ///
    /// # Errors
    /// See [`BoundedNormalizer::refusal`].
    pub fn check(&self, text: &str) -> Result<(), String> {
        let normalizer = self.for_text(text.len());
        // An error of a step is the library's to report.
        let _ = normalizer.normalize(&mut NormalizedString::from(text));
        normalizer.refusal().map_or(Ok(()), Err)
    }
}

impl BoundedNormalizer<'_> {
    /// Why the text has not been normalised, if it has not.
    pub fn refusal(self) -> Option<String> {
        self.refusal.into_inner()
    }

    fn allowed(&self, growth: usize) -> usize {
        self.num_text_bytes
            .saturating_mul(growth)
            .saturating_add(FREE_BYTES)
    }

    /// Refuses `num_bytes` of a step, and what is there of other parts of the text.
    fn check(&self, step: &Step, num_bytes: usize, growth: usize) -> tokenizers::Result<()> {
        let num_bytes = self.num_bytes.load(Relaxed).saturating_add(num_bytes);
        if num_bytes <= self.allowed(growth) {
            return Ok(());
        }
        let refusal = format!(
            "'{}' of the normalizer would make {num_bytes} bytes or so of {}, more than {growth} times as many; \
             correct the normalizer in tokenizer.json",
            step.name, self.num_text_bytes
        );
        *self.refusal.lock() = Some(refusal.clone());
        Err(refusal.into())
    }
}

impl Normalizer for BoundedNormalizer<'_> {
    fn normalize(&self, text: &mut NormalizedString) -> tokenizers::Result<()> {
        // The library goes on after an error.
        if self.refusal.lock().is_some() {
            return Ok(());
        }
        for step in self.steps {
            let (num_bytes, growth) = step.most_bytes(text.get());
            self.check(step, num_bytes, growth)?;
            step.normalizer.normalize(text)?;
            self.check(step, text.get().len(), MAX_GROWTH)?;
        }
        self.num_bytes.fetch_add(text.get().len(), Relaxed);
        Ok(())
    }
}

impl Step {
    /// The most bytes that it can make of `text`, and how many times the text they may be: fewer where they are
    /// counted.
    fn most_bytes(&self, text: &str) -> (usize, usize) {
        match (&self.growth, &self.normalizer) {
            (Growth::Factor(factor), _) => (
                text.len().saturating_mul(*factor).saturating_add(*factor),
                MAX_GROWTH_OF_STEP,
            ),
            (Growth::Added(num_bytes), _) => (text.len().saturating_add(*num_bytes), MAX_GROWTH),
            (Growth::Literal { pattern, content }, _) => {
                let num_matches = text.matches(pattern.as_str()).count();
                let grown = num_matches.saturating_mul(content.saturating_sub(pattern.len()));
                (text.len().saturating_add(grown), MAX_GROWTH)
            }
            (Growth::Table, NormalizerWrapper::Precompiled(table)) => {
                let most = |(start, char): (usize, char)| {
                    // The library looks up groups of less than 6 bytes as one, and otherwise single characters. The
                    // entry of the shortest prefix is found. No character has more than 4 bytes.
                    let end = text.floor_char_boundary(start + 5);
                    let found = table.transform(&text[start..end]).map_or(0, str::len);
                    found.max(char.len_utf8())
                };
                let sizes = text.char_indices().map(most);
                (sizes.fold(0, usize::saturating_add), MAX_GROWTH_OF_STEP)
            }
            (Growth::Table, _) => (text.len(), MAX_GROWTH),
        }
    }
}

fn add_steps(normalizer: &NormalizerWrapper, steps: &mut Vec<Step>) {
    use NormalizerWrapper as Kind;
    if let Kind::Sequence(sequence) = normalizer {
        for part in sequence.as_ref() {
            add_steps(part, steps);
        }
        return;
    }
    let json = serde_json::to_value(normalizer).unwrap_or(Value::Null);
    let growth = match normalizer {
        Kind::StripNormalizer(_) | Kind::StripAccents(_) | Kind::Nmt(_) | Kind::Sequence(_) => {
            Growth::Factor(1)
        }
        // A byte becomes a character of two; `İ` and the like become longer in lower case.
        Kind::ByteLevel(_) | Kind::Lowercase(_) => Growth::Factor(2),
        // The most that a character grows by is in Unicode's FAQ about normalization: 3 and 11 times.
        Kind::NFC(_) | Kind::NFD(_) => Growth::Factor(3),
        Kind::NFKC(_) | Kind::NFKD(_) => Growth::Factor(11),
        // Decomposed, in lower case, with a space on both sides of Chinese characters.
        Kind::BertNormalizer(_) => Growth::Factor(12),
        Kind::Prepend(prepend) => Growth::Added(prepend.prepend.len()),
        Kind::Precompiled(_) => Growth::Table,
        Kind::Replace(replace) => match json["pattern"]["String"].as_str() {
            Some(pattern) => Growth::Literal {
                pattern: pattern.to_owned(),
                content: replace.content.len(),
            },
            // A pattern can match before every character.
            None => Growth::Factor(1 + replace.content.len()),
        },
    };
    steps.push(Step {
        normalizer: normalizer.clone(),
        name: json["type"].as_str().unwrap_or("a part").to_owned(),
        growth,
    });
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn steps(json: Value) -> NormalizerSteps {
        let normalizer = serde_json::from_value(json).expect("a normalizer");
        NormalizerSteps::new(Some(&normalizer))
    }

    fn replace(pattern: Value, content: &str) -> Value {
        json!({"type": "Replace", "pattern": pattern, "content": content})
    }

    fn sequence(normalizers: Vec<Value>) -> Value {
        json!({"type": "Sequence", "normalizers": normalizers})
    }

    #[test]
    fn normalizers_of_known_tokenizers_are_not_refused() {
        let long = "é の\u{fdfa}\n ".repeat(10_000);
        let cases = [
            json!({"type": "NFKC"}),
            json!({"type": "NFKD"}),
            json!({"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
                   "strip_accents": null, "lowercase": true}),
            sequence(vec![
                json!({"type": "Prepend", "prepend": "▁"}),
                replace(json!({"String": " "}), "▁"),
                json!({"type": "ByteLevel"}),
            ]),
            sequence(vec![
                json!({"type": "NFC"}),
                replace(json!({"Regex": "\\s+"}), " "),
                json!({"type": "Lowercase"}),
            ]),
        ];
        for case in cases {
            let steps = steps(case.clone());
            for text in ["", "a", &long, &" ".repeat(100_000)] {
                assert_eq!(steps.check(text), Ok(()), "{case}");
            }
        }
    }

    #[test]
    fn a_bounded_normalizer_normalises_as_the_library_does() {
        let case = sequence(vec![
            json!({"type": "Prepend", "prepend": "▁"}),
            json!({"type": "NFKC"}),
            sequence(vec![replace(json!({"String": " "}), "▁")]),
        ]);
        let whole: NormalizerWrapper = serde_json::from_value(case.clone()).expect("one");
        let text = " ﬁ  é ™";
        let (mut ours, mut theirs) = (NormalizedString::from(text), NormalizedString::from(text));
        whole.normalize(&mut theirs).expect("normalised");
        let steps = steps(case);
        steps
            .for_text(text.len())
            .normalize(&mut ours)
            .expect("normalised");
        assert_eq!(ours, theirs);
    }

    #[test]
    fn normalizers_that_multiply_are_refused_before_they_do() {
        let eight = || replace(json!({"String": "a"}), "aaaaaaaa");
        let cases = [
            // Far beyond all memory, if it were done.
            sequence(vec![eight(); 30]),
            sequence(vec![replace(json!({"String": ""}), &"b".repeat(1 << 20))]),
            sequence(vec![
                replace(json!({"Regex": "a?"}), &"a".repeat(1 << 10));
                9
            ]),
            sequence(vec![
                json!({"type": "Prepend", "prepend": "b".repeat(1 << 20)});
                2
            ]),
        ];
        for case in cases {
            let steps = steps(case);
            let refusal = steps.check(&"a".repeat(1 << 12)).expect_err("refused");
            assert!(refusal.contains("correct the normalizer"), "{refusal}");
        }
        let steps = steps(sequence(vec![eight(); 30]));
        assert_eq!(steps.check("the"), Ok(()), "it has none of them");
    }

    #[test]
    fn a_table_that_multiplies_is_refused() {
        let long = spm_table(b"a", &"b".repeat(1 << 20));
        let refusal = long.check(&"a".repeat(100)).expect_err("refused");
        assert!(refusal.contains("'Precompiled'"), "{refusal}");
        assert_eq!(long.check("ccc"), Ok(()));
        assert_eq!(spm_table(b"a", "bbb").check(&"a".repeat(100)), Ok(()));
    }

    #[test]
    fn the_size_of_what_a_step_makes_is_bounded() {
        let literal =
            |pattern: &str, content: &str| steps(replace(json!({"String": pattern}), content));
        let pattern = |content: &str| steps(replace(json!({"Regex": "a"}), content));
        let cases = [
            (literal("a", "bcd"), "aab", (7, 8)),
            (literal("ab", "b"), "abab", (4, 8)),
            (literal("ab", "cd"), "abab", (4, 8)),
            (literal("", "b"), "aé", (6, 8)),
            (pattern("bcd"), "aab", (16, 64)),
            (
                steps(json!({"type": "Prepend", "prepend": "▁"})),
                "ab",
                (5, 8),
            ),
            (steps(json!({"type": "Lowercase"})), "ab", (6, 64)),
            (spm_table(b"ab", "bbbbbb"), "ab", (7, 64)),
            (spm_table(b"ab", "bbbbbb"), "éabab😀", (20, 64)),
        ];
        for (steps, text, expected) in cases {
            let [step] = &steps.0[..] else {
                panic!("one step");
            };
            assert_eq!(step.most_bytes(text), expected, "{}: {text}", step.name);
        }
    }

    /// A table that makes `value` of `key`, which has one byte or two: a trie (Darts), and the texts of its leaves.
    fn spm_table(key: &[u8], value: &str) -> NormalizerSteps {
        let unit = |label: u8, offset: usize, is_last: bool| {
            u32::from(label) | u32::from(is_last) << 8 | (offset as u32) << 10
        };
        let mut trie = vec![0u32; 0x100];
        trie[0] = unit(0, 1, false);
        let mut place = 1;
        for (i, label) in key.iter().enumerate() {
            let offset = 4 << i;
            place ^= usize::from(*label);
            trie[place] = unit(*label, offset, i + 1 == key.len());
            place ^= offset;
        }
        // The value is the beginning of the texts.
        trie[place] = 1 << 31;
        let mut table = ((trie.len() * 4) as u32).to_le_bytes().to_vec();
        table.extend(trie.iter().flat_map(|unit| unit.to_le_bytes()));
        table.extend(value.bytes());
        let table = tokenizers::normalizers::Precompiled::from(&table[..]).expect("a table");
        NormalizerSteps::new(Some(&NormalizerWrapper::Precompiled(table)))
    }
}
