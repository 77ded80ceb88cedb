//! The GGUF files of a checkpoint folder in one name space.

use std::collections::HashMap;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::blocks::{read_codes, read_weights};
use super::file::{GgufFile, TensorInfo};
use super::metadata::{ArrayPlace, MetadataValue};
use super::tensor_type::{GROUP, TensorType, name_of};
use crate::file_stamp::FileStamp;
use crate::matrix::Matrix;
use crate::row_order::{RowOrder, part_of};
use crate::safetensors::SafetensorsFolder;
use crate::stored_rows::StoredQuantisedRows;
use crate::tensor::{Tensor, TensorLocation};
use crate::weight_file::FileRange;
use inflight_base::LoadError;
use inflight_numbers::{Dtype, QuantFormat, QuantisedRow, QuantisedRows, QuantisedShape};

const EXTENSION: &str = "gguf";

/// Parts of the names of files that are published beside a model and are none: image encoders and statistics of
/// quantisation.
const OTHER_NAMES: [&str; 2] = ["mmproj", "imatrix"];
/// The same by `general.type`.
const OTHER_TYPES: [&str; 4] = ["mmproj", "imatrix", "adapter", "vocab"];

/// The GGUF files of a folder, sorted by name, without those that are [published beside a model](OTHER_NAMES).
fn gguf_files(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut files: Vec<_> = entries
        .map(|entry| entry.path())
        .filter(|path| {
            path.extension()
                .is_some_and(|extension| extension.eq_ignore_ascii_case(EXTENSION))
        })
        .collect();
    files.sort();
    let models: Vec<_> = files.iter().filter(|path| !is_other(path)).collect();
    match models.is_empty() || models.len() == files.len() {
        true => files,
        false => models.into_iter().cloned().collect(),
    }
}

/// Whether a file's name says that it is published beside a model.
fn is_other(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default();
    let name = name.to_string_lossy().to_ascii_lowercase();
    OTHER_NAMES.iter().any(|other| name.contains(other))
}

/// Whether a file says of itself that it is no model.
fn says_other(path: &Path) -> bool {
    let Ok(file) = GgufFile::open(path) else {
        return false;
    };
    let is = |key, values: &[&str]| match file.metadata.get(key) {
        Some(MetadataValue::Text(text)) => values.contains(&&text[..]),
        _ => false,
    };
    is("general.type", &OTHER_TYPES) || is("general.architecture", &["clip"])
}

/// All tensors of a checkpoint, and the metadata of its first file. Names are llama.cpp's.
pub struct GgufFolder {
    files: Vec<GgufFile>,
    /// Tensor name to the index of its file.
    by_name: HashMap<String, usize>,
}

impl GgufFolder {
    /// Opens the files of a folder: one, or all parts of one model.
    pub fn open(paths: &[PathBuf]) -> Result<Self, LoadError> {
        check_parts(paths)?;
        let files = paths
            .iter()
            .map(|path| GgufFile::open(path))
            .collect::<Result<Vec<_>, _>>()?;
        if let Some(&MetadataValue::Unsigned(count)) = files[0].metadata.get("split.count")
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
        Ok(Self { files, by_name })
    }

    /// Opens the GGUF files of a folder; `None` if it has none, or safetensors, which are used instead.
    ///
    /// # Errors
    /// See [`GgufFolder::open`].
    pub fn in_folder(dir: &Path) -> Result<Option<Self>, LoadError> {
        let mut paths = gguf_files(dir);
        if paths.len() > 1 && check_parts(&paths).is_err() {
            paths.retain(|path| !says_other(path));
        }
        match paths.is_empty() || SafetensorsFolder::is_in(dir) {
            true => Ok(None),
            false => Self::open(&paths).map(Some),
        }
    }

    /// The file whose metadata describe the model: the first.
    pub fn path(&self) -> &Path {
        &self.files[0].path
    }

    /// The metadata under a key.
    pub fn metadata(&self, key: &str) -> Option<&MetadataValue> {
        self.files[0].metadata.get(key)
    }

    /// The strings of an array; `None` if there is no array of strings under this key.
    ///
    /// # Errors
    /// They cannot be read.
    pub fn texts(&self, key: &str) -> Result<Option<Vec<String>>, LoadError> {
        let array = self.array(key)?;
        Ok(array.and_then(|(place, bytes)| place.texts(&bytes)))
    }

