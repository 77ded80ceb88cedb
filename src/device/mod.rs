//! L3: buffers and operations of the devices that a model runs on.
//!
//! ```text
//! matrix.rs quantised.rs      weights as a checkpoint stores them, and how they are packed
//! attention.rs rope.rs        heads, windows and sinks, rotary angles
//! kv_layout.rs kv_batch.rs    the blocks of a KV cache, and which of them a step uses
//! pool/ disjoint_slice.rs     the host's threads
//! cpu/                        the operations on CPU
//! ```
//!
//! An operation knows slices, sizes and block tables; it knows neither requests nor the meaning of layers.

mod attention;
pub mod cpu;
mod disjoint_slice;
mod kv_batch;
mod kv_layout;
mod matrix;
mod pool;
mod quantised;
mod rope;

pub use attention::{AttentionParams, HeadShape, QkNorm};
pub use kv_batch::{KvBatch, KvSpan};
pub use kv_layout::{KvDtype, KvLayout};
pub use matrix::{Dtype, FloatRows, NotFinite, RawMatrix, Stacking};
pub use pool::{Pool, Turn, yield_to_others};
pub use quantised::{CodeBits, QuantFormat, QuantisedRow, QuantisedRows, can_be_packed_together};
pub use rope::RopeTable;
