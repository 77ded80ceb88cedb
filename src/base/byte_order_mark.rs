//! The UTF-8 byte order mark that some editors write at the start of a file. JSON does not allow it.

/// Checks that `file` does not start with a byte order mark.
///
/// # Errors
/// The file starts with one; the text says how to remove it.
pub fn check_byte_order_mark(file: &[u8]) -> Result<(), String> {
    match file.starts_with(b"\xef\xbb\xbf") {
        false => Ok(()),
        true => Err(
            "starts with a byte order mark, which JSON does not allow; save it as UTF-8 without one (sed -i '1s/^\\xef\\xbb\\xbf//' FILE)"
                .to_owned(),
        ),
    }
}