    /// The numbers of an array; `None` if there is no array of numbers under this key.
    ///
    /// # Errors
    /// They cannot be read.
    pub fn numbers(&self, key: &str) -> Result<Option<Vec<f64>>, LoadError> {
        let array = self.array(key)?;
        Ok(array.and_then(|(place, bytes)| place.numbers(&bytes)))
    }

    /// All keys of the metadata.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.files[0].metadata.keys().map(String::as_str)
    }

    fn array(&self, key: &str) -> Result<Option<(&ArrayPlace, Vec<u8>)>, LoadError> {
        let Some(MetadataValue::Array(place)) = self.metadata(key) else {
            return Ok(None);
        };
        let bytes = self.files[0].bytes(place.bytes())?;
        Ok(Some((place, bytes)))
    }

    /// An error about the metadata.
    pub fn error(&self, reason: String) -> LoadError {
        self.files[0].error(reason)
    }

    /// The dimensions of a tensor, rows first; `None` if there is none of this name.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        let file = &self.files[*self.by_name.get(name)?];
        Some(&file.tensors.get(name)?.shape)
    }

    /// A norm or a bias of `len` elements.
    ///
    /// # Errors
    /// There is none of this name, or it has another shape or a type that is not floating point.
    pub fn vector(
        &self,
        name: &str,
        len: usize,
        row_order: RowOrder,
    ) -> Result<Tensor<'_>, LoadError> {
        self.floats(name, &[len], row_order)
    }

    /// Norms or biases in one tensor, or other floats of any shape.
    ///
    /// # Errors
    /// As [`GgufFolder::vector`].
    pub fn floats_of_shape(&self, name: &str, shape: &[usize]) -> Result<Tensor<'_>, LoadError> {
        self.floats(name, shape, RowOrder::Same)
    }

    fn floats(
        &self,
        name: &str,
        shape: &[usize],
        row_order: RowOrder,
    ) -> Result<Tensor<'_>, LoadError> {
        let tensor = self.find(name, shape, row_order)?;
        match tensor.tensor_type.float() {
            Some(dtype) => Ok(tensor.to_float(dtype)),
            None => Err(tensor.location.error(format!(
                "is of type {:?}; norms and biases must be F32, F16 or BF16",
                tensor.tensor_type
            ))),
        }
    }

    /// A matrix of weights, `[outputs, inputs]`, or several in one tensor, `[num_matrices, outputs, inputs]`.
    pub fn matrix(
        &self,
        name: &str,
        shape: &[usize],
        row_order: RowOrder,
    ) -> Result<Matrix<'_>, LoadError> {
        let tensor = self.find(name, shape, row_order)?;
        if let Some(dtype) = tensor.tensor_type.float() {
            return Ok(Matrix::Float(tensor.to_float(dtype)));
        }
        let location = tensor.location;
        match tensor.tensor_type.format() {
            Some(format) => {
                let rows = BlockRows {
                    tensor,
                    format,
                    rows: 0..tensor.rows(),
                    columns: 0..tensor.columns(),
                };
                Ok(Matrix::Quantised(location, Box::new(rows)))
            }
            None => Ok(Matrix::Dequantised {
                location,
                rows: tensor.rows(),
                columns: tensor.columns(),
                read: Arc::new(move |row: usize, columns: Range<usize>, out: &mut [f32]| {
                    let blocks = tensor.blocks(&columns);
                    let mut weights = vec![0.0; blocks.len()];
                    let bytes = tensor.row(row, &blocks);
                    read_weights(tensor.tensor_type, &bytes, &mut weights);
                    let first = columns.start - blocks.start;
                    out.copy_from_slice(&weights[first..][..columns.len()]);
                }),
            }),
        }
    }

    /// The stamps of all files, in order.
    pub fn stamps(&self) -> Vec<&FileStamp> {
        self.files.iter().map(GgufFile::stamp).collect()
    }

    /// Checks that everything read so far is what the files held when they were opened.
    pub fn check(&self) -> Result<(), LoadError> {
        self.files.iter().try_for_each(GgufFile::check)
    }

    /// Bytes of all files.
    pub fn num_bytes(&self) -> u64 {
        self.files.iter().map(GgufFile::num_bytes).sum()
    }

    fn find(
        &self,
        name: &str,
        shape: &[usize],
        row_order: RowOrder,
    ) -> Result<GgufTensor<'_>, LoadError> {
        let Some((name, &index)) = self.by_name.get_key_value(name) else {
            return Err(TensorLocation {
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
        let location = TensorLocation {
            path: &file.path,
            name,
        };
        let info: &TensorInfo = &file.tensors[name];
        // A matrix of one row may be stored as a vector.
        let is_vector = matches!(shape, [1, len] if info.shape == [*len]);
        if info.shape != shape && !is_vector {
            return Err(location.error(format!(
                "has shape {:?}; the model's shape calls for {shape:?}",
                info.shape
            )));
        }
        let Some(tensor_type) = info.tensor_type else {
            return Err(location.error(format!(
                "is of type {}, which is not supported; take a file of Q8_0, Q4_0, Q4_K_M or Q5_K_M, or of F16 \
                 (llama-quantize makes them)",
                name_of(info.type_number)
            )));
        };
        let Some(bytes) = file.range(info) else {
            return Err(location.error("lies outside its file".to_owned()));
        };
        Ok(GgufTensor {
            location,
            tensor_type,
            shape: &info.shape,
            bytes,
            row_order,
        })
    }
}

/// A tensor of a readable type, its shape checked.
#[derive(Clone, Copy)]
struct GgufTensor<'a> {
    location: TensorLocation<'a>,
    tensor_type: TensorType,
    shape: &'a [usize],
    bytes: FileRange<'a>,
    row_order: RowOrder,
}

