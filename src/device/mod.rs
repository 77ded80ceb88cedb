//! L3: buffers and operations of the devices that a model runs on.
//!
//! An operation knows slices, sizes and block tables; it knows neither requests nor layers' meaning.

pub mod cpu;
