//! The safetensors files of a checkpoint folder in one name space.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::file::{SafetensorsFile, StoredTensor};
use crate::file_stamp::FileStamp;
use crate::json_file::JsonFile;
use crate::tensor::TensorLocation;
use inflight_base::LoadError;

const SINGLE_FILE: &str = "model.safetensors";
const INDEX_FILE: &str = "model.safetensors.index.json";

/// Of tensors that are in two files, as many bytes are compared: twice the largest embeddings.
const MAX_COMPARED_BYTES: usize = 8 << 30;

/// What PyTorch writes.
const PICKLE: &str = "pytorch_model.bin";

/// All tensors of a checkpoint folder.
pub struct SafetensorsFolder {
    dir: PathBuf,
    files: Vec<SafetensorsFile>,
    /// Tensor name to the index of its file.
    by_name: HashMap<String, usize>,
}

impl SafetensorsFolder {
    /// Whether a folder has safetensors files, or an index of them.
    pub fn is_in(dir: &Path) -> bool {
        let mut entries = fs::read_dir(dir).into_iter().flatten().flatten();
        dir.join(INDEX_FILE).exists() || entries.any(|entry| is_safetensors(&entry.path()))
    }

    /// Opens `model.safetensors`, or else the files that the index lists, or else every
    /// `*.safetensors` of the folder.
    pub fn open(dir: &Path) -> Result<Self, LoadError> {
        let found = weight_files(dir)?;
        let files = found
            .paths
            .iter()
            .map(|path| SafetensorsFile::open(path, "fetch it again"))
            .collect::<Result<Vec<_>, _>>()?;
        let mut by_name = HashMap::new();
        let mut twice = Vec::new();
        for (index, file) in files.iter().enumerate() {
            for name in file.tensor_names() {
                let indexed = found.indexed.get(&name).map(OsString::as_os_str);
                let is_indexed = indexed == file.path().file_name();
                match by_name.entry(name) {
                    Entry::Vacant(vacant) => {
                        vacant.insert(index);
                    }
                    Entry::Occupied(mut other) => {
                        twice.push((other.key().clone(), [*other.get(), index]));
                        if is_indexed {
                            other.insert(index);
                        }
                    }
                }
            }
        }
        twice.retain(|(name, _)| !found.indexed.contains_key(name));
        check_equal(&files, &twice)?;
        Ok(Self {
            dir: dir.to_owned(),
            files,
            by_name,
        })
    }

    /// The tensor of this name, whatever its type and shape.
    pub fn find(&self, name: &str) -> Result<Option<StoredTensor<'_>>, LoadError> {
        match self.by_name.get_key_value(name) {
            Some((name, &index)) => self.files[index].tensor(name).map(Some),
            None => Ok(None),
        }
    }

    /// The tensor of this name, which must have this shape.
    pub fn get(&self, name: &str, shape: &[usize]) -> Result<StoredTensor<'_>, LoadError> {
        let Some(stored) = self.find(name)? else {
            let reason = format!(
                "is missing; config.json calls for it, with shape {shape:?}, but none of the {} \
                 tensors in {} files has this name",
                self.by_name.len(),
                self.files.len()
            );
            return Err(tensor_error(&self.dir, name, reason));
        };
        stored.of_shape(shape)
    }

    /// An error about a tensor of this name.
    pub fn error(&self, name: &str, reason: String) -> LoadError {
        tensor_error(&self.dir, name, reason)
    }

    /// Whether two tensors hold the same bytes, or the second is absent.
    pub fn are_equal(&self, first: &str, second: &str) -> Result<bool, LoadError> {
        match (self.find(first)?, self.find(second)?) {
            (Some(first), Some(second)) => have_equal_bytes(&first, &second),
            (_, second) => Ok(second.is_none()),
        }
    }

    /// The stamps of all files, in a fixed order.
    pub fn stamps(&self) -> Vec<&FileStamp> {
        self.files.iter().map(|file| file.stamp()).collect()
    }

    /// Checks that everything read so far is what the files held when they were opened.
    pub fn check(&self) -> Result<(), LoadError> {
        self.files.iter().try_for_each(SafetensorsFile::check)
    }

    /// Bytes of all files.
    pub fn num_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.num_bytes()).sum()
    }
}

/// Checks that tensors which two files have are the same, so that it does not matter which is read.
fn check_equal(files: &[SafetensorsFile], twice: &[(String, [usize; 2])]) -> Result<(), LoadError> {
    let mut num_bytes = 0;
    for (name, [first, second]) in twice {
        let [file, other] = [&files[*second], &files[*first]];
        let tensors = [file.tensor(name)?, other.tensor(name)?];
        num_bytes += tensors[0].bytes.len();
        if num_bytes > MAX_COMPARED_BYTES || !have_equal_bytes(&tensors[0], &tensors[1])? {
            let reason = format!(
                "is in {} as well, and may differ; leave one of the two files in the folder",
                other.path().display()
            );
            return Err(tensor_error(file.path(), name, reason));
        }
    }
    if let Some((name, [first, second])) = twice.first() {
        log::warn!(
            "{} of {} are in {} as well, such as {name}; they are equal",
            twice.len(),
            files[*second].path().display(),
            files[*first].path().display()
        );
    }
    Ok(())
}

