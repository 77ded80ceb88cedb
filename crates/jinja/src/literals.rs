//! Numbers and strings as they are written in a template.

/// The length of the floating-point number at the start of a text, if there is one.
pub(crate) fn float_length(text: &str) -> Option<usize> {
    let whole = digits(text)?;
    let fraction = text[whole..]
        .strip_prefix('.')
        .and_then(digits)
        .map_or(0, |length| length + 1);
    let mantissa = whole + fraction;
    let exponent = text[mantissa..]
        .strip_prefix(['e', 'E'])
        .and_then(|exponent| {
            let unsigned = exponent.strip_prefix(['+', '-']).unwrap_or(exponent);
            Some(1 + exponent.len() - unsigned.len() + digits(unsigned)?)
        });
    match exponent {
        Some(exponent) => Some(mantissa + exponent),
        None => (fraction > 0).then_some(mantissa),
    }
}

/// The length of the integer at the start of a text, which begins with a digit, and its value if it is not too large.
pub(crate) fn integer(text: &str) -> (usize, Option<i128>) {
    let bytes = text.as_bytes();
    for (letters, radix) in [(b"bB", 2), (b"oO", 8), (b"xX", 16)] {
        if bytes[0] == b'0' && bytes.get(1).is_some_and(|letter| letters.contains(letter)) {
            let length = run(&text[2..], true, |byte| (byte as char).is_digit(radix));
            if length > 0 {
                let number = text[2..2 + length].replace('_', "");
                return (length + 2, i128::from_str_radix(&number, radix).ok());
            }
        }
    }
    let length = if bytes[0] == b'0' {
        run(text, false, |byte| byte == b'0')
    } else {
        run(text, false, |byte| byte.is_ascii_digit())
    };
    (length, text[..length].replace('_', "").parse().ok())
}

/// The length of digits with single underscores between them.
fn digits(text: &str) -> Option<usize> {
    let length = run(text, false, |byte| byte.is_ascii_digit());
    (length > 0).then_some(length)
}

/// The length of a run of digits with single underscores between them, or before them too.
fn run(text: &str, may_begin: bool, is_digit: impl Fn(u8) -> bool) -> usize {
    let bytes = text.as_bytes();
    let mut length = 0;
    loop {
        let underscore = bytes.get(length) == Some(&b'_') && (length > 0 || may_begin);
        let digit = length + usize::from(underscore);
        if !bytes.get(digit).is_some_and(|byte| is_digit(*byte)) {
            return length;
        }
        length = digit + 1;
    }
}

/// The text between the quotes of a string, its escapes replaced as Python does.
pub(crate) fn unescaped(text: &str) -> Result<String, String> {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('\\') {
        out.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        let Some(letter) = rest.chars().next() else {
            return Err("a string ends in a backslash".to_owned());
        };
        let after = &rest[letter.len_utf8()..];
        let simple = match letter {
            '\n' => None,
            '\\' | '\'' | '"' => Some(letter),
            'a' => Some('\x07'),
            'b' => Some('\x08'),
            'f' => Some('\x0c'),
            'n' => Some('\n'),
            'r' => Some('\r'),
            't' => Some('\t'),
            'v' => Some('\x0b'),
            'x' | 'u' | 'U' => {
                let length = match letter {
                    'x' => 2,
                    'u' => 4,
                    _ => 8,
                };
                let char = after
                    .get(..length)
                    .filter(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()))
                    .and_then(|digits| u32::from_str_radix(digits, 16).ok())
                    .and_then(char::from_u32);
                let Some(char) = char else {
                    return Err(format!(
                        "'\\{letter}' in a string is not followed by {length} digits of a character"
                    ));
                };
                out.push(char);
                rest = &after[length..];
                continue;
            }
            '0'..='7' => {
                let length = rest
                    .bytes()
                    .take(3)
                    .take_while(|byte| (b'0'..=b'7').contains(byte))
                    .count();
                let code = u32::from_str_radix(&rest[..length], 8).ok();
                out.extend(code.and_then(char::from_u32));
                rest = &rest[length..];
                continue;
            }
            'N' => return Err("'\\N' in a string is not supported: write the character".to_owned()),
            // Python escapes such characters first, and the backslash then escapes the backslash.
            letter if !letter.is_ascii() => {
                let code = letter as u32;
                out.push_str(&match code {
                    0..=0xff => format!("\\x{code:02x}"),
                    0x100..=0xffff => format!("\\u{code:04x}"),
                    _ => format!("\\U{code:08x}"),
                });
                rest = after;
                continue;
            }
            letter => {
                out.push('\\');
                Some(letter)
            }
        };
        out.extend(simple);
        rest = after;
    }
    out.push_str(rest);
    Ok(out)
}
