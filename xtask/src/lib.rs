//! What the project's commands draw, as a library: the pictures in the documentation are made by tests.

pub mod schemes;
pub mod timeline;

/// What a command fails with: a text for whoever typed it.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;
