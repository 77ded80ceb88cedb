//! Guides that are invalid, too large, or designed to be slow: an error of their own request.

use std::time::Instant;

use inflight_base::RequestError;
use inflight_guidance::{GuideSpec, MAX_LOOKUPS, Structure};
use inflight_sampling::{FinishReason, GuideTokens as _, SampleError};
use serde_json::{Value, json};

use crate::support::{MODEL, Request, roomy, serve};

fn grammar(text: &str) -> GuideSpec {
    GuideSpec::Grammar(text.to_owned())
}

fn regex(text: &str) -> GuideSpec {
    GuideSpec::Regex(text.to_owned())
}

#[test]
fn a_bad_guide_is_rejected_with_the_reason() {
    for (spec, words) in [
        (GuideSpec::JsonSchema(json!({"type": "strnig"})), "strnig"),
        (
            GuideSpec::JsonSchema(json!({"$ref": "http://localhost/x.json"})),
            "ref",
        ),
        (
            GuideSpec::JsonSchema(json!({"$ref": "file:///etc/passwd"})),
            "ref",
        ),
        (
            GuideSpec::JsonSchema(json!({"$ref": "#/$defs/a", "$defs": {
                "a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}})),
            "its '$ref' to '#/$defs/a' leads back to itself",
        ),
        (
            GuideSpec::JsonSchema(
                json!({"type": "array", "items": {"allOf": [{"$ref": "#/items"}]}}),
            ),
            "its '$ref' to '#/items' leads back to itself",
        ),
        (
            GuideSpec::JsonSchema(json!({"anyOf": [{"$ref": "#"}, {"$ref": "#/anyOf/0"}]})),
            "matches no text",
        ),
        (regex("[a&&b]c"), "matches no text"),
        (grammar("root ::= root"), "matches no text"),
        (
            GuideSpec::JsonSchema(json!({"type": "string", "pattern": "("})),
            "regex",
        ),
        (
            GuideSpec::JsonSchema(
                json!({"not": {"multipleOf": 3}, "x-guidance": {"lenient": false}}),
            ),
            "'not' at '#'",
        ),
        (GuideSpec::JsonSchema(Value::Bool(false)), "nsatisfiable"),
        (regex("a("), "regex"),
        (regex("(?=a)b"), "look-around"),
        (regex(r"(a)\1"), "backreferences"),
        (grammar("start: missing"), "missing"),
        (grammar("start: \"a"), "cannot be used"),
        (grammar("start: a\na: A\nA: B\nB: A"), "circular"),
        (grammar("start: @other"), "other"),
        (grammar("%import python.NAME\nstart: NAME"), "python.NAME"),
        (grammar("root ::= \"a\" other"), "no rule 'other'"),
    ] {
        let refused = MODEL.guide(spec.clone());
        let error = refused.expect_err(&format!("{spec:?}: {words}"));
        let RequestError::Invalid(text) = &error else {
            panic!("{spec:?}: {error:?}");
        };
        assert!(text.contains(words), "{spec:?}: {text}");
        assert!(text.len() < 600 && !text.contains("<state>"), "{text}");
    }
}

/// Each tries to make the compiler slow, to overflow its stack, or to use much memory. The work of each is bounded by
/// counts: of the compiler, so that the test ends, and of each token.
#[test]
fn a_hostile_guide_compiles_or_fails_within_its_work() {
    let chain = |len: usize| {
        let links = (0..len).map(|n| format!("T{n}: T{}\n", n + 1));
        format!("start: T0\n{}T{len}: \"a\"\n", links.collect::<String>())
    };
    let doubling = |len: usize| {
        let links = (0..len).map(|n| format!("T{n}: T{0} T{0}\n", n + 1));
        format!("start: T0\n{}T{len}: /[a-z]+/\n", links.collect::<String>())
    };
    let nullable_doubling = |len: usize| doubling(len).replace('+', "?");
    let rules = |len: usize| {
        let links = (0..len).map(|n| format!("r{n}: r{} r{}\n", (n + 1) % len, (n * 7) % len));
        format!("start: r0\n{}", links.collect::<String>())
    };
    let any_of: Vec<Value> = (0..40)
        .map(|n| {
            let options = (0..8)
                .map(|m| json!({"type": "object", "properties": {format!("p{n}"): {"const": m}}}));
            json!({"anyOf": options.collect::<Vec<_>>()})
        })
        .collect();
    let nested = (0..100).fold(
        json!({"type": "null"}),
        |inner, _| json!({"type": "array", "items": inner}),
    );
    let properties: serde_json::Map<String, Value> = (0..2000)
        .map(|n| {
            (
                format!("p{n}"),
                json!({"type": "string", "pattern": format!("a{{{n}}}")}),
            )
        })
        .collect();
    let structure = |format: Value| {
        let tag = json!({"type": "structural_tag", "format": format});
        GuideSpec::Structure(Structure::of_json(&tag).expect("of a supported form"))
    };
    let triggered = |triggers: Vec<String>, content: Value| {
        let tags: Vec<_> = triggers
            .iter()
            .map(|it| json!({"begin": it, "content": content, "end": it}))
            .collect();
        structure(json!({"type": "triggered_tags", "triggers": triggers, "tags": tags}))
    };
    let any_text = json!({"type": "any_text"});
    let deep = |kind: &str| {
        let inside = |inner, _| json!({"type": kind, "content": inner, "begin": "", "end": ""});
        structure((0..100).fold(json!({"type": "any_text"}), inside))
    };
    let long = (0..1000).map(|n| format!("{:<50}", n * 7919)).collect();
    let specs = [
        triggered(long, any_text.clone()),
        triggered(vec!["ab".repeat(30_000)], any_text.clone()),
        triggered(
            (1..200).map(|n| "a".repeat(n)).collect(),
            json!({"type": "json_schema", "json_schema": {}}),
        ),
        deep("star"),
        deep("tag"),
        structure(json!({"type": "sequence", "elements": vec![any_text; 1000]})),
        regex(&"(".repeat(2_000)),
        regex(&"a?b?".repeat(500)),
        regex(&format!("x{}", "[^a]?".repeat(400))),
        regex(&format!("{}a{}", "(".repeat(200), ")".repeat(200))),
        regex("((a{1,1000}){1,1000}){1,1000}"),
        regex("(.{0,500}a.{0,500}b){50}"),
        regex(&"(a|b|ab|ba)*".repeat(150)),
        regex(r"(\w|\p{L}|\d){1,5000}"),
        grammar(&nullable_doubling(60)),
        grammar(&nullable_doubling(10)),
        grammar(&format!("root ::= {}", "[^a]? ".repeat(400))),
        grammar(&format!(
            "root ::= {}\n{}\nr9 ::= \"a\"?",
            "r0",
            (0..9)
                .map(|n| format!("r{n} ::= r{0} r{0} r{0}\n", n + 1))
                .collect::<String>()
        )),
        grammar(&format!(
            "start: {}\"a\"{}",
            "(".repeat(30_000),
            ")".repeat(30_000)
        )),
        grammar(&chain(1_000)),
        grammar(&doubling(60)),
        grammar(&rules(1_000)),
        grammar(&format!("root ::= {}\"a\"", "\"a\"? ".repeat(3_000))),
        grammar("root ::= (((\"a\"{0,9999}){0,9999}){0,9999}){0,9999} | root"),
        grammar("root ::= root | root root | \"\""),
        GuideSpec::JsonSchema(json!({ "allOf": any_of })),
        GuideSpec::JsonSchema(nested),
        GuideSpec::JsonSchema(json!({"type": "object", "properties": properties})),
        GuideSpec::JsonSchema(json!({"type": "string", "minLength": 1_000_000_000})),
        GuideSpec::JsonSchema(json!({"type": "array", "minItems": 1_000_000_000, "items": {}})),
        GuideSpec::Choice(vec!["a".repeat(60_000)]),
        GuideSpec::Choice((0..1000).map(|n| format!("{:a<60}", n * 7919)).collect()),
    ];
    for spec in specs {
        let name: String = format!("{spec:?}").chars().take(60).collect();
        let outcome = MODEL.grammar_guide(spec);
        eprintln!("{name}: {}", outcome.is_ok());
        let Ok(guide) = outcome else { continue };
        let mut generated = Vec::new();
        for _ in 0..20 {
            let mut logits = vec![0.0; MODEL.source.spec().vocab_size];
            let restricted = guide.restrict(&mut logits, &generated);
            let num_lookups = guide.max_lookups();
            assert!(num_lookups <= MAX_LOOKUPS, "{name}: {num_lookups} look-ups");
            let allowed = logits.iter().rposition(|logit| *logit == 0.0);
            match (restricted, allowed) {
                (Ok(()), Some(token)) => generated.push(token as u32),
                _ => break,
            }
        }
    }
}

/// Each can be derived in more and more ways the longer the output is. The work that a token may take ends them, not a
/// time.
#[test]
fn an_ambiguous_grammar_ends_with_the_reason_and_the_same_way_each_time() {
    for text in [
        "root ::= s\ns ::= [a-zA-Z ,.] | s s | s s s | \"(\" s \")\" | t\nt ::= s t | t s | s | [a-z]",
        "root ::= s\ns ::= [a-zA-Z ,.] | s s | s s s",
    ] {
        let fails_after = || {
            let guide = MODEL.guide(grammar(text)).expect("it compiles");
            let mut request = Request::guided("Once upon a time", guide, 3);
            request.sampling.temperature = 1.0;
            request.max_new_tokens = 200;
            let answer = serve(&mut MODEL.manager(roomy(), 1), &[request])
                .0
                .remove(0);
            (answer.tokens.len(), answer.reason)
        };
        let (num_tokens, reason) = fails_after();
        let too_complex = FinishReason::Error(SampleError::GuideTooComplex);
        assert_eq!(reason, too_complex, "{text}: {num_tokens} tokens");
        assert!((1..200).contains(&num_tokens), "{text}: {num_tokens}");
        assert_eq!(fails_after(), (num_tokens, reason), "{text}");
        let reason = SampleError::GuideTooComplex.to_string();
        assert!(reason.contains("ambiguous"), "{reason}");
    }
}

#[test]
fn a_request_without_an_end_token_cannot_be_guided() {
    let error = MODEL
        .compiler
        .compile(regex("a"), Vec::new(), Instant::now());
    let error = error.err().expect("refused").to_string();
    assert!(error.contains("ignore_eos"), "{error}");
}
