//! L1: what a user writes in config.pbtxt, checked.
//!
//! [`ModelConfig`] is Triton's own part of it (inputs, outputs, scheduling), [`Settings`] are the
//! backend's parameters. A value that does not parse, an unknown key, and a combination that makes
//! no sense are errors at load that say what to write instead; nothing is ever guessed. What is served,
//! but slower than it could be, is a warning.

mod choices;
mod client_compatibility;
pub mod client_inputs;
mod foreign_parameters;
mod knobs;
mod model_config;
mod outputs;
mod parameters;
mod pbtxt;
mod scheduling;
mod settings;
mod values;

pub use choices::{
    BatchingScheme, CapacityPolicy, ContextChunkPolicy, RunnerKind, SpeculationKind,
    WeightOnlyPrecision,
};
pub use client_compatibility::ClientCompatibility;
pub use knobs::reference_table;
pub use model_config::{InputKind, ModelConfig};
pub use outputs::OutputKind;
pub use pbtxt::AutoComplete;
pub use settings::Settings;
