//! Limits of the image encoder and of its cache.

use inflight_base::{LoadError, Tokens};

/// Limits of the image encoder and of its cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageLimits {
    /// The most tokens of images that are encoded in a step. One image may be larger, and so may the images of a
    /// context that is not cut.
    pub max_num_tokens: Tokens,
    /// The most tokens of images whose rows are kept.
    pub max_cached_tokens: Tokens,
    /// Whether the tokens of an image see each other, so that a step computes all of them.
    pub has_whole_images: bool,
}

impl ImageLimits {
    /// Refuses limits that allow no image.
    ///
    /// # Errors
    /// A limit is 0.
    pub(super) fn check(&self) -> Result<(), LoadError> {
        if self.max_num_tokens > Tokens::ZERO && self.max_cached_tokens > Tokens::ZERO {
            return Ok(());
        }
        Err(LoadError::Config {
            problem: format!(
                "a step may encode {} tokens of images, and {} are kept",
                self.max_num_tokens, self.max_cached_tokens
            ),
            remedy: "set both to at least 1, or take no images".to_owned(),
        })
    }
}