fn have_equal_bytes(
    first: &StoredTensor<'_>,
    second: &StoredTensor<'_>,
) -> Result<bool, LoadError> {
    const PIECE: usize = 1 << 22;
    if (first.dtype, first.shape) != (second.dtype, second.shape) {
        return Ok(false);
    }
    let num_bytes = first.bytes.len();
    for start in (0..num_bytes).step_by(PIECE) {
        let end = num_bytes.min(start + PIECE);
        if first.bytes.to_vec_of(start..end)? != second.bytes.to_vec_of(start..end)? {
            return Ok(false);
        }
    }
    Ok(true)
}

fn tensor_error(path: &Path, name: &str, reason: String) -> LoadError {
    TensorLocation { path, name }.error(reason)
}

/// The files to read.
#[derive(Default)]
struct FoundFiles {
    /// In a fixed order.
    paths: Vec<PathBuf>,
    /// The names of the files that the index has tensors in.
    indexed: HashMap<String, OsString>,
}

/// The files to read.
fn weight_files(dir: &Path) -> Result<FoundFiles, LoadError> {
    let single = dir.join(SINGLE_FILE);
    if single.exists() {
        return Ok(FoundFiles {
            paths: vec![single],
            ..FoundFiles::default()
        });
    }
    let index = dir.join(INDEX_FILE);
    if index.exists() {
        return indexed_files(dir, &JsonFile::read(&index)?);
    }
    let fail = |reason: String| LoadError::File {
        path: dir.to_owned(),
        reason,
    };
    let entries = fs::read_dir(dir).map_err(|error| fail(format!("cannot be read: {error}")))?;
    let mut files = Vec::new();
    let mut pickle = None;
    for entry in entries {
        let path = entry
            .map_err(|error| fail(format!("cannot be read: {error}")))?
            .path();
        if is_safetensors(&path) {
            files.push(path);
        } else if is_pickle(&path) {
            let name = path
                .file_name()
                .map(|name| name.to_string_lossy().into_owned());
            pickle = pickle.into_iter().chain(name).min();
        }
    }
    if files.is_empty()
        && let Some(pickle) = pickle
    {
        // Without an index all files of the folder are read.
        let (target, others) = match pickle == PICKLE {
            true => (SINGLE_FILE.to_owned(), ""),
            false => (
                Path::new(&pickle)
                    .with_extension("safetensors")
                    .display()
                    .to_string(),
                ", and the other parts likewise",
            ),
        };
        return Err(fail(format!(
            "{pickle} is in a format that runs code when it is read; write its weights as safetensors, in Python: \
             safetensors.torch.save_file(torch.load('{pickle}', weights_only=True), '{target}'){others}"
        )));
    }
    if files.is_empty() {
        return Err(fail(format!(
            "has neither {SINGLE_FILE} nor {INDEX_FILE} nor any *.safetensors or *.gguf; a checkpoint in \
             another format has to be converted to one of them"
        )));
    }
    files.sort();
    Ok(FoundFiles {
        paths: files,
        ..FoundFiles::default()
    })
}

/// Whether PyTorch has written a file: whole, in parts, or as Meta publishes its models.
fn is_pickle(path: &Path) -> bool {
    let extension = path.extension().and_then(|extension| extension.to_str());
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let is_training_state = ["training_args", "optimizer", "scheduler", "rng_state"]
        .iter()
        .any(|name| stem.starts_with(name));
    matches!(extension, Some("bin" | "pt" | "pth")) && !is_training_state
}

fn is_safetensors(path: &Path) -> bool {
    path.extension()
        .is_some_and(|extension| extension == "safetensors")
}

/// The files that `model.safetensors.index.json` names.
fn indexed_files(dir: &Path, index: &JsonFile) -> Result<FoundFiles, LoadError> {
    let weight_map = index
        .object("weight_map")?
        .ok_or_else(|| index.error("weight_map is missing".to_owned()))?;
    let mut names = BTreeSet::new();
    let mut indexed = HashMap::new();
    for (tensor, file) in weight_map.entries() {
        match file {
            // A plain name: the index must not lead out of its folder.
            Value::String(name) if Path::new(name).file_name().is_some_and(|n| n == &name[..]) => {
                names.insert(name.as_str());
                indexed.insert(tensor.clone(), name.into());
            }
            other => {
                return Err(weight_map.unexpected(tensor, other, "the name of a file beside it"));
            }
        }
    }
    let files: Vec<PathBuf> = names.iter().map(|name| dir.join(name)).collect();
    match files.iter().find(|path| !path.exists()) {
        None if files.is_empty() => Err(index.error("weight_map is empty".to_owned())),
        None => Ok(FoundFiles {
            paths: files,
            indexed,
        }),
        Some(missing) => Err(LoadError::File {
            path: missing.clone(),
            reason: format!("is missing; {INDEX_FILE} lists it, so fetch it too"),
        }),
    }
}
