//! The tensors of a checkpoint: one or many memory-mapped safetensors files behind one name space.
//!
//! The files are not trusted: offsets and sizes are checked against the file's real length by the
//! `safetensors` crate before anything is read, so that no header makes us take memory for a lie.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use safetensors::tensor::{self, Metadata, SafeTensors};
use serde_json::Value;

use super::json_file::JsonFile;
use super::mapping::Mapping;
use crate::base::LoadError;
use crate::device::cpu::{Dtype, RawMatrix};

const SINGLE_FILE: &str = "model.safetensors";
const INDEX_FILE: &str = "model.safetensors.index.json";
/// The length field before a safetensors header.
const HEADER_LENGTH_BYTES: usize = 8;

/// All tensors of a checkpoint folder, mapped.
pub(super) struct Tensors {
    dir: PathBuf,
    files: Vec<TensorFile>,
    /// Tensor name to file.
    by_name: HashMap<String, usize>,
}

impl Tensors {
    /// Maps `model.safetensors`, or else the files that the index lists, or else every
    /// `*.safetensors` of the folder.
    pub(super) fn open(dir: &Path) -> Result<Self, LoadError> {
        let files = weight_files(dir)?
            .iter()
            .map(|path| TensorFile::open(path))
            .collect::<Result<Vec<_>, _>>()?;
        let mut by_name = HashMap::new();
        for (index, file) in files.iter().enumerate() {
            for name in file.metadata.offset_keys() {
                if let Some(other) = by_name.insert(name.clone(), index) {
                    let reason = format!(
                        "is in {} as well; leave one of the two files in the folder",
                        files[other].path.display()
                    );
                    return Err(tensor_error(&file.path, &name, reason));
                }
            }
        }
        Ok(Self {
            dir: dir.to_owned(),
            files,
            by_name,
        })
    }

    /// The tensor of this name, which must be of floating point and of this shape.
    pub(super) fn get(&self, name: &str, shape: &[usize]) -> Result<Tensor<'_>, LoadError> {
        let Some((name, &index)) = self.by_name.get_key_value(name) else {
            let reason = format!(
                "is missing; config.json calls for it, with shape {shape:?}, but none of the {} \
                 tensors in {} files has this name",
                self.by_name.len(),
                self.files.len()
            );
            return Err(tensor_error(&self.dir, name, reason));
        };
        self.files[index].tensor(name, shape)
    }

    /// Bytes of all files.
    pub(super) fn num_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.map.len() as u64).sum()
    }
}

/// A tensor's values where they lie in the mapped file, little-endian, row-major.
#[derive(Clone, Copy)]
pub(super) struct Tensor<'a> {
    path: &'a Path,
    name: &'a str,
    dtype: Dtype,
    shape: &'a [usize],
    bytes: &'a [u8],
}

impl<'a> Tensor<'a> {
    /// The values as a matrix: the first dimension is its rows, one dimension is one row.
    pub(super) fn matrix(&self) -> RawMatrix<'a> {
        let columns = self.shape.last().copied().unwrap_or(1);
        let rows = self.shape.iter().rev().skip(1).product();
        RawMatrix::new(self.dtype, rows, columns, self.bytes)
    }

    /// All values as f32, checked: what is added to or multiplied with a row.
    pub(super) fn to_f32(self) -> Result<Vec<f32>, LoadError> {
        let mut values = vec![0.0; self.bytes.len() / self.dtype.size()];
        RawMatrix::new(self.dtype, 1, values.len(), self.bytes).row_to_f32(0, &mut values);
        match values.iter().position(|value| !value.is_finite()) {
            None => Ok(values),
            Some(index) => Err(self.not_finite(index)),
        }
    }

    /// The error of a weight that is NaN, infinite, or too large for bf16.
    pub(super) fn not_finite(&self, row: usize) -> LoadError {
        let reason = format!(
            "row {row} has a value that is NaN, infinite, or too large for bf16; the file is damaged \
             or the training diverged"
        );
        tensor_error(self.path, self.name, reason)
    }
}

/// One mapped safetensors file.
struct TensorFile {
    path: PathBuf,
    map: Mapping,
    metadata: Metadata,
    /// Where the tensors' bytes begin: the header's offsets count from here.
    data_start: usize,
}

impl TensorFile {
    fn open(path: &Path) -> Result<Self, LoadError> {
        let map = Mapping::open(path)?;
        let (header_bytes, metadata) =
            SafeTensors::read_metadata(&map).map_err(|error| LoadError::File {
                path: path.to_owned(),
                reason: format!(
                    "is not a whole safetensors file: {error}; it has {} bytes, fetch it again",
                    map.len()
                ),
            })?;
        Ok(Self {
            path: path.to_owned(),
            data_start: HEADER_LENGTH_BYTES + header_bytes,
            map,
            metadata,
        })
    }

    fn tensor<'a>(&'a self, name: &'a str, shape: &[usize]) -> Result<Tensor<'a>, LoadError> {
        let fail = |reason| Err(tensor_error(&self.path, name, reason));
        let Some(info) = self.metadata.info(name) else {
            return fail("is missing".to_owned());
        };
        let dtype = match info.dtype {
            tensor::Dtype::BF16 => Dtype::Bf16,
            tensor::Dtype::F16 => Dtype::F16,
            tensor::Dtype::F32 => Dtype::F32,
            other => {
                return fail(format!(
                    "is of type {other:?}; BF16, F16 and F32 are supported: convert the checkpoint"
                ));
            }
        };
        if info.shape != shape {
            return fail(format!(
                "has shape {:?}; config.json calls for {shape:?}",
                info.shape
            ));
        }
        let (start, end) = info.data_offsets;
        let Some(bytes) = self.map[self.data_start..].get(start..end) else {
            return fail("lies outside its file".to_owned());
        };
        Ok(Tensor {
            path: &self.path,
            name,
            dtype,
            shape: &info.shape,
            bytes,
        })
    }
}

fn tensor_error(path: &Path, name: &str, reason: String) -> LoadError {
    LoadError::Tensor {
        path: path.to_owned(),
        name: name.to_owned(),
        reason,
    }
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
    for entry in entries {
        let path = entry
            .map_err(|error| fail(format!("cannot be read: {error}")))?
            .path();
        if path
            .extension()
            .is_some_and(|extension| extension == "safetensors")
        {
            files.push(path);
        }
    }
    if files.is_empty() {
        return Err(fail(format!(
            "has neither {SINGLE_FILE} nor {INDEX_FILE} nor any *.safetensors; a checkpoint in \
             another format has to be converted to safetensors"
        )));
    }
    files.sort();
    Ok(files)
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
