//! L1: parses and checks config.pbtxt.
//!
//! [`ModelConfig`] holds Triton's own fields (inputs, outputs, scheduling), [`Settings`] the backend's parameters.
//! Malformed values, unknown keys and inconsistent combinations are load errors that say what to write instead;
//! nothing is guessed. Valid settings that make serving slower produce warnings.

#![forbid(unsafe_code)]

mod choices;
mod client_compatibility;
pub mod client_inputs;
mod foreign_parameters;
mod knobs;
mod model_config;
mod outputs;
mod parameters;
mod pbtxt;
mod reference;
mod scheduling;
mod settings;
mod values;

pub use choices::{
    BatchingScheme, CapacityPolicy, ContextChunkPolicy, KvCacheDtype, PoolingMode, RankCpus,
    RankTransportKind, ReasoningFormat, ReplyParser, RunnerKind, SpeculationKind, Task,
    ToolCallFormat, WeightOnlyPrecision,
};
pub use client_compatibility::ClientCompatibility;
pub use model_config::{InputKind, ModelConfig};
pub use outputs::OutputKind;
pub use pbtxt::AutoComplete;
pub use reference::reference;
pub use scheduling::{Scheduling, check_server};
pub use settings::Settings;
pub use values::{MAX_STATE_SNAPSHOTS, MAX_THREADS};
