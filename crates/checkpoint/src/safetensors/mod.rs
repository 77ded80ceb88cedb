//! safetensors files.
//!
//! ```text
//! file.rs     one file: its header, and its tensors by name
//! folder.rs   the files of a checkpoint folder in one name space
//! ```
//!
//! Files are not trusted: sizes and offsets are checked against the real length of a file before anything is read,
//! so a header that lies costs no memory.

mod file;
mod folder;

pub use file::{SafetensorsFile, StoredTensor};
pub(super) use folder::SafetensorsFolder;
