//! From Execute calls to steps of the batch manager, and the requests in flight.
//!
//! ```text
//! watched.rs       a driver, and the thread that watches its requests
//! iterative.rs     an Execute call is a step
//! queued.rs        a thread steps, and Execute calls bring requests
//! step_driver.rs   a step, for both
//! in_flight.rs     the requests in flight
//! correlation.rs   Triton's names of sequences
//! ```

mod correlation;
mod in_flight;
pub mod iterative;
pub mod queued;
pub mod step_driver;
pub mod watched;
