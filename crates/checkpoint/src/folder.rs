//! A checkpoint folder.

use std::path::{Path, PathBuf};

use super::file_stamp::FileStamp;
use super::gguf::GgufFolder;
use super::json_file::JsonFile;
use super::quantised::{Quantisation, QuantisationSection};
use super::safetensors::SafetensorsFolder;
use super::store::{Store, WeightFiles};
use inflight_base::LoadError;

/// The opened files of one folder: `config.json`, `generation_config.json`, and the `*.safetensors` or `*.gguf`.
///
/// Only headers have been read. A weight file that is written to afterwards fails the load that reads it.
pub struct Checkpoint {
    dir: PathBuf,
    config: Option<JsonFile>,
    generation_config: Option<JsonFile>,
    config_stamp: Option<FileStamp>,
    quantisation: Option<QuantisationSection>,
    files: WeightFiles,
}

impl Checkpoint {
    /// Opens a folder. If it has both, the safetensors files are used and the GGUF files are not.
    ///
    /// # Errors
    /// A file is missing, cannot be read, or is damaged; the folder holds an adapter.
    pub fn open(dir: &Path) -> Result<Self, LoadError> {
        check_folder(dir)?;
        let gguf = GgufFolder::in_folder(dir)?;
        let path = dir.join("config.json");
        // Before it is read: a file that is replaced in between has another stamp the next time.
        let config_stamp = FileStamp::of(&path);
        let config = match gguf.is_some() && !path.exists() {
            true => None,
            false => Some(JsonFile::read(&path)?),
        };
        let path = dir.join("generation_config.json");
        let generation_config = match path.exists() {
            true => Some(JsonFile::read(&path)?),
            false => None,
        };
        let quantisation = match &config {
            Some(config) if gguf.is_none() => QuantisationSection::find(dir, config)?,
            _ => None,
        };
        let files = match gguf {
            Some(gguf) => WeightFiles::Gguf(gguf),
            None => WeightFiles::Safetensors(SafetensorsFolder::open(dir)?),
        };
        Ok(Self {
            dir: dir.to_owned(),
            config,
            generation_config,
            config_stamp,
            quantisation,
            files,
        })
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// config.json. Only a folder with GGUF files may lack it.
    pub fn config(&self) -> Option<&JsonFile> {
        self.config.as_ref()
    }

    /// generation_config.json, if there is one.
    pub fn generation_config(&self) -> Option<&JsonFile> {
        self.generation_config.as_ref()
    }

    /// The GGUF files, if the weights are read from them.
    pub fn gguf(&self) -> Option<&GgufFolder> {
        match &self.files {
            WeightFiles::Safetensors(_) => None,
            WeightFiles::Gguf(files) => Some(files),
        }
    }

    /// The weights by name.
    ///
    /// # Errors
    /// A method of quantisation, or one of its settings, is not supported.
    pub fn store(&self) -> Result<Store<'_>, LoadError> {
        let found = self.quantisation.as_ref();
        let quantisation = found.map(Quantisation::from_section).transpose()?;
        Ok(Store::new(&self.files, quantisation))
    }

    /// Whether two tensors hold the same bytes, or the second is absent. GGUF files have no such pairs.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn are_equal(&self, first: &str, second: &str) -> Result<bool, LoadError> {
        match &self.files {
            WeightFiles::Safetensors(tensors) => tensors.are_equal(first, second),
            WeightFiles::Gguf(_) => Ok(true),
        }
    }

    /// The stamps of all files that determine the weights.
    pub fn stamps(&self) -> impl Iterator<Item = &FileStamp> {
        let weights = match &self.files {
            WeightFiles::Safetensors(tensors) => tensors.stamps(),
            WeightFiles::Gguf(tensors) => tensors.stamps(),
        };
        let section = self.quantisation.as_ref().and_then(|found| found.stamp());
        self.config_stamp.iter().chain(section).chain(weights)
    }
}

/// Refuses what is not the folder of a whole model.
fn check_folder(dir: &Path) -> Result<(), LoadError> {
    let fail = |path: &Path, reason: &str| {
        Err(LoadError::File {
            path: path.to_owned(),
            reason: reason.to_owned(),
        })
    };
    if !dir.is_dir() {
        return fail(
            dir,
            "is not a folder; put the checkpoint there (config.json, *.safetensors or a *.gguf, tokenizer.json), or write \
             its folder into the parameter gpt_model_path",
        );
    }
    let adapter = dir.join("adapter_config.json");
    match adapter.exists() {
        true => fail(
            &adapter,
            "belongs to an adapter, which is no model by itself; serve its base model, with the adapter in a folder of \
             lora_dir, or merge it into its model (merge_and_unload of peft), and serve the folder that this writes",
        ),
        false => Ok(()),
    }
}
