//! L0: typed ids, units, and the three error types. Imports no other crate of the library.

#![forbid(unsafe_code)]

mod caught_panic;
mod cpu_set;
mod error;
mod ids;
mod json;
mod names;
mod text_file;
mod units;

pub use caught_panic::{catch_panic, panic_message};
pub use cpu_set::{CpuSet, NotCpus};
pub use error::{LoadError, RequestError, StepError};
pub use ids::{
    BlockId, ClientId, HostBlockId, HostSnapshotId, RequestId, SeqSlot, SequenceId, SnapshotId,
    StateRow, TokenId,
};
pub use json::parse_json;
pub use names::nearest_name;
pub use text_file::read_text;
pub use units::{BlockSize, Blocks, Tokens};
