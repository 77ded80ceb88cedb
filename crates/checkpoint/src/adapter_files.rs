//! An adapter in either format: its files, or the arrays that a request has brought.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::{fmt, fs};

use super::adapter_arrays::AdapterArrays;
use super::file_stamp::FileStamp;
use super::module_rows::{self, ModuleRows};
use super::peft::{self, PeftAdapter};
use inflight_base::LoadError;

/// The most names of a folder that are looked at.
const MAX_NAMES: usize = 1024;

/// An adapter's open files.
pub enum AdapterFiles {
    /// As PEFT saves it.
    Peft(PeftAdapter),
    /// As TensorRT-LLM's converters write it.
    Rows(ModuleRows),
}

/// Tells versions of an adapter apart: equal stamps have equal contents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterStamp(Stamp);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Stamp {
    Files([FileStamp; 2]),
    Digest(u128),
}

impl AdapterFiles {
    /// Opens an adapter's folder. Of its weights only the names and shapes are read. PEFT's files come first.
    ///
    /// # Errors
    /// A file is missing or damaged, a rank is above `max_rank`, or the adapter does what is not supported.
    pub fn open(dir: &Path, max_rank: usize) -> Result<Self, LoadError> {
        let is_rows = !dir.join(peft::CONFIG).exists() && dir.join(module_rows::CONFIG).exists();
        Ok(match is_rows {
            true => Self::Rows(ModuleRows::open(dir, max_rank)?),
            false => Self::Peft(PeftAdapter::open(dir, max_rank)?),
        })
    }

    /// An adapter that a request has brought.
    ///
    /// # Errors
    /// A shape is none of such arrays, a module is not known, or a rank is above `max_rank`.
    pub fn of_arrays(arrays: &Arc<AdapterArrays>, max_rank: usize) -> Result<Self, LoadError> {
        ModuleRows::of_arrays(arrays, max_rank).map(Self::Rows)
    }

    /// Checks that everything read so far is what the files held when they were opened.
    ///
    /// # Errors
    /// A file has been cut short or written to.
    pub fn check(&self) -> Result<(), LoadError> {
        match self {
            Self::Peft(files) => files.check(),
            Self::Rows(files) => files.check(),
        }
    }
}

impl AdapterStamp {
    /// The stamps of the files in `dir`; `None` if one of them is not there.
    pub fn of(dir: &Path) -> Option<Self> {
        let formats = [
            [peft::CONFIG, peft::WEIGHTS],
            [module_rows::CONFIG, module_rows::WEIGHTS],
        ];
        formats.into_iter().find_map(|names| {
            let [config, weights] = names.map(|name| FileStamp::of(&dir.join(name)));
            Some(Self(Stamp::Files([config?, weights?])))
        })
    }

    /// The missing file of an adapter folder without a [stamp](AdapterStamp::of), as an error for the client that named
    /// the adapter. `None` if there is no such folder.
    pub fn problem(dir: &Path) -> Option<String> {
        let names = fs::read_dir(dir).ok()?.flatten().take(MAX_NAMES);
        let names: BTreeSet<_> = names
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .collect();
        let has = |name: &str| names.contains(name);
        let ends_with = |end: &str| names.iter().find(|name| name.ends_with(end));
        let nested = names
            .iter()
            .find(|name| dir.join(name).join(peft::CONFIG).is_file());
        let (config, weights) = (peft::CONFIG, peft::WEIGHTS);
        let problem = if let (true, false, Some(file)) =
            (has(config), has(weights), ends_with(".bin"))
        {
            format!(
                "its weights are in {file}, a format that runs code when it is read: write them as {weights}, in Python: \
                 safetensors.torch.save_file(torch.load('{file}', weights_only=True), '{weights}')"
            )
        } else if let (false, Some(folder)) = (has(config), nested) {
            format!(
                "its files are in the folder {folder} of its folder: move them up, or name that folder"
            )
        } else if has(config) {
            format!("its folder has {config} and no {weights}")
        } else if has(weights) {
            format!(
                "its folder has {weights} and no {config}, which tells its rank and its factor: add the one that was saved with it"
            )
        } else if let Some(file) = ends_with(".gguf") {
            format!(
                "{file} is of GGUF, in which adapters are not read: take the adapter as PEFT saved it"
            )
        } else {
            let (rows_config, rows) = (module_rows::CONFIG, module_rows::WEIGHTS);
            format!("its folder has neither {config} and {weights} nor {rows_config} and {rows}")
        };
        Some(problem)
    }

    /// The stamp of what a request has brought, by its contents.
    pub fn of_arrays(arrays: &AdapterArrays) -> Self {
        Self(Stamp::Digest(arrays.digest()))
    }

    /// Whether these are files, which may be replaced.
    pub fn is_of_files(&self) -> bool {
        matches!(self.0, Stamp::Files(_))
    }
}

impl fmt::Display for AdapterStamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Stamp::Files([config, weights]) => write!(f, "{config}; {weights}"),
            Stamp::Digest(digest) => write!(f, "{digest:032x}"),
        }
    }
}
