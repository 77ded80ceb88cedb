//! The byte order mark with which some editors begin a file, and which no JSON may begin with.

/// Says what to do where a file begins with one.
///
/// # Errors
/// It does; the reason.
pub fn check_byte_order_mark(file: &[u8]) -> Result<(), String> {
    match file.starts_with(b"\xef\xbb\xbf") {
        false => Ok(()),
        true => Err(
            "begins with a byte order mark, which no JSON does; save it as UTF-8 without one (sed -i '1s/^\\xef\\xbb\\xbf//' FILE)"
                .to_owned(),
        ),
    }
}
