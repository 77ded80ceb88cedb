//! Embedding settings in the files of sentence-transformers. modules.json lists the modules in order, each with its
//! folder.
//!
//! ```text
//! modules.json            [{ "type": "sentence_transformers.models.Pooling", "path": "1_Pooling" }, ...]
//! 1_Pooling/config.json   { "pooling_mode": "lasttoken" }, or { "pooling_mode_lasttoken": true, ... } before version 6
//! sentence_bert_config.json   { "max_seq_length": 256 } before version 6
//! tokenizer_config.json   { "model_max_length": 256 }, where the file before has none
//! ```

use std::path::Path;

use serde_json::Value;

use super::json_file::JsonFile;
use inflight_base::LoadError;
use inflight_config::PoolingMode;

/// What follows the transformer of an embedding model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EmbeddingModules {
    /// Which hidden states stand for a text.
    pub pooling: PoolingMode,
    /// Whether embeddings are divided by their length.
    pub normalize: bool,
}

/// Pooling modes by the names of sentence-transformers 6, and the keys of earlier versions.
const MODES: &[(&str, &str, PoolingMode)] = &[
    ("lasttoken", "pooling_mode_lasttoken", PoolingMode::Last),
    ("mean", "pooling_mode_mean_tokens", PoolingMode::Mean),
    ("cls", "pooling_mode_cls_token", PoolingMode::Cls),
];

impl EmbeddingModules {
    /// Reads modules.json of a checkpoint's folder; `None` if there is none.
    ///
    /// # Errors
    /// A file is damaged, or a module is not supported.
    pub fn read(folder: &Path) -> Result<Option<Self>, LoadError> {
        let path = folder.join("modules.json");
        if !path.exists() {
            return Ok(None);
        }
        let mut pooling = None;
        let mut normalize = false;
        for module in JsonFile::read_list(&path)? {
            let class = module.string("type")?.unwrap_or_default();
            let name = class.rsplit('.').next().unwrap_or_default();
            match name {
                "Transformer" => {}
                "Pooling" if pooling.is_none() => {
                    let folder = folder.join(module.string("path")?.unwrap_or_default());
                    pooling = Some(pooling_mode(&JsonFile::read(&folder.join("config.json"))?)?);
                }
                "Normalize" => normalize = true,
                _ => {
                    return Err(module.unexpected(
                        "type",
                        class,
                        "the class Transformer, Pooling or Normalize, in this order; other modules are not computed",
                    ));
                }
            }
        }
        match pooling {
            Some(pooling) => Ok(Some(Self { pooling, normalize })),
            None => Err(LoadError::File {
                path,
                reason: "has no module of the class Pooling".to_owned(),
            }),
        }
    }
}

/// The files of a transformer's own settings, by the models that it was first written for.
const TRANSFORMER_CONFIGS: &[&str] = &[
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
];

/// The tokens after which sentence-transformers cuts a text, special ones included: as many as there are positions if
/// `usize::MAX`; `None` without a modules.json.
///
/// # Errors
/// A file is damaged, or says that texts are written in small letters before they reach the tokenizer.
pub fn max_text_tokens(folder: &Path) -> Result<Option<usize>, LoadError> {
    if !folder.join("modules.json").exists() {
        return Ok(None);
    }
    let paths = TRANSFORMER_CONFIGS.iter().map(|name| folder.join(name));
    if let Some(path) = paths.into_iter().find(|path| path.exists()) {
        let config = JsonFile::read(&path)?;
        if config.bool_or("do_lower_case", false)? {
            let expected = "false: only a tokenizer changes letters";
            return Err(config.unexpected("do_lower_case", true, expected));
        }
        if let Some(max) = config.size("max_seq_length", 1..=usize::MAX)? {
            return Ok(Some(max));
        }
    }
    let path = folder.join("tokenizer_config.json");
    let max = match path.exists() {
        // No limit is written as 1e30.
        true => JsonFile::read(&path)?.number("model_max_length", 1.0..=f64::MAX)?,
        false => None,
    };
    Ok(Some(max.map_or(usize::MAX, |max| max as usize)))
}

