//! The type of operations that a device lacks.

/// The operations that a device lacks: as there is no value of this type, they cannot be called.
#[derive(Clone, Copy, Debug)]
pub enum Lacking {}
