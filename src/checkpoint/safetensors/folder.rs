//! The safetensors files of a checkpoint folder in one name space.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::file::{SafetensorsFile, StoredTensor};
use crate::base::LoadError;
use crate::checkpoint::file_stamp::FileStamp;
use crate::checkpoint::json_file::JsonFile;
use crate::checkpoint::tensor::TensorLocation;

const SINGLE_FILE: &str = "model.safetensors";
const INDEX_FILE: &str = "model.safetensors.index.json";

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
        let files = weight_files(dir)?
            .iter()
            .map(|path| SafetensorsFile::open(path, "fetch it again"))
            .collect::<Result<Vec<_>, _>>()?;
        let mut by_name = HashMap::new();
        for (index, file) in files.iter().enumerate() {
            for name in file.tensor_names() {
                if let Some(other) = by_name.insert(name.clone(), index) {
                    let reason = format!(
                        "is in {} as well; leave one of the two files in the folder",
                        files[other].path().display()
                    );
                    return Err(tensor_error(file.path(), &name, reason));
                }
            }
        }
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
        const PIECE: usize = 1 << 22;
        let (Some(first), Some(second)) = (self.find(first)?, self.find(second)?) else {
            return Ok(self.find(second)?.is_none());
        };
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

fn tensor_error(path: &Path, name: &str, reason: String) -> LoadError {
    TensorLocation { path, name }.error(reason)
}

/// The files to read, in a fixed order.
fn weight_files(dir: &Path) -> Result<Vec<PathBuf>, LoadError> {
    let single = dir.join(SINGLE_FILE);
    if single.exists() {
        return Ok(vec![single]);
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
    let mut has_pickle = false;
    for entry in entries {
        let path = entry
            .map_err(|error| fail(format!("cannot be read: {error}")))?
            .path();
        has_pickle |= path.ends_with(PICKLE);
        if is_safetensors(&path) {
            files.push(path);
        }
    }
    if files.is_empty() && has_pickle {
        return Err(fail(format!(
            "{PICKLE} is in a format that runs code when it is read; write its weights as safetensors, in Python: \
             safetensors.torch.save_file(torch.load('{PICKLE}', weights_only=True), '{SINGLE_FILE}')"
        )));
    }
    if files.is_empty() {
        return Err(fail(format!(
            "has neither {SINGLE_FILE} nor {INDEX_FILE} nor any *.safetensors or *.gguf; a checkpoint in \
             another format has to be converted to one of them"
        )));
    }
    files.sort();
    Ok(files)
}

fn is_safetensors(path: &Path) -> bool {
    path.extension()
        .is_some_and(|extension| extension == "safetensors")
}

/// The files that `model.safetensors.index.json` names.
fn indexed_files(dir: &Path, index: &JsonFile) -> Result<Vec<PathBuf>, LoadError> {
    let weight_map = index
        .object("weight_map")?
        .ok_or_else(|| index.error("weight_map is missing".to_owned()))?;
    let mut names = BTreeSet::new();
    for (tensor, file) in weight_map.entries() {
        match file {
            // A plain name: the index must not lead out of its folder.
            Value::String(name) if Path::new(name).file_name().is_some_and(|n| n == &name[..]) => {
                names.insert(name.as_str());
            }
            other => {
                return Err(weight_map.unexpected(tensor, other, "the name of a file beside it"));
            }
        }
    }
    let files: Vec<PathBuf> = names.iter().map(|name| dir.join(name)).collect();
    match files.iter().find(|path| !path.exists()) {
        None if files.is_empty() => Err(index.error("weight_map is empty".to_owned())),
        None => Ok(files),
        Some(missing) => Err(LoadError::File {
            path: missing.clone(),
            reason: format!("is missing; {INDEX_FILE} lists it, so fetch it too"),
        }),
    }
}
