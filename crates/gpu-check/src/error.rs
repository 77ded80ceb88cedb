//! Errors of stages: what they say goes into the report.

/// A result, or what has failed.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;
