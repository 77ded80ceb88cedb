//! What the grammars of schemas allow, on a vocabulary of bytes.

use std::sync::Arc;

use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, TokRxInfo, TokTrie};
use llguidance::{ParserFactory, TokenParser};
use serde_json::{Value, json};

use super::{MAX_STEPS, Problem, compiled, of_schema};

/// The grammar of a schema, with a token for each byte and one for the end.
pub(super) struct Bytes(ParserFactory);

pub(super) const END: u32 = 256;

impl Bytes {
    pub fn new() -> Self {
        let mut words: Vec<Vec<u8>> = (0..=255u8).map(|byte| vec![byte]).collect();
        // Bytes that begin no text.
        words[0xFF] = Vec::new();
        words.push(vec![TokTrie::SPECIAL_TOKEN_MARKER, b'e']);
        let trie = TokTrie::from(&TokRxInfo::new(END + 1, END), &words);
        let mut factory = ParserFactory::new_simple(&(Arc::new(ApproximateTokEnv::new(trie)) as _))
            .expect("a vocabulary");
        factory.quiet();
        Self(factory)
    }

    fn parser(&self, schema: &Value) -> TokenParser {
        let grammar = of_schema(schema).unwrap_or_else(|error| panic!("{schema}: {error}"));
        let parser = self.0.create_parser(TopLevelGrammar::from_grammar(grammar));
        let mut parser = parser.unwrap_or_else(|error| {
            panic!(
                "{schema}: {error}\n{}",
                compiled(schema, MAX_STEPS)
                    .map_err(Problem::text)
                    .expect("compiled")
                    .0
            )
        });
        parser.start_without_prompt();
        parser
    }

    /// A parser of a schema, if its grammar is not too complex.
    pub fn parser_or_not(&self, schema: &Value) -> Option<TokenParser> {
        let grammar = of_schema(schema).unwrap_or_else(|error| panic!("{schema}: {error}"));
        let mut parser = self
            .0
            .create_parser(TopLevelGrammar::from_grammar(grammar))
            .ok()?;
        parser.start_without_prompt();
        Some(parser)
    }

    /// Whether a text is allowed, as a whole.
    fn allows(&self, schema: &Value, text: &str) -> bool {
        let mut parser = self.parser(schema);
        for byte in text.bytes() {
            let is_allowed = parser
                .compute_mask()
                .is_ok_and(|mask| mask.is_allowed(u32::from(byte)));
            if !is_allowed || parser.consume_token(u32::from(byte)).is_err() {
                return false;
            }
        }
        parser.is_accepting()
    }
}

