//! The file that statistics are appended to.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use inflight_base::LoadError;

/// The time between two attempts to open a file that could not be written.
const RETRY_PERIOD: Duration = Duration::from_secs(1);

/// A file of records, a line each. One that cannot be written, such as on a full disk, is opened again later; the
/// records of that time are lost, and none is left in part.
pub struct StatsFile {
    path: PathBuf,
    file: Option<File>,
    /// The last attempt to write or open it that failed.
    failed: Option<Instant>,
    num_lost: usize,
}

impl StatsFile {
    /// Opens the file, or makes it.
    ///
    /// # Errors
    /// It cannot be opened for writing.
    pub fn open(path: &Path) -> Result<Self, LoadError> {
        let file = open(path).map_err(|e| LoadError::File {
            path: path.to_owned(),
            reason: format!("the statistics file cannot be written: {e}"),
        })?;
        Ok(Self {
            path: path.to_owned(),
            file: Some(file),
            failed: None,
            num_lost: 0,
        })
    }

    /// Appends whole lines.
    pub fn write(&mut self, lines: &[u8], now: Instant) {
        if let Err(error) = self.try_write(lines, now) {
            if self.failed.is_none() {
                log::warn!("statistics are lost until their file can be written again: {error}");
            }
            self.failed = Some(now);
            self.file = None;
        }
        if self.failed.is_some() {
            self.num_lost += lines.iter().filter(|byte| **byte == b'\n').count();
        }
    }

    /// Appends the lines, unless it is too early to open the file again.
    fn try_write(&mut self, lines: &[u8], now: Instant) -> io::Result<()> {
        if let Some(failed) = self.failed
            && now.saturating_duration_since(failed) < RETRY_PERIOD
        {
            return Ok(());
        }
        let file = match &mut self.file {
            Some(file) => file,
            none => none.insert(open(&self.path)?),
        };
        let len = file.metadata()?.len();
        if let Err(error) = file.write_all(lines) {
            // Cut off the partial line, so that the next record begins a line. Nothing can be done if this fails, too.
            let _ = file.set_len(len);
            return Err(error);
        }
        if self.failed.take().is_some() {
            let num_lost = std::mem::take(&mut self.num_lost);
            log::info!("statistics are written again; {num_lost} records were lost");
        }
        Ok(())
    }
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).open(path)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_file_on_a_full_disk_is_written_again_when_there_is_room() {
        let folder = std::env::temp_dir().join(format!("inflight-stats-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir(&folder).expect("a folder");
        let (path, real) = (folder.join("stats"), folder.join("real"));
        symlink("/dev/full", &path).expect("a link");
        let mut file = StatsFile::open(&path).expect("it opens");
        let start = Instant::now();
        file.write(b"1\n2\n", start);
        fs::remove_file(&path).expect("the link is there");
        symlink(&real, &path).expect("a link");
        file.write(b"3\n", start + RETRY_PERIOD / 2);
        assert_eq!(file.num_lost, 3);
        file.write(b"4\n", start + RETRY_PERIOD);
        file.write(b"5\n", start + RETRY_PERIOD);
        assert_eq!(fs::read(&real).expect("it is there"), b"4\n5\n");
        assert_eq!(file.num_lost, 0);
        fs::remove_dir_all(folder).expect("the folder is there");
    }
}
