//! The tensors of a checkpoint: one or many safetensors files behind one name space.
//!
//! The files are not trusted: offsets and sizes are checked against the file's real length by the
//! `safetensors` crate before anything is read, so that no header makes us take memory for a lie.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use safetensors::tensor::{self, Metadata};
use serde_json::Value;

use super::json_file::JsonFile;
use super::stamp::Stamp;
use super::tensor::{Place, Tensor};
use super::weight_file::{Bytes, WeightFile};
use crate::base::LoadError;
use crate::device::cpu::Dtype;

const SINGLE_FILE: &str = "model.safetensors";
const INDEX_FILE: &str = "model.safetensors.index.json";
/// The length field before a safetensors header.
const HEADER_LENGTH_BYTES: u64 = 8;
/// The longest header that is read: as in the `safetensors` crate.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// All tensors of a checkpoint folder.
pub(super) struct Tensors {
    dir: PathBuf,
    files: Vec<TensorFile>,
    /// Tensor name to file.
    by_name: HashMap<String, usize>,
}

impl Tensors {
    /// Whether a folder has safetensors files, or an index of some.
    pub(super) fn are_in(dir: &Path) -> bool {
        let mut entries = fs::read_dir(dir).into_iter().flatten().flatten();
        dir.join(INDEX_FILE).exists() || entries.any(|entry| is_safetensors(&entry.path()))
    }

    /// Opens `model.safetensors`, or else the files that the index lists, or else every
    /// `*.safetensors` of the folder.
    pub(super) fn open(dir: &Path) -> Result<Self, LoadError> {
        let files = weight_files(dir)?
            .iter()
            .map(|path| TensorFile::open(path, "fetch it again"))
            .collect::<Result<Vec<_>, _>>()?;
        let mut by_name = HashMap::new();
        for (index, file) in files.iter().enumerate() {
            for name in file.metadata.offset_keys() {
                if let Some(other) = by_name.insert(name.clone(), index) {
                    let reason = format!(
                        "is in {} as well; leave one of the two files in the folder",
                        files[other].file.path().display()
                    );
                    return Err(tensor_error(file.file.path(), &name, reason));
                }
            }
        }
        Ok(Self {
            dir: dir.to_owned(),
            files,
            by_name,
        })
    }

    /// The tensor of this name, of whatever type and shape it is.
    pub(super) fn find(&self, name: &str) -> Result<Option<Stored<'_>>, LoadError> {
        match self.by_name.get_key_value(name) {
            Some((name, &index)) => self.files[index].stored(name).map(Some),
            None => Ok(None),
        }
    }

    /// The tensor of this name, which must be of this shape.
    pub(super) fn get(&self, name: &str, shape: &[usize]) -> Result<Stored<'_>, LoadError> {
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

    /// Whether two tensors are the same, or the second one is not there.
    pub(super) fn are_equal(&self, first: &str, second: &str) -> Result<bool, LoadError> {
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

    /// Of all files, in a fixed order.
    pub(super) fn stamps(&self) -> Vec<&Stamp> {
        self.files.iter().map(|file| file.file.stamp()).collect()
    }

    /// Whether all that was read is what the files had when they were opened.
    pub(super) fn check(&self) -> Result<(), LoadError> {
        self.files.iter().try_for_each(TensorFile::check)
    }

    /// Bytes of all files.
    pub(super) fn num_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.file.num_bytes()).sum()
    }
}

/// A tensor of any type where it lies in its file, its size checked against its shape.
#[derive(Clone, Copy)]
pub(super) struct Stored<'a> {
    pub(super) place: Place<'a>,
    pub(super) dtype: tensor::Dtype,
    pub(super) shape: &'a [usize],
    /// Little-endian, row-major.
    pub(super) bytes: Bytes<'a>,
}

