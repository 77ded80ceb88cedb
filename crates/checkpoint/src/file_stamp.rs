//! Tells whether a file has been replaced.

use std::fmt;
use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// A file's name, size and modification time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileStamp {
    name: String,
    num_bytes: u64,
    /// Since 1970.
    seconds: i64,
    nanoseconds: i64,
}

impl FileStamp {
    /// The stamp of the file at `path`; `None` if there is none.
    pub(super) fn of(path: &Path) -> Option<Self> {
        let metadata = fs::metadata(path).ok()?;
        Some(Self::new(path, &metadata))
    }

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

impl fmt::Display for FileStamp {
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
