//! Text files of a checkpoint.

use std::path::Path;
use std::{fs, io};

/// The character U+FEFF, which some editors write at the start of a file to say that it is UTF-8.
const BYTE_ORDER_MARK: char = '\u{feff}';

/// The text of a file, without a byte order mark at its start.
///
/// # Errors
/// The file cannot be read, or is not UTF-8.
pub fn read_text(path: &Path) -> io::Result<String> {
    let mut text = fs::read_to_string(path)?;
    if text.starts_with(BYTE_ORDER_MARK) {
        text.remove(0);
    }
    Ok(text)
}
