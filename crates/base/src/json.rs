//! JSON as Python writes it.

use std::borrow::Cow;

use serde_json::Value;

/// Python's spellings of numbers that JSON lacks, and their replacements: the largest number for an infinity, and a
/// string for NaN, so that a field that needs a number refuses it by name.
const CONSTANTS: [(&str, &str); 3] = [
    ("-Infinity", "-1.7976931348623157e308"),
    ("Infinity", "1.7976931348623157e308"),
    ("NaN", "\"NaN\""),
];

/// Parses JSON that may have `NaN`, `Infinity` and `-Infinity`.
///
/// # Errors
/// It is not even such JSON.
pub fn parse_json(text: &str) -> serde_json::Result<Value> {
    serde_json::from_str(text).or_else(|error| match without_constants(text) {
        Cow::Borrowed(_) => Err(error),
        Cow::Owned(text) => serde_json::from_str(&text),
    })
}

/// The text with other values for [`CONSTANTS`] outside of strings.
fn without_constants(text: &str) -> Cow<'_, str> {
    let mut changed = String::new();
    let (mut copied, mut at, mut is_in_string) = (0, 0, false);
    while let Some(&byte) = text.as_bytes().get(at) {
        match byte {
            b'"' => is_in_string = !is_in_string,
            b'\\' if is_in_string => at += 1,
            b'-' | b'I' | b'N' if !is_in_string => {
                let found = CONSTANTS
                    .iter()
                    .find(|(name, _)| text.as_bytes()[at..].starts_with(name.as_bytes()));
                if let Some((name, value)) = found {
                    changed += &text[copied..at];
                    changed += value;
                    at += name.len();
                    copied = at;
                    continue;
                }
            }
            _ => {}
        }
        at += 1;
    }
    match copied {
        0 => Cow::Borrowed(text),
        _ => Cow::Owned(changed + &text[copied..]),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn constants_of_python_are_read_outside_of_strings() {
        let text = r#"{"a": NaN, "b": [-Infinity, Infinity,1], "NaN \" Infinity": "x\\", "c": "-Infinity"}"#;
        let expected = json!({
            "a": "NaN", "b": [f64::MIN, f64::MAX, 1], "NaN \" Infinity": "x\\", "c": "-Infinity",
        });
        assert_eq!(parse_json(text).expect("read"), expected);
    }

    #[test]
    fn what_is_no_json_is_refused() {
        for text in [
            "",
            "{",
            "nan",
            "Inf",
            "{\"a\": Infinit}",
            "[NaNa]",
            "\"\\",
            "Infinity-",
        ] {
            assert!(parse_json(text).is_err(), "{text}");
        }
    }
}
