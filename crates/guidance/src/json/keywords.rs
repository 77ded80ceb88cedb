//! The keywords of JSON Schema, and what becomes of each.

/// The keywords that say what a value must be.
pub(super) const ASSERTIONS: [&str; 44] = [
    "$ref",
    "$dynamicRef",
    "$recursiveRef",
    "additionalItems",
    "additionalProperties",
    "allOf",
    "anyOf",
    "const",
    "contains",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "else",
    "enum",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "format",
    "if",
    "items",
    "maxContains",
    "maxItems",
    "maxLength",
    "maxProperties",
    "maximum",
    "minContains",
    "minItems",
    "minLength",
    "minProperties",
    "minimum",
    "multipleOf",
    "not",
    "oneOf",
    "pattern",
    "patternProperties",
    "prefixItems",
    "properties",
    "propertyNames",
    "required",
    "then",
    "type",
    "unevaluatedItems",
    "unevaluatedProperties",
    "uniqueItems",
    "x-guidance",
];

/// The keywords that are not enforced in every form.
pub(super) const PERHAPS_LEFT_OUT: [&str; 11] = [
    "contains",
    "if",
    "maxContains",
    "maxProperties",
    "minProperties",
    "multipleOf",
    "not",
    "oneOf",
    "pattern",
    "patternProperties",
    "uniqueItems",
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json::formats;

    const PAGE: &str = include_str!("../../../../docs/src/json-schema.md");

    /// The names in the first column of rows whose second begins with one of some words, or of all rows.
    fn names(words: &[&str]) -> Vec<&'static str> {
        let rows = PAGE.lines().filter_map(|line| line.strip_prefix("| `"));
        let rows = rows.filter_map(|row| row.split_once(" | "));
        let rows = rows.filter(|(_, text)| words.iter().any(|word| text.starts_with(word)));
        let names = rows.flat_map(|(names, _)| names.split(", "));
        names.map(|name| name.trim_matches('`')).collect()
    }

    #[test]
    fn the_page_says_what_becomes_of_each_keyword() {
        let all = names(&[""]);
        for keyword in ASSERTIONS.iter().filter(|it| **it != "x-guidance") {
            let count = all.iter().filter(|name| *name == keyword).count();
            assert_eq!(count, 1, "{keyword} has {count} rows");
        }
        let in_part = names(&["in part", "narrowed: what must be contained"]);
        for keyword in PERHAPS_LEFT_OUT {
            assert!(in_part.contains(&keyword), "{keyword} may be left out");
        }
        for format in formats::ENFORCED {
            assert!(PAGE.contains(&format!("`{format}`")), "{format}");
        }
    }
}
