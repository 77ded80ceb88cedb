//! The code that each fuzz target runs, and what the targets share: the repository's files, and a folder for the files
//! of one input. A test of the library runs it on the committed inputs (tests/fuzz_corpora.rs), without libFuzzer.

pub mod chat_template;
pub mod config_json;
pub mod detokenizer;
pub mod ebnf;
pub mod gguf;
pub mod guide;
pub mod images;
pub mod replies;
pub mod request_options;
pub mod safetensors;

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// Whether an input reached the code that its target is for. libFuzzer derives no others from those that did not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// It did.
    Useful,
    /// Its outer form is wrong.
    Useless,
}

/// The root of the repository.
pub fn repository() -> &'static Path {
    let mut folders = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    folders
        .find(|folder| folder.join("model_repository").is_dir())
        .expect("the package lies in the repository")
}

/// A folder whose files are rewritten for each input. `cargo xtask fuzz` sets `TMPDIR` to a folder in memory, and
/// removes it afterwards.
pub struct Folder(PathBuf);

impl Folder {
    /// An empty folder of this process.
    pub fn new() -> Self {
        static NUM_FOLDERS: AtomicU32 = AtomicU32::new(0);
        let number = NUM_FOLDERS.fetch_add(1, Ordering::Relaxed);
        let name = format!("inflight-fuzz-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        // An earlier process with the same id may have left its folder behind.
        let _ = fs::remove_dir_all(&path);
        fs::create_dir(&path).expect("the parent folder is writable");
        Self(path)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Writes or replaces a file.
    pub fn write(&self, name: &str, contents: &[u8]) {
        fs::write(self.0.join(name), contents).expect("the folder is writable");
    }

    /// Writes or replaces a file that has `num_zeros` more bytes at its end, which take no memory.
    pub fn write_padded(&self, name: &str, contents: &[u8], num_zeros: u64) {
        let file = File::create(self.0.join(name));
        let written = file.and_then(|mut file| {
            file.write_all(contents)?;
            file.set_len(contents.len() as u64 + num_zeros)
        });
        written.expect("the folder is writable");
    }

    /// Copies a file of the repository.
    pub fn copy(&self, path: &str) {
        let from = repository().join(path);
        let name = from.file_name().expect("a file has a name");
        fs::copy(&from, self.0.join(name)).expect("the file exists");
    }
}

impl Default for Folder {
    fn default() -> Self {
        Self::new()
    }
}
