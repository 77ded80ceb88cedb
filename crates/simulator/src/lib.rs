//! Predicts the throughput and latencies of a configuration under a load: the backend's own engine, with a
//! cost model in place of the computation and a virtual clock.
//!
//! ```text
//! pbtxt.rs random.rs time.rs    config.pbtxt as JSON; random numbers; virtual time
//! model.rs                  the engine's limits from a config.pbtxt, derived as the backend does
//! workload.rs trace.rs      arrival times and lengths of requests
//! cost.rs fit.rs            the cost of a step; its fit to a measured run (least_squares.rs)
//! step_loop.rs              the engine and its runner in virtual time; the only file that knows the engine
//! simulation.rs             Triton's slots and backlog, the clients, the clock
//! record.rs                 a step as a line of a statistics file
//! report.rs plots.rs        results as numbers and as charts
//! ```
//!
//! Nothing depends on the machine or on the time of day: the same arguments give the same report.
#![forbid(unsafe_code)]

pub mod cost;
pub mod fit;
mod least_squares;
pub mod model;
pub mod pbtxt;
pub mod plots;
pub mod random;
pub mod record;
pub mod report;
pub mod simulation;
pub mod step_loop;
pub mod time;
pub mod trace;
pub mod workload;

/// Errors are texts for the user.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;
