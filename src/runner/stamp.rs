//! What tells a file from one that takes its place.

use std::fmt;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// A file's name, size and time of change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    name: String,
    num_bytes: u64,
    /// Since 1970.
    seconds: i64,
    nanoseconds: i64,
}

impl Stamp {
    /// That of a file, by what the system says of it.
    pub(super) fn new(path: &Path, metadata: &Metadata) -> Self {
        let name = path.file_name().unwrap_or_default();
        Self {
            name: name.to_string_lossy().into_owned(),
            num_bytes: metadata.len(),
            seconds: metadata.mtime(),
            nanoseconds: metadata.mtime_nsec(),
        }
    }
}

impl fmt::Display for Stamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            name,
            num_bytes,
            seconds,
            nanoseconds,
        } = self;
        write!(
            f,
            "{name}: {num_bytes} bytes, of {seconds}.{nanoseconds:09}"
        )
    }
}
