//! "Did you mean": the known name nearest to a mistyped one.

/// Maximum length of a name to compare, in bytes. Longer than any plausible typo: a client's name can have megabytes,
/// and the comparison takes time in proportion to the product of both lengths.
const MAX_LEN: usize = 64;

/// The known name most similar to `name`. None if no name is similar enough to be a typo.
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
        .filter(|(similarity, _)| *similarity >= 0.75)
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
