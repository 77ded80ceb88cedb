//! One GGUF file: its metadata, and its tensors by name.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::metadata::{MetadataValue, Reader};
use super::tensor_type::TensorType;
use crate::file_stamp::FileStamp;
use crate::weight_file::{FileRange, WeightFile};
use inflight_base::LoadError;

const MAGIC: &[u8] = b"GGUF";
const VERSIONS: std::ops::RangeInclusive<u32> = 2..=3;
const MAX_DIMENSIONS: u32 = 4;
const DEFAULT_ALIGNMENT: u64 = 32;
const MAX_ALIGNMENT: u64 = 1 << 20;
/// How much is read for the header, at first and at most: a file does not state the length of its header.
const FIRST_HEADER_BYTES: u64 = 1 << 22;
const MAX_HEADER_BYTES: u64 = 1 << 30;

/// An open file and its header.
pub struct GgufFile {
    pub path: PathBuf,
    pub metadata: HashMap<String, MetadataValue>,
    pub tensors: HashMap<String, TensorInfo>,
    file: WeightFile,
}

/// Type, shape and position of a tensor, checked against the file.
pub struct TensorInfo {
    /// Rows first; the file stores dimensions in reverse order.
    pub shape: Vec<usize>,
    pub type_number: u32,
    /// `None` if it cannot be read.
    pub tensor_type: Option<TensorType>,
    start: u64,
}

impl GgufFile {
    pub fn open(path: &Path) -> Result<Self, LoadError> {
        let file = WeightFile::open(path)?;
        let mut num_header_bytes = FIRST_HEADER_BYTES.min(file.num_bytes());
        let (metadata, tensors) = loop {
            let header = file.range(0..num_header_bytes).map(FileRange::to_vec);
            let header = header.transpose()?.unwrap_or_default();
            let mut reader = Reader::new(&header, file.num_bytes());
            match read_header(&mut reader) {
                Ok(header) => break header,
                Err(_) if reader.is_too_short() && num_header_bytes < MAX_HEADER_BYTES => {
                    num_header_bytes = (4 * num_header_bytes).min(file.num_bytes());
                }
                Err(reason) => {
                    let path = path.to_owned();
                    return Err(LoadError::File { path, reason });
                }
            }
        };
        Ok(Self {
            path: path.to_owned(),
            metadata,
            tensors,
            file,
        })
    }

    pub fn stamp(&self) -> &FileStamp {
        self.file.stamp()
    }

    pub fn num_bytes(&self) -> u64 {
        self.file.num_bytes()
    }

    /// Checks that everything read so far is what the file held when it was opened.
    pub fn check(&self) -> Result<(), LoadError> {
        self.file.check()
    }

    /// The byte range of a tensor; `None` if its type cannot be read.
    pub fn range(&self, info: &TensorInfo) -> Option<FileRange<'_>> {
        let len = info.tensor_type?.num_bytes(&info.shape)? as u64;
        self.file.range(info.start..info.start.checked_add(len)?)
    }

    /// Bytes of the header.
    pub fn bytes(&self, range: Range<u64>) -> Result<Vec<u8>, LoadError> {
        match self.file.range(range) {
            Some(range) => range.to_vec(),
            None => Err(self.error("is cut short; fetch it again".to_owned())),
        }
    }

    /// An error about the file.
    pub fn error(&self, reason: String) -> LoadError {
        LoadError::File {
            path: self.path.clone(),
            reason,
        }
    }
}

type Header = (HashMap<String, MetadataValue>, HashMap<String, TensorInfo>);

fn read_header(reader: &mut Reader<'_>) -> Result<Header, String> {
    if reader.take(4)? != MAGIC {
        return Err("is not a GGUF file".to_owned());
    }
    let version = reader.u32()?;
    if !VERSIONS.contains(&version) {
        let reason = match VERSIONS.contains(&version.swap_bytes()) {
            true => "is big-endian; only little-endian files are read".to_owned(),
            false => {
                format!("is of GGUF version {version}; 2 and 3 are read: convert the model again")
            }
        };
        return Err(reason);
    }
    let (num_tensors, num_keys) = (reader.u64()?, reader.u64()?);
    let metadata = reader.metadata(num_keys)?;
    let alignment = match metadata.get("general.alignment") {
        None => DEFAULT_ALIGNMENT,
        Some(&MetadataValue::Unsigned(alignment @ 1..=MAX_ALIGNMENT)) => alignment,
        Some(other) => {
            return Err(format!(
                "general.alignment: {other} is not a number from 1 to {MAX_ALIGNMENT}; the file is damaged"
            ));
        }
    };
    let mut tensors = HashMap::new();
    for _ in 0..num_tensors {
        let name = reader.name()?;
        let info = read_info(reader).map_err(|reason| format!("{reason} (tensor '{name}')"))?;
        match tensors.entry(name.to_owned()) {
            Entry::Vacant(vacant) => vacant.insert(info),
            Entry::Occupied(_) => {
                return Err(format!("has tensor '{name}' twice; it is damaged"));
            }
        };
    }
    let data_start = (reader.position() as u64).next_multiple_of(alignment);
    for (name, info) in &mut tensors {
        info.start = info.start.saturating_add(data_start);
        let Some(tensor_type) = info.tensor_type else {
            continue;
        };
        let Some(len) = tensor_type.num_bytes(&info.shape) else {
            return Err(format!(
                "has tensor '{name}' of {tensor_type:?} with shape {:?}, whose rows are not whole blocks of {}; it is \
                 damaged",
                info.shape,
                tensor_type.block_len()
            ));
        };
        if info.start.saturating_add(len as u64) > reader.num_file_bytes() {
            return Err(format!(
                "is cut short: tensor '{name}' has {len} bytes at byte {}, and the file has {}; fetch it again",
                info.start,
                reader.num_file_bytes()
            ));
        }
    }
    Ok((metadata, tensors))
}

/// Reads the header of a tensor; its `start` counts from the first tensor.
fn read_info(reader: &mut Reader<'_>) -> Result<TensorInfo, String> {
    let num_dimensions = reader.u32()?;
    if num_dimensions > MAX_DIMENSIONS {
        return Err(format!(
            "has a tensor of {num_dimensions} dimensions; it is damaged"
        ));
    }
    let mut shape = Vec::new();
    for _ in 0..num_dimensions {
        let size = reader.u64()?;
        let size = usize::try_from(size)
            .map_err(|_| format!("has a tensor {size} long; it is damaged"))?;
        shape.insert(0, size);
    }
    let type_number = reader.u32()?;
    Ok(TensorInfo {
        shape,
        type_number,
        tensor_type: TensorType::from_number(type_number),
        start: reader.u64()?,
    })
}
