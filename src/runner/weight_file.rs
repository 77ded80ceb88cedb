//! A file that weights are read from.
//!
//! It is read and not mapped: whoever cuts it short while it is read makes the load fail, and would end the process
//! if it were a map. That holds as long as the model is loaded, since an instance may be added at any time.

use std::fs::{self, File};
use std::ops::{Deref, Range};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use bytemuck::allocation::try_zeroed_vec;

use super::stamp::Stamp;
use crate::base::LoadError;

/// An open file, and what it was when it was opened.
pub(super) struct WeightFile {
    path: PathBuf,
    file: File,
    num_bytes: u64,
    stamp: Stamp,
    /// Why some of its bytes could not be read, once that has happened.
    failure: OnceLock<String>,
}

impl WeightFile {
    /// Opens a regular file.
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
        let metadata = file.metadata().map_err(unreadable)?;
        Ok(Self {
            path: path.to_owned(),
            file,
            num_bytes: metadata.len(),
            stamp: Stamp::new(path, &metadata),
            failure: OnceLock::new(),
        })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Its size when it was opened.
    pub(super) fn num_bytes(&self) -> u64 {
        self.num_bytes
    }

    /// What tells it from another.
    pub(super) fn stamp(&self) -> &Stamp {
        &self.stamp
    }

    /// Bytes of it. None where it had not as many when it was opened.
    pub(super) fn bytes(&self, range: Range<u64>) -> Option<Bytes<'_>> {
        let len = range.end.checked_sub(range.start)?;
        let len = usize::try_from(len).ok()?;
        (range.end <= self.num_bytes).then_some(Bytes {
            file: self,
            start: range.start,
            len,
        })
    }

    /// Whether all that was read is what the file had when it was opened.
    ///
    /// # Errors
    /// Some of it could not be read, or the file has been written to since.
    pub(super) fn check(&self) -> Result<(), LoadError> {
        if let Some(reason) = self.failure.get() {
            return Err(self.error(reason.clone()));
        }
        match self.file.metadata() {
            Ok(now) if self.stamp == Stamp::new(&self.path, &now) => Ok(()),
            Ok(now) => Err(self.error(format!(
                "has been written to since it was opened (it had {} bytes, and has {}), so its weights may be mixed; \
                 write a new checkpoint to a folder of its own, and load the model again",
                self.num_bytes,
                now.len()
            ))),
            Err(error) => Err(self.error(format!("cannot be read: {error}"))),
        }
    }

    fn read(&self, start: u64, out: &mut [u8]) -> Result<(), String> {
        self.file.read_exact_at(out, start).map_err(|error| {
            let end = start + out.len() as u64;
            let num_bytes = self.file.metadata().map_or(0, |metadata| metadata.len());
            match num_bytes < end {
                true => format!(
                    "has been cut short since it was opened: its bytes up to {end} are wanted, and it has {num_bytes}; \
                     write a new checkpoint to a folder of its own, and load the model again"
                ),
                false => format!("cannot be read: {error}"),
            }
        })
    }

    fn error(&self, reason: String) -> LoadError {
        LoadError::File {
            path: self.path.clone(),
            reason,
        }
    }
}

/// Bytes of a file that are yet to be read.
#[derive(Clone, Copy)]
pub(super) struct Bytes<'a> {
    file: &'a WeightFile,
    start: u64,
    len: usize,
}

impl<'a> Bytes<'a> {
    /// How many they are.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Reads all of them.
    ///
    /// # Errors
    /// They are not there any more, or there is no memory.
    pub(super) fn to_vec(self) -> Result<Vec<u8>, LoadError> {
        self.to_vec_of(0..self.len)
    }

    /// Reads some of them.
    ///
    /// # Errors
    /// As [`Bytes::to_vec`].
    ///
    /// # Panics
    /// There are fewer than that.
    pub(super) fn to_vec_of(self, range: Range<usize>) -> Result<Vec<u8>, LoadError> {
        assert!(range.end <= self.len, "inside the range");
        let no_memory = |()| {
            LoadError::Resource(format!(
                "no memory for {} bytes of {}",
                range.len(),
                self.file.path.display()
            ))
        };
        let mut bytes = try_zeroed_vec(range.len()).map_err(no_memory)?;
        let read = self.file.read(self.start + range.start as u64, &mut bytes);
        read.map_err(|reason| self.file.error(reason))?;
        Ok(bytes)
    }

    /// Reads those from `offset` on. Where they are not there any more, `out` is left as it is, and
    /// [`WeightFile::check`] says so: this is for the threads that pack.
    ///
    /// # Panics
    /// There are fewer than that.
    pub(super) fn read_at(self, offset: usize, out: &mut [u8]) {
        let end = offset.checked_add(out.len());
        assert!(end.is_some_and(|end| end <= self.len), "inside the range");
        if let Err(reason) = self.file.read(self.start + offset as u64, out) {
            // The first one is told.
            let _ = self.file.failure.set(reason);
        }
    }

    /// The same to be looked at in any order, once [`Held::read`] has read them.
    pub(super) fn held(self) -> Held<'a> {
        Held {
            bytes: self,
            held: OnceLock::new(),
        }
    }
}

/// Bytes of a file that are read at once, when they are wanted, and kept.
pub(super) struct Held<'a> {
    bytes: Bytes<'a>,
    held: OnceLock<Vec<u8>>,
}

impl Held<'_> {
    /// Reads them, if that has not been done.
    ///
    /// # Errors
    /// As [`Bytes::to_vec`].
    pub(super) fn read(&self) -> Result<(), LoadError> {
        if self.held.get().is_none() {
            let bytes = self.bytes.to_vec()?;
            // Somebody else may have read the same.
            let _ = self.held.set(bytes);
        }
        Ok(())
    }
}

impl Deref for Held<'_> {
    type Target = [u8];

    /// # Panics
    /// They have not been read.
    fn deref(&self) -> &[u8] {
        self.held.get().expect("they have been read")
    }
}
