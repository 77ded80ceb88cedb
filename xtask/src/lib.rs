//! The drawing part of the commands, as a library for the tests that draw the documentation's pictures.

pub mod charts;
pub mod schemes;
pub mod timeline;

/// Errors are texts for the user.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;