impl<'a> Stored<'a> {
    /// As values of floating point.
    pub(super) fn to_float(self) -> Result<Tensor<'a>, LoadError> {
        let dtype = match self.dtype {
            tensor::Dtype::BF16 => Dtype::Bf16,
            tensor::Dtype::F16 => Dtype::F16,
            tensor::Dtype::F32 => Dtype::F32,
            other => {
                return Err(self.place.error(format!(
                    "is of type {other:?}; BF16, F16 and F32 are supported: convert the checkpoint"
                )));
            }
        };
        Ok(Tensor::new(self.place, dtype, self.shape, self.bytes))
    }

    /// Itself, if it is of this shape.
    pub(super) fn of_shape(self, shape: &[usize]) -> Result<Self, LoadError> {
        match self.shape == shape {
            true => Ok(self),
            false => Err(self.place.error(format!(
                "has shape {:?}; config.json calls for {shape:?}",
                self.shape
            ))),
        }
    }
}

/// One safetensors file.
pub(super) struct TensorFile {
    file: WeightFile,
    metadata: Metadata,
    /// Where the tensors' bytes begin: the header's offsets count from here.
    data_start: u64,
}

impl TensorFile {
    /// Opens a file and reads its header; `remedy` is what helps where it is cut short or damaged.
    pub(super) fn open(path: &Path, remedy: &str) -> Result<Self, LoadError> {
        let file = WeightFile::open(path)?;
        match header(&file)? {
            Ok((num_header_bytes, metadata)) => Ok(Self {
                data_start: HEADER_LENGTH_BYTES + num_header_bytes,
                file,
                metadata,
            }),
            Err(reason) => Err(LoadError::File {
                path: path.to_owned(),
                reason: format!(
                    "is not a whole safetensors file: {reason}; it has {} bytes, {remedy}",
                    file.num_bytes()
                ),
            }),
        }
    }

    /// Whether all that was read is what the file had when it was opened.
    pub(super) fn check(&self) -> Result<(), LoadError> {
        self.file.check()
    }

    /// What its header says under a name, besides the tensors.
    pub(super) fn note(&self, name: &str) -> Option<&str> {
        let notes = self.metadata.metadata().as_ref()?;
        notes.get(name).map(String::as_str)
    }

    /// The tensor of this name.
    pub(super) fn stored<'a>(&'a self, name: &'a str) -> Result<Stored<'a>, LoadError> {
        let place = Place {
            path: self.file.path(),
            name,
        };
        let Some(info) = self.metadata.info(name) else {
            return Err(place.error("is missing".to_owned()));
        };
        let (start, end) = info.data_offsets;
        let [start, end] = [start, end].map(|offset| self.data_start.saturating_add(offset as u64));
        let Some(bytes) = self.file.bytes(start..end) else {
            return Err(place.error("lies outside its file".to_owned()));
        };
        Ok(Stored {
            place,
            dtype: info.dtype,
            shape: &info.shape,
            bytes,
        })
    }
}

/// The length of a file's header and what it says, or what is wrong with it: the tensors must fill the rest of the file.
fn header(file: &WeightFile) -> Result<Result<(u64, Metadata), String>, LoadError> {
    let Some(length) = file.bytes(0..HEADER_LENGTH_BYTES) else {
        return Ok(Err("it has no header".to_owned()));
    };
    let length = length.to_vec()?;
    let length = u64::from_le_bytes(*length.first_chunk().expect("as many as were asked for"));
    let end = HEADER_LENGTH_BYTES.saturating_add(length);
    let header = match length <= MAX_HEADER_BYTES {
        true => file.bytes(HEADER_LENGTH_BYTES..end),
        false => None,
    };
    let Some(header) = header else {
        return Ok(Err(format!("its header would be {length} bytes long")));
    };
    let metadata: Metadata = match serde_json::from_slice(&header.to_vec()?) {
        Ok(metadata) => metadata,
        Err(error) => return Ok(Err(format!("its header: {error}"))),
    };
    let num_data_bytes = metadata.data_len() as u64;
    let room = file.num_bytes() - end;
    Ok(match num_data_bytes == room {
        true => Ok((length, metadata)),
        false => Err(format!(
            "its tensors take {num_data_bytes} bytes, and after its header there are {room}"
        )),
    })
}

fn tensor_error(path: &Path, name: &str, reason: String) -> LoadError {
    Place { path, name }.error(reason)
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
        if is_safetensors(&path) {
            files.push(path);
        }
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
