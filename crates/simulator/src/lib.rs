//! Predicts what a configuration does under a load: the backend's own engine, a cost model in the place
//! of the computing, and a clock that jumps from step to step.
//!
//! ```text
//! pbtxt.rs random.rs time.rs    config.pbtxt -> JSON; random numbers; virtual time
//! model.rs                  config.pbtxt -> the engine's limits, as the backend makes them
//! workload.rs trace.rs      when requests come, and how long they are
//! cost.rs fit.rs            how long a step takes; the same from a measured run, by least_squares.rs
//! step_loop.rs              the engine and its runner, in virtual time; all that knows the engine
//! simulation.rs             Triton's slots and backlog, the clients, the clock
//! record.rs                 a step as a line of a statistics file
//! report.rs plots.rs        what came of it
//! ```
//!
//! Nothing in it depends on the machine or on the time of day: the same arguments give the same report.
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

/// What a simulation fails with: a text for whoever asked for it.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;
