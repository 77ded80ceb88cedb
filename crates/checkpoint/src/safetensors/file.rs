//! One safetensors file.

use std::path::Path;

use safetensors::tensor::{self, Metadata};

use crate::file_stamp::FileStamp;
use crate::row_order::RowOrder;
use crate::tensor::{Tensor, TensorLocation};
use crate::weight_file::{FileRange, WeightFile};
use inflight_base::LoadError;
use inflight_numbers::Dtype;

/// Bytes of the length field in front of a header.
const HEADER_LENGTH_BYTES: u64 = 8;
/// The longest header that is read: the limit of the `safetensors` crate.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// An open file and its header.
pub struct SafetensorsFile {
    file: WeightFile,
    metadata: Metadata,
    /// Where the tensors' bytes begin: offsets in the header count from here.
    data_start: u64,
}

impl SafetensorsFile {
    /// Opens a file and reads its header. `remedy` is the advice for a file that is cut short or damaged.
    ///
    /// # Errors
    /// The file cannot be read, or its tensors do not fill it exactly.
    pub fn open(path: &Path, remedy: &str) -> Result<Self, LoadError> {
        let file = WeightFile::open(path)?;
        match read_header(&file)? {
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

    /// Checks that everything read so far is what the file held when it was opened.
    ///
    /// # Errors
    /// It has been cut short or written to.
    pub fn check(&self) -> Result<(), LoadError> {
        self.file.check()
    }

    /// The header's metadata under a key.
    pub fn metadata(&self, key: &str) -> Option<&str> {
        let metadata = self.metadata.metadata().as_ref()?;
        metadata.get(key).map(String::as_str)
    }

    /// The tensor of this name.
    ///
    /// # Errors
    /// There is none, or it is not inside the file.
    pub fn tensor<'a>(&'a self, name: &'a str) -> Result<StoredTensor<'a>, LoadError> {
        let location = TensorLocation {
            path: self.file.path(),
            name,
        };
        let Some(info) = self.metadata.info(name) else {
            return Err(location.error("is missing".to_owned()));
        };
        let (start, end) = info.data_offsets;
        let [start, end] = [start, end].map(|offset| self.data_start.saturating_add(offset as u64));
        let Some(bytes) = self.file.range(start..end) else {
            return Err(location.error("lies outside its file".to_owned()));
        };
        Ok(StoredTensor {
            location,
            dtype: info.dtype,
            shape: &info.shape,
            bytes,
        })
    }

    pub(super) fn path(&self) -> &Path {
        self.file.path()
    }

    pub(super) fn stamp(&self) -> &FileStamp {
        self.file.stamp()
    }

    pub(super) fn num_bytes(&self) -> u64 {
        self.file.num_bytes()
    }

    /// The names of its tensors.
    pub fn tensor_names(&self) -> impl Iterator<Item = String> {
        self.metadata.offset_keys().into_iter()
    }
}

/// A tensor of any element type in its file. Its length has been checked against its shape.
#[derive(Clone, Copy)]
pub struct StoredTensor<'a> {
    /// File and name.
    pub location: TensorLocation<'a>,
    /// The element type.
    pub dtype: tensor::Dtype,
    /// Its dimensions, rows first.
    pub shape: &'a [usize],
    /// Its elements, little-endian and row-major.
    pub bytes: FileRange<'a>,
}

impl<'a> StoredTensor<'a> {
    /// The same as a float tensor.
    pub fn to_float(self) -> Result<Tensor<'a>, LoadError> {
        let dtype = match self.dtype {
            tensor::Dtype::BF16 => Dtype::Bf16,
            tensor::Dtype::F16 => Dtype::F16,
            tensor::Dtype::F32 => Dtype::F32,
            other => {
                return Err(self.location.error(format!(
                    "is of type {other:?}; BF16, F16 and F32 are supported: convert the checkpoint"
                )));
            }
        };
        let Self {
            location,
            shape,
            bytes,
            ..
        } = self;
        Ok(Tensor::new(location, dtype, shape, bytes, RowOrder::Same))
    }

    /// Its elements, if they are integers of 64 bits.
    pub fn to_integers(self) -> Result<Vec<i64>, LoadError> {
        if self.dtype != tensor::Dtype::I64 {
            let dtype = self.dtype;
            let reason = format!("is of type {dtype:?}, and I64 is needed");
            return Err(self.location.error(reason));
        }
        let bytes = self.bytes.to_vec()?;
        let (elements, _) = bytes.as_chunks();
        Ok(elements.iter().map(|it| i64::from_le_bytes(*it)).collect())
    }

    /// The bytes of one of several parts of equal length.
    ///
    /// # Panics
    /// There is no such part.
    pub fn one_of(&self, num_parts: usize, index: usize) -> FileRange<'a> {
        let len = self.bytes.len() / num_parts;
        self.bytes.part(index * len..(index + 1) * len)
    }

    /// Itself, if it has this shape.
    pub fn of_shape(self, shape: &[usize]) -> Result<Self, LoadError> {
        match self.shape == shape {
            true => Ok(self),
            false => Err(self.location.error(format!(
                "has shape {:?}; config.json calls for {shape:?}",
                self.shape
            ))),
        }
    }
}

/// The length of a file's header and its contents, or what is wrong with it: the tensors must fill the rest of the
/// file.
fn read_header(file: &WeightFile) -> Result<Result<(u64, Metadata), String>, LoadError> {
    let Some(length) = file.range(0..HEADER_LENGTH_BYTES) else {
        return Ok(Err("it has no header".to_owned()));
    };
    let length = length.to_vec()?;
    let length = u64::from_le_bytes(*length.first_chunk().expect("as many as were asked for"));
    let end = HEADER_LENGTH_BYTES.saturating_add(length);
    let header = match length <= MAX_HEADER_BYTES {
        true => file.range(HEADER_LENGTH_BYTES..end),
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
