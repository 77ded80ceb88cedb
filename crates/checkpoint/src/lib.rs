//! L2: a checkpoint folder: its JSON files, and its tensors and matrices by name, whatever format they are stored in.
//!
//! ```text
//! folder.rs        Checkpoint: the opened folder
//! json_file.rs     config.json and its like: typed accessors with range checks
//! store.rs         the weights by name
//! tensor.rs        a float tensor
//! matrix.rs        a matrix: floating point or quantised
//! fp8_matrix.rs    a matrix of 8-bit floats
//! e2m1.rs          scales of floats of 4 bits
//! transposed.rs    a float matrix that is stored by columns
//! row_order.rs     which of the stored rows a matrix has
//! stored_rows.rs   quantised rows of a matrix
//! column_order.rs  quantised rows whose columns are stored in another order
//! sentence_transformers.rs  what becomes of hidden states in an embedding model, and of long texts
//! safetensors/     *.safetensors
//! quantised/       quantised weights inside of safetensors
//! gguf/            *.gguf
//! adapter_files.rs LoRA adapters: as PEFT saves them (peft.rs), or as rows of modules (module_rows.rs, npy.rs,
//!                  adapter_arrays.rs)
//! weight_file.rs   a file that may be replaced while it is read
//! file_stamp.rs    tells whether a file has been replaced
//! ```
//!
//! This room knows files and formats. What the tensors mean, and what the kernels make of them, is the runner's
//! business.

#![forbid(unsafe_code)]

mod adapter_arrays;
mod adapter_files;
mod column_order;
mod e2m1;
mod file_stamp;
mod folder;
mod fp8_matrix;
mod gguf;
mod json_file;
mod matrix;
mod module_rows;
mod npy;
mod peft;
mod quantised;
mod row_order;
mod safetensors;
mod sentence_transformers;
mod store;
mod stored_rows;
mod tensor;
mod transposed;
mod weight_file;

pub use adapter_arrays::AdapterArrays;
pub use adapter_files::{AdapterFiles, AdapterStamp};
pub use file_stamp::FileStamp;
pub use folder::Checkpoint;
pub use gguf::{GgufFolder, MetadataValue};
pub use json_file::JsonFile;
pub use matrix::{Matrix, ReadRow};
pub use module_rows::{ModuleRows, RowModule};
pub use peft::{AdaptedModule, LowRankModule, PeftAdapter};
pub use row_order::{RotaryPairs, RowOrder, RowRuns, RowSelection};
pub use safetensors::SafetensorsFile;
pub use sentence_transformers::{EmbeddingModules, max_text_tokens};
pub use store::Store;
pub use tensor::{Tensor, TensorLocation};
