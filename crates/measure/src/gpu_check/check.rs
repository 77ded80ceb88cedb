//! What all stages share.

use std::path::PathBuf;

use super::options::Options;
use crate::limits::MachineLimits;

/// What all stages share.
pub struct Check {
    /// What it was asked to do.
    pub options: Options,
    /// The bundle's folder.
    pub bundle: PathBuf,
    /// What the GPU was measured to do; there after the first stage.
    pub limits: Option<MachineLimits>,
}
