//! The GGUF files of a folder as one checkpoint.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::blocks::{Kind, name_of, read_q6_k};
use super::file::{File, Info};
use super::metadata::Value;
use super::names::{gguf_name, is_turned};
use crate::base::LoadError;
use crate::device::cpu::{Dtype, QuantFormat, QuantisedRow, QuantisedRows};
use crate::runner::matrix::{Matrix, StoredCodes};
use crate::runner::stamp::Stamp;
use crate::runner::tensor::{Place, RowOrder, Tensor};
use crate::runner::weight_file::Bytes;

const EXTENSION: &str = "gguf";

/// The GGUF files of a folder, in order; none where it has none.
pub(in crate::runner) fn files(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut files: Vec<_> = entries
        .map(|entry| entry.path())
        .filter(|path| {
            path.extension()
                .is_some_and(|extension| extension == EXTENSION)
        })
        .collect();
    files.sort();
    files
}

/// All tensors of a checkpoint.
pub(in crate::runner) struct Gguf {
    pub(super) files: Vec<File>,
    /// Tensor name to file.
    by_name: HashMap<String, usize>,
    /// How the rows of queries and keys are ordered.
    row_order: RowOrder,
}

impl Gguf {
    /// Opens the files of a folder, which must be one file or all parts of one.
    pub(in crate::runner) fn open(paths: &[PathBuf]) -> Result<Self, LoadError> {
        check_parts(paths)?;
        let files = paths
            .iter()
            .map(|path| File::open(path))
            .collect::<Result<Vec<_>, _>>()?;
        if let Some(&Value::Unsigned(count)) = files[0].metadata.get("split.count")
            && count > 1
            && count != files.len() as u64
        {
            return Err(files[0].error(format!(
                "is one of {count} parts, and {} are there under names that end with -00001-of-{count:05}.gguf \
                 and so on; fetch all of them, and keep their names",
                files.len()
            )));
        }
        let mut by_name = HashMap::new();
        for (index, file) in files.iter().enumerate() {
            for name in file.tensors.keys() {
                if let Some(other) = by_name.insert(name.clone(), index) {
                    let path: &Path = &files[other].path;
                    let reason = format!("has tensor '{name}', and so has {}", path.display());
                    return Err(file.error(reason));
                }
            }
        }
        Ok(Self {
            files,
            by_name,
            row_order: RowOrder::Same,
        })
    }

    /// Of all files, in order.
    pub(in crate::runner) fn stamps(&self) -> Vec<&Stamp> {
        self.files.iter().map(File::stamp).collect()
    }

    /// Says how wide heads are: llama.cpp turns the rows of queries and keys of llamas inside of each.
    ///
    /// # Errors
    /// The files are of an architecture that is not supported.
    pub(in crate::runner) fn set_head_dim(&mut self, head_dim: usize) -> Result<(), LoadError> {
        if self.architecture()?.0 == "llama" {
            self.row_order = RowOrder::PairsTogether { head_dim };
        }
        Ok(())
    }

    /// Whether there is a tensor of this name (transformers').
    pub(in crate::runner) fn has(&self, name: &str) -> bool {
        gguf_name(name).is_some_and(|name| self.by_name.contains_key(&name))
    }

    /// Whether all that was read is what the files had when they were opened.
    pub(in crate::runner) fn check(&self) -> Result<(), LoadError> {
        self.files.iter().try_for_each(File::check)
    }

    /// Bytes of all files.
    pub(in crate::runner) fn num_bytes(&self) -> u64 {
        self.files.iter().map(File::num_bytes).sum()
    }

    /// A norm or a bias.
    pub(in crate::runner) fn vector(
        &self,
        name: &str,
        len: usize,
    ) -> Result<Tensor<'_>, LoadError> {
        self.find(name, &[len])?.vector()
    }

    /// The same under llama.cpp's name.
    pub(super) fn own_vector(&self, name: &str, len: usize) -> Result<Tensor<'_>, LoadError> {
        self.find_own(name, &[len])?.vector()
    }

    /// A module's weights, `[outputs, inputs]`.
    pub(in crate::runner) fn matrix(
        &self,
        module: &str,
        outputs: usize,
        inputs: usize,
    ) -> Result<Matrix<'_>, LoadError> {
        let found = self.find(&format!("{module}.weight"), &[outputs, inputs])?;
        if let Some(dtype) = found.kind.float() {
            return Ok(Matrix::Float(found.tensor(dtype)));
        }
        let place = found.place;
        match found.kind.format() {
            Some(format) => Ok(Matrix::Codes(place, Box::new(BlockRows { found, format }))),
            None => Ok(Matrix::Numbers {
                place,
                rows: outputs,
                columns: inputs,
                read: Box::new(move |row, out| read_q6_k(&found.row(row), out)),
            }),
        }
    }

    /// Whether there is a tensor of this name (llama.cpp's).
    pub(super) fn has_own(&self, name: &str) -> bool {
        self.by_name.contains_key(name)
    }

    /// Rows of the embedding; 0 where there is none.
    pub(super) fn num_tokens(&self) -> usize {
        const NAME: &str = "token_embd.weight";
        let file = self.by_name.get(NAME).map(|&index| &self.files[index]);
        file.and_then(|file| file.tensors[NAME].shape.first().copied())
            .unwrap_or(0)
    }

    /// A tensor of transformers' name.
    fn find(&self, name: &str, shape: &[usize]) -> Result<Found<'_>, LoadError> {
        let theirs = gguf_name(name).unwrap_or_else(|| name.to_owned());
        let row_order = match is_turned(name) {
            true => self.row_order,
            false => RowOrder::Same,
        };
        let found = self.find_own(&theirs, shape)?;
        Ok(Found { row_order, ..found })
    }

    /// A tensor of llama.cpp's name.
    fn find_own(&self, name: &str, shape: &[usize]) -> Result<Found<'_>, LoadError> {
        let Some((name, &index)) = self.by_name.get_key_value(name) else {
            return Err(Place {
                path: &self.files[0].path,
                name,
            }
            .error(format!(
                "is missing; the model's shape calls for it, with {shape:?}, but none of the {} tensors in {} \
                 files has this name",
                self.by_name.len(),
                self.files.len()
            )));
        };
        let file = &self.files[index];
        let place = Place {
            path: &file.path,
            name,
        };
        let info: &Info = &file.tensors[name];
        if info.shape != shape {
            return Err(place.error(format!(
                "has shape {:?}; the model's shape calls for {shape:?}",
                info.shape
            )));
        }
        let Some(kind) = info.kind else {
            return Err(place.error(format!(
                "is of type {}, which is not read; take a file of Q8_0, Q4_0, Q4_K_M or Q5_K_M, or of F16 \
                 (llama-quantize makes them)",
                name_of(info.type_number)
            )));
        };
        let Some(bytes) = file.bytes(info) else {
            return Err(place.error("lies outside its file".to_owned()));
        };
        Ok(Found {
            place,
            kind,
            shape: &info.shape,
            bytes,
            row_order: RowOrder::Same,
        })
    }
}

