//! What the library does without a server, measured in this process beside what the machine can do, and how near
//! weights of a few bits come to those of a checkpoint.
//!
//! ```text
//! model.rs      a checkpoint on CPU, sized for a load
//! load.rs       requests that start at once, and when their tokens came
//! roofline.rs   what the machine would need for the same at least
//! machine.rs    the machine's limits, as a row
//! figures.rs    medians, and figures as they are written
//! engine.rs     `cargo xtask bench engine`: prompts and generation, row by row
//! profile.rs    `cargo xtask profile`: where a step's time goes
//! stopwatch.rs  the probe that takes the time of each operation
//! divergence.rs how far logits are from others
//! text.rs       a text in pieces, and the logits that a model has of them
//! quality.rs    `cargo xtask bench quality`: what weights of a few bits cost
//! ```
#![forbid(unsafe_code)]

pub mod divergence;
pub mod engine;
pub mod figures;
pub mod load;
pub mod machine;
pub mod model;
pub mod profile;
pub mod quality;
pub mod roofline;
pub mod stopwatch;
pub mod text;

/// What can go wrong here is said to a person, and nothing is done about it.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;
