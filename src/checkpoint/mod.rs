//! L4: a checkpoint folder: its JSON files, and its tensors and matrices by name, whatever format they are stored in.
//!
//! ```text
//! folder.rs        Checkpoint: the opened folder
//! json_file.rs     config.json and its like: typed accessors with range checks
//! store.rs         the weights by name
//! tensor.rs        a float tensor
//! matrix.rs        a matrix: floating point or quantised
//! fp8_matrix.rs    a matrix of 8-bit floats
//! row_order.rs     which of the stored rows a matrix has
//! safetensors/     *.safetensors
//! quantised/       GPTQ, AWQ and compressed-tensors inside of safetensors
//! gguf/            *.gguf
//! peft.rs          LoRA adapters
//! weight_file.rs   a file that may be replaced while it is read
//! file_stamp.rs    tells whether a file has been replaced
//! ```
//!
//! This room knows files and formats. What the tensors mean, and what the kernels make of them, is the runner's
//! business.

mod file_stamp;
mod folder;
mod fp8_matrix;
mod gguf;
mod json_file;
mod matrix;
mod peft;
mod quantised;
mod row_order;
mod safetensors;
mod store;
mod tensor;
mod weight_file;

pub use file_stamp::FileStamp;
pub use folder::Checkpoint;
pub use gguf::{GgufFolder, MetadataValue};
pub use json_file::JsonFile;
pub use matrix::{Matrix, ReadRow};
pub use peft::{AdapterStamp, LowRankModule, PeftAdapter};
pub use row_order::{RotaryPairs, RowOrder, RowSelection};
pub use safetensors::SafetensorsFile;
pub use store::Store;
pub use tensor::{Tensor, TensorLocation};
