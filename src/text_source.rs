//! Where a model's tokenizer and chat template come from: the files of a Hugging Face folder, or a GGUF file.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::request::prompt::TextParts;
use inflight_base::{LoadError, TokenId};
use inflight_checkpoint::{GgufFolder, MetadataValue};
use inflight_config::{RunnerKind, Settings};
use inflight_text::{ChatTemplates, GgufVocabulary, Tokenizer};

/// The name of the template that conversations have unless they ask for another.
const DEFAULT_TEMPLATE: &str = "default";
/// The most templates of a file that are read.
const MAX_TEMPLATES: usize = 64;

/// The place of a tokenizer, before it is built.
pub enum TextSource {
    /// A folder with a tokenizer.json.
    Folder(PathBuf),
    /// A GGUF file.
    Gguf(Box<GgufText>),
    /// There is no tokenizer at this place.
    Nothing(PathBuf),
}

/// What a GGUF file says about text.
pub struct GgufText {
    path: PathBuf,
    vocabulary: GgufVocabulary,
    /// With their names.
    templates: Vec<(String, String)>,
}

impl TextSource {
    /// Looks into the folder of the model: for a tokenizer.json, then for a GGUF file.
    pub fn find(settings: &Settings, folder: &Path, version: u64) -> Self {
        let dir = settings.tokenizer_path(folder, version);
        let named = settings.tokenizer_dir.is_some();
        if settings.runner == RunnerKind::Synthetic && !named {
            return Self::Nothing(dir);
        }
        let has_file = dir.join("tokenizer.json").is_file();
        // A file that cannot be read is refused when the weights are read from it.
        let gguf = match has_file {
            true => None,
            false => GgufFolder::in_folder(&dir).ok().flatten(),
        };
        match gguf.map(|gguf| GgufText::read(&gguf)) {
            Some(Ok(text)) => Self::Gguf(Box::new(text)),
            // A folder that the user named is used in any case, so that what it lacks is said.
            _ if named || has_file => Self::Folder(dir),
            _ => Self::Nothing(dir),
        }
    }

    /// Whether a model without a configured input takes text.
    pub fn has_tokenizer(&self) -> bool {
        match self {
            Self::Folder(_) => true,
            Self::Gguf(text) => text.vocabulary.problem().is_none(),
            Self::Nothing(_) => false,
        }
    }

    /// Why a model of a checkpoint takes no text, if it does not.
    pub fn problem(&self) -> Option<String> {
        match self {
            Self::Folder(_) => None,
            Self::Gguf(text) => {
                let problem = text.vocabulary.problem()?;
                Some(format!("{} {problem}", text.path.display()))
            }
            Self::Nothing(dir) => Some(format!(
                "there is no {}{}",
                dir.join("tokenizer.json").display(),
                other_vocabulary(dir)
            )),
        }
    }

    /// Builds the tokenizer and compiles the chat template.
    ///
    /// # Errors
    /// There is no tokenizer, or it is damaged or not supported.
    pub fn load(&self) -> Result<TextParts, LoadError> {
        match self {
            Self::Folder(dir) => Ok(TextParts {
                tokenizer: Arc::new(Tokenizer::load(dir)?),
                templates: ChatTemplates::load(dir)?.map(Arc::new),
            }),
            Self::Gguf(text) => text.load(),
            Self::Nothing(dir) => Err(LoadError::Config {
                problem: format!(
                    "the input is text_input, and there is no {}{}",
                    dir.join("tokenizer.json").display(),
                    other_vocabulary(dir)
                ),
                remedy: "put a tokenizer.json there, name its folder in tokenizer_dir, or take \
                         input [{ name: \"input_ids\" data_type: TYPE_INT32 dims: [ -1 ] \
                         allow_ragged_batch: true }]"
                    .to_owned(),
            }),
        }
    }
}

