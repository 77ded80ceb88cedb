//! "Did you mean": the nearest of a set of known names.

/// A name longer than any slip of one: a client's can be megabytes, and likeness costs their product.
const MAX_LEN: usize = 64;

/// The known name most like `name`, if any is near enough to be what was meant.
pub fn nearest_name<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    if name.len() > MAX_LEN {
        return None;
    }
    let wanted = name.to_ascii_lowercase();
    known
        .into_iter()
        .map(|candidate| {
            (
                strsim::jaro_winkler(&wanted, &candidate.to_ascii_lowercase()),
                candidate,
            )
        })
        .filter(|(likeness, _)| *likeness >= 0.75)
        .max_by(|(a, _), (b, _)| a.total_cmp(b))
        .map(|(_, candidate)| candidate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_nearest_name_within_a_typo() {
        let known = ["max_tokens", "temperature", "top_k", "top_p"];
        assert_eq!(nearest_name("temprature", known), Some("temperature"));
        assert_eq!(nearest_name("MAX_TOKEN", known), Some("max_tokens"));
        assert_eq!(nearest_name("zzz", known), None);
        assert_eq!(nearest_name(&"max_tokens".repeat(1 << 20), known), None);
    }
}
