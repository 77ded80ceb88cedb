//! Structural tags: the texts that they allow, and random outputs.

use inflight_guidance::{GuideSpec, Structure};
use serde_json::{Value, json};

use crate::support::{MODEL, Request, roomy, serve};

fn spec(value: &Value) -> GuideSpec {
    GuideSpec::Structure(Structure::of_json(value).expect("supported"))
}

fn format(format: Value) -> GuideSpec {
    spec(&json!({"type": "structural_tag", "format": format}))
}

/// Where a guide stops to allow a text, in bytes; the length of the text if it may end there; more if it must go on.
fn accepted(spec: &GuideSpec, text: &str) -> usize {
    let guide = MODEL.guide(spec.clone()).expect("a good guide");
    let tokens = MODEL.tokenizer.encode(text, false).expect("tokens");
    let is_allowed = |num_tokens: usize, next: u32| {
        let mut logits = vec![0.0; MODEL.source.spec().vocab_size];
        let restricted = guide.0.restrict(&mut logits, &tokens[..num_tokens]);
        restricted.expect("computed");
        logits[next as usize] == 0.0
    };
    for (i, &token) in tokens.iter().enumerate() {
        if !is_allowed(i, token) {
            return MODEL.text(&[], &tokens[..i]).len();
        }
    }
    let end_id = MODEL.source.end_ids()[0];
    text.len() + usize::from(!is_allowed(tokens.len(), end_id))
}

#[track_caller]
fn check(spec: &GuideSpec, good: &[&str], bad: &[&str]) {
    for text in good {
        assert_eq!(accepted(spec, text), text.len(), "{text}");
    }
    for text in bad {
        assert_ne!(accepted(spec, text), text.len(), "{text}");
    }
}

const SCHEMA: &str = r#"{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false}"#;

fn schema() -> Value {
    serde_json::from_str(SCHEMA).expect("JSON")
}

#[test]
fn triggers_begin_tags_in_free_text() {
    let old = spec(&json!({
        "structures": [
            {"begin": "<f=one>", "schema": schema(), "end": "</f>"},
            {"begin": "<f=other>", "schema": {"type": "boolean"}, "end": "</f>"},
        ],
        "triggers": ["<f="],
    }));
    check(
        &old,
        &[
            "",
            "No tag here, <f or </f>.",
            "So <f=one>{\"a\": 1}</f> and\n<f=other>true</f>",
            "<f=other>false</f>.",
        ],
        &[
            "<f=",
            "So <f=none>1</f>",
            "<f=one>{\"a\": 1}",
            "<f=one>{\"b\": 1}</f>",
            "<f=one>{\"a\": 1}</f> <f=x",
        ],
    );
}

#[test]
fn tags_can_be_required_and_the_last_thing() {
    let tags = |at_least_one: bool, stop_after_first: bool| {
        let content = json!({"type": "json_schema", "json_schema": schema()});
        format(json!({
            "type": "triggered_tags", "triggers": ["<f>"], "at_least_one": at_least_one, "stop_after_first": stop_after_first,
            "tags": [{"begin": "<f>", "content": content, "end": ["</f>", "</g>"]}],
        }))
    };
    let (one, text) = ("<f>{\"a\": 1}</f>", "so ");
    let two = format!("{one} {one}");
    let behind = format!("{text}{one}");
    check(
        &tags(true, true),
        &[one, "<f>{\"a\": 1}</g>"],
        &["", &two, &behind, text],
    );
    check(&tags(true, false), &[one, &two], &["", &behind, text]);
    check(
        &tags(false, true),
        &[one, &behind, text, ""],
        &[&two, "so <f>"],
    );
    check(
        &tags(false, false),
        &[one, &two, &behind, text, ""],
        &["so <f>"],
    );
}

#[test]
fn formats_are_put_together() {
    let number = json!({"type": "regex", "pattern": "[0-9]+"});
    let list = format(json!({"type": "sequence", "elements": [
        {"type": "const_string", "value": "[\"x\"/"},
        {"type": "tags_with_separator", "separator": ", ", "at_least_one": false, "stop_after_first": false,
         "tags": [{"begin": "a", "content": number, "end": ""}, {"begin": "b", "content": number, "end": "!"}]},
        {"type": "or", "elements": [
            {"type": "const_string", "value": "]"},
            {"type": "grammar", "grammar": "root ::= \"(\" root? \")\""},
        ]},
        {"type": "optional", "content": {"type": "const_string", "value": "."}},
    ]}));
    check(
        &list,
        &["[\"x\"/]", "[\"x\"/a1, b2!, a3]", "[\"x\"/(())."],
        &[
            "[\"x\"/a1 b2!]",
            "[\"x\"/a1,]",
            "[\"x\"/(()",
            "[\"x\"/]..",
            "[x/]",
        ],
    );
    let repeated =
        format(json!({"type": "plus", "content": {"type": "const_string", "value": "ab"}}));
    check(&repeated, &["ab", "ababab"], &["", "aba"]);
    let quoted = format(
        json!({"type": "tag", "begin": "<", "content": {"type": "any_text"}, "end": [">", "]"]}),
    );
    check(&quoted, &["<a b>", "<]"], &["<a", "<a> b", "<a> >"]);
}

#[test]
fn a_special_token_is_itself_and_no_free_text() {
    let tags = format(json!({
        "type": "triggered_tags", "triggers": ["<|user|>"], "at_least_one": false, "stop_after_first": false,
        "tags": [{"begin": "<|user|>f", "content": {"type": "any_text"}, "end": "<|assistant|>"}],
    }));
    check(
        &tags,
        &[
            "so",
            "so <|user|>fox and<|assistant|>.",
            "<|user|>f<|assistant|><|user|>f<|assistant|>",
        ],
        &[
            "so <|user|>",
            "<|user|>fox",
            "<|assistant|>",
            "<|user|>x<|assistant|>",
        ],
    );
    let whole = format(json!({"type": "sequence", "elements": [
        {"type": "any_text"}, {"type": "const_string", "value": ":<|user|>"}, {"type": "any_text"},
    ]}));
    check(
        &whole,
        &["a:<|user|>b:", ":<|user|>"],
        &["a<|user|>b", "a:b"],
    );
}

#[test]
fn random_outputs_have_a_tag_behind_each_trigger() {
    let spec = spec(&json!({
        "structures": [{"begin": " the<", "schema": {"type": "integer", "minimum": 0, "maximum": 99}, "end": ">"}],
        "triggers": [" the"],
    }));
    let requests: Vec<_> = (0..24)
        .map(|seed| {
            let guide = MODEL.guide(spec.clone()).expect("a good guide");
            let mut request = Request::guided("Once upon a time,", guide, seed);
            request.max_new_tokens = 60;
            request
        })
        .collect();
    let (answers, _) = serve(&mut MODEL.manager(roomy(), 2), &requests);
    let tag = regex::Regex::new("^ the(<[0-9]{1,2}>|<?[0-9]{0,2}$)").expect("good");
    let mut num_tags = 0;
    for answer in answers {
        for (start, _) in answer.text.match_indices(" the") {
            assert!(tag.is_match(&answer.text[start..]), "{}", answer.text);
            num_tags += 1;
        }
    }
    assert!(num_tags > 10, "{num_tags}");
}
