//! Cost of parsing an output: no guide exceeds its work limits, and the error of one that reaches them names the cause.

mod support;

use inflight_guidance::{GuideSpec, MAX_LOOKUPS};
use inflight_sampling::{GuideTokens, SampleError};
use serde_json::{Value, json};

use support::{Output, compiler, guide};

fn grammar(text: &str) -> GuideSpec {
    GuideSpec::Grammar(text.to_owned())
}

/// A schema of which alternatives refer to the whole.
fn alternatives(options: Vec<Value>) -> GuideSpec {
    GuideSpec::JsonSchema(json!({"$defs": {"a": {"anyOf": options}}, "$ref": "#/$defs/a"}))
}

#[test]
fn no_token_costs_more_than_the_limit_and_an_ambiguous_guide_names_its_cause() {
    let itself = json!({"$ref": "#/$defs/a"});
    let text = json!({"type": "string"});
    let arrays = |num: u64, bounds: &dyn Fn(u64) -> Value| {
        let option = |index| {
            let mut option = bounds(index);
            option["type"] = json!("array");
            option["items"] = itself.clone();
            option
        };
        (0..num)
            .map(option)
            .chain([text.clone()])
            .collect::<Vec<_>>()
    };
    let objects = (0..40).map(|index| {
        let name = format!("k{index}");
        json!({"type": "object", "properties": {"a": itself, "b": itself, name: itself},
               "additionalProperties": itself})
    });
    let compiler = compiler();
    for (name, spec, cause) in [
        (
            "attack",
            grammar(
                "root ::= s\ns ::= [a-zA-Z ,.] | s s | s s s | \"(\" s \")\" | t\nt ::= s t | t s | s | [a-z]",
            ),
            "rule 's'",
        ),
        (
            "pairs and triples",
            grammar("root ::= s\ns ::= [a-zA-Z ,.] | s s | s s s"),
            "write 's ::= [a-zA-Z ,.]+'",
        ),
        (
            "pairs",
            grammar("root ::= s\ns ::= [a-zA-Z ,.] | s s"),
            "write 's ::= [a-zA-Z ,.]+'",
        ),
        (
            "in Lark",
            grammar("start: s\ns: /[a-zA-Z ,.]/ | s s | s s s"),
            "its grammar is ambiguous",
        ),
        (
            "400 equal arrays",
            alternatives(arrays(400, &|_| json!({"minItems": 1}))),
            "400 alternatives",
        ),
        (
            "60 arrays",
            alternatives(arrays(
                60,
                &|index| json!({"minItems": 1, "maxItems": index + 2}),
            )),
            "60 alternatives",
        ),
        (
            "objects and arrays",
            alternatives(
                objects
                    .chain(arrays(40, &|index| json!({"minItems": index})))
                    .collect(),
            ),
            "40 alternatives",
        ),
    ] {
        let guide = match guide(&compiler, spec) {
            Ok(guide) => guide,
            Err(error) => {
                assert!(error.to_string().contains(cause), "{name}: {error}");
                continue;
            }
        };
        let mut output = Output::new(7);
        let mut error = None;
        while error.is_none() && output.tokens.len() < 150 {
            match output.grow(&guide) {
                Ok(true) => {}
                Ok(false) => break,
                Err(found) => error = Some(found),
            }
        }
        println!(
            "{name}: {} tokens, {} look-ups, {error:?}",
            output.tokens.len(),
            guide.max_lookups()
        );
        assert!(
            guide.max_lookups() <= MAX_LOOKUPS,
            "{name}: {} look-ups",
            guide.max_lookups()
        );
        if let Some(error) = error {
            assert_eq!(error, SampleError::GuideTooComplex, "{name}");
            let text = guide.explain(error).unwrap_or(error.to_string());
            assert!(text.contains(cause), "{name}: {text}");
        }
    }
}
