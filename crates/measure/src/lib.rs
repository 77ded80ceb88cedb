//! In-process measurements of the library: speed relative to the limits of the machine, and the quality of
//! quantised weights relative to the checkpoint.
//!
//! ```text
//! model.rs      a checkpoint on CPU, sized for a load
//! load.rs       requests that start together, and the arrival times of their tokens
//! limits/       what a machine can do at most: of CPUs by measurement, of GPUs by calculation
//! roofline.rs   lower bounds of a step's time on this machine
//! machine.rs    the machine's limits, as a row
//! figures.rs    medians and rounding
//! engine.rs     `cargo xtask bench engine`: prompts and generation, row by row
//! embed.rs      `cargo xtask bench embed`: texts that a model embeds
//! adapters.rs   `cargo xtask bench adapters`: what adapters add to a step
//! ranks.rs      `cargo xtask bench ranks`: several ranks beside one
//! rank_sums.rs  what of a step ranks spend in sums
//! all_reduce.rs `cargo xtask bench all-reduce`: sums over ranks beside the memory's bandwidth
//! profile.rs    `cargo xtask profile`: the time of a step by operation
//! stopwatch.rs  the probe that times each operation
//! divergence.rs divergence of logits from reference logits
//! text.rs       a text split into pieces, and a model's logits for them
//! quality.rs    `cargo xtask bench quality`: the cost of quantised weights
//! gpu_check/    `gpu-check`: checks and measures the library on a GPU machine
//! ```

pub mod adapters;
pub mod all_reduce;
pub mod divergence;
pub mod embed;
pub mod engine;
pub mod figures;
pub mod gpu_check;
pub mod limits;
pub mod load;
pub mod machine;
pub mod model;
pub mod profile;
pub mod quality;
pub mod rank_sums;
pub mod ranks;
pub mod roofline;
pub mod stopwatch;
pub mod text;

/// Errors here are printed and never handled, so a boxed error is enough.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;