impl GgufText {
    fn read(gguf: &GgufFolder) -> Result<Self, LoadError> {
        let key = |name: &str| format!("tokenizer.ggml.{name}");
        let text = |key: &str| match gguf.metadata(key) {
            Some(MetadataValue::Text(text)) => Some(text.clone()),
            _ => None,
        };
        let token = |name: &str| match gguf.metadata(&key(name)) {
            Some(MetadataValue::Unsigned(id)) => TokenId::try_from(*id).ok(),
            _ => None,
        };
        let flag = |name: &str| match gguf.metadata(&key(name)) {
            Some(MetadataValue::Bool(value)) => Some(*value),
            _ => None,
        };
        let tokens = gguf.texts(&key("tokens"))?.unwrap_or_default();
        let mut kinds = gguf.numbers(&key("token_type"))?.unwrap_or_default();
        // End tokens are control tokens, whatever kind the file gives them.
        for token in gguf.end_tokens()? {
            if (token as usize) < tokens.len() {
                kinds.resize(
                    kinds.len().max(token as usize + 1),
                    GgufVocabulary::ORDINARY,
                );
                kinds[token as usize] = GgufVocabulary::CONTROL;
            }
        }
        Ok(Self {
            path: gguf.path().to_owned(),
            vocabulary: GgufVocabulary {
                model: text(&key("model")).unwrap_or_default(),
                pre: text(&key("pre")),
                tokens,
                scores: gguf.numbers(&key("scores"))?.unwrap_or_default(),
                kinds,
                merges: gguf.texts(&key("merges"))?.unwrap_or_default(),
                start: token("bos_token_id"),
                end: token("eos_token_id"),
                unknown: token("unknown_token_id"),
                adds_start: flag("add_bos_token"),
                adds_end: flag("add_eos_token"),
                adds_space: flag("add_space_prefix"),
            },
            templates: named_templates(gguf),
        })
    }

    fn load(&self) -> Result<TextParts, LoadError> {
        let fail = |reason| LoadError::File {
            path: self.path.clone(),
            reason,
        };
        let vocabulary = &self.vocabulary;
        let named = [
            ("bos_token", vocabulary.start),
            ("eos_token", vocabulary.end),
            ("unk_token", vocabulary.unknown),
        ];
        let special_tokens = named.into_iter().filter_map(|(name, token)| {
            let text = vocabulary.text(token?)?;
            Some((name.to_owned(), text.to_owned()))
        });
        let templates = (!self.templates.is_empty()).then(|| {
            let place = format!("{}, tokenizer.chat_template", self.path.display());
            ChatTemplates::with_sources(&self.templates, special_tokens.collect(), &place)
        });
        Ok(TextParts {
            tokenizer: Arc::new(vocabulary.tokenizer().map_err(fail)?),
            templates: templates.map(Arc::new),
        })
    }
}

/// Files of tokenizers that are not read, and what makes a tokenizer.json of them.
const OTHER_VOCABULARIES: [&str; 4] = ["tokenizer.model", "tekken.json", "vocab.json", "vocab.txt"];

