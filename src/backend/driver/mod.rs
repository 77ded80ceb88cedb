//! From an Execute call to a step of the batch manager, and the requests in flight.

mod correlation;
mod in_flight;
pub mod iterative;
pub mod watched;
