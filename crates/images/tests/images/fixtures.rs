//! The files that tests/fixtures/make_images.py writes.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use serde::de::DeserializeOwned;

fn folder() -> PathBuf {
    PathBuf::from(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/fixtures/images"
    ))
}

/// The cases of a file.
pub fn read<T: DeserializeOwned>(name: &str) -> T {
    let text = fs::read_to_string(folder().join(name)).expect("the file of cases");
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// The bytes of an image.
pub fn bytes_of(name: &str) -> Vec<u8> {
    fs::read(folder().join("files").join(name)).expect("an image")
}

/// All images, with their names.
pub fn images() -> Vec<(String, Vec<u8>)> {
    let names = names_in(&folder().join("files")).into_iter();
    names.map(|name| (name.clone(), bytes_of(&name))).collect()
}

/// The names of all processors.
pub fn processor_names() -> BTreeSet<String> {
    names_in(&folder().join("processors"))
}

fn names_in(folder: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(folder).expect("a folder of fixtures");
    let names = entries.map(|entry| entry.expect("an entry").file_name().into_string());
    names.map(|name| name.expect("a name in UTF-8")).collect()
}

/// A folder that is removed when it is dropped.
pub struct TempFolder(PathBuf);

impl TempFolder {
    /// A folder with the files of another one.
    pub fn copy_of(folder: &Path) -> Self {
        static NUM_FOLDERS: AtomicU32 = AtomicU32::new(0);
        let number = NUM_FOLDERS.fetch_add(1, Ordering::Relaxed);
        let name = format!("inflight-images-{}-{number}", std::process::id());
        let copy = std::env::temp_dir().join(name);
        fs::create_dir_all(&copy).expect("a new folder");
        for name in names_in(folder) {
            fs::copy(folder.join(&name), copy.join(&name)).expect("a copy");
        }
        Self(copy)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TempFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Bytes as hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The folder of a checkpoint's files.
pub fn processor_folder(name: &str) -> PathBuf {
    folder().join("processors").join(name)
}

/// The values of the image that make_images.py draws as `pattern`.
pub fn pattern(height: usize, width: usize, seed: u64) -> Vec<u8> {
    let mut values = Vec::with_capacity(height * width * 3);
    for y in 0..height as u64 {
        for x in 0..width as u64 {
            for c in 0..3 {
                let wave = (x * (3 + c) + y * (5 - c) + ((x * y) >> 5) + seed) & 511;
                let wave = if wave < 256 { wave } else { 511 - wave };
                let noise = (x * 2_654_435_761 + y * 40_503 + c * 97 + seed * 7919) as u32;
                let noise = (noise ^ (noise >> 15)).wrapping_mul(2_246_822_519);
                let value = wave as i64 + i64::from((noise >> 24) & 31) - 16;
                values.push(value.clamp(0, 255) as u8);
            }
        }
    }
    values
}
