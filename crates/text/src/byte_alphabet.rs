//! The characters that stand for bytes in byte-level vocabularies.

/// The byte that `char` encodes in a byte-level vocabulary. Visible Latin-1 characters encode themselves; the
/// characters from U+0100 encode the other bytes in order (`bytes_to_unicode` of GPT-2).
///
/// ```text
/// byte  00..=20  21..=7E  7F..=A0    A1..=AC  AD   AE..=FF
/// char  100..    itself   121..=142  itself   143  itself
/// ```
pub(super) fn byte_of(char: char) -> Option<u8> {
    let byte = match u32::from(char) {
        code @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => code,
        code @ 0x100..=0x120 => code - 0x100,
        code @ 0x121..=0x142 => code - 0x121 + 0x7f,
        0x143 => 0xad,
        _ => return None,
    };
    u8::try_from(byte).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_a_byte_level_character() {
        let alphabet = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet();
        let mut bytes: Vec<u8> = alphabet
            .into_iter()
            .map(|char| byte_of(char).expect("a byte"))
            .collect();
        bytes.sort_unstable();
        assert!(bytes.into_iter().eq(0..=255));
        assert_eq!((byte_of('Ġ'), byte_of('Ċ')), (Some(b' '), Some(b'\n')));
        assert_eq!((byte_of(' '), byte_of('ń')), (None, None));
    }
}
