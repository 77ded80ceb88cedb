//! A file that weights are read from.
//!
//! It is read and not mapped: cutting it short while a model loads then fails that load, where a map would end the
//! process. It stays open as long as the model is loaded, since an instance may be added at any time.

use std::fs::{self, File};
use std::ops::{Deref, Range};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use bytemuck::allocation::try_zeroed_vec;

use super::file_stamp::FileStamp;
use inflight_base::LoadError;

/// An open file, with its size and stamp at the time it was opened.
pub(super) struct WeightFile {
    path: PathBuf,
    file: File,
    num_bytes: u64,
    stamp: FileStamp,
    /// The first read that failed in [`FileRange::read_at`].
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
            stamp: FileStamp::new(path, &metadata),
            failure: OnceLock::new(),
        })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The size at the time it was opened.
    pub(super) fn num_bytes(&self) -> u64 {
        self.num_bytes
    }

    /// The stamp at the time it was opened.
    pub(super) fn stamp(&self) -> &FileStamp {
        &self.stamp
    }

    /// A byte range; `None` if it ends behind the end of the file.
    pub(super) fn range(&self, range: Range<u64>) -> Option<FileRange<'_>> {
        let len = range.end.checked_sub(range.start)?;
        let len = usize::try_from(len).ok()?;
        (range.end <= self.num_bytes).then_some(FileRange {
            file: self,
            start: range.start,
            len,
        })
    }

    /// Checks that everything read so far is what the file held when it was opened.
    ///
    /// # Errors
    /// Some of it could not be read, or the file has been written to since.
    pub(super) fn check(&self) -> Result<(), LoadError> {
        if let Some(reason) = self.failure.get() {
            return Err(self.error(reason.clone()));
        }
        match self.file.metadata() {
            Ok(now) if self.stamp == FileStamp::new(&self.path, &now) => Ok(()),
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
                    "has been cut short since it was opened: its bytes up to {end} are needed, and it has {num_bytes}; \
                     write a new checkpoint to a folder of its own, and load the model again"
                ),
                false => format!("cannot be read: {error}"),
            }
        })
    }

    /// Memory for some of its bytes.
    fn zeroed(&self, len: usize) -> Result<Vec<u8>, LoadError> {
        let no_memory = |()| {
            let path = self.path.display();
            LoadError::Resource(format!("no memory for {len} bytes of {path}"))
        };
        try_zeroed_vec(len).map_err(no_memory)
    }

    fn error(&self, reason: String) -> LoadError {
        LoadError::File {
            path: self.path.clone(),
            reason,
        }
    }
}

/// A byte range of a file, not yet read.
#[derive(Clone, Copy)]
pub struct FileRange<'a> {
    file: &'a WeightFile,
    start: u64,
    len: usize,
}

impl<'a> FileRange<'a> {
    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// A part of it.
    ///
    /// # Panics
    /// The part is not inside the range.
    pub fn part(self, part: Range<usize>) -> Self {
        assert!(
            part.start <= part.end && part.end <= self.len,
            "inside the range"
        );
        Self {
            file: self.file,
            start: self.start + part.start as u64,
            len: part.len(),
        }
    }

    /// Reads all of it.
    ///
    /// # Errors
    /// The file has become shorter, or memory is short.
    pub(super) fn to_vec(self) -> Result<Vec<u8>, LoadError> {
        self.to_vec_of(0..self.len)
    }

    /// Reads a part of it.
    ///
    /// # Errors
    /// As [`FileRange::to_vec`].
    ///
    /// # Panics
    /// The part is not inside the range.
    pub(super) fn to_vec_of(self, range: Range<usize>) -> Result<Vec<u8>, LoadError> {
        assert!(range.end <= self.len, "inside the range");
        let mut bytes = self.file.zeroed(range.len())?;
        let read = self.file.read(self.start + range.start as u64, &mut bytes);
        read.map_err(|reason| self.file.error(reason))?;
        Ok(bytes)
    }