fn pooling_mode(config: &JsonFile) -> Result<PoolingMode, LoadError> {
    let expected = "one of lasttoken, mean and cls";
    if let Some(value) = config.get("pooling_mode") {
        let named = MODES.iter().find(|(name, ..)| value.as_str() == Some(name));
        let named = named.map(|&(_, _, mode)| mode);
        return named.ok_or_else(|| config.unexpected("pooling_mode", value, expected));
    }
    let set = config
        .entries()
        .filter(|(key, value)| key.starts_with("pooling_mode_") && **value == Value::Bool(true));
    let set: Vec<_> = set.map(|(key, _)| key.as_str()).collect();
    let known = MODES.iter().find(|(_, key, _)| set == [*key]);
    known.map(|&(_, _, mode)| mode).ok_or_else(|| {
        config.error(format!(
            "the keys pooling_mode_... that are true are '{}', and exactly one of {} must be",
            set.join(", "),
            MODES
                .iter()
                .map(|(_, key, _)| *key)
                .collect::<Vec<_>>()
                .join(", ")
        ))
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn read(test: &str, modules: &str, pooling: &str) -> Result<Option<EmbeddingModules>, String> {
        let name = format!("inflight-modules-{test}-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        fs::create_dir_all(folder.join("1_Pooling")).expect("made");
        fs::write(folder.join("modules.json"), modules).expect("written");
        fs::write(folder.join("1_Pooling/config.json"), pooling).expect("written");
        let read = EmbeddingModules::read(&folder).map_err(|error| error.to_string());
        fs::remove_dir_all(&folder).expect("removed");
        read
    }

    const TRANSFORMER: &str =
        r#"{ "idx": 0, "path": "", "type": "sentence_transformers.models.Transformer" }"#;
    const POOLING: &str =
        r#"{ "idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling" }"#;

    #[test]
    fn both_forms_of_pooling_are_read() {
        let old = r#"{ "word_embedding_dimension": 8, "pooling_mode_cls_token": false, "pooling_mode_mean_tokens": true,
                       "pooling_mode_lasttoken": false, "include_prompt": true }"#;
        let new =
            r#"{ "embedding_dimension": 8, "pooling_mode": "lasttoken", "include_prompt": true }"#;
        let modules = format!("[{TRANSFORMER}, {POOLING}]");
        let expected = |pooling, normalize| Ok(Some(EmbeddingModules { pooling, normalize }));
        assert_eq!(
            read("forms", &modules, old),
            expected(PoolingMode::Mean, false)
        );
        let normalize =
            r#"{ "path": "2_Normalize", "type": "sentence_transformers.base.modules.Normalize" }"#;
        let modules = format!("[{TRANSFORMER}, {POOLING}, {normalize}]");
        assert_eq!(
            read("forms", &modules, new),
            expected(PoolingMode::Last, true)
        );
        let none = std::env::temp_dir().join("inflight-no-such-folder");
        assert_eq!(EmbeddingModules::read(&none).ok(), Some(None));
    }

    #[test]
    fn what_is_not_computed_is_refused() {
        let modules = format!("[{TRANSFORMER}, {POOLING}]");
        let dense = r#"{ "path": "2_Dense", "type": "sentence_transformers.models.Dense" }"#;
        for (modules, pooling, part) in [
            (
                &modules[..],
                r#"{ "pooling_mode": "max" }"#,
                r#""max" is not one of lasttoken"#,
            ),
            (
                &modules,
                r#"{ "pooling_mode_max_tokens": true }"#,
                "'pooling_mode_max_tokens'",
            ),
            (
                &modules,
                r#"{ "pooling_mode_cls_token": true, "pooling_mode_mean_tokens": true }"#,
                "exactly one",
            ),
            (
                &format!("[{TRANSFORMER}, {POOLING}, {dense}]"),
                "{}",
                "models.Dense",
            ),
            (
                &format!("[{TRANSFORMER}]"),
                "{}",
                "no module of the class Pooling",
            ),
            ("{}", "{}", "is not a list of JSON objects"),
            ("[1]", "{}", "is not a list of JSON objects"),
        ] {
            let pooling = match part {
                "models.Dense" => r#"{ "pooling_mode": "mean" }"#,
                _ => pooling,
            };
            let error = read("refused", modules, pooling).expect_err(part);
            assert!(error.contains(part), "{error}");
        }
    }
}
