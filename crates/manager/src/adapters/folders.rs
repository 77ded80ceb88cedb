//! From the name of an adapter to its folder. A request names an adapter; which files that stands for is decided here.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;

use inflight_base::{LoadError, RequestError};
use inflight_checkpoint::JsonFile;
use inflight_config::Settings;

/// The table of vLLM's Triton backend: names of adapters, and their folders.
const TABLE: &str = "multi_lora.json";

/// The longest name.
const MAX_NAME_BYTES: usize = 128;

/// The adapters that requests may name.
#[derive(Debug)]
pub struct AdapterFolders {
    /// From `multi_lora.json`.
    named: BTreeMap<String, PathBuf>,
    /// `lora_dir`: each folder in it is an adapter of that name.
    dir: Option<PathBuf>,
    /// `lora_prefetch_dir`: each folder in it whose name is a number is one, too.
    numbered_dir: Option<PathBuf>,
    /// Whether requests may bring adapters, which have no folder.
    takes_uploads: bool,
}

impl AdapterFolders {
    /// The adapters of a model in the repository folder `model_path`. `None` if it has none: neither `lora_dir` nor
    /// `lora_prefetch_dir` nor a `multi_lora.json` in the folder of its version, or beside its checkpoint, and no
    /// requests that bring adapters.
    ///
    /// # Errors
    /// `multi_lora.json` is not an object of names and paths, or a folder of adapters is none.
    pub fn open(
        settings: &Settings,
        model_path: &Path,
        version: u64,
        takes_uploads: bool,
    ) -> Result<Option<Self>, LoadError> {
        let checkpoint = settings.checkpoint_path(model_path, version);
        let places = [model_path.join(version.to_string()), checkpoint];
        let table = places.iter().map(|place| place.join(TABLE));
        let table = table.into_iter().find(|path| path.exists());
        let named = match &table {
            Some(path) => read_table(path, model_path)?,
            None => BTreeMap::new(),
        };
        let dir = folder_of("lora_dir", settings.lora_dir.as_ref(), model_path)?;
        let numbered_dir = settings.lora_prefetch_dir.as_ref();
        let numbered_dir = folder_of("lora_prefetch_dir", numbered_dir, model_path)?;
        let has_some = table.is_some() || dir.is_some() || numbered_dir.is_some();
        Ok((has_some || takes_uploads).then_some(Self {
            named,
            dir,
            numbered_dir,
            takes_uploads,
        }))
    }

    /// The folder of an adapter, which need not be there.
    ///
    /// # Errors
    /// No adapter can have this name.
    pub(super) fn find(&self, name: &str) -> Result<PathBuf, RequestError> {
        if let Some(folder) = self.named.get(name) {
            return Ok(folder.clone());
        }
        let is_number = name.bytes().all(|byte| byte.is_ascii_digit());
        let numbered_dir = self.numbered_dir.as_ref().filter(|_| is_number);
        let dirs = self.dir.iter().chain(numbered_dir);
        let mut folders = dirs.filter(|_| is_plain(name)).map(|dir| dir.join(name));
        // One that is not there is an error when it is read.
        let first = folders.next().ok_or_else(|| self.unknown(name))?;
        match folders.next() {
            Some(second) if !first.is_dir() => Ok(second),
            _ => Ok(first),
        }
    }

    /// The error about an adapter that is not there.
    pub(super) fn unknown(&self, name: &str) -> RequestError {
        let shown: String = name.chars().take(MAX_NAME_BYTES).collect();
        let mut places = Vec::new();
        if !self.named.is_empty() {
            // Not which: they may be other tenants'.
            places.push(format!("{TABLE} has no adapter of this name"));
        }
        if self.dir.is_some() {
            places.push("lora_dir has no adapter in a folder of this name".to_owned());
        }
        if self.numbered_dir.is_some() {
            places.push("lora_prefetch_dir has no adapter in a folder of this number".to_owned());
        }
        if self.takes_uploads {
            places.push(
                "no request has brought it, or it has left the memory since: send lora_weights and lora_config with the request"
                    .to_owned(),
            );
        }
        RequestError::NotFound(format!(
            "the adapter '{shown}' is not known: {}",
            places.join(", and ")
        ))
    }
}

