//! The formats of texts that are enforced. Every other one is a note for people, as JSON Schema has it.
//!
//! The expressions match no text that the specification forbids, and leave out rare ones that it allows, such as leap
//! seconds.

/// The expression of a format, for the whole text; `None` if it is not enforced.
pub(super) fn regex(format: &str) -> Option<String> {
    const TIME: &str = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+\-](?:[01][0-9]|2[0-3]):[0-5][0-9])";
    // RFC 3339. The 29th of February is in years that are multiples of 4 and not of 100, or of 400.
    let date = || {
        let leap =
            "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)";
        format!(
            "(?:[0-9]{{4}}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|\
             02-(?:0[1-9]|1[0-9]|2[0-8]))|{leap}-02-29)"
        )
    };
    let label = "[a-zA-Z0-9](?:[a-zA-Z0-9]|-[a-zA-Z0-9]){0,30}";
    let hostname = format!(r"{label}(?:\.{label}){{0,5}}");
    let byte = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])";
    let ipv4 = format!(r"(?:{byte}\.){{3}}{byte}");
    Some(match format {
        "date" => date(),
        "time" => TIME.to_owned(),
        "date-time" => format!("{}T{TIME}", date()),
        // ISO 8601, as in RFC 3339, appendix A.
        "duration" => {
            let number = "[0-9]{1,9}";
            let time = format!(
                "T(?:{number}H(?:{number}M(?:{number}S)?)?|{number}M(?:{number}S)?|{number}S)"
            );
            let day = format!("{number}D");
            let month = format!("{number}M(?:{day})?");
            let year = format!("{number}Y(?:{month})?");
            format!("P(?:(?:{year}|{month}|{day})(?:{time})?|{time}|{number}W)")
        }
        "email" => {
            let atom = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~\\-]{1,20}";
            format!(r"{atom}(?:\.{atom}){{0,2}}@{label}(?:\.{label}){{1,3}}")
        }
        "hostname" => hostname,
        "ipv4" => ipv4,
        "ipv6" => {
            let group = "[0-9a-fA-F]{1,4}";
            let mut forms = vec![format!("(?:{group}:){{7}}{group}")];
            // Zeros left out behind `before` groups.
            forms.extend((0..=6).map(|before| {
                let head = match before {
                    0 => String::new(),
                    1 => group.to_owned(),
                    _ => format!("{group}(?::{group}){{{}}}", before - 1),
                };
                let tail = match 6 - before {
                    0 => group.to_owned(),
                    more => format!("{group}(?::{group}){{0,{more}}}"),
                };
                format!("{head}::(?:{tail})?")
            }));
            format!("(?:{})", forms.join("|"))
        }
        "uuid" => "[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}".to_owned(),
        "uri" => {
            let char = r"(?:[a-zA-Z0-9._~!$&'()*+,;=:@\-]|%[0-9a-fA-F]{2})";
            let host = format!("(?:{hostname}|{ipv4})");
            let rest = format!(r"(?:/{char}*)*(?:\?(?:{char}|[/?])*)?(?:#(?:{char}|[/?])*)?");
            format!(r"[a-zA-Z][a-zA-Z0-9+.\-]*:(?://{host}(?::[0-9]{{1,5}})?{rest}|{char}+{rest})")
        }
        _ => return None,
    })
}

/// The formats that are enforced.
#[cfg(test)]
pub(super) const ENFORCED: [&str; 10] = [
    "date",
    "time",
    "date-time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_match_what_the_specifications_allow() {
        for (format, good, bad) in [
            (
                "date",
                &["2024-02-29", "2000-02-29", "1999-12-31"][..],
                &["2023-02-29", "1900-02-29", "2024-04-31", "2024-13-01"][..],
            ),
            (
                "time",
                &["00:00:00Z", "23:59:59.5+01:00"],
                &["24:00:00Z", "12:00:00", "12:00Z"],
            ),
            (
                "date-time",
                &["2024-02-29T10:00:00Z"],
                &["2024-02-29", "2024-02-30T10:00:00Z"],
            ),
            (
                "duration",
                &["P1Y2M3D", "PT5M", "P3W", "P1DT1H"],
                &["P", "PT", "P1Y3W", "1D"],
            ),
            (
                "email",
                &["a.b+c@example.com"],
                &["a", "a@", ".a@b.c", "a..b@b.c"],
            ),
            (
                "hostname",
                &["example.com", "a-b.c"],
                &["-a.b", "a..b", "a-"],
            ),
            (
                "ipv4",
                &["0.0.0.0", "255.249.199.9"],
                &["256.0.0.0", "01.0.0.0", "1.2.3"],
            ),
            (
                "ipv6",
                &[
                    "::",
                    "::1",
                    "1::",
                    "2001:db8::8a2e:370:7334",
                    "1:2:3:4:5:6:7:8",
                ],
                &[":::", "1::2::3", "1:2:3:4:5:6:7:8:9", "12345::"],
            ),
            (
                "uuid",
                &["123e4567-e89b-12d3-a456-426614174000"],
                &["123e4567e89b12d3a456426614174000"],
            ),
            (
                "uri",
                &["https://example.com/a?b#c", "urn:a:b", "mailto:a@b.c"],
                &["example.com", "//a", "http://a b"],
            ),
        ] {
            let regex = regex(format).expect("enforced");
            let whole = regex::Regex::new(&format!("^(?:{regex})$")).expect("good");
            good.iter()
                .for_each(|text| assert!(whole.is_match(text), "{format}: {text}"));
            bad.iter()
                .for_each(|text| assert!(!whole.is_match(text), "{format}: {text}"));
        }
        assert!(ENFORCED.iter().all(|format| regex(format).is_some()));
        assert_eq!(regex("password"), None);
    }
}