#[test]
fn a_schema_allows_its_values_and_no_others() {
    let bytes = Bytes::new();
    let object = |properties: Value| json!({"type": "object", "properties": properties, "additionalProperties": false});
    let all = |mut schema: Value, more: Value| {
        let more = more.as_object().expect("an object").clone();
        schema.as_object_mut().expect("an object").extend(more);
        schema
    };
    for (schema, good, bad) in [
        (
            json!({"enum": ["a", 1, null, {"b": [true]}]}),
            &[r#""a""#, "1", "null", r#"{"b":[true]}"#][..],
            &["2", r#""b""#, "[]"][..],
        ),
        (
            json!({"const": 9007199254740993u64}),
            &["9007199254740993"],
            &["9007199254740992", "9007199254740994"],
        ),
        (
            json!({"type": "integer", "minimum": 9007199254740993u64, "maximum": 9007199254740995u64}),
            &["9007199254740993", "9007199254740995"],
            &["9007199254740992", "9007199254740996"],
        ),
        (
            json!({"type": "number", "exclusiveMinimum": 0, "maximum": 1.5}),
            &["0.5", "1.5", "1"],
            &["0", "0.0", "1.51", "-1"],
        ),
        (
            json!({"type": "integer", "exclusiveMinimum": true, "minimum": 3}),
            &["4"],
            &["3"],
        ),
        (
            json!({"type": "number", "multipleOf": 0.01}),
            &["1.25", "-3", "0.1"],
            &["1.255"],
        ),
        (
            json!({"type": "integer", "multipleOf": 7}),
            &["0", "7", "-14", "700"],
            &["8", "-1"],
        ),
        (
            json!({"type": "integer", "multipleOf": 7, "minimum": 10, "maximum": 30}),
            &["14", "28"],
            &["7", "35", "15"],
        ),
        (
            json!({"type": "number", "multipleOf": 2.5, "minimum": 0, "maximum": 6}),
            &["0", "2.5", "5"],
            &["2", "7.5"],
        ),
        (
            json!({"type": "integer", "not": {"enum": [2, 3]}, "minimum": 1, "maximum": 4}),
            &["1", "4"],
            &["2", "3"],
        ),
        (
            json!({"type": "string", "format": "password"}),
            &[r#""x""#],
            &["1"],
        ),
        (
            json!({"type": "string", "format": "date"}),
            &[r#""2024-02-29""#],
            &[r#""2023-02-29""#],
        ),
        (
            json!({"type": "string", "minLength": 2, "maxLength": 3, "pattern": "^é"}),
            &[r#""éa""#, r#""éab""#],
            &[r#""é""#, r#""éabc""#, r#""ab""#],
        ),
        (
            json!({"type": "string", "pattern": "^(?=.*[0-9])[a-z0-9]{3}$"}),
            &[r#""ab1""#],
            &[r#""abc""#],
        ),
        (
            json!({"type": "string", "not": {"const": "a\n"}}),
            &[r#""b""#, r#""a""#],
            &[r#""a\n""#],
        ),
        (
            json!({"type": "string", "enum": ["a", "b"], "not": {"const": "a"}}),
            &[r#""b""#],
            &[r#""a""#],
        ),
        (
            object(json!({"a": {"type": "null"}, "b": true})),
            &[
                "{}",
                r#"{"a":null}"#,
                r#"{"b":[1,{"c":2}]}"#,
                r#"{"a":null,"b":1}"#,
            ],
            &[r#"{"c":1}"#, r#"{"a":1}"#, "{,}"],
        ),
        (
            json!({"type": "object", "required": ["x"], "maxProperties": 2}),
            &[r#"{"x":1}"#, r#"{"x":1,"y":2}"#],
            &["{}", r#"{"x":1,"y":2,"z":3}"#],
        ),
        (
            all(
                object(json!({"a": true, "b": true, "c": true})),
                json!({"minProperties": 2}),
            ),
            &[r#"{"a":1,"c":1}"#, r#"{"a":1,"b":1,"c":1}"#],
            &["{}", r#"{"b":1}"#],
        ),
        (
            all(
                object(json!({"a": true, "b": true, "c": true})),
                json!({"maxProperties": 1, "required": ["b"]}),
            ),
            &[r#"{"b":1}"#],
            &[r#"{"a":1,"b":1}"#],
        ),
        // Both schemas hold for a name that a pattern matches too.
        (
            all(
                object(json!({"score": {"enum": [1, "x"]}})),
                json!({"patternProperties": {"^score$": {"type": "integer"}}}),
            ),
            &[r#"{"score":1}"#, "{}"],
            &[r#"{"score":"x"}"#],
        ),
        (
            json!({"type": "object", "patternProperties": {"^a": {"type": "integer"}, "b$": {"minimum": 5}}, "additionalProperties": false}),
            &[r#"{"ab":6}"#, r#"{"a":1}"#, r#"{"b":7,"xb":"y"}"#],
            &[r#"{"ab":4}"#, r#"{"ab":"x"}"#, r#"{"c":1}"#],
        ),
        (
            all(
                object(json!({"kind": {"const": "a"}})),
                json!({"propertyNames": {"maxLength": 3}}),
            ),
            &["{}"],
            &[r#"{"kind":"a"}"#],
        ),
        (
            json!({"type": "object", "propertyNames": {"pattern": "^x"}, "additionalProperties": {"const": 1}}),
            &[r#"{"xy":1}"#],
            &[r#"{"y":1}"#],
        ),
        (
            json!({"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": true}),
            &["[]", "[2,1]", "[3,1,2]"],
            &["[1,1]", "[1,2,1]"],
        ),
        (
            json!({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2}),
            &["[1]", "[1,2]"],
            &["[]", "[1,2,3]"],
        ),
        (
            json!({"type": "array", "prefixItems": [{"type": "null"}, {"const": 1}], "items": false}),
            &["[]", "[null]", "[null,1]"],
            &["[1]", "[null,1,2]"],
        ),
        (
            json!({"type": "array", "items": [{"type": "null"}], "additionalItems": {"const": 2}}),
            &["[]", "[null,2,2]"],
            &["[2]", "[null,1]"],
        ),
        (
            json!({"type": "array", "items": {"type": "integer"}, "contains": {"minimum": 5}}),
            &["[7]", "[7,1]"],
            &["[]", "[1]", "[\"a\"]"],
        ),
        (
            json!({"type": "array", "contains": {"const": 1}, "minContains": 2, "maxContains": 2}),
            &["[1,1]", "[1,1,2]"],
            &["[1]", "[1,1,1]"],
        ),
        (
            json!({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 2}]}),
            &["1", "2.5"],
            &["3"],
        ),
        (
            json!({"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}], "properties": {"a": {"const": 1}, "b": {"const": 2}}, "additionalProperties": false}),
            &[r#"{"a":1}"#, r#"{"b":2}"#],
            &["{}", r#"{"a":1,"b":2}"#],
        ),
        (
            json!({"properties": {"a": {"enum": [1, 2]}, "b": true}, "required": ["a"], "type": "object", "additionalProperties": false,
                "if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}}),
            &[r#"{"a":2}"#, r#"{"a":1,"b":0}"#],
            &[r#"{"a":1}"#],
        ),
        (
            all(
                object(json!({"a": true, "b": true})),
                json!({"dependentRequired": {"a": ["b"]}}),
            ),
            &["{}", r#"{"b":1}"#, r#"{"a":1,"b":1}"#],
            &[r#"{"a":1}"#],
        ),
        (
            all(
                object(json!({"a": true, "b": true})),
                json!({"dependentSchemas": {"a": {"properties": {"b": {"const": 1}}}}}),
            ),
            &[r#"{"b":2}"#, r#"{"a":1,"b":1}"#],
            &[r#"{"a":1,"b":2}"#],
        ),
        (
            json!({"type": "object", "allOf": [{"properties": {"a": {"const": 1}}}, {"properties": {"b": {"const": 2}}}], "unevaluatedProperties": false}),
            &[r#"{"a":1,"b":2}"#, "{}"],
            &[r#"{"c":1}"#],
        ),
        (
            json!({"$ref": "#/$defs/list", "$defs": {"list": {"type": "object", "properties": {"next": {"$ref": "#/$defs/list"}}, "additionalProperties": false}}}),
            &["{}", r#"{"next":{"next":{}}}"#],
            &[r#"{"next":1}"#],
        ),
        (
            json!({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"enum": [3]}}}),
            &["3"],
            &["4"],
        ),
        (
            json!({"$ref": "#/$defs/F%3CB%3E", "$defs": {"F<B>": {"enum": [3]}}, "description": "x", "title": "y"}),
            &["3"],
            &["4"],
        ),
        (
            json!({"type": ["string", "null"], "maxLength": 1}),
            &["null", r#""a""#],
            &[r#""ab""#, "1"],
        ),
        (
            json!({"anyOf": [{"type": "string"}, {"type": "null"}], "default": null}),
            &["null", r#""a""#],
            &["1"],
        ),
        (json!(true), &["1", "[]", r#"{"a":[{}]}"#, "-1.5e3"], &["x"]),
    ] {
        for text in good {
            assert!(
                bytes.allows(&schema, text),
                "{schema}: {text}\n{}",
                compiled(&schema, MAX_STEPS)
                    .map_err(Problem::text)
                    .expect("compiled")
                    .0
            );
        }
        for text in bad {
            assert!(!bytes.allows(&schema, text), "{schema}: {text}");
        }
        assert_eq!(
            compiled(&schema, MAX_STEPS)
                .map_err(Problem::text)
                .expect("compiled")
                .1,
            Vec::<String>::new(),
            "{schema}"
        );
    }
}

#[test]
fn what_leads_to_no_end_is_not_offered() {
    let bytes = Bytes::new();
    let endless = json!({"type": "object", "properties": {"x": {"$ref": "#/$defs/endless"}}, "required": ["x"]});
    let defs = json!({"endless": endless});
    for (schema, good, bad) in [
        (
            json!({"anyOf": [{"$ref": "#/$defs/endless"}, {"const": 1}], "$defs": defs}),
            "1",
            "{",
        ),
        (
            json!({"type": "object", "properties": {"a": {"$ref": "#/$defs/endless"}, "b": true}, "additionalProperties": false, "$defs": defs}),
            "{}",
            "{\"a",
        ),
        (
            json!({"type": "array", "items": {"$ref": "#/$defs/endless"}, "$defs": defs}),
            "[]",
            "[{",
        ),
        (
            json!({"anyOf": [{"type": "string", "pattern": "^a", "format": "date"}, {"const": 1}]}),
            "1",
            "\"",
        ),
        (
            json!({"type": "object", "properties": {"a": {"type": "integer", "minimum": 3, "maximum": 2}}, "additionalProperties": false}),
            "{}",
            "{\"",
        ),
        (
            json!({"type": "object", "patternProperties": {"^a$": true}, "additionalProperties": false, "properties": {"a": false}}),
            "{}",
            "{\"",
        ),
    ] {
        assert!(bytes.allows(&schema, good), "{schema}");
        let mut parser = bytes.parser(&schema);
        let (last, first) = bad.as_bytes().split_last().expect("a text");
        for byte in first {
            let mask = parser.compute_mask().expect("a mask");
            if !mask.is_allowed(u32::from(*byte)) {
                break;
            }
            parser.consume_token(u32::from(*byte)).expect("allowed");
        }
        let mask = parser.compute_mask();
        assert!(
            !mask.is_ok_and(|mask| mask.is_allowed(u32::from(*last))),
            "{schema}"
        );
    }
    for schema in [
        endless.clone(),
        json!(false),
        json!({"type": "string", "enum": [1]}),
        json!({"allOf": [{"type": "null"}, {"type": "array"}]}),
    ] {
        let schema = match schema.get("properties") {
            Some(_) => json!({"$ref": "#/$defs/endless", "$defs": {"endless": schema}}),
            None => schema,
        };
        let error = of_schema(&schema).expect_err("no value");
        assert!(error.contains("no value is valid"), "{error}");
    }
}

#[test]
fn what_cannot_be_enforced_is_listed_or_refused() {
    for (schema, place) in [
        (
            json!({"type": "array", "uniqueItems": true}),
            "'uniqueItems' at '#'",
        ),
        (
            json!({"properties": {"a": {"type": "string", "pattern": r"\bfox\b"}}}),
            "'pattern' at '#/properties/a'",
        ),
        (
            json!({"type": "string", "pattern": "(a)\\1"}),
            "'pattern' at '#'",
        ),
        (json!({"not": {"format": "date"}}), "'not' at '#'"),
        (
            json!({"anyOf": [{"oneOf": [{"type": "string"}, {"format": "date", "type": "string"}]}]}),
            "'oneOf' at '#/anyOf/0'",
        ),
        (
            json!({"if": {"uniqueItems": true}, "then": false}),
            "'if' at '#'",
        ),
        (
            json!({"type": "object", "minProperties": 3}),
            "'minProperties' at '#'",
        ),
    ] {
        let (_, left_out) = compiled(&schema, MAX_STEPS)
            .map_err(Problem::text)
            .unwrap_or_else(|error| panic!("{schema}: {error}"));
        assert_eq!(left_out, [place], "{schema}");
        let mut strict = schema.clone();
        strict["x-guidance"] = json!({"lenient": false});
        let error = of_schema(&strict).expect_err("strict");
        assert!(error.contains(place), "{error}");
    }
}

#[test]
fn a_reference_that_leads_back_to_itself_is_refused() {
    let deep = (0..3_000).map(|n| {
        (
            format!("d{n}"),
            json!({"$ref": format!("#/$defs/d{}", n + 1)}),
        )
    });
    let mut deep: serde_json::Map<_, _> = deep.collect();
    deep.insert("d3000".to_owned(), json!({"type": "null"}));
    let mut closed = deep.clone();
    closed.insert("d3000".to_owned(), json!({"$ref": "#/$defs/d0"}));
    for (schema, is_circular) in [
        (json!({"$ref": "#"}), true),
        (
            json!({"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
            true,
        ),
        (
            json!({"allOf": [{"type": "object"}, {"allOf": [{"$ref": "#"}]}]}),
            true,
        ),
        (json!({"$ref": "#/$defs/d0", "$defs": deep}), false),
        (json!({"$ref": "#/$defs/d0", "$defs": closed}), true),
        (json!({"properties": {"next": {"$ref": "#"}}}), false),
        (json!({"anyOf": [{"type": "null"}, {"$ref": "#"}]}), false),
        (
            json!({"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"type": "null"}}}),
            false,
        ),
    ] {
        let error = of_schema(&schema).err();
        let found = error
            .as_ref()
            .is_some_and(|it| it.contains("leads back to itself"));
        assert_eq!(found, is_circular, "{error:?}");
        assert_eq!(error.is_some(), is_circular, "{error:?}");
    }
}

#[test]
fn bounds_of_machine_numbers_are_bounds() {
    let bytes = Bytes::new();
    for (schema, good, bad) in [
        (
            json!({"type": "number", "minimum": f64::MIN, "maximum": f64::MAX}),
            "1e99",
            "x",
        ),
        (
            json!({"type": "number", "maximum": 3.4028234663852886e38}),
            "340282346638528859999999999999999999999.5",
            "340282346638528870000000000000000000000",
        ),
        (
            json!({"type": "integer", "minimum": i64::MIN, "maximum": i64::MAX}),
            "9223372036854775807",
            "9223372036854775808",
        ),
        (
            json!({"type": "integer", "maximum": u64::MAX}),
            "18446744073709551615",
            "18446744073709551616",
        ),
    ] {
        assert!(bytes.allows(&schema, good), "{schema}: {good}");
        assert!(!bytes.allows(&schema, bad), "{schema}: {bad}");
    }
    let lost: Value = serde_json::from_str("{\"const\": 12345678901234567890123}").expect("JSON");
    let error = of_schema(&lost).expect_err("digits are lost");
    assert!(error.contains("more digits than are kept"), "{error}");
}

#[test]
fn a_keyword_that_is_null_says_nothing() {
    let bytes = Bytes::new();
    let keywords = [
        "enum",
        "pattern",
        "items",
        "not",
        "if",
        "properties",
        "additionalProperties",
        "required",
        "oneOf",
        "$ref",
        "title",
    ];
    for keyword in keywords {
        let schema = json!({"type": "string", keyword: null});
        assert!(
            bytes.allows(&schema, "\"a\"") && !bytes.allows(&schema, "1"),
            "{keyword}"
        );
    }
    assert!(bytes.allows(&json!({"const": null}), "null"));
}
