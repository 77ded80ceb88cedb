//! GGUF files, the format of llama.cpp: versions 2 and 3, one file or several parts.
//!
//! ```text
//! folder.rs        the files of a checkpoint folder in one name space
//! file.rs          one file: its metadata, and its tensors by name
//! metadata.rs      keys and values
//! tensor_type.rs   the element types
//! blocks.rs        how blocks of them are decoded
//! end_tokens.rs    the tokens that end a text
//! ```
//!
//! The format is described in ggml's `gguf.md`. Files are not trusted: counts, lengths and offsets are checked
//! against the real length of a file before anything is read, so a header that lies costs no memory.

mod blocks;
mod end_tokens;
mod file;
mod folder;
mod metadata;
mod tensor_type;

pub use folder::GgufFolder;
pub use metadata::MetadataValue;
