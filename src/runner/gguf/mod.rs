//! Checkpoints of llama.cpp and its relatives: GGUF, version 2 and 3, in one file or split into several.
//!
//! ```text
//! file.rs         one mapped file: metadata and where its tensors lie, everything checked
//! metadata.rs     its keys and values
//! folder.rs       the files of a folder as one checkpoint
//! config.rs       the model's shape, where no config.json is there
//! blocks.rs       the types of tensors
//! names.rs        transformers' names to llama.cpp's
//! ```
//!
//! The format: ggml's docs/gguf.md. Nothing in a file is trusted: counts, lengths and offsets are compared with
//! what the file has before anything is read, and memory is taken only for what is there.

mod blocks;
mod config;
mod file;
mod folder;
mod metadata;
mod names;

pub(super) use folder::{Gguf, files};