/// What a folder has in place of a tokenizer.json, and how to write one.
fn other_vocabulary(dir: &Path) -> String {
    let mut others = OTHER_VOCABULARIES.iter();
    let found = others.find(|name| dir.join(name).is_file());
    found.map_or_else(String::new, |name| {
        format!(
            ", and {name} is not read: transformers writes one, with \
             AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    })
}

/// The chat templates of a file: `tokenizer.chat_template`, and every `tokenizer.chat_template.NAME` in order of
/// names.
fn named_templates(gguf: &GgufFolder) -> Vec<(String, String)> {
    const KEY: &str = "tokenizer.chat_template";
    let named = gguf.keys().filter_map(|key| match key.strip_prefix(KEY)? {
        "" => Some((key, DEFAULT_TEMPLATE)),
        name => Some((key, name.strip_prefix('.')?)),
    });
    let templates = named.filter_map(|(key, name)| match gguf.metadata(key) {
        Some(MetadataValue::Text(source)) => Some((name.to_owned(), source.clone())),
        _ => None,
    });
    let mut templates: Vec<_> = templates.collect();
    templates.sort_by_key(|(name, _)| (name != DEFAULT_TEMPLATE, name.clone()));
    templates.dedup_by(|second, first| second.0 == first.0);
    templates.truncate(MAX_TEMPLATES);
    templates
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;

    use serde_json::json;

    use super::*;
    use inflight_text::Conversation;

    /// Made by tests/fixtures/make_gguf_tokenizers.py.
    fn fixtures() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/gguf-tokenizers")
    }

    /// A model whose version folder has one of the files only.
    struct Folder(PathBuf);

    impl Folder {
        fn with(test: &str, name: &str) -> Self {
            let id = std::process::id();
            let dir = std::env::temp_dir().join(format!("inflight-text-source-{id}-{test}-{name}"));
            fs::create_dir_all(dir.join("1")).expect("a folder");
            let file = format!("{name}.gguf");
            fs::copy(fixtures().join(&file), dir.join("1").join(&file)).expect("copied");
            Self(dir)
        }

        fn source(&self) -> TextSource {
            TextSource::find(&Settings::default(), &self.0, 1)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn text_of(test: &str, name: &str) -> TextParts {
        let source = Folder::with(test, name).source();
        assert!(source.has_tokenizer(), "{name}");
        match source.load() {
            Ok(text) => text,
            Err(error) => panic!("{name}: {error}"),
        }
    }

    #[test]
    fn texts_have_the_tokens_of_the_library_that_trained_the_tokenizer() {
        let json = fs::read_to_string(fixtures().join("expected.json")).expect("expected.json");
        let expected: BTreeMap<String, Vec<(String, Vec<TokenId>)>> =
            serde_json::from_str(&json).expect("expected.json");
        assert_eq!(expected.len(), 13);
        for (name, texts) in expected {
            let tokenizer = text_of("tokens", &name).tokenizer;
            for (text, ids) in texts {
                let found = tokenizer.encode(&text, false).expect("tokens");
                assert_eq!(found, ids, "{name}: {text:?}");
            }
        }
    }

    #[test]
    fn special_tokens_are_tokens_and_begin_a_text_where_the_file_says_so() {
        let tokenizer = text_of("special", "llama-bpe").tokenizer;
        let ids = tokenizer.encode("the<|end|>", true).expect("tokens");
        assert_eq!(tokenizer.token_text(ids[0]), "<|start|>");
        assert_eq!(tokenizer.token_text(ids[ids.len() - 1]), "<|end|>");
        let tokenizer = text_of("special", "qwen2").tokenizer;
        assert_eq!(
            tokenizer.encode("the", true),
            tokenizer.encode("the", false)
        );
        let tokenizer = text_of("special", "spm").tokenizer;
        let ids = tokenizer.encode("the", true).expect("tokens");
        assert_eq!(tokenizer.token_text(ids[0]), "<s>");
    }

    #[test]
    fn the_chat_template_of_the_file_knows_its_special_tokens() {
        let templates = text_of("template", "qwen2").templates;
        let conversation = Conversation {
            messages: vec![json!({"role": "user", "content": "Hello"})],
            ..Conversation::default()
        };
        let prompt = templates
            .expect("one")
            .render(&conversation)
            .expect("a prompt");
        assert_eq!(prompt, "<|start|>user: Hello<|end|>");
    }

    #[test]
    fn a_tokenizer_json_beside_the_file_takes_precedence() {
        let folder = Folder::with("precedence", "qwen2");
        fs::write(folder.0.join("1/tokenizer.json"), "{}").expect("written");
        let source = folder.source();
        let error = source.load().err().expect("refused").to_string();
        assert!(error.contains("tokenizer.json"), "{error}");
    }
}
