//! Templates give what transformers gives: the text to the character, or an error.

use inflight_jinja::{Limits, Template};
use serde_json::Value;

/// Errors for what transformers renders: refused by name, because it is rare and would need much code.
const REFUSED: [&str; 16] = [
    "object has no slices",
    // Python gives nothing where all is constant, and fails otherwise.
    "slice indices must be integers or None",
    "is too large: use a smaller one",
    "complex numbers are not supported",
    "the tag 'autoescape' is supported only with 'false'",
    "the filter 'random' is not supported",
    "the filter 'urlize' is not supported",
    "the method 'casefold' is supported for ASCII only",
    "the method 'encode' of 'str' is not supported",
    "the method 'maketrans' of 'str' is not supported",
    "batch: 'str' object cannot be interpreted as an integer",
    "a range as a key is not supported",
    "'\\N' in a string is not supported",
    "several slices in an index are not supported",
    "'sameas' is not supported for equal values that may be copies",
    // Python drops what comes after `1 or`.
    "there is no filter 'nofilter'",
];

/// Made by make_fixtures.py; another one that it made, if `JINJA_FIXTURE` names it.
#[test]
fn templates_render_as_in_transformers() {
    let committed = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/rendered.json");
    let path = std::env::var_os("JINJA_FIXTURE").unwrap_or_else(|| committed.into());
    let fixture = std::fs::read_to_string(path).expect("a fixture");
    let fixture: Value = serde_json::from_str(&fixture).expect("well formed");
    let variables = fixture["variables"].as_object().expect("an object");
    let cases = fixture["cases"].as_array().expect("cases");
    let mut differing = String::new();
    let mut num_differing = 0;
    for case in cases {
        let source = case["source"].as_str().expect("a text");
        let rendered = rendered(source, variables);
        let is_alike = match (&rendered, case["text"].as_str()) {
            (Ok(text), Some(expected)) => text == expected,
            (Err(error), Some(_)) => REFUSED.iter().any(|refused| error.contains(refused)),
            (Ok(_), None) => false,
            (Err(_), None) => true,
        };
        if !is_alike {
            num_differing += 1;
            let expected = case.get("text").unwrap_or(&case["raised"]);
            differing.push_str(&format!(
                "{source:?}\n  expected {expected}\n  found    {rendered:?}\n"
            ));
        }
    }
    assert_eq!(num_differing, 0, "{differing}");
    assert!(cases.len() > 1500);
}

fn rendered(source: &str, variables: &serde_json::Map<String, Value>) -> Result<String, String> {
    let template = Template::compile(source).map_err(|error| error.to_string())?;
    let variables = variables.iter().map(|(name, value)| (name.as_str(), value));
    let clock = |_: &str| Err("no clock".to_owned());
    template
        .render(variables, &Limits::default(), &clock)
        .map_err(|error| error.to_string())
}
