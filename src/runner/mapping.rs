//! A file in memory, read only.

use std::fs::{self, File};
use std::ops::Deref;
use std::path::Path;

use memmap2::Mmap;

use super::stamp::Stamp;
use crate::base::LoadError;

/// A memory-mapped file: its bytes, for as long as a checkpoint is being loaded.
pub(super) struct Mapping {
    map: Mmap,
    stamp: Stamp,
}

impl Mapping {
    /// Maps a regular file.
    pub(super) fn open(path: &Path) -> Result<Self, LoadError> {
        let fail = |reason: String| LoadError::File {
            path: path.to_owned(),
            reason,
        };
        let unreadable = |error| fail(format!("cannot be read: {error}"));
        if !fs::metadata(path).map_err(unreadable)?.is_file() {
            return Err(fail("is not a regular file".to_owned()));
        }
        let file = File::open(path).map_err(unreadable)?;
        // SAFETY: the map is read-only, and it lives only while a checkpoint is being loaded:
        // weights are copied out of it. Whoever rewrites the file in that time gets other weights;
        // whoever truncates it kills the process, which is the known limit of reading by mmap
        // from a folder that somebody else writes to.
        let map = unsafe { Mmap::map(&file) }.map_err(unreadable)?;
        let stamp = Stamp::new(path, &file.metadata().map_err(unreadable)?);
        Ok(Self { map, stamp })
    }

    /// What tells the file from another.
    pub(super) fn stamp(&self) -> &Stamp {
        &self.stamp
    }
}

impl Deref for Mapping {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.map
    }
}
