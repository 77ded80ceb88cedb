//! Models whose steps can be watched: a repository's, with a statistics file for each that has none.

use std::fs::{self, DirEntry, File};
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::Result;

/// As many files as the server with OpenAI's API reads.
const MAX_FILES: usize = 16;
/// A file that is larger is emptied: whoever watches has read it long since.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// A repository with the models of another one, in a folder that is removed with it.
pub struct WatchedModels {
    folder: PathBuf,
    /// The names of models, and their statistics files.
    files: Vec<(String, PathBuf)>,
}

impl WatchedModels {
    /// The models of `repository`, in `folder`, whose contents are replaced.
    pub fn of(repository: &Path, folder: PathBuf) -> Result<Self> {
        match fs::remove_dir_all(&folder) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(format!("{}: {error}", folder.display()).into());
            }
            _ => {}
        }
        let mut watched = Self {
            folder,
            files: Vec::new(),
        };
        fs::create_dir_all(watched.repository())?;
        fs::create_dir(watched.folder.join("steps"))?;
        let mut models = fs::read_dir(repository)?.collect::<std::io::Result<Vec<_>>>()?;
        models.sort_by_key(DirEntry::file_name);
        for model in models {
            watched.add(&model)?;
        }
        Ok(watched)
    }

    /// The folder of the models.
    pub fn repository(&self) -> PathBuf {
        self.folder.join("models")
    }

    /// What tells the server with OpenAI's API where the steps are.
    pub fn options(&self) -> impl Iterator<Item = String> {
        let option =
            |(name, path): &(String, PathBuf)| format!("--stats-file={name}={}", path.display());
        self.files.iter().map(option)
    }

    /// Empties the files that have become large.
    pub fn empty_large_files(&self) {
        for (_, path) in &self.files {
            let is_large = |it: &fs::Metadata| it.len() > MAX_FILE_BYTES;
            if fs::metadata(path).is_ok_and(|metadata| is_large(&metadata))
                && let Ok(file) = File::options().write(true).open(path)
            {
                // If it fails, it is tried again.
                let _ = file.set_len(0);
            }
        }
    }

    /// Adds a model: links to its files, and a configuration with a statistics file.
    fn add(&mut self, model: &DirEntry) -> Result<()> {
        let target = self.repository().join(model.file_name());
        let config = fs::read_to_string(model.path().join("config.pbtxt")).unwrap_or_default();
        let name = model.file_name().into_string();
        let name = name.ok().filter(|name| !name.contains('='));
        let (Some(name), true) = (
            name,
            can_be_watched(&config) && self.files.len() < MAX_FILES,
        ) else {
            return Ok(symlink(model.path(), target)?);
        };
        fs::create_dir(&target)?;
        for file in fs::read_dir(model.path())? {
            let file = file?;
            if file.file_name() != "config.pbtxt" {
                symlink(file.path(), target.join(file.file_name()))?;
            }
        }
        let steps = self.folder.join("steps").join(format!("{name}.jsonl"));
        let parameter = format!(
            "\nparameters {{ key: \"stats_file\" value {{ string_value: {:?} }} }}\n",
            steps.display().to_string()
        );
        fs::write(target.join("config.pbtxt"), config + &parameter)?;
        self.files.push((name, steps));
        Ok(())
    }
}

impl Drop for WatchedModels {
    fn drop(&mut self) {
        // The next one in the folder would do it.
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Whether a model with this configuration writes a statistics file if it is told to.
fn can_be_watched(config: &str) -> bool {
    let mut lines = config.lines();
    let is_ours = |line: &str| {
        let line = line.split('#').next().unwrap_or_default();
        line.replace(' ', "").contains("backend:\"inflight\"")
    };
    lines.any(is_ours) && !config.contains("stats_file")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_of_this_backend_get_a_file_and_others_are_as_they_were() {
        let folder = crate::workspace::target("tmp/watched_models");
        let _ = fs::remove_dir_all(&folder);
        let repository = folder.join("repository");
        let configs = [
            ("ours", "backend: \"inflight\"\n"),
            (
                "theirs",
                "backend: \"identity\"  # not backend: \"inflight\"\n",
            ),
            (
                "watched",
                "backend: \"inflight\"\nparameters { key: \"stats_file\" }\n",
            ),
        ];
        for (name, config) in configs {
            fs::create_dir_all(repository.join(name).join("1")).expect("a folder");
            fs::write(repository.join(name).join("1/weights"), name).expect("weights");
            fs::write(repository.join(name).join("config.pbtxt"), config).expect("a config");
        }
        let watched = WatchedModels::of(&repository, folder.join("copy")).expect("a copy");
        let steps = folder.join("copy/steps/ours.jsonl");
        assert_eq!(
            watched.options().collect::<Vec<_>>(),
            [format!("--stats-file=ours={}", steps.display())]
        );
        for (name, config) in configs {
            let read = |path: &str| {
                fs::read_to_string(watched.repository().join(name).join(path)).expect("a file")
            };
            assert_eq!(read("1/weights"), name);
            let has_file = read("config.pbtxt").contains(&format!("\"{}\"", steps.display()));
            assert_eq!(has_file, name == "ours");
            assert!(read("config.pbtxt").starts_with(config));
        }
        for (len, expected) in [(MAX_FILE_BYTES, MAX_FILE_BYTES), (MAX_FILE_BYTES + 1, 0)] {
            // A hole takes no room.
            let file = File::create(&steps).expect("a file");
            file.set_len(len).expect("a size");
            watched.empty_large_files();
            assert_eq!(file.metadata().expect("a size").len(), expected);
        }
        drop(watched);
        assert!(!folder.join("copy").exists());
        fs::remove_dir_all(&folder).expect("it is there");
    }
}