/// A folder of adapters, if the parameter `key` names one.
fn folder_of(
    key: &str,
    dir: Option<&PathBuf>,
    model_path: &Path,
) -> Result<Option<PathBuf>, LoadError> {
    let dir = dir.map(|dir| model_path.join(dir));
    match dir {
        Some(path) if !path.is_dir() => Err(LoadError::File {
            path,
            reason: format!("is not a folder; {key} names one whose folders are adapters"),
        }),
        dir => Ok(dir),
    }
}

/// Whether a name is the name of a folder, and not a path.
fn is_plain(name: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    (1..=MAX_NAME_BYTES).contains(&name.len())
        && !name.starts_with('.')
        && name.chars().all(is_plain)
}

fn read_table(path: &Path, model_path: &Path) -> Result<BTreeMap<String, PathBuf>, LoadError> {
    let table = JsonFile::read(path)?;
    let entries = table.entries().map(|(name, folder)| match folder {
        Value::String(folder) if !name.is_empty() && name.len() <= MAX_NAME_BYTES => {
            Ok((name.clone(), model_path.join(folder)))
        }
        other => Err(table.unexpected(
            name,
            other,
            "the folder of an adapter, under a name of at most 128 bytes",
        )),
    });
    entries.collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::adapters::test_folder::TestFolder;

    fn open(dir: &Path, lora_dir: Option<&str>) -> Result<Option<AdapterFolders>, LoadError> {
        let settings = Settings {
            lora_dir: lora_dir.map(PathBuf::from),
            ..Settings::default()
        };
        AdapterFolders::open(&settings, dir, 1, false)
    }

    #[test]
    fn numbers_lead_to_both_folders_and_names_to_one() {
        let model = TestFolder::new("numbers");
        let path = model.path();
        for folder in ["adapters/1", "adapters/7", "numbered/7", "numbered/8"] {
            fs::create_dir_all(path.join(folder)).expect("written");
        }
        let open = |lora_dir: Option<&str>| {
            let settings = Settings {
                lora_dir: lora_dir.map(PathBuf::from),
                lora_prefetch_dir: Some("numbered".into()),
                ..Settings::default()
            };
            let folders = AdapterFolders::open(&settings, path, 1, false).expect("folders");
            folders.expect("some")
        };
        let find =
            |folders: &AdapterFolders, name| folders.find(name).map_err(|error| error.to_string());
        let both = open(Some("adapters"));
        for (name, folder) in [
            ("1", "adapters/1"),
            ("7", "adapters/7"),
            ("8", "numbered/8"),
            ("poet", "adapters/poet"),
        ] {
            assert_eq!(find(&both, name), Ok(path.join(folder)));
        }
        let numbered = open(None);
        assert_eq!(find(&numbered, "7"), Ok(path.join("numbered/7")));
        for name in ["poet", "", "7/..", "-1"] {
            let error = find(&numbered, name).expect_err("no number");
            assert!(error.contains("lora_prefetch_dir has no"), "{error}");
        }
    }

    #[test]
    fn names_lead_to_folders_and_never_out_of_them() {
        let model = TestFolder::new("names");
        let path = model.path();
        assert!(open(path, None).expect("no files").is_none());
        let error = open(path, Some("adapters"))
            .expect_err("no folder")
            .to_string();
        assert!(
            error.contains("adapters") && error.contains("lora_dir"),
            "{error}"
        );
        fs::create_dir_all(path.join("adapters")).expect("written");
        fs::create_dir_all(path.join("1")).expect("written");
        fs::write(
            path.join("1").join(TABLE),
            r#"{"sql": "/srv/sql", "a/b": "odd"}"#,
        )
        .expect("written");
        let folders = open(path, Some("adapters")).expect("both").expect("some");
        let find = |name: &str| folders.find(name).map_err(|error| error.to_string());
        assert_eq!(find("sql"), Ok(PathBuf::from("/srv/sql")));
        assert_eq!(find("a/b"), Ok(path.join("odd")));
        assert_eq!(find("chat-v1.2"), Ok(path.join("adapters/chat-v1.2")));
        for name in [
            "",
            ".",
            "..",
            "../1",
            "/etc",
            "a b",
            "x\0",
            &"n".repeat(129),
        ] {
            let error = find(name).expect_err("not a name");
            assert!(
                error.contains("multi_lora.json has no adapter of this name"),
                "{error}"
            );
            assert!(!error.contains("sql"), "the names of others: {error}");
        }
        for table in ["[]", r#"{"sql": 1}"#, r#"{"": "x"}"#] {
            fs::write(path.join("1").join(TABLE), table).expect("written");
            assert!(open(path, None).is_err(), "{table}");
        }
    }
}
