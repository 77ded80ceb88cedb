//! Whether an instance can serve.

use std::fmt::Display;
use std::sync::{Arc, OnceLock};

use super::{Error, ErrorCode};

/// Whether an instance can serve, or why not. Its threads and Triton's share it.
#[derive(Clone, Debug, Default)]
pub struct Health(Arc<OnceLock<Error>>);

impl Health {
    /// Says that the instance has failed, and serves no more. Only the first reason counts.
    pub fn fail(&self, reason: &impl Display) {
        self.0.get_or_init(|| {
            Error::new(
                ErrorCode::Unavailable,
                format!(
                    "the model instance has failed, unload the model and load it again: {reason}"
                ),
            )
        });
    }

    /// Why the instance has failed, if it has: the error for its requests.
    pub fn failure(&self) -> Option<&Error> {
        self.0.get()
    }
}
