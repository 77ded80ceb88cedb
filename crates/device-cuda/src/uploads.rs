//! Uploaded parts of a model other than matrices.

use super::memory::DeviceMemory;

/// The rows of a token embedding.
pub struct Embedding {
    pub(super) memory: DeviceMemory,
    pub(super) hidden_size: usize,
}

/// A norm's weights, or a bias.
pub struct Vector {
    pub(super) memory: DeviceMemory,
}

/// Rotary angles.
pub struct Angles {
    pub(super) memory: DeviceMemory,
    /// The factors of rotated queries by their positions, if there are any.
    pub(super) query_factors: Option<DeviceMemory>,
}
