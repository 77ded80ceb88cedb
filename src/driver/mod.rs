//! From Execute calls to steps of the batch manager, and the requests in flight.
//!
//! ```text
//! watched.rs        a driver, and the thread that watches its requests
//! ending.rs         whether a model is still served
//! iterative.rs      an Execute call is a step
//! queued.rs         a thread steps, and Execute calls bring requests
//! step_driver/      a step, for both
//! step_clock.rs     the times of a step
//! conversations.rs  sequences of several requests
//! turn.rs           a request of one of them
//! restarts.rs       when an instance that has failed is loaded anew
//! service.rs        when the model has begun to serve, and when its requests must end
//! in_flight.rs      the requests in flight
//! stops.rs          stop requests for other instances
//! leaving.rs        cancelled requests, until Triton answers them
//! slots_in_doubt.rs slots that Triton may not have freed
//! correlation.rs    Triton's names of sequences
//! ```

pub mod conversations;
mod correlation;
mod ending;
mod in_flight;
pub mod iterative;
mod leaving;
pub mod queued;
pub mod restarts;
pub mod service;
mod slots_in_doubt;
mod step_clock;
pub mod step_driver;
pub mod stops;
mod turn;
pub mod watched;
