//! Characters as Python's `str` sees them.

use unicode_general_category::{GeneralCategory, get_general_category};

/// `str.isspace`, and what `strip` and `split` take away.
pub(crate) fn is_space(char: char) -> bool {
    char.is_whitespace() || ('\x1c'..='\x1f').contains(&char)
}

/// Whether `splitlines` splits here.
pub(crate) fn is_line_end(char: char) -> bool {
    matches!(
        char,
        '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}'
    )
}

pub(crate) fn is_printable(char: char) -> bool {
    use GeneralCategory as C;
    char == ' '
        || !matches!(
            get_general_category(char),
            C::Control
                | C::Format
                | C::Surrogate
                | C::PrivateUse
                | C::Unassigned
                | C::LineSeparator
                | C::ParagraphSeparator
                | C::SpaceSeparator
        )
}

pub(crate) fn is_alpha(char: char) -> bool {
    use GeneralCategory as C;
    matches!(
        get_general_category(char),
        C::LowercaseLetter
            | C::UppercaseLetter
            | C::TitlecaseLetter
            | C::ModifierLetter
            | C::OtherLetter
    )
}

pub(crate) fn is_decimal(char: char) -> bool {
    get_general_category(char) == GeneralCategory::DecimalNumber
}

/// The value of a decimal digit. The digits of a script follow each other, and so do some scripts' groups of digits.
pub(crate) fn decimal_value(char: char) -> Option<u32> {
    if char.is_ascii_digit() {
        return char.to_digit(10);
    }
    if !is_decimal(char) {
        return None;
    }
    let code = char as u32;
    // Mathematical digits come in five groups that begin at this one.
    let first = if (0x1d7ce..=0x1d7ff).contains(&code) {
        0x1d7ce
    } else {
        let mut first = code;
        while first > 0 && char::from_u32(first - 1).is_some_and(is_decimal) {
            first -= 1;
        }
        first
    };
    Some((code - first) % 10)
}

/// `str.isdigit`: decimal digits, and superscripts and the like.
pub(crate) fn is_digit(char: char) -> bool {
    is_decimal(char)
        || matches!(
            char as u32,
            0xb2 | 0xb3 | 0xb9 | 0x1369..=0x1371 | 0x19da | 0x2070 | 0x2074..=0x2079 | 0x2080..=0x2089
                | 0x2460..=0x2468 | 0x2474..=0x247c | 0x2488..=0x2490 | 0x24ea | 0x24f5..=0x24fd | 0x24ff
                | 0x2776..=0x277e | 0x2780..=0x2788 | 0x278a..=0x2792 | 0x10a40..=0x10a43 | 0x10e60..=0x10e68
                | 0x11052..=0x1105a | 0x1f100..=0x1f10a
        )
}

/// `str.isnumeric`, for all but a few ideographs, which are given here too.
pub(crate) fn is_numeric(char: char) -> bool {
    char.is_numeric() || "〇一二三四五六七八九十百千万億兆零壱弐参".contains(char)
}

/// `str.isalnum`.
pub(crate) fn is_alphanumeric(char: char) -> bool {
    is_alpha(char) || is_decimal(char) || is_digit(char) || is_numeric(char)
}

pub(crate) fn is_titlecase(char: char) -> bool {
    get_general_category(char) == GeneralCategory::TitlecaseLetter
}

/// Whether a letter has a case.
pub(crate) fn is_cased(char: char) -> bool {
    char.is_lowercase() || char.is_uppercase() || is_titlecase(char)
}

/// Adds a character in the form that begins a word.
pub(crate) fn push_title(out: &mut String, char: char) {
    let code = char as u32;
    let single = match code {
        0x1c4..=0x1c6 => Some(0x1c5),
        0x1c7..=0x1c9 => Some(0x1c8),
        0x1ca..=0x1cc => Some(0x1cb),
        0x1f1..=0x1f3 => Some(0x1f2),
        // Georgian has capitals only for words in capitals.
        0x10d0..=0x10fa | 0x10fd..=0x10ff => Some(code),
        0x1f80..=0x1faf => Some(code | 8),
        0x1fb3 | 0x1fbc => Some(0x1fbc),
        0x1fc3 | 0x1fcc => Some(0x1fcc),
        0x1ff3 | 0x1ffc => Some(0x1ffc),
        _ => None,
    };
    if let Some(single) = single {
        out.extend(char::from_u32(single));
        return;
    }
    if char == 'ŉ' {
        out.push_str("ʼN");
        return;
    }
    // Greek vowels keep their small iota, as a mark.
    let with_iota = "ᾲᾴᾷῂῄῇῲῴῷ".contains(char);
    let mut upper = char.to_uppercase();
    if upper.len() == 1 {
        out.extend(upper);
        return;
    }
    if with_iota {
        let capital: Vec<char> = upper.collect();
        out.extend(capital.iter().filter(|char| **char != '\u{399}'));
        out.push('\u{345}');
        return;
    }
    out.extend(upper.next());
    out.extend(upper.flat_map(char::to_lowercase));
}

/// Adds the small form of the character at a place of a text.
pub(crate) fn push_lower(out: &mut String, text: &[char], at: usize) {
    if text[at] != 'Σ' {
        out.extend(text[at].to_lowercase());
        return;
    }
    let is_ignored = |char: &&char| {
        use GeneralCategory as C;
        matches!(
            **char,
            '\'' | '.' | ':' | '·' | '’' | '^' | '`' | '¨' | '¯' | '´' | '¸'
        ) || matches!(
            get_general_category(**char),
            C::NonspacingMark
                | C::EnclosingMark
                | C::Format
                | C::ModifierLetter
                | C::ModifierSymbol
        )
    };
    let before = text[..at].iter().rev().find(|char| !is_ignored(char));
    let after = text[at + 1..].iter().find(|char| !is_ignored(char));
    let is_final =
        before.is_some_and(|char| is_cased(*char)) && !after.is_some_and(|char| is_cased(*char));
    out.push(if is_final { 'ς' } else { 'σ' });
}