    /// Fills `out` from `offset` on. If the bytes are gone, `out` stays as it is and [`WeightFile::check`] reports
    /// the failure: the threads that pack call this, and have nowhere to return an error to.
    ///
    /// # Panics
    /// The bytes are not inside the range.
    pub fn read_at(self, offset: usize, out: &mut [u8]) {
        let end = offset.checked_add(out.len());
        assert!(end.is_some_and(|end| end <= self.len), "inside the range");
        if let Err(reason) = self.file.read(self.start + offset as u64, out) {
            // Only the first failure is kept.
            let _ = self.file.failure.set(reason);
        }
    }

    /// The same range as bytes in memory, once [`LazyBytes::read`] has been called.
    pub(super) fn lazy(self) -> LazyBytes<'a> {
        LazyBytes {
            range: self,
            stride: self.len,
            rows: 0..1,
            columns: 0..self.len,
            bytes: OnceLock::new(),
        }
    }
}

/// Rows of bytes, or some bytes of each, that are read as a whole at the first call of [`LazyBytes::read`], and then
/// stay in memory, one row after the other.
pub(super) struct LazyBytes<'a> {
    range: FileRange<'a>,
    /// Row stride in the file, in bytes.
    stride: usize,
    rows: Range<usize>,
    columns: Range<usize>,
    bytes: OnceLock<Vec<u8>>,
}

impl LazyBytes<'_> {
    /// Some bytes of some of its rows, which have `row_bytes` each. It is one row, or rows of this length.
    ///
    /// # Panics
    /// It does not have them.
    #[must_use]
    pub(super) fn part(&self, row_bytes: usize, rows: Range<usize>, columns: Range<usize>) -> Self {
        let own_len = self.columns.len() * self.rows.len();
        assert!(
            rows.start <= rows.end && rows.end * row_bytes <= own_len && columns.end <= row_bytes,
            "rows {rows:?} and bytes {columns:?} of rows of {row_bytes} bytes"
        );
        let (stride, first_row, first) = match self.columns.len() == row_bytes {
            true => (self.stride, self.rows.start, self.columns.start),
            false => {
                assert!(self.rows == (0..1) && self.columns.start == 0, "one row");
                (row_bytes, 0, 0)
            }
        };
        Self {
            range: self.range,
            stride,
            rows: first_row + rows.start..first_row + rows.end,
            columns: first + columns.start..first + columns.end,
            bytes: OnceLock::new(),
        }
    }

    /// Reads the bytes unless they have been read.
    ///
    /// # Errors
    /// As [`FileRange::to_vec`].
    pub(super) fn read(&self) -> Result<(), LoadError> {
        if self.bytes.get().is_none() {
            let bytes = self.to_vec()?;
            // Another thread may have read the same bytes.
            let _ = self.bytes.set(bytes);
        }
        Ok(())
    }

    fn to_vec(&self) -> Result<Vec<u8>, LoadError> {
        let Range { start, end } = self.rows.clone();
        if self.columns == (0..self.stride) {
            return self.range.to_vec_of(start * self.stride..end * self.stride);
        }
        let row_bytes = self.columns.len();
        let mut bytes = self.range.file.zeroed(row_bytes * self.rows.len())?;
        for (row, out) in (start..).zip(bytes.chunks_exact_mut(row_bytes.max(1))) {
            let first = row * self.stride + self.columns.start;
            assert!(first + row_bytes <= self.range.len, "inside the range");
            let read = self.range.file.read(self.range.start + first as u64, out);
            read.map_err(|reason| self.range.file.error(reason))?;
        }
        Ok(bytes)
    }
}

impl Deref for LazyBytes<'_> {
    type Target = [u8];

    /// # Panics
    /// They have not been read.
    fn deref(&self) -> &[u8] {
        self.bytes.get().expect("they have been read")
    }
}
