//! One GGUF file: its metadata, and where its tensors lie.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::path::{Path, PathBuf};

use super::blocks::Kind;
use super::metadata::{Reader, Value};
use crate::base::LoadError;
use crate::runner::stamp::Stamp;
use crate::runner::weight_file::{Bytes, WeightFile};

const MAGIC: &[u8] = b"GGUF";
const VERSIONS: std::ops::RangeInclusive<u32> = 2..=3;
const MAX_DIMENSIONS: u32 = 4;
const DEFAULT_ALIGNMENT: u64 = 32;
const MAX_ALIGNMENT: u64 = 1 << 20;
/// What is read of a file before its tensors, at first and at most: it does not say how long that is.
const FIRST_HEADER_BYTES: u64 = 1 << 22;
const MAX_HEADER_BYTES: u64 = 1 << 30;

/// A file.
pub(super) struct File {
    pub(super) path: PathBuf,
    pub(super) metadata: HashMap<String, Value>,
    pub(super) tensors: HashMap<String, Info>,
    file: WeightFile,
}

/// What a file says of a tensor, and that was found to be so.
pub(super) struct Info {
    /// Rows first, as everywhere here; the file has it the other way round.
    pub(super) shape: Vec<usize>,
    /// The type's number, and what it is, if it is known.
    pub(super) type_number: u32,
    pub(super) kind: Option<Kind>,
    start: u64,
}

impl File {
    pub(super) fn open(path: &Path) -> Result<Self, LoadError> {
        let file = WeightFile::open(path)?;
        let mut num_header_bytes = FIRST_HEADER_BYTES.min(file.num_bytes());
        let (metadata, tensors) = loop {
            let header = file.bytes(0..num_header_bytes).map(Bytes::to_vec);
            let header = header.transpose()?.unwrap_or_default();
            let mut reader = Reader::new(&header, file.num_bytes());
            match read(&mut reader) {
                Ok(contents) => break contents,
                Err(_) if reader.wants_more() && num_header_bytes < MAX_HEADER_BYTES => {
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

    /// What tells it from another.
    pub(super) fn stamp(&self) -> &Stamp {
        self.file.stamp()
    }

    /// Bytes of the file.
    pub(super) fn num_bytes(&self) -> u64 {
        self.file.num_bytes()
    }

    /// Whether all that was read is what the file had when it was opened.
    pub(super) fn check(&self) -> Result<(), LoadError> {
        self.file.check()
    }

    /// The bytes of a tensor; none where they are not in the file.
    pub(super) fn bytes(&self, info: &Info) -> Option<Bytes<'_>> {
        let len = info.kind?.num_bytes(&info.shape)? as u64;
        self.file.bytes(info.start..info.start.checked_add(len)?)
    }

    /// An error of the file.
    pub(super) fn error(&self, reason: String) -> LoadError {
        LoadError::File {
            path: self.path.clone(),
            reason,
        }
    }
}

type Contents = (HashMap<String, Value>, HashMap<String, Info>);

fn read(reader: &mut Reader<'_>) -> Result<Contents, String> {
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
        Some(&Value::Unsigned(alignment @ 1..=MAX_ALIGNMENT)) => alignment,
        Some(other) => {
            return Err(format!(
                "general.alignment: {other} is not a number from 1 to {MAX_ALIGNMENT}; the file is damaged"
            ));
        }
    };
    let mut tensors = HashMap::new();
    for _ in 0..num_tensors {
        let name = reader.name()?;
        let info = info(reader).map_err(|reason| format!("{reason} (tensor '{name}')"))?;
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
        let Some(kind) = info.kind else {
            continue;
        };
        let Some(len) = kind.num_bytes(&info.shape) else {
            return Err(format!(
                "has tensor '{name}' of {kind:?} with shape {:?}, whose rows are not whole blocks of {}; it is \
                 damaged",
                info.shape,
                kind.block_len()
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

/// A tensor but for where the tensors begin.
fn info(reader: &mut Reader<'_>) -> Result<Info, String> {
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
    Ok(Info {
        shape,
        type_number,
        kind: Kind::of(type_number),
        start: reader.u64()?,
    })
}