impl<'a> GgufTensor<'a> {
    fn to_float(self, dtype: Dtype) -> Tensor<'a> {
        Tensor::new(self.location, dtype, self.shape, self.bytes, self.row_order)
    }

    fn columns(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Rows of all matrices of the tensor.
    fn rows(&self) -> usize {
        self.shape.iter().rev().skip(1).product()
    }

    /// The columns of the blocks that these are in.
    fn blocks(&self, columns: &Range<usize>) -> Range<usize> {
        let len = self.tensor_type.block_len();
        columns.start / len * len..columns.end.next_multiple_of(len)
    }

    /// The bytes of a row, or of some of its blocks.
    fn row(&self, index: usize, columns: &Range<usize>) -> Vec<u8> {
        let row_bytes = self.tensor_type.row_bytes(self.columns());
        let first = self.tensor_type.row_bytes(columns.start);
        let mut row = vec![0; self.tensor_type.row_bytes(columns.len())];
        let stored = self.row_order.stored_row(index);
        self.bytes.read_at(stored * row_bytes + first, &mut row);
        row
    }
}

/// Some columns of some rows of a matrix whose codes the kernels compute with.
struct BlockRows<'a> {
    tensor: GgufTensor<'a>,
    format: QuantFormat,
    rows: Range<usize>,
    columns: Range<usize>,
}

impl<'a> StoredQuantisedRows<'a> for BlockRows<'a> {
    fn preload(&self) -> Result<(), LoadError> {
        Ok(())
    }

    fn part(
        &self,
        rows: Range<usize>,
        columns: Range<usize>,
    ) -> Box<dyn StoredQuantisedRows<'a> + 'a> {
        Box::new(Self {
            rows: part_of(&self.rows, rows),
            columns: part_of(&self.columns, columns),
            ..*self
        })
    }
}

impl QuantisedRows for BlockRows<'_> {
    fn shape(&self) -> QuantisedShape {
        QuantisedShape {
            format: self.format,
            rows: self.rows.len(),
            columns: self.columns.len(),
        }
    }

    fn are_twice_e2m1(&self) -> bool {
        self.tensor.tensor_type == TensorType::MXFP4
    }

    fn read_row(&self, index: usize, row: &mut QuantisedRow) {
        let Self {
            tensor,
            format,
            columns,
            ..
        } = self;
        let blocks = tensor.blocks(columns);
        let bytes = tensor.row(self.rows.start + index, &blocks);
        row.resize(*format, blocks.len());
        read_codes(tensor.tensor_type, &bytes, row);
        // The last block may have columns of the next rank, and the first block columns of the previous rank.
        let first = columns.start - blocks.start;
        row.codes.drain(..first);
        row.codes.truncate(columns.len());
        for groups in [&mut row.scales, &mut row.offsets] {
            groups.drain(..groups.len().min(first / GROUP));
            groups.truncate(columns.len().div_ceil(GROUP));
        }
    }
}

/// Checks that the files are one model: a single file, or `NAME-00001-of-0000N.gguf` to N.
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
            [] => unreachable!("the caller has found a file"),
        };
    };
    for no in 1..=count {
        let extension = first.extension().unwrap_or_default().to_string_lossy();
        let path = first.with_file_name(format!("{prefix}-{no:05}-of-{count:05}.{extension}"));
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

/// The prefix of a part's file name, and the number of parts.
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
