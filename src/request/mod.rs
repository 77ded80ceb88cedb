//! From a Triton request to one that the engine takes: its options and its prompt, parsed and checked.

pub mod adapter_tensors;
pub mod admission;
pub mod branches;
mod chat_options;
mod clients;
mod foreign_fields;
mod guide_options;
#[cfg(test)]
mod guide_toys;
pub mod images;
pub mod incoming;
mod model_checks;
mod option_sizes;
mod option_tensors;
mod options;
mod post_processor_options;
pub mod preparer;
pub mod prompt;
mod thought_budget;
mod thoughts;
mod tool_guides;
mod turns;
pub mod volume;

pub use clients::client_tables;
pub use options::RequestOptions;
pub use options::reference_table;
