//! Random outputs of the demo model, checked by independent validators.

use inflight_guidance::GuideSpec;
use inflight_sampling::{FinishReason, SampleError, SamplingParams};
use serde_json::{Value, json};

use crate::support::{MODEL, Request, roomy, serve};

const PROMPTS: [&str; 4] = [
    "Once upon a time, there was a brave fox named Finn.",
    "<|user|>Tell me a story about a penguin.<|assistant|>",
    "Answer in JSON:",
    "The end.",
];

/// The outputs of `num` requests with the same guide and different seeds.
fn outputs(spec: GuideSpec, num: u64, seed: u64) -> Vec<String> {
    let guide = |_| MODEL.guide(spec.clone()).expect("a good guide");
    let requests: Vec<Request> = (seed..seed + num)
        .map(|seed| Request::guided(PROMPTS[seed as usize % 4], guide(seed), seed))
        .collect();
    let (answers, _) = serve(&mut MODEL.manager(roomy(), 2), &requests);
    let texts = answers.into_iter().map(|answer| {
        assert_eq!(
            answer.reason,
            FinishReason::EndId,
            "{spec:?}: {}",
            answer.text
        );
        answer.text
    });
    texts.collect()
}

/// Schemas of all kinds, with outputs that are short enough for the demo model.
fn schemas() -> Vec<Value> {
    vec![
        json!({"type": "object", "required": ["name", "age"], "additionalProperties": false, "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "is_fox": {"type": "boolean"},
        }}),
        json!({"type": "array", "minItems": 1, "maxItems": 4,
               "items": {"type": "number", "minimum": -10, "maximum": 10.5}}),
        json!({"enum": ["red", "green", 3, null, {"a": [1, true]}]}),
        json!({"type": "string", "pattern": "^[A-Z][a-z]{1,8}( [A-Z][a-z]{1,8})?$"}),
        json!({"type": "string", "format": "date"}),
        json!({"anyOf": [{"type": "boolean"}, {"type": "string", "minLength": 2, "maxLength": 6},
                         {"type": "array", "items": {"type": "null"}, "maxItems": 2}]}),
        json!({"$ref": "#/$defs/tree", "$defs": {
            "tree": {"type": "object", "required": ["value"], "additionalProperties": false, "properties": {
                "value": {"type": "integer", "minimum": -9, "maximum": 9},
                "left": {"$ref": "#/$defs/leaf"}, "right": {"$ref": "#/$defs/leaf"}}},
            "leaf": {"anyOf": [{"type": "null"}, {"type": "object", "additionalProperties": false,
                     "required": ["value"], "properties": {"value": {"const": 0}}}]}}}),
        // Keys are as unrestricted as the values of `additionalProperties`, and may be longer than an answer.
        json!({"type": "object", "patternProperties": {"^[a-z]{1,9}$": {"type": "integer", "minimum": 0, "maximum": 99}},
               "additionalProperties": false, "maxProperties": 3, "x-guidance": {"whitespace_flexible": false}}),
        json!({"allOf": [{"type": "object", "required": ["id"],
                          "properties": {"id": {"type": "string", "format": "uuid"}}},
                         {"properties": {"id": true, "tags": {"type": "array", "maxItems": 3,
                          "items": {"enum": ["a", "b c", "d\"e"]}}}, "additionalProperties": false}]}),
        json!({"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 1000}),
    ]
}

#[test]
fn two_hundred_outputs_match_their_schemas() {
    let mut num_valid = 0;
    for (index, schema) in schemas().into_iter().enumerate() {
        let options = jsonschema::options();
        let validator = options.should_validate_formats(true).build(&schema);
        let validator = validator.expect("a schema");
        let texts = outputs(
            GuideSpec::JsonSchema(schema.clone()),
            20,
            1000 * index as u64,
        );
        let mut different = texts.clone();
        for text in texts {
            let value: Value =
                serde_json::from_str(&text).unwrap_or_else(|error| panic!("{text}: {error}"));
            if let Err(error) = validator.validate(&value) {
                panic!("{schema}: {text}: {error}");
            }
            num_valid += 1;
        }
        different.sort();
        different.dedup();
        assert!(
            different.len() > 2,
            "{different:?}: the guide leaves the model a choice"
        );
    }
    assert_eq!(num_valid, 200);
}

#[test]
fn white_space_in_json_is_one_space_or_a_line_break_with_indentation() {
    let schema = |layout: Value| {
        json!({"type": "array", "minItems": 3, "maxItems": 5, "x-guidance": layout,
               "items": {"type": "integer", "minimum": 0, "maximum": 9}})
    };
    let plain =
        json!({"type": "array", "minItems": 3, "maxItems": 5, "items": {"enum": [1, 2, 3]}});
    let blanks = |schema: Value| -> Vec<String> {
        let guide = MODEL.guide(GuideSpec::JsonSchema(schema)).expect("good");
        let request = |seed| {
            let mut request = Request::guided(PROMPTS[2], guide.0.fresh(), seed);
            // Biases make the model prefer white space.
            request.sampling.logit_bias = blank_tokens().map(|token| (token, 30.0)).collect();
            request
        };
        let requests: Vec<Request> = (0..10).map(request).collect();
        let (answers, _) = serve(&mut MODEL.manager(roomy(), 1), &requests);
        let runs = answers.into_iter().flat_map(|answer| {
            assert_eq!(answer.reason, FinishReason::EndId, "{}", answer.text);
            serde_json::from_str::<Value>(&answer.text).expect("JSON");
            let runs = answer.text.split(|char: char| !char.is_ascii_whitespace());
            let runs = runs.filter(|run| !run.is_empty());
            runs.map(str::to_owned).collect::<Vec<_>>()
        });
        runs.collect()
    };
    let layout = regex::Regex::new(r"^( |\r?\n[ \t]{0,20})$").expect("a regular expression");
    // Combined with other keywords of the schema.
    for schema in [plain, schema(json!({"item_separator": ","}))] {
        let runs = blanks(schema);
        assert!(runs.len() > 50, "{runs:?}");
        let odd = runs.iter().find(|run| !layout.is_match(run));
        assert_eq!(odd, None, "{runs:?}");
    }
    assert_eq!(
        blanks(schema(json!({"whitespace_flexible": false}))).len(),
        0
    );
    let own = blanks(schema(json!({"whitespace_pattern": "  "})));
    assert!(
        own.len() > 50 && own.iter().all(|run| run == "  "),
        "{own:?}"
    );
}

/// The demo model's tokens that consist of white space only.
fn blank_tokens() -> impl Iterator<Item = u32> {
    let is_blank = |token: &u32| {
        let text = MODEL.text(&[], &[*token]);
        !text.is_empty() && text.trim().is_empty()
    };
    (0..MODEL.source.spec().vocab_size as u32).filter(is_blank)
}

#[test]
fn json_without_a_schema_is_an_object_or_an_array() {
    let short = |spec: GuideSpec| {
        let requests: Vec<Request> = (0..10)
            .map(|seed| {
                let mut request =
                    Request::guided(PROMPTS[2], MODEL.guide(spec.clone()).expect("good"), seed);
                // An unrestricted JSON text need not end: a bias makes the closing token likely.
                let mut bias = [(closing("}"), 12.0), (closing("]"), 12.0)];
                bias.sort_by_key(|(token, _)| *token);
                request.sampling.logit_bias = bias.into();
                request
            })
            .collect();
        serve(&mut MODEL.manager(roomy(), 1), &requests).0
    };
    for (spec, may_be_array) in [(GuideSpec::Json, true), (GuideSpec::JsonObject, false)] {
        for answer in short(spec) {
            assert_eq!(answer.reason, FinishReason::EndId, "{}", answer.text);
            let value: Value = serde_json::from_str(&answer.text).expect("JSON");
            assert!(
                value.is_object() || may_be_array && value.is_array(),
                "{value}"
            );
        }
    }
}

fn closing(text: &str) -> u32 {
    MODEL.tokenizer.encode(text, false).expect("a token")[0]
}

#[test]
fn outputs_match_their_regular_expressions() {
    for regex in [
        r"[0-9]{3}-[0-9]{4}",
        r"^(yes|no), (Finn|Mia|Tom) [a-z]{1,10}\.$",
        r"(?i)abc[^x]?",
        r"\d{1,3}(\.\d{1,3}){3}",
        r"é{2}|🦊/雪",
    ] {
        let whole = regex::Regex::new(&format!("^(?:{regex})$")).expect("a regular expression");
        for text in outputs(GuideSpec::Regex(regex.to_owned()), 10, 0) {
            assert!(whole.is_match(&text), "{regex}: {text}");
        }
    }
}

#[test]
fn outputs_are_one_of_their_choices() {
    let choices = [
        "yes",
        "yes, but",
        "no",
        "",
        "[1]",
        "a|b",
        "\"quoted\" \\ /",
        "雪",
        "two\nlines",
    ];
    let choices = choices.map(str::to_owned).to_vec();
    let mut seen: Vec<String> = outputs(GuideSpec::Choice(choices.clone()), 60, 0);
    for text in &seen {
        assert!(choices.contains(text), "{text:?}");
    }
    seen.sort();
    seen.dedup();
    assert!(seen.len() >= 4, "{seen:?}");
    let only = outputs(GuideSpec::Choice(vec!["a fox".to_owned()]), 2, 0);
    assert_eq!(only, ["a fox", "a fox"]);
}

#[test]
fn outputs_match_their_grammars_in_every_notation() {
    let lark = "start: expr\nexpr: term ((\"+\" | \"-\") term)~0..3\nterm: NUMBER | \"(\" expr \")\"\nNUMBER: /[0-9]{1,2}/\n";
    let ebnf = "root ::= expr # a sum\nexpr ::= term ([+-] term){0,3}\nterm ::= number | \"(\" expr \")\"\nnumber ::= [0-9]{1,2}\n";
    for grammar in [lark, ebnf] {
        for text in outputs(GuideSpec::Grammar(grammar.to_owned()), 15, 7) {
            assert_eq!(after_sum(text.as_bytes()), Some(&b""[..]), "{text}");
        }
    }
    let flat = "root ::= (\"the \" | \"a \") animal (\" \" [^a-z\\n]{1,3})?\nanimal ::= \"fox\" | \"fo\" \"al\"? \"x\"{0,2}";
    let whole =
        regex::Regex::new(r"^(the |a )(fox|fo(al)?x{0,2})( [^a-z\n]{1,3})?$").expect("good");
    for text in outputs(GuideSpec::Grammar(flat.to_owned()), 15, 7) {
        assert!(whole.is_match(&text), "{text}");
    }
}

/// The rest of a text after a sum as defined by those grammars.
fn after_sum(text: &[u8]) -> Option<&[u8]> {
    let mut rest = after_term(text)?;
    for _ in 0..3 {
        match rest.split_first() {
            Some((b'+' | b'-', after)) => rest = after_term(after)?,
            _ => break,
        }
    }
    Some(rest)
}

fn after_term(text: &[u8]) -> Option<&[u8]> {
    if let Some(inner) = text.strip_prefix(b"(") {
        return after_sum(inner)?.strip_prefix(b")");
    }
    let num_digits = text
        .iter()
        .take(2)
        .take_while(|byte| byte.is_ascii_digit())
        .count();
    (num_digits > 0).then(|| &text[num_digits..])
}

/// A guide that only permits "ab" and "abc".
fn short_choice() -> GuideSpec {
    GuideSpec::Choice(vec!["ab".to_owned(), "abc".to_owned()])
}

fn one(change: impl FnOnce(&mut SamplingParams)) -> (String, FinishReason) {
    let mut request = Request::guided(PROMPTS[0], MODEL.guide(short_choice()).expect("good"), 0);
    change(&mut request.sampling);
    let (mut answers, _) = serve(&mut MODEL.manager(roomy(), 1), &[request]);
    let answer = answers.remove(0);
    (answer.text, answer.reason)
}

#[test]
fn a_guide_combines_with_other_options_or_the_request_fails_with_the_reason() {
    let end_id = MODEL.source.end_ids()[0];
    let greedy = one(|sampling| sampling.temperature = 0.0);
    assert_eq!(greedy.1, FinishReason::EndId);
    let top = one(|sampling| (sampling.top_k, sampling.top_p) = (1, 0.1));
    assert_eq!(top, greedy);
    // Only the longer choice is left.
    let long = one(|sampling| sampling.logit_bias = [(end_id, -1000.0)].into());
    assert_eq!(long, ("abc".to_owned(), FinishReason::EndId));
    let spelled: Vec<u32> = MODEL.tokenizer.encode("ab", false).expect("tokens");
    let bad = one(|sampling| sampling.bad_words = [spelled.clone()].into());
    assert!(
        ["ab", "abc"].contains(&bad.0.as_str()),
        "it is encoded with other tokens"
    );
    // No token is allowed.
    let none = FinishReason::Error(SampleError::NoneAllowed);
    let held = one(|sampling| sampling.min_tokens = 10);
    assert_eq!(held.1, none);
    let letters = (0..MODEL.source.spec().vocab_size as u32).map(|token| vec![token]);
    let forbidden = one(|sampling| sampling.bad_words = letters.collect());
    assert_eq!(forbidden, (String::new(), none));
}