/// A tensor that is there.
#[derive(Clone, Copy)]
struct Found<'a> {
    place: Place<'a>,
    kind: Kind,
    shape: &'a [usize],
    bytes: Bytes<'a>,
    row_order: RowOrder,
}

impl<'a> Found<'a> {
    fn tensor(&self, dtype: Dtype) -> Tensor<'a> {
        Tensor::new(self.place, dtype, self.shape, self.bytes).with_row_order(self.row_order)
    }

    fn vector(&self) -> Result<Tensor<'a>, LoadError> {
        match self.kind.float() {
            Some(dtype) => Ok(self.tensor(dtype)),
            None => Err(self.place.error(format!(
                "is of type {:?}; norms and biases have to be F32, F16 or BF16",
                self.kind
            ))),
        }
    }

    fn columns(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// The bytes of a row.
    fn row(&self, index: usize) -> Vec<u8> {
        let len = self.kind.row_bytes(self.columns());
        let mut row = vec![0; len];
        self.bytes
            .read_at(self.row_order.stored(index) * len, &mut row);
        row
    }
}

/// A matrix whose codes are taken over.
struct BlockRows<'a> {
    found: Found<'a>,
    format: QuantFormat,
}

impl StoredCodes for BlockRows<'_> {
    fn read(&self) -> Result<(), LoadError> {
        Ok(())
    }
}

impl QuantisedRows for BlockRows<'_> {
    fn format(&self) -> QuantFormat {
        self.format
    }

    fn rows(&self) -> usize {
        self.found.shape[0]
    }

    fn columns(&self) -> usize {
        self.found.columns()
    }

    fn read_row(&self, index: usize, row: &mut QuantisedRow) {
        row.resize(self.format, self.columns());
        self.found.kind.read_codes(&self.found.row(index), row);
    }
}

/// One file, or `NAME-00001-of-0000N.gguf` to N.
fn check_parts(paths: &[PathBuf]) -> Result<(), LoadError> {
    let first = &paths[0];
    let fail = |path: &Path, reason: String| {
        let path = path.to_owned();
        Err(LoadError::File { path, reason })
    };
    let Some((prefix, count)) = part(first) else {
        return match paths {
            [_] => Ok(()),
            [_, other, ..] => fail(
                other,
                format!(
                    "and {} are both there; leave the one that is to be served in the folder",
                    first.display()
                ),
            ),
            [] => unreachable!("the caller has found one"),
        };
    };
    for no in 1..=count {
        let path = first.with_file_name(format!("{prefix}-{no:05}-of-{count:05}.{EXTENSION}"));
        match paths.get(no as usize - 1) {
            Some(there) if *there == path => {}
            _ if path.exists() => {
                return fail(
                    &paths[no as usize - 1],
                    "is not a part of the same model".to_owned(),
                );
            }
            _ => {
                let reason = format!(
                    "is missing; {} says that there are {count} parts",
                    first.display()
                );
                return fail(&path, reason);
            }
        }
    }
    match paths.get(count as usize) {
        Some(other) => fail(
            other,
            "is not a part of the same model; leave one model in the folder".to_owned(),
        ),
        None => Ok(()),
    }
}

/// What the name of a part begins with, and how many there are.
fn part(path: &Path) -> Option<(&str, u32)> {
    let number = |text: &str| {
        let is_number = text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
        is_number.then(|| text.parse::<u32>().ok()).flatten()
    };
    let (rest, count) = path.file_stem()?.to_str()?.rsplit_once("-of-")?;
    let (prefix, no) = rest.rsplit_once('-')?;
    number(no)?;
    Some((prefix, number(count)?))
}
