//! Python's `datetime.now().strftime(format)`.

use std::fmt::Write as _;

use chrono::{DateTime, Local};

/// Directives that `chrono` writes as Python does.
const DIRECTIVES: &str = "aAbBcCdDeFgGhHIjklmMnpPrRsStTuUVwWxXyY%";

/// Formats the time of now.
///
/// # Errors
/// The format has a directive that is not supported.
pub(super) fn now(format: &str) -> Result<String, String> {
    formatted(&Local::now(), format)
}

fn formatted(time: &DateTime<Local>, format: &str) -> Result<String, String> {
    let mut out = String::new();
    let mut rest = format;
    while let Some(at) = rest.find('%') {
        out.push_str(&rest[..at]);
        let directive = &rest[at + 1..];
        // Numbers without padding, with spaces, or with zeros.
        let padded = directive.strip_prefix(['-', '_', '0']);
        let after = padded.unwrap_or(directive);
        let letter = after.chars().next().unwrap_or(' ');
        let length = directive.len() - after.len() + letter.len_utf8();
        match letter {
            'f' if padded.is_none() => {
                let micros = time.timestamp_subsec_micros() % 1_000_000;
                out.push_str(&format!("{micros:06}"));
            }
            // The time of now has no zone in Python.
            'z' | 'Z' if padded.is_none() => {}
            _ if DIRECTIVES.contains(letter) => {
                let directive = &rest[at..=at + length];
                if write!(out, "{}", time.format(directive)).is_err() {
                    return Err(format!("'{directive}' is not a directive of a time format"));
                }
            }
            _ => {
                let found: String = rest[at..].chars().take(3).collect();
                return Err(format!("'{found}' is not a directive of a time format"));
            }
        }
        rest = &directive[length..];
    }
    out.push_str(rest);
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use chrono::TimeZone as _;

    #[test]
    fn times_are_formatted_as_in_python() {
        let time = Local.with_ymd_and_hms(2024, 3, 5, 9, 7, 2);
        let time = time.earliest().expect("a time");
        for (format, expected) in [
            ("%Y-%m-%d", "2024-03-05"),
            ("%d %B %Y é", "05 March 2024 é"),
            ("%b %-d, %A %j %U %y %%", "Mar 5, Tuesday 065 09 24 %"),
            ("%H:%M:%S %I %p %P", "09:07:02 09 AM am"),
            ("%x|%X|%c", "03/05/24|09:07:02|Tue Mar  5 09:07:02 2024"),
            ("%e|%k|%l|%_d|%-m|%-H", " 5| 9| 9| 5|3|9"),
            ("%G-%V-%u %w %W %g %C", "2024-10-2 2 10 24 20"),
            (
                "%D %F %R %T %r %h",
                "03/05/24 2024-03-05 09:07 09:07:02 09:07:02 AM Mar",
            ),
            ("%f|%z|%Z|%n%t", "000000|||\n\t"),
            ("", ""),
        ] {
            assert_eq!(
                formatted(&time, format).as_deref(),
                Ok(expected),
                "{format}"
            );
        }
    }

    #[test]
    fn microseconds_have_six_digits() {
        let time = DateTime::from_timestamp(0, 45_678_901).expect("a time");
        let time = time.with_timezone(&Local);
        assert_eq!(formatted(&time, "%f").as_deref(), Ok("045678"));
        // A leap second is the second before it, with more than a million of them.
        let time = DateTime::from_timestamp(59, 1_000_002_000).expect("a time");
        let time = time.with_timezone(&Local);
        assert_eq!(formatted(&time, "%f").as_deref(), Ok("000002"));
    }

    #[test]
    fn other_directives_are_refused() {
        for format in [
            "%", "a%", "%Q", "%-", "%é", "%+", "%-f", "%-z", "%_Z", "%5d", "%Ey",
        ] {
            let error = formatted(&Local::now(), format).expect_err(format);
            assert!(error.contains("is not a directive"), "{error}");
        }
    }
}
